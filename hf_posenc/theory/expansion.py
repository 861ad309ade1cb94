"""A model expanded in the position vectors of two tokens: Su's derivation, term by term.

Su Jianlin (2021, spaces.ac.cn/archives/8231) adds vectors `p_m` and `p_n` to the embeddings `x_m` and `x_n` of two
tokens. He expands the model to second order, around the embeddings without any position:

    f(x_m + p_m, x_n + p_n) ~ f + p_m . df/dx_m + p_n . df/dx_n                           (terms 1 to 3)
                            + 1/2 p_m . d2f/dx_m2 p_m + 1/2 p_n . d2f/dx_n2 p_n           (terms 4 and 5)
                            + p_m . d2f/dx_m dx_n p_n                                     (term 6)

Terms 1 to 5 hold at most one position each, so only the sixth can carry a relative one. He assumes that
`H = d2f/dx_m dx_n` is close to diagonal, and arrives at sinusoids. How close the expansion is to the model, and `H` to
a diagonal matrix, can be computed for every model that adds vectors.
"""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class Terms(Result):
    """The terms of one function `f` of two position vectors, float64: () of a number, (E,) of hidden states.

    Attributes:
        value: `f` without positions.
        slope_first: `p_m . df/dx_m`.
        slope_second: `p_n . df/dx_n`.
        curvature_first: `1/2 p_m . d2f/dx_m2 p_m`.
        curvature_second: `1/2 p_n . d2f/dx_n2 p_n`.
        mixed: `p_m . d2f/dx_m dx_n p_n`, the sixth term, the only one that can carry a relative position.
        residual: `f` with both vectors, minus these six.
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
        """Absolute value or norm of each term that contains a position, and of the residual."""
        return {each.name: getattr(self, each.name).norm().item() for each in fields(self)[1:]}

    @property
    def shares(self) -> dict[str, float]:
        """The sizes over their sum; 0 if positions change nothing."""
        total = sum(self.sizes.values())
        return {name: size / total if total else 0.0 for name, size in self.sizes.items()}


@dataclass(frozen=True)
class DiagonalTerm(Result):
    """The sixth term with a diagonal `H`, `sum_k H_kk p_mk p_nk`, in two parts.

    For each pair of coordinates (a, b), with `c = p_ma p_na` and `d = p_mb p_nb`,

        H_a c + H_b d = 1/2 (H_a + H_b) (c + d) + 1/2 (H_a - H_b) (c - d)

    For sinusoids of scale `s`, `c + d = s^2 cos((m - n) w)` and `c - d = s^2 cos((m + n) w)`, with the other sign if
    the sine comes first. The first part depends on the distance alone, the second on the places. A model with
    `H_a = H_b` in every pair sees distances only.

    Attributes:
        rows: coordinates that the parts are summed over, pair by pair.
        diagonal: (rows,) float64, `H_kk` of each row.
        relative: sum of the first part.
        absolute: sum of the second part.
        complete: whether these are all coordinates that belong to a pair.
        sinusoids: whether the vectors are sinusoids. Only then is `relative` a function of the distance. Other vectors
            have no pairs, and neighbouring coordinates are taken for them.
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
        """|relative| over |relative| + |absolute|; 0 if both are 0."""
        total = abs(self.relative) + abs(self.absolute)
        return abs(self.relative) / total if total else 0.0


