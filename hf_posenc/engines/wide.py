"""Positions as ordinary attention: queries and keys get a few more dimensions, and torch's kernels do the rest.

A form whose scores are a product of two sides (`Form.sides`) is attention without positions over heads of D + X. By the
addition theorem Transformer-XL is: `[q + u | p rotated by w i] . [k | cos w j | sin w j]`. ALiBi has rank 2 (FlashBias,
arXiv:2505.12044), and forget gates have rank 1 in each head, because a number of the query changes no weight.

Numbers that grow with the position come first, in columns whose products are exact, so that they cancel before content
is added. Angles are computed in float64.

Accuracy class: flash. In bfloat16 and float16 the two sides of a term are rounded like queries and keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.attention_call import Call
from ..core.dtypes import compute_dtype
from ..core.forms import Content, Sides, pieces
from ..core.positions import DensePositions
from .base import Engine
from .sdpa import Sdpa

WIDEST = 256
"""Largest X. With more dimensions `chunked` is faster."""

MULTIPLE = 8
"""Head sizes that kernels take are multiples of this."""

GRID = 1 / 16
"""Sums of gates are rounded to this, and the rest goes into a column of its own."""


class Wide(Engine):
    """The engine for forms with two sides, and for forget gates and biases of keys, on every device."""

    name = "wide"
    traced = True
    token_bias = True
    real = True
    value_sizes = True

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        if call.form is None:
            return "the scheme has no form"
        if not call.form.positional and not call.has_token_bias:
            return "nothing is added to scores"
        if call.weights:
            return "attention weights were asked for, which only the reference engine has"
        if call.softcap is not None:
            return "the kernel has no soft cap on scores"
        if call.form.positional and not call.has_key_positions:
            return "the first tokens stay visible outside the window, at a distance that depends on the query"
        if call.has_token_bias and (reason := _why_not_numbers(call)) is not None:
            return reason
        if call.form.positional:
            if (width := call.form.width(call)) is None:
                return "positions add no product of two sides to the scores, or not in this dtype with gradients"
            if width > WIDEST:
                return f"heads would be {width} dimensions wider, which takes longer than other engines above {WIDEST}"
        return None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Attend over wider heads, see `Engine.attend`."""
        with torch.autocast(call.query.device.type, enabled=False):
            output, _ = Sdpa().attend(widened(call))
        return output, None


def widened(call: Call) -> Call:
    """Return the call without positions, over wider heads, whose weights and output are those of a call."""
    batch, heads, queries, _ = call.query.shape
    parts = [call.form.sides(call)] if call.form.positional else [Sides(call.query, *_nothing(call))]
    query = parts[0].query
    if call.has_token_bias:
        parts.append(_sides_of_numbers(call))
    of_query = [each.query_features.expand(batch, heads, queries, -1).to(query.dtype) for each in parts]
    of_key = [each.key_features.expand(batch, call.key.shape[1], -1, -1).to(query.dtype) for each in parts]
    key = call.key.to(query.dtype)  # under autocast dtypes may differ
    query, key = torch.cat([*of_query, query], -1), torch.cat([*of_key, key], -1)
    if rest := -query.shape[-1] % MULTIPLE:
        query, key = pad(query, (0, rest)), pad(key, (0, rest))
    return replace(
        call, query=query, key=key, value=call.value.to(query.dtype), form=Content(), log_gates=None, key_bias=None
    )


def _nothing(call: Call) -> tuple[Tensor, Tensor]:
    return call.query[:1, ..., :0], call.key[:1, ..., :0]


def _why_not_numbers(call: Call) -> str | None:
    """Return why numbers of tokens cannot be columns of the keys, or None if they can."""
    numbers = [each for each in (call.log_gates, call.key_bias) if each is not None]
    if call.query.dtype.itemsize < 4 and torch.is_grad_enabled() and any(each.requires_grad for each in numbers):
        return f"gradients of gates and of biases of keys have too few digits in {call.query.dtype}"
    if call.log_gates is None:
        return None
    if isinstance(call.positions, DensePositions) or call.positions.key_kept is not None:
        return "a query may see tokens before some that it does not see, and forget gates count those it sees"
    return None


def _sides_of_numbers(call: Call) -> Sides:
    """Return the two sides of forget gates and biases of keys.

    The bias of gates is `G_i - G_j`, with sums `G` over tokens. They are counted from the last query, in float64, and
    cut into pieces, the large ones first. Query heads that share a key read columns of their own.
    """
    batch, heads, queries, _ = call.query.shape
    groups, wide = call.groups, compute_dtype(call.query)
    positions = call.positions
    assert not isinstance(positions, DensePositions) or call.log_gates is None
    of_keys = call.query.new_zeros(batch, heads, call.key.shape[2], dtype=torch.float64)
    own = of_keys[:, :, :1].expand(batch, heads, queries)
    if call.log_gates is not None and not isinstance(positions, DensePositions):
        sums = call.log_gates.masked_fill(~positions.key_valid[:, None], 0).double().cumsum(-1)
        slots = torch.searchsorted(positions.key_index.contiguous(), positions.query_index.contiguous(), right=True)
        slots = (slots - 1).clamp(min=0)[:, None].expand(batch, heads, queries)
        sums = sums - sums.gather(-1, slots[..., -1:])
        own, of_keys = sums.detach().gather(-1, slots), of_keys - sums
    if call.key_bias is not None:
        of_keys = of_keys + call.key_bias
    of_query, of_key = [], []
    one_hot = torch.eye(groups, dtype=wide, device=own.device).repeat(call.key.shape[1], 1)[:, None]
    for a, b in zip(*(_cut(each / call.scaling, call) for each in (own, of_keys)), strict=True):
        of_query += [a[..., None], one_hot.expand(batch, heads, queries, groups).to(a.dtype)]
        by_key = b.view(batch, -1, groups, b.shape[-1]).transpose(2, 3)  # (B, K, L, groups)
        of_key += [torch.ones_like(by_key[..., :1]), by_key]
    return Sides(call.query, torch.cat(of_query, -1), torch.cat(of_key, -1))


def _cut(numbers: Tensor, call: Call) -> list[Tensor]:
    """Return numbers in pieces that a call's dtype holds: the large part first."""
    if call.query.dtype.itemsize < 4:
        return pieces(numbers.to(torch.float32), call.query.dtype, 3)
    large = (numbers.detach() / GRID).round() * GRID
    return [large.to(call.query.dtype), (numbers - large).to(call.query.dtype)]
