"""Measure how much the order of the context matters: swap or shuffle it, and compare the outputs of the last token.

Attention without positions is a sum over an unordered set, `softmax(q K^T) V`. So in one such layer the output of the
last token does not depend on the order of the others. A causal stack of such layers does depend on it. Under the mask
the earlier tokens see sets that depend on the order, and so the order reaches the layers above. Without the mask the
whole stack is equivariant: shuffled tokens have the same hidden states in shuffled order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..families.base import language_config
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.watch import LayerCall, first, recorded
from ..measurement import Result
from ..upstream import NAME
from . import probe


@dataclass(frozen=True)
class LayerOrder(Result):
    """The effect of reordering the context on one layer.

    Attributes:
        index: index of the layer.
        own: relative change of this layer's output for the last token, if only the inputs of this layer are reordered.
        accumulated: relative change of this layer's output for the last token, if the text is reordered.
        next_token: total variation (0 .. 1) of the model's next-token distribution, if only this layer reads the
            reordered context.
    """

    index: int
    own: float
    accumulated: float
    next_token: float


@dataclass(frozen=True)
class OrderSensitivity(Result):
    """The effect of reordering the context on a model, averaged over texts and changes.

    Attributes:
        label: the model's class.
        change: `swap` or `shuffle`.
        layers: one entry per layer.
        total_variation: total variation (0 .. 1) of the next-token distribution, if the text is reordered.
        kl: Kullback-Leibler divergence of that distribution from the original one, in nats.
        tokens: number of tokens in a text.
        changes: number of swaps or shuffles in the average.
    """

    label: str
    change: str
    layers: tuple[LayerOrder, ...]
    total_variation: float
    kl: float
    tokens: int
    changes: int

    def __str__(self) -> str:
        """Return a table."""
        lines = [
            f"{self.label}, {self.change}: next-token distribution changes by {self.total_variation:.3g} "
            f"(total variation), {self.kl:.3g} nats",
            f"  {'layer':<6} {'own':>10} {'accumulated':>12} {'next token':>11}",
        ]
        for layer in self.layers:
            lines.append(f"  {layer.index:<6} {layer.own:>10.2e} {layer.accumulated:>12.2e} {layer.next_token:>11.2e}")
        return "\n".join(lines)


@torch.no_grad()
def order_sensitivity(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    change: str = "swap",
    changes: int = 4,
    seed: int = 0,
    progress: bool = False,
) -> OrderSensitivity:
    """Reorder the context and measure how the outputs of the last token change, layer by layer.

    The last token stays at its position. It costs `changes * (layers + 2)` short forward passes. With a sliding window
    shorter than the text, reordering also changes which tokens the last one sees.

    Args:
        model: a causal language model, patched or stock, best in float32 or float64.
        tokens: (T,) or (B, T) text without padding, T >= 3.
        change: `swap` exchanges two different neighbouring tokens of the context, `shuffle` permutes all of it.
        changes: number of random swaps or shuffles.
        seed: seed of the random orders.
        progress: show a progress bar.

    Returns:
        OrderSensitivity.

    Raises:
        ValueError: for another `change`, under 3 tokens, or a context whose tokens are all the same.
    """
    tokens = probe.check_tokens(tokens, 3)
    if change not in ("swap", "shuffle"):
        raise ValueError(f"change must be swap or shuffle, not {change!r}")
    layers = probe.parts(model).layers
    sums = torch.zeros(3, len(layers), dtype=torch.float64)
    variation = divergence = 0.0
    with (
        evaluation(model),
        tqdm(total=changes * (len(layers) + 1), disable=not progress, desc="order", unit="forward") as bar,
    ):
        with recorded(layers) as calls:
            states, logits = _states(model, layers, tokens, {})
        for order in _draw_orders(tokens, change, changes, seed):
            reordered_states, reordered_logits = _states(model, layers, tokens[:, order], {})
            bar.update()
            variation += _variation(reordered_logits, logits)
            divergence += _divergence(reordered_logits, logits)
            for index, layer in enumerate(layers):
                output, logits_of_one = _run_reordered(model, layer, calls[index], tokens, order)
                sums[0, index] += _relative_change(output, states[index][:, -1])
                sums[1, index] += _relative_change(reordered_states[index][:, -1], states[index][:, -1])
                sums[2, index] += _variation(logits_of_one, logits)
                bar.update()
    means = (sums / changes).T.tolist()
    rows = tuple(LayerOrder(index, *row) for index, row in enumerate(means))
    effects = variation / changes, divergence / changes
    return OrderSensitivity(type(model).__name__, change, rows, *effects, tokens.shape[1], changes)


def _run_reordered(
    model: PreTrainedModel, layer: nn.Module, call: LayerCall, tokens: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Reorder the inputs of one layer. Return the layer's output for the last token, and the model's logits."""
    output = first(layer(call.hidden_states[:, order], *call.args, **call.kwargs))[:, -1]
    with _reordered_layer(layer, order):
        return output, model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]


