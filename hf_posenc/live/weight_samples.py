"""What a model's weights are: packed or plain, and samples that show later whether they have moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..modules import PositionModule

SAMPLES = "_posenc_samples"
"""Attribute of the base model of a stock model whose weights moved while it was patched: samples of what they were."""

NUMBERS = 64
"""Numbers that are kept of each weight. A step of training moves nearly all of them."""

PEFT_PARTS = ("base_layer", "original_module")
"""Where PEFT keeps a weight that it has wrapped: parts of the parameter's name then."""


@dataclass(frozen=True)
class Sample:
    """Some numbers of a weight.

    Attributes:
        count: of all its numbers.
        numbers: up to `NUMBERS` of them, spread evenly.
    """

    count: int
    numbers: Tensor

    def same(self, other: Sample) -> bool:
        """Return whether both are of the same weight, up to a cast to the less precise of both dtypes."""
        if self.count != other.count:  # embeddings that were resized: nothing can be said
            return True
        mine, theirs = self.numbers.cpu(), other.numbers.cpu()
        coarse = mine if mine.element_size() <= theirs.element_size() else theirs
        return bool(torch.equal(mine.to(coarse.dtype).nan_to_num(), theirs.to(coarse.dtype).nan_to_num()))


def samples_of(model: nn.Module) -> dict[str, Sample]:
    """Return samples of all weights but those of schemes, by name; none of weights that are packed, or on no device."""
    placed = {id(p) for module in model.modules() if isinstance(module, PositionModule) for p in module.parameters()}
    found = {}
    for name, weight in model.named_parameters():
        if id(weight) not in placed and not weight.is_meta and not is_packed(weight):
            found[_stock_name(name)] = _sample(weight.detach())
    return found


def stock_samples(model: PreTrainedModel) -> dict[str, Sample]:
    """Return samples of the weights that a stock model had when it was first patched; now, if it never was."""
    return model.base_model.__dict__.get(SAMPLES) or samples_of(model)


def keep_if_moved(model: PreTrainedModel, samples: dict[str, Sample]) -> bool:
    """Return whether the weights of a model that is stock again have moved. What it is patched with next must know it.

    Args:
        model: stock.
        samples: of its weights, as they were when it was first patched; kept on it if they have moved.
    """
    if have_moved(model, samples):
        setattr(model.base_model, SAMPLES, samples)
        return True
    model.base_model.__dict__.pop(SAMPLES, None)
    return False


def have_moved(model: nn.Module, samples: dict[str, Sample]) -> bool:
    """Return whether a model's weights differ from samples that were taken of them; names that are gone say nothing."""
    now = samples_of(model)
    return any(not before.same(now[name]) for name, before in samples.items() if name in now)


def _sample(weight: Tensor) -> Sample:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    flat = local.reshape(-1)
    return Sample(flat.numel(), flat[:: max(1, flat.numel() // NUMBERS)][:NUMBERS].clone())


def is_packed(weight: Tensor) -> bool:
    """Return whether a weight is kept as integers, in 8 bits, or by a tensor class that stands for another one."""
    kept = weight.detach()
    return not is_plain(kept) or not kept.is_floating_point() or kept.element_size() < 2


def is_plain(weight: Tensor) -> bool:
    """Return whether a weight is of torch's own classes, and no tensor class of another package's."""
    return type(weight) in (Tensor, nn.Parameter, DTensor)


def _stock_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in PEFT_PARTS)
