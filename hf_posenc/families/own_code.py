"""Families without a rotary module: with a table at the input, or with positions in the code of their attention."""

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import dropout

from .base import NO_ROTARY, Family, Names
from .gguf_blocks import GPT2_BLOCK
from .own_attention import Arguments, DroppingAttention, Heads, OwnAttention, Stock, split_fused

# ---------------------------------------------------------------------- a table at the input: vectors, XGLM's sinusoids


class _Gpt2(DroppingAttention):
    output_projection = "c_proj"
    heads_at = "num_heads"

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        fused = attention.c_attn(hidden_states).split(attention.split_size, dim=2)
        shape = (getattr(attention, self.heads_at), -1)
        query, key, value = (each.unflatten(-1, shape).transpose(1, 2) for each in fused)
        return query, key, value


class _GptBigcode(_Gpt2):
    cache = "layer_past"
    positions_in_mask = True
    dropout_at = "attn_dropout"

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        """Return the heads of the fused projection: all queries, one key, one value; or head by head without MQA."""
        fused = attention.c_attn(hidden_states)
        if not attention.multi_query:
            return split_fused(fused, attention.num_heads, attention.head_dim)
        heads = fused.unflatten(-1, (attention.num_heads + 2, attention.head_dim)).transpose(1, 2)
        query, key, value = heads.split((attention.num_heads, 1, 1), dim=1)
        return query, key, value


class _GptNeo(DroppingAttention):
    bypasses_interface = True
    cache = "layer_past"
    positions_in_mask = True

    def scaling(self, attention: Stock) -> float:
        return 1.0

    def window(self, attention: Stock) -> int | None:
        return attention.config.window_size if attention.attention_type == "local" else None


class _OpenaiGpt(_Gpt2):
    bypasses_interface = True
    positions_in_mask = True
    mask_as_bool = True
    heads_at = "n_head"

    def scaling(self, attention: Stock) -> float:
        return (attention.split_size // attention.n_head) ** -0.5 if attention.scale else 1.0

    def outputs(self, attention: Stock, output: Tensor, weights: Tensor | None) -> object:
        return [output, weights]  # the layer concatenates lists


class _Opt(OwnAttention):
    query_is_scaled = True


class _Xglm(_Opt):
    bypasses_interface = True
    positions_in_mask = True
    positions = "sinusoids at the input"


# ------------------------------------------------------------- own code that rotates, adds ALiBi or does neither

_ALIBI = "a bias by distance on the scores (ALiBi)"


def no_bias(*args: object, **kwargs: object) -> None:
    """Return no bias, in place of a base's own function that makes one by position."""
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
    dropout_at = "attention_dropout.p"
    scaling_at = "inv_norm_factor"


class _Bloom(_Dense):
    positions_in_mask = True
    positions = _ALIBI
    alibi_factor = 1.0
    decoder_attributes: ClassVar = {"build_alibi_tensor": no_bias}

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        return split_fused(attention.query_key_value(hidden_states), attention.num_heads, attention.head_dim)

    def merge_heads(self, attention: Stock, output: Tensor, arguments: Arguments) -> Tensor:
        merged = super().merge_heads(attention, output, arguments)
        return arguments["residual"] + dropout(merged, p=attention.hidden_dropout, training=attention.training)

    def without_positions(self, attention: Stock, arguments: Arguments) -> Arguments:
        """Return the arguments with a bias of zeros, (B * H, 1, L)."""
        batch, keys = arguments["residual"].shape[0], arguments["attention_mask"].shape[-1]
        return {**arguments, "alibi": arguments["residual"].new_zeros(batch * attention.num_heads, 1, keys)}


class _Mpt(OwnAttention):
    bypasses_interface = True
    positions_in_mask = True
    mask_as_bool = True
    positions = _ALIBI
    decoder_attributes: ClassVar = {"build_mpt_alibi_tensor": no_bias}
    alibi_factor = 1.0
    dropout_at = "attn_dropout_p"
    scaling_at = "softmax_scale"

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        fused = attention.Wqkv(hidden_states)
        if attention.clip_qkv:
            fused = fused.clamp(min=-attention.clip_qkv, max=attention.clip_qkv)
        heads = (each.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for each in fused.chunk(3, dim=2))
        query, key, value = heads
        return query, key, value

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
        shape = (groups, attention.num_heads // groups + 2, attention.head_dim)
        fused = attention.query_key_value(hidden_states).unflatten(-1, shape)
        query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def dropout(self, attention: Stock) -> float:
        return super().dropout(attention) if attention.config.alibi else 0.0  # a Falcon that rotates drops nothing

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
        parts = attention.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1, attention.head_dim))
        query, value, key = (parts[:, :, :, which].flatten(2, 3).transpose(1, 2) for which in range(3))
        return query, key, value


class _Jamba(OwnAttention):
    output_projection = "o_proj"
    dropout_at = "attention_dropout"


