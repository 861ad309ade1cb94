"""Families that need no code, one row of data each. A family with code has a file of its own in this folder."""

from dataclasses import replace

from torch import nn

from .base import Family, Names, RotationFacts
from .gguf_blocks import LLAMA_BLOCK
from .own_attention import Stock

_ENCODER_USE = {
    # With it, as in EmbeddingGemma, queries see later keys, at negative distances.
    "use_bidirectional_attention": "every scheme is defined for keys at or before the query; set it to False"
}

# The modules of these types have the names of LLaMA's, and one rotary module rotates whole heads of all layers. The
# types differ in other things: biases, norms of queries and keys, experts, soft caps, sliding windows, scales of
# embeddings, rotations by the type of the layer.
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
    "hy_v3",
    "jais2",
    "mellum",
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
_NORMS_AFTER = RotationFacts(norms_after="norms queries and keys after their rotation, with a weight per dimension")
_LATENT = RotationFacts(attention_part="qk_rope_head_dim", rescales=True)
_TEMPERATURE = ("llama_4_scaling_beta", "original_max_position_embeddings")
_LATENT_NAMES = Names(attention_head_dim="qk_head_dim", attention_value_dim="v_head_dim")
_NO_HEAD = "it has no head of its own: pass the multimodal model, or the text model inside it"
_BORROWS = Names(attention_borrows="is_kv_shared_layer", layer_lends="shared_kv_states")


def _slides(attention: nn.Module) -> bool:
    """Return whether a layer has a sliding window. In some families only such layers rotate."""
    return getattr(attention, "sliding_window", None) is not None


def _slides_or_all(attention: Stock) -> bool:
    """Return whether a layer of EXAONE 4 rotates: it has a sliding window, or the config has none."""
    return attention.sliding_window is None or attention.is_sliding


def _has_theta(attention: Stock) -> bool:
    """Return whether a layer rotates. If not, the config gives 0 as its base of frequencies."""
    return bool(attention.config.layer_rope_theta[attention.layer_idx])


