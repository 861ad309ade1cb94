"""The mask function of this package. It makes the position channel where transformers would make a mask.

The channel is an int32 tensor with the positions, padding, documents and window from which engines derive the mask (see
`positions`). Importing this module registers the function with transformers under the name `hf_posenc`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TypedDict

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
"""Message for masks and calls that show later keys."""

MaskFunction = Callable[..., Tensor]
"""(batch row, head, query slot, key slot) -> whether the query sees the key."""


class MaskParts(TypedDict, total=False):
    """The parts of a mask function. An entry is missing if the mask has no such part.

    Attributes:
        causal: True.
        window: sliding window in tokens.
        segments: (B|1, T) number of each token's document.
        chunks: length of the chunks, and left padding (B,). A query sees only keys of its own chunk.
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
    """Return the code of the function by which transformers 5.23 remaps packed indices; None in older releases."""
    from transformers import masking_utils

    make = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    return None if make is None else make(causal_mask_function, torch.zeros(1, 1)).__code__


_REMAPPED = _remapping_code()


def describe_mask(mask_function: MaskFunction) -> MaskParts | None:
    """Return the parts of a mask function of transformers, or None if it has an unknown part.

    Closures are recognised by the identity of their code, so that no unknown closure is mistaken for a known one.
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
    # Inside a packed document positions are consecutive, so they have the order and the distances of the slots.
    if code is _REMAPPED:
        return describe_mask(inside["mask_function"])
    described = [describe_mask(function) for function in inside["mask_functions"]]
    known = [each for each in described if each is not None]
    if len(known) != len(described) or sum("window" in each for each in known) > 1:
        return None
    parts: MaskParts = {}
    for each in known:
        parts.update(each)
    return parts


def chunks_to_segments(parts: MaskParts, key_index: Tensor, *, same_tokens: bool) -> MaskParts | None:
    """Return the parts of a mask with chunks expressed as segments; None where this is impossible.

    Args:
        parts: parts from `describe_mask`.
        key_index: slots of the keys, (1, L).
        same_tokens: whether queries and keys are the same tokens.
    """
    if "chunks" not in parts:
        return parts
    size, padding = parts.pop("chunks")
    if key_index.shape[-1] == 0 or int(key_index[0, -1]) < size:
        return parts  # all keys are in the first chunk, and its padding is masked anyway
    if not same_tokens or "segments" in parts:
        return None
    return {**parts, "segments": (key_index - padding.to(key_index.device)[:, None]) // size}


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
) -> MaskParts:
    """Find window and segments by evaluating the mask function on O(Q) pairs.

    While torch compiles, closures cannot be taken apart. The decoder masks of transformers are conjunctions of
    causality, one sliding window, packed segments and chunks. Every supported family builds its masks from these only.
    Chunks are returned as segments.

    Args:
        mask_function: a conjunction of these parts.
        query_index: slots of the queries, (1, Q).
        batch_size: B.
        same_tokens: whether queries and keys are the same tokens. Otherwise the mask has no segments.
        window: the config's sliding window. This mask may lack it.

    Returns:
        The parts, in the form of `describe_mask`. `window` is a tensor.
    """
    parts: MaskParts = {"causal": True}
    rows = torch.arange(batch_size, device=query_index.device)[:, None]
    index = query_index.expand(batch_size, -1)
    same_segment = torch.ones_like(index, dtype=torch.bool)
    if same_tokens:
        joined = mask_function(rows, 0, index, (index - 1).clamp(min=0))
        parts["segments"] = (~joined).cumsum(-1)
    if window is not None:
        nearest_outside = (index - window).clamp(min=0)
        if same_tokens:
            same_segment = parts["segments"] == parts["segments"].gather(-1, nearest_outside)
        shows_outside = mask_function(rows, 0, index, nearest_outside) & same_segment & (index >= window)
        parts["window"] = torch.where(shows_outside.any(), positions.NO_WINDOW, window)
    return parts


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
    **kwargs: object,
) -> Tensor:
    """Make the position channel. transformers calls this function for the mask name `hf_posenc`.

    Args:
        batch_size: B.
        q_length: Q.
        kv_length: L.
        q_offset: slot of the first query. A static cache passes its own tensor, which later steps change, so
            keep no reference to it.
        kv_offset: slot of the first key.
        mask_function: says which pairs of slots are visible.
        attention_mask: (B, slots) bool, False for padding, or None.
        use_vmap: evaluate the mask function by `torch.vmap`. Needed if it is not made of index arithmetic.
        device: device of the model's inputs.
        **kwargs: the other arguments of the interface.

    Returns:
        The compact int32 channel (B|1, 1, ROWS, Q + L), or the dense form (B|1, 1, Q + 1, L + 1) for mask functions
        that the compact channel cannot express.

    Raises:
        ValueError: for a mask function that shows later keys.
    """
    if mask_function is bidirectional_mask_function:
        raise ValueError(BIDIRECTIONAL)
    query_index = (torch.arange(q_length, device=device) + q_offset)[None]
    key_index = (torch.arange(kv_length, device=device) + kv_offset)[None]
    valid = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    arguments = count_positions(valid, query_index, key_index)
    same_tokens = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0
    parts = _parts_of(mask_function, query_index, key_index, batch_size, same_tokens, kwargs.get("config"))
    if parts is None or "causal" not in parts:
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
        return positions.pack_dense(arguments["query_positions"], arguments["key_positions"], visible)
    segments = parts.get("segments")
    if segments is not None:  # queries and keys are the same tokens
        restarted = _count_in_documents(segments)
        arguments |= {"query_positions": restarted, "key_positions": restarted}
    return positions.pack(
        query_index,
        key_index,
        **arguments,
        query_segment=segments,
        key_segment=segments,
        window=parts.get("window"),
    )


def count_positions(valid: Tensor | None, query_index: Tensor, key_index: Tensor) -> dict[str, Tensor]:
    """Return the arguments of `positions.pack` that depend on padding.

    Args:
        valid: (B, slots) bool, False for padding; None means that there is no padding.
        query_index: slots of the queries, (1, Q).
        key_index: slots of the keys, (1, L).
    """
    if valid is None:
        return {"query_positions": query_index, "key_positions": key_index}
    position = valid.cumsum(-1) - 1  # padding is not counted
    slots = torch.arange(valid.shape[-1], device=valid.device)
    padding = torch.where(valid, -1, slots).cummax(-1).values  # slot of the last padding up to each slot
    gap = torch.where(valid, padding, -1).amax(-1, keepdim=True)  # slot of the last padding that has a token after it
    since_gap = slots - gap
    # `generate` counts from 1 again after a right-padded prompt. So does `resumed` after the last padding, if tokens
    # precede it; elsewhere it is the position.
    resumed = torch.where((since_gap > 0) & (since_gap <= position), since_gap, position)

    def at(table: Tensor, index: Tensor) -> Tensor:
        return table.gather(-1, index.clamp(max=table.shape[-1] - 1).expand(table.shape[0], -1))

    return {
        "query_positions": at(position, query_index),
        "key_positions": at(position, key_index),
        "query_valid": at(valid, query_index),
        "key_valid": at(valid, key_index),
        "query_resumed": at(resumed, query_index),
    }


def _count_in_documents(segments: Tensor) -> Tensor:
    """Return positions (B|1, T) that start again at each document; segments (B|1, T) number the documents."""
    index = torch.arange(segments.shape[-1], device=segments.device)[None]
    starts = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(-1).values


def _parts_of(
    mask_function: MaskFunction,
    query_index: Tensor,
    key_index: Tensor,
    batch_size: int,
    same_tokens: bool,
    config: PreTrainedConfig | None,
) -> MaskParts | None:
    """Return the parts of a mask function, chunks as segments; None if the compact channel cannot express them.

    Args:
        mask_function: says which pairs of slots are visible.
        query_index: slots of the queries, (1, Q).
        key_index: slots of the keys, (1, L).
        batch_size: B.
        same_tokens: whether queries and keys are the same tokens.
        config: config of the model, or None.
    """
    if not torch.compiler.is_compiling() or getattr(mask_function, "__code__", None) is not _AND:
        parts = describe_mask(mask_function)
        return None if parts is None else chunks_to_segments(parts, key_index, same_tokens=same_tokens)
    # The probe finds the start of a chunk by comparing a token with the one before it. That needs queries and keys to
    # be the same tokens, which they are not in a call with a cache.
    if getattr(config, "attention_chunk_size", None) is not None and not same_tokens:
        return None
    return probe_mask(mask_function, query_index, batch_size, same_tokens, getattr(config, "sliding_window", None))


def check_masks(arguments: Iterable[object]) -> None:
    """Refuse a user's 4-D mask if it shows later keys or has an integer dtype.

    Args:
        arguments: arguments of the decoder. Every 4-D tensor among them is a mask. In families with several types of
            layers an argument may be a dict of masks. If a cache is among the arguments, its length is the slot of the
            first query.

    Raises:
        ValueError: see `positions.check`.
    """
    values = [
        each for argument in arguments for each in (argument.values() if isinstance(argument, dict) else (argument,))
    ]
    masks = [each for each in values if isinstance(each, Tensor) and each.ndim == 4]
    if masks:
        cached_length = next((each.get_seq_length() for each in values if isinstance(each, Cache)), 0)
        for mask in masks:
            positions.check(mask, cached_length.to(mask.device) if isinstance(cached_length, Tensor) else cached_length)


AttentionMaskInterface.register(NAME, position_channel)
