"""A class in front of a stock attention class, which attends from a family's pieces through transformers' interface."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..families.own_attention import OwnAttention
from ..layer_state import on_attention
from ..registry import family_for
from ..schemes.rope import apply_rotary
from . import NAME
from .channel import as_channel, positions_of
from .derived import revive, stock_class


class ReplacedAttention(nn.Module):
    """A mixin in front of a stock attention class: rotates queries and keys if told to, then attends.

    It serves bases without a rotary module, because their rotation must come before the cache, and bases that bypass
    transformers' interface. It is a class and not a hook on the projection, because PEFT wraps the projection and its
    update would be added after the hook.
    """

    posenc_arguments: tuple[str, ...]
    scaling: float
    config: PreTrainedConfig

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Attend.

        Args:
            hidden_states: (B, T, E).
            *args: of the stock attention.
            **kwargs: of the stock attention; those that it does not name are handed on to the attention function.

        Returns:
            What the stock attention returns: as a rule (B, T, E), and the attention weights (B, H, T, L) or None.

        Raises:
            ValueError: if there is a rotation, and no position ids arrived.
        """
        state = on_attention(self)
        family = family_for(state.family)
        own = family.attention or OwnAttention()
        given = named(self, args, kwargs)
        mask = as_channel(given.get("attention_mask"), as_bool=family.mask_as_bool)
        query, key, value = own.split_heads(self, hidden_states)
        position_ids = given.get("position_ids")
        if state.rotation is not None:
            turned_by = positions_of(mask, query.shape[2]) if family.positions_in_mask else position_ids
            if turned_by is None:
                raise ValueError("position_ids did not arrive at the attention layer, so nothing can be rotated")
            like = value.new_empty(0, dtype=torch.promote_types(value.dtype, torch.float32))
            cos, sin = state.rotation()(like, turned_by)
            query = apply_rotary(query, cos, sin, state.pairs)
            key = apply_rotary(key, cos, sin, state.pairs)
        if (cache := given.get(own.cache)) is not None:
            key, value = cache.update(key, value, getattr(self, str(family.names.attention_layer_index)))
        backend = NAME if own.bypasses_interface else self.config._attn_implementation
        module = sys.modules[stock_class(type(self), ReplacedAttention).__module__]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, getattr(module, "eager_attention_forward", None))
        handed_on = {name: each for name, each in given.items() if name not in self.posenc_arguments}
        output, weights = attend(
            self,
            query,
            key,
            value,
            mask,
            **handed_on
            | {"output_attentions": given.get("output_attentions"), "position_ids": position_ids}
            | {"dropout": own.dropout(self) if self.training else 0.0}
            | {"scaling": 1.0 if own.query_is_scaled else self.scaling},
        )
        return own.outputs(self, own.merge_heads(self, output, given), weights)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class, since this one is made on demand."""
        return revive, (replaced_class, stock_class(type(self), ReplacedAttention)), self.__dict__


def named(attention: ReplacedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an attention by name, without the hidden states.

    Args:
        attention: holds the names of the stock forward.
        args: positional arguments behind the hidden states.
        kwargs: arguments by name.
    """
    return {**dict(zip(attention.posenc_arguments, args, strict=False)), **kwargs}


def replaced_class(stock: type[nn.Module]) -> type[nn.Module]:
    """Return the sub-class of a stock attention class that attends through transformers' interface."""
    _, _, *parameters = inspect.signature(stock.forward).parameters.values()
    names = tuple(each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD)
    members = {"__module__": __name__, "posenc_arguments": names}
    return type("Replaced" + stock.__name__, (ReplacedAttention, stock), members)


def stock_output(attention: ReplacedAttention, hidden_states: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the output (B, T, E) of a replaced attention's stock forward, with its own positions switched off.

    Args:
        attention: of a family that bypasses the interface.
        hidden_states: (B, T, E).
        arguments: the others, by name; `attention_mask` is a float mask (B|1, 1, T, L) that is added to scores.
    """
    stock: Any = stock_class(type(attention), ReplacedAttention)
    own = family_for(on_attention(attention).family).attention or OwnAttention()
    output: Tensor = stock.forward(attention, hidden_states, **own.without_positions(attention, arguments))[0]
    return output
