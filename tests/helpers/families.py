"""Tiny models of every supported family, built from their configs: seeded, offline, no dropout.

``initializer_range=0.2`` is ten times the usual value on purpose: with the default a tiny model is so close to linear
that removing its positions altogether hardly moves the logits, and a patch that does nothing would pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 97
LENGTH = 64  # trained length, rows of the native position table
WINDOW = 8  # sliding window, where the family has one

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": LENGTH, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_MLP = {"intermediate_size": 48}
_GROUPED = {"num_key_value_heads": 2}
_GEMMA = {"head_dim": 8}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

# family -> (causal LM class, config class, what the family needs beyond _COMMON)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_MLP, **_GROUPED}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_MLP, **_GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_MLP, **_GROUPED, **_QWEN_WINDOW}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_MLP, **_GROUPED, **_QWEN_WINDOW, "head_dim": 8}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_MLP}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2, "dropout": 0.0}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_MLP, **_GROUPED, **_GEMMA}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_MLP, **_GROUPED, **_GEMMA, **_ALTERNATING}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_MLP, **_GROUPED, **_GEMMA, **_ALTERNATING}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_MLP, **_GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_MLP, **_GROUPED, "resid_pdrop": 0.0, "sliding_window": WINDOW}),
    # The default no_rope_layer_interval of 4 would leave no layer without rotation in a model of two.
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {**_MLP, **_GROUPED, "no_rope_layers": [1, 0]}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**_MLP, **_GROUPED}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        {**_MLP, **_GROUPED, "sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
ROTARY = tuple(
    name for name, (_, config, _) in _FAMILIES.items() if hasattr(getattr(transformers, config), "rope_parameters")
)
"""Families that rotate queries and keys; the others have a table of positions."""
LEARNED = tuple(name for name in FAMILIES if name not in ROTARY)
WINDOWED = tuple(name for name, (_, _, extra) in _FAMILIES.items() if "sliding_window" in extra)
"""Families whose tiny models have a sliding window in some layer."""

_BUILT: dict[tuple[Any, ...], PreTrainedModel] = {}
"""Models as they were built; nobody else holds one. A copy costs half of what building does."""


def tiny(family: str, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a causal LM of ``family`` with two layers, four heads (two key-value heads where grouped), in eval mode.

    It is the caller's own: a copy of what was built the first time, which test_families.py holds to be the same thing.

    Args:
        family: one of ``FAMILIES``.
        seed: of the weights; the global random state is left as it was.
        config: overrides for the family's config, by its own (or the common transformers) names.
    """
    made = torch.empty(0)  # where and in what dtype modules are made at the moment
    key = (family, seed, repr(sorted(config.items())), made.device, made.dtype)
    if key not in _BUILT:
        _BUILT[key] = build(family, seed=seed, **config)
    return copy.deepcopy(_BUILT[key])


def build(family: str, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return what ``tiny`` returns, from nothing."""
    model_class, config_class, extra = _FAMILIES[family]
    config_type = getattr(transformers, config_class)
    # By the family's own names: GPT-2's config given both n_head and num_attention_heads would keep the latter.
    named = [
        {config_type.attribute_map.get(key, key): value for key, value in part.items()}
        for part in (_COMMON, extra, config)
    ]
    built = config_type(**{**named[0], **named[1], **named[2]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, model_class)(built).eval()


def tokens(batch: int = 2, length: int = 24, *, seed: int = 1) -> torch.Tensor:
    """Return random token ids (batch, length), int64, without the three special ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=generator)


# `rope_parameters` of tiny models, with scalings that act within a few tokens.
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 3.0, "beta_fast": 2.0, "beta_slow": 0.05,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
