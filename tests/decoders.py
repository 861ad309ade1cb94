"""Tiny models of every model type that is served, built from their configs by the names that configs share.

`families.py` has hand-made fixtures of the families that most tests run on; this builder is for the tests that go
through all model types. Norms, biases and whatever else starts at a constant are drawn at random, so that a feature
which is left out shows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "kv_channels": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "dropout": 0.0,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "init_std": 0.2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}


def decoder(model_type: str, *, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Return a tiny causal language model with random weights throughout, in eval mode.

    Args:
        model_type: of transformers.
        seed: of the weights; the global random state is left as it was.
        config: beyond `SIZES`, of which a config gets what it knows.
    """
    cls = CONFIG_MAPPING[model_type]
    known = set(cls().to_dict()) | set(cls.attribute_map)
    values = {key: value for key, value in SIZES.items() if key in known} | config
    built = cls(**values)
    types = getattr(built, "layer_types", None)
    if types is not None and len(types) != built.num_hidden_layers:
        built = cls(**values, layer_types=list(types[: built.num_hidden_layers]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(built).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
    return model
