"""A score that depends on query and distance (Transformer-XL) in linear memory: head by head, a few queries at a time.

With `a_i = q_i + u` and `b_i = q_i + v` the scores are `a_i . k_j + b_i . r_d`, `d = i - j`. For a chunk of queries the
second term is one product, (rows, distances), with the `r_d` in falling order: row `i`, key `j` then stands in column
`j - first + (rows - 1 - (i - i0))`, so that a view with rows one shorter than they are *is* the term in the order of
the keys (the relative shift of Dai et al. 2019, without a copy). The first term is added to it inside its own product.
Entries for keys after the query fall beyond the distances; they are masked. Backward: a chunk is computed again, and
the gradient is written through the same view, which turns it back.

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
    content_query: Tensor, position_query: Tensor, key: Tensor, value: Tensor, relative: Tensor, *, window: int
) -> Tensor:
    """Attend causally with scores `a_i . k_j + b_i . r_(i-j)`; the last query sits on the last key.

    Args:
        content_query: `a` (B, H, Q, D) on a CPU, float32 or bfloat16, scaled.
        position_query: `b` (B, H, Q, D), scaled.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        relative: `r` (H, L, D), of distance 0 .. L-1. Gradients flow to it.
        window: keys at this distance or further are not seen.

    Returns:
        (B, H, Q, D) in the dtype of the values.

    Raises:
        RuntimeError: in a second derivative.
    """
    output: Tensor = _Skewed.apply(content_query, position_query, key, value, relative, window, ROWS)
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


def hide(scores: Tensor, window: int) -> None:
    """Put `-inf` where a query does not see a key, in place.

    Args:
        scores: (rows, keys), the last row on the last key.
        window: keys at this distance or further are not seen.
    """
    rows, keys = scores.shape
    later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    scores[:, keys - rows :].masked_fill_(later, float("-inf"))
    if keys > window:
        distance = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
        scores.masked_fill_(distance >= window, float("-inf"))


def _scores(a: Tensor, b: Tensor, k: Tensor, falling: Tensor) -> Tensor:
    """Return scores (rows, keys) before masking, from `r_d` (keys, D) of distances keys - 1 .. 0."""
    rows, keys = len(a), len(k)
    by_distance = a.new_empty(rows * (keys + rows))
    torch.mm(b, falling.T, out=by_distance.as_strided((rows, keys), (keys + rows, 1)))
    return torch.addmm(_turned(by_distance, rows, keys), a, k.T)


def _turned(by_distance: Tensor, rows: int, keys: int) -> Tensor:
    """Return the view (rows, keys) by key of what is in the order of distances, (rows, keys + rows)."""
    return by_distance.as_strided((rows, keys), (keys + rows - 1, 1), by_distance.storage_offset() + rows - 1)


class _Skewed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        content_query: Tensor,
        position_query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        window: int,
        rows: int,
    ) -> Tensor:
        # The backward pass takes differences of what is near the output: rounded to bfloat16 they would be noise.
        output = content_query.new_empty(content_query.shape, dtype=torch.float32)
        length = key.shape[2]
        for h in range(key.shape[1]):
            falling = relative[h].float().flip(0)
            for n in range(key.shape[0]):
                a, b, k, v = (each[n, h].float() for each in (content_query, position_query, key, value))
                for i, end, first, last in chunks(len(a), length, window, rows):
                    scores = _scores(a[i:end], b[i:end], k[first:last], falling[length - (last - first) :])
                    hide(scores, window)
                    output[n, h, i:end] = scores.softmax(-1) @ v[first:last]
        ctx.save_for_backward(content_query, position_query, key, value, relative, output)
        ctx.window, ctx.rows = window, rows
        return output.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        content_query, position_query, key, value, relative, output = ctx.saved_tensors
        inputs = (content_query, position_query, key, value)
        found = [torch.empty_like(each) for each in inputs]
        of_relative = torch.zeros(relative.shape)
        length = key.shape[2]
        for h in range(key.shape[1]):
            falling = relative[h].float().flip(0)
            of_falling = torch.zeros_like(falling)
            for n in range(key.shape[0]):
                a, b, k, v = (each[n, h].float() for each in inputs)
                g, o = gradient[n, h].float(), output[n, h]
                da, db, dk, dv = (torch.zeros_like(each) for each in (a, b, k, v))
                for i, end, first, last in chunks(len(a), length, ctx.window, ctx.rows):
                    keys, count = slice(first, last), last - first
                    distances = slice(length - count, length)
                    scores = _scores(a[i:end], b[i:end], k[keys], falling[distances])
                    hide(scores, ctx.window)
                    weights = scores.softmax(-1)
                    dv[keys].addmm_(weights.T, g[i:end])
                    of_scores = torch.mm(g[i:end], v[keys].T)
                    of_scores.sub_((g[i:end] * o[i:end]).sum(-1, keepdim=True)).mul_(weights)
                    da[i:end] = of_scores @ k[keys]
                    dk[keys].addmm_(of_scores.T, a[i:end])
                    turned = a.new_zeros((end - i) * (count + end - i))
                    _turned(turned, end - i, count).copy_(of_scores)
                    by_distance = turned.view(end - i, -1)[:, :count]
                    db[i:end] = by_distance @ falling[distances]
                    of_falling[distances].addmm_(by_distance.T, b[i:end])
                for target, part in zip(found, (da, db, dk, dv), strict=True):
                    target[n, h] = part
            of_relative[h] = of_falling.flip(0)
        return *found, of_relative.to(relative.dtype), None, None
