"""Lower the error of the heads' outputs: one forward pass of the base, and one of the patched model.

Each layer of the patched model reads this model's own hidden states. Gradients are taken at each attention, as soon as
it is computed, and stop at the input of its layer. So no layer waits for those above it, and a layer makes good what
the layers below it do differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..dtypes import compute_dtype
from ..layer_state import on_decoder
from ..live.base_model import BaseModel
from ..live.watch import Args, Kwargs, uncompiled
from .observe import attending
from .pair import Pair

Pre = Callable[[nn.Module, Args, Kwargs], tuple[Args, Kwargs] | None]
"""Forward pre-hook of a layer."""

Post = Callable[[nn.Module, Args, Any], Any]
"""Forward hook of the module that computes an attention. Its first argument is the call, its output that of the heads
and the weights, see `ScoreModule.forward`."""


@dataclass(frozen=True)
class Wanted:
    """What a layer's heads read in the base.

    Attributes:
        output: (B, T, H, V).
        square: mean square of the values, over all processes. So the mean of the processes' errors is the error of all
            their windows.
    """

    output: Tensor
    square: Tensor


def add_output_gradients(pair: Pair, tokens: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """Add the gradients of every layer's output error on a batch, and return the mean error over layers.

    The error is the mean squared error of the heads' outputs, relative to the mean square of the base's values.

    Args:
        pair: a model and its base, within `attending`.
        tokens: (B, T) windows.
        parameters: parameters that require gradients.
    """
    with pair.as_base() as base:
        wanted = _wanted(base, tokens, pair.layers)
    modules, lenders = pair.base_model.modules, set(pair.lenders.values())
    first = modules.layers[0] if on_decoder(modules.decoder).layers.at_first else None
    errors: list[float] = []

    def enter(index: int) -> Pre:
        def hook(layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
            torch.set_grad_enabled(True)
            if first is None or index == 0:
                return None
            # The hidden states hold the vectors of the input already, as constants: what is added has only a gradient.
            vectors = first.get_submodule("posenc")(torch.arange(tokens.shape[1], device=tokens.device)[None])
            change = vectors - vectors.detach()
            if args:
                return (args[0] + change.to(args[0]), *args[1:]), kwargs
            hidden = kwargs["hidden_states"]
            return args, kwargs | {"hidden_states": hidden + change.to(hidden)}

        return hook

    def leave(index: int) -> Post:
        def hook(module: nn.Module, args: Args, outputs: Any) -> Any:
            output, weights = outputs
            if index in wanted:
                error = _error(output, wanted.pop(index))
                if error.requires_grad:
                    add_gradients(error, parameters, retain_graph=index in lenders)
                errors.append(error.item())
            torch.set_grad_enabled(False)
            return output.detach(), weights

        return hook

    with torch.no_grad(), uncompiled(), ExitStack() as hooks:
        for index in pair.watched:
            layer, attention = modules.layers[index], modules.attention_of[index]
            hooks.callback(layer.register_forward_pre_hook(enter(index), prepend=True, with_kwargs=True).remove)
            hooks.callback(attention.get_submodule("posenc").register_forward_hook(leave(index)).remove)
        pair.model.base_model(tokens, use_cache=False)
    return sum(errors) / len(errors)


@torch.no_grad()
def _wanted(base: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> dict[int, Wanted]:
    """Run the base, and return layer index -> what its heads read."""
    found: dict[int, Wanted] = {}

    def record(index: int) -> Post:
        def hook(module: nn.Module, args: Args, outputs: Any) -> None:
            square = args[0].value.to(compute_dtype(args[0].value)).square().mean()
            if dist.is_initialized():
                dist.all_reduce(square)
                square /= dist.get_world_size()
            found[index] = Wanted(outputs[0], square)

        return hook

    base_model = BaseModel.of(base)
    with attending(base, base_model), ExitStack() as hooks:
        for index in layers:
            module = base_model.modules.attention_of[index].get_submodule("posenc")
            hooks.callback(module.register_forward_hook(record(index)).remove)
        base.base_model(tokens, use_cache=False)
    return found


def _error(output: Tensor, wanted: Wanted) -> Tensor:
    dtype = compute_dtype(output)
    return (output.to(dtype) - wanted.output.to(dtype)).square().mean() / wanted.square


def add_gradients(loss: Tensor, parameters: Sequence[nn.Parameter], *, retain_graph: bool = False) -> None:
    """Add the gradients of a loss to those of parameters, of which it may depend on a few."""
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=retain_graph)
    for p, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient
