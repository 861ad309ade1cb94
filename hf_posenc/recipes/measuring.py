"""What the recipes measure of a model: both perplexities and retrieval, at every context length."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..evaluation import induction_copy, measure_context, non_overlapping_perplexity
from .corpus import Document, Text, stream
from .models import position_limit
from .options import UsageError, at_least

SHORTEST_RETRIEVAL = 32
"""Tokens that a trial of `induction_copy` needs."""
CURVE_TOKENS = 8192
"""Held-out tokens that a point of the recovery curve is measured on."""


@dataclass
class MeasuringArguments:
    """At which context lengths, and how."""

    eval_lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048], metadata={"help": "context lengths to measure at, in tokens"}
    )
    stride: int | None = field(
        default=None, metadata={"help": "tokens between sliding windows; by default a quarter of each length"}
    )
    retrieval_trials: int = field(
        default=8, metadata={"help": "trials per length and lag of the retrieval test (induction copy); 0 for none"}
    )


def check(arguments: Any) -> None:
    """What can be known without text and model; lengths come out sorted, each once."""
    at_least(arguments, 0, "retrieval_trials")
    if not arguments.eval_lengths or min(arguments.eval_lengths) < 8:
        raise UsageError("--eval-lengths must be at least 8 tokens")
    arguments.eval_lengths = sorted(set(arguments.eval_lengths))
    if arguments.retrieval_trials and arguments.eval_lengths[0] < SHORTEST_RETRIEVAL:
        raise UsageError(
            f"--retrieval-trials: the test needs --eval-lengths of at least {SHORTEST_RETRIEVAL} tokens, not "
            f"{arguments.eval_lengths[0]}: longer ones, or --retrieval-trials 0"
        )
    stride = arguments.stride
    if stride is not None and not (
        1 <= stride < arguments.eval_lengths[0] and all(length % stride == 0 for length in arguments.eval_lengths)
    ):
        raise UsageError(
            f"--stride {stride} must divide every one of --eval-lengths and be below the shortest, "
            f"{arguments.eval_lengths[0]}"
        )
    if arguments.eval_tokens < arguments.eval_lengths[-1]:
        raise UsageError(
            f"--eval-tokens {arguments.eval_tokens} is less than the longest of --eval-lengths, "
            f"{arguments.eval_lengths[-1]}"
        )


def check_text(held_out: list[Document], arguments: Any, curve_length: int = 0) -> None:
    """It must suffice for a window of every length, those of the recovery curve included.

    Args:
        held_out: what is measured.
        arguments: checked.
        curve_length: tokens of a window of the curve; 0 if the recipe has none.
    """
    tokens = len(stream(held_out).tokens)
    if tokens < arguments.eval_lengths[-1]:
        raise UsageError(
            f"the held-out text has {tokens:,} tokens, the longest of --eval-lengths needs "
            f"{arguments.eval_lengths[-1]:,}: give more text or shorter lengths"
        )
    if curve_length and arguments.eval_every and tokens < curve_length:
        raise UsageError(
            f"--eval-every: a point of the curve needs {curve_length} held-out tokens and there are {tokens:,}: more "
            "--eval-tokens, or --eval-every 0"
        )


def held_out_loss(text: Text, length: int) -> Callable[[nn.Module], float]:
    """What gives a point of the recovery curve: a model's mean loss in windows of this length, in nats."""
    tokens = stream(text.held_out).tokens[: max(CURVE_TOKENS, length)]
    return lambda model: non_overlapping_perplexity(model, tokens, length=length).loss


def measure_model(
    model: nn.Module, held_out: list[Document], arguments: Any, accelerator: Accelerator
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Both perplexities and the rest, a row per length, or why there is none; retrieval, a cell per length and lag.

    Held-out documents are measured in a row, or, where they were packed apart, each on its own. Retrieval is whether the
    model can copy what it has seen so far back.
    """
    found = held_out if arguments.packing == "documents" else [stream(held_out)]
    limit = position_limit(model)
    possible = [length for length in arguments.eval_lengths if limit is None or length <= limit]
    how = {"distributed": accelerator.num_processes > 1, "progress": accelerator.is_main_process}
    rows = measure_context(
        model,
        [document.tokens for document in found],
        lengths=possible,
        stride=arguments.stride,
        byte_counts=[document.bytes for document in found],
        **how,
    )
    impossible = [
        {"length": length, "impossible": f"its table ends at {limit} positions"}
        for length in arguments.eval_lengths
        if length not in possible
    ]
    cells = []
    if arguments.retrieval_trials and possible:
        cells = induction_copy(model, lengths=possible, trials=arguments.retrieval_trials, seed=0, **how)
    return [row.to_dict() for row in rows] + impossible, [cell.to_dict() for cell in cells]
