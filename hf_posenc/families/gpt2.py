"""GPT-2: learned positions, no rotary embedding."""

import torch
from torch import nn

from .base import Family


def split_heads(attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `(B, H, T, D)` of `hidden_states` `(B, T, E)`; one fused projection makes all three."""
    heads = (*hidden_states.shape[:-1], attention.num_heads, attention.head_dim)
    query, key, value = attention.c_attn(hidden_states).split(attention.split_size, dim=2)
    return query.view(heads).transpose(1, 2), key.view(heads).transpose(1, 2), value.view(heads).transpose(1, 2)


def merge_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`."""
    return attention.resid_dropout(attention.c_proj(output.flatten(2)))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.attn_dropout.p


FAMILY = Family(
    model_types=("gpt2",),
    layers="h",
    attention="attn",
    token_embedding="wte",
    rotary=None,
    position_table="wpe",
    refuse={
        # The upcast path adds the mask as a float bias and never calls the attention interface.
        "reorder_and_upcast_attn": "this path bypasses the attention interface, so a scheme would be ignored; "
        "set it to False (only the numerical precision of the scores differs)",
        # Cross attention is dispatched through the same function, but its keys have no position relative to the query.
        "add_cross_attention": "positions of encoder states relative to decoder states are not defined; "
        "only decoder-only models can be patched",
    },
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
)
