"""The base class of engines that compute plain causal attention of one document, and the split of calls into such."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.positions import Positions
from .base import Engine, why_not_kernel, why_not_near_keys

Span = tuple[slice, slice, slice]
"""Batch rows, queries and keys of a piece of plain causal attention. The last query sits on the last key."""


def spans(positions: Positions) -> list[Span] | None:
    """Split a call into pieces of plain causal attention: the documents of each row, without the padding.

    Args:
        positions: positions of the call, on a CPU.

    Returns:
        The pieces, which cover every query that is no padding. None if positions do not count up by one, or padding is
        inside a document. With a cache also None unless all keys are valid and of one document.
    """
    index, key_index = positions.query_index, positions.key_index
    queries, keys = index.shape[-1], key_index.shape[-1]
    if not (_counts_up(index) and _counts_up(key_index)) or bool((index[:, -1] != index[0, -1]).any()):
        return None
    if bool((key_index[:, 0] != key_index[0, 0]).any()):
        return None
    everything = slice(None)
    end = int(index[0, -1] - key_index[0, 0]) + 1  # keys from here on are unused slots of a static cache
    if end > keys or end < queries:
        return None
    if bool(positions.key_valid[:, :end].all()) and bool(
        (positions.key_segment[:, :end] == positions.query_segment[:, :1]).all()
    ):  # one document without padding
        lag = positions.query_positions - index
        same_lag = (positions.key_positions - key_index)[:, :end] == lag[:, :1]
        return [(everything, everything, slice(0, end))] if bool((lag == lag[:, :1]).all() and same_lag.all()) else None
    return _documents(positions) if queries == keys == end else None


def _documents(positions: Positions) -> list[Span] | None:
    """Return the documents of every row, where queries and keys are the same tokens, or None, see `spans`."""
    per_token = (positions.key_valid, positions.key_segment, positions.key_positions)
    batch, keys = max(each.shape[0] for each in per_token), positions.key_index.shape[-1]
    valid, segment, position = (each.expand(batch, keys) for each in per_token)
    continues = (valid[:, 1:] == valid[:, :-1]) & (segment[:, 1:] == segment[:, :-1])
    if not bool(((position[:, 1:] - position[:, :-1] == 1) | ~continues | ~valid[:, 1:]).all()):
        return None
    pieces: list[Span] = []
    for row in range(batch):
        edges = [0, *((~continues[row]).nonzero()[:, 0] + 1).tolist(), keys]
        rows = slice(row, row + 1) if batch > 1 else slice(None)
        documents: set[int] = set()
        for start, stop in pairwise(edges):
            if bool(valid[row, start]):
                document = int(segment[row, start])
                if document in documents:  # padding inside a document: its tokens see each other across the padding
                    return None
                documents.add(document)
                pieces.append((rows, slice(start, stop), slice(start, stop)))
    return pieces


def _counts_up(index: Tensor) -> bool:
    return bool((index[:, 1:] - index[:, :-1] == 1).all())


class SpanEngine(Engine):
    """An engine for CPUs, in float32 and bfloat16, without weights, soft cap and dropout, in O(L) memory."""

    def why_not(self, call: Call) -> str | None:
        reason = why_not_near_keys(call) or why_not_kernel(call, "cpu", torch.float32, torch.bfloat16)
        if reason := reason or self.why_not_form(call):
            return reason
        if call.softcap is not None:
            return "the kernel has no soft cap on scores"
        assert isinstance(call.positions, Positions)
        if spans(call.positions) is None:
            return "padded keys in a cache, padding inside a document, or position_ids with gaps"
        return None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Compute the pieces of a call one by one, see `Engine.attend`. The output of padding is 0."""
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
            output = torch.zeros_like(query)
            for rows, queries, keys in pieces:
                q, k, v = query[rows, :, queries], key[rows, :, keys], value[rows, :, keys]
                output[rows, :, queries] = self.attend_span(call, q, k, v, window)
        return output.transpose(1, 2), None

    def attend_span(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
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
