"""Vectors of clipped distances (Shaw et al. 2018) in linear memory.

Far keys are computed by plain flash attention, near keys by matrix products. With `c = min(d, m)` the scores are
`q . (k + a_c)` and the values `v + b_c`. Keys at a distance of at least `m` share the last vectors. So the scores are
`q . k + q . (a_c - a_m) + q . a_m`, and the values `v + (b_c - b_m) + b_m`. Softmax ignores `q . a_m`, which is the
same for every key of a row. Weights sum to 1, so `b_m` is added to every output. What remains is plain attention,
except in a band of `m` distances.

For a chunk of queries the flash kernel computes the keys before the band, without a mask, and returns the log-sum-exp
of their scores. Matrix products score the other keys of the chunk, rows + m - 1 of them. The two parts are merged by
their log-sum-exps. In a block of scores (rows, rows + m - 1) the band is a strided view: entry `t` of row `r`, at
distance `m - 1 - t`, is in column `r + t`.

Backward: the far part takes the kernel's backward, with the merged output and log-sum-exp. The near part is computed
again. The differences of vectors are made outside, in float32 (`ClippedVectors.near`).

Accuracy class: flash for the far part, float32 for the near one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ..core.attention_call import Call
from ..core.forms import ClippedVectors
from ..core.positions import Positions
from .spans import SpanEngine

ROWS = 256
"""Queries per chunk. In the near part every query costs rows + m keys; the kernel is faster with many queries."""

SMALLEST = -80.0
"""Smallest logarithm of a weight. Below it `exp` is several times slower, and from -87 on it is denormal in float32."""


class Clipped(SpanEngine):
    """The engine for vectors of clipped distances (Shaw), without sliding windows."""

    name = "clipped"
    forms = (ClippedVectors,)
    wrong_form = "the scheme has no vectors of clipped distances"

    def why_not_form(self, call: Call) -> str | None:
        if (reason := super().why_not_form(call)) is not None:
            return reason
        assert isinstance(call.positions, Positions)
        return "it has no sliding windows" if int(call.positions.window.min()) < call.key.shape[2] else None

    def attend_span(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Compute plain causal attention, see `SpanEngine.attend_span`."""
        form: ClippedVectors = call.form
        a, b = (None if each is None else form.near(each, key.shape[2]) for each in (form.keys, form.values))
        output: Tensor = _Clipped.apply(query, key, value, a, b, call.scaling)
        if form.values is None:
            return output
        shared = form.values[..., -1:, :]
        return (output + shared).to(output.dtype) if torch.is_grad_enabled() else output.add_(shared)


class _Chunk:
    """The near part of one chunk: the queries `start` to `end` and their near keys; `i` sits on key `i + shift`.

    Keys and values are in float32, with `near - 1` rows of zeros before the first.
    """

    def __init__(self, start: int, end: int, shift: int, near: int) -> None:
        self.rows = slice(start, end)
        first = shift + start - near + 1
        self.first = max(0, first)
        self.near, self.width = near, end - start + near - 1
        self.keys = slice(shift + start, shift + start + self.width)
        row, column = torch.arange(end - start)[:, None], torch.arange(self.width)
        self.masked = (column > row + near - 1) | (column < -first)

    def band(self, block: Tensor) -> Tensor:
        """Return a view of a contiguous block (B, H, rows, width): its m near distances, (B, H, rows, m)."""
        shape = (*block.shape[:3], self.near)
        return block.as_strided(shape, (*block.stride()[:2], self.width + 1, 1), block.storage_offset())

    def scores(self, q: Tensor, k: Tensor, a: Tensor) -> Tensor:
        """Return the scores (B, H, rows, width), `-inf` where masked, from scaled queries and a window of keys."""
        block = q @ k.mT
        self.band(block).add_(q @ a.mT)
        return block.masked_fill_(self.masked, float("-inf"))


def _chunks(queries: int, keys: int, near: int) -> list[_Chunk]:
    starts = range(0, queries, ROWS)
    return [_Chunk(start, min(start + ROWS, queries), keys - queries, near) for start in starts]


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor | None, scaling: float
    ) -> Tensor:
        output, log_sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        k, v = (pad(each.float(), (0, 0, a.shape[1] - 1, 0)) for each in (key, value))

        for chunk in _chunks(query.shape[2], key.shape[2], a.shape[1]):
            scores = chunk.scores(query[:, :, chunk.rows].float() * scaling, k[:, :, chunk.keys], a)
            top = scores.amax(-1, keepdim=True)
            weights = scores.sub_(top).clamp_(min=SMALLEST).exp_().masked_fill_(chunk.masked, 0.0)
            part = weights @ v[:, :, chunk.keys]
            if b is not None:
                part += chunk.band(weights) @ b
            total = weights.sum(-1, keepdim=True)
            part, log_sum = part / total, total.log_().add_(top)
            if chunk.first:
                far, far_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query[:, :, chunk.rows], key[:, :, : chunk.first], value[:, :, : chunk.first], scale=scaling
                )
                merged = torch.logaddexp(log_sum, far_sum.reshape(log_sum.shape))
                near_share = (log_sum - merged).exp_()
                part, log_sum = part * near_share + far * (1 - near_share), merged
            output[:, :, chunk.rows] = part
            log_sums[:, :, chunk.rows] = log_sum[..., 0]
        ctx.save_for_backward(query, key, value, a, b, output, log_sums)
        ctx.scaling = scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, a, b, output, log_sums = ctx.saved_tensors
        scaling = ctx.scaling
        before = a.shape[1] - 1
        k, v = (pad(each.float(), (0, 0, before, 0)) for each in (key, value))
        grad_query, grad_key, grad_value = (torch.zeros(each.shape) for each in (query, k, v))  # in float32
        grad_a, grad_b = (None if each is None else torch.zeros(query.shape[1], *each.shape[1:]) for each in (a, b))

        for chunk in _chunks(query.shape[2], key.shape[2], a.shape[1]):
            every = slice(None), slice(None)
            rows, near, far = (*every, chunk.rows), (*every, chunk.keys), (*every, slice(0, chunk.first))
            q, g, o = (each[rows].float() for each in (query, gradient, output))
            q = q * scaling
            weights = chunk.scores(q, k[near], a).sub_(log_sums[rows][..., None]).clamp_(min=SMALLEST).exp_()
            weights.masked_fill_(chunk.masked, 0.0)
            grad_scores = g @ v[near].mT
            if b is not None and grad_b is not None:
                chunk.band(grad_scores).add_(g @ b.mT)
                grad_b += (chunk.band(weights).mT @ g).sum(0)
            grad_scores.sub_((g * o).sum(-1, keepdim=True)).mul_(weights)
            in_band = chunk.band(grad_scores)
            grad_query[rows] += (grad_scores @ k[near] + in_band @ a).mul_(scaling)
            grad_a += (in_band.mT @ q).sum(0)
            grad_key[near] += grad_scores.mT @ q
            grad_value[near] += weights.mT @ g
            if chunk.first:
                given = gradient[rows].contiguous(), query[rows], key[far], value[far], output[rows]
                dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *given, log_sums[rows].contiguous(), 0.0, False, scale=scaling
                )
                grad_query[rows] += dq
                grad_key[:, :, before : before + chunk.first] += dk
                grad_value[:, :, before : before + chunk.first] += dv
        inputs = (each.to(query.dtype) for each in (grad_query, grad_key[:, :, before:], grad_value[:, :, before:]))
        tables = (None if each is None else each.sum_to_size(len(a), *each.shape[1:]) for each in (grad_a, grad_b))
        return *inputs, *tables, None
