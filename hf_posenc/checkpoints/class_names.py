"""Names of our classes, `PosEnc<Stock>`, and the stock classes that they stand for or that load a stock checkpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..core.errors import PluginError
from ..core.registry import family_for, supported_model_types
from ..core.version import INSTALL
from ..families.base import family_of
from .auto_classes import CLASSES
from .files import JsonObject

if TYPE_CHECKING:  # a mixin of ours has what the stock class behind it has
    from transformers import PreTrainedConfig as StockConfig
    from transformers import PreTrainedModel as StockModel
else:
    StockConfig = StockModel = object

Kind = TypeVar("Kind")

STUB = "modeling_hf_posenc"
"""Name of the module in a checkpoint's folder that `trust_remote_code=True` runs. It only imports our classes."""

_HEADS = "CausalLM SequenceClassification TokenClassification QuestionAnswering ImageTextToText MultimodalLM"
AUTOS = ("AutoModel", *(f"AutoModelFor{head}" for head in _HEADS.split()))
"""The Auto classes that load our models."""


def heads_of(config: PreTrainedConfig | type[PreTrainedConfig]) -> dict[str, str]:
    """Return a dict from Auto class to the name of the stock model class that it loads for a config.

    Args:
        config: a config or its class, ours or stock.
    """
    base, names = str(config.model_type).removeprefix("posenc_"), {}
    for auto in AUTOS:
        registered = [model.__name__ for model in _registered(auto) if _type_of(model) == base]
        if found := getattr(transformers, auto)._model_mapping._model_mapping.get(base, registered):
            names[auto] = found if isinstance(found, str) else str(found[0])
    return names


def _registered(auto: str) -> list[type[PreTrainedModel]]:
    """Return the model classes of other packages that an Auto class was told of."""
    models = getattr(transformers, auto)._model_mapping._extra_content.values()
    return [model for model in models if isinstance(model, type) and not _type_of(model).startswith("posenc_")]


def _type_of(model: type[PreTrainedModel]) -> str:
    return str(getattr(model.config_class, "model_type", ""))


def _classes_of_others() -> dict[str, type]:
    """Return name -> class, for the models and configs of other packages that the Auto classes were told of.

    Packages that offer a family for a model type which transformers lacks are imported first: they bring the classes.
    """
    for model_type in set(supported_model_types()).difference(CONFIG_MAPPING):
        with suppress(PluginError):  # a broken package is in the way of nobody else's classes
            family_for(model_type)
    models = [model for auto in AUTOS for model in _registered(auto)]
    return {each.__name__: each for model in models for each in (model, model.config_class)}


def name_of(model: type[PreTrainedModel], config: type[PreTrainedConfig]) -> str:
    """Return the name of our class that derives from a stock model class.

    A few model types share the model classes of another type. Each class of ours has one config class, so it is then
    named after both types: `PosEnc<type>As<model>`.

    Args:
        model: stock model class.
        config: stock config class of the model. Its model type may differ from that of `model.config_class`.
    """
    is_shared = config.model_type != model.config_class.model_type
    return "PosEnc" + (f"{config.__name__.removesuffix('Config')}As" if is_shared else "") + model.__name__


def class_names(config: type[PreTrainedConfig]) -> dict[str, str]:
    """Return a dict from Auto class to the name of our model class that it loads for a config.

    Args:
        config: stock config class.
    """
    heads = {auto: transformers_class(name, PreTrainedModel) for auto, name in heads_of(config).items()}
    return {auto: name_of(model, config) for auto, model in heads.items() if model is not None}


def stub_text(config: type[PreTrainedConfig]) -> str:
    """Return the text of the module `STUB`, to which `auto_map` points.

    Args:
        config: stock config class.
    """
    names = sorted({f"PosEnc{config.__name__}", *class_names(config).values()})
    return f"# {INSTALL}\nfrom {CLASSES} import {', '.join(names)}  # noqa: F401\n"


def architecture(raw: dict[str, object]) -> str:
    """Return the model class that a config.json names, or an empty string."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def stock_classes(name: str) -> tuple[type[PreTrainedConfig] | None, type[PreTrainedModel] | None]:
    """Return the stock config class and model class from which our class of a name derives.

    They are looked up by name in transformers, and among the classes that its Auto classes were told of. Names in a
    checkpoint are used for nothing else.

    Returns:
        The config class, or None if we have no class of that name; and the model class, or None for a config class.
    """
    stem = name.removeprefix("PosEnc")
    model, config = transformers_class(stem, PreTrainedModel), transformers_class(stem, PreTrainedConfig)
    if model is not None:
        config = model.config_class
    elif config is None:
        config_stem, _, model_name = stem.partition("As")
        model = transformers_class(model_name, PreTrainedModel)
        config = transformers_class(f"{config_stem}Config", PreTrainedConfig)
        if model is None or config is None or model_name not in heads_of(config).values():
            return None, None
    if not getattr(config, "model_type", None) or (model is not None and name_of(model, config) != name):
        return None, None
    return config, model


def transformers_class(name: str, kind: type[Kind]) -> type[Kind] | None:
    """Return the class of transformers, or its Auto classes, with this name if it derives from `kind`, or None."""
    candidate = getattr(transformers, name, None) or _classes_of_others().get(name)
    return candidate if isinstance(candidate, type) and issubclass(candidate, kind) else None


def check_checkpoint_served(raw: JsonObject) -> None:
    """Raise UnsupportedModelError if no family serves the language model of a checkpoint.

    Args:
        raw: contents of the stock checkpoint's config.json.
    """
    if (model_type := str(raw.get("model_type", "unknown"))) not in CONFIG_MAPPING:
        family_for(model_type)  # imports the package that offers it
    else:
        family_of(CONFIG_MAPPING[model_type].from_dict(raw))


def stock_loader(raw: JsonObject) -> Any:
    """Return the class of transformers that loads a stock checkpoint: its architecture, or an Auto class.

    An Auto class loads model types that share the model classes of another type, which would read another config. If
    AutoModelForCausalLM would load only the language model of a multimodal checkpoint, that is what is loaded.

    Args:
        raw: contents of the checkpoint's config.json.

    Raises:
        UnsupportedModelError: if no family serves the model.
    """
    name, causal = architecture(raw), "AutoModelForCausalLM"
    check_checkpoint_served(raw)
    config = CONFIG_MAPPING[str(raw.get("model_type"))]
    heads = heads_of(config)
    model, language = (transformers_class(each, PreTrainedModel) for each in (name, heads.get(causal, "")))
    if language is not None and language.config_class in config.sub_configs.values():
        return getattr(transformers, causal)
    if model is not None and model.config_class is config:
        return model
    return getattr(transformers, next((auto for auto, head in heads.items() if head == name), causal))
