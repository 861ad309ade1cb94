"""The mask function of this package. It makes the position channel where transformers would make a mask.

The channel is an int32 tensor with the positions, padding, documents and window from which engines derive the mask (see
`positions`). Importing this module registers the function with transformers under the name `hf_posenc`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, masking_utils
from transformers.masking_utils import AttentionMaskInterface, and_masks, causal_mask_function
from transformers.utils import is_tracing

from ..core import positions
from . import NAME

BIDIRECTIONAL = (
    "is_causal is False: no scheme here defines distances to keys that come later. Set config.is_causal "
    "back to True and do not pass is_causal, or unpatch the model"
)
"""Message for masks and calls that show later keys."""

SKIPS = (
    "position_ids skip positions, and compiled code cannot tell whether each row is one document: pass an "
    "attention_mask of ones too if it is"
)
"""Message for position ids without a mask, in compiled code."""

MaskFunction = Callable[..., Tensor]
"""(batch row, head, query slot, key slot) -> whether the query sees the key."""


MaskParts = dict[str, Any]
"""The parts of a mask function. An entry is missing if the mask has no such part.

`causal`: True. `window`: sliding window in tokens, an int or a tensor. `segments`: (B|1, T) number of each token's
document. `chunks`: length of the chunks, and left padding (B,); a query sees only keys of its own chunk.
"""

_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_CHUNKED = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__
_AND = and_masks(causal_mask_function).__code__
# transformers 5.23 remaps packed indices by another function; older releases do not have it.
_remap: Any = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_REMAPPED = None if _remap is None else _remap(causal_mask_function, torch.zeros(1, 1)).__code__


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
    return {name: part for each in known for name, part in each.items()}


def causal_documents(segments: Tensor | None) -> MaskFunction:
    """Return transformers' mask function of causal attention, inside documents that do not see each other.

    Args:
        segments: (B, T) number of each token's document; None means one document.
    """
    if segments is None:
        return causal_mask_function
    packed: MaskFunction = and_masks(causal_mask_function, masking_utils.packed_sequence_mask_function(segments))
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
        The compact int32 channel, see `positions.pack`; or the dense form (B|1, 1, Q + 1, L + 1) for mask functions
        that the compact channel cannot express.

    Raises:
        ValueError: for a mask function that shows later keys.
    """
    if mask_function is masking_utils.bidirectional_mask_function:
        raise ValueError(BIDIRECTIONAL)
    query_index = (torch.arange(q_length, device=device) + q_offset)[None]
    key_index = (torch.arange(kv_length, device=device) + kv_offset)[None]
    valid = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    same_tokens = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0
    # One number is read, as transformers does in the same calls: a mask of ones is no mask.
    if valid is not None and same_tokens and q_length > 1 and not is_tracing(valid) and bool(valid.all()):
        valid = None
    arguments = count_positions(valid, query_index, key_index)
    config = kwargs.get("config")
    parts: MaskParts | None = None
    if not torch.compiler.is_compiling() or getattr(mask_function, "__code__", None) is not _AND:
        parts = describe_mask(mask_function)
        # Where all keys are in the first chunk, its padding is masked anyway.
        if parts is not None and "chunks" in parts and kv_length and int(key_index[0, -1]) >= parts["chunks"][0]:
            size, padding = parts["chunks"]
            segments = (key_index - padding.to(key_index.device)[:, None]) // size
            parts = {**parts, "segments": segments} if same_tokens and "segments" not in parts else None
        if parts is not None and same_tokens and not is_tracing(query_index) and kv_length <= parts.get("window", 0):
            del parts["window"]  # it hides no token
    elif same_tokens or getattr(config, "attention_chunk_size", None) is None:
        # The probe finds the start of a chunk by comparing a token with the one before it. That needs queries and keys
        # to be the same tokens, which they are not in a call with a cache.
        window = getattr(config, "sliding_window", None)
        parts = probe_mask(mask_function, query_index, batch_size, same_tokens, window)
    if parts is None or "causal" not in parts:
        slots = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
        whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        given = {"mask_function": mask_function, "attention_mask": attention_mask, "use_vmap": use_vmap}
        visible = masking_utils.sdpa_mask(batch_size=batch_size, device=device, **slots, **whole, **given)
        later = key_index[:, None, None] > query_index[:, None, :, None]
        positions.ensure(~(visible & later).any(), positions.SHOWS_FUTURE)
        return positions.pack_dense(arguments["query_positions"], arguments["key_positions"], visible)
    segments = parts.get("segments")
    if segments is not None:  # queries and keys are the same tokens; positions start again at each document
        starts = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        index = torch.arange(segments.shape[-1], device=segments.device)[None]
        restarted = index - torch.where(starts, index, 0).cummax(-1).values
        arguments |= {"query_positions": restarted, "key_positions": restarted}
    aligned = valid is None and same_tokens and kv_offset == 0
    return positions.pack(
        query_index,
        key_index,
        **arguments,
        query_segment=segments,
        key_segment=segments,
        window=parts.get("window"),
        aligned=aligned,
        plain=aligned and parts.keys() == {"causal"},
    )


def shown(position_ids: Tensor, rows: int) -> Tensor | None:
    """Return the 2-D mask to pass with position ids for which the caller passed neither mask nor cache.

    transformers then takes every step other than 1 for the start of a document. But a document starts where ids fall,
    or return to the smallest one. Rows in which ids never fall, and skip or repeat other positions, are one document
    each, and so are real ids.

    While tracing, skipped positions are refused, because no value can be read. Elsewhere one number is read, as
    transformers does in the same calls.

    Args:
        position_ids: (B|1, T), integers or real numbers.
        rows: B.

    Returns:
        A mask (B, T) of ones, which makes each row one document; None if transformers divides the row as it should.

    Raises:
        ValueError: if ids skip positions and also fall (see `positions.ensure`).
    """
    steps, real = position_ids.diff(dim=-1), position_ids.is_floating_point()
    ascends, skips = (steps >= 0).all(), (steps > 1).any()
    mask = position_ids.new_ones(rows, position_ids.shape[-1], dtype=torch.long)
    if real:
        positions.ensure(ascends, positions.AMBIGUOUS)
        return mask
    if is_tracing(position_ids):
        positions.ensure(~skips, SKIPS)
        return None
    repeats = ((steps == 0) & (position_ids[:, 1:] > position_ids.amin(-1, keepdim=True))).any()
    if not (skips | (repeats & ascends)):
        return None
    positions.ensure(ascends, positions.AMBIGUOUS)
    return mask


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
