"""Families that need no code, one row of data each. A family with code has a file of its own in this folder."""

from dataclasses import replace
from typing import Any

from torch import nn

from .base import KEYS_OF_4, Family, Names, RotationFacts
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
    "apertus arcee aria_text bitnet cwm deepseek_ocr2_text dots1 emu3_text_model flex_olmo granite "
    "granite4_vision_text granite_docling_text granitemoe granitemoeshared hy_v3 jais2 mellum ministral mixtral olmo "
    "olmo2 olmo3 olmoe qwen2_moe qwen3 qwen3_moe seed_oss solar_open starcoder2 vaultgemma"
)
_THREE_COORDINATES = (
    "cosmos3_edge_text paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text qwen3_omni_moe_text "
    "qwen3_vl_moe_text qwen3_vl_text"
)
_LLAMAS = RotationFacts(wide_twin="llama")
_INTERLEAVED = RotationFacts(pairs="interleaved")
_SLICED = RotationFacts(slices_rotary=True)
_UNSCALED = {key: key for key in KEYS_OF_4 if key != "rope_scaling"}
_TWO_THETAS = RotationFacts(keys_of_4=KEYS_OF_4 | {"windowed_theta": "rope_local_base_freq"})
_SLICED_BY_SIZE = RotationFacts(slices_rotary=True, attention_size="rotary_ndims")
_COORDINATES = RotationFacts(parameter_coordinates="mrope_section")
_COHERE = RotationFacts(pairs="interleaved", angles="each twice")
_HUNYUAN = RotationFacts(
    norms_after="norms queries and keys after their rotation, with a weight per dimension",
    parameter_frequencies=("alpha",),
)
_LATENT = RotationFacts(attention_part="qk_rope_head_dim", parameter_rescales=("mscale_all_dim", "factor"))
_TEMPERATURE = ("llama_4_scaling_beta", "original_max_position_embeddings")
_LATENT_NAMES = Names(attention_head_dim="qk_head_dim", attention_value_dim="v_head_dim")
_INKLING = RotationFacts(rotary=None, attention_bias="rel_logits_proj")
_INKLING_NAMES = Names(attention_heads="num_heads", attention_key_value_heads="num_key_value_heads")
_CONVOLUTIONS = "its layers have short convolutions with a state, which would have to travel from shard to shard"
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


def _row(model_types: str, **facts: Any) -> Family:
    """Return the family of model types that are divided by spaces."""
    return Family(model_types=tuple(model_types.split()), **facts)


