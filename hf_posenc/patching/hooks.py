"""Forward pre-hooks of a patched model: replace cosines and sines, add position vectors, refuse wrong calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layer_state import on_decoder, on_layer
from ..live.watch import Args, Kwargs
from ..positions import ROWS, ensure, unpack
from ..registry import family_for
from ..upstream import NAME, POSITION_IDS
from ..upstream.endless_cache import EndlessCache
from ..upstream.masks import check_masks
from ..upstream.positions_in_mask import as_channel, positions_of
from ..upstream.rotary import handed_down, turn_layer

SEVERAL_COORDINATES = (
    "position_ids give a token several coordinates (time, height and width), and the scheme takes one number per "
    "token: pass position_ids (B, T), or take a scheme that leaves coordinates to the base (rope or nope in all layers)"
)

NEGATIVE = (
    "position_ids are negative where attention_mask shows a token, and no vectors exist for negative positions: "
    "count from 0"
)


def enter_layer(layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Forward pre-hook of every decoder layer: replace its cosines and sines, and add its position vectors.

    A layer that needs neither has the hook too, because torch.compile does not guard hooks. A graph that was compiled
    for a layer without the hook would also run for a layer with it. Attributes that are read with getattr are guarded.
    """
    replaces_rotation = on_layer(layer).rotation is not None
    adds_vectors = getattr(layer, "posenc", None) is not None
    if replaces_rotation:
        args, kwargs = turn_layer(layer, args, kwargs)
    if adds_vectors:
        args, kwargs = add_positions(layer, args, kwargs)
    return (args, kwargs) if replaces_rotation or adds_vectors else None


def add_positions(layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Add the vectors of `layer.posenc` to the hidden states in the arguments of a decoder layer."""
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
    """Forward pre-hook of a decoder that does not pass its position ids on: pass them to layers and attention."""
    _, position_ids = _position_ids(decoder, args, kwargs)
    return args, {**kwargs, POSITION_IDS: position_ids}


def _position_ids(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[int, Tensor]:
    """Return the index of `position_ids` among a decoder's arguments, and the position ids of a call.

    If the caller passed none, they count on from the cached tokens, as the decoder's own default does.
    """
    index = on_decoder(decoder).arguments.index("position_ids")
    position_ids = args[index] if len(args) > index else kwargs.get("position_ids")
    if position_ids is None:
        inputs = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        tokens = next(tensor for tensor in inputs if tensor is not None)
        cache = kwargs.get("past_key_values")
        num_cached = 0 if cache is None else cache.get_seq_length()
        position_ids = (torch.arange(tokens.shape[1], device=tokens.device) + num_cached)[None]
    return index, position_ids


def require_one_coordinate(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Forward pre-hook of a decoder whose positions may have several coordinates: require that all are equal.

    The layers get them as one number, (B, T). The decoder gets them in rows (rows, B, T), those of the text first, from
    which it reads which tokens are of one document.
    """
    index, position_ids = _position_ids(decoder, args, kwargs)
    if position_ids.ndim == 3:
        ensure((position_ids == position_ids[:1]).all(), SEVERAL_COORDINATES)
        position_ids = position_ids[0]
    kwargs = {**kwargs, POSITION_IDS: position_ids}
    position_ids = position_ids.expand(on_decoder(decoder).rows, -1, -1)
    if len(args) > index:
        return (*args[:index], position_ids, *args[index + 1 :]), kwargs
    return args, {**kwargs, "position_ids": position_ids}


def require_counts(decoder: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Forward pre-hook of a decoder with added position vectors: refuse negative position ids.

    Padding may have any position ids. A 2-D mask or the compact position channel says which tokens are padding.
    """
    arguments = {**dict(zip(on_decoder(decoder).arguments, args, strict=False)), **kwargs}
    position_ids, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    if tokens is None:
        return  # the decoder refuses the call
    is_token = torch.ones((), dtype=torch.bool, device=tokens.device)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        is_token = mask[:, -tokens.shape[1] :] != 0
    elif isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.shape[-2] == ROWS:
        channel = unpack(mask, tokens.shape[1])
        is_token = channel.query_valid
        if position_ids is None:
            position_ids = channel.query_positions
    if position_ids is not None:
        ensure(~((position_ids < 0) & is_token).any(), NEGATIVE)


def require_attention(decoder: nn.Module, args: Args, kwargs: Kwargs) -> None:
    """Forward pre-hook of a decoder that needs our attention function: refuse another one, and unsuitable masks."""
    config: Any = decoder.config
    if config._attn_implementation != NAME:
        raise ValueError(
            f"the config says attention {config._attn_implementation!r}, which was set behind the patch, so the scheme "
            f"would be ignored: set it back to {NAME!r}, or unpatch the model"
        )
    check_masks((*args, *kwargs.values()))


def place_held_keys(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Forward pre-hook of a decoder: with an `EndlessCache`, replace the mask by the channel of the keys it holds."""
    arguments = {**dict(zip(on_decoder(decoder).arguments, args, strict=False)), **kwargs}
    cache = arguments.get("past_key_values")
    if not isinstance(cache, EndlessCache):
        return None
    tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    if tokens is None:
        return None  # the decoder refuses the call
    mask: Any = arguments.get("attention_mask")
    return (), {**arguments, "attention_mask": cache.channel(decoder, tokens, mask)}
