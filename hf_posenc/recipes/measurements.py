"""Measurements of a model at every context length: both perplexities, and what `--measures` names."""

import math
import pkgutil
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.did_you_mean import did_you_mean
from ..evaluation import Cell, induction_copy, measure_context, non_overlapping_perplexity, repeat_gain, retrieve
from ..evaluation.retrieval import TASKS
from .corpus import DataArguments, Document, stream
from .models import position_limit
from .options import Natural, UsageError, as_usage_error
from .results import last_name
from .training import Diverged

SHORTEST_MEASURE = 32
"""Least context length for a trial of `induction_copy`, in tokens."""
EVAL_TOKENS = 16384
"""Default of --eval-tokens, unless one of --lengths is longer."""
CURVE_TOKENS = 8192
"""Number of held-out tokens for a point of the recovery curve."""


@dataclass(kw_only=True)
class HeldOutArguments(DataArguments):
    """Measuring.

    Args:
        lengths: context lengths to measure at, in tokens (default: a few around the length of the training).
        measures: what is measured at every length beside perplexity: induction_copy, passkey, niah_single,
            niah_multikey, vt, repeat_gain, or a function of yours as FILE.py:NAME or MODULE:NAME.
        trials: trials of these measures per length, and depth or lag; 0 skips them.
        prompt: text that the model goes on with, by 40 tokens.
    """

    lengths: list[int] | tuple[int, ...] = ()
    measures: list[str] | tuple[str, ...] = ("induction_copy",)
    trials: Natural = 8
    prompt: str | None = None


def check(arguments: HeldOutArguments, *default_lengths: int) -> None:
    """Raise UsageError for options that fit no text and no model; also sort the lengths and remove repeated ones.

    Set the defaults of `--lengths`, and of `--eval-tokens`, which the longest of them needs.
    """
    arguments.lengths = sorted({*(arguments.lengths or (max(SHORTEST_MEASURE, each) for each in default_lengths))})
    shortest, longest = arguments.lengths[0], arguments.lengths[-1]
    if shortest < 8:
        raise UsageError("--lengths must be at least 8 tokens")
    for name in arguments.measures:
        measure_of(name)
    if arguments.prompt == "":
        raise UsageError("--prompt is empty: give the begin of a text, or leave it out")
    if arguments.trials and shortest < SHORTEST_MEASURE:
        raise UsageError(
            f"--measures need --lengths of at least {SHORTEST_MEASURE} tokens, not {shortest}: give longer ones, or "
            "--trials 0"
        )
    if arguments.eval_tokens is None:
        arguments.eval_tokens = max(EVAL_TOKENS, longest)
    if arguments.eval_tokens < longest:
        raise UsageError(f"--eval-tokens {arguments.eval_tokens} is less than the longest of --lengths, {longest}")


def check_text(tokens: int, longest: int, curve_length: int = 0) -> None:
    """Raise UsageError if the text is shorter than a window.

    Args:
        tokens: number of tokens to measure on.
        longest: the longest of --lengths.
        curve_length: tokens in a window of the recovery curve; 0 if the curve is not measured.
    """
    for needed, what in ((longest, "the longest of --lengths"), (curve_length, "--eval-every")):
        if tokens < needed:
            raise UsageError(
                f"the held-out text has {tokens:,} tokens, {what} needs {needed:,}: give more text, more "
                "--eval-tokens or shorter --lengths"
            )


def held_out_loss(tokens: Tensor, length: int, progress: bool = False) -> Callable[[nn.Module], float]:
    """Return a function that measures a point of the recovery curve: mean loss in windows of this length."""
    read = tokens[: max(CURVE_TOKENS, length)]
    return lambda model: non_overlapping_perplexity(model, read, length=length, progress=progress).loss


def texts(held_out: list[Document], packing: str) -> list[Document]:
    """Return the texts to measure on: the documents with `--packing documents`, otherwise one text of all."""
    return held_out if packing == "documents" else [stream(held_out)]


