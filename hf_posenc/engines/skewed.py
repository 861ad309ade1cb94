"""Scores that depend on query and distance (Transformer-XL) in linear memory: head by head, a few queries at a time.

Let `a_i = q_i + u` and `b_i = q_i + v`, both scaled. The scores are `a_i . k_j + b_i . r_d`, `d = i - j`. For a chunk
of queries the second term is one product, (rows, distances), with the `r_d` in falling order of `d`. The pair of row
`i` and key `j` is in column `j - first + (rows - 1 - (i - i0))`. A view whose rows are one number shorter therefore
has the term in the order of the keys (the relative shift of Dai et al. 2019, without a copy).

Keys after the query are in the columns behind the distances. These get `-inf`, as do the distances outside a sliding
window. So the view is the causal mask as well, and the flash kernel of the CPU takes it as its mask.

Backward: a chunk is computed again, with the first term added to the view. The gradient is written through the same
view, which puts it back into the order of distances.

Accuracy class: float32 throughout. bfloat16 inputs are converted to float32 one head at a time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention_call import Call
from ..forms import RelativeKeys
from . import tiles
from .spans import Context, SpanEngine

ROWS = 256
"""Queries per chunk. With 192 queries or more the flash kernel takes 64 at a time, otherwise 32, a third slower."""

_Settings = tuple[float, float, int, int]
"""Scaling, vector scaling, window, and rows per chunk; see `attend`."""


class Skewed(SpanEngine[RelativeKeys]):
    """The engine for products of queries with vectors of distance (Transformer-XL), with sliding windows."""

    name = "skewed"
    forms = (RelativeKeys,)
    wrong_form = "the scheme has no products of queries with vectors of distance"

    def attend_span(
        self, form: RelativeKeys, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int
    ) -> Tensor:
        """Compute plain causal attention, see `SpanEngine.attend_span`."""
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
) -> Tensor:
    """Attend causally with scores `(q_i + u) . k_j + (q_i + v) . r_(i-j)`; the last query sits on the last key.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        relative: `r` (H, L, D), the vectors of distances 0 .. L-1. Gradients flow to it.
        content_bias: `u` (H, D). Gradients flow to it.
        position_bias: `v` (H, D). Gradients flow to it.
        scaling: factor of terms that contain the query.
        vector_scaling: factor of terms that do not.
        window: keys at this distance or further are not seen.

    Returns:
        (B, H, Q, D) in the query's dtype.

    Raises:
        RuntimeError: in a second derivative.
    """
    settings = (scaling, vector_scaling, window, ROWS)
    output: Tensor = _Skewed.apply(query, key, value, relative, content_bias, position_bias, settings)
    return output


class _Work:
    """The chunks, and the scores of one chunk, for both passes."""

    def __init__(self, queries: int, keys: int, buffers: int, window: int, rows: int) -> None:
        self.window = window
        self.chunks = tiles.split(queries, keys, window, rows)
        rows = min(rows, queries)
        self.later = tiles.later(rows)
        self.buffers = tiles.Buffers(rows * keys, buffers)
        self.by_distance = torch.zeros(rows * (keys + rows))

    def position_terms(self, b: Tensor, falling: Tensor) -> Tensor:
        """Return `b_i . r_d`, or `-inf` where masked, (rows, keys); `falling` has `r_d` of distances keys - 1 .. 0."""
        rows, keys = len(b), len(falling)
        by_distance = self.by_distance.as_strided((rows, keys + rows), (keys + rows, 1))
        torch.mm(b, falling.T, out=by_distance[:, :keys])
        by_distance[:, keys:] = -math.inf
        by_distance[:, : max(0, keys - self.window)] = -math.inf
        return _shifted(self.by_distance, rows, keys)

    def weights(self, a: Tensor, b: Tensor, k: Tensor, falling: Tensor) -> Tensor:
        """Return the attention weights (rows, keys), in buffer 0."""
        terms = self.position_terms(b, falling)
        scores = torch.addmm(terms, a, k.T, out=self.buffers.room(len(a), len(k), 0))
        return torch.softmax(scores, -1, out=scores)

    def by_distances(self, grad_scores: Tensor) -> Tensor:
        """Bring gradients (rows, keys) from the order of keys into the order of distances."""
        rows, keys = grad_scores.shape
        _shifted(self.by_distance, rows, keys).copy_(grad_scores)
        by_distance = self.by_distance.as_strided((rows, keys), (keys + rows, 1))
        # The first columns of a row may be unwritten memory: no key of the chunk has these distances from its query.
        by_distance[:, :rows].masked_fill_(self.later[:rows, :rows].flip(1), 0.0)
        return by_distance


def _shifted(by_distance: Tensor, rows: int, keys: int) -> Tensor:
    """Return terms in the order of distances, (rows, keys + rows), as a view in the order of keys, (rows, keys)."""
    return by_distance.as_strided((rows, keys), (keys + rows - 1, 1), rows - 1)


def _by_kernel(a: Tensor, k: Tensor, v: Tensor, terms: Tensor) -> Tensor:
    """Return the output (rows, D) of one chunk, from `a` (rows, D), keys and values (keys, D), terms (rows, keys)."""
    q, k, v, mask = (each[None, None] for each in (a, k, v, terms))
    output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=1.0)
    part: Tensor = output[0][0, 0]
    return part


def _biased(query: Tensor, bias: Tensor, scaling: float, vector_scaling: float) -> Tensor:
    """Return the scaled sum of one head's queries and a bias, (Q, D) float32."""
    return torch.add(bias.float() * vector_scaling, query.float(), alpha=scaling)


