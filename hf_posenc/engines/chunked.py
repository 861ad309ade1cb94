"""The reference engine on a few queries at a time: exact for every scheme and mask, in linear memory.

A chunk of queries needs only its own scores, (rows, L) instead of (Q, L). Keys that no query of the chunk sees are cut
off: later keys, and keys before a sliding window. This saves half of plain causal attention. In training the backward
pass computes a chunk again instead of storing it.

Accuracy class: that of the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.attention_call import Call
from ..core.positions import Positions
from . import reference
from .base import Engine, why_not_in_blocks

SCORES = 2**21
"""Number of scores of one chunk, over batch and heads: 8 MiB in float32, which fits into the caches of a CPU."""


class Chunked(Engine):
    """The engine for every scheme and every mask but a user's own 4-D one. O(L) memory.

    It returns no weights, and torch.compile does not trace it.
    """

    name = "chunked"
    sinks = True
    token_bias = True
    weight_changes = True
    real = True
    value_sizes = True

    def why_not(self, call: Call) -> str | None:
        return why_not_in_blocks(call)

    def attend(self, call: Call) -> tuple[Tensor, None]:
        """Attend a few queries at a time, see `attend`."""
        return attend(call), None


def attend(call: Call) -> Tensor:
    """Attend as `reference.attend` does, in O(L) memory.

    Args:
        call: a call with compact positions.

    Returns:
        output (B, Q, H, V) in the query's dtype.
    """
    batch, heads, queries, _ = call.query.shape
    rows = max(16, min(queries, SCORES // (batch * heads * call.key.shape[2])))
    return by_rows(call, rows, lambda part: reference.attend(part)[0])


def by_rows(call: Call, rows: int, compute: Callable[[Call], Tensor]) -> Tensor:
    """Compute a call a few queries at a time, with the keys that any of them may see.

    Args:
        call: a call with compact positions.
        rows: number of queries at a time.
        compute: returns the output of a call with a few queries. In training it runs again in the backward pass.

    Returns:
        output (B, Q, H, V), as `compute` returns it.
    """
    positions, queries = call.positions, call.query.shape[2]
    assert isinstance(positions, Positions)

    parts = []
    for start in range(0, queries, rows):
        here = slice(start, min(start + rows, queries))
        some = call.cut(here, _seen(positions, here))
        if torch.is_grad_enabled():  # the queries tell `checkpoint` on which device dropout is drawn again
            parts.append(checkpoint(lambda _, some: compute(some), some.query, some, use_reentrant=False))
        else:
            parts.append(compute(some))
    return torch.cat(parts, 1)


def _seen(positions: Positions, queries: slice) -> slice | Tensor:
    """Return the keys that any query of the chunk may see by order and window. Keys must be in causal order.

    They are a slice, or indices where first keys stay visible before the window.
    """
    index = positions.query_index[:, queries]
    if index.is_cuda:  # cutting keys off would read values, which waits for the device
        return slice(0, positions.key_index.shape[-1])
    key_index = positions.key_index
    end = int((key_index <= index.max()).sum(-1).max())
    first = int((key_index <= index.min() - positions.window.max()).sum(-1).min())
    first = min(first, end)
    stay = positions.key_kept
    if stay is None or not bool(stay[:, :first].any()):
        return slice(first, end)
    kept = stay[:, :first].any(0).nonzero()[:, 0]
    return torch.cat([kept, torch.arange(first, end, device=kept.device)])