# In cross attention a key has no distance from the query.
_CROSS_ATTENTION = {
    "add_cross_attention": "positions relative to encoder states are undefined; only decoder-only models can be patched"
}
_TABLE = Names(position_table="embed_positions")
_GPTJ = Names(layers="h", attention="attn", token_embedding="wte")
_GPT2_NAMES = replace(_GPTJ, position_table="wpe")
_BLOOM = Names(layers="h", attention="self_attention", token_embedding="word_embeddings")

_NEIGHBOURS = replace(NO_ROTARY, pairs="interleaved")


def _family(model_type: str, **facts: Any) -> Family:
    """Return the family of one model type, without a rotary module."""
    return Family(model_types=(model_type,), **{"rotation": NO_ROTARY} | facts)


FAMILIES = (
    _family(
        "gpt2",
        names=_GPT2_NAMES,
        attention=_Gpt2(),
        gguf=GPT2_BLOCK,
        refuse={
            # This code path adds the mask as a float bias and never calls the attention interface.
            "reorder_and_upcast_attn": "this path bypasses the attention interface, so a scheme would be ignored; "
            "set it to False (only the numerical precision of the scores differs)",
            **_CROSS_ATTENTION,
        },
    ),
    # SantaCoder and StarCoder. In most of them all query heads share one key and one value. The decoder has a square
    # causal mask.
    _family(
        "gpt_bigcode",
        names=replace(_GPT2_NAMES, attention_key_value_heads="kv_heads"),
        attention=_GptBigcode(),
        refuse=_CROSS_ATTENTION,
        sized_by_length=True,
    ),
    # GPT-Neo does not scale scores, and every second layer makes its own sliding window. Each layer has a square causal
    # mask.
    _family(
        "gpt_neo",
        names=replace(_GPT2_NAMES, attention="attn.attention", attention_layer_index="layer_id"),
        attention=_GptNeo(),
        sized_by_length=True,
    ),
    # The first GPT. It has no cache. Each layer has a square causal mask.
    _family(
        "openai-gpt",
        keeps_no_numbers="has no cache",
        names=replace(
            _GPT2_NAMES,
            token_embedding="tokens_embed",
            position_table="positions_embed",
            attention_head_dim=None,
            attention_layer_index=None,
        ),
        attention=_OpenaiGpt(),
        sized_by_length=True,
        joins_documents=True,
        note="no cache; for texts longer than its own length you must pass `position_ids`",
    ),
    # OPTForCausalLM.model is an OPTModel, whose only child is the decoder. As in fairseq, position p reads row p + 2 of
    # the table, and padding (position -1) reads row 1.
    _family("opt", names=replace(_TABLE, decoder="decoder"), attention=_Opt(), table_offset=2, joins_documents=True),
    _family("biogpt", names=_TABLE, attention=OwnAttention(), table_offset=2, joins_documents=True),
    # Its table of sinusoids has the config's length.
    _family(
        "xglm", names=_TABLE, attention=_Xglm(), refuse=_CROSS_ATTENTION, sized_by_length=True, joins_documents=True
    ),
    # Only the configs of the released models say the length.
    _family(
        "bloom",
        names=replace(_BLOOM, config_length="seq_length"),
        attention=_Bloom(),
        refuse={
            "slow_but_exact": "it cuts the output projection into slices, which hf_posenc does not do; set it to False "
            "(only the rounding differs)"
        },
        joins_documents=True,
    ),
    _family(
        "mpt",
        names=Names(layers="blocks", attention="attn", token_embedding="wte", config_length="max_seq_len"),
        attention=_Mpt(),
        joins_documents=True,
    ),
    _family(
        "falcon",
        names=replace(_BLOOM, attention_key_value_heads="num_kv_heads"),
        attention=_Falcon(),
        joins_documents=True,
    ),
    _family(
        "gpt_neox_japanese",
        names=Names(attention="attention", token_embedding="embed_in", attention_head_dim="head_size"),
        attention=_GptNeoxJapanese(),
    ),
    # Each layer has a table of angles.
    _family("gptj", names=_GPTJ, rotation=_NEIGHBOURS, attention=_Gptj(), sized_by_length=True),
    _family("codegen", names=_GPTJ, rotation=_NEIGHBOURS, attention=_Codegen(), sized_by_length=True),
    # The attention of these hybrids has no positions; their other layers make order visible to it.
    _family("jamba", attention=_Jamba(), hybrid=True),
    # A layer of Nemotron-H has a single block: attention, a state-space model, an MLP or experts.
    _family(
        "nemotron_h", names=Names(attention="mixer", token_embedding="embeddings"), attention=_Jamba(), hybrid=True
    ),
    # Kimi Linear has latent attention without a rotary module, so that no scheme can rotate in it.
    _family(
        "kimi_linear", names=Names(attention_head_dim="qk_head_dim", attention_value_dim="v_head_dim"), hybrid=True
    ),
)
