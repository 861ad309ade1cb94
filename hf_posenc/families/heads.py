"""How attention makes its heads and joins them again, as several families do it; see `Family.split_heads`."""

from typing import Any

import torch
from torch import nn

from .base import Heads


def split(attention: nn.Module, hidden_states: torch.Tensor) -> Heads:
    """Query `(B, H, T, D)`, key and value `(B, K, T, D)` of `hidden_states` `(B, T, E)`, by a projection each."""
    own: Any = attention
    shape = (*hidden_states.shape[:-1], -1, own.head_dim)
    query, key, value = (project(hidden_states).view(shape) for project in (own.q_proj, own.k_proj, own.v_proj))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def split_scaled(attention: nn.Module, hidden_states: torch.Tensor) -> Heads:
    """The same, where the query is scaled already when it reaches the attention function."""
    query, key, value = split(attention, hidden_states)
    return query * attention.scaling, key, value


def merge(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`; the residual dropout is in the layer."""
    return attention.out_proj(output.flatten(2))


def merge_and_drop(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`, some of it dropped while training."""
    return attention.resid_dropout(attention.out_proj(output.flatten(2)))


def dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.dropout


def dropout_of_module(attention: nn.Module) -> float:
    """The same, of an attention that has a module for it."""
    return attention.attn_dropout.p


def as_they_are(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an attention that has no positions of its own, see `Family.without_positions`."""
    return arguments
