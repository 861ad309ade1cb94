"""Hybrids whose attention has no positions of its own: order reaches it through their other layers."""

from typing import Any

from .base import NO_ROTARY, Family, Names
from .own_attention import OwnAttention


class _Jamba(OwnAttention):
    output_projection = "o_proj"

    def dropout(self, attention: Any) -> float:
        return attention.attention_dropout


FAMILIES = (
    Family(model_types=("jamba",), rotation=NO_ROTARY, attention=_Jamba(), hybrid=True),
    # A layer is one mixer: attention, a state-space model, an MLP or experts.
    Family(
        model_types=("nemotron_h",),
        names=Names(attention="mixer", token_embedding="embeddings"),
        rotation=NO_ROTARY,
        attention=_Jamba(),
        hybrid=True,
    ),
    # Latent attention, in which nothing can be rotated from outside.
    Family(
        model_types=("kimi_linear",),
        names=Names(attention_head_dim="qk_head_dim", attention_value_dim="v_head_dim"),
        rotation=NO_ROTARY,
        hybrid=True,
    ),
)
