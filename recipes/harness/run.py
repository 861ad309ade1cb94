"""Runs the example task, or any others, on a checkpoint in the evaluation harness.

    python recipes/harness/run.py runs/gpt2-alibi/model                                  # the offline example
    python recipes/harness/run.py runs/gpt2-alibi/model --tasks lambada_openai --max-length 2048
    python recipes/harness/run.py runs/gpt2-alibi/model --tasks niah_single_1 --max-length 4224   # of RULER

A patched checkpoint must pass verify. A prompt that does not fit --max-length is an error: the harness alone would cut
its beginning off, and only log it. In a test of long contexts that removes what the model is asked for.

Run it in a clone, after `pip install 'lm_eval>=0.4.9,<0.5'`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import HfPosencError, is_patched, verify

HERE = Path(__file__).parent


def whole_prompts(wrapper: Any) -> Any:
    """Return a sub-class of lm_eval's `HFLM` that raises ValueError where the original cuts a prompt."""

    def check(needed: int, max_length: int) -> None:
        if needed > max_length:
            raise ValueError(
                f"a prompt and its answer take {needed} tokens, and the harness would cut the prompt's beginning to "
                f"fit {max_length}: give --max-length {needed} or more if the model reads so far, or shorter prompts "
                "(for ruler: max_seq_lengths)"
            )

    class WholePrompts(wrapper):
        """A model whose prompts are never cut."""

        def tok_batch_encode(self, *args: Any, left_truncate_len: int | None = None, **options: Any) -> Any:
            encoded = super().tok_batch_encode(*args, **options)
            if left_truncate_len is not None:  # what is left beside the tokens to generate
                check(encoded[0].shape[1] + self.max_length - left_truncate_len, self.max_length)
            return encoded

        def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **options: Any) -> Any:
            # The last token is only predicted, never read.
            longest = max((len(prompt) + len(answer) - 1 for _, prompt, answer in requests), default=0)
            check(longest, self.max_length)
            return super()._loglikelihood_tokens(requests, *args, **options)

    return WholePrompts


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
    from lm_eval.models.huggingface import HFLM

    model = AutoModelForCausalLM.from_pretrained(options.checkpoint).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    if is_patched(model) and not (report := verify(model)):
        raise HfPosencError(f"the model does not pass verify, so results would not be those of its scheme:\n{report}")
    own = {"max_length": options.max_length, "device": options.device}
    results = lm_eval.simple_evaluate(
        whole_prompts(HFLM)(pretrained=model, tokenizer=tokenizer, **own),
        tasks=options.tasks or [example()],
        bootstrap_iters=0,
        metadata={"tokenizer": options.checkpoint},  # of the prompts of ruler, which have 4,096 tokens
    )
    print(json.dumps(results["results"], indent=2))
    return results


if __name__ == "__main__":
    main()
