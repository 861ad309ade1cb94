"""Forward pre-hooks of a patched model: they turn and add what schemes ask for, and refuse wrong calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layer_state import on_decoder, on_layer
from ..live.watch import Args, Kwargs
from ..positions import ROWS, ensure, unpack
from ..registry import family_for
from ..upstream import NAME, POSITION_IDS
from ..upstream.masks import check_masks
from ..upstream.position_channel import as_channel, positions_of
from ..upstream.rotary import handed_down, turn_layer

SEVERAL_COORDINATES = (
    "position_ids give a token several coordinates (time, height and width), and the scheme counts positions by one "
    "number: pass position_ids (B, T), or take a scheme that leaves that to the base (rope or nope in all layers)"
)


NEGATIVE = (
    "position_ids are negative where attention_mask shows a token, and there are no vectors of negative positions: "
    "count from 0"
)


def enter_layer(layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Forward pre-hook of every decoder layer: turns and adds what the layer's schemes ask for there.

    A layer without either has it too, because torch.compile does not guard hooks: a graph that was compiled for a layer
    without the hook would also run for a layer with it. Attributes that are read with getattr are guarded.
    """
    turns = on_layer(layer).rotation is not None
    adds = getattr(layer, "posenc", None) is not None
    if turns:
        args, kwargs = turn_layer(layer, args, kwargs)
    if adds:
        args, kwargs = add_positions(layer, args, kwargs)
    return (args, kwargs) if turns or adds else None


def add_positions(layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Add the vectors of `layer.posenc` to the hidden states with which a decoder layer is called."""
    hidden_states = args[0] if args else kwargs["hidden_states"]
    state = on_layer(layer)
    if state.family:
        as_bool = family_for(state.family).mask_as_bool
        mask = {**dict(zip(state.arguments, args, strict=False)), **kwargs}.get("attention_mask")
        position_ids = positions_of(as_channel(mask, as_bool=as_bool), hidden_states.shape[1])
    else:
        position_ids = handed_down(kwargs)
    if position_ids is None:
        raise ValueError("position_ids did not arrive at the decoder layer, so no position vectors can be added")
    vectors: Tensor = layer.get_submodule("posenc")(position_ids)
    hidden_states = hidden_states + vectors.to(hidden_states)
    return ((hidden_states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden_states})


def hand_down_position_ids(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Forward pre-hook of a decoder that keeps its position ids to itself: hands them to layers and attention."""
    _, position_ids = _position_ids(decoder, args, kwargs)
    return args, {**kwargs, POSITION_IDS: position_ids}


def _position_ids(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[int, Tensor]:
    """Return where a decoder takes its position ids, and those of a call, which it may leave to the decoder."""
    at = on_decoder(decoder).arguments.index("position_ids")
    position_ids = args[at] if len(args) > at else kwargs.get("position_ids")
    if position_ids is None:
        given = next(
            each for each in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if each is not None
        )
        cache = kwargs.get("past_key_values")
        before = 0 if cache is None else cache.get_seq_length()
        position_ids = (torch.arange(given.shape[1], device=given.device) + before)[None]
    return at, position_ids


def require_one_coordinate(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Forward pre-hook of a decoder whose positions may have several coordinates: takes them if they are all alike.

    The layers get them as one number. The decoder reads from those of the text, which come first, which tokens are of
    one document.
    """
    at, position_ids = _position_ids(decoder, args, kwargs)
    if position_ids.ndim == 3:
        ensure((position_ids == position_ids[:1]).all(), SEVERAL_COORDINATES)
        position_ids = position_ids[0]
    kwargs = {**kwargs, POSITION_IDS: position_ids}
    position_ids = position_ids.expand(on_decoder(decoder).rows, -1, -1)
    if len(args) > at:
        return (*args[:at], position_ids, *args[at + 1 :]), kwargs
    return args, {**kwargs, "position_ids": position_ids}


def require_counts(decoder: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Forward pre-hook of a decoder to which vectors of positions are added: refuses negative position ids.

    Padding may have any: which tokens are padding a 2-D mask says, or the compact position channel.
    """
    given = {**dict(zip(on_decoder(decoder).arguments, args, strict=False)), **kwargs}
    position_ids, mask = given.get("position_ids"), given.get("attention_mask")
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None:
        return  # which the decoder refuses
    shown = torch.ones((), dtype=torch.bool, device=tokens.device)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        shown = mask[:, -tokens.shape[1] :] != 0
    elif isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.shape[-2] == ROWS:
        channel = unpack(mask, tokens.shape[1])
        shown = channel.query_valid
        if position_ids is None:
            position_ids = channel.query_positions
    if position_ids is not None:
        ensure(~((position_ids < 0) & shown).any(), NEGATIVE)


def require_attention(decoder: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Forward pre-hook of a decoder whose scheme needs our attention function: refuses what would go wrong there."""
    config: Any = decoder.config
    if config._attn_implementation != NAME:
        raise ValueError(
            f"the config says attention {config._attn_implementation!r}, which was set behind the patch, so "
            f"the scheme would be ignored: set it back to {NAME!r}, or unpatch the model"
        )
    check_masks((*args, *kwargs.values()))
