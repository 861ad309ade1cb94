"""A model expanded in the position vectors of two tokens: Su's derivation, term by term.

Su Jianlin (2021, spaces.ac.cn/archives/8231) adds vectors `p_m` and `p_n` to the embeddings `x_m` and `x_n` of two
tokens. He expands the model to second order around the embeddings without positions:

    f(x_m + p_m, x_n + p_n) ~ f + p_m . df/dx_m + p_n . df/dx_n                           (terms 1 to 3)
                            + 1/2 p_m . d2f/dx_m2 p_m + 1/2 p_n . d2f/dx_n2 p_n           (terms 4 and 5)
                            + p_m . d2f/dx_m dx_n p_n                                     (term 6)

Terms 1 to 5 contain at most one position each, so only the sixth can carry a relative position. Su assumes that
`H = d2f/dx_m dx_n` is close to diagonal, and derives sinusoids. This file computes how close the expansion is to a
model, and how close `H` is to a diagonal matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..analysis import probe
from ..core.measurement import Result
from ..core.modules import owner_of
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.watch import recorded
from ..schemes.sinusoidal import Waves
from . import vectors
from .tables import diagonal_share


@dataclass(frozen=True)
class Terms(Result):
    """The terms of one function `f` of two position vectors, float64: () if `f` is a number, (E,) for hidden states.

    Attributes:
        value: `f` without positions.
        slope_first: `p_m . df/dx_m`.
        slope_second: `p_n . df/dx_n`.
        curvature_first: `1/2 p_m . d2f/dx_m2 p_m`.
        curvature_second: `1/2 p_n . d2f/dx_n2 p_n`.
        mixed: `p_m . d2f/dx_m dx_n p_n`, the sixth term. Only this term can carry a relative position.
        residual: `f` with both vectors, minus the sum of the six terms.
    """

    value: Tensor
    slope_first: Tensor
    slope_second: Tensor
    curvature_first: Tensor
    curvature_second: Tensor
    mixed: Tensor
    residual: Tensor

    @property
    def sizes(self) -> dict[str, float]:
        """Name of a term that contains a position, or `residual` -> its absolute value or norm."""
        return {each.name: getattr(self, each.name).norm().item() for each in fields(self)[1:]}


@dataclass(frozen=True)
class DiagonalTerm(Result):
    """The sixth term of a diagonal `H`, `sum_k H_kk p_mk p_nk`, split into two parts.

    For each pair of coordinates (a, b), with `c = p_ma p_na` and `d = p_mb p_nb`,

        H_a c + H_b d = 1/2 (H_a + H_b) (c + d) + 1/2 (H_a - H_b) (c - d)

    For sinusoids of scale `s`, `c + d = s^2 cos((m - n) w)` and `c - d = s^2 cos((m + n) w)`; the sign of the latter
    changes if the sine comes first. The first part depends only on the distance, the second on both positions. A model
    with `H_a = H_b` in every pair depends only on distances.

    Attributes:
        rows: coordinates over which the parts are summed, pair by pair.
        diagonal: (rows,) float64, the entries `H_kk`.
        relative: sum of the first part.
        absolute: sum of the second part.
        sinusoids: whether the vectors are sinusoids. Only then `relative` is a function of the distance. Other vectors
            have no pairs, so neighbouring coordinates are taken as pairs.
    """

    rows: tuple[int, ...]
    diagonal: Tensor
    relative: float
    absolute: float
    sinusoids: bool


@dataclass(frozen=True)
class Expansion(Result):
    """A model expanded around its token embeddings.

    Attributes:
        layers: terms of the hidden state of the last token at the input of each layer.
        output: terms of the log-probability of the next token.
        hessian: (rows, E) float64, rows of `H` of the output, for the coordinates `diagonal.rows`.
        diagonal_share: squares of the diagonal entries in these rows, divided by the squares of all entries; 1/E
            without structure.
        diagonal: the sixth term of the output if `H` were diagonal. These three are None if no rows were asked for, or
            if layers add different vectors.
    """

    layers: tuple[Terms, ...]
    output: Terms
    hessian: Tensor | None = None
    diagonal_share: float | None = None
    diagonal: DiagonalTerm | None = None


def expansion(
    model: PreTrainedModel, tokens: Tensor, first: int, second: int, *, rows: int = 32, size: float = 1.0
) -> Expansion:
    """Expand a model in the position vectors of two tokens, around the embeddings without positions.

    All other tokens have no position. If a scheme adds vectors in every layer, the two tokens get theirs in every
    layer. The computation is in float64, on a copy if the model has another dtype. Families that compute norms or the
    softmax in float32 are less exact. The curvature of ReLUs is in kinks, which no derivative sees, so it is all in the
    residual. A model of the size of GPT-2 small takes 7 GiB, and a minute on one core for 128 tokens.

    Args:
        model: a causal language model that adds position vectors, patched or stock.
        tokens: (T,) text, T >= 3. The last token is only predicted.
        first: position m, 0 .. T - 2.
        second: position n, 0 .. T - 2, different from m.
        rows: number of rows of the Hessian, in evenly spread pairs of coordinates. A row takes one backward pass; 0
            means none.
        size: factor of the model's position vectors, above 0. Positions are a small perturbation if the residual
            shrinks faster than the sixth term from 1 downwards, and is already the smaller one at 1.

    Raises:
        ValueError: for equal positions or positions out of range, several texts, or a model that adds no vectors.

    """
    tokens, label = probe.check_tokens(tokens, 3), type(model).__name__
    length = tokens.shape[1] - 1
    if len(tokens) != 1 or not (0 <= first < length and 0 <= second < length) or first == second:
        raise ValueError(f"give one text, and two positions from 0 to {length - 1}, not {first} and {second}")
    if not vectors.sources(model):
        raise ValueError(f"{label} adds no position vectors to its hidden states: there is nothing to expand in")
    with vectors.in_float64(model) as wide, evaluation(wide), probe.dense_attention(wide):
        modules = vectors.sources(wide)
        positions = torch.arange(length, device=tokens.device)[:, None]

        def run(scales: Tensor) -> list[Tensor]:
            weights = size * ((positions == first) * scales[0] + (positions == second) * scales[1])
            with (
                vectors.replaced(modules, lambda added: added * weights),
                recorded(BaseModel.of(wide).modules.layers) as calls,
            ):
                value = _log_probability(wide, tokens)
            return [*(call.hidden_states[0, -1] for call in calls), value]

        *layers, output = _terms(run, tokens.device)
        by_layer = list(vectors.added(wide, tokens[:, :-1]).values())
        if not rows or not all(each.equal(by_layer[0]) for each in by_layer):
            return Expansion(tuple(layers), output)
        pairs = _wave_pairs(modules[0], by_layer[0].shape[-1])
        count = min(max(1, rows // 2), len(pairs))
        chosen = tuple(itertools.chain.from_iterable(pairs[k * len(pairs) // count] for k in range(count)))
        hessian = _hessian(wide, tokens, first, second, chosen)
    entries = hessian[range(len(chosen)), chosen]
    products = size**2 * (by_layer[0][first] * by_layer[0][second])[list(chosen)]
    h_a, h_b, c, d = entries[0::2], entries[1::2], products[0::2], products[1::2]
    relative, absolute = ((h_a + h_b) * (c + d) / 2).sum().item(), ((h_a - h_b) * (c - d) / 2).sum().item()
    diagonal = DiagonalTerm(chosen, entries, relative, absolute, isinstance(owner_of(modules[0]), Waves))
    return Expansion(tuple(layers), output, hessian, diagonal_share(hessian, chosen), diagonal)


def _terms(run: Callable[[Tensor], list[Tensor]], device: torch.device) -> list[Terms]:
    """Return the terms of functions of two scales, expanded at (0, 0).

    Backward passes differentiate only a number, and some functions return vectors. So all values are summed with dummy
    weights, and the sum is differentiated by the scales. Its derivative is linear in the dummy weights, so
    differentiating by these gives the derivatives of all values.
    """
    with torch.enable_grad():
        scales = torch.zeros(2, dtype=torch.float64, device=device, requires_grad=True)
        values = run(scales)
        dummies = [torch.zeros_like(value, requires_grad=True) for value in values]
        total = torch.stack([(dummy * value).sum() for dummy, value in zip(dummies, values, strict=True)]).sum()

        def gradient(value: Tensor, by: Tensor | list[Tensor]) -> tuple[Tensor, ...]:
            return torch.autograd.grad(value, by, create_graph=True, materialize_grads=True)

        (slope,) = gradient(total, scales)
        (by_first,), (by_second,) = gradient(slope[0], scales), gradient(slope[1], scales)
        derivatives = [
            [each.detach().cpu() for each in gradient(value, dummies)]
            for value in (slope[0], slope[1], by_first[0], by_second[1], by_first[1])
        ]
    with torch.no_grad():
        both = run(torch.ones_like(scales))
    terms = []
    for value, value_with_both, (first, second, first_twice, second_twice, mixed) in zip(
        values, both, zip(*derivatives, strict=True), strict=True
    ):
        parts = (value.detach().cpu(), first, second, first_twice / 2, second_twice / 2, mixed)
        terms.append(Terms(*parts, residual=value_with_both.cpu() - torch.stack(parts).sum(0)))
    return terms


@torch.enable_grad()
def _hessian(model: PreTrainedModel, tokens: Tensor, first: int, second: int, rows: tuple[int, ...]) -> Tensor:
    """Return rows of `H = d2f/dx_m dx_n`, (rows, E), of a model without positions that attends densely in float64.

    Zero vectors, by which the model is differentiated, take the place of its position vectors.
    """
    index = torch.arange(tokens.shape[1] - 1, device=tokens.device)[:, None]
    zeros: list[Tensor] = []

    def change(output: Tensor) -> Tensor:
        if not zeros:
            zeros.extend(output.new_zeros(output.shape[-1], requires_grad=True) for _ in range(2))
        return 0.0 * output + (index == first) * zeros[0] + (index == second) * zeros[1]

    with vectors.replaced(vectors.sources(model), change):
        value = _log_probability(model, tokens)
    (gradient,) = torch.autograd.grad(value, zeros[0], create_graph=True, materialize_grads=True)
    by_second = [torch.autograd.grad(gradient[k], zeros[1], retain_graph=True, materialize_grads=True)[0] for k in rows]
    return torch.stack(by_second).cpu()


def _log_probability(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the log-probability of the last token of a text (1, T), shape ()."""
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits.double().log_softmax(-1)[tokens[0, -1]]


def _wave_pairs(module: nn.Module, size: int) -> list[tuple[int, int]]:
    """Return the pairs of coordinates that share a wave. Vectors that are no sinusoids get pairs of neighbours."""
    count = size // 2
    if isinstance(owner_of(module), Waves) and owner_of(module).scheme.layout == "split":
        return [(k, k + size - count) for k in range(count)]
    return [(2 * k, 2 * k + 1) for k in range(count)]
