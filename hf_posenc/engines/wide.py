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

from ..core.attention_call import Call
from ..core.dtypes import wide_dtype
from ..core.forms import Content, Sides, pieces
from ..core.positions import DensePositions, Positions
from .base import Engine
from .flex import Flex
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
    few_kernels = True

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        if call.form is None:
            return "the scheme has no form: its scores are computed pair by pair, which is slow by nature"
        if not call.form.positional and not call.has_token_bias:
            return "nothing is added to scores"
        if call.base_bias is not None:
            return "the base adds a bias of its own to the scores, pair by pair"
        if call.weights:
            return "attention weights were asked for, which only the reference engine has"
        if call.softcap is not None:
            return "the kernel has no soft cap on scores"
        if call.form.positional and not call.has_key_positions:
            return "the first tokens stay visible outside the window, at a distance that depends on the query"
        if (reason := _why_no_sums(call)) is not None:
            return reason
        if call.form.positional:
            if (width := call.form.width(call)) is None:
                return "positions add no product of two sides to the scores, or not at real positions in 16 bits"
            if width > WIDEST:
                return f"heads would be {width} dimensions wider, which takes longer than other engines above {WIDEST}"
        return None

    def distrust(self, call: Call) -> str | None:
        """Return why FlexAttention is to compute a call, or None."""
        is_line = call.form.line is not None and not call.has_token_bias
        return "it would need a mask, and FlexAttention no wider heads" if is_line and Flex().is_better(call) else None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Attend over wider heads, see `Engine.attend`."""
        with torch.autocast(call.query.device.type, enabled=False):
            call = widened(call)
            return (Flex() if Sdpa().distrust(call) else Sdpa()).attend(call)


def widened(call: Call) -> Call:
    """Return the call without positions, over wider heads, whose weights and output are those of a call."""
    batch, heads, queries, size = call.query.shape
    parts = [call.form.sides(call)] if call.form.positional else []
    if call.has_token_bias:
        parts.append(_sides_of_numbers(call))
    query, key = parts[0].query, call.key.to(call.query.dtype)  # under autocast dtypes may differ
    of_query = [each.query_features.expand(batch, heads, queries, -1).to(query.dtype) for each in parts]
    of_key = [each.key_features.expand(*key.shape[:3], -1).to(query.dtype) for each in parts]
    if rest := -(size + sum(each.shape[-1] for each in of_key)) % MULTIPLE:
        zeros = call.positions.once(("zeros", rest, query.dtype), lambda: query.new_zeros(rest))
        of_query.append(zeros.expand(batch, heads, queries, rest))
        of_key.append(zeros.expand(*key.shape[:3], rest))
    query, key = torch.cat([*of_query, query], -1), torch.cat([*of_key, key], -1)
    return replace(
        call, query=query, key=key, value=call.value.to(query.dtype), form=Content(), log_gates=None, key_bias=None
    )


def _why_no_sums(call: Call) -> str | None:
    """Return why forget gates are no sums over tokens, or None if they are, or there are none."""
    if call.log_gates is None:
        return None
    if isinstance(call.positions, DensePositions) or call.positions.key_kept is not None:
        return "a query may see tokens before some that it does not see, and forget gates count those it sees"
    return None


def _numbers(call: Call) -> tuple[Tensor | None, Tensor]:
    """Return numbers of queries and keys, whose sum is what forget gates and biases of keys add to scores.

    The bias of gates is `G_i - G_j`, with sums `G` over tokens. They are counted from the last query, in float64.

    Returns:
        Of the queries (B, H, Q), without gradients, because they change no weight; None where there are none, or
        where they are those of the keys, negated. Of the keys (B, H, L).
    """
    positions, own = call.positions, None
    of_keys = call.key_bias
    if call.log_gates is not None:
        assert not isinstance(positions, DensePositions)
        gates = call.log_gates if positions.aligned else call.log_gates.masked_fill(~positions.key_valid[:, None], 0)
        sums = gates.cumsum(-1, dtype=wide_dtype(gates.device))
        if positions.aligned:
            at_queries, last = sums.detach(), sums[..., -1:]
        else:
            slots = torch.searchsorted(positions.key_index.contiguous(), positions.query_index.contiguous(), right=True)
            slots = (slots - 1).clamp(min=0)[:, None].expand(*call.query.shape[:3])
            at_queries, last = sums.detach().gather(-1, slots), sums.gather(-1, slots[..., -1:])
        of_keys = last - sums if call.key_bias is None else last - sums + call.key_bias
        if not positions.aligned or call.key_bias is not None:
            own = at_queries - last.detach()
    assert of_keys is not None
    return own, _balanced(of_keys, positions)


def _balanced(numbers: Tensor, positions: Positions | DensePositions) -> Tensor:
    """Return numbers of keys as they are, whose gradients get the mean over the keys of each document taken off.

    Gradients of a query's scores sum to 0, so those of a document's keys do, but for rounding in 16 bits, which sums
    over many tokens would add up.
    """
    if not (torch.is_grad_enabled() and numbers.requires_grad):
        return numbers
    if isinstance(positions, DensePositions) or positions.plain:
        mean = numbers.mean(-1, keepdim=True)
    else:
        segment, valid = positions.key_segment, positions.key_valid[:, None]
        document = torch.nn.functional.pad((segment[:, 1:] != segment[:, :-1]).cumsum(-1), (1, 0))[:, None]
        batch = max(len(numbers), len(valid), len(document))
        shape = (batch, *numbers.shape[1:])
        document, valid = document.expand(shape), valid.expand(shape)
        totals, counts = (
            numbers.new_zeros(shape).scatter_add(-1, document, torch.where(valid, each, 0).to(numbers.dtype))
            for each in (numbers.expand(shape), torch.ones_like(numbers).expand(shape))
        )
        mean = torch.where(valid, (totals / counts.clamp(min=1)).gather(-1, document), 0)
    return numbers - mean + mean.detach()


def _sides_of_numbers(call: Call) -> Sides:
    """Return the two sides of numbers of queries and keys, `_numbers`.

    They are cut into pieces, the large ones first. Query heads that share a key read columns of their own.
    """
    batch, heads, queries, _ = call.query.shape
    groups = call.groups
    own, of_keys = _numbers(call)
    keys = _cut(of_keys / call.scaling, call)
    if own is not None:
        of_query = _cut(own / call.scaling, call)
    else:  # without gates nothing is to be cancelled
        of_query = -keys.detach() if call.log_gates is not None else keys.new_zeros(1, 1, 1, keys.shape[-1])
    count = keys.shape[-1]

    def one_hot() -> Tensor:
        made = torch.eye(groups, dtype=keys.dtype, device=keys.device).repeat(call.key.shape[1], 1)
        return made[:, None, None].expand(heads, 1, count, groups)

    shared = call.positions.once(("one hot", heads, groups, count, keys.dtype), one_hot)
    shape = (batch, heads, queries, count)
    of_query = torch.cat([of_query.expand(shape)[..., None], shared.expand(*shape, groups)], -1).flatten(-2)
    by_key = keys.view(batch, -1, groups, *keys.shape[2:]).permute(0, 1, 3, 4, 2)  # (B, K, L, pieces, groups)
    return Sides(call.query, of_query, torch.nn.functional.pad(by_key, (1, 0), value=1.0).flatten(-2))


def _cut(numbers: Tensor, call: Call) -> Tensor:
    """Return numbers in pieces that a call's dtype holds, the large part first: one more dimension."""
    if call.query.dtype.itemsize < 4:
        return torch.stack(pieces(numbers.to(torch.float32), call.query.dtype, 3), -1)
    large = (numbers.detach() / GRID).round() * GRID
    return torch.stack([large, numbers - large], -1).to(call.query.dtype)
