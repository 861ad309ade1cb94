"""Engines that compute plain causal attention of one document: a call is split into such pieces, if it can be."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ..call import Call
from ..positions import Positions
from .base import Engine, why_not_in_blocks

Span = tuple[slice, slice, slice]
"""Batch rows, queries and keys that are plain causal attention among themselves: the last query on the last key."""


def spans(positions: Positions) -> list[Span] | None:
    """Split a call into pieces of plain causal attention: the documents of each row, without the padding.

    Args:
        positions: on a CPU.

    Returns:
        The pieces, covering every query that is no padding; None if positions do not count up by one, if there is
        padding inside a document, or if queries and keys are different tokens and not all keys are valid and of one
        document.
    """
    index, key_index = positions.query_index, positions.key_index
    queries, keys = index.shape[-1], key_index.shape[-1]
    if not (_counts_up(index) and _counts_up(key_index)) or bool((index[:, -1] != index[0, -1]).any()):
        return None
    if bool((key_index[:, 0] != key_index[0, 0]).any()):
        return None
    everything = slice(None)
    end = int(index[0, -1] - key_index[0, 0]) + 1  # a static cache is longer than what is in it
    one = bool(positions.key_valid[:, :end].all()) and bool(
        (positions.key_segment[:, :end] == positions.query_segment[:, :1]).all()
    )
    if end > keys or end < queries:
        return None
    if one:
        lag = positions.query_positions - index
        same = (positions.key_positions - key_index)[:, :end] == lag[:, :1]
        return [(everything, everything, slice(0, end))] if bool((lag == lag[:, :1]).all() and same.all()) else None
    if end != queries or end != keys:
        return None
    found: list[Span] = []
    shape = (max(t.shape[0] for t in (positions.key_valid, positions.key_segment, positions.key_positions)), keys)
    valid, segment, position = (
        each.expand(shape) for each in (positions.key_valid, positions.key_segment, positions.key_positions)
    )
    joined = (valid[:, 1:] == valid[:, :-1]) & (segment[:, 1:] == segment[:, :-1])
    if not bool(((position[:, 1:] - position[:, :-1] == 1) | ~joined | ~valid[:, 1:]).all()):
        return None
    for row in range(shape[0]):
        edges = [0, *((~joined[row]).nonzero()[:, 0] + 1).tolist(), keys]
        part = slice(row, row + 1) if shape[0] > 1 else everything
        documents: set[int] = set()
        for start, stop in pairwise(edges):
            if bool(valid[row, start]):
                document = int(segment[row, start])
                if document in documents:  # padding inside a document: what is after it sees what is before it
                    return None
                documents.add(document)
                found.append((part, slice(start, stop), slice(start, stop)))
    return found


def _counts_up(index: Tensor) -> bool:
    return bool((index[:, 1:] - index[:, :-1] == 1).all())


class SpanEngine(Engine):
    """An engine for CPUs, in float32 and bfloat16, without weights, soft cap and dropout, in O(L) memory.

    Attributes:
        wrong_form: why it does not take a scheme of another form.
    """

    wrong_form: ClassVar[str]

    def why_not(self, call: Call) -> str | None:
        if (reason := why_not_in_blocks(call)) is not None:
            return reason
        if call.query.device.type != "cpu":
            return f"it is written for CPUs, the tensors are on {call.query.device.type}"
        if call.query.dtype not in (torch.float32, torch.bfloat16):
            return f"the kernel takes float32 and bfloat16, not {call.query.dtype}"
        if call.softcap is not None:
            return "the kernel has no soft cap on scores"
        if call.dropout > 0:
            return "attention dropout needs the weights"
        if (reason := self.why_not_form(call)) is not None:
            return reason
        assert isinstance(call.positions, Positions)
        if spans(call.positions) is None:
            return "padded keys in a cache, padding inside a document, or position_ids with gaps"
        return None

    def why_not_form(self, call: Call) -> str | None:
        """Return why the engine does not take the scheme's form, or None if it does."""
        return None if isinstance(call.form, self.forms or ()) else self.wrong_form

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Compute each piece by itself, see `Engine.attend`; padding gets zeros."""
        positions = call.positions
        assert isinstance(positions, Positions)
        with torch.autocast(call.query.device.type, enabled=False):  # bounds and tables need float32
            pieces = spans(positions)
            assert pieces is not None
            query = call.query
            # Under autocast their dtypes may differ.
            key, value = (each.to(query.dtype) for each in (call.key, call.value))
            if call.groups > 1:
                key, value = (each.repeat_interleave(call.groups, 1) for each in (key, value))
            window = int(positions.window.min())
            if len(pieces) == 1 and pieces[0][1] == slice(None):
                rows, _, keys = pieces[0]
                return self.part(call, query[rows], key[rows, :, keys], value[rows, :, keys], window).transpose(
                    1, 2
                ), None
            output = torch.zeros_like(query)
            for rows, queries, keys in pieces:
                q, k, v = query[rows, :, queries], key[rows, :, keys], value[rows, :, keys]
                output[rows, :, queries] = self.part(call, q, k, v, window)
        return output.transpose(1, 2), None

    def part(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Compute plain causal attention; the last query sits on the last key.

        Args:
            call: has the form and the scalings.
            query: (B, H, Q, D).
            key: (B, H, L, D), L >= Q.
            value: (B, H, L, D).
            window: keys at this distance or further are not seen.

        Returns:
            (B, H, Q, D).
        """
        raise NotImplementedError(type(self).__name__)