@dataclass(frozen=True)
class LayerEquivariance(Result):
    """How far the output of one layer is from equivariance.

    The numbers are relative changes of a token's hidden state when all tokens but the last are shuffled. A token is
    compared with itself at its new position. An equivariant layer has 0, up to rounding.

    Attributes:
        index: index of the layer.
        unmasked: mean over tokens, without a mask.
        causal: mean over tokens, with the causal mask.
        causal_last: change of the last token with the causal mask. It sees the same tokens in any order.
    """

    index: int
    unmasked: float
    causal: float
    causal_last: float


@dataclass(frozen=True)
class Equivariance(Result):
    """How far a model is from equivariance, with the causal mask and without, averaged over texts and orders.

    Attributes:
        label: the model's class.
        layers: one entry per layer.
        tokens: number of tokens in a text.
        changes: number of orders in the average.
    """

    label: str
    layers: tuple[LayerEquivariance, ...]
    tokens: int
    changes: int

    def __str__(self) -> str:
        """Return a table."""
        lines = [
            f"{self.label}: change of the hidden state of a token among shuffled ones",
            f"  {'layer':<6} {'unmasked':>10} {'causal':>10} {'causal, last token':>19}",
        ]
        for layer in self.layers:
            lines.append(f"  {layer.index:<6} {layer.unmasked:>10.2e} {layer.causal:>10.2e} {layer.causal_last:>19.2e}")
        return "\n".join(lines)


@torch.no_grad()
def equivariance(
    model: PreTrainedModel, tokens: Tensor, *, changes: int = 4, seed: int = 0, progress: bool = False
) -> Equivariance:
    """Shuffle a text and measure how far the hidden states are from being shuffled in the same way.

    The last token stays at its position. It costs `2 changes + 3` forward passes with dense attention. Without the mask
    a model without positions is equivariant, unless it has recurrent layers. Removing the mask also removes sliding
    windows.

    Args:
        model: a causal language model, patched or stock, best in float32 or float64.
        tokens: (T,) or (B, T) text without padding, T >= 3.
        changes: number of random orders.
        seed: seed of the random orders.
        progress: show a progress bar.

    Returns:
        Equivariance.

    Raises:
        ValueError: for under 3 tokens, or a context whose tokens are all the same.
        UnsupportedModelError: if the mask cannot be removed: the scheme has no distances to later tokens, or the
            family's attention applies its own mask.
    """
    tokens = probe.check_tokens(tokens, 3)
    _require_removable_mask(model)
    layers, length = probe.parts(model).layers, tokens.shape[1]
    unmasked = {
        "attention_mask": torch.zeros(1, 1, length, length, dtype=model.dtype, device=tokens.device),
        "position_ids": torch.arange(length, device=tokens.device)[None],
    }
    sums = torch.zeros(3, len(layers), dtype=torch.float64)
    orders = _draw_orders(tokens, "shuffle", changes, seed)
    with (
        evaluation(model),
        probe.dense_attention(model),
        tqdm(total=2 * changes + 3, disable=not progress, desc="equivariance", unit="forward") as bar,
    ):

        def states(text: Tensor, arguments: dict[str, Tensor]) -> list[Tensor]:
            bar.update()
            return _states(model, layers, text, arguments)[0]

        free, causal = states(tokens, unmasked), states(tokens, {})
        vocabulary = len(next(probe.parts(model).token_embedding.parameters()))
        other = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % vocabulary], -1)
        if states(other, unmasked)[-1][:, 0].equal(free[-1][:, 0]):
            raise UnsupportedModelError(
                f"the first token of {type(model).__name__} does not see the last one, even without a mask"
            )
        for order in orders:
            shuffled_free, shuffled_causal = states(tokens[:, order], unmasked), states(tokens[:, order], {})
            for index in range(len(layers)):
                sums[0, index] += _relative_change(shuffled_free[index], free[index][:, order])
                sums[1, index] += _relative_change(shuffled_causal[index], causal[index][:, order])
                sums[2, index] += _relative_change(shuffled_causal[index][:, -1], causal[index][:, -1])
    rows = tuple(LayerEquivariance(index, *row) for index, row in enumerate((sums / changes).T.tolist()))
    return Equivariance(type(model).__name__, rows, length, changes)


