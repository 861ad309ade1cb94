"""Measures a checkpoint at several context lengths: patched or stock, with or without a LoRA adapter, on any text.

    hf-posenc evaluate --model runs/gpt2-alibi/model --data BOOK.txt
    accelerate launch -m hf_posenc.recipes.evaluate --model meta-llama/Llama-3.2-1B --data BOOK.txt --dtype bfloat16

Both perplexities, bits per byte, loss by position and retrieval are written to --json, and printed as a table.
With `accelerate launch` several processes share the work, and the numbers are the same.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_posenc

from ..evaluation import measure_recurrence
from ..evaluation.recurrence import check_memory
from . import corpus, measurements, models, program, text_measurements
from .corpus import Document
from .measurements import HeldOutArguments
from .models import DeviceArguments, ModelArguments, check_vocabulary, count_weights, load_named
from .options import Checkpoint, Count, File, UsageError, as_usage_error, parse
from .results import Results, origin, write_json
from .text_measurements import FarTextArguments

EXAMPLES = """
  {prog} --model runs/gpt2-alibi/model --data book.txt --lengths 512 1024 2048
  {prog} --model gpt2 --data chapters.jsonl --packing documents --json gpt2.json
  accelerate launch -m hf_posenc.recipes.evaluate --model meta-llama/Llama-3.2-1B --data book.txt --dtype bfloat16
"""


@dataclass
class Arguments(ModelArguments, DeviceArguments, HeldOutArguments, FarTextArguments):
    """This recipe.

    Args:
        adapter: LoRA adapter to load into the model.
        memory: also read segments of every length with a memory of this many tokens.
        json: JSON file to write, with all numbers.
    """

    dtype: Annotated[str, models.DTYPES] = "float32"
    adapter: Checkpoint | None = None
    memory: Count | None = None
    json: File = field(default="runs/evaluation.json", metadata={"was": "output"})


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Measure a checkpoint and return the content of `--json`."""
    argv = with_option_names(sys.argv[1:] if argv is None else argv)
    arguments, parser = parse(Arguments, argv, __doc__, prog=prog, examples=EXAMPLES)
    with program.ending(parser, "the same command", lambda: "Nothing was written: the same command begins again."):
        return run(arguments)


def with_option_names(words: list[str]) -> list[str]:
    """Insert --model and --data where a checkpoint and text files come first, as in version 0.1.0."""
    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    inserted = [*(["--model", words[0]] if first else []), *(["--data", *words[1:first]] if first > 1 else [])]
    return [*inserted, *words[first:]]


def run(arguments: Arguments) -> Results:
    """Measure a checkpoint on the first --eval-tokens of the text, and write the numbers."""
    if arguments.model is None:
        raise UsageError("--model DIR_OR_ID is missing")
    corpus.check(arguments, needs_data=True)
    measurements.check(arguments)
    text_measurements.check(arguments)
    models.check(arguments)
    if Path(arguments.json).is_dir():
        raise UsageError(f"--json {arguments.json} is a folder, name a file")
    accelerator, device = models.accelerator_and_device(arguments)
    load_named(AutoConfig, arguments)
    accelerator.print(f"Loading {arguments.model}")
    model = load_named(AutoModelForCausalLM, arguments, dtype=models.dtype_of(arguments))
    if arguments.adapter:
        with as_usage_error(f"--adapter {arguments.adapter}: ", OSError, ValueError):
            model = hf_posenc.load_adapter(model, arguments.adapter).merge_and_unload()
    model.to(device).eval()
    if arguments.memory is not None:
        with as_usage_error("--memory: ", ValueError):
            check_memory(model)
    tokenizer = load_named(AutoTokenizer, arguments)
    with accelerator.main_process_first():
        documents = corpus.documents(tokenizer, arguments, None, arguments.eval_tokens)
    documents = corpus.cut(documents, tokenizer, arguments.eval_tokens)
    check_vocabulary(model, documents)
    measurements.check_text(documents, arguments)
    tokens = sum(len(document.tokens) for document in documents)
    accelerator.print(f"Measuring {tokens:,} tokens at every length, on {device}")
    far_text = text_measurements.measure(model, documents, arguments.lengths, arguments, accelerator)
    accelerator.print(TABLE_HEAD)
    rows = measurements.perplexities(
        model, documents, arguments, accelerator, on_row=lambda row: accelerator.print(table_row(row), flush=True)
    )
    if arguments.memory is not None:
        add_recurrence(model, documents, arguments, accelerator, rows)
    results = {
        **origin("evaluate", arguments, accelerator),
        "model": {
            "name": arguments.model,
            "model_type": model.config.model_type,
            "parameters": count_weights(model),
            "scheme": " + ".join(scheme.name for scheme in hf_posenc.schemes_of(model)) or None,
        },
        "measured": rows,
        "retrieval": measurements.retrieval(model, arguments, accelerator),
        **far_text,
    }
    if accelerator.is_main_process:
        write_json(Path(arguments.json), results)
    accelerator.print(f"\nresults     {arguments.json}")
    return results


def add_recurrence(
    model: nn.Module, documents: list[Document], arguments: Arguments, accelerator: Accelerator, rows: list[Results]
) -> None:
    """Add to every row the perplexity of segments, with and without a memory of the segment before."""
    for row in rows:
        if "impossible" in row:
            continue
        row["recurrence"] = []
        for memory in (0, arguments.memory or 0):
            segments = measure_recurrence(
                model,
                [document.tokens for document in documents],
                segment=row["length"],
                memory=memory,
                byte_counts=[document.bytes for document in documents],
                progress=accelerator.is_main_process,
            )
            row["recurrence"].append(segments.to_dict())
            accelerator.print(
                f"{row['length']:>10}  segments with a memory of {segments.memory}: "
                f"{segments.perplexity.perplexity:.3f}, {segments.bits_per_byte:.3f} bits per byte, "
                f"{segments.tokens_per_second:,.0f} tokens per second"
            )


TABLE_HEAD = f"{'context':>10}  {'sliding window':>16} {'non-overlapping':>16} {'bits per byte':>14}"


def table_row(row: Results) -> str:
    """Return the row of a length in the printed table: both perplexities and bits per byte. Lower is better."""
    if "impossible" in row:
        return f"{row['length']:>10}  - ({row['impossible']})"
    bits = f"{row['bits_per_byte']:.3f}" if row["bits_per_byte"] is not None else "-"
    sliding, non_overlapping = row["sliding"]["perplexity"], row["non_overlapping"]["perplexity"]
    return f"{row['length']:>10}  {sliding:>16.3f} {non_overlapping:>16.3f} {bits:>14}"


if __name__ == "__main__":
    program.start(main)
