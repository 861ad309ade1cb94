"""Find, record and replace the position vectors that a model adds to its hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..analysis import probe
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..patching.changes import NoEmbedding


def sources(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that compute the position vectors of a model; an empty list if it adds none."""
    return [module for each in _modules_by_layer(model).values() for module in each]


def _modules_by_layer(model: PreTrainedModel) -> dict[int, list[nn.Module]]:
    """Return layer index -> the modules that add vectors to the layer's input; layer 0 stands for the model's input."""
    parts = BaseModel.of(model).modules
    by_layer = {index: [layer._modules.get("posenc")] for index, layer in enumerate(parts.layers)}
    by_layer[0].insert(0, parts.position_table)
    return {
        index: [module for module in each if module is not None and not isinstance(module, NoEmbedding)]
        for index, each in by_layer.items()
    }


def added(model: PreTrainedModel, tokens: Tensor) -> dict[int, Tensor]:
    """Return the vectors that a model adds while it reads a text.

    Args:
        model: a patched or stock model.
        tokens: (1, T) text.

    Returns:
        Layer index -> vectors that are added to the layer's input, (T, E) float64 on the CPU.
    """
    sums: dict[int, Tensor] = {}

    def add(index: int, output: Tensor) -> None:
        sums[index] = sums.get(index, 0) + output.reshape(-1, output.shape[-1]).double().cpu()

    modules = [(index, module) for index, each in _modules_by_layer(model).items() for module in each]
    with torch.no_grad(), evaluation(model), probe.outputs(modules, add):
        model(tokens, use_cache=False, logits_to_keep=1)
    return sums


def replaced(modules: list[nn.Module], change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Replace the outputs of modules within a `with` block.

    Args:
        modules: modules of a model.
        change: output of a module, (B|1, T, E) -> new output.
    """
    return probe.outputs([(change, module) for module in modules], lambda change, output: change(output))


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Provide a model in float64 within a `with` block, a copy unless the model is in float64 already.

    torch's default dtype is float64 meanwhile, because code of models creates constants in it. The experts of a copy
    are computed one by one, because the code for all at once takes no float64.
    """
    if not all(each.dtype == torch.float64 for each in model.parameters()):
        model = copy.deepcopy(model).double()
        for config in BaseModel.of(model).configs:
            config._experts_implementation = "eager"
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield model
    finally:
        torch.set_default_dtype(default_dtype)
