"""Attention with a bias by distance, in linear memory: chunked flash attention on a strided view of a table.

Let `b(d)` be the bias, and take the queries `i0 <= i < i0 + n` in reverse order: row `r` is query `i = i0 + n - 1 - r`.
The bias of row `r` and key `j` is then `b(i0 + n - 1 - (r + j))`, which depends on `r + j` only. Take the vector
`t[m] = b(L - 1 - m)` for `m < L`, and `t[m] = -inf` from there on. Its view with strides (1, 1) is both the bias and
the causal mask of that chunk, without a copy. The flash kernel of the CPU takes this view as its mask. The table of a
head has O(L) numbers, and no tensor has the shape (Q, L).

Backward: the kernel's, chunk by chunk, with the log-sum-exp of the forward. The gradient of a learned table is the sum
of the score gradients along each diagonal. A chunk's score gradients are computed again, and written with a row stride
one longer than a row. This turns diagonals into columns, which are summed.

Accuracy class: flash (float32 accumulation in the kernel; the bias stays in float32 beside bfloat16 inputs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.attention_call import Call
from ..core.forms import Bias, Slopes
from . import tiles
from .spans import SpanEngine

ROWS = 256
"""Queries per chunk. Smaller chunks need more kernel calls; larger ones compute more masked pairs on the diagonal."""


class Toeplitz(SpanEngine):
    """The engine for any bias by distance, with sliding windows."""

    name = "toeplitz"
    forms = (Bias, Slopes)
    wrong_form = "the scheme is no additive bias of distance"

    def attend_span(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Compute plain causal attention, see `SpanEngine.attend_span`."""
        table = tiles.windowed(call.form.curve(key.shape[2]), window)
        return attend(query, key, value, table, scaling=call.scaling)


Piece = tuple[int, int, int, int, int]
"""One kernel call: first query, last query + 1, first head, last head + 1, first key."""


def whole(queries: int, heads: int, rows: int = ROWS) -> list[Piece]:
    """Return the pieces of plain causal attention: every chunk of queries, all heads, all keys from the first.

    Args:
        queries: Q.
        heads: H.
        rows: queries per chunk.
    """
    return [(i, min(i + rows, queries), 0, heads, 0) for i in range(0, queries, rows)]


def attend(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, *, scaling: float, pieces: Sequence[Piece] | None = None
) -> Tensor:
    """Attend causally with a bias by distance; the last query sits on the last key.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q.
        value: (B, H, L, D).
        table: (H, L) float32, biases of distances 0 .. L-1, added to the scaled scores. Gradients flow to it.
        scaling: factor of the scores.
        pieces: the kernel calls, by default `whole(...)`. Keys outside the pieces are skipped.

    Returns:
        (B, H, Q, D) in the query's dtype.

    Raises:
        RuntimeError: in a second derivative.
    """
    if pieces is None:
        pieces = whole(query.shape[2], query.shape[1], ROWS)
    output: Tensor = _Toeplitz.apply(query, key, value, table, scaling, tuple(pieces))
    return output


class _Toeplitz(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, table: Tensor, scaling: float, pieces: tuple[Piece, ...]
    ) -> Tensor:
        shift = key.shape[2] - query.shape[2]
        reversed_ = tiles.reversed_table(table.detach(), -math.inf)
        output, log_sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        for i, end, h, h_end, j in pieces:
            heads, keys = slice(h, h_end), slice(j, shift + end)
            mask = tiles.by_pair(reversed_[None, heads], shift + end - 1, j, end - i, shift + end - j)
            part, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query[:, heads, i:end].flip(2),
                key[:, heads, keys],
                value[:, heads, keys],
                0.0,
                False,
                attn_mask=mask,
                scale=scaling,
            )
            output[:, heads, i:end] = part.flip(2)
            log_sums[:, heads, i:end] = log_sum.reshape(part.shape[:3]).flip(2)
        ctx.save_for_backward(query, key, value, table, output, log_sums)
        ctx.settings = scaling, pieces
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, table, output, log_sums = ctx.saved_tensors
        (scaling, pieces), shift, length = ctx.settings, key.shape[2] - query.shape[2], key.shape[2]
        reversed_ = tiles.reversed_table(table, -math.inf)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        grad_reversed = diagonals = None
        if ctx.needs_input_grad[3]:
            grad_reversed = torch.zeros_like(reversed_)
            diagonals = tiles.Diagonals(max(end - i for i, end, *_ in pieces), length)
        for i, end, h, h_end, j in pieces:
            heads, keys = slice(h, h_end), slice(j, shift + end)
            mask = tiles.by_pair(reversed_[None, heads], shift + end - 1, j, end - i, shift + end - j)
            g, q, o = (each[:, heads, i:end].flip(2) for each in (gradient, query, output))
            k, v = key[:, heads, keys], value[:, heads, keys]
            log_sum = log_sums[:, heads, i:end].flip(2).contiguous()
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                g, q, k, v, o, log_sum, 0.0, False, attn_mask=mask, scale=scaling
            )
            grad_query[:, heads, i:end] = dq.flip(2)
            grad_key[:, heads, keys] += dk
            grad_value[:, heads, keys] += dv
            if grad_reversed is not None and diagonals is not None:
                first_diagonal = length - 1 - (shift + end - 1) + j
                _add_scores(grad_reversed[heads], first_diagonal, diagonals, mask, scaling, log_sum, (q, k, v, o, g))
        grad_table = None if grad_reversed is None else grad_reversed[:, :length].flip(1)
        return grad_query, grad_key, grad_value, grad_table, None, None


def _add_scores(
    sums: Tensor,
    first_diagonal: int,
    diagonals: tiles.Diagonals,
    mask: Tensor,
    scaling: float,
    log_sum: Tensor,
    chunk: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Add the score gradients of a chunk to `sums` (H, 2 L), one entry per diagonal `r + j`, head by head.

    Args:
        sums: one sum per diagonal, added to in place.
        first_diagonal: diagonal of the chunk's first row and key.
        diagonals: memory for the score gradients.
        mask: bias of the chunk, (1, H, rows, keys).
        scaling: factor of the scores.
        log_sum: log-sum-exp of each row, (B, H, rows).
        chunk: queries, keys, values, outputs, and gradients of the outputs, (B, H, rows or keys, D).
    """
    rows, keys = mask.shape[-2:]
    for h in range(mask.shape[1]):
        for b in range(log_sum.shape[0]):
            q, k, v, o, g = (each[b, h].float() for each in chunk)
            weights = torch.addmm(mask[0, h], q, k.T, alpha=scaling).sub_(log_sum[b, h, :, None]).exp_()
            scores = g @ v.T
            torch.mul(scores.sub_((g * o).sum(-1, keepdim=True)), weights, out=diagonals.room(rows, keys))
            diagonals.add_to(sums[h], first_diagonal, rows, keys)
