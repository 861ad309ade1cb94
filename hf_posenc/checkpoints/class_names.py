"""Names of our classes, `PosEnc<Stock>`, and the stock classes that they stand for."""

from __future__ import annotations

from typing import TypeVar

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..version import INSTALL
from .auto_classes import CLASSES

Kind = TypeVar("Kind")

STUB = "modeling_hf_posenc"
"""The file beside a checkpoint that `trust_remote_code=True` runs: it imports our classes, and nothing else."""

_HEADS = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
}
"""Auto class that knows our models -> name of its table in transformers, from model type to class name."""


def heads_of(config: PreTrainedConfig | type[PreTrainedConfig]) -> dict[str, str]:
    """Return the name of the stock model class of each head that a family has, by Auto class.

    Args:
        config: a config or its class, ours or stock.
    """
    # Not at the top: this file is also imported while transformers is in the middle of importing that one.
    from transformers.models.auto import modeling_auto

    base = str(config.model_type).removeprefix("posenc_")
    tables = {auto: getattr(modeling_auto, table) for auto, table in _HEADS.items()}
    names = {auto: table[base] for auto, table in tables.items() if base in table}
    return {auto: name if isinstance(name, str) else str(name[0]) for auto, name in names.items()}


def name_of(model: type[PreTrainedModel], config: type[PreTrainedConfig]) -> str:
    """Return the name of our class in front of a stock model class.

    A few model types have a config class but no model classes of their own: their models are those of another type. A
    class of ours has one config class, so that it is then named after both: `PosEnc<type>As<model>`.

    Args:
        model: stock model class.
        config: stock config class of the model, which may be of another model type than the model class's own.
    """
    shared = config.model_type != model.config_class.model_type
    return "PosEnc" + (f"{config.__name__.removesuffix('Config')}As" if shared else "") + model.__name__


def class_names(config: type[PreTrainedConfig]) -> dict[str, str]:
    """Return the name of our class of each head that a family has, by Auto class.

    Args:
        config: stock config class.
    """
    return {auto: name_of(getattr(transformers, name), config) for auto, name in heads_of(config).items()}


def stub_text(config: type[PreTrainedConfig]) -> str:
    """Return the two lines of the file that `auto_map` points to.

    Args:
        config: stock config class.
    """
    names = sorted({f"PosEnc{config.__name__}", *class_names(config).values()})
    return f"# {INSTALL}\nfrom {CLASSES} import {', '.join(names)}  # noqa: F401\n"


def architecture(raw: dict[str, object]) -> str:
    """Return the class name in a config.json, or an empty string."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def stock_classes(name: str) -> tuple[type[PreTrainedConfig] | None, type[PreTrainedModel] | None]:
    """Return the stock config class and model class that a name of ours stands for.

    They are found by name in transformers, and nothing else is ever called by a name that a checkpoint holds.

    Returns:
        The config class, or None if this is no name of ours; the model class, or None if it names a config class.
    """
    stem = name.removeprefix("PosEnc")
    model, config = transformers_class(stem, PreTrainedModel), transformers_class(stem, PreTrainedConfig)
    if model is not None:
        config = model.config_class
    elif config is None:
        of, _, shared = stem.partition("As")
        model, config = transformers_class(shared, PreTrainedModel), transformers_class(f"{of}Config", PreTrainedConfig)
        if model is None or config is None or shared not in heads_of(config).values():
            return None, None
    if not getattr(config, "model_type", None) or (model is not None and name_of(model, config) != name):
        return None, None
    return config, model


def transformers_class(name: str, kind: type[Kind]) -> type[Kind] | None:
    """Return the class of transformers with a name if it derives from `kind`, or None."""
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, kind) else None
