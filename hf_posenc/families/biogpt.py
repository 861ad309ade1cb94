"""BioGPT: learned positions with two spare rows."""

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
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`; the residual dropout is in the layer."""
    return attention.out_proj(output.flatten(2))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.dropout


FAMILY = Family(
    model_types=("biogpt",),
    rotary=None,
    position_table="embed_positions",
    table_offset=2,
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
)
