"""Having a live model attend through the attention function of this package."""

from __future__ import annotations

from ..layer_state import on_attention
from ..modules import WithoutPositions
from ..upstream import NAME
from .base_model import BaseModel
from .undo import Undo, keep, set_attribute, set_module


def attend_through_us(undo: Undo, base: BaseModel, engine: str = "auto") -> None:
    """Have every layer attend through the attention function of this package, also those without a scheme on it.

    Args:
        undo: where the inverse steps go.
        base: patched, or stock.
        engine: of the layers without a scheme on their scores, where a window or a replaced forward needs one anyway.
    """
    for layer, attention in base.found.attention_of.items():
        state = on_attention(attention)
        if base.family.names.attention_heads is not None:
            keep(undo, attention, state, heads=base.sizes[layer].num_heads)
        if "posenc" not in attention._modules:
            set_module(undo, attention, "posenc", WithoutPositions())
            chosen = state.window is not None or base.family.always_replaced
            keep(undo, attention, on_attention(attention), engine=engine if chosen else "auto")
    for config in base.configs:
        set_attribute(undo, config, "_attn_implementation_internal", NAME)
