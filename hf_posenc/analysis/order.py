"""How much the order of the context matters: swap or shuffle it and measure what changes for the last token.

Attention without positions is a sum over an unordered set, `softmax(q K^T) V`. One such layer therefore gives the last
token exactly the same output in whatever order it reads the others. A causal stack without positions is not blind:
earlier tokens see sets that depend on the order, and the mask alone leaks it to the layers above. Without the mask a
whole stack is equivariant: shuffled tokens give the same hidden states, shuffled.
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
    """Effect of another order of the context on one layer.

    Attributes:
        index: index of the layer.
        own: relative change of the last token's output when only this layer's other inputs change places.
        accumulated: relative change of the last token's hidden state after this layer when the tokens of the text
            change places.
        next_token: total variation (0 .. 1) of the model's next-token distribution when this layer alone reads the
            other order, and everything after it sees the tokens in their places again.
    """

    index: int
    own: float
    accumulated: float
    next_token: float


@dataclass(frozen=True)
class OrderSensitivity(Result):
    """Effect of another order of the context on a model, averaged over texts and changes.

    Attributes:
        label: the model's class.
        change: `swap` or `shuffle`.
        layers: one entry per layer.
        total_variation: total variation (0 .. 1) of the next-token distribution when the tokens of the text change
            places.
        kl: Kullback-Leibler divergence of the changed from the original next-token distribution, nats.
        tokens: number of tokens in a text.
        changes: number of swaps or shuffles averaged over.
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
            f"{self.label}, {self.change}: next-token distribution moves by {self.total_variation:.3g} "
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
    """Change the order of the context and measure what reaches the last token, layer by layer.

    The last token stays in its place. Costs `changes * (layers + 2)` short forward passes. Where a sliding window is
    shorter than the text, another order also changes which tokens the last one sees.

    Args:
        model: a causal language model, patched or stock, best in float32 or float64.
        tokens: (T,) or (B, T) text without padding, T >= 3.
        change: `swap` two neighbouring tokens of the context that differ, or `shuffle` all of it.
        changes: number of swaps or shuffles, drawn at random.
        seed: seed of the draw.
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
        for order in _orders(tokens, change, changes, seed):
            moved_states, moved = _states(model, layers, tokens[:, order], {})
            bar.update()
            variation += _variation(moved, logits)
            divergence += _divergence(moved, logits)
            for index, layer in enumerate(layers):
                own, alone = _layer_reordered(model, layer, calls[index], tokens, order)
                sums[0, index] += _change(own, states[index][:, -1])
                sums[1, index] += _change(moved_states[index][:, -1], states[index][:, -1])
                sums[2, index] += _variation(alone, logits)
                bar.update()
    means = (sums / changes).T.tolist()
    rows = tuple(LayerOrder(index, *row) for index, row in enumerate(means))
    moves = variation / changes, divergence / changes
    return OrderSensitivity(type(model).__name__, change, rows, *moves, tokens.shape[1], changes)


def _layer_reordered(
    model: PreTrainedModel, layer: nn.Module, call: LayerCall, tokens: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the last token's output of a layer that reads another order, and the model's logits if no other does."""
    own = first(layer(call.hidden_states[:, order], *call.args, **call.kwargs))[:, -1]
    with _reordered(layer, order):
        return own, model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]


@dataclass(frozen=True)
class LayerEquivariance(Result):
    """Distance of the hidden states behind one layer from equivariance.

    The numbers are relative changes of a token's hidden state when all but the last token of the text change places. A
    token is compared with itself, wherever it is now. 0, up to rounding, is equivariant.

    Attributes:
        index: index of the layer.
        unmasked: mean over tokens, when every token sees every other.
        causal: mean over tokens, when each sees those before it.
        causal_last: of the last token, which sees the same tokens in either order.
    """

    index: int
    unmasked: float
    causal: float
    causal_last: float