@dataclass(frozen=True)
class MixedHessian(Result):
    """Rows of `H = d2f/dx_m dx_n`, the second-order interaction of two positions.

    Attributes:
        first: position m.
        second: position n.
        block: (rows, E) float64.
        rows: coordinates of `x_m` that the rows stand for.
        diagonal_share: squared diagonal entries over all squared entries of these rows; 1/E if there is no structure.
        with_positions: whether the model's vectors were added; then this is not `H` of Su's expansion.
        term: `p_m . H p_n` with the model's vectors. None if not all rows are known, if the model adds no vectors, or
            if several layers add vectors that differ.
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
        layers: terms for each layer, where `f` is the hidden state of the last token that was read, as it enters the
            layer.
        output: terms where `f` is the log-probability of the token behind those.
        diagonal_share: share of the diagonal in `H` for the output, see `MixedHessian`; None if no rows were computed.
        diagonal: the sixth term of the output if `H` were diagonal; None if no rows were computed, or several layers
            add vectors that differ.
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
        """Return a table of the sizes of all terms, and of the parts of the sixth with a diagonal `H`."""
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
    model: PreTrainedModel, tokens: Tensor, first: int, second: int, *, rows: int = 32, progress: bool = False
) -> Expansion:
    """Expand a model in the position vectors of two tokens, around the token embeddings alone.

    No other token has a position. A scheme that adds vectors in every layer adds those of the two tokens in each.
    Everything is computed in float64, on a copy if the model is in another dtype. Families that always compute norms or
    the softmax in float32 are only as exact as that. A model of the size of GPT-2 small takes 7 GiB and a minute of one
    core for 128 tokens.

    Args:
        model: a causal language model that adds position vectors, patched or stock.
        tokens: (T,) text, T >= 3; the last one is only predicted.
        first: m, 0 .. T - 2.
        second: n, 0 .. T - 2, another one.
        rows: number of coordinates, in evenly spread pairs, for which the Hessian is computed. Each takes one backward
            pass; 0 means none.
        progress: show a progress bar of the rows.

    Returns:
        Expansion.

    Raises:
        ValueError: for positions out of range or equal, more than one text, or a model that adds no vectors.
    """
    tokens = _check(tokens, first, second)
    label = type(model).__name__
    if not vectors.sources(model):
        raise ValueError(f"{label} adds no position vectors to its hidden states, and the expansion is in these")
    length = tokens.shape[1] - 1
    with vectors.in_float64(model) as wide, evaluation(wide), probe.dense_attention(wide):
        modules = vectors.sources(wide)
        places = torch.arange(length, device=tokens.device)[:, None]

        def run(scales: Tensor) -> list[Tensor]:
            weights = (places == first) * scales[0] + (places == second) * scales[1]
            with vectors.replaced(modules, lambda own: own * weights), recorded(probe.parts(wide).layers) as calls:
                value = _log_probability(wide, tokens)
            return [*(call.hidden_states[0, -1] for call in calls), value]

        found = _terms(run, tokens.device)
        block, own = None, _one_set(wide, tokens)
        if rows and own is not None:
            pairs = _pairs(modules[0], own.shape[-1])
            chosen = itertools.chain.from_iterable(_spread(pairs, max(1, rows // 2)))
            block = mixed_hessian(wide, tokens, first, second, rows=list(chosen), progress=progress)
    *layers, output = found
    share = None if block is None else block.diagonal_share
    diagonal = None if block is None or own is None else _diagonal(block, own, modules[0])
    return Expansion(label, first, second, length, tuple(layers), output, share, diagonal)


def _terms(run: Callable[[Tensor], list[Tensor]], device: torch.device) -> list[Terms]:
    """Return the terms of functions of two scales, at (0, 0).

    Derivatives of vectors come from backward passes as well. The values are summed with dummy weights, and the sum is
    differentiated by the scales. The result is linear in the dummy weights and is differentiated by those.
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
    found = []
    for value, moved, (first, second, first_twice, second_twice, mixed) in zip(
        values, both, zip(*derivatives, strict=True), strict=True
    ):
        parts = (value.detach().cpu(), first, second, first_twice / 2, second_twice / 2, mixed)
        found.append(Terms(*parts, residual=moved.cpu() - torch.stack(parts).sum(0)))
    return found


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
    """Differentiate a model by vectors that are added to its hidden states at two positions.

    The function is the log-probability, at the last position but one, of the last token. The vectors are added where
    the model adds its position vectors, in every layer if it does so, and to the token embeddings if it adds none.
    Everything is computed in float64, see `expansion`, with dense attention, which has second derivatives.

    Args:
        model: a causal language model, patched or stock.
        tokens: (T,) text, T >= 3.
        first: m, 0 .. T - 2.
        second: n, 0 .. T - 2, another one.
        rows: coordinates of `x_m`, or their number, evenly spread; each takes one backward pass. None means all E.
        with_positions: differentiate around the model with its position vectors, and not as Su does without any. For a
            model that adds none there is no difference.
        progress: show a progress bar.

    Returns:
        MixedHessian.

    Raises:
        ValueError: for positions out of range or equal, or more than one text.
    """
    tokens = _check(tokens, first, second)
    with vectors.in_float64(model) as wide, torch.enable_grad(), evaluation(wide), probe.dense_attention(wide):
        slope, at_second = _slope(wide, tokens, first, second, with_positions)
        size = len(slope)
        if rows is None or isinstance(rows, int):
            rows = _spread(range(size), size if rows is None else rows)
        shown = tqdm(rows, disable=not progress, desc="Hessian", unit="row")
        found = [torch.autograd.grad(slope[k], at_second, retain_graph=True, materialize_grads=True)[0] for k in shown]
        block = torch.stack(found).cpu()
        own = _one_set(wide, tokens) if list(rows) == list(range(size)) else None
        term = None if own is None else (own[first] @ block @ own[second]).item()
    return MixedHessian(first, second, block, tuple(rows), diagonal_share(block, rows), with_positions, term)


