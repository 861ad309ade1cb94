"""Names of our classes, `PosEnc<Stock>`, and the stock classes that they stand for."""

from __future__ import annotations

from typing import TypeVar

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..version import INSTALL
from .auto_classes import CLASSES

Kind = TypeVar("Kind")

STUB = "modeling_hf_posenc"
"""Name of the module in a checkpoint's folder that `trust_remote_code=True` runs. It only imports our classes."""

_HEADS = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}
"""Auto class -> name of its table in transformers, which maps a model type to the name of its model class."""


def heads_of(config: PreTrainedConfig | type[PreTrainedConfig]) -> dict[str, str]:
    """Return a dict from Auto class to the name of the stock model class that it loads for a config.

    Args:
        config: a config or its class, ours or stock.
    """
    # Imported here, because this file is also imported while transformers is still importing modeling_auto.
    from transformers.models.auto import modeling_auto

    base = str(config.model_type).removeprefix("posenc_")
    tables = {auto: getattr(modeling_auto, table) for auto, table in _HEADS.items()}
    names = {auto: table[base] for auto, table in tables.items() if base in table}
    return {auto: name if isinstance(name, str) else str(name[0]) for auto, name in names.items()}


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
    return {auto: name_of(getattr(transformers, name), config) for auto, name in heads_of(config).items()}


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

    They are looked up by name in transformers. Names in a checkpoint are used for nothing else.

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
    """Return the class of transformers with this name if it derives from `kind`, or None."""
    candidate = getattr(transformers, name, None)
    return candidate if isinstance(candidate, type) and issubclass(candidate, kind) else None
