"""Families that are data alone: one row each. A family that brings code of its own has a file beside this one."""

from dataclasses import replace
from typing import Any

from torch import nn

from .base import Family, Names, RotationFacts
from .gguf_blocks import LLAMA_BLOCK

_ENCODER_USE = {
    # EmbeddingGemma: keys after the query are visible, their distances are negative.
    "use_bidirectional_attention": "every scheme is defined for keys at or before the query; set it to False"
}

# Modules of LLaMA's names, whole heads rotated by one module for all layers. What differs is elsewhere: biases, norms
# of queries and keys, experts, soft caps, sliding windows, scales of embeddings, rotations by kind of layer.
_LIKE_LLAMA = (
    "apertus",
    "arcee",
    "aria_text",
    "bitnet",
    "cwm",
    "deepseek_ocr2_text",
    "dots1",
    "emu3_text_model",
    "flex_olmo",
    "granite",
    "granite4_vision_text",
    "granite_docling_text",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "jais2",
    "mellum",
    "minimax_m2",
    "ministral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "solar_open",
    "starcoder2",
    "vaultgemma",
)
_INTERLEAVED = RotationFacts(pairs="interleaved")
_SLICED = RotationFacts(slices_rotary=True)
_SLICED_BY_SIZE = RotationFacts(slices_rotary=True, attention_size="rotary_ndims")
_COORDINATES = RotationFacts(parameter_coordinates="mrope_section")
_COHERE = RotationFacts(pairs="interleaved", angles="each twice")
_LATENT = RotationFacts(attention_part="qk_rope_head_dim", rescales=True)
_TEMPERATURE = ("llama_4_scaling_beta", "original_max_position_embeddings")
_LATENT_NAMES = Names(attention_head_dim="qk_head_dim", attention_value_dim="v_head_dim")
_BORROWS = Names(attention_borrows="is_kv_shared_layer", layer_lends="shared_kv_states")


def _slides(attention: nn.Module) -> bool:
    """Return whether a layer has a sliding window; in some families only those rotate."""
    return getattr(attention, "sliding_window", None) is not None


def _slides_or_all(attention: nn.Module) -> bool:
    """Return whether a layer has a sliding window, or no layer has one."""
    own: Any = attention
    return own.sliding_window is None or own.is_sliding


def _has_theta(attention: nn.Module) -> bool:
    """Return whether a layer's base of frequencies is not 0, which stands for no rotation."""
    own: Any = attention
    return bool(own.config.layer_rope_theta[own.layer_idx])


