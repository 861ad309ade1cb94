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
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..analysis import probe
from ..live.eval_mode import evaluation
from ..live.watch import recorded
from ..measurement import Result
from ..modules import owner_of
from ..schemes.sinusoidal import Waves
from . import vectors
from .statistics import diagonal_share

T = TypeVar("T")

KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU)
"""Activations whose second derivative is 0 wherever it exists."""


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

    derived = ("shares",)

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

    @property
    def shares(self) -> dict[str, float]:
        """The sizes divided by their sum; 0 if positions change nothing."""
        total = sum(self.sizes.values())
        return {name: size / total if total else 0.0 for name, size in self.sizes.items()}


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
        complete: whether `rows` are all coordinates that belong to a pair.
        sinusoids: whether the vectors are sinusoids. Only then `relative` is a function of the distance. Other vectors
            have no pairs, so neighbouring coordinates are taken as pairs.
    """

    derived = ("relative_share",)

    rows: tuple[int, ...]
    diagonal: Tensor
    relative: float
    absolute: float
    complete: bool
    sinusoids: bool

    @property
    def relative_share(self) -> float:
        """`|relative| / (|relative| + |absolute|)`; 0 if both are 0."""
        total = abs(self.relative) + abs(self.absolute)
        return abs(self.relative) / total if total else 0.0


@dataclass(frozen=True)
class MixedHessian(Result):
    """Rows of `H = d2f/dx_m dx_n`, the second-order interaction of two positions.

    Attributes:
        first: position m.
        second: position n.
        block: (rows, E) float64, the computed rows of `H`.
        rows: coordinates of `x_m` that the rows belong to.
        diagonal_share: squares of the diagonal entries, divided by the squares of all entries; 1/E without structure.
        with_positions: whether the model's vectors were added. If so, this is not the `H` of Su's expansion.
        term: `p_m . H p_n` with the model's vectors. None if some rows were not computed, if the model adds no vectors,
            or if layers add different vectors.
    """

    first: int
    second: int
    block: Tensor
    rows: tuple[int, ...]
    diagonal_share: float
    with_positions: bool
    term: float | None


@dataclass(frozen=True)
class Expansion(Result):
    """A model expanded around its token embeddings.

    Attributes:
        label: the model's class.
        first: position m.
        second: position n.
        tokens: number of tokens that the model read.
        layers: terms of the hidden state of the last token at the input of each layer.
        output: terms of the log-probability of the next token.
        diagonal_share: `MixedHessian.diagonal_share` of the output; None if no rows were computed.
        diagonal: the sixth term of the output if `H` were diagonal; None if no rows were computed, or if layers add
            different vectors.
    """

    label: str
    first: int
    second: int
    tokens: int
    layers: tuple[Terms, ...]
    output: Terms
    diagonal_share: float | None
    diagonal: DiagonalTerm | None

    def __str__(self) -> str:
        """Return a table of the sizes of all terms, and the two parts of the sixth term."""
        names = ("p_m f_m", "p_n f_n", "p_m f_mm p_m/2", "p_n f_nn p_n/2", "p_m f_mn p_n", "residual")
        lines = [
            f"{self.label}, m = {self.first}, n = {self.second}, {self.tokens} tokens read: sizes of the terms",
            f"  {'of':<14}" + "".join(f"{name:>16}" for name in names),
        ]
        rows = [(f"into layer {index}", each) for index, each in enumerate(self.layers)] + [("output", self.output)]
        for name, terms in rows:
            lines.append(f"  {name:<14}" + "".join(f"{size:>16.2e}" for size in terms.sizes.values()))
        if self.diagonal is not None:
            part = f"relative {self.diagonal.relative:.2e}, absolute {self.diagonal.absolute:.2e}"
            lines.append(f"  of {len(self.diagonal.rows)} diagonal entries of the Hessian: {part}")
        if self.diagonal_share is not None:
            lines.append(f"  share of the diagonal in the Hessian: {self.diagonal_share:.2g}")
        return "\n".join(lines)


def expansion(
    model: PreTrainedModel,
    tokens: Tensor,
    first: int,
    second: int,
    *,
    rows: int = 32,
    size: float = 1.0,
    progress: bool = False,
) -> Expansion:
    """Expand a model in the position vectors of two tokens, around the embeddings without positions.

    All other tokens have no position. If a scheme adds vectors in every layer, the two tokens get theirs in every
    layer. The computation is in float64, on a copy if the model has another dtype. Families that compute norms or the
    softmax in float32 are less exact. A model of the size of GPT-2 small takes 7 GiB, and a minute on one core for 128
    tokens.

    Args:
        model: a causal language model that adds position vectors, patched or stock.
        tokens: (T,) text, T >= 3. The last token is only predicted.
        first: position m, 0 .. T - 2.
        second: position n, 0 .. T - 2, different from m.
        rows: number of rows of the Hessian, in evenly spread pairs of coordinates. A row takes one backward pass; 0
            means none.
        size: factor of the model's position vectors. Positions are a small perturbation if the residual shrinks faster
            than the sixth term from 1 downwards, and is already the smaller one at 1.
        progress: show a progress bar of the rows.

    Returns:
        Expansion.

    Raises:
        ValueError: for equal positions or positions out of range, several texts, a model that adds no vectors, or a
            size that is not positive and finite.

    Warns:
        UserWarning: if the model has ReLUs. Their curvature is in kinks, which no derivative sees, so it is all in the
            residual, whatever the size of the vectors.
    """
    tokens = _check_arguments(tokens, first, second)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 < size < float("inf"):
        raise ValueError(f"size must be a positive and finite number, not {size!r}")
    _warn_of_kinks(model)
    label = type(model).__name__
    if not vectors.sources(model):
        raise ValueError(f"{label} adds no position vectors to its hidden states: there is nothing to expand in")
    length = tokens.shape[1] - 1
    with vectors.in_float64(model) as wide, evaluation(wide), probe.dense_attention(wide):
        modules = vectors.sources(wide)
        positions = torch.arange(length, device=tokens.device)[:, None]

        def run(scales: Tensor) -> list[Tensor]:
            weights = size * ((positions == first) * scales[0] + (positions == second) * scales[1])
            with vectors.replaced(modules, lambda added: added * weights), recorded(probe.parts(wide).layers) as calls:
                value = _log_probability(wide, tokens)
            return [*(call.hidden_states[0, -1] for call in calls), value]

        terms = _terms(run, tokens.device)
        block, common = None, _common_vectors(wide, tokens)
        if rows and common is not None:
            pairs = _wave_pairs(modules[0], common.shape[-1])
            chosen = itertools.chain.from_iterable(_evenly_spread(pairs, max(1, rows // 2)))
            block = _hessian(wide, tokens, first, second, list(chosen), progress=progress)
    *layers, output = terms
    share = None if block is None else block.diagonal_share
    diagonal = None if block is None or common is None else _diagonal(block, size * common, modules[0])
    return Expansion(label, first, second, length, tuple(layers), output, share, diagonal)


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


def mixed_hessian(
    model: PreTrainedModel,
    tokens: Tensor,
    first: int,
    second: int,
    *,
    rows: int | Sequence[int] | None = 64,
    with_positions: bool = False,
    progress: bool = False,
) -> MixedHessian:
    """Differentiate a model by vectors that are added at two positions, once by each.

    The differentiated function is the log-probability of the last token. The vectors are added where the model adds its
    position vectors, also in every layer. If it adds none, they are added to the token embeddings. The computation is
    in float64, see `expansion`, with dense attention, which has second derivatives.

    Args:
        model: a causal language model, patched or stock.
        tokens: (T,) text, T >= 3.
        first: position m, 0 .. T - 2.
        second: position n, 0 .. T - 2, different from m.
        rows: coordinates of `x_m`, or a number of evenly spread ones. A row takes one backward pass. None means all E.
        with_positions: differentiate at the embeddings with their position vectors. Su's expansion is without. It makes
            no difference for a model that adds no vectors.
        progress: show a progress bar.

    Returns:
        MixedHessian.

    Raises:
        ValueError: for equal positions or positions out of range, or several texts.

    Warns:
        UserWarning: if the model has ReLUs, see `expansion`.
    """
    tokens = _check_arguments(tokens, first, second)
    _warn_of_kinks(model)
    return _hessian(model, tokens, first, second, rows, with_positions, progress)


def _hessian(
    model: PreTrainedModel,
    tokens: Tensor,
    first: int,
    second: int,
    rows: int | Sequence[int] | None,
    with_positions: bool = False,
    progress: bool = False,
) -> MixedHessian:
    """Differentiate by both positions, see `mixed_hessian`; the tokens are checked, (1, T)."""
    with vectors.in_float64(model) as wide, torch.enable_grad(), evaluation(wide), probe.dense_attention(wide):
        gradient, at_second = _gradient_at_first(wide, tokens, first, second, with_positions)
        size = len(gradient)
        if rows is None or isinstance(rows, int):
            rows = _evenly_spread(range(size), size if rows is None else rows)
        bar = tqdm(rows, disable=not progress, desc="Hessian", unit="row")
        block = torch.stack(
            [torch.autograd.grad(gradient[k], at_second, retain_graph=True, materialize_grads=True)[0] for k in bar]
        ).cpu()
        common = _common_vectors(wide, tokens) if list(rows) == list(range(size)) else None
        term = None if common is None else (common[first] @ block @ common[second]).item()
    return MixedHessian(first, second, block, tuple(rows), diagonal_share(block, rows), with_positions, term)


def _gradient_at_first(
    model: PreTrainedModel, tokens: Tensor, first: int, second: int, with_positions: bool
) -> tuple[Tensor, Tensor]:
    """Add zero vectors at both positions, and return the gradient by the first vector, and the second vector."""
    modules = vectors.sources(model)
    factor = float(with_positions or not modules)
    index = torch.arange(tokens.shape[1] - 1, device=tokens.device)[:, None]
    zeros: list[Tensor] = []

    def change(output: Tensor) -> Tensor:
        if not zeros:
            zeros.extend(output.new_zeros(output.shape[-1], requires_grad=True) for _ in range(2))
        return factor * output + (index == first) * zeros[0] + (index == second) * zeros[1]

    with vectors.replaced(modules or [probe.parts(model).token_embedding], change):
        value = _log_probability(model, tokens)
    return torch.autograd.grad(value, zeros[0], create_graph=True, materialize_grads=True)[0], zeros[1]


def _check_arguments(tokens: Tensor, first: int, second: int) -> Tensor:
    """Return tokens as (1, T). Raise ValueError for several texts, equal positions or positions out of range."""
    tokens = probe.check_tokens(tokens, 3)
    length = tokens.shape[1]
    if len(tokens) != 1:
        raise ValueError("one text at a time")
    if not (0 <= first < length - 1 and 0 <= second < length - 1) or first == second:
        raise ValueError(f"first and second must be two positions from 0 to {length - 2}, not {first} and {second}")
    return tokens


def _warn_of_kinks(model: PreTrainedModel) -> None:
    """Warn if a model has activations that are linear but for kinks: their second derivatives are 0 or do not exist."""
    kinked = sorted({type(module).__name__ for module in model.modules() if isinstance(module, KINKED)})
    if kinked:
        warnings.warn(
            f"{type(model).__name__} has {', '.join(kinked)} activations, whose curvature no derivative sees: second "
            "derivatives leave it out, and the residual of an expansion holds it. Use a model with smooth activations",
            stacklevel=3,
        )


def _log_probability(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the log-probability of the last token of a text (1, T), shape ()."""
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits.double().log_softmax(-1)[tokens[0, -1]]


