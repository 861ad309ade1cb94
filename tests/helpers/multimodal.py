"""Tiny multimodal models with random weights, and an image or a sound for each.

The language model inside has the sizes of `decoders.py`, what reads images and sound those of `READER`.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from decoders import SIZES, SPECIAL
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from hf_posenc.families.base import base_model_type, language_config

READER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32, "projection_dim": 32,
}  # fmt: skip
"""Sizes of a part that reads images or sound; its config gets those that it knows."""

AROUND: dict[str, Any] = {
    "mm_tokens_per_image": 4, "projection_hidden_size": 32, "projection_dim": 32, "image_grid_pinpoints": [[32, 32]],
    "vision_feature_layers": [-2, -1], "projector_patch_to_query_dict": {16: 4},
    "visual_indicator_token_ids": [90, 91, 92, 93], "hidden_size": 32,
}  # fmt: skip
"""Sizes of the whole that have to fit those of its parts; a config gets those that it knows."""

PARTS: dict[str, dict[str, Any]] = {
    "llama4": {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
}
"""What the part that reads images of a type needs beyond `READER`."""

MANY = 80_000_000
"""Parameters of a model that is not tiny."""

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


def _sized(config: Any, sizes: dict[str, Any], special: dict[str, Any]) -> Any:
    """Return a config of the same class with the sizes that it knows, and the special ones."""
    known = set(config.to_dict()) | set(config.attribute_map)
    return type(config)(**{name: size for name, size in sizes.items() if name in known} | special)


def multimodal(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """Return a tiny model in eval mode.

    Args:
        model_type: of transformers.
        seed: of the weights; the global random state is left as it was.

    Raises:
        LookupError: if the sizes that are known here do not make it tiny.
    """
    usual = CONFIG_MAPPING[model_type]()
    text = language_config(usual)
    parts = {}
    for name in usual.sub_configs:
        part = getattr(usual, name)
        if part is text:
            parts[name] = _sized(part, SIZES, SPECIAL.get(base_model_type(usual), {}))
        elif part is not None:
            parts[name] = _sized(part, READER, PARTS.get(model_type, {}))
    known = usual.to_dict()
    parts |= {name: size for name, size in AROUND.items() if name in known}
    for kind, token in TOKENS.items():
        parts |= {name: token for name in (f"{kind}_token_id", f"{kind}_token_index") if name in known}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code of transformers while it is imported
        cls, config = class_of(model_type), CONFIG_MAPPING[model_type](**parts)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in cls._from_config(copy.deepcopy(config)).parameters())
        if count > MANY:
            raise LookupError(f"{cls.__name__} has {count:,} parameters with the sizes that are known here")
        torch.manual_seed(seed)
        return cls._from_config(config).eval()


def pictures(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield an image of noise in the forms that model classes take it in.

    Args:
        model: multimodal; the sizes are those that its part which reads images has.
    """
    reader = model.config.vision_config
    generator = torch.Generator().manual_seed(0)
    given = (getattr(reader, name, usual) for name, usual in (("image_size", 32), ("patch_size", 8)))
    size, patch = (each[0] if isinstance(each, (list, tuple)) else each for each in given)
    channels = next((getattr(reader, name) for name in ("in_channels", "num_channels") if hasattr(reader, name)), 3)
    frames = getattr(reader, "temporal_patch_size", 1)
    grid = torch.tensor([[1, 4, 4]])

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    image = noise(1, 3, size, size)
    flat = {"pixel_values": noise(16, channels * frames * patch * patch), "image_grid_thw": grid}
    yield {"pixel_values": image}
    yield {"pixel_values": image[None]}
    yield {"pixel_values": image, "image_sizes": torch.tensor([[size, size]])}
    yield {"pixel_values": image.expand(1, 2, *image.shape[1:]), "image_sizes": torch.tensor([[size, size]])}
    yield flat
    yield {**flat, "pixel_values": flat["pixel_values"].view(16, channels, -1, patch)}
    yield {**flat, "image_merge_sizes": torch.tensor([2])}
    mask = torch.ones(1, 16, dtype=torch.long)
    shapes = {"spatial_shapes": grid[:, 1:], "pixel_attention_mask": mask}
    yield {"pixel_values": noise(1, 16, channels * patch * patch), **shapes}
    yield {"pixel_values": noise(1, channels, patch, 16 * patch), "target_sizes": grid[:, 1:]}


def sounds(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield a sound of noise in the forms that model classes take it in.

    Args:
        model: multimodal; the sizes are those that its part which reads sound has.
    """
    reader = model.config.audio_config
    bands = next((getattr(reader, name) for name in ("num_mel_bins", "input_dim") if hasattr(reader, name)), 80)
    steps = 2 * getattr(reader, "max_source_positions", 32)
    features = torch.randn(1, bands, steps, generator=torch.Generator().manual_seed(0))
    yield {"input_features": features}
    yield {"input_features": features, "feature_attention_mask": torch.ones(1, steps, dtype=torch.long)}
    yield {"input_features": features, "input_features_mask": torch.ones(1, steps, dtype=torch.bool)}
    mask = torch.ones(1, steps, dtype=torch.bool)
    yield {"input_features": features.transpose(1, 2), "input_features_mask": mask}


def seen_and_read(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return inputs of a stock multimodal model: a few tokens, an image or a sound of noise, and a few tokens more.

    Raises:
        LookupError: if it takes none of the forms that are known here; with what it says to each.
    """
    kind, forms = ("image", pictures) if hasattr(model.config, "vision_config") else ("audio", sounds)
    features = f"get_{kind}_features"
    read = getattr(model, features, None) or getattr(model.base_model, features, None)
    if read is None:
        raise LookupError(f"{type(model).__name__} has no {features}")
    refused = []
    for given in forms(model):
        try:
            with torch.no_grad():
                count = _rows(read(**given))
                ids = torch.tensor([[5, 8, *[TOKENS[kind]] * count, 7, 9, 11]])
                inputs = {"input_ids": ids, **given}
                if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                    inputs["mm_token_type_ids"] = (ids == TOKENS[kind]).long()
                if "token_type_ids" in inspect.signature(model.forward).parameters:
                    inputs["token_type_ids"] = (ids == TOKENS[kind]).long()
                model(**inputs)
            return inputs
        except Exception as error:  # whatever a model finds wrong with this form
            refused.append(f"{type(error).__name__}: {error}".strip().splitlines()[0])
    raise LookupError(f"{type(model).__name__} takes no form that is known here: {'; '.join(refused)}")


def _rows(features: Any) -> int:
    """Return the number of vectors that stand for an image or a sound."""
    pooled = getattr(features, "pooler_output", features)
    features = features.last_hidden_state if pooled is None else pooled
    if isinstance(features, (list, tuple)):
        return sum(map(_rows, features))
    return int(features.numel() // features.shape[-1])