_ROWS = (
    # The plain rotary decoder; every field has its default. Its layers and those of SmolLM3 compute the same, and
    # SmolLM3 can leave some of them unrotated.
    Family(
        model_types=("llama",),
        rotation=RotationFacts(unrotated_twin="smollm3"),
        gguf=LLAMA_BLOCK,
        note="`nope` can be exported, as a SmolLM3",
    ),
    Family(model_types=_LIKE_LLAMA),
    Family(model_types=("evolla",), joins_documents=True),
    Family(model_types=("nanochat",), rotation=RotationFacts(backwards=True)),
    Family(model_types=("mistral",), gguf=LLAMA_BLOCK),
    # A Mamba beside the attention of every layer.
    Family(
        model_types=("falcon_h1",),
        joins_documents=True,
        undivided="beside its attention every layer has a state, which would have to travel from shard to shard",
    ),
    # Configs of their own, for LLaMA's model classes.
    Family(model_types=("internlm3", "iquestcoder"), note="its models are LLaMA's"),
    # Every fourth layer is left unrotated as a rule (`config.no_rope_layers`: 1 means rotated).
    Family(
        model_types=("smollm3",),
        rotation=RotationFacts(attention_switch="use_rope", config_switches="no_rope_layers", unrotated_twin="smollm3"),
        note="`nope` can be exported, in all or some layers",
    ),
    # Wide heads; the decoder scales the token embeddings by sqrt(E).
    Family(model_types=("gemma",), refuse=_ENCODER_USE),
    # A second rotary module, without the scaling, for the layers outside a list, which holds all layers as a rule.
    Family(model_types=("molmo2_text",), rotation=RotationFacts(config_layers="rope_scaling_layers")),
    # Soft-capped scores, `scaling` from `query_pre_attn_scalar`, every other layer with a sliding window.
    Family(model_types=("gemma2",), refuse=_ENCODER_USE, note="soft-capped scores"),
    # The rotary module has frequencies per layer type and is called once for each, with its name.
    Family(model_types=("gemma3_text",), refuse=_ENCODER_USE, note="a rotation for each type of layer"),
    Family(model_types=("gemma3n_text",), names=_BORROWS),
    # Heads differ in size by the type of the layer. Before the layers that borrow, the decoder may drop tokens.
    Family(
        model_types=("gemma4_text", "gemma4_unified_text"),
        names=replace(_BORROWS, attention_key_value_groups="num_key_value_groups"),
        decoder_attributes={"first_kv_shared_layer_idx": None},
        note="heads of two sizes",
    ),
    # Partial rotation, sliced by each attention's own number and not by the width of cos.
    Family(model_types=("phi", "stablelm"), rotation=_SLICED_BY_SIZE),
    # Partial rotation, sliced by the width of cos.
    Family(model_types=("glm4_moe", "nemotron"), rotation=_SLICED),
    # One projection makes queries, keys and values.
    Family(
        model_types=("dbrx",),
        names=Names(
            layers="blocks", attention="norm_attn_norm.attn", token_embedding="wte", config_length="max_seq_len"
        ),
    ),
    # Neighbouring dimensions are rotated together.
    Family(model_types=("ernie4_5", "ernie4_5_moe", "helium"), rotation=_INTERLEAVED),
    Family(model_types=("glm", "glm4"), rotation=replace(_INTERLEAVED, slices_rotary=True)),
    Family(model_types=("cohere",), rotation=_COHERE),
    # Only layers with a sliding window rotate.
    Family(model_types=("cohere2", "cohere2_moe"), rotation=replace(_COHERE, rotates=_slides)),
    Family(model_types=("exaone4", "exaone_moe", "kolibri1"), rotation=RotationFacts(rotates=_slides_or_all)),
    Family(model_types=("afmoe",), rotation=RotationFacts(rotates=_slides), joins_documents=True),
    Family(model_types=("muse_glimmer_text", "muse_spark_text"), rotation=RotationFacts(rotates=_has_theta)),
    # Attention sinks: one more score per head in the softmax. GPT-OSS gives each angle once.
    Family(
        model_types=("gpt_oss",), rotation=RotationFacts(angles="once"), joins_documents=True, note="attention sinks"
    ),
    Family(model_types=("flint",), rotation=RotationFacts(rotates=_slides), note="attention sinks"),
    Family(
        model_types=("granite_swa", "granitemoe_swa"),
        rotation=RotationFacts(config_thetas="layer_rope_theta", rotates=_has_theta),
        note="attention sinks",
    ),
    Family(
        model_types=("mimo_v2_flash",),
        names=Names(attention_value_dim="v_head_dim"),
        rotation=_SLICED,
        note="attention sinks",
    ),
    # Latent attention (MLA): a part of each head is set apart for rotation; values are smaller than queries and keys.
    Family(
        model_types=("deepseek_v2",),
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, pairs="interleaved", angles="complex"),
    ),
    Family(
        model_types=("axk1", "deepseek_v3", "glm4_moe_lite", "youtu"),
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, config_interleaved="rope_interleave"),
    ),
    Family(model_types=("minicpm3",), names=_LATENT_NAMES, rotation=_LATENT),
    # Latent attention, and queries grow with the position as those of ministral3.
    Family(
        model_types=("mistral4",),
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, config_interleaved="rope_interleave", parameter_temperature=_TEMPERATURE),
    ),
    # Position ids end in the layers, or in the attention.
    Family(model_types=("chameleon",), drops_position_ids=True),
    Family(model_types=("persimmon",), rotation=_SLICED_BY_SIZE, drops_position_ids=True),
    Family(
        model_types=("llama4_text",),
        names=Names(decoder="model"),
        rotation=RotationFacts(
            pairs="interleaved",
            angles="complex",
            attention_switch="use_rope",
            attention_temperature={"attn_temperature_tuning": False},
        ),
        drops_position_ids=True,
        undivided="it makes chunks of the sequence for its attention, and counts tokens from the start of each shard",
    ),
    # Queries grow with the position beyond `original_max_position_embeddings`. In older releases of transformers
    # position ids end in the attention.
    Family(
        model_types=("ministral3",),
        rotation=RotationFacts(parameter_temperature=_TEMPERATURE),
        drops_position_ids=True,
    ),
    Family(
        model_types=("modernbert-decoder",), names=Names(attention="attn", token_embedding="embeddings.tok_embeddings")
    ),
    Family(model_types=("laguna", "step3p5"), names=Names(attention_heads="num_heads"), rotation=_SLICED),
    # Layers without attention, through which order flows all the same.
    Family(model_types=("bamba", "qwen3_next"), rotation=_SLICED, hybrid=True),
    # The decoders of models that see: a position may have a time, a height and a width.
    Family(
        model_types=("qwen3_5_moe_text", "qwen3_5_text"),
        rotation=replace(_COORDINATES, slices_rotary=True),
        hybrid=True,
    ),
    Family(
        model_types=(
            "cosmos3_edge_text",
            "paddleocr_vl_text",
            "qwen2_5_omni_text",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
            "qwen3_omni_moe_text",
            "qwen3_vl_moe_text",
            "qwen3_vl_text",
        ),
        rotation=_COORDINATES,
        note="without a head: the text model inside",
    ),
    Family(
        model_types=("glm4v_moe_text", "glm_image_text"),
        rotation=replace(_COORDINATES, slices_rotary=True),
        note="without a head: the text model inside",
    ),
    Family(
        model_types=("glm4v_text", "glm_ocr_text"),
        rotation=replace(_COORDINATES, slices_rotary=True, pairs="interleaved", angles="each twice"),
        note="without a head: the text model inside",
    ),
    Family(
        model_types=("ernie4_5_vl_moe_text",),
        rotation=replace(_COORDINATES, pairs="interleaved", angles="each twice"),
        note="without a head: the text model inside",
    ),
    Family(
        model_types=("hunyuan_vl_text",),
        rotation=_COORDINATES,
        drops_position_ids=True,
        joins_documents=True,
        note="without a head: the text model inside",
    ),
    Family(model_types=("lfm2", "lfm3", "minimax", "olmo_hybrid"), hybrid=True),
    Family(model_types=("lfm2_moe",), rotation=RotationFacts(rotary="pos_emb"), hybrid=True),
    Family(
        model_types=("bailing_hybrid",),
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, pairs="interleaved"),
        hybrid=True,
    ),
    Family(model_types=("granitemoehybrid",), hybrid=True, drops_position_ids=True),
    # Mixture of attention heads: each expert has queries of its own, which share keys and values.
    Family(
        model_types=("jetmoe",),
        names=Names(attention="self_attention"),
        keeps_no_numbers="repeats its keys for every expert after they are cached",
        note="experts among its heads",
    ),
    # Fused projections, partial rotation, and LongRoPE, whose factors change with the length: `generate` drops the
    # cache when it crosses `config.original_max_position_embeddings`, since keys that were rotated by the short factors
    # are useless from there on.
    Family(model_types=("phi3",), rotation=_SLICED, note="LongRoPE drops the cache at its original length"),
    # GPT-NeoX and Pythia: partial rotation; layers take the cache as `layer_past`.
    Family(
        model_types=("gpt_neox",),
        names=Names(attention="attention", token_embedding="embed_in", attention_head_dim="head_size"),
        rotation=_SLICED,
    ),
)

# Types that are alike share a row. Each gets a family of its own, which messages then name alone.
FAMILIES = tuple(replace(row, model_types=(model_type,)) for row in _ROWS for model_type in row.model_types)
