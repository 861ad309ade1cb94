"""CUDA: attention in parts, each to the keys of a range of distances, merged by their log-sum-exps. O(L) memory.

A part is attention without positions, which FlexAttention computes with a mask of blocks by distance. It also returns
the log-sum-exps of the scores. Their softmax is how much each part of a row counts, and gradients flow through them.

- Ranges (`far_rope`): each range of distances is a part, with its own rotation of queries and keys.
- Vectors of clipped distances (Shaw): those of far keys cancel, see `clipped`. So the keys from distance `m` on are one
  part. The others are a band of `m` distances, by products of `ROWS` queries with the `ROWS + m - 1` keys up to them.

Nothing is read from the device, except where a call of Shaw has padding or a cache: once in a forward pass, whether
positions count slots.

Accuracy class: flash, and float32 for the band. It is tested on CPUs against the reference engine, and on the user's
device by `selftest` before `auto` takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.functional import pad

from ..core.attention_call import Call
from ..core.forms import ClippedVectors, Form, Ranges, for_form
from ..core.positions import NO_WINDOW, Positions, can_read
from .flex import GAPPED_TABLE, INVISIBLE, Flex, Range, by_kernel, change_of
from .spans import spans

ROWS = 64
"""Queries per block of the band."""

LEAST = -1e30
"""Score of a hidden key of the band, and log-sum-exp of a part without keys."""

Part = tuple[Tensor, Tensor]
"""Output (B, H, Q, V) and log-sum-exps (B, H, Q) of attention to some of the keys."""

Far = Callable[[Call, Range], Part]
"""A call and a range of distances -> the part of the keys at these distances, without positions."""


def _ranges(form: Ranges, call: Call, far: Far) -> list[Part]:
    ranges = pairwise((-NO_WINDOW, *form.edges, NO_WINDOW))
    variants = (replace(call, query=query, key=key) for query, key in form.variants(call))
    return [far(each, Range(*ends, form.unit)) for each, ends in zip(variants, ranges, strict=True)]


def _clipped_vectors(form: ClippedVectors, call: Call, far: Far) -> list[Part]:
    keys = call.key.shape[2]
    if not call.positions.aligned and torch.compiler.is_compiling():
        _assert_counted(call.positions)
    a = form.near(form.keys, keys)
    band = _band(call, a, None if form.values is None else form.near(form.values, keys))
    return [band] if a.shape[1] == keys else [band, far(call, Range(low=a.shape[1]))]


# ----------------------------------------------------------------------------------------------------------- the band


def _band(call: Call, a: Tensor, b: Tensor | None) -> Part:
    """Return the part of the last `m` keys, with vectors (H|1, m, D) for keys, and for values or None."""
    positions, queries, near = call.positions, call.query.shape[2], a.shape[1]
    assert isinstance(positions, Positions)
    columns, hidden = positions.once(("band", near), lambda: _keys_of_band(positions, near))
    blocks, width = columns.shape

    def of_keys(tensor: Tensor) -> Tensor:  # (B, K, blocks, width, D)
        return tensor.index_select(2, columns.flatten()).unflatten(2, (blocks, width)).float()

    def split(tensor: Tensor) -> Tensor:  # (B, K, G, blocks, ROWS, ...)
        return tensor.unflatten(2, (blocks, ROWS)).unflatten(1, (-1, call.groups))

    def joined(tensor: Tensor) -> Tensor:  # (B, H, blocks * ROWS, ...)
        return tensor.flatten(3, 4).flatten(1, 2)

    query = pad(call.query.float() * call.scaling, (0, 0, 0, blocks * ROWS - queries))
    # Row `r` of a block has its band from column `r` on: in memory, in rows that are one number longer, from 0 on.
    products = torch.einsum("bkgnrd,bknwd->bkgnrw", split(query), of_keys(call.key)).flatten(-2)
    band = pad(products, (0, ROWS)).unflatten(-1, (ROWS, width + 1))[..., :near]
    scores = (band + split(query @ a.mT)).masked_fill(hidden[:, None, None], LEAST)
    weights = scores.softmax(-1)
    moved = pad(weights, (0, ROWS)).flatten(-2)[..., : ROWS * width].unflatten(-1, (ROWS, width))
    output = joined(torch.einsum("bkgnrw,bknwd->bkgnrd", moved, of_keys(call.value)))
    if b is not None:
        output = output + joined(weights) @ b
    return output[:, :, :queries], joined(scores.logsumexp(-1))[:, :, :queries]


def _keys_of_band(positions: Positions, near: int) -> tuple[Tensor, Tensor]:
    """Return the keys of each block, (blocks, ROWS + m - 1), and which the band hides, bool (B|1, blocks, ROWS, m)."""
    p, device = positions, positions.query_index.device
    queries, keys = p.query_index.shape[-1], p.key_index.shape[-1]
    blocks = -(-queries // ROWS)
    starts = torch.arange(0, blocks * ROWS, ROWS, device=device)[:, None] + (p.query_index[0, 0] - p.key_index[0, 0])
    columns = starts + torch.arange(1 - near, ROWS, device=device)
    outside, columns = (columns < 0) | (columns >= keys), columns.clamp(0, keys - 1)
    segment = torch.where(p.key_valid, p.key_segment, INVISIBLE)[:, columns].masked_fill(outside, INVISIBLE)
    own = pad(p.query_segment, (0, blocks * ROWS - queries)).unflatten(-1, (blocks, ROWS))[..., None]
    too_far = torch.arange(near - 1, -1, -1, device=device) >= p.window[..., None, None]
    return columns, (segment.unfold(-1, near, 1) != own) | too_far


def _assert_counted(p: Any) -> None:
    """Let a graph of torch.compile fail where positions of the same queries and keys do not count slots."""
    offset, valid = p.key_positions - p.key_index, p.key_valid
    before, follows = valid[:, :-1], (p.key_segment.diff() == 0) & valid[:, 1:]
    padding_inside = ~before & (before.cumsum(-1) > 0)
    torch._assert_async(~(follows & (padding_inside | (before & (offset.diff() != 0)))).any(), GAPPED_TABLE)


def _why_no_band(call: Call) -> str | None:
    """Return why near keys are no band of slots, or far ones have vectors that count, or None."""
    if call.softcap is not None:
        return "vectors of far keys do not cancel under a soft cap on scores"
    positions: Any = call.positions
    if positions.aligned or (torch.compiler.is_compiling() and call.query.shape[2] == call.key.shape[2]):
        return None  # a graph asserts it, see `_assert_counted`
    if not can_read(positions.key_index, waiting=True):
        return "it is not known whether positions count slots: torch.compile cannot read them"

    def counted() -> bool:
        on_cpu = {name: each.cpu() for name, each in vars(positions).items() if isinstance(each, Tensor)}
        return spans(replace(positions, **on_cpu)) is not None

    return None if positions.once("counted", counted) else "padded keys in a cache, padding inside a document, or gaps"


# --------------------------------------------------------------------------------------------------------- the engine


PARTS: Mapping[type[Form], Callable[[Any, Call, Far], list[Part]]] = {Ranges: _ranges, ClippedVectors: _clipped_vectors}
"""Form -> function (form, call, computation of far parts) -> parts."""


class NearFar(Flex):
    """FlexAttention on CUDA, for forms that are attention without positions in each range of distances."""

    name = "near_far"
    forms = tuple(PARTS)
    wrong_form = "the scheme has neither vectors of clipped distances nor a rotation for each range of distances"

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        reason = super().why_not(call)
        return reason or (_why_no_band(call) if change_of(call.form) == "clipped" else None)

    def compute(self, call: Call, kernel_options: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Compute a call with some options of the kernel."""

        def far(part: Call, within: Range) -> Part:
            output, more = by_kernel(part, kernel_options, within, return_aux=AuxRequest(lse=True))
            return output, more.lse

        with torch.autocast(call.query.device.type, enabled=False):
            parts = for_form(PARTS, call.form)(call.form, call, far)
            sums = torch.stack([each for _, each in parts]).clamp(min=LEAST)
            shares = sums.softmax(0)[..., None]
            output = (shares * torch.stack([each.float() for each, _ in parts])).sum(0)
            if (table := call.form.value_table) is not None:
                output = output + table[..., -1:, :]
        return output.transpose(1, 2).to(call.query.dtype), None
