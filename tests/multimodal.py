"""Tiny multimodal models with random weights, and an image or a sound for each.

The language model inside has the sizes of `decoders.py`, what reads images and sound those of `READER`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from decoders import SIZES, SPECIAL
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_posenc.families.base import base_model_type, language_config

READER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "depth": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "projection_dim": 32,
}
"""Sizes of a part that reads images or sound; its config gets those that it knows."""

TOKENS = {"image": 96, "video": 95, "audio": 94}
"""Token that stands for a part of an image, a video or a sound."""


def class_of(model_type: str) -> type[PreTrainedModel]:
    """Return the model class of a multimodal type with its language-modeling head."""
    tables = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    name: Any = next(table[model_type] for table in tables if model_type in table)
    cls: type[PreTrainedModel] = getattr(transformers, name if isinstance(name, str) else name[0])
    return cls


def _sized(config: Any, sizes: dict[str, Any]) -> Any:
    """Return a config of the same class with the sizes that it knows."""
    known = set(config.to_dict()) | set(config.attribute_map)
    return type(config)(**{name: size for name, size in sizes.items() if name in known})


def multimodal(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model in eval mode.

    Args:
        model_type: of transformers.
        seed: of the weights; the global random state is left as it was.
    """
    usual = CONFIG_MAPPING[model_type]()
    text = language_config(usual)
    parts = {}
    for name in usual.sub_configs:
        part = getattr(usual, name)
        if part is text:
            parts[name] = _sized(part, SIZES | SPECIAL.get(base_model_type(usual), {}))
        elif part is not None:
            parts[name] = _sized(part, READER)
    known = usual.to_dict()
    for kind, token in TOKENS.items():
        parts |= {name: token for name in (f"{kind}_token_id", f"{kind}_token_index") if name in known}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code of transformers while it is imported
        torch.manual_seed(seed)
        return class_of(model_type)._from_config(CONFIG_MAPPING[model_type](**parts)).eval()
