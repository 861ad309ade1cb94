"""GPT-Neo: learned positions, scores that are not scaled, every other layer with a sliding window of its own."""

from typing import Any

import torch
from torch import nn

from .base import Family


def split_heads(attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `(B, H, T, D)` of `hidden_states` `(B, T, E)`."""
    heads = (*hidden_states.shape[:-1], attention.num_heads, attention.head_dim)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
    return query, key, value


def merge_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`."""
    return attention.resid_dropout(attention.out_proj(output.flatten(2)))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.attn_dropout.p


def scaling(attention: nn.Module) -> float:
    """Factor of the scores."""
    return 1.0


def own_window(attention: nn.Module) -> int | None:
    """Sliding window of the layer in tokens, the query's own included; `None` in layers that see everything."""
    return attention.config.window_size if attention.attention_type == "local" else None


def without_positions(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they are: the attention has no positions of its own."""
    return arguments


FAMILY = Family(
    model_types=("gpt_neo",),
    layers="h",
    attention="attn.attention",
    token_embedding="wte",
    rotary=None,
    position_table="wpe",
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
    bypasses_interface=True,
    without_positions=without_positions,
    scaling=scaling,
    layer_index="layer_id",
    cache="layer_past",
    own_window=own_window,
    sized_by_length=True,  # each layer has a square causal mask
    positions_in_mask=True,
)
