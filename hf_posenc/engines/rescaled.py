"""Scores multiplied by a function of distance (DA-Transformer) in linear memory: head by head, a few queries at a time.

No flash kernel takes a factor on its scores, so a chunk of them is made, (rows, L), small enough for the caches. With
the rows in reverse order the factor of row `r` and key `j` depends on `r + j` only (see `toeplitz`): it is read from a
table of O(L) numbers through a strided view, and neither distances nor exponentials are computed per score. Backward: a
chunk is computed again; the table's gradient is the sum along each diagonal, as in `toeplitz`.

Accuracy class: float32 throughout; bfloat16 inputs are widened, one head at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128
"""Queries per chunk: at 8k keys a chunk of scores is 4 MiB."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, factors: Tensor, *, scaling: float, relu: bool, window: int
) -> Tensor:
    """Attend causally with scores `relu(q . k scaling) f(d)`; the last query sits on the last key.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        factors: (H, L) float32, `f` of distance 0 .. L-1. Gradients flow to it.
        scaling: factor of the scores.
        relu: whether negative scores are clipped at 0 first.
        window: keys at this distance or further are not seen.

    Returns:
        (B, H, Q, D) in the query's dtype.

    Raises:
        RuntimeError: in a second derivative.
    """
    output: Tensor = _Rescaled.apply(query, key, value, factors, scaling, relu, window, ROWS)
    return output


def chunks(queries: int, keys: int, window: int, rows: int) -> list[tuple[int, int, int, int]]:
    """Return of each chunk: first and last + 1 query, first and last + 1 key that any of them sees.

    Args:
        queries: Q; the last one sits on the last key.
        keys: L.
        window: keys at this distance or further are not seen.
        rows: queries per chunk.
    """
    shift = keys - queries
    return [
        (i, min(i + rows, queries), max(0, shift + i - window + 1), shift + min(i + rows, queries))
        for i in range(0, queries, rows)
    ]


def hide(scores: Tensor, last: int, first_key: int, window: int) -> None:
    """Put `-inf` where a query does not see a key, in place.

    Args:
        scores: (rows, keys), rows in reverse order.
        last: key slot that the first row sits on.
        first_key: slot of the first key.
        window: keys at this distance or further are not seen.
    """
    rows, keys = scores.shape
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1).flip(0)  # of row r: the last r keys
    scores[:, keys - rows :].masked_fill_(later, float("-inf"))
    if last - first_key >= window:
        distance = (last - torch.arange(rows))[:, None] - torch.arange(first_key, first_key + keys)
        scores.masked_fill_(distance >= window, float("-inf"))


def _view(reversed_: Tensor, last: int, rows: int, first_key: int, keys: int) -> Tensor:
    """Return the factors (rows, keys) of a chunk of reversed rows, from those of one head backwards, (2 L,)."""
    start = reversed_.storage_offset() + reversed_.shape[0] // 2 - 1 - last + first_key
    return reversed_.as_strided((rows, keys), (1, 1), start)


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factors: Tensor,
        scaling: float,
        relu: bool,
        window: int,
        rows: int,
    ) -> Tensor:
        # The backward pass takes differences of what is near the output: rounded to bfloat16 they would be noise.
        output = torch.empty_like(query, dtype=torch.float32)
        table = torch.cat([factors.flip(1), torch.zeros_like(factors)], 1)
        for b in range(query.shape[0]):
            for h in range(query.shape[1]):
                q, k, v = (query[b, h] * scaling).float(), key[b, h].float(), value[b, h].float()
                for i, end, first, last in chunks(len(q), len(k), window, rows):
                    scores = q[i:end].flip(0) @ k[first:last].T
                    if relu:
                        scores.relu_()
                    scores.mul_(_view(table[h], last - 1, end - i, first, last - first))
                    hide(scores, last - 1, first, window)
                    output[b, h, i:end] = (scores.softmax(-1) @ v[first:last]).flip(0)
        ctx.save_for_backward(query, key, value, factors, output)
        ctx.scaling, ctx.relu, ctx.window, ctx.rows = scaling, relu, window, rows
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, factors, output = ctx.saved_tensors
        of_query, of_key, of_value = (torch.empty_like(each) for each in (query, key, value))
        table = torch.cat([factors.flip(1), torch.zeros_like(factors)], 1)
        of_table = torch.zeros_like(table)
        for b in range(query.shape[0]):
            for h in range(query.shape[1]):
                q, k, v = (query[b, h] * ctx.scaling).float(), key[b, h].float(), value[b, h].float()
                g, o = gradient[b, h].float(), output[b, h]
                dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
                for i, end, first, last in chunks(len(q), len(k), ctx.window, ctx.rows):
                    qr, gr, keys = q[i:end].flip(0), g[i:end].flip(0), last - first
                    factor = _view(table[h], last - 1, end - i, first, keys)
                    content = qr @ k[first:last].T
                    if ctx.relu:
                        content.relu_()
                    scores = content * factor
                    hide(scores, last - 1, first, ctx.window)
                    weights = scores.softmax(-1)
                    dv[first:last].addmm_(weights.T, gr)
                    of_scores = torch.mm(gr, v[first:last].T)
                    of_scores.sub_((gr * o[i:end].flip(0)).sum(-1, keepdim=True)).mul_(weights)
                    if ctx.needs_input_grad[3]:
                        add_diagonals(of_table[h], len(k) - last + first, of_scores * content)
                    of_scores.mul_(factor)
                    if ctx.relu:
                        of_scores.mul_(content > 0)
                    dq[i:end] = (of_scores @ k[first:last]).flip(0)
                    dk[first:last].addmm_(of_scores.T, qr)
                of_query[b, h], of_key[b, h], of_value[b, h] = dq * ctx.scaling, dk, dv
        of_factors = of_table[:, : key.shape[2]].flip(1) if ctx.needs_input_grad[3] else None
        return of_query, of_key, of_value, of_factors, None, None, None, None


def add_diagonals(sums: Tensor, at: int, part: Tensor) -> None:
    """Add the sums of a chunk along each `r + j` to `sums[at + r + j]`.

    Args:
        sums: (2 L,), in place.
        at: entry of the chunk's first row and key.
        part: (rows, keys).
    """
    rows, keys = part.shape
    # Written with rows one longer than they are, diagonals become columns.
    skewed = part.new_zeros(rows * (keys + rows))
    skewed.as_strided((rows, keys), (keys + rows + 1, 1)).copy_(part)
    sums[at : at + keys + rows - 1] += skewed.view(rows, keys + rows).sum(0)[:-1]
