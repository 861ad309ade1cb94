"""Vectors of clipped distances (Shaw et al. 2018) in linear memory: far keys by plain flash attention, near ones apart.

With `c = min(d, m)` the scores are `q . (k + a_c)` and the values `v + b_c`. Keys at a distance of at least `m` share
the last vectors. So the scores are `q . k + q . (a_c - a_m) + q . a_m`, and the values `v + (b_c - b_m) + b_m`. Softmax
does not see `q . a_m`, which is the same for every key of a row. Weights sum to 1, so `b_m` is added to every output.
Without these two it is plain attention, except in a band of `m` distances.

For a chunk of queries the keys before the band are plain attention without any mask, which the flash kernel computes
with its log-sum-exp. Keys before a whole group of chunks are computed in one call, since the kernel is faster with many
queries, and those since then in another. The other keys of the chunk, rows + m - 1 of them, are scored one by one, and
the parts are merged by their log-sum-exps. In a block of scores (rows, rows + m - 1) the band is a strided view: entry
`t` of row `r`, at distance `m - 1 - t`, is in column `r + t`.

Backward: the kernel's own for the far part, given the merged output and log-sum-exp. The near part is computed again.
The gradients of a row's scores sum to 0, so the gradient of `a_m` is minus the sum of the others.

Accuracy class: flash for the far part, float32 for the near one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention_call import Call
from ..forms import ClippedVectors
from ..positions import Positions
from .spans import Context, SpanEngine

ROWS = 128
"""Queries per chunk: the near part costs rows + m keys of each."""

CHUNKS = 8
"""Chunks per call for the keys before all of them."""

SMALLEST = -80.0
"""Logarithm below which a weight is 0: from there on `exp` is several times slower, and float32 ends at -87."""


class Clipped(SpanEngine[ClippedVectors]):
    """Vectors of clipped distances (Shaw); no sliding windows."""

    name = "clipped"
    forms = (ClippedVectors,)
    wrong_form = "the scheme has no vectors of clipped distances"

    def why_not_form(self, call: Call) -> str | None:
        if (reason := super().why_not_form(call)) is not None:
            return reason
        assert isinstance(call.positions, Positions)
        return "it has no sliding windows" if int(call.positions.window.min()) < call.key.shape[2] else None

    def attend_span(
        self, form: ClippedVectors, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int
    ) -> Tensor:
        """Compute plain causal attention, see `SpanEngine.attend_span`."""
        return attend(query, key, value, form.keys, form.values, scaling=call.scaling)


def attend(
    query: Tensor, key: Tensor, value: Tensor, key_table: Tensor, value_table: Tensor | None, *, scaling: float
) -> Tensor:
    """Attend causally with vectors of clipped distances; the last query sits on the last key.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        key_table: (m + 1, D) or (H, m + 1, D), added to keys by clipped distance. Gradients flow to it.
        value_table: the same for values, or None.
        scaling: factor of the scores.

    Returns:
        (B, H, Q, D) in the query's dtype.

    Raises:
        RuntimeError: in a second derivative.
    """
    output: Tensor = _Clipped.apply(query, key, value, key_table, value_table, scaling, ROWS)
    if value_table is None:
        return output
    shared = value_table[..., -1:, :]
    return (output + shared).to(output.dtype) if torch.is_grad_enabled() else output.add_(shared)


class _Table:
    """The vectors of near keys minus the one that far keys share, (H|1, m, D)."""

    def __init__(self, table: Tensor) -> None:
        by_head = table.detach().float() if table.ndim == 3 else table.detach().float()[None]
        if by_head.shape[1] == 1:  # with m = 0 no key is near: a band of one distance, with the vector of far keys
            by_head = by_head.expand(-1, 2, -1)
        self.near = (by_head[:, :-1] - by_head[:, -1:]).flip(1)  # furthest first, as in the band

    @staticmethod
    def gradient(table: Tensor, of_near: Tensor) -> Tensor:
        """Return the gradient of a table from that of `near` (H, m, D)."""
        gradient = torch.cat([of_near.flip(1), -of_near.sum(1, keepdim=True)], 1)
        if table.shape[-2] == 1:
            gradient = gradient.sum(1, keepdim=True)
        return (gradient.sum(0) if table.ndim == 2 else gradient).to(table.dtype)


class _Chunk:
    """The near part of one chunk of queries: those from slot `start` to `end`, which sit on keys `shift` further."""

    def __init__(self, start: int, end: int, shift: int, near: int) -> None:
        self.rows = slice(start, end)
        first = shift + start - near + 1
        self.first, self.missing = max(0, first), max(0, -first)
        self.keys = slice(self.first, shift + end)
        self.near = near
        self.width = end - start + near - 1
        row, column = torch.arange(end - start)[:, None], torch.arange(self.width)
        self.hidden = (column > row + near - 1) | (column < self.missing)

    def window(self, tensor: Tensor) -> Tensor:
        """Return the chunk's keys or values in float32, (B, H, width, D), with zeros before the first."""
        part = tensor[:, :, self.keys].float()
        return torch.nn.functional.pad(part, (0, 0, self.missing, 0)) if self.missing else part

    def band(self, block: Tensor) -> Tensor:
        """Return the view of the m near distances, (B, H, rows, m), of a contiguous block (B, H, rows, width)."""
        shape = (*block.shape[:3], self.near)
        return block.as_strided(shape, (*block.stride()[:2], self.width + 1, 1), block.storage_offset())

    def scores(self, q: Tensor, k: Tensor, a: _Table) -> Tensor:
        """Return the scores (B, H, rows, width), `-inf` where hidden; q is scaled, k is a window."""
        block = q @ k.mT
        self.band(block).add_(q @ a.near.mT)
        return block.masked_fill_(self.hidden, float("-inf"))

    def add(self, sums: Tensor, part: Tensor) -> None:
        """Add the rows of the window to sums (B, H, L, D), in place."""
        sums[:, :, self.keys] += part[:, :, self.missing :]