def _slope(
    model: PreTrainedModel, tokens: Tensor, first: int, second: int, with_positions: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the log-probability by the vector added at `first`, and the zero vector at `second`."""
    modules = vectors.sources(model)
    kept = float(with_positions or not modules)
    index = torch.arange(tokens.shape[1] - 1, device=tokens.device)[:, None]
    at: list[Tensor] = []

    def change(own: Tensor) -> Tensor:
        if not at:
            at.extend(own.new_zeros(own.shape[-1], requires_grad=True) for _ in range(2))
        return kept * own + (index == first) * at[0] + (index == second) * at[1]

    with vectors.replaced(modules or [probe.parts(model).token_embedding], change):
        value = _log_probability(model, tokens)
    return torch.autograd.grad(value, at[0], create_graph=True, materialize_grads=True)[0], at[1]


def _check(tokens: Tensor, first: int, second: int) -> Tensor:
    """Return tokens as (1, T); ValueError for several texts, or positions that are equal or out of range."""
    tokens = probe.check_tokens(tokens, 3)
    length = tokens.shape[1]
    if len(tokens) != 1:
        raise ValueError("one text at a time")
    if not (0 <= first < length - 1 and 0 <= second < length - 1) or first == second:
        raise ValueError(f"first and second must be two positions from 0 to {length - 2}, not {first} and {second}")
    return tokens


def _log_probability(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the log-probability of the last of tokens (1, T), ()."""
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=1).logits[0, -1]
    return logits.double().log_softmax(-1)[tokens[0, -1]]


def _one_set(model: PreTrainedModel, tokens: Tensor) -> Tensor | None:
    """Return the vectors that a model adds, (T - 1, E) float64; None if it adds none, or if layers add other ones."""
    found = list(vectors.added(model, tokens[:, :-1]).values())
    return found[0] if found and all(each.equal(found[0]) for each in found) else None


def _pairs(module: nn.Module, size: int) -> list[tuple[int, int]]:
    """Return the pairs of coordinates that belong to one wave; neighbours if the vectors are no sinusoids."""
    count = size // 2
    if _waves(module) and owner_of(module).scheme.layout == "split":
        return [(k, k + size - count) for k in range(count)]
    return [(2 * k, 2 * k + 1) for k in range(count)]


def _spread(items: Sequence[T], count: int) -> list[T]:
    """Return so many items, evenly spread, or all where there are not more."""
    count = min(count, len(items))
    return [items[k * len(items) // count] for k in range(count)]


def _waves(module: nn.Module) -> bool:
    """Return whether a module makes sinusoids."""
    return isinstance(owner_of(module), Waves)


def _diagonal(block: MixedHessian, own: Tensor, module: nn.Module) -> DiagonalTerm:
    """Return the two parts of the sixth term for rows that come in pairs (a, b)."""
    rows = list(block.rows)
    entries = block.block[range(len(rows)), rows]
    products = (own[block.first] * own[block.second])[rows]
    h_a, h_b = entries[0::2], entries[1::2]
    c, d = products[0::2], products[1::2]
    relative, absolute = (((h_a + h_b) * (c + d) / 2).sum().item(), ((h_a - h_b) * (c - d) / 2).sum().item())
    complete = len(rows) == own.shape[-1] // 2 * 2
    return DiagonalTerm(block.rows, entries, relative, absolute, complete, _waves(module))