_ROWS = (
    # LLaMA is the plain rotary decoder, for which every field has its default. Its layers compute what those of SmolLM3
    # compute, and SmolLM3 can leave some of its layers unrotated.
    Family(
        model_types=("llama",),
        rotation=RotationFacts(unrotated_twin="smollm3", windowed_twin="mistral"),
        gguf=LLAMA_BLOCK,
        note="`nope` can be exported, as a SmolLM3",
    ),
    Family(model_types=tuple(_LIKE_LLAMA.split())),
    # Without a sliding window it computes what LLaMA with biases of queries, keys and values does.
    Family(model_types=("qwen2",), rotation=_LLAMAS),
    Family(
        model_types=("hunyuan_v1_dense", "hunyuan_v1_moe"),
        rotation=_HUNYUAN,
        note="takes no `far_rope` and no `rope_by_head`",
    ),
    # Beside LongRoPE's factors it has factors on cosines and sines of its own.
    _row("phimoe", rotation=RotationFacts(parameter_magnitudes=("long_mscale", "short_mscale"))),
    _row("evolla", joins_documents=True),
    Family(model_types=("nanochat",), rotation=RotationFacts(backwards=True)),
    Family(model_types=("mistral",), rotation=_LLAMAS, gguf=LLAMA_BLOCK),
    # Every layer has a Mamba beside its attention.
    _row(
        "falcon_h1",
        joins_documents=True,
        undivided="beside its attention every layer has a state, which would have to travel from shard to shard",
    ),
    # A learned bias by distance replaces a rotation. Keys, values and both branches of a layer pass short convolutions.
    _row(
        "inkling_text",
        names=_INKLING_NAMES,
        rotation=replace(
            _INKLING,
            config_temperature={"log_scaling_n_floor": None},
            bias_parameters=("r_proj.weight", "rel_logits_proj.proj"),
        ),
        drops_position_ids=True,
        joins_documents=True,
        undivided=_CONVOLUTIONS,
        note="`nope` can be exported, also beside an `inkling` of the same size",
    ),
    # It gives each query an attention sink, too, and its position ids reach the attention.
    _row(
        "inkling2_text",
        names=_INKLING_NAMES,
        rotation=replace(_INKLING, config_temperature={"log_scaling_alpha": 0.0}),
        joins_documents=True,
        undivided=_CONVOLUTIONS,
        note="attention sinks",
    ),
    # These types have configs of their own, but their models are LLaMA's classes.
    _row("internlm3 iquestcoder", note="it uses the model classes of LLaMA"),
    # `config.no_rope_layers` has a 1 for each layer that rotates. By default every fourth layer has a 0.
    Family(
        model_types=("smollm3",),
        rotation=RotationFacts(
            attention_switch="use_rope", config_switches="no_rope_layers", unrotated_twin="smollm3", wide_twin="llama"
        ),
        note="`nope` can be exported, in all or some layers",
    ),
    # Heads can be wider than E / H, and the decoder multiplies the token embeddings by sqrt(E).
    _row("gemma", refuse=_ENCODER_USE),
    # Layers outside `config.rope_scaling_layers` use a second rotary module, without scaling. By default none is
    # outside.
    _row("molmo2_text", rotation=RotationFacts(config_layers="rope_scaling_layers")),
    # Scores have a soft cap, `query_pre_attn_scalar` sets `scaling`, and every other layer has a sliding window.
    _row("gemma2", refuse=_ENCODER_USE, note="soft-capped scores"),
    # The rotary module has frequencies for each layer type. The decoder calls it once for each type, with its name.
    _row("gemma3_text", rotation=_TWO_THETAS, refuse=_ENCODER_USE, note="a rotation for each type of layer"),
    _row("gemma3n_text", names=_BORROWS, rotation=_TWO_THETAS),
    # The head size depends on the type of the layer. From the first layer that borrows keys and values, the decoder may
    # compute only the tokens of `logits_to_keep`. None at `first_kv_shared_layer_idx` switches this off.
    _row(
        "gemma4_text gemma4_unified_text",
        names=replace(_BORROWS, attention_key_value_groups="num_key_value_groups"),
        decoder_attributes={"first_kv_shared_layer_idx": None},
        note="heads have two sizes, by the type of the layer",
    ),
    # These types rotate a part of each head. The attention takes the number of rotated dimensions from `rotary_ndims`,
    # not from the width of cos.
    _row("phi stablelm", rotation=_SLICED_BY_SIZE),
    # These types rotate a part of each head, and the width of cos says how many dimensions.
    _row("glm4_moe minimax_m2", rotation=_SLICED),
    _row("nemotron", rotation=replace(_SLICED, keys_of_4=_UNSCALED)),
    # One projection makes queries, keys and values.
    _row(
        "dbrx",
        names=Names(
            layers="blocks", attention="norm_attn_norm.attn", token_embedding="wte", config_length="max_seq_len"
        ),
    ),
    # Neighbouring dimensions are rotated together.
    _row("ernie4_5 ernie4_5_moe helium", rotation=_INTERLEAVED),
    _row("glm glm4", rotation=replace(_INTERLEAVED, slices_rotary=True)),
    _row("cohere", rotation=_COHERE),
    # Only layers with a sliding window rotate.
    _row("cohere2 cohere2_moe", rotation=replace(_COHERE, rotates=_slides)),
    _row("exaone4 exaone_moe kolibri1", rotation=RotationFacts(rotates=_slides_or_all)),
    _row("afmoe", rotation=RotationFacts(rotates=_slides), joins_documents=True),
    _row("muse_glimmer_text muse_spark_text", rotation=RotationFacts(rotates=_has_theta)),
    # The softmax has one more score per head, an attention sink. The cos of GPT-OSS has each angle once.
    _row("gpt_oss", rotation=RotationFacts(angles="once"), joins_documents=True, note="attention sinks"),
    _row("flint", rotation=RotationFacts(rotates=_slides), note="attention sinks"),
    _row(
        "granite_swa granitemoe_swa",
        rotation=RotationFacts(config_thetas="layer_rope_theta", rotates=_has_theta),
        note="attention sinks",
    ),
    _row(
        "mimo_v2_flash",
        names=Names(attention_value_dim="v_head_dim", attention_key_value_groups="num_key_value_groups"),
        rotation=_SLICED,
        note="attention sinks",
    ),
    # Latent attention (MLA) sets a part of each head apart for rotation. Values are smaller than queries and keys.
    _row("deepseek_v2", names=_LATENT_NAMES, rotation=replace(_LATENT, pairs="interleaved", angles="complex")),
    _row(
        "axk1 deepseek_v3 glm4_moe_lite youtu",
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, config_interleaved="rope_interleave", lists_halves=True),
    ),
    _row("minicpm3", names=_LATENT_NAMES, rotation=_LATENT),
    # It has latent attention, and its queries grow with the position as those of ministral3 do.
    _row(
        "mistral4",
        names=_LATENT_NAMES,
        rotation=replace(
            _LATENT, config_interleaved="rope_interleave", lists_halves=True, parameter_temperature=_TEMPERATURE
        ),
    ),
    # In these types `position_ids` reach the layers, but not the attention function.
    _row("chameleon", drops_position_ids=True),
    _row("persimmon", rotation=_SLICED_BY_SIZE, drops_position_ids=True),
    _row(
        "llama4_text",
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
    _row("ministral3", rotation=RotationFacts(parameter_temperature=_TEMPERATURE), drops_position_ids=True),
    _row(
        "modernbert-decoder",
        names=Names(attention="attn", token_embedding="embeddings.tok_embeddings"),
        # transformers 4 has a `local_rope_theta` too, and turns all layers by the global one.
        rotation=RotationFacts(keys_of_4={"rope_theta": "global_rope_theta"}),
    ),
    _row("laguna step3p5", names=Names(attention_heads="num_heads"), rotation=_SLICED),
    # Some layers have no attention. They are recurrences or convolutions, so the model knows the order of tokens even
    # under `nope`.
    _row("bamba qwen3_next", rotation=_SLICED, hybrid=True),
    # These are the decoders of vision-language models. A position may have three coordinates: time, height and width.
    _row("qwen3_5_moe_text qwen3_5_text", rotation=replace(_COORDINATES, slices_rotary=True), hybrid=True),
    _row(_THREE_COORDINATES, rotation=_COORDINATES, note=_NO_HEAD),
    _row("glm4v_moe_text glm_image_text", rotation=replace(_COORDINATES, slices_rotary=True), note=_NO_HEAD),
    _row(
        "glm4v_text glm_ocr_text",
        rotation=replace(_COORDINATES, slices_rotary=True, pairs="interleaved", angles="each twice"),
        note=_NO_HEAD,
    ),
    _row(
        "ernie4_5_vl_moe_text", rotation=replace(_COORDINATES, pairs="interleaved", angles="each twice"), note=_NO_HEAD
    ),
    _row(
        "hunyuan_vl_text",
        rotation=replace(_HUNYUAN, parameter_coordinates="mrope_section"),
        drops_position_ids=True,
        joins_documents=True,
        note=_NO_HEAD,
    ),
    _row("lfm2 lfm3 minimax olmo_hybrid", hybrid=True),
    _row("lfm2_moe", rotation=RotationFacts(rotary="pos_emb"), hybrid=True),
    _row(
        "bailing_hybrid",
        names=_LATENT_NAMES,
        rotation=replace(_LATENT, pairs="interleaved", lists_halves=True),
        hybrid=True,
    ),
    _row("granitemoehybrid", hybrid=True, drops_position_ids=True),
    # JetMoE has a mixture of attention heads. Each expert has queries of its own, and all experts share keys and
    # values.
    _row(
        "jetmoe",
        names=Names(attention="self_attention", attention_key_value_groups="num_key_value_groups"),
        keeps_no_numbers="repeats its keys for every expert after they are cached",
        note="each expert has its own query heads",
    ),
    # One projection makes queries, keys and values. Some models rotate a part of each head. The factors of LongRoPE
    # change with the length. So `generate` drops the cache when it crosses `config.original_max_position_embeddings`,
    # because its keys were rotated by the factors for shorter lengths.
    _row("phi3", rotation=_SLICED, note="with LongRoPE, `generate` drops the cache at the original length"),
    # GPT-NeoX and Pythia rotate a part of each head, and their layers take the cache as `layer_past`.
    _row(
        "gpt_neox",
        names=Names(attention="attention", token_embedding="embed_in", attention_head_dim="head_size"),
        rotation=replace(
            _SLICED, keys_of_4=KEYS_OF_4 | {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        ),
    ),
)

# Model types that are alike share a row. Each gets a family of its own, so that messages name one model type only.
FAMILIES = tuple(replace(row, model_types=(model_type,)) for row in _ROWS for model_type in row.model_types)
