"""Bases with ALiBi of their own: BLOOM and MPT. Their position ids reach neither the layers nor the mask."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout

from .base import Family

OWN_POSITIONS = "a bias by distance on the scores (ALiBi)"
"""Of these bases, in the list of families."""


def no_alibi(*args: Any, **kwargs: Any) -> None:
    """Stand in for the decoder's function that makes the bias, which nobody reads any more."""
    return


def no_rotation(config: Any) -> dict[str, Any]:
    """The base rotates nothing, and its config has no `rope_parameters`."""
    return {}


# ---------------------------------------------------------------------------------------------------------------- BLOOM


def split_bloom_heads(
    attention: nn.Module, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `(B, H, T, D)` of `hidden_states` `(B, T, E)`; one projection makes them, head by head."""
    fused = attention.query_key_value(hidden_states)
    fused = fused.view(*hidden_states.shape[:-1], attention.num_heads, 3, attention.head_dim)
    query, key, value = (each.transpose(1, 2) for each in fused.unbind(-2))
    return query, key, value


def merge_bloom_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`, before dropout."""
    return attention.dense(output.flatten(2))


def add_residual(attention: nn.Module, merged: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The residual `(B, T, E)` with what the attention gave, some of it dropped while training."""
    return residual + dropout(merged, p=attention.hidden_dropout, training=attention.training)


def bloom_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.attention_dropout.p


def bloom_scaling(attention: nn.Module) -> float:
    """Factor of the scores."""
    return attention.inv_norm_factor


def without_bloom_alibi(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """A bias of zeros, `(B * H, 1, L)`."""
    batch, keys = arguments["residual"].shape[0], arguments["attention_mask"].shape[-1]
    return {**arguments, "alibi": arguments["residual"].new_zeros(batch * attention.num_heads, 1, keys)}


BLOOM = Family(
    model_types=("bloom",),
    layers="h",
    attention="self_attention",
    token_embedding="word_embeddings",
    rotary=None,
    refuse={
        "slow_but_exact": "the output projection is then cut into slices, which is not done here; set it to False "
        "(only the rounding differs)",
    },
    own_positions=OWN_POSITIONS,
    split_heads=split_bloom_heads,
    merge_heads=merge_bloom_heads,
    attention_dropout=bloom_dropout,
    bypasses_interface=True,
    without_positions=without_bloom_alibi,
    add_residual=add_residual,
    scaling=bloom_scaling,
    cache="layer_past",
    own_rotation=no_rotation,
    length="seq_length",  # in the configs of the released models, which were trained for it
    positions_in_mask=True,
    decoder_attributes={"build_alibi_tensor": no_alibi},
)


# ------------------------------------------------------------------------------------------------------------------ MPT


def split_mpt_heads(
    attention: nn.Module, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value `(B, H, T, D)` of `hidden_states` `(B, T, E)`, clipped where the config says so."""
    fused = attention.Wqkv(hidden_states)
    if attention.clip_qkv:
        fused = fused.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
    heads = (*hidden_states.shape[:-1], attention.n_heads, attention.head_dim)
    query, key, value = (each.view(heads).transpose(1, 2) for each in fused.chunk(3, dim=2))
    return query, key, value


def merge_mpt_heads(attention: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """`(B, T, E)` from the attention function's output `(B, T, H, D)`; the residual dropout is in the layer."""
    return attention.out_proj(output.flatten(2))


def mpt_dropout(attention: nn.Module) -> float:
    """Probability with which attention weights are dropped while training."""
    return attention.attn_dropout_p


def mpt_scaling(attention: nn.Module) -> float:
    """Factor of the scores."""
    return attention.softmax_scale


def without_mpt_alibi(attention: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """No bias, and a mask that is True for keys that are not seen."""
    return {**arguments, "position_bias": None, "attention_mask": arguments["attention_mask"] < 0}


MPT = Family(
    model_types=("mpt",),
    layers="blocks",
    attention="attn",
    token_embedding="wte",
    rotary=None,
    own_positions=OWN_POSITIONS,
    split_heads=split_mpt_heads,
    merge_heads=merge_mpt_heads,
    attention_dropout=mpt_dropout,
    bypasses_interface=True,
    without_positions=without_mpt_alibi,
    scaling=mpt_scaling,
    own_rotation=no_rotation,
    length="max_seq_len",
    positions_in_mask=True,
    mask_as_bool=True,
    decoder_attributes={"build_mpt_alibi_tensor": no_alibi},
)

FAMILIES = (BLOOM, MPT)
