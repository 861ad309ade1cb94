"""The names of our classes, `PosEnc<Stock>` of every family, by which checkpoints, pickles and AutoConfig find them."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from . import registry
from .errors import UnsupportedModelError

if TYPE_CHECKING:
    from .families.base import Family


def __getattr__(name: str) -> Any:
    """Find the class `PosEnc<Stock>` of a supported family, which is made when it is first asked for.

    Raises:
        UnsupportedModelError: for a class of transformers whose model type no family serves; the file beside a
            checkpoint that `trust_remote_code=True` runs asks for it.
        PluginError: if the package that offers the family cannot be imported.
        AttributeError: for any other name.
    """
    if not name.startswith("PosEnc"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import PreTrainedConfig, PreTrainedModel

    from .model_types.config import config_class, name_of

    said = name.removeprefix("PosEnc")
    model, config = _of_transformers(said, PreTrainedModel), _of_transformers(said, PreTrainedConfig)
    if model is not None:
        config = model.config_class
    elif config is None and "As" in said:  # of a model type whose models are those of another one
        of, _, shared = said.partition("As")
        if (model := _of_transformers(shared, PreTrainedModel)) is not None:
            config = _of_transformers(f"{of}Config", PreTrainedConfig)
    if not getattr(config, "model_type", None) or (model is not None and name_of(model, config) != name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    registry.family_for(config.model_type)
    if model is None:
        return config_class(config)
    from .model_types.model import model_class

    return model_class(model, config)


def _of_transformers(name: str, kind: type) -> Any:
    """Return the class of transformers with a name if it derives from `kind`, or None."""
    import transformers

    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, kind) else None


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
    announce(*family.model_types)
    return family


def announce_all() -> None:
    """Tell AutoConfig the name of our config class of every model type that is served.

    Families of other packages are among them, and none of their code runs: an entry point is named after a model type,
    and our classes are made of the stock ones. A model type that cannot be served is a warning (UserWarning) that names
    the package; without it everything else works.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for model_type in registry.supported_model_types():
        offer = registry.offer(model_type)
        if model_type in CONFIG_MAPPING_NAMES:
            announce(model_type)
        elif offer is not None:  # one of ours is newer than the installed transformers
            warnings.warn(f"{offer} cannot be used: the installed transformers has no such model type", stacklevel=2)


def announce(*model_types: str) -> None:
    """Tell AutoConfig the names of our config classes of some model types, and that they are found in this module.

    That is how AutoConfig knows its own: a name, and a module that is asked for it when a checkpoint says so. With
    `AutoConfig.register` each class would have to be there already, and with it the code of every family.
    """
    from transformers.models.auto.configuration_auto import (
        CONFIG_MAPPING,
        CONFIG_MAPPING_NAMES,
        model_type_to_module_name,
    )

    for model_type in model_types:
        ours = f"posenc_{model_type}"
        CONFIG_MAPPING_NAMES[ours] = f"PosEnc{CONFIG_MAPPING_NAMES[model_type]}"
        CONFIG_MAPPING._modules[model_type_to_module_name(ours)] = sys.modules[__name__]