def perplexities(
    model: nn.Module, documents: list[Document], lengths: Sequence[int], accelerator: Accelerator
) -> list[dict[str, Any]]:
    """Measure both perplexities, bits per byte and loss by position at every length.

    Args:
        model: model to measure, on its device.
        documents: texts to measure on.
        lengths: context lengths.
        accelerator: accelerator of the processes, which share the work.

    Returns:
        A row per length. If the model cannot run at that length, the row contains the reason instead of numbers.

    Raises:
        Diverged: a loss is not finite.
    """
    limit = position_limit(model)
    rows = []
    for length in lengths:
        if limit is not None and length > limit:
            rows.append({"length": length, "impossible": f"its table ends at {limit} positions"})
            continue
        (row,) = measure_context(
            model,
            [document.tokens for document in documents],
            lengths=[length],
            byte_counts=[document.bytes for document in documents],
            distributed=accelerator.num_processes > 1,
            progress=accelerator.is_main_process,
        )
        if not (math.isfinite(row.sliding.loss) and math.isfinite(row.non_overlapping.loss)):
            raise Diverged(
                f"the loss at {length} tokens is not finite: a weight is not, or the range of --dtype is too small"
            )
        rows.append(row.to_dict())
    return rows


def written(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Return the prompt with the 40 tokens that the model goes on with, by greedy decoding."""
    with as_usage_error("--prompt: ", Exception):  # longer than positions go, or without a token
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        ids = model.eval().generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(ids[0])


# ------------------------------------------------------------------------------------------------------------- measures

Measure = Callable[..., Sequence[Mapping[str, Any]]]
"""Called with model, tokenizer and held-out tokens (N,), and with `lengths`, `trials`, `distributed` and `progress`.

It returns rows with the keys `length` and `score`, the number that is shown; other keys are kept in the results."""


def _scored(score: str, test: Callable[..., Sequence[Cell]]) -> Measure:
    def measure(model: nn.Module, tokenizer: PreTrainedTokenizerBase, tokens: Tensor, **options: Any) -> Any:
        return [cell.to_dict() | {"score": getattr(cell, score)} for cell in test(model, tokenizer, **options)]

    return measure


def _repeated(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, tokens: Tensor, *, lengths: Sequence[int], **options: Any
) -> Any:
    options["trials"] = max(2, options["trials"])
    rows = []
    for length in lengths:
        length_of_both = min(length, len(tokens) - options["trials"] + 1)
        passage = min(256, length_of_both // 2)
        (gain,) = repeat_gain(model, tokens, distances=[length_of_both - passage], passage=passage, **options)
        rows.append({"length": length} | gain.to_dict() | {"score": gain.gain})
    return rows


MEASURES: dict[str, Measure] = {
    "induction_copy": _scored("accuracy", lambda model, tokenizer, **options: induction_copy(model, **options)),
    **{task: _scored("accuracy" if task == "vt" else "exact", partial(retrieve, task=task)) for task in TASKS},
    "repeat_gain": _repeated,
}


@cache  # a file is run once
def measure_of(name: str) -> Measure:
    """Return the measure that a word of `--measures` names.

    Raises:
        UsageError: if there is none.
    """
    if name in MEASURES:
        return MEASURES[name]
    place, colon, function = name.rpartition(":")
    if not colon:
        meant = f"FILE.py:NAME or MODULE:NAME{did_you_mean(name, tuple(MEASURES))}"
        raise UsageError(f"--measures: there is no {name}; choose from {', '.join(MEASURES)}, {meant}")
    try:
        if place.endswith(".py"):
            sys.path.append(str(Path(place).parent))  # a script may import what lies beside it, and so may this
            return partial(runpy.run_path(place)[function])
        return partial(pkgutil.resolve_name(name))
    except Exception as error:  # it is code of others
        raise UsageError(f"--measures {name} cannot be loaded: {type(error).__name__}: {error}") from error


def measures(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tensor,
    arguments: HeldOutArguments,
    accelerator: Accelerator,
) -> dict[str, list[dict[str, Any]]]:
    """Return name -> rows of every measure, at the lengths that the model can run at.

    Raises:
        UsageError: if a measure fails, returns something else, or its texts do not fit the shortest length.
    """
    limit, found = position_limit(model), {}
    lengths = [length for length in arguments.lengths if limit is None or length <= limit]
    if not (arguments.trials and lengths):
        return {}
    options = {"lengths": lengths, "trials": arguments.trials, "distributed": accelerator.num_processes > 1}
    options["progress"] = accelerator.is_main_process
    for name in arguments.measures:
        try:
            rows = [dict(row) for row in measure_of(name)(model, tokenizer, tokens, **options)]
        except Exception as error:  # it may be code of others
            raise UsageError(f"--measures {name}: {type(error).__name__}: {error}") from error
        if not all({"length", "score"} <= set(row) for row in rows):
            raise UsageError(f"--measures {name} must return dicts with `length` and `score`, not {rows[:1]}")
        found[last_name(name)] = rows
    return found
