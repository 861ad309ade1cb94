"""Measurements of a model at every context length: both perplexities and retrieval."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ..evaluation import induction_copy, measure_context, non_overlapping_perplexity
from .corpus import DataArguments, Document, stream
from .models import position_limit
from .options import Natural, UsageError
from .training import Diverged

SHORTEST_RETRIEVAL = 32
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
        retrieval_trials: trials of the retrieval test (induction copy) per length and lag; 0 skips the test.
    """

    lengths: list[int] | tuple[int, ...] = ()
    retrieval_trials: Natural = 8


def check(arguments: HeldOutArguments, *default_lengths: int) -> None:
    """Raise UsageError for options that fit no text and no model; also sort the lengths and remove repeated ones.

    Set the defaults of `--lengths`, and of `--eval-tokens`, which the longest of them needs.
    """
    arguments.lengths = sorted({*(arguments.lengths or (max(SHORTEST_RETRIEVAL, each) for each in default_lengths))})
    shortest, longest = arguments.lengths[0], arguments.lengths[-1]
    if shortest < 8:
        raise UsageError("--lengths must be at least 8 tokens")
    if arguments.retrieval_trials and shortest < SHORTEST_RETRIEVAL:
        raise UsageError(
            f"--retrieval-trials: the test needs --lengths of at least {SHORTEST_RETRIEVAL} tokens, not "
            f"{shortest}: give longer ones, or --retrieval-trials 0"
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


def retrieval(model: nn.Module, lengths: Sequence[int], trials: int, accelerator: Accelerator) -> list[dict[str, Any]]:
    """Measure how well the model copies an earlier passage: a cell per lag and possible length."""
    limit = position_limit(model)
    possible = [length for length in lengths if limit is None or length <= limit]
    if not (trials and possible):
        return []
    options = {"distributed": accelerator.num_processes > 1, "progress": accelerator.is_main_process}
    return [cell.to_dict() for cell in induction_copy(model, lengths=possible, trials=trials, **options)]
