"""Positions in the place of the attention mask, for bases that hand their layers no position ids.

The position channel holds the position ids that the caller chose. It is made before the decoder makes a mask of its
own, and given to the decoder as the attention mask, because a 4-D mask is handed on to every layer as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from .. import positions
from ..families.base import Family
from ..layer_state import on_decoder
from . import NAME

OWN_MASK = (
    "this model takes positions from the attention mask, since it hands its layers no position ids, and a 4-D mask of "
    "your own has none: pass a 2-D mask (batch, keys), or none{instead}"
)


def carrying_forward(stock: type[nn.Module], family: Family) -> Callable[..., Any]:
    """Return a forward in front of a stock model's, which puts positions in the place of the mask; same signature.

    Args:
        stock: class of a decoder, or of a model with a head, whose forward takes input_ids and attention_mask.
        family: of the class.
    """
    names = tuple(inspect.signature(stock.forward).parameters)[1:]

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if self.config._attn_implementation == NAME and tokens is not None:
            as_bool = family.mask_as_bool and self.base_model is self  # a head hands its mask on as it is
            given = _with_channel(self, given, tokens, as_bool=as_bool)
        return stock.forward(self, **given)

    return forward


def _with_channel(model: Any, given: dict[str, Any], tokens: Tensor, *, as_bool: bool) -> dict[str, Any]:
    """Return the arguments of a forward, by name, with the position channel as attention mask.

    Raises:
        ValueError: for a user's own 4-D mask beside position ids, or where the decoder would turn it into bools.
    """
    mask, ids = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and mask.ndim == 4 and mask.dtype != torch.int32:
        if as_bool or ids is not None:
            raise ValueError(OWN_MASK.format(instead="" if ids is None else ", or leave position_ids out"))
        return given
    if mask is None or mask.ndim == 2:
        if on_decoder(model.base_model).exchange is not None:  # inside context_parallel, which makes the channel itself
            return given
        mask = create_causal_mask(
            config=model.config,
            inputs_embeds=tokens if tokens.ndim == 3 else tokens[..., None],  # only its shape and device are read
            attention_mask=mask,
            past_key_values=given.get("past_key_values"),
            position_ids=ids,
        )
    if ids is not None:
        mask = _following(mask, ids)
    return {**given, "attention_mask": as_bools(mask) if as_bool else mask}


def _following(channel: Tensor, position_ids: Tensor) -> Tensor:
    """Return a compact channel with the position ids that the caller chose, see `Positions.follow`."""
    queries = position_ids.shape[-1]
    found = _compact(channel, queries).follow(position_ids)
    places = torch.cat([found.query_positions, found.key_positions], -1)
    rows = channel.expand(places.shape[0], -1, -1, -1)
    return torch.cat([places[:, None, None], rows[:, :, 1:]], 2)


def _compact(channel: Tensor, queries: int) -> positions.Positions:
    found = positions.read(channel, queries, channel.shape[-1] - queries)
    assert isinstance(found, positions.Positions)
    return found


def positions_of(channel: Tensor | None, queries: int) -> Tensor | None:
    """Return the positions of the queries, (B|1, Q), from the compact channel; None where it did not arrive.

    Args:
        channel: what arrived as attention mask.
        queries: Q.

    Raises:
        ValueError: for a user's own 4-D mask.
    """
    if channel is None:
        return None
    if channel.dtype != torch.int32 or channel.shape[-2] != positions.ROWS:
        raise ValueError(OWN_MASK.format(instead=""))
    return _compact(channel, queries).query_positions


def as_bools(channel: Tensor) -> Tensor:
    """Return the channel as bool (B|1, 1, ROWS, 32 * columns): its bits, which survive a cast to bool."""
    bits = torch.arange(32, dtype=torch.int32, device=channel.device)
    return ((channel[..., None] >> bits) & 1).bool().flatten(-2)


def as_channel(mask: Tensor | None, *, as_bool: bool) -> Tensor | None:
    """Return the channel that arrived as attention mask.

    Args:
        mask: what arrived.
        as_bool: whether it is what `as_bools` made.
    """
    if mask is None or not as_bool:
        return mask
    if mask.is_floating_point():  # 0 for ones, the lowest number for zeros, behind two more axes
        mask = mask[:, 0, 0] == 0
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask.unflatten(-1, (-1, 32)).to(torch.int32) << bits).sum(-1, dtype=torch.int32)
