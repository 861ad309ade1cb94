"""Scores times and plus functions of distance in linear memory: head by head, a few queries at a time.

No flash kernel takes a factor on its scores (DA-Transformer), so a chunk of them is made, (rows, L), small enough for
the caches. With the rows in reverse order the factor of row `r` and key `j` depends on `r + j` only (see `toeplitz`):
it is read from a table of O(L) numbers through a strided view, and neither distances nor exponentials are computed per
score. A bias of distance is read in the same way, for products that are rounded (`chunks`); `toeplitz` is cheaper for
others. Backward: a chunk is computed again; a table's gradient is the sum along each diagonal, as in `toeplitz`.

Accuracy class: float32 throughout, bfloat16 inputs widened one head at a time; rounded, "eager".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call import Call
from ..forms import Factors
from . import chunks
from .chunks import add_product, by_pair, softmax_backward
from .spans import SpanEngine

ROWS = 256
"""Most queries per chunk. More waste the upper half of a larger block, fewer leave threads too little to share."""

SCORES = 2**22
"""Scores of a chunk, 16 MiB of them, above which it has fewer queries."""


class Rescaled(SpanEngine):
    """Factors of distance on the scores (DA-Transformer); sliding windows."""

    name = "rescaled"
    forms = (Factors,)
    wrong_form = "the scheme does not rescale scores by distance"

    def part(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        factors, relu = call.form.table(key.shape[2]), call.form.relu
        return attend(query, key, value, factors, None, scaling=call.scaling, relu=relu, window=window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factors: Tensor | None,
    bias: Tensor | None,
    *,
    scaling: float,
    relu: bool,
    window: int,
    reach: list[list[int]] | None = None,
    rounded: bool = False,
) -> Tensor:
    """Attend causally with scores `relu(q . k scaling) f(d) + b(d)`; the last query sits on the last key.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        factors: (H, L) float32, `f` of distance 0 .. L-1, or None for 1. Gradients flow to it.
        bias: (H, L) float32, `b` of distance 0 .. L-1, or None for 0. Gradients flow to it.
        scaling: factor of the scores.
        relu: whether negative scores are clipped at 0 first.
        window: keys at this distance or further are not seen.
        reach: per head and chunk of `rows_of(L)` queries, the distance from which keys may be left out, or None.
        rounded: whether products are of the dtype of the inputs.

    Returns:
        (B, H, Q, D) in the query's dtype.

    Raises:
        RuntimeError: in a second derivative.
    """
    output: Tensor = _Rescaled.apply(
        query, key, value, factors, bias, _Settings(scaling, relu, window, reach, rounded, rows_of(key.shape[2]))
    )
    return output


def rows_of(keys: int) -> int:
    """Return how many queries a chunk has."""
    return max(1, min(ROWS, SCORES // keys))


@dataclass(frozen=True)
class _Settings:
    scaling: float
    relu: bool
    window: int
    reach: list[list[int]] | None
    rounded: bool
    rows: int


class _Work:
    """What both passes share: tables backwards, chunks, and the scores of one chunk. Rows are in reverse order."""

    def __init__(
        self, query: Tensor, keys: int, factors: Tensor | None, bias: Tensor | None, settings: _Settings, buffers: int
    ) -> None:
        self.scaling, self.relu = settings.scaling, settings.relu
        heads, queries = query.shape[1:3]
        self.factors = None if factors is None else chunks.reversed_table(factors * settings.scaling, 0.0)
        # Where a key is hidden the bias is -inf, so that no score is visited once more to be masked.
        bias = query.new_zeros(heads, keys, dtype=torch.float32) if bias is None else bias
        self.bias = chunks.reversed_table(chunks.windowed(bias, settings.window), -math.inf)
        self.dtype = query.dtype if settings.rounded else torch.float32
        reach: list[Any] = [None] * heads if settings.reach is None else settings.reach
        self.chunks = [chunks.split(queries, keys, settings.window, settings.rows, each) for each in reach]
        self.block = chunks.Block(min(settings.rows, queries) * keys, self.dtype, buffers)

    def rescale(self, h: int, first: int, last: int, scores: Tensor) -> Tensor:
        """Multiply scores (rows, keys) by their factors, in place."""
        if self.factors is None:
            return scores.mul_(self.scaling)
        return scores.mul_(by_pair(self.factors[h], last - 1, first, *scores.shape))

    def weights(self, h: int, first: int, last: int, q: Tensor, k: Tensor, target: int) -> tuple[Tensor, Tensor]:
        """Return `relu(q . k)` (rows, keys) in buffer 0, and the weights in another one or the same."""
        content = self.block.product(q, k[first:last].T, 0)
        if self.relu:
            content.relu_()
        block = (last - 1, first, len(q), last - first)
        bias, scores = by_pair(self.bias[h], *block), self.block.room(*block[2:], target)
        if self.factors is None:
            torch.add(bias, content, alpha=self.scaling, out=scores)
        else:
            torch.addcmul(bias, content, by_pair(self.factors[h], *block), out=scores)
        return content, torch.softmax(scores, -1, out=scores)


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factors: Tensor | None,
        bias: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        work = _Work(query, key.shape[2], factors, bias, settings, buffers=1)
        output = torch.empty_like(query)
        for b in range(query.shape[0]):
            for h in range(query.shape[1]):
                q, k, v = (each[b, h].to(work.dtype) for each in (query, key, value))
                for i, end, first, last in work.chunks[h]:
                    _, weights = work.weights(h, first, last, q[i:end].flip(0), k, 0)
                    output[b, h, i:end] = (work.block.factor(weights) @ v[first:last]).flip(0)
        ctx.save_for_backward(query, key, value, factors, bias)
        ctx.settings = settings
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, factors, bias = ctx.saved_tensors
        work = _Work(query, key.shape[2], factors, bias, ctx.settings, buffers=3)
        of_query, of_key, of_value = (torch.empty_like(each) for each in (query, key, value))
        of_factors, of_bias = (
            key.new_zeros(table.shape[0], 2 * table.shape[1], dtype=torch.float32)
            if table is not None and needed
            else None
            for table, needed in zip((factors, bias), ctx.needs_input_grad[3:5], strict=True)
        )
        queries, length = query.shape[2], key.shape[2]
        learned = of_factors is not None or of_bias is not None
        diagonals = chunks.Diagonals(min(ctx.settings.rows, queries), length) if learned else None
        for b in range(query.shape[0]):
            for h in range(query.shape[1]):
                q, k, v, g = (each[b, h].to(work.dtype) for each in (query, key, value, gradient))
                q, g = q.flip(0), g.flip(0)
                dq, dk, dv = (torch.zeros(each.shape) for each in (q, k, v))
                for i, end, first, last in work.chunks[h]:
                    rows, shape, at = slice(queries - end, queries - i), (end - i, last - first), length - last + first
                    content, weights = work.weights(h, first, last, q[rows], k, 1)
                    add_product(dv[first:last], work.block.factor(weights).T, g[rows])
                    of_scores = softmax_backward(work.block.product(g[rows], v[first:last].T, 2), weights)
                    if diagonals is not None and of_bias is not None:
                        diagonals.room(*shape).copy_(of_scores)
                        diagonals.add_to(of_bias[h], at, *shape)
                    if diagonals is not None and of_factors is not None:
                        torch.mul(of_scores, content, out=diagonals.room(*shape))
                        diagonals.add_to(of_factors[h], at, *shape)
                    if work.relu:
                        torch.ops.aten.threshold_backward(of_scores, content, 0, grad_input=of_scores)
                    back = work.block.factor(work.rescale(h, first, last, of_scores))
                    dq[rows] = back @ k[first:last]
                    add_product(dk[first:last], back.T, q[rows])
                of_query[b, h], of_key[b, h], of_value[b, h] = dq.flip(0), dk, dv
        if of_factors is not None:
            of_factors = of_factors[:, :length].flip(1).mul_(ctx.settings.scaling)
        return of_query, of_key, of_value, of_factors, None if of_bias is None else of_bias[:, :length].flip(1), None
