"""Losses of the tokens of held-out windows, and when one of two models can no longer have the lower mean."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

IGNORED = -100
"""Label of a token that no loss counts, as in transformers."""

LOSSES_AT_ONCE = 64
"""Number of tokens whose losses are computed at once: the logarithms then stay in the processor's cache."""

NOISE = 0.01
"""A smaller difference of held-out losses, in nats, is taken for noise: the held-out windows are few."""

FEWEST, DEVIATIONS = 256, 3.0
"""Tokens to read, and standard deviations of the mean difference, before one of two losses is taken for higher."""


def losses_of(model: PreTrainedModel, windows: Tensor, labels: Tensor) -> Tensor:
    """Return the next-token losses of the tokens that count in some windows, in nats, float64 (N,).

    Args:
        model: a model.
        windows: (B, T) tokens.
        labels: (B, T) the same, with `IGNORED` for those that do not count.
    """
    logits, targets = model(windows, use_cache=False).logits[:, :-1], labels[:, 1:]
    losses = [
        F.cross_entropy(some.float(), wanted, reduction="none", ignore_index=IGNORED)
        for rows, row_targets in zip(logits, targets, strict=True)
        for some, wanted in zip(rows.split(LOSSES_AT_ONCE), row_targets.split(LOSSES_AT_ONCE), strict=True)
    ]
    return torch.cat(losses)[targets.flatten() != IGNORED].double()


def cannot_win(read: Tensor, rival: Tensor) -> bool:
    """Return whether a mean loss will hardly come below a rival's by `NOISE`, judged by the tokens read so far.

    Args:
        read: (n,) losses of the first n tokens.
        rival: (N,) losses of all tokens.
    """
    count = len(read)
    if not FEWEST <= count < len(rival):
        return False
    difference = read - rival[:count]
    deviation = difference.std() / math.sqrt(count)
    return not difference.mean() - DEVIATIONS * deviation <= -NOISE  # also if it is NaN
