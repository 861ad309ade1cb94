"""GPT-BigCode (SantaCoder, StarCoder): learned positions, and as a rule one key and value for all queries."""

import torch
from torch import nn

from .base import Family


def split_heads(attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query `(B, H, T, D)`, key and value `(B, K, T, D)` of `hidden_states` `(B, T, E)`.

    One projection makes all three: first all queries where they share a key, else head by head.
    """
    fused, shape = attention.c_attn(hidden_states), hidden_states.shape[:-1]
    if attention.multi_query:
        heads = fused.view(*shape, attention.num_heads + 2, attention.head_dim).transpose(1, 2)
        query, key, value = heads.split((attention.num_heads, 1, 1), dim=1)
    else:
        heads = fused.view(*shape, attention.num_heads, 3, attention.head_dim)
        query, key, value = (each.transpose(1, 2) for each in heads.unbind(-2))
    return query, key, value


def merge_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`."""
    return attention.resid_dropout(attention.c_proj(output.flatten(2)))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.attn_dropout


FAMILY = Family(
    model_types=("gpt_bigcode",),
    layers="h",
    attention="attn",
    token_embedding="wte",
    rotary=None,
    position_table="wpe",
    refuse={
        # Cross attention is dispatched through the same function, but its keys have no position relative to the query.
        "add_cross_attention": "positions of encoder states relative to decoder states are not defined; "
        "only decoder-only models can be patched",
    },
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
    key_value_heads="kv_heads",
    cache="layer_past",
    sized_by_length=True,  # the decoder has a square causal mask
    positions_in_mask=True,
)
