"""The part of our config classes that writes and checks saved configs, with values that stop stock classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from ..core.errors import CheckpointError
from ..families.base import language_config
from ..model.patch_record import OfPatched
from ..transformers_glue import NAME
from ..transformers_glue.derived_classes import stock_class
from .class_names import STUB, StockConfig, class_names
from .scheme_entry import ENTRY, renew_entry

UNREGISTERED = "hf_posenc_patched"
"""`attn_implementation` of a saved config. It is registered nowhere, so stock model classes cannot be built with it.

The name of our attention function would not do, because importing hf_posenc registers it."""

PREFIX = "hf_posenc:"
"""Prefix of guarded values. Stock classes look these values up or check them, and fail."""

ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
"""Attributes of configs that name an activation. Most stock models look up its name when they are built."""

NUMBER = "initializer_range"
"""A number that the stock config classes check. Those of OPT and XGLM lack it, but their models look up an activation.

Unlike `CHECKED` it is guarded in every dict: nobody reads it there."""

CHECKED = "tie_word_embeddings"
"""A setting that the stock config classes of decoders check to be a bool; those of Inkling check `NUMBER`.

Their base class PreTrainedConfig lacks it, so tokenizers and the Trainer, which read config.json with it, still can."""


def guarded(value: object) -> str:
    """Return the guarded form of a config's value: the prefix, and then the string, or any other value as JSON."""
    return PREFIX + (value if isinstance(value, str) else json.dumps(value))


def unguarded(name: str, value: object) -> Any:
    """Return the value of a config's attribute without its guard.

    Args:
        name: name of the attribute.
        value: its value, guarded or not.
    """
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    if name in (CHECKED, NUMBER):
        return json.loads(value.removeprefix(PREFIX))
    return value.removeprefix(PREFIX) if name in ACTIVATIONS else value


def stock_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a patched model's config says to a stock class, without guards."""
    not_stock = {ENTRY, "auto_map", "attn_implementation", "model_type", "architectures"}
    return {key: unguarded(key, value) for key, value in config.to_dict().items() if key not in not_stock}


class NotCustom:
    """Base class of our mixins: to transformers, their classes are its own, and not code that a checkpoint brings."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False. With True, modules without direct parameters would keep any values, and 5.17 rename layers."""
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "") -> None:
        """Do nothing. The method of transformers would copy our source into the next checkpoint."""


class ConfigMixin(NotCustom, OfPatched, StockConfig):
    """The part of our config classes that writes schemes and guards into configs, and checks them when it reads one."""

    position_encoding: dict[str, object] | None = None
    if TYPE_CHECKING:
        _attn_implementation: str | None
        _output_attentions: bool | None

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute without its guard, which the stock class would refuse."""
        super().__setattr__(name, unguarded(name, value))

    @classmethod
    def from_dict(cls, config_dict: dict[str, object], **kwargs: object) -> Any:
        """Make a config of a saved one, as transformers does.

        Args:
            config_dict: contents of a config.json.
            **kwargs: passed to the method of transformers.

        Raises:
            CheckpointError: if the dict names an attention implementation, which could be code from the Hub.
        """
        if (implementation := config_dict.get("attn_implementation")) != UNREGISTERED:
            raise CheckpointError(
                f"hf_posenc: config.json says attn_implementation={implementation!r}, where a patched model says "
                f"{UNREGISTERED!r}: an attention implementation is chosen when a model is loaded"
            )
        return super().from_dict(cls._decode_special_floats(config_dict), **kwargs)

    @property
    def output_attentions(self) -> bool | None:
        """Whether the model returns its attention weights. transformers allows it for eager attention, we for ours."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        if value and self._attn_implementation == UNREGISTERED:  # of a checkpoint: none is chosen yet
            self._attn_implementation = None
        if self._attn_implementation == NAME:
            self._output_attentions = value
        else:
            PreTrainedConfig.output_attentions.fset(self, value)

    def validate(self) -> None:
        """Check the config as transformers does, but allow `output_attentions` with our attention.

        transformers allows it only for its eager attention.
        """
        wanted = self._output_attentions
        if self._attn_implementation == NAME:
            self._output_attentions = False
        try:
            super().validate()
        finally:
            self._output_attentions = wanted

    def _guards(self) -> dict[str, str]:
        values = {key: getattr(self, key, None) for key in ACTIVATIONS}
        guards = {key: guarded(value) for key, value in values.items() if isinstance(value, str)}
        if hasattr(self, NUMBER):
            guards[NUMBER] = guarded(getattr(self, NUMBER))
        return {**guards, "attn_implementation": UNREGISTERED}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, with guards. `tie_word_embeddings` has no guard here, because PEFT reads it."""
        return {**super().to_dict(), **self._guards()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the dict that is saved, with all guards, and the entry in the format of this version."""
        auto_map = {"AutoConfig": f"{STUB}.{type(self).__name__}"}
        auto_map |= {auto: f"{STUB}.{name}" for auto, name in class_names(stock_config(self)).items()}
        entry = renew_entry(self.position_encoding) if isinstance(self.position_encoding, dict) else None
        type_guard = {CHECKED: guarded(getattr(self, CHECKED))} if hasattr(self, CHECKED) else {}
        return {**super().to_diff_dict(), ENTRY: entry, "auto_map": auto_map, **type_guard, **self._guards()}


def stock_config(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """Return the class of a stock config, or the stock class from which the class of a config of ours derives."""
    return stock_class(type(config), ConfigMixin) if isinstance(config, ConfigMixin) else type(config)


@contextmanager
def stock_inside(config: PreTrainedConfig) -> Iterator[None]:
    """Give the text config of a multimodal config its stock class and model type for a `with` block.

    Stock classes choose the class of the language model by this model type.

    Args:
        config: a config of ours. Unless it is a multimodal model's, it stays unchanged.
    """
    text = language_config(config)
    if text is config or not isinstance(text, ConfigMixin):
        yield
        return
    ours, model_type, stock = type(text), text.__dict__.pop("model_type", None), stock_config(text)
    object.__setattr__(text, "__class__", stock)
    try:
        yield
    finally:
        object.__setattr__(text, "__class__", ours)
        if model_type is not None:
            text.__dict__["model_type"] = model_type
