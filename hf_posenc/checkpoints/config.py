"""The part of our config classes that writes and checks configs of patched models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from ..errors import CheckpointError, HfPosencError
from ..families.base import language_config
from ..live.patch_record import OfPatched
from ..upstream import NAME
from ..upstream.derived_classes import stock_class
from .class_names import STUB, class_names
from .digests import DIGESTS, check_saved_config, config_digest, with_floats
from .guards import ACTIVATIONS, CHECKED, NUMBER, UNREGISTERED, guarded, unguarded
from .scheme_entry import renew_entry
from .stock_checkpoints import StockConfig

READ = "_posenc_read"
"""Name of an attribute that a config has after it was read and before its model is built. It holds the digest of the
config.json, the options of the call, and the config as a dict when it was read."""


class ConfigMixin(OfPatched, StockConfig):
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
        """Check that a saved config was not changed, and make a config of it.

        Args:
            config_dict: contents of a config.json.
            **kwargs: passed to the method of transformers.

        Returns:
            The config; with `return_unused_kwargs`, a pair of config and unused options.

        Raises:
            CheckpointError: if the dict was changed after it was saved, or makes no config of this class.
        """
        if not isinstance(config_dict, dict):
            raise CheckpointError(f"hf_posenc: a config is a JSON object, not {config_dict!r}")
        saved = with_floats({key: value for key, value in config_dict.items() if key != DIGESTS})
        check_saved_config(config_dict)
        options = copy.copy(kwargs)
        try:
            made = super().from_dict(saved, **kwargs)
        except (HfPosencError, OSError):
            raise
        except Exception as error:  # stock classes raise exceptions of any type
            raise CheckpointError(
                f"hf_posenc: config.json makes no {cls.__name__}: {type(error).__name__}: {error}"
            ) from error
        config = made[0] if isinstance(made, tuple) else made
        object.__setattr__(config, READ, (config_digest(config_dict), options, config.to_dict()))
        return made

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

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False. With True, transformers 5.17 would rename layer types, and stock models lack the new names."""
        return False

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
        stock: dict[str, Any] = super().to_dict()
        stock.pop(READ, None)
        return {**stock, **self._guards()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the dict that is saved, with all guards, and the entry in the format of this version."""
        saved = super().to_diff_dict()
        saved.pop(READ, None)
        auto_map = {"AutoConfig": f"{STUB}.{type(self).__name__}"}
        auto_map |= {auto: f"{STUB}.{name}" for auto, name in class_names(stock_config(self)).items()}
        entry = self.position_encoding
        if isinstance(entry, dict):
            entry = renew_entry(entry)
        type_guard = {CHECKED: guarded(getattr(self, CHECKED))} if hasattr(self, CHECKED) else {}
        return {**saved, "position_encoding": entry, "auto_map": auto_map, **type_guard, **self._guards()}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing. The method of transformers would copy our source into the next checkpoint."""


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
