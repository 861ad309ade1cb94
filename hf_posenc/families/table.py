"""Families that are data alone: one row each. A family that brings code of its own has a file beside this one."""

from typing import Any

from torch import nn

from .base import Family

_ENCODER_USE = {
    # EmbeddingGemma: keys after the query are visible, their distances are negative.
    "use_bidirectional_attention": "every scheme is defined for keys at or before the query; set it to False",
}

# Modules of LLaMA's names, whole heads rotated by one module for all layers. What differs is elsewhere: biases, norms
# of queries and keys, experts, soft caps, sliding windows, scales of embeddings, rotations by kind of layer.
_LIKE_LLAMA = (
    "apertus",
    "arcee",
    "aria_text",
    "bitnet",
    "cwm",
    "dots1",
    "flex_olmo",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "jais2",
    "mellum",
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "nanochat",
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
_INTERLEAVED = ("ernie4_5", "ernie4_5_moe", "helium")
_BY_WIDTH = ("glm4_moe", "nemotron")
_INTERLEAVED_BY_WIDTH = ("glm", "glm4")
_BY_NUMBER = ("phi", "stablelm")


def _slides(attention: nn.Module) -> bool:
    """Return whether a layer has a sliding window; in some families only those rotate."""
    return getattr(attention, "sliding_window", None) is not None


def _slides_or_all(attention: nn.Module) -> bool:
    """Return whether a layer has a sliding window, or no layer has one."""
    own: Any = attention
    return own.sliding_window is None or own.is_sliding


_LATENT: dict[str, Any] = {"rotary_part": "qk_rope_head_dim", "rescales": True}

FAMILIES = (
    # The plain rotary decoder; every field has its default. Its layers and those of SmolLM3 compute the same, and
    # SmolLM3 can leave some of them unrotated.
    Family(model_types=("llama",), unrotated_twin="smollm3", note="`nope` can be exported, as a SmolLM3"),
    *(Family(model_types=(model_type,)) for model_type in _LIKE_LLAMA),
    # A Mamba beside the attention of every layer.
    Family(
        model_types=("falcon_h1",),
        undivided="beside its attention every layer has a state, which would have to travel from shard to shard",
    ),
    # Configs of their own, for LLaMA's model classes.
    *(Family(model_types=(t,), note="its models are LLaMA's") for t in ("internlm3", "iquestcoder")),
    # Every fourth layer is left unrotated as a rule (`config.no_rope_layers`: 1 means rotated).
    Family(
        model_types=("smollm3",),
        unrotated_twin="smollm3",
        use_rope_flag="use_rope",
        rotated_layers="no_rope_layers",
        note="`nope` can be exported, in all or some layers",
    ),
    # Wide heads; the decoder scales the token embeddings by sqrt(E).
    Family(model_types=("gemma",), refuse=_ENCODER_USE),
    # Soft-capped scores, `scaling` from `query_pre_attn_scalar`, every other layer with a sliding window.
    Family(model_types=("gemma2",), refuse=_ENCODER_USE, note="soft-capped scores"),
    # The rotary module has frequencies per layer type and is called once for each, with its name.
    Family(model_types=("gemma3_text",), refuse=_ENCODER_USE, note="a rotation for each type of layer"),
    # Partial rotation, sliced by each attention's own number and not by the width of cos.
    *(Family(model_types=(model_type,), slices_rotary=True, rotary_size="rotary_ndims") for model_type in _BY_NUMBER),
    # Partial rotation, sliced by the width of cos.
    *(Family(model_types=(model_type,), slices_rotary=True) for model_type in _BY_WIDTH),
    # Neighbouring dimensions are turned together.
    *(Family(model_types=(model_type,), pairs="interleaved") for model_type in _INTERLEAVED),
    *(Family(model_types=(t,), pairs="interleaved", slices_rotary=True) for t in _INTERLEAVED_BY_WIDTH),
    Family(model_types=("cohere",), pairs="interleaved", angles="each twice"),
    # Only layers with a sliding window rotate.
    Family(model_types=("cohere2",), pairs="interleaved", angles="each twice", rotates=_slides),
    Family(model_types=("cohere2_moe",), pairs="interleaved", angles="each twice", rotates=_slides),
    *(
        Family(model_types=(model_type,), rotates=_slides_or_all)
        for model_type in ("exaone4", "exaone_moe", "kolibri1")
    ),
    Family(model_types=("afmoe",), rotates=_slides),
    # Attention sinks: one more score per head in the softmax. GPT-OSS gives each angle once.
    Family(model_types=("gpt_oss",), angles="once", note="attention sinks"),
    Family(model_types=("flint",), rotates=_slides, note="attention sinks"),
    Family(model_types=("mimo_v2_flash",), slices_rotary=True, note="attention sinks"),
    # Latent attention (MLA): a part of each head is set apart for rotation; values are smaller than queries and keys.
    Family(model_types=("deepseek_v2",), pairs="interleaved", angles="complex", **_LATENT),
    *(
        Family(model_types=(model_type,), interleaved_if="rope_interleave", **_LATENT)
        for model_type in ("axk1", "deepseek_v3", "glm4_moe_lite", "youtu")
    ),
    Family(model_types=("minicpm3",), **_LATENT),
    # Position ids end in the layers.
    Family(model_types=("persimmon",), slices_rotary=True, rotary_size="rotary_ndims", drops_position_ids=True),
    Family(
        model_types=("llama4_text",),
        decoder="model",
        pairs="interleaved",
        angles="complex",
        use_rope_flag="use_rope",
        drops_position_ids=True,
        temperature={"attn_temperature_tuning": False},
        undivided="it makes chunks of the sequence for its attention, and counts tokens from the start of each shard",
    ),
    # Queries grow with the position beyond `original_max_position_embeddings`. In older releases of transformers
    # position ids end in the attention.
    Family(
        model_types=("ministral3",),
        drops_position_ids=True,
        temperature_keys=("llama_4_scaling_beta", "original_max_position_embeddings"),
    ),
    Family(model_types=("modernbert-decoder",), attention="attn", token_embedding="embeddings.tok_embeddings"),
    Family(model_types=("laguna",), slices_rotary=True, heads="num_heads"),
    # Layers without attention, through which order flows all the same.
    *(Family(model_types=(model_type,), slices_rotary=True, hybrid=True) for model_type in ("bamba", "qwen3_next")),
    # The decoders of models that see: a position may have a time, a height and a width.
    *(
        Family(model_types=(model_type,), slices_rotary=True, hybrid=True, coordinates="mrope_section")
        for model_type in ("qwen3_5_moe_text", "qwen3_5_text")
    ),
    *(Family(model_types=(model_type,), hybrid=True) for model_type in ("lfm2", "lfm3", "olmo_hybrid")),
    Family(model_types=("lfm2_moe",), hybrid=True, rotary="pos_emb"),
    Family(model_types=("minimax",), hybrid=True),
    Family(model_types=("bailing_hybrid",), hybrid=True, pairs="interleaved", **_LATENT),
    Family(model_types=("granitemoehybrid",), hybrid=True, drops_position_ids=True),
    # Mixture of attention heads: each expert has queries of its own, which share keys and values.
    Family(model_types=("jetmoe",), attention="self_attention", note="experts among its heads"),
    # Fused projections, partial rotation, and LongRoPE, whose factors change with the length: `generate` drops the
    # cache when it crosses `config.original_max_position_embeddings`, since keys that were rotated by the short factors
    # are useless from there on.
    Family(model_types=("phi3",), slices_rotary=True, note="LongRoPE drops the cache at its original length"),
    # GPT-NeoX and Pythia: partial rotation; layers take the cache as `layer_past`.
    Family(model_types=("gpt_neox",), attention="attention", token_embedding="embed_in", slices_rotary=True),
)
