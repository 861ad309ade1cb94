"""Tell transformers the model types of patched models once it is imported, so that its Auto classes load ours."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ..core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ..families.base import Family

CLASSES = "hf_posenc.classes"
"""Name of the module from which checkpoints, pickles and AutoConfig import our classes."""


def register_family(family: Family) -> Family:
    """Add a family, so that models of its types can be patched, saved and loaded from now on.

    Args:
        family: description of architectures of transformers, or of a package that has registered its classes with
            `AutoConfig` and the Auto classes of models: where they have their layers and positions.

    Returns:
        `family`, unchanged.

    Raises:
        UnsupportedModelError: if transformers knows no config of a model type of the family.
        ValueError: if the family names no model type, or one that another family serves. An equal family may be
            registered again.
    """
    from ..core import registry

    for model_type in family.model_types:
        stock_config_class(model_type)
    registry.register_family(family)
    _announce(*family.model_types)
    return family


def stock_config_class(model_type: str) -> type[PreTrainedConfig]:
    """Return the config class of a model type; UnsupportedModelError if transformers knows none."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"a family for model type {model_type!r} cannot be used: transformers {transformers.__version__} has "
            "no such model type. If the classes are your own, call AutoConfig.register and "
            "AutoModelForCausalLM.register first"
        )
    return cast("type[PreTrainedConfig]", transformers.CONFIG_MAPPING[model_type])


def announce_all() -> None:
    """Tell AutoConfig the names of our config classes for all of its model types, and for those of other packages.

    Families of other packages are not imported here: the name of an entry point is its model type. The package may also
    bring the classes of the model type. Whether a family serves a type is asked when a class is.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from ..core import registry

    _announce(*CONFIG_MAPPING_NAMES, *filter(registry.is_offered, registry.supported_model_types()))


def multimodal_model_types() -> tuple[str, ...]:
    """Return the multimodal model types in transformers' tables."""
    from transformers.models.auto import configuration_auto, modeling_auto

    tables = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return tuple(model_type for model_type in tables if model_type in configuration_auto.CONFIG_MAPPING_NAMES)


def _announce(*model_types: str) -> None:
    """Tell AutoConfig the names of our config classes for some model types, and the module that has the classes.

    AutoConfig imports a class only when a checkpoint names its model type, as it does with its own classes.
    `AutoConfig.register` would need all classes now, and so import the code of every family. The name of a class that
    another package brings is not known yet: `CLASSES` finds it by the model type.
    """
    from transformers.models.auto import configuration_auto as auto

    for model_type in model_types:
        ours = f"posenc_{model_type}"
        name = auto.CONFIG_MAPPING_NAMES.get(model_type)
        auto.CONFIG_MAPPING_NAMES[ours] = ours if name is None else f"PosEnc{name}"
        auto.CONFIG_MAPPING._modules[auto.model_type_to_module_name(ours)] = importlib.import_module(CLASSES)


def announce_when_imported() -> None:
    """Call `announce_all` once, right after transformers' AutoConfig is imported, or now if it already is."""
    auto = "transformers.models.auto.configuration_auto"
    if auto in sys.modules:
        announce_all()
        return

    def find_spec(fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Ask the other finders for the spec of the module, and extend its loader. For any other module return None."""
        if fullname != auto or finder not in sys.meta_path:
            return None
        sys.meta_path.remove(finder)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                announce_all()

            loader.exec_module = exec_module
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
