"""Position ids inside the attention mask, for bases that hand their layers no position ids.

The position channel holds the position ids that the caller chose. The package makes it before the decoder makes a
mask, and passes it to the decoder as `attention_mask`. The decoder hands a 4-D mask to every layer unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from ..core import positions
from ..core.layer_state import on_decoder
from ..core.registry import family_for, supported_model_types
from . import NAME, Arguments
from .masks import shown

OWN_MASK = (
    "this model takes positions from the attention mask, since it hands its layers no position ids, and a 4-D mask of "
    "your own has none: pass a 2-D mask (batch, keys), or no mask{instead}"
)
"""Message that refuses a user's own 4-D mask."""


def carrying_forward(stock: type[nn.Module], model_type: str) -> Callable[..., object] | None:
    """Return a forward that puts the position channel in the place of the mask, and then calls the stock forward.

    Args:
        stock: class of a decoder, or of a model with a head, whose forward takes input_ids and attention_mask.
        model_type: model type of the class.

    Returns:
        The forward, with the signature of the stock one. None for a model type that no family serves, and for one that
        hands position ids to its layers.
    """
    if model_type not in supported_model_types() or not (family := family_for(model_type)).positions_in_mask:
        return None
    names = tuple(inspect.signature(stock.forward).parameters)[1:]

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: object, **kwargs: object) -> object:
        arguments: Arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
        if self.config._attn_implementation == NAME and tokens is not None:
            as_bool = family.mask_as_bool and self.base_model is self  # a model with a head hands the mask on unchanged
            arguments = _with_channel(self, arguments, tokens, as_bool=as_bool)
        return stock.forward(self, **arguments)

    return forward


def _with_channel(model: Any, arguments: Arguments, tokens: Tensor, *, as_bool: bool) -> Arguments:
    """Return the arguments of a forward with the position channel as attention mask.

    Raises:
        ValueError: for a user's own 4-D mask, if there are position ids or the decoder would convert it to bool.
    """
    mask, ids = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and mask.ndim == 4 and mask.dtype != torch.int32:
        if as_bool or ids is not None:
            raise ValueError(OWN_MASK.format(instead="" if ids is None else ", or leave position_ids out"))
        return arguments
    if mask is None or mask.ndim == 2:
        positions.check_padding(mask)
        if mask is None and ids is not None and arguments.get("past_key_values") is None:
            mask = shown(ids, len(tokens))
        if on_decoder(model.base_model).exchange is not None:  # context_parallel makes the channel
            return arguments
        mask = create_causal_mask(
            config=model.config,
            inputs_embeds=tokens if tokens.ndim == 3 else tokens[..., None],  # only its shape and device are read
            attention_mask=mask,
            past_key_values=arguments.get("past_key_values"),
            position_ids=ids,
        )
    if ids is not None:
        positions.require_whole(ids, "the mask, which carries the positions of this model type,")
        check = on_decoder(model.base_model).ordered
        followed = positions.unpack(mask, ids.shape[-1]).follow(ids, check=check)
        new_positions = torch.cat([followed.query_positions, followed.key_positions], -1)
        rows = mask.expand(new_positions.shape[0], -1, -1, -1)
        known = rows.shape[2] if followed.aligned else positions.ROWS  # what more rows say holds no longer
        mask = torch.cat([new_positions[:, None, None], rows[:, :, 1:known]], 2)
    return {**arguments, "attention_mask": as_bools(mask) if as_bool else mask}


def positions_of(channel: Tensor | None, queries: int) -> Tensor | None:
    """Return the positions of the queries, (B|1, Q), from the compact channel; None without a channel.

    Args:
        channel: the attention mask that a layer got.
        queries: Q.

    Raises:
        ValueError: for a user's own 4-D mask.
    """
    if channel is None:
        return None
    if not positions.is_compact(channel):
        raise ValueError(OWN_MASK.format(instead=""))
    return positions.unpack(channel, queries).query_positions


def as_bools(channel: Tensor) -> Tensor:
    """Return the bits of the channel as bools (B|1, 1, rows, 32 * columns), which survive a cast to bool."""
    bits = torch.arange(32, dtype=torch.int32, device=channel.device)
    return ((channel[..., None] >> bits) & 1).bool().flatten(-2)


def as_channel(mask: Tensor | None, *, as_bool: bool) -> Tensor | None:
    """Return the position channel from the attention mask that a layer got; the inverse of `as_bools`.

    Args:
        mask: the attention mask.
        as_bool: whether the channel was converted by `as_bools`. Otherwise the mask is returned unchanged.
    """
    if mask is None or not as_bool:
        return mask
    if mask.is_floating_point():  # the decoder made 0 from True and the lowest number from False, and added two axes
        mask = mask[:, 0, 0] == 0
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask.unflatten(-1, (-1, 32)).to(torch.int32) << bits).sum(-1, dtype=torch.int32)
