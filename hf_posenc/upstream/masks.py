"""The mask function of this package. It makes the position channel from transformers' description of a mask.

Importing it registers the function with transformers under the name `hf_posenc`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_overlay,
)

from .. import positions
from . import NAME

BIDIRECTIONAL = (
    "is_causal is False: no scheme here defines distances to keys that come later. Set config.is_causal "
    "back to True and do not pass is_causal, or unpatch the model"
)

MaskFunction = Callable[..., Tensor]
"""Indices of batch row, head, query slot and key slot -> whether the query sees the key."""


class MaskShape(TypedDict, total=False):
    """The parts of a mask function, those that it has.

    Attributes:
        causal: True.
        window: sliding window in tokens.
        segments: (B|1, T) number of each token's document.
        chunks: their length, and the left padding (B,), where a query sees keys of its own chunk only.
    """

    causal: bool
    window: int | Tensor
    segments: Tensor
    chunks: tuple[int, Tensor]


_SLIDING = sliding_window_overlay(1).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_CHUNKED = chunked_overlay(1, torch.zeros(1)).__code__
_AND = and_masks(causal_mask_function).__code__


def _remapping_code() -> object:
    """Return the code of 5.23's remapping of packed indices; older releases have none."""
    from transformers import masking_utils

    make = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    return None if make is None else make(causal_mask_function, torch.zeros(1, 1)).__code__


_REMAPPED = _remapping_code()


def describe_mask(mask_function: MaskFunction) -> MaskShape | None:
    """Return the parts of a mask function of transformers, or None if one of them is unknown.

    Its closures are recognised by the identity of their code, so that an unknown one is never mistaken for a known one.
    """
    if mask_function is causal_mask_function:
        return {"causal": True}
    code = getattr(mask_function, "__code__", None)
    if code not in (_SLIDING, _PACKED, _CHUNKED, _AND, _REMAPPED) or code is None:
        return None
    inside = inspect.getclosurevars(mask_function).nonlocals
    if code is _SLIDING:
        return {"window": inside["sliding_window"]}
    if code is _PACKED:
        return {"segments": inside["packed_sequence_mask"]}
    if code is _CHUNKED:
        return {"chunks": (inside["chunk_size"], inside["left_padding"])}
    if code is _REMAPPED:  # positions of one packed document are consecutive: order and lags are those of the indices
        return describe_mask(inside["mask_function"])
    parts = [describe_mask(part) for part in inside["mask_functions"]]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or sum("window" in part for part in known) > 1:
        return None
    shape: MaskShape = {}
    for part in known:
        shape.update(part)
    return shape


