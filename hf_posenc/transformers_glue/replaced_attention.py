"""A mixin for stock attention classes that computes attention from a family's `OwnAttention`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.layer_state import on_attention
from ..core.registry import family_for
from ..schemes.rope import apply_rotary
from . import NAME, Arguments
from .derived_classes import revive, stock_class
from .positions_in_mask import as_channel, positions_of


class ReplacedAttention(nn.Module):
    """A mixin for a stock attention class. It rotates queries and keys if its state has a rotation, then attends.

    It serves bases without a rotary module, whose keys have to be rotated before they enter the cache, and bases that
    bypass transformers' attention interface. A hook on the projection would not do: PEFT wraps the projection, and
    would add its update after the hook.
    """

    posenc_arguments: tuple[str, ...]
    scaling: float
    config: PreTrainedConfig

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Any:
        """Attend.

        Args:
            hidden_states: (B, T, E).
            *args: positional arguments of the stock attention.
            **kwargs: arguments of the stock attention by name. Unknown ones go to the attention function.

        Returns:
            What the stock attention returns: as a rule (B, T, E), and the attention weights (B, H, T, L) or None.

        Raises:
            ValueError: if the state has a rotation and no position ids arrived.
        """
        state = on_attention(self)
        family = family_for(state.family)
        pieces = family.own_attention()
        arguments = named(self, args, kwargs)
        mask = as_channel(arguments.get("attention_mask"), as_bool=family.mask_as_bool)
        query, key, value = pieces.split_heads(self, hidden_states)
        position_ids = arguments.get("position_ids")
        if state.rotation is not None:
            rotation_ids = positions_of(mask, query.shape[2]) if family.positions_in_mask else position_ids
            if rotation_ids is None:
                raise ValueError("position_ids did not arrive at the attention layer, so nothing can be rotated")
            like = value.new_empty(0, dtype=torch.promote_types(value.dtype, torch.float32))
            cos, sin = state.rotation()(like, rotation_ids)
            query = apply_rotary(query, cos, sin, state.pairs)
            key = apply_rotary(key, cos, sin, state.pairs)
        if (cache := arguments.get(pieces.cache)) is not None:
            key, value = cache.update(key, value, getattr(self, str(family.names.attention_layer_index)))
        backend = NAME if pieces.bypasses_interface else self.config._attn_implementation
        module = sys.modules[stock_class(type(self), ReplacedAttention).__module__]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, getattr(module, "eager_attention_forward", None))
        handed_on = {name: each for name, each in arguments.items() if name not in self.posenc_arguments}
        output, weights = attend(
            self,
            query,
            key,
            value,
            mask,
            **handed_on
            | {"output_attentions": arguments.get("output_attentions"), "position_ids": position_ids}
            | {"dropout": pieces.dropout(self) if self.training else 0.0}
            | {"scaling": 1.0 if pieces.query_is_scaled else self.scaling},
        )
        return pieces.outputs(self, pieces.merge_heads(self, output, arguments), weights)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle and copy by naming the stock class, since this class is made on demand."""
        return revive, (replaced_class, stock_class(type(self), ReplacedAttention)), self.__dict__


def named(attention: ReplacedAttention, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Arguments:
    """Return the arguments of an attention by name, without the hidden states.

    Args:
        attention: the attention, which has the argument names of the stock forward.
        args: positional arguments after the hidden states.
        kwargs: arguments by name.
    """
    return {**dict(zip(attention.posenc_arguments, args, strict=False)), **kwargs}


def replaced_class(stock: type[nn.Module]) -> type[nn.Module]:
    """Return the sub-class of a stock attention class that attends through transformers' interface."""
    _, _, *parameters = inspect.signature(stock.forward).parameters.values()
    names = tuple(each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD)
    members = {"__module__": __name__, "posenc_arguments": names}
    return type("Replaced" + stock.__name__, (ReplacedAttention, stock), members)


def stock_output(attention: ReplacedAttention, hidden_states: Tensor, arguments: Arguments) -> Tensor:
    """Return the output (B, T, E) of a replaced attention's stock forward, with the base's positions switched off.

    Args:
        attention: the attention of a family that bypasses the interface.
        hidden_states: (B, T, E).
        arguments: its other arguments by name; `attention_mask` is a float mask (B|1, 1, T, L), added to the scores.
    """
    stock: Any = stock_class(type(attention), ReplacedAttention)
    pieces = family_for(on_attention(attention).family).own_attention()
    output: Tensor = stock.forward(attention, hidden_states, **pieces.without_positions(attention, arguments))[0]
    return output
