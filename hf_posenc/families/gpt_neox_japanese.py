"""GPT-NeoX of ABEJA: whole heads or a part of them are rotated; the last attention returns a bias for its layer."""

from typing import Any

import torch
from torch import nn

from .base import Family


def split_heads(attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `(B, H, T, D)` of `hidden_states` `(B, T, E)`; one projection makes them, head by head."""
    fused = attention.query_key_value(hidden_states)
    fused = fused.view(*hidden_states.shape[:-1], attention.num_attention_heads, 3, attention.head_size)
    query, key, value = (each.transpose(1, 2) for each in fused.unbind(-2))
    return query, key, value


def merge_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`; bias and dropout are in the layer."""
    return attention.dense(output.flatten(2))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.attention_dropout.p


def scaling(attention: nn.Module) -> float:
    """Factor of the scores."""
    return 1.0 / attention.norm_factor


def own_rotation(config: Any) -> dict[str, Any]:
    """The rotation that the config says."""
    return config.rope_parameters


def without_positions(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Angles of 0."""
    cos, sin = arguments["position_embeddings"]
    return {**arguments, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


FAMILY = Family(
    model_types=("gpt_neox_japanese",),
    attention="attention",
    token_embedding="embed_in",
    rotary=None,
    own_positions="rotation of whole heads or of a part of each",
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
    bypasses_interface=True,
    without_positions=without_positions,
    scaling=scaling,
    cache="layer_past",
    also_returns="dense_bias",
    own_rotation=own_rotation,
    idle_rotary="rotary_emb",
)
