"""Tell transformers the model types of patched models, so that its Auto classes load our classes."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

from .. import registry
from ..errors import UnsupportedModelError

if TYPE_CHECKING:
    from ..families.base import Family

_MODELING = "transformers.models.auto.modeling_auto"

CLASSES = "hf_posenc.classes"
"""Name of the module from which checkpoints, pickles and AutoConfig import our classes."""


def register_family(family: Family) -> Family:
    """Add a family, so that models of its types can be patched, saved and loaded from now on.

    Args:
        family: description of architectures of transformers: where they have their layers and positions.

    Returns:
        `family`, unchanged.

    Raises:
        UnsupportedModelError: if the installed transformers lacks a model type of the family.
        ValueError: if the family names no model type, or one that another family serves. An equal family may be
            registered again.
    """
    import transformers

    for model_type in family.model_types:
        if model_type not in transformers.CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"a family for model type {model_type!r} cannot be used: transformers {transformers.__version__} has "
                "no such model type"
            )
    registry.register_family(family)
    _announce(*family.model_types)
    return family


def announce_all() -> None:
    """Tell AutoConfig the names of our config classes for all served model types.

    Families of other packages are not imported here: the name of an entry point is its model type. If the installed
    transformers lacks a model type, a UserWarning names the package, and the other model types work.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for model_type in registry.supported_model_types():
        offer = registry.offer(model_type)
        if model_type in CONFIG_MAPPING_NAMES:
            _announce(model_type)
        # Without an offer it is one of our own families, for another release of transformers: no warning.
        elif offer is not None:
            warnings.warn(f"{offer} cannot be used: the installed transformers has no such model type", stacklevel=2)
    # Importing modeling_auto runs `announce_multimodal`. If it is in sys.modules, it is loaded, or it is the module
    # that is importing configuration_auto, after which this function runs.
    if _MODELING not in sys.modules:
        importlib.import_module(_MODELING)


def announce_multimodal() -> None:
    """Tell AutoConfig the names of our config classes for all multimodal model types."""
    _announce(*multimodal_model_types())


def multimodal_model_types() -> tuple[str, ...]:
    """Return the multimodal model types in transformers' tables."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    tables = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return tuple(model_type for model_type in tables if model_type in CONFIG_MAPPING_NAMES)


def _announce(*model_types: str) -> None:
    """Tell AutoConfig the names of our config classes for some model types, and the module that has the classes.

    AutoConfig imports a class only when a checkpoint names its model type, as it does with its own classes.
    `AutoConfig.register` would need all classes now, and so import the code of every family.
    """
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING,
        CONFIG_MAPPING_NAMES,
        model_type_to_module_name,
    )

    for model_type in model_types:
        ours = f"posenc_{model_type}"
        CONFIG_MAPPING_NAMES[ours] = f"PosEnc{CONFIG_MAPPING_NAMES[model_type]}"
        CONFIG_MAPPING._modules[model_type_to_module_name(ours)] = importlib.import_module(CLASSES)
