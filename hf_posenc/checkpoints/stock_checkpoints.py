"""Stock checkpoints: whether a family serves them, and which class of transformers loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from ..families.lookup import family_of
from ..registry import family_for
from .class_names import architecture, heads_of, transformers_class
from .headers import JsonObject

if TYPE_CHECKING:  # a mixin of ours has what the stock class behind it has
    from transformers import PreTrainedConfig as StockConfig
    from transformers import PreTrainedModel as StockModel
else:
    StockConfig = StockModel = object


def check_checkpoint_served(raw: JsonObject) -> None:
    """Raise UnsupportedModelError if no family serves the model that `AutoModelForCausalLM` loads from a checkpoint.

    Args:
        raw: contents of the stock checkpoint's config.json.
    """
    model_type = str(raw.get("model_type", "unknown"))
    try:
        family_for(_language_type(model_type))
    except UnsupportedModelError:
        if model_type not in CONFIG_MAPPING:
            raise
        family_of(CONFIG_MAPPING[model_type].from_dict(raw))


def stock_loader(raw: JsonObject) -> type[PreTrainedModel]:
    """Return the class of transformers that loads a stock checkpoint: its architecture, or an Auto class.

    Some model types share the model classes of another type. Such a class would read the config as one of the other
    type, so an Auto class loads the checkpoint.

    Args:
        raw: contents of the checkpoint's config.json.

    Raises:
        UnsupportedModelError: if no family serves the model.
    """
    name, model_type = architecture(raw), str(raw.get("model_type"))
    check_checkpoint_served(raw)
    config = CONFIG_MAPPING[model_type]
    if _language_type(model_type) != config.model_type:
        return transformers.AutoModelForCausalLM
    model = transformers_class(name, PreTrainedModel)
    if model is not None and model.config_class is config:
        return model
    autos = (auto for auto, head in heads_of(config).items() if head == name)
    return getattr(transformers, next(autos, "AutoModelForCausalLM"))


def _language_type(model_type: str) -> str:
    """Return the model type of the model that `AutoModelForCausalLM` loads from a stock checkpoint.

    For a few multimodal types it loads only the language model. A few other types are aliases.
    """
    if model_type not in CONFIG_MAPPING:
        return model_type
    config: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    head = getattr(transformers, heads_of(config).get("AutoModelForCausalLM", ""), None)
    inner: Any = getattr(head, "config_class", None)
    return str(inner.model_type if inner in config.sub_configs.values() else config.model_type)
