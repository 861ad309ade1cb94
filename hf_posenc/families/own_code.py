"""Families whose own attention code rotates or adds ALiBi, and never calls transformers' attention interface."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import dropout

from .base import NO_ROTARY, Family, Names, RotationFacts
from .own_attention import Arguments, DroppingAttention, Heads, OwnAttention, Stock, split_fused

_ALIBI = "a bias by distance on the scores (ALiBi)"


def no_alibi(*args: object, **kwargs: object) -> None:
    """Return no ALiBi bias.

    It stands in for the decoder's function that makes one, because our attention reads none.
    """
    return


def _without_angles(arguments: Arguments) -> Arguments:
    """Return the arguments of an attention with all angles at 0."""
    cos, sin = arguments["position_embeddings"]
    return {**arguments, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


class _Dense(OwnAttention):
    """The pieces that BLOOM, Falcon and GPT-NeoX Japanese share."""

    bypasses_interface = True
    output_projection = "dense"
    cache = "layer_past"

    def dropout(self, attention: Stock) -> float:
        return attention.attention_dropout.p

    def scaling(self, attention: Stock) -> float:
        return attention.inv_norm_factor


class _Bloom(_Dense):
    positions_in_mask = True
    positions = _ALIBI
    residual = "residual"
    decoder_attributes: ClassVar = {"build_alibi_tensor": no_alibi}

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        return split_fused(attention.query_key_value(hidden_states), attention.num_heads, attention.head_dim)

    def merge_heads(self, attention: Stock, output: Tensor, arguments: Arguments) -> Tensor:
        merged = super().merge_heads(attention, output, arguments)
        return arguments["residual"] + dropout(merged, p=attention.hidden_dropout, training=attention.training)

    def alibi(self, attention: Stock) -> float | None:
        return 1.0  # factor on ALiBi's slopes

    def without_positions(self, attention: Stock, arguments: Arguments) -> Arguments:
        """Return the arguments with a bias of zeros, (B * H, 1, L)."""
        batch, keys = arguments["residual"].shape[0], arguments["attention_mask"].shape[-1]
        return {**arguments, "alibi": arguments["residual"].new_zeros(batch * attention.num_heads, 1, keys)}


class _Mpt(OwnAttention):
    positions_in_mask = True
    mask_as_bool = True
    positions = _ALIBI
    bypasses_interface = True
    decoder_attributes: ClassVar = {"build_mpt_alibi_tensor": no_alibi}

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        fused = attention.Wqkv(hidden_states)
        if attention.clip_qkv:
            fused = fused.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
        shape = (*hidden_states.shape[:-1], attention.n_heads, attention.head_dim)
        query, key, value = (each.view(shape).transpose(1, 2) for each in fused.chunk(3, dim=2))
        return query, key, value

    def dropout(self, attention: Stock) -> float:
        return attention.attn_dropout_p

    def scaling(self, attention: Stock) -> float:
        return attention.softmax_scale

    def alibi(self, attention: Stock) -> float | None:
        return 1.0  # factor on ALiBi's slopes

    def without_positions(self, attention: Stock, arguments: Arguments) -> Arguments:
        """Return the arguments without the bias, and with the bool mask of MPT, True for invisible keys."""
        return {**arguments, "position_bias": None, "attention_mask": arguments["attention_mask"] < 0}


class _Falcon(_Dense):
    positions = f"rotation of whole heads, or {_ALIBI}"
    idle_rotary = "rotary_emb"
    decoder_attributes: ClassVar = {"use_alibi": False}

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        """Return the heads of the fused projection. It has groups of heads: some queries, then one key and one value.

        There is one group (multi-query), one for each query head (multi-head), or, with `new_decoder_architecture`, any
        number.
        """
        groups = attention.num_kv_heads
        fused = attention.query_key_value(hidden_states)
        fused = fused.view(*fused.shape[:-1], groups, attention.num_heads // groups + 2, attention.head_dim)
        query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def dropout(self, attention: Stock) -> float:
        return attention.attention_dropout.p if attention.config.alibi else 0.0  # a Falcon that rotates drops nothing

    def alibi(self, attention: Stock) -> float | None:
        # factor on ALiBi's slopes
        return attention.inv_norm_factor if attention.config.alibi else None

    def rope_parameters(self, config: Any) -> dict[str, Any]:
        return {} if config.alibi else config.rope_parameters

    def without_positions(self, attention: Stock, arguments: Arguments) -> Arguments:
        return {**_without_angles(arguments), "alibi": None}


class _GptNeoxJapanese(_Dense):
    positions = "rotation of whole heads or of a part of each"
    idle_rotary = "rotary_emb"

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        return split_fused(attention.query_key_value(hidden_states), attention.num_attention_heads, attention.head_size)

    def scaling(self, attention: Stock) -> float:
        return 1.0 / attention.norm_factor

    def outputs(self, attention: Stock, output: Tensor, weights: Tensor | None) -> object:
        return output, weights, attention.dense_bias  # the layer adds this bias

    def without_positions(self, attention: Stock, arguments: Arguments) -> Arguments:
        return _without_angles(arguments)


class _Gptj(DroppingAttention):
    positions = "rotation of a part of each head"
    bypasses_interface = True
    cache = "layer_past"

    def scaling(self, attention: Stock) -> float:
        return 1.0 / attention.scale_attn

    def rope_parameters(self, config: Any) -> dict[str, Any]:
        """Return a rotation of `rotary_dim` dimensions of each head, with the usual base of frequencies."""
        size = config.hidden_size // config.num_attention_heads
        share = config.rotary_dim / size
        # transformers computes `rotary_dim` again, as `int(share * size)`. If the division was rounded down, `int`
        # would cut off one dimension.
        if int(share * size) < config.rotary_dim:
            share = math.nextafter(share, 1.0)
        return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}

    def without_positions(self, attention: Stock, arguments: Arguments) -> Arguments:
        """Return the arguments with every token at position 0, where the angle is 0."""
        return {**arguments, "position_ids": torch.zeros_like(arguments["position_ids"])}


class _Codegen(_Gptj):
    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        """Return the heads of the fused projection. It has four parts, one per TPU core that trained the model.

        A part has a quarter of the heads: all their queries, then all values, then all keys.
        """
        batch, length, _ = hidden_states.shape
        parts = attention.qkv_proj(hidden_states).view(batch, length, 4, 3, -1, attention.head_dim)
        query, value, key = (parts[:, :, :, which].flatten(2, 3).transpose(1, 2) for which in range(3))
        return query, key, value


def _gptj_family(model_type: str, attention: OwnAttention) -> Family:
    return Family(
        model_types=(model_type,),
        names=Names(layers="h", attention="attn", token_embedding="wte"),
        rotation=RotationFacts(rotary=None, pairs="interleaved"),
        attention=attention,
        sized_by_length=True,  # each layer has a table of angles
    )


FAMILIES = (
    Family(
        model_types=("bloom",),
        names=Names(
            layers="h",
            attention="self_attention",
            token_embedding="word_embeddings",
            config_length="seq_length",  # only the configs of the released models have it
        ),
        rotation=NO_ROTARY,
        attention=_Bloom(),
        refuse={
            "slow_but_exact": "it cuts the output projection into slices, which hf_posenc does not do; set it to False "
            "(only the rounding differs)"
        },
        joins_documents=True,
    ),
    Family(
        model_types=("mpt",),
        names=Names(layers="blocks", attention="attn", token_embedding="wte", config_length="max_seq_len"),
        rotation=NO_ROTARY,
        attention=_Mpt(),
        joins_documents=True,
    ),
    Family(
        model_types=("falcon",),
        names=Names(
            layers="h",
            attention="self_attention",
            token_embedding="word_embeddings",
            attention_key_value_heads="num_kv_heads",
        ),
        rotation=NO_ROTARY,
        attention=_Falcon(),
        joins_documents=True,
    ),
    Family(
        model_types=("gpt_neox_japanese",),
        names=Names(attention="attention", token_embedding="embed_in", attention_head_dim="head_size"),
        rotation=NO_ROTARY,
        attention=_GptNeoxJapanese(),
    ),
    _gptj_family("gptj", _Gptj()),
    _gptj_family("codegen", _Codegen()),
)
