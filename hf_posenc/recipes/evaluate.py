"""Measures any checkpoint on any text: patched, stock, or a LoRA adapter on either.

    accelerate launch recipes/evaluate.py --model me/gpt2-alibi --data book.txt --eval-lengths 512 1024 2048
    python recipes/evaluate.py --model gpt2 --data book.txt        # the stock model, for comparison

Both perplexities, bits per byte, loss by position and retrieval go to OUTPUT (JSON) and, as a table, to the screen. With
`accelerate launch` the windows are spread over the processes; the numbers do not depend on how many there are.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_posenc

from . import corpus, measuring, program
from .corpus import DataArguments
from .measuring import MeasuringArguments, measure_model
from .models import ModelArguments, check_vocabulary, count, load
from .options import UsageError, one_of, parse
from .results import origin, write_json

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Arguments(ModelArguments, DataArguments, MeasuringArguments):
    """What to measure, and on which text."""

    adapter: str | None = field(default=None, metadata={"help": "LoRA adapter to load onto it"})
    dtype: str = field(default="float32", metadata={"help": "of the weights: " + " | ".join(DTYPES)})
    output: str = field(default="runs/evaluation.json", metadata={"help": "file to write"})


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measures and returns what it wrote."""
    arguments, parser = parse(Arguments, argv, __doc__.split("\n")[0])
    try:
        return run(arguments)
    except (UsageError, hf_posenc.HfPosencError) as error:
        parser.error(str(error))


def run(arguments: Arguments) -> dict[str, Any]:
    """The beginning of the text is measured, at most --eval-tokens of it: nothing is trained, nothing is held out."""
    if arguments.model is None:
        raise UsageError("--model DIR_OR_ID is missing")
    corpus.check(arguments, needs_data=True)
    measuring.check(arguments)
    one_of(arguments, "dtype", DTYPES)
    if Path(arguments.output).is_dir():
        raise UsageError(f"--output {arguments.output} is a folder, name a file")
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    load(AutoConfig, arguments.model)
    model = load(AutoModelForCausalLM, arguments.model, dtype=getattr(torch, arguments.dtype))
    if arguments.adapter:
        try:
            model = hf_posenc.load_adapter(model, arguments.adapter).merge_and_unload()
        except (OSError, ValueError) as error:
            raise UsageError(f"--adapter {arguments.adapter}: {error}") from None
    model.to(accelerator.device).eval()
    tokenizer = load(AutoTokenizer, arguments.model)
    with accelerator.main_process_first():
        documents = corpus.documents(tokenizer, arguments, None, arguments.eval_tokens)
    documents = corpus.cut(documents, tokenizer, arguments.eval_tokens)
    check_vocabulary(model, documents)
    measuring.check_text(documents, arguments)
    rows, cells = measure_model(model, documents, arguments, accelerator)
    results = {
        **origin("evaluate", arguments, accelerator),
        "model": {
            "name": arguments.model,
            "model_type": model.config.model_type,
            "parameters": count(model),
            "scheme": " + ".join(scheme.name for scheme in hf_posenc.schemes_of(model)) or None,
        },
        "measured": rows,
        "retrieval": cells,
    }
    if accelerator.is_main_process:
        write_json(Path(arguments.output), results)
    accelerator.print(table(rows) + f"\n\nresults     {arguments.output}")
    return results


def table(rows: list[dict[str, Any]]) -> str:
    """Both perplexities by length; lower is better."""
    lines = [f"{'context':>10}  {'sliding window':>16} {'non-overlapping':>16} {'bits per byte':>14}"]
    for row in rows:
        if "impossible" in row:
            lines.append(f"{row['length']:>10}  - ({row['impossible']})")
        else:
            bits = f"{row['bits_per_byte']:.3f}" if row["bits_per_byte"] is not None else "-"
            sliding, fresh = row["sliding"]["perplexity"], row["non_overlapping"]["perplexity"]
            lines.append(f"{row['length']:>10}  {sliding:>16.3f} {fresh:>16.3f} {bits:>14}")
    return "\n".join(lines)


if __name__ == "__main__":
    program.start(main)
