"""The record of a patch, which the base model holds, and a lock for calls that change a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..families.base import language_config
from ..schemes.base import Scheme
from .undo import Undo
from .weight_samples import Sample

PATCH = "_posenc_patch"
"""Name of the base model's attribute that holds the record of its patch."""

CHANGING = "_posenc_changing"
"""Name of the base model's attribute that locks it while a call changes it: `(id of the base model, token)`."""


class OfPatched:
    """Base class of the classes of patched models and their configs."""


@dataclass
class Patch:
    """The record of a patch.

    Attributes:
        schemes: the schemes, fitted to the model, in the caller's order.
        attention: `auto`, or the name of an engine.
        undo: the inverse steps. None if the model was loaded from a patched checkpoint, without stock positions.
        layers: the decoder layers when the model was patched. The model may have other layers now.
        limit: the number of positions that the model can tell apart, or None if there is no limit.
        attends: whether the model uses the attention function of this package.
        samples: samples of the stock weights from when the model was first patched.
        started: name of a position parameter in the base model -> its `_version` when the model was patched. torch
            counts writes in `_version`, so a parameter with the same version was never trained. Empty if the model was
            loaded from a patched checkpoint.
        backend: the flash attention of transformers that our attention function hands its calls to; empty for none.
    """

    schemes: tuple[Scheme, ...]
    attention: str
    undo: Undo | None
    layers: list[nn.Module] = field(default_factory=list)
    limit: int | None = None
    attends: bool = False
    samples: dict[str, Sample] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    backend: str = ""

    @property
    def name(self) -> str:
        """The schemes' names."""
        return " + ".join(scheme.name for scheme in self.schemes)


def patch_of(model: nn.Module) -> Patch | None:
    """Return the record of a patched model, also if PEFT wraps it, or None for a stock model."""
    return patched_part(model).__dict__.get(PATCH)


def patched_part(model: nn.Module) -> Any:
    """Return the part of a model that a patch changes: its language model, without adapter and head."""
    inner = without_adapter(model)
    model = language_model(inner)
    return getattr(model, "base_model", model)


def language_model(model: object) -> Any:
    """Return the language model inside a multimodal model, or any other model unchanged.

    It is the outermost model of transformers with the text config. So it has a head if the head is inside.
    """
    if not isinstance(model, PreTrainedModel) or (config := language_config(model.config)) is model.config:
        return model
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config)
    return next(parts, model)


def without_adapter(model: object) -> Any:
    """Return the model that PEFT has wrapped, with the adapter's layers inside, or any other model unchanged."""
    if isinstance(model, PeftMixedModel):
        return model.base_model.model
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapted_parts(model: nn.Module) -> list[Any]:
    """Return the modules that PEFT has put inside a model, also by `model.add_adapter`, which does not wrap it."""
    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper))]


@contextmanager
def alone(model: nn.Module, action: str) -> Iterator[Patch | None]:
    """Keep other calls from changing a model for a `with` block.

    Args:
        model: the model, with or without head. A model is also locked through its head.
        action: what the caller is about to do, as in "patch the model".

    Yields:
        The record of its patch, or None for a stock model.

    Raises:
        UnsupportedModelError: if another call, usually in another thread, is changing the model.
    """
    model, owner = without_adapter(model), patched_part(model)
    own_lock = (id(owner), object())
    lock = owner.__dict__.setdefault(CHANGING, own_lock)
    if lock[0] != id(owner):  # this model is a copy, made while the original was locked
        lock = owner.__dict__[CHANGING] = own_lock
    if lock is not own_lock:
        raise UnsupportedModelError(
            f"another call is patching, unpatching or calibrating this {type(model).__name__}: {action} when it has "
            "returned"
        )
    try:
        yield owner.__dict__.get(PATCH)
    finally:
        del owner.__dict__[CHANGING]
