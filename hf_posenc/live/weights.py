"""Samples of a model's own weights. They show later whether the weights have moved."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..modules import PositionModule
from .wrappers import is_packed

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


def have_moved(model: nn.Module, samples: dict[str, Sample]) -> bool:
    """Return whether a model's weights differ from samples that were taken of them; names that are gone say nothing."""
    now = samples_of(model)
    return any(not before.same(now[name]) for name, before in samples.items() if name in now)


def _sample(weight: Tensor) -> Sample:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    flat = local.reshape(-1)
    return Sample(flat.numel(), flat[:: max(1, flat.numel() // NUMBERS)][:NUMBERS].clone())


def _stock_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in PEFT_PARTS)
