"""A random mark in all weight files of a save, so that files of two saves cannot be mixed unnoticed."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer

Model = TypeVar("Model")

SAVE = "hf_posenc_save"
"""Key of the mark in a safetensors file's metadata, which the digests in config.json cover."""


class _Stamp(HfQuantizer):
    """A quantizer that only adds the mark: transformers asks a model's quantizer for the metadata of weight files.

    If the model is quantised, it wraps the model's quantizer.
    """

    def __init__(self, wrapped: HfQuantizer | None, state: dict[str, Tensor] | None) -> None:
        self.wrapped, self.state = wrapped, state

    def is_serializable(self) -> bool:
        return self.wrapped is None or self.wrapped.is_serializable()

    @property
    def is_trainable(self) -> bool:
        return self.wrapped is None or self.wrapped.is_trainable

    @property
    def quantization_config(self) -> Any:
        """The config of the wrapped quantizer. transformers names it in errors."""
        return None if self.wrapped is None else self.wrapped.quantization_config

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        state, metadata = (self.state, {}) if self.wrapped is None else self.wrapped.get_state_dict_and_metadata(model)
        return state, {**metadata, SAVE: secrets.token_hex(16)}


def stamped(model: Model, state: dict[str, Tensor] | None) -> Model:
    """Return a view of a model that writes one new mark into all its weight files.

    Args:
        model: the model to save; it stays unchanged.
        state: the state dict to save, or None for the model's.

    Returns:
        An object with the same attributes, modules and parameters, for one call of `save_pretrained`.
    """
    view = object.__new__(type(model))
    view.__dict__.update(model.__dict__)
    view.__dict__["hf_quantizer"] = _Stamp(getattr(model, "hf_quantizer", None), state)
    return view