class _Skewed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[_Settings],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        settings: _Settings,
    ) -> Tensor:
        scaling, vector_scaling, window, rows = settings
        output = torch.empty_like(query)
        length = key.shape[2]
        work = _Work(query.shape[2], length, 0, window, rows)
        for h in range(key.shape[1]):
            falling = relative[h].float().flip(0)
            for n in range(key.shape[0]):
                k, v = (each[n, h].float() for each in (key, value))
                a, b = (_biased(query[n, h], u[h], scaling, vector_scaling) for u in (content_bias, position_bias))
                for i, end, first, last in work.chunks:
                    terms = work.position_terms(b[i:end], falling[length - (last - first) :])
                    output[n, h, i:end] = _by_kernel(a[i:end], k[first:last], v[first:last], terms)
        ctx.save_for_backward(query, key, value, relative, content_bias, position_bias)
        ctx.settings = settings
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[_Settings], gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, relative, *biases = ctx.saved_tensors
        scaling, vector_scaling, window, rows = ctx.settings
        grad_query, grad_key, grad_value = (torch.empty_like(each) for each in (query, key, value))
        grad_relative = torch.zeros(relative.shape)
        grad_biases = [torch.zeros(bias.shape) for bias in biases]
        length = key.shape[2]
        work = _Work(query.shape[2], length, 2, window, rows)
        for h in range(key.shape[1]):
            falling = relative[h].float().flip(0)
            grad_falling = torch.zeros(falling.shape)
            for n in range(key.shape[0]):
                k, v, g = (each[n, h].float() for each in (key, value, gradient))
                a, b = (_biased(query[n, h], bias[h], scaling, vector_scaling) for bias in biases)
                da, db, dk, dv = (torch.zeros(each.shape) for each in (a, b, k, v))
                for i, end, first, last in work.chunks:
                    keys, distances = slice(first, last), slice(length - (last - first), length)
                    weights = work.weights(a[i:end], b[i:end], k[keys], falling[distances])
                    dv[keys].addmm_(weights.T, g[i:end])
                    grad_scores = tiles.softmax_backward(work.buffers.product(g[i:end], v[keys].T, 1), weights)
                    da[i:end] = grad_scores @ k[keys]
                    dk[keys].addmm_(grad_scores.T, a[i:end])
                    by_distance = work.by_distances(grad_scores)
                    db[i:end] = by_distance @ falling[distances]
                    grad_falling[distances].addmm_(by_distance.T, b[i:end])
                grad_query[n, h], grad_key[n, h], grad_value[n, h] = (da + db) * scaling, dk, dv
                for sums, part in zip(grad_biases, (da, db), strict=True):
                    sums[h] += part.sum(0) * vector_scaling
            grad_relative[h] = grad_falling.flip(0)
        others = (
            each.to(of.dtype) for each, of in zip((grad_relative, *grad_biases), (relative, *biases), strict=True)
        )
        return grad_query, grad_key, grad_value, *others, None
