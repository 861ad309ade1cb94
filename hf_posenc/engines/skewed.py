"""A score that depends on query and distance (Transformer-XL) in linear memory: head by head, a few queries at a time.

With `a_i = q_i + u` and `b_i = q_i + v`, scaled, the scores are `a_i . k_j + b_i . r_d`, `d = i - j`. For a chunk of
queries the second term is one product, (rows, distances), with the `r_d` in falling order: row `i`, key `j` then stands
in column `j - first + (rows - 1 - (i - i0))`, so that a view with rows one shorter than they are *is* the term in the
order of the keys (the relative shift of Dai et al. 2019, without a copy). Keys after the query stand beyond the
distances, where `-inf` is written, as in the columns of distances outside a sliding window: the view is the causal mask
as well, and the flash kernel of the CPU takes it as its mask. Backward, and where products are rounded: the first term
is added to the view; a chunk is computed again, and the gradient is written through the same view, which turns it back.

Accuracy class: float32 throughout, bfloat16 inputs widened one head at a time; rounded (`chunks`), "eager".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..call import Call
from ..forms import RelativeKeys
from . import chunks
from .chunks import add_product, softmax_backward
from .spans import SpanEngine

ROWS = 256
"""Queries per chunk. The flash kernel takes 64 of them at a time from 192 on, and 32 below, which costs a third."""


class Skewed(SpanEngine):
    """Products of queries with vectors of distance (Transformer-XL); sliding windows."""

    name = "skewed"
    forms = (RelativeKeys,)
    wrong_form = "the scheme has no products of queries with vectors of distance"

    def part(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        return by_form(call, query, key, value, window)


def by_form(call: Call, query: Tensor, key: Tensor, value: Tensor, window: int, *, rounded: bool = False) -> Tensor:
    """Attend with the relative keys of a call's form; the other arguments are those of `attend`."""
    form: RelativeKeys = call.form
    return attend(
        query,
        key,
        value,
        form.table(key.shape[2]),
        form.content_bias,
        form.position_bias,
        scaling=call.scaling,
        vector_scaling=call.scaling * call.ratio,
        window=window,
        rounded=rounded,
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    *,
    scaling: float,
    vector_scaling: float,
    window: int,
    rounded: bool = False,
) -> Tensor:
    """Attend causally with scores `(q_i + u) . k_j + (q_i + v) . r_(i-j)`; the last query sits on the last key.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        relative: `r` (H, L, D), of distance 0 .. L-1. Gradients flow to it.
        content_bias: `u` (H, D). Gradients flow to it.
        position_bias: `v` (H, D). Gradients flow to it.
        scaling: factor of terms that contain the query.
        vector_scaling: factor of terms that do not.
        window: keys at this distance or further are not seen.
        rounded: whether products are of the dtype of the inputs.

    Returns:
        (B, H, Q, D) in the query's dtype.

    Raises:
        RuntimeError: in a second derivative.
    """
    settings = (scaling, vector_scaling, window, rounded, ROWS)
    output: Tensor = _Skewed.apply(query, key, value, relative, content_bias, position_bias, settings)
    return output


class _Work:
    """What both passes share: chunks, and the scores of one chunk."""

    def __init__(self, queries: int, key: Tensor, buffers: int, window: int, rounded: bool, rows: int) -> None:
        keys, self.window = key.shape[2], window
        self.dtype = key.dtype if rounded else torch.float32
        self.chunks = chunks.split(queries, keys, window, rows)
        rows = min(rows, queries)
        self.later = chunks.later(rows)
        self.block = chunks.Block(rows * keys, self.dtype, buffers)
        self.by_distance = torch.zeros(rows * (keys + rows), dtype=self.dtype)

    def position_terms(self, b: Tensor, falling: Tensor) -> Tensor:
        """Return `b_i . r_d` or `-inf` by key, (rows, keys), from `r_d` (keys, D) of distances keys - 1 .. 0."""
        rows, keys = len(b), len(falling)
        by_distance = self.by_distance.as_strided((rows, keys + rows), (keys + rows, 1))
        torch.mm(b, falling.T, out=by_distance[:, :keys])
        by_distance[:, keys:] = -math.inf
        by_distance[:, : max(0, keys - self.window)] = -math.inf
        return _turned(self.by_distance, rows, keys)

    def weights(self, a: Tensor, b: Tensor, k: Tensor, falling: Tensor) -> Tensor:
        """Return weights (rows, keys) in buffer 0."""
        terms = self.position_terms(b, falling)
        if self.dtype == torch.float32:
            scores = torch.addmm(terms, a, k.T, out=self.block.room(len(a), len(k), 0))
        else:
            scores = self.block.product(a, k.T, 0).add_(terms.float())
        return torch.softmax(scores, -1, out=scores)

    def by_distances(self, of_scores: Tensor) -> Tensor:
        """Return what is in the order of keys, (rows, keys), in the order of distances."""
        rows, keys = of_scores.shape
        _turned(self.by_distance, rows, keys).copy_(of_scores)
        by_distance = self.by_distance.as_strided((rows, keys), (keys + rows, 1))
        # Beyond the distances there are keys after the query, whose gradient is 0; before them nothing was written.
        by_distance[:, :rows].masked_fill_(self.later[:rows, :rows].flip(1), 0.0)
        return by_distance


