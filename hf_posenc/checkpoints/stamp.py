"""A random mark in every weight file of one save, so that the files of two saves are never taken for one."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer

Model = TypeVar("Model")

SAVE = "hf_posenc_save"
"""Key of a safetensors file's metadata. They are part of the header, and so of the digests in config.json."""


class _Stamp(HfQuantizer):
    """A quantizer that changes no weight: transformers asks it for the metadata of the files that it writes.

    A model that is quantised has a quantizer, whose state dict and metadata are kept.
    """

    def __init__(self, own: HfQuantizer | None, state: dict[str, Tensor] | None) -> None:
        self.own, self.state = own, state

    def is_serializable(self) -> bool:
        return self.own is None or self.own.is_serializable()

    @property
    def is_trainable(self) -> bool:
        return self.own is None or self.own.is_trainable

    @property
    def quantization_config(self) -> Any:
        """Return that of the model's own quantizer, which transformers names in its error."""
        return None if self.own is None else self.own.quantization_config

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        state, metadata = (self.state, {}) if self.own is None else self.own.get_state_dict_and_metadata(model)
        return state, {**metadata, SAVE: secrets.token_hex(16)}


def stamped(model: Model, state: dict[str, Tensor] | None) -> Model:
    """Return a view of a model whose weight files all carry one new mark.

    Args:
        model: is saved, and not changed.
        state: the state dict that is saved, or None for the model's own.

    Returns:
        An object with the same attributes, modules and parameters, for one call of `save_pretrained`.
    """
    view = object.__new__(type(model))
    view.__dict__.update(model.__dict__)
    view.__dict__["hf_quantizer"] = _Stamp(getattr(model, "hf_quantizer", None), state)
    return view
