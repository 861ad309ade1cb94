"""Config classes of patched models: made on demand as `(PosEncConfigMixin, LlamaConfig)`."""

from __future__ import annotations

import copy
import functools
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import CheckpointError, HfPosencError
from ..hub import CALIBRATION, calibration_of
from ..upstream import NAME
from ..upstream.derived import revive, stock_class
from ..version import INSTALL, VERSION
from .digests import DIGESTS, check_saved_config, config_digest, with_floats
from .entry import named_schemes
from .guards import ACTIVATIONS, CHECKED, UNREGISTERED, guarded, unguarded

CLASSES = "hf_posenc.classes"
"""The module by which checkpoints and pickles find our classes."""

READ = "_posenc_read"
"""Attribute of a config between its reading and the building of the model: the digest of what was read, the options
that it was read with, and what it was then as a dict."""

STUB = "modeling_hf_posenc"
"""The file beside a checkpoint that `trust_remote_code=True` runs: it imports our classes, and nothing else."""

_HEADS = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}
"""Auto classes that know our models, and the name of transformers' own table of each: model type -> class name."""


class PosEncConfigMixin:
    """In front of a stock config class: writes the schemes and the guards."""

    position_encoding: dict[str, Any] | None = None

    def __post_init__(self, *args: Any, **kwargs: Any) -> None:
        """Start as the stock config, and have the Auto classes know its models.

        Args:
            *args: handed on.
            **kwargs: handed on.
        """
        super().__post_init__(*args, **kwargs)  # type: ignore[misc]  # the stock class is behind us
        register_models(type(self))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, its guard taken off before the stock class checks it; configs are made by this too."""
        super().__setattr__(name, unguarded(name, value))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from what was saved, once that is what was saved.

        Args:
            config_dict: of config.json.
            **kwargs: handed on.

        Returns:
            The config; with `return_unused_kwargs` a pair.

        Raises:
            CheckpointError: if the dict was changed after it was saved, or cannot be a config of this class.
        """
        if not isinstance(config_dict, dict):
            raise CheckpointError(f"hf_posenc: a config is a JSON object, not {config_dict!r}")
        saved = with_floats({key: value for key, value in config_dict.items() if key != DIGESTS})
        check_saved_config(config_dict)
        options = copy.copy(kwargs)
        try:
            made = super().from_dict(saved, **kwargs)  # type: ignore[misc]
        except (HfPosencError, OSError):
            raise
        except Exception as error:  # whatever a stock class finds wrong, of any type
            raise CheckpointError(
                f"hf_posenc: config.json makes no {cls.__name__}: {type(error).__name__}: {error}"
            ) from error
        config = made[0] if isinstance(made, tuple) else made
        object.__setattr__(config, READ, (config_digest(config_dict), options, config.to_dict()))
        return made

    @property
    def output_attentions(self) -> bool | None:
        """Whether the model returns its attention weights. Our attention has them, so none other needs to be set."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        if self._attn_implementation == NAME:
            self._output_attentions = value
        else:
            PreTrainedConfig.output_attentions.fset(self, value)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: transformers 5.17 would give layer types new names, which the stock model does not know."""
        return False

    def validate(self) -> None:
        """Check the config as transformers does, which believes that its own eager attention alone has weights."""
        wanted = self._output_attentions
        if self._attn_implementation == NAME:
            self._output_attentions = False
        try:
            super().validate()  # type: ignore[misc]
        finally:
            self._output_attentions = wanted

    def _guards(self) -> dict[str, Any]:
        own = {key: getattr(self, key, None) for key in ACTIVATIONS}
        activations = {key: guarded(value) for key, value in own.items() if isinstance(value, str)}
        return {**activations, "attn_implementation": UNREGISTERED}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, with the guards, without that on `tie_word_embeddings`: PEFT reads it here."""
        stock: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        stock.pop(READ, None)
        return {**stock, **self._guards()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved, with all guards."""
        saved = super().to_diff_dict()  # type: ignore[misc]
        saved.pop(READ, None)
        auto_map = {"AutoConfig": f"{STUB}.{type(self).__name__}"}
        auto_map |= {auto: f"{STUB}.{name}" for auto, name in class_names(self).items()}
        entry = self.position_encoding
        if isinstance(entry, dict):  # what an older version wrote is written anew in the form of this one
            calibrated = {CALIBRATION: said} if (said := calibration_of(entry)) else {}
            entry = {"schemes": named_schemes(entry), **calibrated, "hf_posenc_version": VERSION}
        checked = {CHECKED: guarded(getattr(self, CHECKED))} if hasattr(self, CHECKED) else {}
        return {**saved, "position_encoding": entry, "auto_map": auto_map, **checked, **self._guards()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class, since this one is made on demand."""
        return revive, (config_class, stock_class(type(self), PosEncConfigMixin)), self.__dict__

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy our source into the next checkpoint."""


@functools.cache
def config_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return our config class in front of a stock one, model type `posenc_<base>`."""
    members = {
        "model_type": f"posenc_{stock.model_type}",
        "__module__": __name__,
        "__annotations__": {"position_encoding": "dict | None"},
        "position_encoding": None,
    }
    cls = type("PosEnc" + stock.__name__, (PosEncConfigMixin, stock), members)
    cls.__module__ = CLASSES  # set afterwards: dataclasses look into the module, which need not be imported yet
    return cls


def heads_of(config: Any) -> dict[str, str]:
    """Return Auto class -> stock class name of every head that a family has.

    Args:
        config: ours or stock.
    """
    # Not at the top: this file is also imported while transformers is in the middle of importing that one.
    from transformers.models.auto import modeling_auto

    base = str(config.model_type).removeprefix("posenc_")
    tables = {auto: getattr(modeling_auto, table) for auto, table in _HEADS.items()}
    return {auto: _one(names[base]) for auto, names in tables.items() if base in names}


def _one(names: Any) -> str:
    return str(names) if isinstance(names, str) else str(names[0])


def stock_config(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """Return the stock class of a config, of one of ours that behind the mixin."""
    return stock_class(type(config), PosEncConfigMixin) if isinstance(config, PosEncConfigMixin) else type(config)


def name_of(model: type[PreTrainedModel], config: type[PreTrainedConfig]) -> str:
    """Return the name of our class in front of a stock model class.

    A few model types have a config class and no model classes of their own, they are models of another type. Ours are
    then named after both, since one class has one config class: `PosEnc<type>As<model>`.

    Args:
        model: stock model class.
        config: stock config class of the model, which may be of another model type than the model class's own.
    """
    shared = config.model_type != model.config_class.model_type
    return "PosEnc" + (f"{config.__name__.removesuffix('Config')}As" if shared else "") + model.__name__


def class_names(config: PreTrainedConfig) -> dict[str, str]:
    """Return Auto class -> name of our class of every head that a family has.

    Args:
        config: ours or stock.
    """
    stock = stock_config(config)
    return {auto: name_of(getattr(transformers, name), stock) for auto, name in heads_of(config).items()}


def stub_text(config: PreTrainedConfig) -> str:
    """Return the two lines of the file that `auto_map` points to."""
    names = sorted({type(config).__name__, *class_names(config).values()})
    return f"# {INSTALL}\nfrom {CLASSES} import {', '.join(names)}  # noqa: F401\n"


@functools.cache
def register_models(config: type[PreTrainedConfig]) -> None:
    """Make the Auto classes find our class of every head of a family, and PEFT its target modules.

    It is called when the first config of a class is made, which is before anybody looks for its model: doing it for all
    families when the package is imported would import the code of all of them.

    Args:
        config: a class made by `config_class`.
    """
    import peft.utils.constants

    from .model import model_class

    stock: Any = stock_class(config, PosEncConfigMixin)
    for auto, name in heads_of(config).items():
        model = getattr(transformers, name)
        if model.config_class not in stock.sub_configs.values():  # heads of a multimodal type are of its text type
            getattr(transformers, auto).register(config, model_class(model, stock), exist_ok=True)
    for name, table in vars(peft.utils.constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO") and isinstance(table, dict) and stock.model_type in table:
            table.setdefault(f"posenc_{stock.model_type}", table[stock.model_type])