def _require_removable_mask(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a model's attention masks even with a mask of zeros."""
    label = type(model).__name__
    if language_config(model.config)._attn_implementation == NAME:
        raise UnsupportedModelError(
            f"the mask of this {label} cannot be removed: it attends through the function of hf_posenc, which always "
            "masks later tokens, because no scheme has distances to them"
        )
    if BaseModel.of(model).hides_attention:
        raise UnsupportedModelError(f"the mask of {label} cannot be removed: its attention applies its own mask")


def _states(
    model: PreTrainedModel, layers: list[nn.Module], tokens: Tensor, arguments: dict[str, Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Run the model and return the outputs of all layers, and the last logits."""
    states: list[Tensor] = []
    with probe.outputs(enumerate(layers), lambda _, output: states.append(first(output))):
        logits = model(tokens, use_cache=False, logits_to_keep=1, **arguments).logits[:, -1]
    return states, logits


def _draw_orders(tokens: Tensor, change: str, count: int, seed: int) -> list[Tensor]:
    """Draw orders (T,) that change the text and leave the last token at its position."""
    generator = torch.Generator().manual_seed(seed)
    length = tokens.shape[1]
    context = tokens[:, :-1].cpu()
    differing = (context[:, 1:] != context[:, :-1]).any(0).nonzero().flatten()
    if not len(differing):
        raise ValueError("all tokens of the context are the same: their order cannot be changed")
    orders = []
    for _ in range(count):
        order = torch.arange(length)
        if change == "swap":
            left = int(differing[torch.randint(len(differing), (), generator=generator)])
            order[[left, left + 1]] = order[[left + 1, left]]
        else:
            while context.equal(context[:, order[:-1]]):
                order[:-1] = torch.randperm(length - 1, generator=generator)
        orders.append(order)
    return orders


@contextmanager
def _reordered_layer(layer: nn.Module, order: Tensor) -> Iterator[None]:
    """Reorder the inputs of one layer, and undo the order in its outputs."""
    inverse = order.argsort()

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, dict[str, object]]:
        if args:
            return (args[0][:, order], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"][:, order]}

    def after(layer: nn.Module, output: Tensor | tuple[Tensor, ...]) -> object:
        return (output[0][:, inverse], *output[1:]) if isinstance(output, tuple) else output[:, inverse]

    hook = layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    try:
        with probe.outputs([(layer, layer)], after):
            yield
    finally:
        hook.remove()


def _relative_change(changed: Tensor, original: Tensor) -> float:
    """Return the mean of `|changed - original| / |original|` over texts and tokens."""
    changed, original = changed.double(), original.double()
    return ((changed - original).norm(dim=-1) / original.norm(dim=-1).clamp(min=1e-30)).mean().item()


def _variation(changed: Tensor, original: Tensor) -> float:
    difference = changed.double().softmax(-1) - original.double().softmax(-1)
    return (difference.abs().sum(-1) / 2).mean().item()


def _divergence(changed: Tensor, original: Tensor) -> float:
    logs = original.double().log_softmax(-1)
    return (logs.exp() * (logs - changed.double().log_softmax(-1))).sum(-1).mean().item()
