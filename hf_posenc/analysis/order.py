"""Measure how much the order of the context matters: shuffle it, and compare hidden states.

Attention without positions is a sum over an unordered set, `softmax(q K^T) V`. So in one such layer the output of the
last token does not depend on the order of the others. A causal stack of such layers does depend on it. Under the mask
the earlier tokens see sets that depend on the order, and so the order reaches the layers above. Without the mask the
whole stack is equivariant: shuffled tokens have the same hidden states in shuffled order.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.measurement import Result
from ..families.base import language_config
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.watch import first, recorded
from ..transformers_glue import NAME
from . import probe


@dataclass(frozen=True)
class LayerEquivariance(Result):
    """How far the output of one layer is from equivariance.

    The numbers are relative changes of a token's hidden state when all tokens but the last are shuffled. A token is
    compared with itself at its new position. An equivariant layer has 0, up to rounding.

    Attributes:
        index: index of the layer.
        own: change of the last token with the causal mask, if only the inputs of this layer are shuffled.
        unmasked: mean over tokens, without a mask; None if the mask cannot be removed.
        causal: mean over tokens, with the causal mask.
        causal_last: change of the last token with the causal mask. It sees the same tokens in any order.
    """

    index: int
    own: float
    unmasked: float | None
    causal: float
    causal_last: float


@dataclass(frozen=True)
class Equivariance(Result):
    """How far a model is from equivariance, with the causal mask and without, averaged over texts and orders.

    Attributes:
        label: the model's class.
        layers: one entry per layer.
        total_variation: total variation (0 .. 1) of the next-token distribution, with the causal mask.
    """

    label: str
    layers: tuple[LayerEquivariance, ...]
    total_variation: float

    def __str__(self) -> str:
        """Return a table."""
        lines = [
            f"{self.label}: change of the hidden state of a token among shuffled ones",
            f"  {'layer':<6} {'own':>10} {'unmasked':>10} {'causal':>10} {'causal, last token':>19}",
        ]
        for layer in self.layers:
            numbers = layer.own, layer.unmasked, layer.causal, layer.causal_last
            own, unmasked, causal, last = ("-" if number is None else f"{number:.2e}" for number in numbers)
            lines.append(f"  {layer.index:<6} {own:>10} {unmasked:>10} {causal:>10} {last:>19}")
        return "\n".join(lines)


@torch.no_grad()
def equivariance(model: PreTrainedModel, tokens: Tensor, *, changes: int = 4, seed: int = 0) -> Equivariance:
    """Shuffle a text and measure how far the hidden states are from being shuffled in the same way.

    The last token stays at its position. Without the mask a model without positions is equivariant, unless it has
    recurrent layers. Removing the mask also removes sliding windows. The mask stays if the scheme has no distances to
    later tokens, or if the family's attention applies its own mask.

    Args:
        model: a causal language model, patched or stock, best in float32 or float64.
        tokens: (T,) or (B, T) text without padding, T >= 3.
        changes: number of random orders.
        seed: seed of the random orders.

    Returns:
        Equivariance.

    Raises:
        ValueError: for under 3 tokens, or a context whose tokens are all the same.
    """
    tokens = probe.check_tokens(tokens, 3)
    layers = BaseModel.of(model).modules.layers
    orders = _draw_orders(tokens, changes, seed)
    sums = torch.zeros(3, len(layers), dtype=torch.float64)
    variation = 0.0
    with evaluation(model):
        unmasked = _unmasked(model, layers, tokens, orders)
        with recorded(layers) as calls:
            states, logits = _states(model, layers, tokens, {})
        for order in orders:
            shuffled, shuffled_logits = _states(model, layers, tokens[:, order], {})
            variation += (shuffled_logits.softmax(-1) - logits.softmax(-1)).abs().sum(-1).mean().item() / 2
            for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
                own = first(layer(call.hidden_states[:, order], *call.args, **call.kwargs))
                sums[0, index] += _relative_change(own[:, -1], states[index][:, -1])
                sums[1, index] += _relative_change(shuffled[index], states[index][:, order])
                sums[2, index] += _relative_change(shuffled[index][:, -1], states[index][:, -1])
    rows = zip(unmasked, (sums / changes).T.tolist(), strict=True)
    measured = tuple(
        LayerEquivariance(index, own, free, causal, last) for index, (free, (own, causal, last)) in enumerate(rows)
    )
    return Equivariance(type(model).__name__, measured, variation / changes)


def _unmasked(
    model: PreTrainedModel, layers: list[nn.Module], tokens: Tensor, orders: list[Tensor]
) -> list[float] | list[None]:
    """Return the change of each layer's output without a mask; Nones if the mask cannot be removed."""
    none, length = [None] * len(layers), tokens.shape[1]
    base, stock = BaseModel.of(model), language_config(model.config)._attn_implementation
    if stock == NAME or base.hides_attention:
        return none
    base.require_equal_attention("remove its mask")
    arguments = {
        "attention_mask": torch.zeros(1, 1, length, length, dtype=model.dtype, device=tokens.device),
        "position_ids": torch.arange(length, device=tokens.device)[None],
    }
    vocabulary = len(next(base.modules.token_embedding.parameters()))
    other = torch.cat([tokens[:, :-1], (tokens[:, -1:] + 1) % vocabulary], -1)
    sums = torch.zeros(len(layers), dtype=torch.float64)
    with ExitStack() as stack:
        model.set_attn_implementation("eager")
        stack.callback(model.set_attn_implementation, stock)
        states, _ = _states(model, layers, tokens, arguments)
        # The first token sees the last one only if the mask is really gone.
        if _states(model, layers, other, arguments)[0][-1][:, 0].equal(states[-1][:, 0]):
            return none
        for order in orders:
            shuffled, _ = _states(model, layers, tokens[:, order], arguments)
            for index in range(len(layers)):
                sums[index] += _relative_change(shuffled[index], states[index][:, order])
    return list((sums / len(orders)).tolist())


def _states(
    model: PreTrainedModel, layers: list[nn.Module], tokens: Tensor, arguments: dict[str, Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Run the model and return the outputs of all layers, and the last logits."""
    states: list[Tensor] = []
    with ExitStack() as hooks:
        for layer in layers:
            handle = layer.register_forward_hook(lambda layer, args, output: states.append(first(output)))
            hooks.callback(handle.remove)
        logits = model(tokens, use_cache=False, logits_to_keep=1, **arguments).logits[:, -1]
    return states, logits.double()


def _draw_orders(tokens: Tensor, count: int, seed: int) -> list[Tensor]:
    """Draw orders (T,) that change the text and leave the last token at its position."""
    generator = torch.Generator().manual_seed(seed)
    length, context = tokens.shape[1], tokens[:, :-1].cpu()
    if not (context != context[:, :1]).any():
        raise ValueError("all tokens of the context are the same: their order cannot be changed")
    orders: list[Tensor] = []
    while len(orders) < count:
        order = torch.cat([torch.randperm(length - 1, generator=generator), torch.tensor([length - 1])])
        if not context.equal(context[:, order[:-1]]):
            orders.append(order)
    return orders


def _relative_change(changed: Tensor, original: Tensor) -> float:
    """Return the mean of `|changed - original| / |original|` over texts and tokens."""
    changed, original = changed.double(), original.double()
    return ((changed - original).norm(dim=-1) / original.norm(dim=-1).clamp(min=1e-30)).mean().item()
