"""Vectors that a model adds to its hidden states: find their modules, record them, replace them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..analysis import probe
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..patching.changes import NoEmbedding


def sources(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that make the vectors of a patched or stock model; an empty list if it adds none."""
    return [module for each in _by_layer(model).values() for module in each]


def _by_layer(model: PreTrainedModel) -> dict[int, list[nn.Module]]:
    """Return the modules by the index of the layer in front of which they add vectors, 0 for the input."""
    found = probe.parts(model)
    by_layer = {index: [layer._modules.get("posenc")] for index, layer in enumerate(found.layers)}
    by_layer[0].insert(0, found.position_table)
    return {
        index: [module for module in each if module is not None and not isinstance(module, NoEmbedding)]
        for index, each in by_layer.items()
    }


def added(model: PreTrainedModel, tokens: Tensor) -> dict[int, Tensor]:
    """Return the vectors that a model adds while it reads a text.

    Args:
        model: patched or stock.
        tokens: (1, T).

    Returns:
        (T, E) float64 on the CPU, by the index of the layer in front of which they are added, 0 for the input.
    """
    found: dict[int, Tensor] = {}

    def add(index: int, output: Tensor) -> None:
        found[index] = found.get(index, 0) + output.reshape(-1, output.shape[-1]).double().cpu()

    modules = [(index, module) for index, each in _by_layer(model).items() for module in each]
    with torch.no_grad(), evaluation(model), probe.outputs(modules, add):
        model(tokens, use_cache=False, logits_to_keep=1)
    return found


def replaced(modules: list[nn.Module], change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Replace the outputs of modules within a `with` block.

    Args:
        modules: modules of a model.
        change: output of a module, (B|1, T, E) -> what takes its place.
    """
    return probe.outputs([(change, module) for module in modules], lambda change, output: change(output))


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Provide a model in float64 within a `with` block: itself if it is in float64, a copy otherwise.

    Constants of its code are made in torch's default dtype, so that is float64 too. Experts of a copy are computed one
    after the other, because the code that computes all at once takes no float64.
    """
    if not all(each.dtype == torch.float64 for each in model.parameters()):
        model = copy.deepcopy(model).double()
        for config in BaseModel.of(model).configs:
            config._experts_implementation = "eager"
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield model
    finally:
        torch.set_default_dtype(usual)