def _common_vectors(model: PreTrainedModel, tokens: Tensor) -> Tensor | None:
    """Return the vectors that a model adds, (T - 1, E) float64; None if it adds none or layers add different ones."""
    by_layer = list(vectors.added(model, tokens[:, :-1]).values())
    return by_layer[0] if by_layer and all(each.equal(by_layer[0]) for each in by_layer) else None


def _wave_pairs(module: nn.Module, size: int) -> list[tuple[int, int]]:
    """Return the pairs of coordinates that share a wave. Vectors that are no sinusoids get pairs of neighbours."""
    count = size // 2
    if _makes_sinusoids(module) and owner_of(module).scheme.layout == "split":
        return [(k, k + size - count) for k in range(count)]
    return [(2 * k, 2 * k + 1) for k in range(count)]


def _evenly_spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` evenly spread items, or all items if there are fewer."""
    count = min(count, len(items))
    return [items[k * len(items) // count] for k in range(count)]


def _makes_sinusoids(module: nn.Module) -> bool:
    """Return whether a module makes sinusoids."""
    return isinstance(owner_of(module), Waves)


def _diagonal(block: MixedHessian, added: Tensor, module: nn.Module) -> DiagonalTerm:
    """Return the two parts of the sixth term, for vectors (T, E) and rows of the Hessian in pairs (a, b)."""
    rows = list(block.rows)
    entries = block.block[range(len(rows)), rows]
    products = (added[block.first] * added[block.second])[rows]
    h_a, h_b = entries[0::2], entries[1::2]
    c, d = products[0::2], products[1::2]
    relative, absolute = (((h_a + h_b) * (c + d) / 2).sum().item(), ((h_a - h_b) * (c - d) / 2).sum().item())
    complete = len(rows) == added.shape[-1] // 2 * 2
    return DiagonalTerm(block.rows, entries, relative, absolute, complete, _makes_sinusoids(module))
