"""Having a live model attend through the attention function of this package."""

from __future__ import annotations

from dataclasses import dataclass

from ..layer_state import on_attention
from ..modules import WithoutPositions
from ..upstream import NAME
from .base_model import BaseModel
from .undo import Keep, SetAttribute, SetModule, Undo


@dataclass(frozen=True)
class AttendThroughUs:
    """Has every layer attend through the attention function of this package, also those without a scheme on it.

    Attributes:
        base: patched, or stock.
        engine: of the layers without a scheme on their scores, where a window or a replaced forward needs one anyway.
    """

    base: BaseModel
    engine: str = "auto"

    def make(self, undo: Undo) -> None:
        """Change what the layers need that do not attend through us yet, and the configs."""
        base = self.base
        for layer, attention in base.found.attention_of.items():
            if base.family.names.attention_heads is not None:
                undo.make(Keep(attention, on_attention, {"heads": base.sizes[layer].num_heads}))
            if "posenc" not in attention._modules:
                chosen = on_attention(attention).window is not None or base.family.always_replaced
                undo.make(
                    SetModule(attention, "posenc", WithoutPositions()),
                    Keep(attention, on_attention, {"engine": self.engine if chosen else "auto"}),
                )
        for config in base.configs:
            undo.make(SetAttribute(config, "_attn_implementation_internal", NAME))
