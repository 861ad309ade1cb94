"""Stock checkpoints: whether their models are served, and which class of transformers loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from ..families.lookup import check_served
from ..registry import family_for
from .class_names import architecture, heads_of, transformers_class
from .headers import JsonObject

if TYPE_CHECKING:  # a mixin of ours has what the stock class behind it has
    from transformers import PreTrainedConfig as StockConfig
    from transformers import PreTrainedModel as StockModel
else:
    StockConfig = StockModel = object


def check_checkpoint_served(raw: JsonObject) -> None:
    """Raise UnsupportedModelError if no family serves what `AutoModelForCausalLM` makes of a stock checkpoint.

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


def stock_loader(raw: JsonObject) -> type[PreTrainedModel]:
    """Return the class of transformers that loads a stock checkpoint: its architecture, or an Auto class.

    Raises UnsupportedModelError if no family serves it.

    A model class that is shared with another model type would read the config as one of that type. Its Auto class does
    not.

    Args:
        raw: its config.json.
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
    """Return the model type of what `AutoModelForCausalLM` makes of a stock checkpoint.

    It is that of the language model inside for a few multimodal types, and for a few that are another name of one.
    """
    if model_type not in CONFIG_MAPPING:
        return model_type
    config: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    head = getattr(transformers, heads_of(config).get("AutoModelForCausalLM", ""), None)
    inner: Any = getattr(head, "config_class", None)
    return str(inner.model_type if inner in config.sub_configs.values() else config.model_type)