@dataclass(frozen=True)
class Equivariance(Result):
    """Equivariance of a stack of layers, with the causal mask and without; means over texts and orders.

    Attributes:
        label: the model's class.
        layers: one entry per layer.
        tokens: number of tokens in a text.
        changes: number of orders averaged over.
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
    """Shuffle a text and measure how far the hidden states behind each layer are from being shuffled alike.

    The last token stays in its place. Costs `2 changes + 3` forward passes with dense attention. Without the mask a
    model without positions is equivariant, unless some of its layers read tokens one after the other instead of
    attending. Sliding windows go with the mask.

    Args:
        model: a causal language model, patched or stock, best in float32 or float64.
        tokens: (T,) or (B, T) text without padding, T >= 3.
        changes: number of orders, drawn at random.
        seed: seed of the draw.
        progress: show a progress bar.

    Returns:
        Equivariance.

    Raises:
        ValueError: for under 3 tokens, or a context whose tokens are all the same.
        UnsupportedModelError: if the mask cannot be taken away: the scheme has no distances to tokens that come later,
            or the family's attention masks by itself.
    """
    tokens = probe.check_tokens(tokens, 3)
    _require_removable_mask(model)
    layers, length = probe.parts(model).layers, tokens.shape[1]
    unmasked = {
        "attention_mask": torch.zeros(1, 1, length, length, dtype=model.dtype, device=tokens.device),
        "position_ids": torch.arange(length, device=tokens.device)[None],
    }
    sums = torch.zeros(3, len(layers), dtype=torch.float64)
    orders = _orders(tokens, "shuffle", changes, seed)
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
                f"the first token of {type(model).__name__} does not see the last one, mask or no mask"
            )
        for order in orders:
            moved, masked = states(tokens[:, order], unmasked), states(tokens[:, order], {})
            for index in range(len(layers)):
                sums[0, index] += _change(moved[index], free[index][:, order])
                sums[1, index] += _change(masked[index], causal[index][:, order])
                sums[2, index] += _change(masked[index][:, -1], causal[index][:, -1])
    rows = tuple(LayerEquivariance(index, *row) for index, row in enumerate((sums / changes).T.tolist()))
    return Equivariance(type(model).__name__, rows, length, changes)


def _require_removable_mask(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a model masks in its attention, where a mask of zeros does not reach."""
    label = type(model).__name__
    if language_config(model.config)._attn_implementation == NAME:
        raise UnsupportedModelError(
            f"the mask of this {label} cannot be taken away: it attends through the function of hf_posenc, which shows "
            "no token those that come later, since no scheme has distances to them"
        )
    if BaseModel.of(model).hides_attention:
        raise UnsupportedModelError(f"the mask of {label} cannot be taken away: its attention masks by itself")


def _states(
    model: PreTrainedModel, layers: list[nn.Module], tokens: Tensor, arguments: dict[str, Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Run the model and return the hidden states behind each layer, and the last logits."""
    states: list[Tensor] = []
    with probe.outputs(enumerate(layers), lambda _, output: states.append(first(output))):
        logits = model(tokens, use_cache=False, logits_to_keep=1, **arguments).logits[:, -1]
    return states, logits


def _orders(tokens: Tensor, change: str, count: int, seed: int) -> list[Tensor]:
    """Return orders (T,) that change the text and leave the last token in its place."""
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
            place = int(differing[torch.randint(len(differing), (), generator=generator)])
            order[[place, place + 1]] = order[[place + 1, place]]
        else:
            while context.equal(context[:, order[:-1]]):
                order[:-1] = torch.randperm(length - 1, generator=generator)
        orders.append(order)
    return orders


@contextmanager
def _reordered(layer: nn.Module, order: Tensor) -> Iterator[None]:
    """Let one layer read its inputs in another order, and put its outputs back in place."""
    back = order.argsort()

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, dict[str, object]]:
        if args:
            return (args[0][:, order], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"][:, order]}

    def after(layer: nn.Module, output: Tensor | tuple[Tensor, ...]) -> object:
        return (output[0][:, back], *output[1:]) if isinstance(output, tuple) else output[:, back]

    hook = layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    try:
        with probe.outputs([(layer, layer)], after):
            yield
    finally:
        hook.remove()


def _change(changed: Tensor, original: Tensor) -> float:
    """Return the mean over texts, and tokens, of |changed - original| / |original|."""
    changed, original = changed.double(), original.double()
    return ((changed - original).norm(dim=-1) / original.norm(dim=-1).clamp(min=1e-30)).mean().item()


def _variation(changed: Tensor, original: Tensor) -> float:
    difference = changed.double().softmax(-1) - original.double().softmax(-1)
    return (difference.abs().sum(-1) / 2).mean().item()


def _divergence(changed: Tensor, original: Tensor) -> float:
    logs = original.double().log_softmax(-1)
    return (logs.exp() * (logs - changed.double().log_softmax(-1))).sum(-1).mean().item()
