"""Tell transformers the model types of patched models, so that its Auto classes find our classes."""

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
"""The module by which checkpoints, pickles and AutoConfig find our classes."""


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
    """Tell AutoConfig the name of our config class of every model type that is served.

    This runs no code of other packages that offer families: an entry point is named after a model type, and our classes
    are made of the stock ones. A model type that cannot be served is a warning (UserWarning) that names the package,
    and everything else works without it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for model_type in registry.supported_model_types():
        offer = registry.offer(model_type)
        if model_type in CONFIG_MAPPING_NAMES:
            _announce(model_type)
        elif offer is not None:  # one of ours is newer than the installed transformers
            warnings.warn(f"{offer} cannot be used: the installed transformers has no such model type", stacklevel=2)
    if _MODELING not in sys.modules:  # otherwise it is importing the module after which this runs
        importlib.import_module(_MODELING)


def announce_multimodal() -> None:
    """Tell AutoConfig the name of our config class of every multimodal model type, whatever model is inside."""
    _announce(*multimodal_model_types())


def multimodal_model_types() -> tuple[str, ...]:
    """Return the model types whose models have a language model inside, as transformers' tables list them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    tables = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return tuple(model_type for model_type in tables if model_type in CONFIG_MAPPING_NAMES)


def _announce(*model_types: str) -> None:
    """Tell AutoConfig the names of our config classes of some model types, and the module that has them.

    AutoConfig knows its own classes like this: by a name, and a module that is asked for it when a checkpoint names its
    model type. `AutoConfig.register` would need each class at once, and with it the code of every family.
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
