"""Vectors of clipped distances (Shaw et al. 2018) in linear memory: far keys by plain flash attention, near ones apart.

With `c = min(d, m)` the scores are `q . (k + a_c)` and the values `v + b_c`. All keys at a distance of at least `m`
share `a_m` and `b_m`: for a chunk of queries they are plain attention to `k + a_m` and `v + b_m`, without any mask,
which the flash kernel computes with its log-sum-exp. The other keys of the chunk, at most rows + m - 1 of them, are
computed one by one, and the two parts are merged by their log-sum-exps. Backward: the kernel's own for the far part,
given the merged output and log-sum-exp; the near part is computed again.

Accuracy class: flash for the far part, float32 for the near one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128
"""Queries per chunk: the near part costs rows + m keys of each."""


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
    return output


def _by_head(table: Tensor) -> Tensor:
    return table.detach().float() if table.ndim == 3 else table.detach().float()[None]


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_table: Tensor,
        value_table: Tensor | None,
        scaling: float,
        rows: int,
    ) -> Tensor:
        shift, queries = key.shape[2] - query.shape[2], query.shape[2]
        a = _by_head(key_table)
        b = torch.zeros_like(a[:, :1]) if value_table is None else _by_head(value_table)
        far_key, far_value = (key + a[:, -1:]).to(key.dtype), (value + b[:, -1:]).to(value.dtype)
        output, sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
        for i in range(0, queries, rows):
            end = min(i + rows, queries)
            q = query[:, :, i:end]
            first = max(0, shift + i - a.shape[1] + 2)
            scores, label = _near(q, key[:, :, first : shift + end], a, shift + i - first, scaling)
            total = scores.logsumexp(-1)
            if first:
                far, far_total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    q, far_key[:, :, :first], far_value[:, :, :first], 0.0, False, scale=scaling
                )
                far_total = far_total.reshape(total.shape)
                total = torch.logaddexp(total, far_total)
            weights = scores.sub_(total[..., None]).exp_()
            part = weights @ value[:, :, first : shift + end].float()
            if value_table is not None:
                part += _sums(weights, label, a.shape[1]) @ b
            if first:
                part += far.float() * (far_total - total).exp_()[..., None]
            output[:, :, i:end], sums[:, :, i:end] = part, total
        ctx.save_for_backward(query, key, value, key_table, value_table, output, sums)
        ctx.scaling, ctx.rows = scaling, rows
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_table, value_table, output, sums = ctx.saved_tensors
        shift, queries, scaling = key.shape[2] - query.shape[2], query.shape[2], ctx.scaling
        a = _by_head(key_table)
        b = torch.zeros_like(a[:, :1]) if value_table is None else _by_head(value_table)
        far_key, far_value = (key + a[:, -1:]).to(key.dtype), (value + b[:, -1:]).to(value.dtype)
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros(each.shape, dtype=torch.float32) for each in (key, value))
        heads, labels = query.shape[1], a.shape[1]
        of_a = torch.zeros(heads, labels, a.shape[2])
        of_b = torch.zeros_like(of_a)
        for i in range(0, queries, ctx.rows):
            end = min(i + ctx.rows, queries)
            q, g, o, total = (each[:, :, i:end] for each in (query, gradient, output, sums))
            first = max(0, shift + i - labels + 2)
            keys = slice(first, shift + end)
            scores, label = _near(q, key[:, :, keys], a, shift + i - first, scaling)
            weights = scores.sub_(total[..., None]).exp_()
            qf, gf = q.float(), g.float()
            wanted = gf @ value[:, :, keys].float().mT
            if value_table is not None:
                wanted += (gf @ b.mT).gather(-1, label.expand_as(wanted))
                of_b += (_sums(weights, label, labels).mT @ gf).sum(0)
            of_scores = wanted.sub_((gf * o.float()).sum(-1, keepdim=True)).mul_(weights).mul_(scaling)
            by_label = _sums(of_scores, label, labels)
            of_q = of_scores @ key[:, :, keys].float() + by_label @ a
            of_a += (by_label.mT @ qf).sum(0)
            of_key[:, :, keys] += of_scores.mT @ qf
            of_value[:, :, keys] += weights.mT @ gf
            if first:
                dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g.contiguous(),
                    q,
                    far_key[:, :, :first],
                    far_value[:, :, :first],
                    o,
                    total.contiguous(),
                    0.0,
                    False,
                    scale=scaling,
                )
                of_q += dq
                of_key[:, :, :first] += dk
                of_value[:, :, :first] += dv
                of_a[:, -1] += dk.float().sum((0, 2))
                of_b[:, -1] += dv.float().sum((0, 2))
            of_query[:, :, i:end] = of_q
        tables = []
        for table, found in ((key_table, of_a), (value_table, of_b)):
            shared = table is not None and table.ndim == 2
            tables.append(None if table is None else (found.sum(0) if shared else found).to(table.dtype))
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), *tables, None, None


def _near(q: Tensor, k: Tensor, a: Tensor, last: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Return scores (B, H, rows, keys) in float32, `-inf` for later keys, and the labels (rows, keys).

    Args:
        q: (B, H, rows, D).
        k: (B, H, keys, D).
        a: (H|1, m + 1, D).
        last: which of the keys the first query sits on.
        scaling: factor of the scores.
    """
    distance = torch.arange(last, last + q.shape[2])[:, None] - torch.arange(k.shape[2])
    label = distance.clamp(0, a.shape[1] - 1)
    qf = q.float() * scaling
    scores = qf @ k.float().mT
    scores += (qf @ a.mT).gather(-1, label.expand_as(scores))
    return scores.masked_fill_(distance < 0, float("-inf")), label


def _sums(weights: Tensor, label: Tensor, labels: int) -> Tensor:
    """Return the sums of weights (..., rows, keys) that share a label, (..., rows, labels)."""
    found = weights.new_zeros(*weights.shape[:-1], labels)
    return found.scatter_add_(-1, label.expand_as(weights), weights)
