"""The names of our classes, by which checkpoints and pickles find them: `PosEnc<Stock>` of every supported family."""

from __future__ import annotations

import warnings
from typing import Any

import peft.utils.constants
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from . import registry
from .errors import PluginError, UnsupportedModelError
from .families.base import Family
from .model_types.config import config_class, heads_of
from .model_types.model import model_class


def __getattr__(name: str) -> Any:
    """Find the class `PosEnc<Stock>` of a supported family: checkpoints and pickles name it.

    Raises:
        UnsupportedModelError: for a class of transformers whose model type no family serves; the file beside a
            checkpoint that `trust_remote_code=True` runs asks for it.
        PluginError: if the package that offers the family cannot be imported.
        AttributeError: for any other name.
    """
    stock = getattr(transformers, name.removeprefix("PosEnc"), None) if name.startswith("PosEnc") else None
    is_config = isinstance(stock, type) and issubclass(stock, PreTrainedConfig)
    is_model = isinstance(stock, type) and issubclass(stock, PreTrainedModel)
    config: Any = stock if is_config else getattr(stock, "config_class", None) if is_model else None
    if not getattr(config, "model_type", None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registry.family_for(config.model_type)
    return config_class(stock) if is_config else model_class(stock)


def register_family(family: Family) -> Family:
    """Serve the model types of a family: from here on they can be patched, and their patched models loaded.

    Args:
        family: where architectures of transformers keep their layers and positions.

    Returns:
        `family`, unchanged.

    Raises:
        UnsupportedModelError: the installed transformers has no such model type.
        ValueError: it names no model type, or one that another family serves. Registering an equal one is allowed.
    """
    for model_type in family.model_types:
        if model_type not in CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"a family for model type {model_type!r} cannot be used: transformers {transformers.__version__} has "
                "no such model type"
            )
    registry.register_family(family)
    for model_type in family.model_types:
        _register_classes(model_type)
    return family


def register_auto() -> None:
    """Make the Auto classes find our class of every head of every family, and PEFT its target modules.

    Families of other packages are among them, and none of their code runs: an entry point is named after a model type,
    and our classes are made of the stock ones. That is why it is done at import and not when a checkpoint is loaded:
    the Auto classes have no place where they would ask. A model type that cannot be served is a warning (UserWarning)
    that names the package; without it everything else works.
    """
    for model_type in registry.supported_model_types():
        offer = registry.offer(model_type)
        if offer is None and model_type not in CONFIG_MAPPING:
            continue  # newer than the installed transformers
        try:
            if model_type not in CONFIG_MAPPING:
                raise UnsupportedModelError(f"transformers {transformers.__version__} has no such model type")
            _register_classes(model_type)
        except (UnsupportedModelError, PluginError) as error:
            if offer is None:
                raise
            warnings.warn(f"{offer} cannot be used: {error}", stacklevel=2)


def _register_classes(model_type: str) -> None:
    stock = CONFIG_MAPPING[model_type]
    if stock.sub_configs and set(stock.sub_configs) & set(registry.family_for(model_type).refuse):
        return  # multimodal; has a family only so that a user is told why it is refused
    config = config_class(stock)
    for auto, name in heads_of(config).items():
        model = getattr(transformers, name)
        if model.config_class is stock:  # Gemma 3's own heads are of its multimodal config
            getattr(transformers, auto).register(config, model_class(model), exist_ok=True)
    for name, table in vars(peft.utils.constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO") and isinstance(table, dict) and model_type in table:
            table.setdefault(f"posenc_{model_type}", table[model_type])
