"""Attention whose scores are multiplied by a factor of the distance (DA-Transformer), in linear memory.

No flash kernel takes a factor on its scores. So this engine computes the scores of one head and of a few queries at a
time, (rows, L). They fit into the caches. With the rows in reverse order the factor of row `r` and key `j` depends on
`r + j` only (see `toeplitz`). It is read from a table of O(L) numbers through a strided view, so that neither distances
nor exponentials are computed per score. The backward pass computes the scores of a chunk again. The gradient of the
table is the sum along each diagonal, as in `toeplitz`.

Accuracy class: float32 throughout. bfloat16 inputs are converted to float32 one head at a time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.attention_call import Call
from ..core.forms import Factors
from . import tiles
from .spans import SpanEngine
from .tiles import by_pair, softmax_backward

ROWS = 256
"""Largest number of queries per chunk. Larger chunks compute more masked pairs; smaller ones leave threads idle."""

SCORES = 2**22
"""Largest number of scores of a chunk, 16 MiB. Long sequences have fewer queries per chunk."""


class Rescaled(SpanEngine):
    """The engine for factors by distance on the scores (DA-Transformer), with sliding windows."""

    name = "rescaled"
    forms = (Factors,)
    wrong_form = "the scheme does not rescale scores by distance"

    def attend_span(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Compute plain causal attention, see `SpanEngine.attend_span`."""
        form: Factors = call.form
        table = form.curve(key.shape[2])
        return attend(query, key, value, table, scaling=call.scaling, relu=form.relu, window=window)


def attend(
    query: Tensor, key: Tensor, value: Tensor, factors: Tensor, *, scaling: float, relu: bool, window: int
) -> Tensor:
    """Compute causal attention with scores `scaling * relu(q . k) * f(distance)`.

    The last query is the token of the last key.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        factors: (H, L) float32, `f` of distances 0 .. L-1. Gradients flow to it.
        scaling: factor of the scores.
        relu: whether `q . k` is clipped at 0. Otherwise the scores have no `relu`.
        window: keys at this distance or further are not seen.

    Returns:
        (B, H, Q, D) in the query's dtype.

    Raises:
        RuntimeError: if the output is differentiated twice.
    """
    rows = max(1, min(ROWS, SCORES // key.shape[2]))
    output: Tensor = _Rescaled.apply(query, key, value, factors, _Settings(scaling, relu, window, rows))
    return output


class _Settings(NamedTuple):
    scaling: float
    relu: bool
    window: int
    rows: int


class _Chunks:
    """Tables, chunks and buffers that the forward and the backward pass use.

    The queries of a chunk are in reverse order.
    """

    def __init__(self, queries: int, factors: Tensor, settings: _Settings, buffer_count: int) -> None:
        keys = factors.shape[1]
        self.relu = settings.relu
        self.factors = tiles.reversed_table(factors * settings.scaling, 0.0)
        # -inf for keys that are not seen. `addcmul` adds it in the same pass that multiplies by the factors.
        self.mask = tiles.reversed_table(tiles.windowed(factors.new_zeros(1, keys), settings.window), -math.inf)[0]
        self.chunks = tiles.split(queries, keys, settings.window, settings.rows)
        self.buffers = tiles.Buffers(min(settings.rows, queries) * keys, buffer_count)

    def rescale(self, h: int, first: int, last: int, scores: Tensor) -> Tensor:
        """Multiply scores (rows, keys) by their factors, in place."""
        return scores.mul_(by_pair(self.factors[h], last - 1, first, *scores.shape))

    def weights(self, h: int, first: int, last: int, q: Tensor, k: Tensor, target: int) -> tuple[Tensor, Tensor]:
        """Return `q . k` (after relu, if set) in buffer 0 and the weights in buffer `target`, both (rows, keys).

        If `target` is 0, the weights overwrite `q . k`.
        """
        content = self.buffers.product(q, k[first:last].T, 0)
        if self.relu:
            content.relu_()
        block = (last - 1, first, len(q), last - first)
        scores = self.buffers.room(*block[2:], target)
        torch.addcmul(by_pair(self.mask, *block), content, by_pair(self.factors[h], *block), out=scores)
        return content, torch.softmax(scores, -1, out=scores)


class _Rescaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, factors: Tensor, settings: _Settings) -> Tensor:
        work = _Chunks(query.shape[2], factors, settings, buffer_count=1)
        output = torch.empty_like(query)
        for b in range(query.shape[0]):
            for h in range(query.shape[1]):
                q, k, v = (each[b, h].float() for each in (query, key, value))
                for i, end, first, last in work.chunks:
                    _, weights = work.weights(h, first, last, q[i:end].flip(0), k, 0)
                    output[b, h, i:end] = (weights @ v[first:last]).flip(0)
        ctx.save_for_backward(query, key, value, factors)
        ctx.settings = settings
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, factors = ctx.saved_tensors
        queries, length = query.shape[2], key.shape[2]
        work = _Chunks(queries, factors, ctx.settings, buffer_count=3)
        grad_query, grad_key, grad_value = (torch.empty_like(each) for each in (query, key, value))
        grad_reversed = diagonals = None
        if ctx.needs_input_grad[3]:
            grad_reversed = torch.zeros_like(work.factors)
            diagonals = tiles.Diagonals(min(ctx.settings.rows, queries), length)
        for b in range(query.shape[0]):
            for h in range(query.shape[1]):
                q, k, v, g = (each[b, h].float() for each in (query, key, value, gradient))
                q, g = q.flip(0), g.flip(0)
                dq, dk, dv = (torch.zeros(each.shape) for each in (q, k, v))
                for i, end, first, last in work.chunks:
                    rows, shape = slice(queries - end, queries - i), (end - i, last - first)
                    content, weights = work.weights(h, first, last, q[rows], k, 1)
                    dv[first:last].addmm_(weights.T, g[rows])
                    grad_scores = softmax_backward(work.buffers.product(g[rows], v[first:last].T, 2), weights)
                    if grad_reversed is not None and diagonals is not None:
                        torch.mul(grad_scores, content, out=diagonals.room(*shape))
                        # The place in the reversed table where `by_pair` starts to read this chunk.
                        diagonals.add_to(grad_reversed[h], length - last + first, *shape)
                    if work.relu:
                        torch.ops.aten.threshold_backward(grad_scores, content, 0, grad_input=grad_scores)
                    work.rescale(h, first, last, grad_scores)
                    dq[rows] = grad_scores @ k[first:last]
                    dk[first:last].addmm_(grad_scores.T, q[rows])
                grad_query[b, h], grad_key[b, h], grad_value[b, h] = dq.flip(0), dk, dv
        grad_factors = None if grad_reversed is None else grad_reversed[:, :length].flip(1).mul_(ctx.settings.scaling)
        return grad_query, grad_key, grad_value, grad_factors, None
