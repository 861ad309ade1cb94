"""Falcon: whole heads are rotated, or ALiBi is on the scores; queries in groups that share keys and values."""

from typing import Any

import torch
from torch import nn

from .base import Family


def split_heads(attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query `(B, H, T, D)`, key and value `(B, K, T, D)` of `hidden_states` `(B, T, E)`.

    One projection makes all, group by group: the queries of the group, its key, its value. There is one group, or one
    for each query, or any number in the newer architecture.
    """
    groups = attention.num_kv_heads
    fused = attention.query_key_value(hidden_states)
    fused = fused.view(*hidden_states.shape[:-1], groups, attention.num_heads // groups + 2, attention.head_dim)
    query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def merge_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`; the residual dropout is in the layer."""
    return attention.dense(output.flatten(2))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training: never in a model that rotates."""
    return attention.attention_dropout.p if attention.config.alibi else 0.0


def scaling(attention: nn.Module) -> float:
    """Factor of the scores."""
    return attention.inv_norm_factor


def own_rotation(config: Any) -> dict[str, Any]:
    """The rotation that the config says, or none in a model with ALiBi."""
    return {} if config.alibi else config.rope_parameters


def without_positions(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """No bias, and angles of 0."""
    cos, sin = arguments["position_embeddings"]
    return {**arguments, "alibi": None, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


FAMILY = Family(
    model_types=("falcon",),
    layers="h",
    attention="self_attention",
    token_embedding="word_embeddings",
    rotary=None,
    own_positions="rotation of whole heads, or a bias by distance on the scores (ALiBi)",
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
    bypasses_interface=True,
    without_positions=without_positions,
    scaling=scaling,
    key_value_heads="num_kv_heads",
    cache="layer_past",
    own_rotation=own_rotation,
    idle_rotary="rotary_emb",
    decoder_attributes={"use_alibi": False},
)
