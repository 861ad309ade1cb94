"""Stock checkpoints: whether their models are served, and which class of transformers loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..errors import UnsupportedModelError
from ..families.base import base_model_type
from ..families.refused import DECODER_HALF, ENCODER
from ..registry import family_for, reason_against
from .names import heads_of, transformers_class

if TYPE_CHECKING:  # a mixin of ours has what the stock class behind it has
    from transformers import PreTrainedConfig as StockConfig
    from transformers import PreTrainedModel as StockModel
else:
    StockConfig = StockModel = object


def check_served(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if no family serves the models of a config, or the language model inside them.

    Args:
        config: stock or ours. What is inside differs between checkpoints of a type, so the config is asked for it.
    """
    model_type, inside = str(type(config).model_type).removeprefix("posenc_"), base_model_type(config)
    try:
        family_for(inside)
    except UnsupportedModelError as error:
        if reason_against(model_type) is not None:
            raise
        if config.is_encoder_decoder:
            reason = f"it is an encoder-decoder, {DECODER_HALF.partition(', ')[2]}"
        elif inside in MODEL_FOR_MASKED_LM_MAPPING_NAMES and reason_against(inside) is None:
            reason = ENCODER
        elif inside != model_type:
            reason = f"of the language model inside it is said: {error}"
        else:
            raise
        raise UnsupportedModelError(f"model type {model_type!r} cannot be patched: {reason}") from None


def check_checkpoint_served(raw: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if no family serves what is loaded of a stock checkpoint.

    Args:
        raw: its config.json.
    """
    model_type = str(raw.get("model_type", "unknown"))
    try:
        family_for(_language_type(model_type))
    except UnsupportedModelError:
        if model_type not in CONFIG_MAPPING:
            raise
        check_served(CONFIG_MAPPING[model_type].from_dict(raw))


def stock_loader(raw: dict[str, Any]) -> Any:
    """Return the class of transformers that loads a stock checkpoint: its architecture, or an Auto class.

    A model class that is shared with another model type would read the config as one of that type. Its Auto class does
    not.

    Args:
        raw: its config.json.
    """
    model_type, name = str(raw["model_type"]), architecture(raw)
    config = CONFIG_MAPPING[model_type]
    if _language_type(model_type) != config.model_type:
        return transformers.AutoModelForCausalLM
    model = transformers_class(name, PreTrainedModel)
    if model is not None and model.config_class is config:
        return model
    autos = (auto for auto, head in heads_of(config).items() if head == name)
    return getattr(transformers, next(autos, "AutoModelForCausalLM"))


def architecture(raw: dict[str, Any]) -> str:
    """Return the class name in a config.json, or an empty string."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _language_type(model_type: str) -> str:
    """Return the model type of what `AutoModelForCausalLM` makes of a stock checkpoint.

    It is that of the language model inside for a few multimodal types, and for a few that are another name of one.
    """
    if model_type not in CONFIG_MAPPING:
        return model_type
    config: Any = CONFIG_MAPPING[model_type]
    head = getattr(transformers, heads_of(config).get("AutoModelForCausalLM", ""), None)
    inner: Any = getattr(head, "config_class", None)
    return str(inner.model_type if inner in config.sub_configs.values() else config.model_type)
