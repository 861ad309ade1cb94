"""The record of a patch, which the base model holds, samples of its weights, and a lock for calls that change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModelError
from ..core.modules import position_parameters
from ..families.base import language_config
from ..schemes.base import Scheme
from .undo import Undo

PATCH = "_posenc_patch"
"""Name of the base model's attribute that holds the record of its patch."""

CHANGING = "_posenc_changing"
"""Name of the base model's attribute that locks it while a call changes it: `(id of the base model, token)`."""

SAMPLES = "_posenc_samples"
"""Name of a base model's attribute with samples of its original weights. It is set if the weights were trained while
the model was patched, and outlives the patch."""

SAMPLE_SIZE = 64
"""How many numbers of a weight a sample holds, at most. A training step changes nearly all of them."""

PEFT_PARTS = ("base_layer", "original_module")
"""Names of modules that PEFT inserts between a weight and its module."""


class OfPatched:
    """Base class of the classes of patched models and their configs."""


@dataclass(frozen=True)
class Sample:
    """Some numbers of a weight.

    Attributes:
        count: how many numbers the weight has.
        numbers: up to `SAMPLE_SIZE` of them, evenly spaced.
    """

    count: int
    numbers: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Sample:
        """Take a sample."""
        flat = (weight.to_local() if isinstance(weight, DTensor) else weight).reshape(-1)
        return cls(flat.numel(), flat[:: max(1, flat.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].clone())

    def same(self, other: Sample) -> bool:
        """Return whether two samples are equal after a cast to the less precise dtype of the two."""
        if self.count != other.count:  # resized embeddings cannot be compared
            return True
        first, second = sorted((self.numbers.cpu(), other.numbers.cpu()), key=Tensor.element_size)
        return bool(torch.equal(first.nan_to_num(), second.to(first.dtype).nan_to_num()))


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
        keeps_positions: whether every layer keeps the base's positions, at most stretched or added to. False if the
            model was loaded from a patched checkpoint, which does not say it.
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
    keeps_positions: bool = False

    @property
    def name(self) -> str:
        """The schemes' names."""
        return " + ".join(scheme.name for scheme in self.schemes)


def patch_of(model: nn.Module) -> Patch | None:
    """Return the record of a patched model, also if PEFT wraps it, or None for a stock model."""
    return patched_part(model).__dict__.get(PATCH)


def keeps_positions(model: nn.Module) -> bool:
    """Return whether a model keeps its base's positions, see `Patch.keeps_positions`. A stock model does."""
    return (patch := patch_of(model)) is None or patch.keeps_positions


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


def samples_of(model: nn.Module) -> dict[str, Sample]:
    """Return a dict from name to sample of a model's weights, without schemes', packed and meta-device weights."""
    of_schemes = position_parameters(model)
    return {
        ".".join(part for part in name.split(".") if part not in PEFT_PARTS): Sample.of(weight.detach())
        for name, weight in model.named_parameters()
        if name not in of_schemes and not weight.is_meta and not is_packed(weight)
    }


def have_moved(model: nn.Module, samples: dict[str, Sample]) -> bool:
    """Return whether a model's weights differ from earlier samples. Weights that no longer exist are skipped."""
    now = samples_of(model)
    return any(not before.same(now[name]) for name, before in samples.items() if name in now)


def is_packed(weight: Tensor) -> bool:
    """Return whether a weight is stored as integers, in 8 bits, or as a tensor class of another package."""
    stored = weight.detach()
    is_plain = type(stored) in (Tensor, nn.Parameter, DTensor)
    return not is_plain or not stored.is_floating_point() or stored.element_size() < 2
