"""Hybrids whose attention has no positions of its own: order reaches it through their other layers."""

import torch
from torch import nn

from . import heads
from .base import Family


def merge_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`."""
    return attention.o_proj(output.flatten(2))


def attention_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.attention_dropout


def _family(model_type: str, **names: str) -> Family:
    return Family(
        model_types=(model_type,),
        hybrid=True,
        rotary=None,
        split_heads=heads.split,
        merge_heads=merge_heads,
        attention_dropout=attention_dropout,
        **names,
    )


FAMILIES = (
    _family("jamba"),
    # A layer is one mixer: attention, a state-space model, an MLP or experts.
    _family("nemotron_h", attention="mixer", token_embedding="embeddings"),
    # Latent attention, in which nothing can be rotated from outside.
    Family(model_types=("kimi_linear",), hybrid=True, rotary=None),
)
