"""Tiny models of every model type that is served, built from their configs by the names that configs share.

`families.py` has hand-made fixtures of the families that most tests run on; this builder is for the tests that go
through all model types. Norms, biases and whatever else starts at a constant are drawn at random, so that a feature
which is left out shows.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "head_dim": 8, "kv_channels": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
    "attention_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "dropout": 0.0,
    "embedding_dropout": 0.0, "residual_dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2,
    "rotary_dim": 4, "max_seq_len": 64, "attention_types": [[["global", "local"], 1]], "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
}  # fmt: skip

LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4,
    "v_head_dim": 6,
}  # fmt: skip
"""Latent attention (MLA): heads of queries and keys have 12 dimensions, 8 of them rotated, those of values 6."""
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
"""The second layer is not rotated where only layers with a window are."""
UNROTATED = WINDOWED | {"layer_rope_theta": [1e4, 0]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
"""Pairs for time, height and width, as many as a tiny head has."""
PART_MROPE = {"head_dim": 16, "rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 0.5}}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"], "sliding_window_size": 32, "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 12, "log_scaling_n_floor": 4,
}  # fmt: skip
"""The bias of the second layer ends before the text does, and its queries grow with the position."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}

SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
"""The last two layers take keys and values from the first two."""
WIDE_HEADS = {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
"""Every other layer has larger heads, one key head, and values that are keys."""

SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": WINDOWED | {"num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "axk1": LATENT,
    "bailing_hybrid": LATENT | {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 96}, "vq_config": {"base_channels": 32, "embed_dim": 8,
        "latent_channels": 8, "channel_multiplier": [1], "num_embeddings": 8}},
    "cohere2": WINDOWED,
    "cohere2_moe": WINDOWED,
    "dbrx": {"d_model": 32, "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4}, "ffn_config":
        {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "evolla": {"aligner_num_add_layers": 1, "resampler_depth": 1, "resampler_dim_head": 8, "resampler_heads": 2,
        "resampler_num_latents": 4, "protein_encoder_config": {"hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 16}},
    "exaone4": WINDOWED,
    "exaone_moe": WINDOWED,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "flint": WINDOWED,
    "gemma3n_text": SHARED_KEYS | {"activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0], "laurel_rank": 4},
    "gemma4_text": SHARED_KEYS | WIDE_HEADS | {"enable_moe_block": True, "top_k_experts": 2},
    "gemma4_unified_text": SHARED_KEYS | WIDE_HEADS,
    "glm4_moe_lite": LATENT,
    "gpt_oss": WINDOWED | {"rope_parameters": YARN},
    "granite_swa": WINDOWED | {"layer_rope_theta": [10000.0, 0]},
    "granitemoe_swa": WINDOWED | {"layer_rope_theta": [10000.0, 0], "shared_intermediate_size": 16},
    "granitemoehybrid": MAMBA | {"layer_types": LINEAR["layer_types"], "position_embedding_type": "rope"},
    "inkling_text": INKLING | {"mlp_layer_types": ["dense", "sparse"]},
    "inkling2_text": INKLING | {"unpadded_vocab_size": 97, "n_layers_per_attn_res_block": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LATENT | LINEAR | {"linear_head_dim": 8, "linear_num_heads": 4},
    "kolibri1": WINDOWED,
    "laguna": WINDOWED | {"num_attention_heads_per_layer": [8, 4]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 4, "attention_chunk_size": 64},
    "mimo_v2_flash": WINDOWED | {"v_head_dim": 6},
    "minicpm3": LATENT,
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
    "mistral4": LATENT | {"head_dim": 12, "rope_parameters": YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta":
        0.5}},
    "muse_glimmer_text": UNROTATED,
    "muse_spark_text": UNROTATED | {"moe_hidden_size": 16},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    "olmo_hybrid": LINEAR,
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "qwen3_vl_moe_text": MROPE,
    "qwen3_vl_text": MROPE,
    "glm4v_text": PART_MROPE,
    "glm4v_moe_text": PART_MROPE,
    "glm_ocr_text": PART_MROPE,
    "glm_image_text": PART_MROPE,
    "cosmos3_edge_text": MROPE,
    "ernie4_5_vl_moe_text": {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 8]},
    "hunyuan_vl_text": {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 1, 1]}},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen3_omni_moe_text": MROPE,
    "step3p5": WINDOWED | {"num_sliding_attention_heads": 8, "mlp_layer_types": ["dense", "sparse"],
        "share_expert_dim": 16},
    "youtu": LATENT,
}  # fmt: skip
"""What a type needs beyond `SIZES`, or shows what is special about it."""

WITHOUT_AUTO = {
    "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "emu3_text_model": "Emu3ForCausalLM",
    "evolla": "EvollaForProteinText2Text",
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "granite4_vision_text": "Granite4VisionTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
    "step3p5": "Step3p7TextModel",
}  # fmt: skip
"""Model classes of types that no Auto class knows: they live inside multimodal models."""

WITHOUT_TEMPERATURE: dict[str, dict[str, Any]] = {
    "inkling_text": {"log_scaling_n_floor": None},
    "inkling2_text": {"log_scaling_alpha": 0.0},
    "llama4_text": {"attn_temperature_tuning": False},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0}},
    "mistral4": {"rope_parameters": YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.0}},
}
"""How a type is told not to multiply its queries by a factor that grows with the position."""


def auto_class(config: type) -> Any:
    """Return the Auto class of a config's models: with a head that predicts tokens, or without where there is none.

    None where no Auto class knows them.
    """
    autos = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)
    return next((auto for auto in autos if config in auto._model_mapping), None)


def stock_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a new stock model of a config."""
    auto = auto_class(type(config))
    if auto is not None:
        return cast(PreTrainedModel, auto.from_config(config, **options))
    cls = getattr(transformers, WITHOUT_AUTO[type(config).model_type])
    return cast(PreTrainedModel, cls._from_config(config, **options))


def has_head(model_type: str) -> bool:
    """Return whether a type has a model that predicts tokens."""
    auto = auto_class(CONFIG_MAPPING[model_type])
    return auto is not AutoModel if auto is not None else "For" in WITHOUT_AUTO[model_type]


def decoder(model_type: str, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a tiny causal language model with random weights throughout, in eval mode; headless where none has a head.

    Args:
        model_type: of transformers.
        seed: of the weights; the global random state is left as it was.
        config: beyond `SIZES`, of which a config gets what it knows.
    """
    cls = CONFIG_MAPPING[model_type]
    known = set(cls().to_dict()) | set(cls.attribute_map)
    values = {key: value for key, value in SIZES.items() if key in known} | SPECIAL.get(model_type, {}) | config
    built = cls(**values)
    types = getattr(built, "layer_types", None)
    if types is not None and len(types) != built.num_hidden_layers:
        built = cls(**values, layer_types=list(types[: built.num_hidden_layers]))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Of the code of GPT-BigCode, when it is imported, in older releases of transformers.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        torch.manual_seed(seed)
        model = stock_model(built).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
            for module in model.modules() if model_type == "openai-gpt" else ():
                if isinstance(module, Conv1D):  # which start at 0.02, whatever the config says
                    module.weight.mul_(10)
    return model


def out(found: Any) -> torch.Tensor:
    """Return the logits among a model's outputs; the last hidden state where the type has no head."""
    result: torch.Tensor = found.last_hidden_state if "logits" not in found else found.logits
    return result
