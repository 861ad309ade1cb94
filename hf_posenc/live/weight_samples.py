"""Samples of a model's weights, which show later whether training has changed them, and tests for packed weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..modules import PositionModule

SAMPLES = "_posenc_samples"
"""Name of a base model's attribute with samples of its original weights. It is set if the weights were trained while
the model was patched, and outlives the patch."""

SAMPLE_SIZE = 64
"""How many numbers of a weight a sample holds, at most. A training step changes nearly all of them."""

PEFT_PARTS = ("base_layer", "original_module")
"""Names of modules that PEFT inserts between a weight and its module."""


@dataclass(frozen=True)
class Sample:
    """Some numbers of a weight.

    Attributes:
        count: how many numbers the weight has.
        numbers: up to `SAMPLE_SIZE` of them, evenly spaced.
    """

    count: int
    numbers: Tensor

    def same(self, other: Sample) -> bool:
        """Return whether two samples are equal after a cast to the less precise dtype of the two."""
        if self.count != other.count:  # resized embeddings cannot be compared
            return True
        first, second = self.numbers.cpu(), other.numbers.cpu()
        dtype = first.dtype if first.element_size() <= second.element_size() else second.dtype
        return bool(torch.equal(first.to(dtype).nan_to_num(), second.to(dtype).nan_to_num()))


def samples_of(model: nn.Module) -> dict[str, Sample]:
    """Return a dict from name to sample of a model's weights, without schemes', packed and meta-device weights."""
    position_modules = (module for module in model.modules() if isinstance(module, PositionModule))
    position_ids = {id(parameter) for module in position_modules for parameter in module.parameters()}
    samples = {}
    for name, weight in model.named_parameters():
        if id(weight) not in position_ids and not weight.is_meta and not is_packed(weight):
            samples[_stock_name(name)] = _sample(weight.detach())
    return samples


def stock_samples(model: PreTrainedModel) -> dict[str, Sample]:
    """Return samples of a stock model's weights from when it was first patched, or from now if it never was."""
    return model.base_model.__dict__.get(SAMPLES) or samples_of(model)


def keep_if_moved(model: PreTrainedModel, samples: dict[str, Sample]) -> bool:
    """Return whether the weights of an unpatched model have changed, and keep samples of the original ones if so.

    The next patch of the model reads the samples.

    Args:
        model: a stock model that was patched before.
        samples: samples of its weights from when it was first patched.
    """
    if have_moved(model, samples):
        setattr(model.base_model, SAMPLES, samples)
        return True
    model.base_model.__dict__.pop(SAMPLES, None)
    return False


def have_moved(model: nn.Module, samples: dict[str, Sample]) -> bool:
    """Return whether a model's weights differ from earlier samples. Weights that no longer exist are skipped."""
    now = samples_of(model)
    return any(not before.same(now[name]) for name, before in samples.items() if name in now)


def _sample(weight: Tensor) -> Sample:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    flat = local.reshape(-1)
    return Sample(flat.numel(), flat[:: max(1, flat.numel() // SAMPLE_SIZE)][:SAMPLE_SIZE].clone())


def is_packed(weight: Tensor) -> bool:
    """Return whether a weight is stored as integers, in 8 bits, or as a tensor class of another package."""
    stored = weight.detach()
    return not is_plain(stored) or not stored.is_floating_point() or stored.element_size() < 2


def is_plain(weight: Tensor) -> bool:
    """Return whether a weight has a class of torch, not a tensor class of another package."""
    return type(weight) in (Tensor, nn.Parameter, DTensor)


def _stock_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in PEFT_PARTS)
