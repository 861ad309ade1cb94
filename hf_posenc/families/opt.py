"""OPT: learned positions with two spare rows, queries scaled before the attention function."""

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


FAMILY = Family(
    model_types=("opt",),
    note="documents packed into one row see each other",
    # OPTForCausalLM.model is an OPTModel, whose only child is the decoder.
    decoder="decoder",
    rotary=None,
    position_table="embed_positions",
    # Rows 0 and 1 are left over from fairseq; position p reads row p + 2, and padding (position -1) reads row 1.
    table_offset=2,
    query_is_scaled=True,
    split_heads=split_heads,
    merge_heads=merge_heads,
    attention_dropout=attention_dropout,
)
