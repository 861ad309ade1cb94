"""The names of our classes, by which checkpoints and pickles find them: `PosEnc<Stock>` of every supported family."""

from __future__ import annotations

from typing import Any

import peft.utils.constants
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from .model_types.config import config_class, heads_of
from .model_types.model import model_class
from .registry import family_for, supported_model_types


def __getattr__(name: str) -> Any:
    """Find the class `PosEnc<Stock>` of a supported family: checkpoints and pickles name it."""
    stock = getattr(transformers, name.removeprefix("PosEnc"), None) if name.startswith("PosEnc") else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedConfig) and stock.model_type in supported_model_types():
        return config_class(stock)
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        if getattr(stock.config_class, "model_type", None) in supported_model_types():
            return model_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_auto() -> None:
    """Make the Auto classes find our class of every head of every family, and PEFT its target modules."""
    tables = [
        table
        for name, table in vars(peft.utils.constants).items()
        if name.startswith("TRANSFORMERS_MODELS_TO") and isinstance(table, dict)
    ]
    for model_type in supported_model_types():
        if model_type not in CONFIG_MAPPING:
            continue  # newer than the installed transformers
        stock = CONFIG_MAPPING[model_type]
        if set(stock.sub_configs) & set(family_for(model_type).refuse):
            continue  # multimodal; has an adapter only so that a user is told why it is refused
        config = config_class(stock)
        for auto, name in heads_of(config).items():
            model = getattr(transformers, name)
            if model.config_class is stock:  # Gemma 3's own heads are of its multimodal config
                getattr(transformers, auto).register(config, model_class(model), exist_ok=True)
        for table in tables:
            if model_type in table:
                table.setdefault(f"posenc_{model_type}", table[model_type])