def in_segments(shape: MaskShape, key_index: Tensor, *, same_tokens: bool) -> MaskShape | None:
    """Return the parts of a mask with its chunks as segments, or without them; None where they are no segments.

    Args:
        shape: from `describe_mask`.
        key_index: (1, L) slots.
        same_tokens: whether queries and keys are the same tokens.
    """
    if "chunks" not in shape:
        return shape
    size, padding = shape.pop("chunks")
    if key_index.shape[-1] == 0 or int(key_index[0, -1]) < size:
        return shape  # all in the first chunk; what is padding there nobody sees
    if not same_tokens or "segments" in shape:
        return None
    return {**shape, "segments": (key_index - padding.to(key_index.device)[:, None]) // size}


def causal_documents(segments: Tensor | None) -> MaskFunction:
    """Return transformers' mask function of causal attention, inside documents that do not see each other.

    Args:
        segments: (B, T) number of each token's document; None means one document.
    """
    if segments is None:
        return causal_mask_function
    packed: MaskFunction = and_masks(causal_mask_function, packed_sequence_mask_function(segments))
    return packed


def probe_mask(
    mask_function: MaskFunction, query_index: Tensor, batch_size: int, same_tokens: bool, window: int | None
) -> MaskShape:
    """Find window and segments by asking the mask function about O(Q) pairs.

    This is for compiling, where closures cannot be taken apart. The decoder masks of transformers are conjunctions of
    causality, one sliding window, packed segments and chunks. Every supported family builds its masks from these only.
    Chunks are found as segments.

    Args:
        mask_function: a conjunction of the above.
        query_index: (1, Q) slots.
        batch_size: B.
        same_tokens: whether queries and keys are the same tokens: only then can there be segments.
        window: the config's sliding window, which this mask may or may not have.

    Returns:
        as `describe_mask`, with `window` a tensor.
    """
    found: MaskShape = {"causal": True}
    rows = torch.arange(batch_size, device=query_index.device)[:, None]
    index = query_index.expand(batch_size, -1)
    same_segment = torch.ones_like(index, dtype=torch.bool)
    if same_tokens:
        joined = mask_function(rows, 0, index, (index - 1).clamp(min=0))
        found["segments"] = (~joined).cumsum(-1)
    if window is not None:
        behind = (index - window).clamp(min=0)
        if same_tokens:
            same_segment = found["segments"] == found["segments"].gather(-1, behind)
        beyond = mask_function(rows, 0, index, behind) & same_segment & (index >= window)
        found["window"] = torch.where(beyond.any(), positions.NO_WINDOW, window)
    return found


def position_channel(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Make the position channel; the function behind the mask name `hf_posenc`.

    Args:
        batch_size: B.
        q_length: Q.
        kv_length: L.
        q_offset: slot of the first query; a static cache passes a live tensor.
        kv_offset: slot of the first key.
        mask_function: which pairs are visible, of slots.
        attention_mask: (B, slots) bool, False for padding, or None.
        use_vmap: how to evaluate a mask function that is not made of index arithmetic.
        device: of the model's inputs.
        **kwargs: the rest of the interface.

    Returns:
        The compact int32 channel (B|1, 1, ROWS, Q + L), or the dense form (B|1, 1, Q + 1, L + 1) for mask functions
        that it cannot express.

    Raises:
        ValueError: for a mask function that shows later keys.
    """
    if mask_function is bidirectional_mask_function:
        raise ValueError(BIDIRECTIONAL)
    query_index = (torch.arange(q_length, device=device) + q_offset)[None]
    key_index = (torch.arange(kv_length, device=device) + kv_offset)[None]
    seen = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    counted = _count(seen, query_index, key_index)
    same_tokens = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0
    shape = _shape_of(mask_function, query_index, key_index, batch_size, same_tokens, kwargs.get("config"))
    if shape is None or "causal" not in shape:
        visible = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        later = key_index[:, None, None] > query_index[:, None, :, None]
        positions.ensure(~(visible & later).any(), positions.SHOWS_FUTURE)
        return positions.pack_dense(counted["query_positions"], counted["key_positions"], visible)
    segments = shape.get("segments")
    if segments is not None:  # queries and keys are the same tokens
        places = _count_in_documents(segments)
        counted |= {"query_positions": places, "key_positions": places}
    return positions.pack(
        query_index,
        key_index,
        **counted,
        query_segment=segments,
        key_segment=segments,
        window=shape.get("window"),
    )


def _count(seen: Tensor | None, query_index: Tensor, key_index: Tensor) -> dict[str, Tensor]:
    """Return the arguments of `positions.pack` that depend on padding.

    Args:
        seen: (B, slots) bool, False for padding; None means that there is none.
        query_index: (1, Q) slots.
        key_index: (1, L) slots.
    """
    if seen is None:
        return {"query_positions": query_index, "key_positions": key_index}
    counted = seen.cumsum(-1) - 1  # padding takes no position
    slots = torch.arange(seen.shape[-1], device=seen.device)
    padding = torch.where(seen, -1, slots).cummax(-1).values  # the last slot of it up to each
    since = slots - torch.where(seen, padding, -1).amax(-1, keepdim=True)  # the last padding that a token follows
    resumed = torch.where((since > 0) & (since <= counted), since, counted)  # if there are tokens before it, too

    def at(table: Tensor, index: Tensor) -> Tensor:
        return table.gather(-1, index.clamp(max=table.shape[-1] - 1).expand(table.shape[0], -1))

    return {
        "query_positions": at(counted, query_index),
        "key_positions": at(counted, key_index),
        "query_valid": at(seen, query_index),
        "key_valid": at(seen, key_index),
        "query_resumed": at(resumed, query_index),
    }


def _count_in_documents(segments: Tensor) -> Tensor:
    """Return positions that start again at each document, (B|1, T), from the number of each token's document."""
    index = torch.arange(segments.shape[-1], device=segments.device)[None]
    starts = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(-1).values


def _shape_of(
    mask_function: MaskFunction,
    query_index: Tensor,
    key_index: Tensor,
    batch_size: int,
    same_tokens: bool,
    config: PreTrainedConfig | None,
) -> MaskShape | None:
    """Return what a mask function shows, without chunks; None if the compact channel cannot express it.

    Args:
        mask_function: which pairs are visible, of slots.
        query_index: (1, Q) slots.
        key_index: (1, L) slots.
        batch_size: B.
        same_tokens: whether queries and keys are the same tokens.
        config: of the model, or None.
    """
    if not torch.compiler.is_compiling() or getattr(mask_function, "__code__", None) is not _AND:
        shape = describe_mask(mask_function)
        return None if shape is None else in_segments(shape, key_index, same_tokens=same_tokens)
    if getattr(config, "attention_chunk_size", None) is not None and not same_tokens:
        return None  # chunks are found as segments are, between tokens that follow each other, so not with a cache
    return probe_mask(mask_function, query_index, batch_size, same_tokens, getattr(config, "sliding_window", None))


def check_masks(arguments: Iterable[object]) -> None:
    """Refuse 4-D masks that a decoder is called with, if they show later keys or are of integers.

    Args:
        arguments: of the decoder. What is 4-D among them is a mask; families with several kinds of layers may get a
            dict of masks. A cache says where the queries sit.

    Raises:
        ValueError: see `positions.check`.
    """
    found = [each for given in arguments for each in (given.values() if isinstance(given, dict) else (given,))]
    masks = [each for each in found if isinstance(each, Tensor) and each.ndim == 4]
    if masks:
        before = next((each.get_seq_length() for each in found if isinstance(each, Cache)), 0)
        for mask in masks:
            positions.check(mask, before.to(mask.device) if isinstance(before, Tensor) else before)


AttentionMaskInterface.register(NAME, position_channel)
