"""Measures a checkpoint at several context lengths: patched or stock, with or without a LoRA adapter, on any text.

Both perplexities, bits per byte, loss by position and --measures are written to --json, and printed as tables.
With `accelerate launch` several processes share the work, and the numbers are the same.

Examples:
  hf-posenc evaluate --model runs/gpt2-alibi/model --data book.txt --lengths 512 1024 2048
  hf-posenc evaluate --model gpt2 --data chapters.jsonl --packing documents --json gpt2.json
  accelerate launch -m hf_posenc.recipes.evaluate --model meta-llama/Llama-3.2-1B --data book.txt --dtype bfloat16
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc

from ..core.command_arguments import Dtype
from . import corpus, measurements, models, program
from .measurements import HeldOutArguments
from .models import ModelArguments, load
from .options import UsageError, as_usage_error, parse
from .results import Results, origin, table, write_json
from .run_report import METHODS, bits_per_byte, measure_rows, perplexities


@dataclass(kw_only=True)
class Arguments(ModelArguments, HeldOutArguments):
    """The evaluation.

    Args:
        adapter: LoRA adapter to load into the model.
        dtype: dtype of the weights; auto is the dtype they were saved in.
        json: JSON file to write, with all numbers.
    """

    model: str = field()
    data: list[str] = field()
    adapter: str | None = None
    dtype: Dtype = "float32"
    json: str = "runs/evaluation.json"


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Measure a checkpoint and return the content of `--json`."""
    arguments, parser = parse(Arguments, argv, __doc__, prog)
    with program.ending(parser, "Nothing was written: the same command begins again"):
        return run(arguments)


def run(arguments: Arguments) -> Results:
    """Measure a checkpoint on the first --eval-tokens of the text, and write the numbers."""
    measurements.check(arguments, 256, 512, 1024, 2048)
    assert arguments.eval_tokens is not None
    if Path(arguments.json).is_dir():
        raise UsageError(f"--json {arguments.json} is a folder, name a file")
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    say = accelerator.print
    tokenizer = load(AutoTokenizer, arguments.model)
    say(f"Loading {arguments.model}")
    model = load(AutoModelForCausalLM, arguments.model, dtype=arguments.dtype)
    if arguments.adapter:
        with as_usage_error(f"--adapter {arguments.adapter}: ", OSError, ValueError):
            model = hf_posenc.load_adapter(model, arguments.adapter).merge_and_unload()
    model.to(accelerator.device).eval()
    with accelerator.main_process_first():
        documents = corpus.documents(tokenizer, arguments, max_tokens=arguments.eval_tokens)
    documents = corpus.cut(documents, tokenizer, arguments.eval_tokens)
    models.check_vocabulary(model, documents)
    tokens = sum(len(document.tokens) for document in documents)
    measurements.check_text(tokens, arguments.lengths[-1])
    say(f"Measuring {tokens:,} tokens at every length, on {accelerator.device}")
    lengths, texts = arguments.lengths, measurements.texts(documents, arguments.packing)
    # First what may fail: it is code of others.
    found = measurements.measures(model, tokenizer, corpus.stream(documents).tokens, arguments, accelerator)
    rows = measurements.perplexities(model, texts, lengths, accelerator)
    header = ("context", *(name for _, name in METHODS), "bits per byte")
    say(table([header, *((str(row["length"]), *perplexities(row), bits_per_byte(row)) for row in rows)]))
    results = {
        **origin("evaluate", arguments, accelerator),
        "model": {
            "name": arguments.model,
            "model_type": model.config.model_type,
            "parameters": model.num_parameters(),
            "scheme": " + ".join(scheme.name for scheme in hf_posenc.schemes_of(model)) or None,
        },
        "measured": rows,
        "measures": found,
    }
    if found:
        say("\n" + table(measure_rows({"": found})))
    if arguments.prompt:
        results["writes"] = measurements.written(model, tokenizer, arguments.prompt)
        say(f"\n{results['writes']}")
    if accelerator.is_main_process:
        write_json(Path(arguments.json), results)
    say(f"\nresults     {arguments.json}")
    return results


if __name__ == "__main__":
    program.start(main)
