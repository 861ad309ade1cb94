"""The names of our classes, by which checkpoints and pickles find them: `PosEnc<Stock>` of every supported family."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from . import registry
from .errors import UnsupportedModelError
from .families.base import Family
from .model_types.config import config_class, register_config
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
        register_config(model_type)
    return family
