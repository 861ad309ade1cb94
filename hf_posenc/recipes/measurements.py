"""Measurements of a model at every context length: both perplexities and retrieval."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from accelerate import Accelerator
from torch import nn

from ..evaluation import induction_copy, measure_context, non_overlapping_perplexity
from .corpus import DataArguments, Document, Text, stream
from .models import position_limit
from .options import Natural, Options, UsageError
from .results import Results
from .training import Diverged

SHORTEST_RETRIEVAL = 32
"""Least context length for a trial of `induction_copy`, in tokens."""
CURVE_TOKENS = 8192
"""Number of held-out tokens for a point of the recovery curve."""


@dataclass
class MeasuringArguments(Options):
    """Measuring.

    Args:
        lengths: context lengths to measure at, in tokens.
        stride: tokens between sliding windows; by default a quarter of each length.
        retrieval_trials: trials of the retrieval test (induction copy) per length and lag; 0 skips the test.
    """

    lengths: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048], metadata={"was": "eval_lengths"})
    stride: int | None = None
    retrieval_trials: Natural = 8


@dataclass
class HeldOutArguments(DataArguments, MeasuringArguments):
    """Measuring on the held-out part of a text."""


def check(arguments: HeldOutArguments) -> None:
    """Raise UsageError for options that fit no text and no model; also sort the lengths and remove repeated ones."""
    if not arguments.lengths or min(arguments.lengths) < 8:
        raise UsageError("--lengths must be at least 8 tokens")
    arguments.lengths = sorted(set(arguments.lengths))
    if arguments.retrieval_trials and arguments.lengths[0] < SHORTEST_RETRIEVAL:
        raise UsageError(
            f"--retrieval-trials: the test needs --lengths of at least {SHORTEST_RETRIEVAL} tokens, not "
            f"{arguments.lengths[0]}: give longer ones, or --retrieval-trials 0"
        )
    stride = arguments.stride
    if stride is not None and not (
        1 <= stride < arguments.lengths[0] and all(length % stride == 0 for length in arguments.lengths)
    ):
        raise UsageError(
            f"--stride {stride} must divide every one of --lengths and be below the shortest, {arguments.lengths[0]}"
        )
    if arguments.eval_tokens < arguments.lengths[-1]:
        raise UsageError(
            f"--eval-tokens {arguments.eval_tokens} is less than the longest of --lengths, {arguments.lengths[-1]}"
        )


def check_text(held_out: list[Document], arguments: MeasuringArguments, curve_length: int = 0) -> None:
    """Raise UsageError if the text is shorter than a window.

    Args:
        held_out: text to measure on.
        arguments: checked options.
        curve_length: tokens in a window of the recovery curve; 0 if the curve is not measured.
    """
    tokens = len(stream(held_out).tokens)
    if tokens < arguments.lengths[-1]:
        raise UsageError(
            f"the held-out text has {tokens:,} tokens, the longest of --lengths needs "
            f"{arguments.lengths[-1]:,}: give more text or shorter lengths"
        )
    if tokens < curve_length:
        raise UsageError(
            f"--eval-every: a point of the curve needs {curve_length} held-out tokens, but there are {tokens:,}: give "
            "more --eval-tokens, or --eval-every 0"
        )


def held_out_loss(text: Text, length: int) -> Callable[[nn.Module], float]:
    """Return a function that measures a point of the recovery curve: mean loss in windows of this length."""
    tokens = stream(text.held_out).tokens[: max(CURVE_TOKENS, length)]
    return lambda model: non_overlapping_perplexity(model, tokens, length=length).loss


def measure_model(
    model: nn.Module, held_out: list[Document], arguments: HeldOutArguments, accelerator: Accelerator
) -> tuple[list[Results], list[Results]]:
    """Return the rows of `perplexities`, one per length, and the cells of `retrieval`, one per length and lag."""
    return perplexities(model, held_out, arguments, accelerator), retrieval(model, arguments, accelerator)


def perplexities(
    model: nn.Module,
    held_out: list[Document],
    arguments: HeldOutArguments,
    accelerator: Accelerator,
    on_row: Callable[[Results], None] = lambda _: None,
) -> list[Results]:
    """Measure both perplexities, bits per byte and loss by position at every length.

    The held-out documents are concatenated; with `--packing documents` they are measured one by one.

    Args:
        model: model to measure, on its device.
        held_out: text to measure on.
        arguments: checked options.
        accelerator: accelerator of the processes, which share the work.
        on_row: function to call with a row as soon as it is measured.

    Returns:
        A row per length. If the model cannot run at that length, the row contains the reason instead of numbers.

    Raises:
        Diverged: a loss is not finite.
    """
    documents = held_out if arguments.packing == "documents" else [stream(held_out)]
    limit = position_limit(model)
    rows = []
    for length in arguments.lengths:
        if limit is not None and length > limit:
            rows.append({"length": length, "impossible": f"its table ends at {limit} positions"})
        else:
            (row,) = measure_context(
                model,
                [document.tokens for document in documents],
                lengths=[length],
                stride=arguments.stride,
                byte_counts=[document.bytes for document in documents],
                distributed=accelerator.num_processes > 1,
                progress=accelerator.is_main_process,
            )
            if not (math.isfinite(row.sliding.loss) and math.isfinite(row.non_overlapping.loss)):
                raise Diverged(
                    f"the loss at {length} tokens is not finite: a weight is not, or the range of --dtype is too small"
                )
            rows.append(row.to_dict())
        on_row(rows[-1])
    return rows


def retrieval(model: nn.Module, arguments: MeasuringArguments, accelerator: Accelerator) -> list[Results]:
    """Measure how well the model copies an earlier passage: a cell per lag and possible length."""
    limit = position_limit(model)
    possible_lengths = [length for length in arguments.lengths if limit is None or length <= limit]
    if not (arguments.retrieval_trials and possible_lengths):
        return []
    cells = induction_copy(
        model,
        lengths=possible_lengths,
        trials=arguments.retrieval_trials,
        seed=0,
        distributed=accelerator.num_processes > 1,
        progress=accelerator.is_main_process,
    )
    return [cell.to_dict() for cell in cells]