def _turned(by_distance: Tensor, rows: int, keys: int) -> Tensor:
    """Return the view (rows, keys) by key of what is in the order of distances, (rows, keys + rows)."""
    return by_distance.as_strided((rows, keys), (keys + rows - 1, 1), rows - 1)


def _by_kernel(a: Tensor, k: Tensor, v: Tensor, terms: Tensor) -> Tensor:
    """Return the output (rows, D) of one chunk from `a` (rows, D), keys, values (keys, D), terms (rows, keys)."""
    q, k, v, mask = (each[None, None] for each in (a, k, v, terms))
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=1.0)
    part: Tensor = output[0][0, 0]
    return part


def _biased(query: Tensor, bias: Tensor, scaling: float, vector_scaling: float) -> Tensor:
    """Return one head's scaled queries with a bias, (Q, D) float32."""
    return torch.add(bias.float() * vector_scaling, query.float(), alpha=scaling)


class _Skewed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        settings: tuple[float, float, int, bool, int],
    ) -> Tensor:
        *factors, window, rounded, rows = settings
        output = torch.empty_like(query)
        length = key.shape[2]
        work = _Work(query.shape[2], key, int(rounded), window, rounded, rows)
        for h in range(key.shape[1]):
            falling = relative[h].to(work.dtype).flip(0)
            for n in range(key.shape[0]):
                k, v = (each[n, h].to(work.dtype) for each in (key, value))
                a, b = (
                    _biased(query[n, h], bias[h], *factors).to(work.dtype) for bias in (content_bias, position_bias)
                )
                for i, end, first, last in work.chunks:
                    distances = falling[length - (last - first) :]
                    if rounded:
                        weights = work.weights(a[i:end], b[i:end], k[first:last], distances)
                        output[n, h, i:end] = work.block.factor(weights) @ v[first:last]
                    else:
                        terms = work.position_terms(b[i:end], distances)
                        output[n, h, i:end] = _by_kernel(a[i:end], k[first:last], v[first:last], terms)
        ctx.save_for_backward(query, key, value, relative, content_bias, position_bias)
        ctx.settings = settings
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, relative, *biases = ctx.saved_tensors
        *factors, window, rounded, rows = ctx.settings
        of_query, of_key, of_value = (torch.empty_like(each) for each in (query, key, value))
        of_relative = torch.zeros(relative.shape)
        of_biases = [torch.zeros(bias.shape) for bias in biases]
        length = key.shape[2]
        work = _Work(query.shape[2], key, 2, window, rounded, rows)
        for h in range(key.shape[1]):
            falling = relative[h].to(work.dtype).flip(0)
            of_falling = torch.zeros(falling.shape)
            for n in range(key.shape[0]):
                k, v, g = (each[n, h].to(work.dtype) for each in (key, value, gradient))
                a, b = (_biased(query[n, h], bias[h], *factors).to(work.dtype) for bias in biases)
                da, db, dk, dv = (torch.zeros(each.shape) for each in (a, b, k, v))
                for i, end, first, last in work.chunks:
                    keys, distances = slice(first, last), slice(length - (last - first), length)
                    weights = work.weights(a[i:end], b[i:end], k[keys], falling[distances])
                    add_product(dv[keys], work.block.factor(weights).T, g[i:end])
                    of_scores = softmax_backward(work.block.product(g[i:end], v[keys].T, 1), weights)
                    back = work.block.factor(of_scores)
                    da[i:end] = back @ k[keys]
                    add_product(dk[keys], back.T, a[i:end])
                    by_distance = work.by_distances(back)
                    db[i:end] = by_distance @ falling[distances]
                    add_product(of_falling[distances], by_distance.T, b[i:end])
                of_query[n, h], of_key[n, h], of_value[n, h] = (da + db) * factors[0], dk, dv
                for sums, part in zip(of_biases, (da, db), strict=True):
                    sums[h] += part.sum(0) * factors[1]
            of_relative[h] = of_falling.flip(0)
        others = (each.to(of.dtype) for each, of in zip((of_relative, *of_biases), (relative, *biases), strict=True))
        return of_query, of_key, of_value, *others, None
