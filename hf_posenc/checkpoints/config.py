"""The part of our config classes that writes and checks the config of a patched model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

from ..errors import CheckpointError, HfPosencError
from ..families.base import language_config
from ..live.patch_record import OfPatched
from ..upstream import NAME
from ..upstream.derived_classes import stock_class
from .class_names import STUB, class_names
from .digests import DIGESTS, check_saved_config, config_digest, with_floats
from .guards import ACTIVATIONS, CHECKED, UNREGISTERED, guarded, unguarded
from .scheme_entry import renew_entry
from .stock_checkpoints import StockConfig

READ = "_posenc_read"
"""Attribute of a config between its reading and the building of the model. It holds the digest of what was read, the
options of the call, and the config as a dict at that time."""


class ConfigMixin(OfPatched, StockConfig):
    """The part of our config classes that writes the schemes and the guards, and checks them when they are read."""

    position_encoding: dict[str, object] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute without its guard, which the stock class would refuse. Making a config calls this too."""
        super().__setattr__(name, unguarded(name, value))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Check that a dict is unchanged since it was saved, and make a config of it.

        Args:
            config_dict: a config.json.
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
            made = super().from_dict(saved, **kwargs)
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
        """Whether the model returns its attention weights. Our attention has them, so no other has to be chosen."""
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
        """Return False: transformers 5.17 would give layer types new names, which the stock model does not know."""
        return False

    def validate(self) -> None:
        """Check the config as transformers does.

        transformers takes `output_attentions` for its own eager attention only, so that it must not see it on ours.
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
        return {**guards, "attn_implementation": UNREGISTERED}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, with all guards but that of `tie_word_embeddings`, which PEFT reads here."""
        stock: dict[str, Any] = super().to_dict()
        stock.pop(READ, None)
        return {**stock, **self._guards()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the dict that is saved, with all guards, and the entry in the form of this version."""
        saved = super().to_diff_dict()
        saved.pop(READ, None)
        auto_map = {"AutoConfig": f"{STUB}.{type(self).__name__}"}
        auto_map |= {auto: f"{STUB}.{name}" for auto, name in class_names(stock_config(self)).items()}
        entry = self.position_encoding
        if isinstance(entry, dict):
            entry = renew_entry(entry)
        checked = {CHECKED: guarded(getattr(self, CHECKED))} if hasattr(self, CHECKED) else {}
        return {**saved, "position_encoding": entry, "auto_map": auto_map, **checked, **self._guards()}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy our source into the next checkpoint."""


def stock_config(config: PreTrainedConfig) -> type[PreTrainedConfig]:
    """Return the stock class of a config: its own, or the one behind the mixin."""
    return stock_class(type(config), ConfigMixin) if isinstance(config, ConfigMixin) else type(config)


@contextmanager
def stock_inside(config: PreTrainedConfig) -> Iterator[None]:
    """Make the text config of a multimodal config stock for the length of a `with` block.

    Stock classes look at its model type, and build the language model by it.

    Args:
        config: ours; nothing is done with one that is no multimodal model's.
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
