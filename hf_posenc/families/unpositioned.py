"""Hybrid families whose attention has no positions; their other layers make order visible to it."""

from .base import NO_ROTARY, Family, Names
from .own_attention import OwnAttention, Stock


class _Jamba(OwnAttention):
    output_projection = "o_proj"

    def dropout(self, attention: Stock) -> float:
        return attention.attention_dropout


FAMILIES = (
    Family(model_types=("jamba",), rotation=NO_ROTARY, attention=_Jamba(), hybrid=True),
    # A layer of Nemotron-H has a single block: attention, a state-space model, an MLP or experts.
    Family(
        model_types=("nemotron_h",),
        names=Names(attention="mixer", token_embedding="embeddings"),
        rotation=NO_ROTARY,
        attention=_Jamba(),
        hybrid=True,
    ),
    # Kimi Linear has latent attention without a rotary module, so that no scheme can rotate in it.
    Family(
        model_types=("kimi_linear",),
        names=Names(attention_head_dim="qk_head_dim", attention_value_dim="v_head_dim"),
        rotation=NO_ROTARY,
        hybrid=True,
    ),
)
