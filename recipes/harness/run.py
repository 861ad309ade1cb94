"""Runs the example task, or any others, on a checkpoint in the evaluation harness.

    python recipes/harness/run.py runs/gpt2-alibi/model                                  # the offline example
    python recipes/harness/run.py runs/gpt2-alibi/model --tasks lambada_openai --max-length 2048
    python recipes/harness/run.py runs/gpt2-alibi/model --tasks niah_single_1 --max-length 4224   # of RULER

A prompt that does not fit --max-length is an error.

Run it in a clone, after `pip install 'lm_eval>=0.4.9,<0.5'`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.evaluation import harness_model

HERE = Path(__file__).parent


def example() -> dict[str, Any]:
    """Return the example task with the whole path of its data."""
    task = yaml.safe_load((HERE / "last_word.yaml").read_text(encoding="utf-8"))
    task["dataset_kwargs"]["data_files"] = str(HERE / task["dataset_kwargs"]["data_files"])
    return task


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint and return the harness's results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="directory or Hub id, patched or stock")
    parser.add_argument("--tasks", nargs="+", help="of the harness; by default the example beside this file")
    parser.add_argument("--max-length", type=int, help="tokens of a context")
    parser.add_argument("--device", default="cpu", help="for instance cuda")
    options = parser.parse_args(argv)
    try:
        torch.empty(1, device=options.device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # what torch raises, by device and build
        parser.error(f"--device {options.device} cannot be used here: {str(error).splitlines()[0]}")
    import lm_eval  # after the arguments: it takes long, and --help needs none of it

    model = AutoModelForCausalLM.from_pretrained(options.checkpoint).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    results = lm_eval.simple_evaluate(
        harness_model(model, tokenizer, max_length=options.max_length),
        tasks=options.tasks or [example()],
        bootstrap_iters=0,
        metadata={"tokenizer": options.checkpoint},  # of the prompts of ruler, which have 4,096 tokens
    )
    print(json.dumps(results["results"], indent=2))
    return results


if __name__ == "__main__":
    main()
