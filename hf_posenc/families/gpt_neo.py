"""GPT-Neo: learned positions, scores that are not scaled, every other layer with a sliding window of its own."""

from torch import nn

from . import heads
from .base import Family


def scaling(attention: nn.Module) -> float:
    """Factor of the scores."""
    return 1.0


def own_window(attention: nn.Module) -> int | None:
    """Sliding window of the layer in tokens, the query's own included; `None` in layers that see everything."""
    return attention.config.window_size if attention.attention_type == "local" else None


FAMILY = Family(
    model_types=("gpt_neo",),
    layers="h",
    attention="attn.attention",
    token_embedding="wte",
    rotary=None,
    position_table="wpe",
    split_heads=heads.split,
    merge_heads=heads.merge_and_drop,
    attention_dropout=heads.dropout_of_module,
    bypasses_interface=True,
    without_positions=heads.as_they_are,
    scaling=scaling,
    layer_index="layer_id",
    cache="layer_past",
    own_window=own_window,
    sized_by_length=True,  # each layer has a square causal mask
    positions_in_mask=True,
)