_ROWS = (
    # LLaMA is the plain rotary decoder, for which every field has its default. Its layers compute what those of SmolLM3
    # compute, and SmolLM3 can leave some of its layers unrotated.
    Family(
        model_types=("llama",),
        rotation=RotationFacts(unrotated_twin="smollm3"),
        gguf=LLAMA_BLOCK,
        note="`nope` can be exported, as a SmolLM3",
    ),
    Family(model_types=_LIKE_LLAMA),
    Family(
        model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"),
        rotation=_NORMS_AFTER,
        note="takes no `far_rope` and no `rope_by_head`",
    ),
    Family(model_types=("evolla",), joins_documents=True),
    Family(model_types=("nanochat",), rotation=RotationFacts(backwards=True)),
    Family(model_types=("mistral",), gguf=LLAMA_BLOCK),
    # Every layer has a Mamba beside its attention.
    Family(
        model_types=("falcon_h1",),
        joins_documents=True,
        undivided="beside its attention every layer has a state, which would have to travel from shard to shard",
    ),
    # These types have configs of their own, but their models are LLaMA's classes.
    Family(model_types=("internlm3", "iquestcoder"), note="it uses the model classes of LLaMA"),
    # `config.no_rope_layers` has a 1 for each layer that rotates. By default every fourth layer has a 0.
    Family(
        model_types=("smollm3",),
        rotation=RotationFacts(attention_switch="use_rope", config_switches="no_rope_layers", unrotated_twin="smollm3"),
        note="`nope` can be exported, in all or some layers",
    ),
    # Heads can be wider than E / H, and the decoder multiplies the token embeddings by sqrt(E).
    Family(model_types=("gemma",), refuse=_ENCODER_USE),
    # Layers outside `config.rope_scaling_layers` use a second rotary module, without scaling. By default none is
    # outside.
    Family(model_types=("molmo2_text",), rotation=RotationFacts(config_layers="rope_scaling_layers")),
    # Scores have a soft cap, `query_pre_attn_scalar` sets `scaling`, and every other layer has a sliding window.
    Family(model_types=("gemma2",), refuse=_ENCODER_USE, note="soft-capped scores"),
    # The rotary module has frequencies for each layer type. The decoder calls it once for each type, with its name.
    Family(model_types=("gemma3_text",), refuse=_ENCODER_USE, note="a rotation for each type of layer"),
    Family(model_types=("gemma3n_text",), names=_BORROWS),
    # The head size depends on the type of the layer. From the first layer that borrows keys and values, the decoder may
    # compute only the tokens of `logits_to_keep`. None at `first_kv_shared_layer_idx` switches this off.
    Family(
        model_types=("gemma4_text", "gemma4_unified_text"),
        names=replace(_BORROWS, attention_key_value_groups="num_key_value_groups"),
        decoder_attributes={"first_kv_shared_layer_idx": None},
        note="heads have two sizes, by the type of the layer",
    ),
    # These types rotate a part of each head. The attention takes the number of rotated dimensions from `rotary_ndims`,
    # not from the width of cos.
    Family(model_types=("phi", "stablelm"), rotation=_SLICED_BY_SIZE),
    # These types rotate a part of each head, and the width of cos says how many dimensions.
    Family(model_types=("glm4_moe", "minimax_m2", "nemotron"), rotation=_SLICED),
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
    # The softmax has one more score per head, an attention sink. The cos of GPT-OSS has each angle once.
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
        names=Names(attention_value_dim="v_head_dim", attention_key_value_groups="num_key_value_groups"),
        rotation=_SLICED,
        note="attention sinks",
    ),
    # Latent attention (MLA) sets a part of each head apart for rotation. Values are smaller than queries and keys.
    Family(
        model_types=("deepseek_v2",),
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, pairs="interleaved", angles="complex"),
    ),
    Family(
        model_types=("axk1", "deepseek_v3", "glm4_moe_lite", "youtu"),
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, config_interleaved="rope_interleave", lists_halves=True),
    ),
    Family(model_types=("minicpm3",), names=_LATENT_NAMES, rotation=_LATENT),
    # It has latent attention, and its queries grow with the position as those of ministral3 do.
    Family(
        model_types=("mistral4",),
        names=_LATENT_NAMES,
        rotation=replace(
            _LATENT, config_interleaved="rope_interleave", lists_halves=True, parameter_temperature=_TEMPERATURE
        ),
    ),
    # In these types `position_ids` reach the layers, but not the attention function.
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
    # Queries grow with the position beyond `original_max_position_embeddings`. In older releases of transformers,
    # `position_ids` do not reach the attention function.
    Family(
        model_types=("ministral3",),
        rotation=RotationFacts(parameter_temperature=_TEMPERATURE),
        drops_position_ids=True,
    ),
    Family(
        model_types=("modernbert-decoder",), names=Names(attention="attn", token_embedding="embeddings.tok_embeddings")
    ),
    Family(model_types=("laguna", "step3p5"), names=Names(attention_heads="num_heads"), rotation=_SLICED),
    # Some layers have no attention. They are recurrences or convolutions, so the model knows the order of tokens even
    # under `nope`.
    Family(model_types=("bamba", "qwen3_next"), rotation=_SLICED, hybrid=True),
    # These are the decoders of vision-language models. A position may have three coordinates: time, height and width.
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
        note=_NO_HEAD,
    ),
    Family(
        model_types=("glm4v_moe_text", "glm_image_text"),
        rotation=replace(_COORDINATES, slices_rotary=True),
        note=_NO_HEAD,
    ),
    Family(
        model_types=("glm4v_text", "glm_ocr_text"),
        rotation=replace(_COORDINATES, slices_rotary=True, pairs="interleaved", angles="each twice"),
        note=_NO_HEAD,
    ),
    Family(
        model_types=("ernie4_5_vl_moe_text",),
        rotation=replace(_COORDINATES, pairs="interleaved", angles="each twice"),
        note=_NO_HEAD,
    ),
    Family(
        model_types=("hunyuan_vl_text",),
        rotation=replace(_NORMS_AFTER, parameter_coordinates="mrope_section"),
        drops_position_ids=True,
        joins_documents=True,
        note=_NO_HEAD,
    ),
    Family(model_types=("lfm2", "lfm3", "minimax", "olmo_hybrid"), hybrid=True),
    Family(model_types=("lfm2_moe",), rotation=RotationFacts(rotary="pos_emb"), hybrid=True),
    Family(
        model_types=("bailing_hybrid",),
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, pairs="interleaved", lists_halves=True),
        hybrid=True,
    ),
    Family(model_types=("granitemoehybrid",), hybrid=True, drops_position_ids=True),
    # JetMoE has a mixture of attention heads. Each expert has queries of its own, and all experts share keys and
    # values.
    Family(
        model_types=("jetmoe",),
        names=Names(attention="self_attention", attention_key_value_groups="num_key_value_groups"),
        keeps_no_numbers="repeats its keys for every expert after they are cached",
        note="each expert has its own query heads",
    ),
    # One projection makes queries, keys and values. Some models rotate a part of each head. The factors of LongRoPE
    # change with the length. So `generate` drops the cache when it crosses `config.original_max_position_embeddings`,
    # because its keys were rotated by the factors for shorter lengths.
    Family(
        model_types=("phi3",), rotation=_SLICED, note="with LongRoPE, `generate` drops the cache at the original length"
    ),
    # GPT-NeoX and Pythia rotate a part of each head, and their layers take the cache as `layer_past`.
    Family(
        model_types=("gpt_neox",),
        names=Names(attention="attention", token_embedding="embed_in", attention_head_dim="head_size"),
        rotation=_SLICED,
    ),
)

# Model types that are alike share a row. Each gets a family of its own, so that messages name one model type only.
FAMILIES = tuple(replace(row, model_types=(model_type,)) for row in _ROWS for model_type in row.model_types)
