"""Make a live model use the attention function of this package, and choose its engine."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..layer_state import on_attention, use_engine
from ..modules import WithoutPositions
from ..upstream import NAME
from .base_model import BaseModel
from .patch_record import patch_of
from .undo import Keep, SetAttribute, SetModule, Undo


@dataclass(frozen=True)
class AttendThroughUs:
    """Makes every layer use the attention function of this package, with or without a scheme on its scores.

    Attributes:
        base: the patched or stock model.
        engine: engine of layers without a scheme on their scores that have a window or a replaced attention.
        backend: the flash attention that computes the calls in place of an engine; empty for none.
    """

    base: BaseModel
    engine: str = "auto"
    backend: str = ""

    def apply(self, undo: Undo) -> None:
        """Set the attention implementation in the configs, and give every attention a position module and its state."""
        base = self.base
        for layer, attention in base.modules.attention_of.items():
            if base.family.names.attention_heads is not None:
                undo.apply(Keep(attention, on_attention, {"heads": base.sizes[layer].num_heads}))
            if "posenc" not in attention._modules:
                engine = self.engine if _takes_engine(base, attention) else "auto"
                undo.apply(
                    SetModule(attention, "posenc", WithoutPositions()),
                    Keep(attention, on_attention, {"engine": engine, "backend": self.backend}),
                )
        for config in base.configs:
            undo.apply(SetAttribute(config, "_attn_implementation_internal", NAME))


def choose_engine(model: PreTrainedModel, attention: str) -> None:
    """Set the engine that computes the attention of a patched model.

    Args:
        model: a patched model.
        attention: `auto`, or the name of an engine.

    Raises:
        ValueError: if the scheme keeps the model's own attention, or its flash attention, and `attention` is not
            `auto`.
    """
    patch = patch_of(model)
    assert patch is not None
    if attention == "auto":
        return
    if not patch.attends:
        raise ValueError(
            f"{patch.name} keeps the model's own attention; attention={attention!r} can be chosen for schemes that "
            "change scores only"
        )
    if patch.backend:
        raise ValueError(
            f"{patch.backend} computes the attention of this model: load it with attn_implementation='sdpa' to choose "
            f"attention={attention!r}"
        )
    patch.attention = attention
    base = BaseModel.of(model)
    for module in base.modules.attentions:
        if _takes_engine(base, module):
            use_engine(module, attention)


def _takes_engine(base: BaseModel, attention: nn.Module) -> bool:
    """Return whether an attention takes the caller's engine: it has a scheme, a window or a class of ours.

    Args:
        base: the model.
        attention: one of its attentions.
    """
    modules = attention._modules
    has_scheme = not isinstance(modules.get("posenc"), WithoutPositions | None) or "posenc_additions" in modules
    return has_scheme or on_attention(attention).window is not None or base.family.always_replaced
