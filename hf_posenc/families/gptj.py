"""GPT-J and CodeGen: a part of each head is rotated, pairs of neighbouring dimensions, by tables in the attention."""

import math
from typing import Any

import torch
from torch import nn

from . import heads
from .base import Family, Heads


def split_fused_heads(attention: nn.Module, hidden_states: torch.Tensor) -> Heads:
    """Query, key and value `(B, H, T, D)` of `hidden_states` `(B, T, E)`.

    One projection makes four parts, each with queries, values and keys of a quarter of the heads: the parts are the
    cores of a TPU that the model was trained on.
    """
    batch, length, _ = hidden_states.shape
    parts = attention.qkv_proj(hidden_states).view(batch, length, 4, 3, -1, attention.head_dim)
    query, value, key = (parts[:, :, :, which].flatten(2, 3).transpose(1, 2) for which in range(3))
    return query, key, value


def scaling(attention: nn.Module) -> float:
    """Factor of the scores."""
    return 1.0 / attention.scale_attn


def own_rotation(config: Any) -> dict[str, Any]:
    """The base's rotation: `rotary_dim` dimensions of each head, with the usual base of frequencies."""
    size = config.hidden_size // config.num_attention_heads
    share = config.rotary_dim / size
    if int(share * size) < config.rotary_dim:  # rounded down: the number of dimensions is cut off after the product
        share = math.nextafter(share, 1.0)
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}


def without_positions(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """Every token is at position 0, where the angle is 0."""
    return {**arguments, "position_ids": torch.zeros_like(arguments["position_ids"])}


_COMMON: dict[str, Any] = dict(
    layers="h",
    attention="attn",
    token_embedding="wte",
    rotary=None,
    own_positions="rotation of a part of each head",
    pairs="interleaved",
    merge_heads=heads.merge_and_drop,
    attention_dropout=heads.dropout_of_module,
    bypasses_interface=True,
    without_positions=without_positions,
    scaling=scaling,
    cache="layer_past",
    own_rotation=own_rotation,
    sized_by_length=True,  # each layer has a table of angles
)

FAMILIES = (
    Family(model_types=("gptj",), split_heads=heads.split, **_COMMON),
    Family(model_types=("codegen",), split_heads=split_fused_heads, **_COMMON),
)
