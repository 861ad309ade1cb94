"""XGLM: sinusoids at the input, queries scaled before their product with keys."""

from typing import Any

import torch
from torch import nn

from .base import Family


def split_heads(attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `(B, H, T, D)` of `hidden_states` `(B, T, E)`; the query is already scaled."""
    heads = (*hidden_states.shape[:-1], attention.num_heads, attention.head_dim)
    query = attention.q_proj(hidden_states) * attention.scaling
    key, value = attention.k_proj(hidden_states), attention.v_proj(hidden_states)
    return query.view(heads).transpose(1, 2), key.view(heads).transpose(1, 2), value.view(heads).transpose(1, 2)


def merge_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`; the residual dropout is in the layer."""
    return attention.out_proj(output.flatten(2))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.dropout


def without_positions(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they are: the attention has no positions of its own."""
    return arguments


FAMILY = Family(
    model_types=("xglm",),
    rotary=None,
    position_table="embed_positions",
    own_positions="sinusoids at the input",
    query_is_scaled=True,
    refuse={
        # The keys of cross attention have no position relative to the query.
        "add_cross_attention": "positions of encoder states relative to decoder states are not defined; "
        "only decoder-only models can be patched",
    },
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
    bypasses_interface=True,
    without_positions=without_positions,
    sized_by_length=True,  # the table of sinusoids
    positions_in_mask=True,
)
