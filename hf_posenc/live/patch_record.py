"""The record of a patch, a plain attribute of the base model, and the lock of calls that change a model."""

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
"""Attribute of a base model that holds the record of its patch."""

CHANGING = "_posenc_changing"
"""Attribute of a base model while a call changes it: `(id of the base model, the call)`."""


class OfPatched:
    """Mark of the classes that patched models and their configs have."""


@dataclass
class Patch:
    """The record of a patch.

    Attributes:
        schemes: as fitted to the model, in the order in which they were given.
        attention: `auto` or an engine's name.
        undo: the inverse steps; None for a model that was loaded patched, whose stock positions are gone.
        layers: the decoder layers that were patched, which need not be those that the model has now.
        limit: number of positions that exist, or None if there is no limit.
        attends: whether the model attends through the attention function of this package.
        samples: of the stock weights, as they were when the model was first patched.
        started: by its name in the base model, how often each position parameter had been written when the model was
            patched, as torch counts it: one that still has that count was never trained. Empty for a model that was
            loaded patched.
    """

    schemes: tuple[Scheme, ...]
    attention: str
    undo: Undo | None
    layers: list[nn.Module] = field(default_factory=list)
    limit: int | None = None
    attends: bool = False
    samples: dict[str, Sample] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The schemes' names."""
        return " + ".join(scheme.name for scheme in self.schemes)


def patch_of(model: nn.Module) -> Patch | None:
    """Return the record of a patched model, also below an adapter of PEFT, or None for a stock model."""
    return patched_part(model).__dict__.get(PATCH)


def patched_part(model: nn.Module) -> Any:
    """Return the part of a model that a patch changes: its language model, without adapter and head."""
    model = language_model(without_adapter(model))
    return getattr(model, "base_model", model)


def language_model(model: Any) -> Any:
    """Return the language model inside a multimodal one, with its head where it has its own; any other model as it is.

    It is the outermost model of transformers that has the text config of the whole.
    """
    if not isinstance(model, PreTrainedModel) or (config := language_config(model.config)) is model.config:
        return model
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is config)
    return next(parts, model)


def without_adapter(model: object) -> Any:
    """Return the model that PEFT has wrapped, with the adapter's layers inside; any other model as it is."""
    if isinstance(model, PeftMixedModel):
        return model.base_model.model
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapted_parts(model: nn.Module) -> list[Any]:
    """Return the modules that PEFT has put inside a model, also without a wrapper around it (`model.add_adapter`)."""
    return [module for module in model.modules() if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper))]


@contextmanager
def alone(model: nn.Module, action: str) -> Iterator[None]:
    """Keep other calls from changing a model for the length of a `with` block.

    Args:
        model: with or without head; the two are one model.
        action: what is done to it, as in "patch the model".

    Raises:
        UnsupportedModelError: if another call, as a rule of another thread, is changing the model.
    """
    model, owner = without_adapter(model), patched_part(model)
    mine = (id(owner), object())
    holder = owner.__dict__.setdefault(CHANGING, mine)
    if holder[0] != id(owner):  # of the model that this one was copied from meanwhile
        holder = owner.__dict__[CHANGING] = mine
    if holder is not mine:
        raise UnsupportedModelError(
            f"another call is patching, unpatching or calibrating this {type(model).__name__}: {action} when it has "
            "returned"
        )
    try:
        yield
    finally:
        del owner.__dict__[CHANGING]