def _groups(queries: int, shift: int, near: int, rows: int) -> Iterator[tuple[slice, slice, list[_Chunk]]]:
    """Yield the queries of each group of chunks, the keys before all of their near ones, and the chunks."""
    for start in range(0, queries, rows * CHUNKS):
        group = slice(start, min(start + rows * CHUNKS, queries))
        starts = range(start, group.stop, rows)
        yield (
            group,
            slice(0, max(0, shift + start - near + 1)),
            [_Chunk(first, min(first + rows, group.stop), shift, near) for first in starts],
        )


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[tuple[float, int]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_table: Tensor,
        value_table: Tensor | None,
        scaling: float,
        rows: int,
    ) -> Tensor:
        shift, queries = key.shape[2] - query.shape[2], query.shape[2]
        a, b = _Table(key_table), _Table(torch.zeros_like(key_table) if value_table is None else value_table)
        output, sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

        def plain(rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
            part, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, False, scale=scaling
            )
            return part.float(), total.reshape(*part.shape[:3], 1)

        for group, keys, chunks in _groups(queries, shift, a.near.shape[1], rows):
            before = plain(group, keys) if keys.stop else None
            for chunk in chunks:
                scores = chunk.scores(query[:, :, chunk.rows].float() * scaling, chunk.window(key), a)
                top = scores.amax(-1, keepdim=True)
                weights = scores.sub_(top).clamp_(min=SMALLEST).exp_().masked_fill_(chunk.hidden, 0.0)
                part = weights @ chunk.window(value)
                if value_table is not None:
                    part += chunk.band(weights) @ b.near
                total = weights.sum(-1, keepdim=True)
                parts = [(part / total, total.log_().add_(top))]
                if before is not None:
                    here = slice(chunk.rows.start - group.start, chunk.rows.stop - group.start)
                    parts.append((before[0][:, :, here], before[1][:, :, here]))
                if chunk.first > keys.stop:
                    parts.append(plain(chunk.rows, slice(keys.stop, chunk.first)))
                merged = torch.stack([each for _, each in parts]).logsumexp(0)
                output[:, :, chunk.rows] = sum(out * (each - merged).exp_() for out, each in parts)
                sums[:, :, chunk.rows] = merged[..., 0]
        ctx.save_for_backward(query, key, value, key_table, value_table, output, sums)
        ctx.settings = scaling, rows
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[tuple[float, int]], gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_table, value_table, output, sums = ctx.saved_tensors
        shift, queries = key.shape[2] - query.shape[2], query.shape[2]
        scaling, rows = ctx.settings
        a, b = _Table(key_table), _Table(torch.zeros_like(key_table) if value_table is None else value_table)
        of_query, of_key, of_value = (torch.zeros(each.shape) for each in (query, key, value))  # in float32
        of_a, of_b = (torch.zeros(query.shape[1], *table.near.shape[1:]) for table in (a, b))

        def plain(rows: slice, keys: slice) -> None:
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[:, :, rows].contiguous(),
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, rows],
                sums[:, :, rows].contiguous(),
                0.0,
                False,
                scale=scaling,
            )
            of_query[:, :, rows] += dq
            of_key[:, :, keys] += dk
            of_value[:, :, keys] += dv

        for group, keys, chunks in _groups(queries, shift, a.near.shape[1], rows):
            if keys.stop:
                plain(group, keys)
            for chunk in chunks:
                q, g, o = (each[:, :, chunk.rows].float() for each in (query, gradient, output))
                q, k = q * scaling, chunk.window(key)
                weights = chunk.scores(q, k, a).sub_(sums[:, :, chunk.rows, None]).clamp_(min=SMALLEST).exp_()
                weights.masked_fill_(chunk.hidden, 0.0)
                of_scores = g @ chunk.window(value).mT
                if value_table is not None:
                    chunk.band(of_scores).add_(g @ b.near.mT)
                    of_b += (chunk.band(weights).mT @ g).sum(0)
                of_scores.sub_((g * o).sum(-1, keepdim=True)).mul_(weights)
                in_band = chunk.band(of_scores)
                of_query[:, :, chunk.rows] += (of_scores @ k + in_band @ a.near).mul_(scaling)
                of_a += (in_band.mT @ q).sum(0)
                chunk.add(of_key, of_scores.mT @ q)
                chunk.add(of_value, weights.mT @ g)
                if chunk.first > keys.stop:
                    plain(chunk.rows, slice(keys.stop, chunk.first))
        of_keys = _Table.gradient(key_table, of_a)
        of_values = None if value_table is None else _Table.gradient(value_table, of_b)
        of_inputs = (each.to(query.dtype) for each in (of_query, of_key, of_value))
        return *of_inputs, of_keys, of_values, None, None
