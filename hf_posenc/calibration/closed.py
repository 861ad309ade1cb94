"""Closed forms: what a base's positions do to scores on average, put into a scheme's parameters and into queries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Call
from ..forms import Bias, ClippedVectors, Factors, RelativeKeys, Slopes
from ..patching.plan import BaseModel
from ..upstream.rotary import by_pair
from .maps import parts, rows_of

TAIL = 4
"""A curve is fitted to this many times the distances that were seen; what was not seen goes on as it ended."""

TAIL_WEIGHT = 1e-3
"""Weight of a distance that was not seen, relative to the mean weight of those that were."""

STEPS = 100
"""Of the search for a scheme's parameters, at most; most end before."""

RIDGE = 1e-4
"""Added to the mean square of each number of the queries, relative to their average, before it is inverted."""


@dataclass
class Averages:
    """Sums over pairs of a query and a visible key, by distance, of one layer.

    Attributes:
        pairs: (T,) number of pairs.
        difference: (H, T) sum of the base's score minus `q . k` of the scheme's queries and keys.
        product: (H, T) sum of the base's score times that `q . k`, clipped at 0 if the scheme clips it; for factors.
        square: (H, T) sum of its squares; for factors.
        mass: (H, T) sum of the base's attention weights, if it is asked for.
        by_query: (H, T, D + 1) sum of that difference times `(scaling q, vector_scaling)`; None unless it is asked for.
        moment: (H, D + 1, D + 1) sum of the products of these vectors with themselves, or None.
    """

    pairs: Tensor
    difference: Tensor
    product: Tensor
    square: Tensor
    mass: Tensor
    by_query: Tensor | None = None
    moment: Tensor | None = None

    @classmethod
    def none(cls, heads: int, distances: int, device: torch.device, *, size: int | None = None) -> Averages:
        """Return sums over nothing.

        Args:
            heads: H.
            distances: T.
            device: where they are summed.
            size: D, where sums by query are asked for.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        found = cls(zeros(distances), *(zeros(heads, distances) for _ in range(4)))
        if size is not None:
            found.by_query = zeros(heads, distances, size + 1)
            found.moment = zeros(heads, size + 1, size + 1)
        return found

    @torch.no_grad()
    def add(self, base: Call, scheme: Call, *, factors: Factors | None = None, mass: bool = True) -> None:
        """Add the pairs of a batch.

        Args:
            base: what the base's attention was asked.
            scheme: what the scheme's is on the same hidden states.
            factors: the scheme's form, if it is one of factors: without, `product` and `square` are not summed.
            mass: whether to sum the base's attention weights.
        """
        for part in parts(base):
            theirs, ours = rows_of(base, part), rows_of(scheme, part, content=True)
            shape = theirs.scores.shape
            visible = theirs.visible.expand(shape)
            at = theirs.distance.expand(shape).long()

            def by_distance(values: Tensor, at: Tensor = at, visible: Tensor = visible) -> Tensor:
                """(B, H|1, R, L) -> (B, H|1, R, T). A query has each distance once, as a rule."""
                heads = slice(0, values.shape[1])
                sums = values.new_zeros(*values.shape[:-1], len(self.pairs))
                return sums.scatter_add_(-1, at[:, heads], values.masked_fill(~visible[:, heads], 0.0))

            def total(values: Tensor, by_distance: Callable[[Tensor], Tensor] = by_distance) -> Tensor:
                return by_distance(values).sum((0, 2), dtype=torch.float64)

            s, n = theirs.scores, ours.scores
            difference = by_distance(s - n)
            self.pairs += total(torch.ones_like(s[:, :1]))[0]
            self.difference += difference.sum((0, 2), dtype=torch.float64)
            if mass:
                self.mass += total(theirs.log_weights()[..., : shape[-1]].exp())
            if factors is not None:
                clipped = n.clamp(min=0) if factors.relu else n
                self.product += total(s * clipped)
                self.square += total(clipped * clipped)
            if self.by_query is not None and self.moment is not None:
                query = scheme.scaling * scheme.query[:, :, part].double()
                query = F.pad(query, (0, 1), value=scheme.ratio * scheme.scaling)
                self.by_query += torch.einsum("bhrt,bhrd->htd", difference.double(), query)
                self.moment += torch.einsum("bhr,bhrd,bhre->hde", visible.double().sum(-1), query, query)

    @property
    def mean_difference(self) -> Tensor:
        """The base's score minus `q . k`, the mean by distance, (H, T)."""
        return self.difference / self.pairs.clamp(min=1)


@dataclass(frozen=True)
class Target:
    """What a form's coefficients should be, see `coefficients`.

    Attributes:
        values: (H, T, K).
        weights: (H, T) what each distance weighs.
        metric: (H, K, K) positive: an error `e` of one distance costs `e metric e`.
    """

    values: Tensor
    weights: Tensor
    metric: Tensor


def takes_queries(form: Any) -> bool:
    """Return whether what a form adds to a score is linear in the query."""
    return isinstance(form, (ClippedVectors, RelativeKeys))


def coefficients(module: Any, like: Tensor, count: int, heads: int) -> Tensor | None:
    """Return what a module's form has for the distances 0, 1, ..., (H, count, K); None if it is no such form.

    For a curve its numbers (K = 1); where the query is multiplied by a vector of the distance that vector and what is
    added beside it (K = D + 1), so that their product with `(scaling q, vector_scaling)` is added to the score.
    """
    form = module.form(like)
    if isinstance(form, (Bias, Slopes, Factors)):
        return form.table(count)[..., None]
    if isinstance(form, ClippedVectors):
        labels = torch.arange(count, device=form.keys.device).clamp(max=form.keys.shape[-2] - 1)
        return F.pad(form.keys.index_select(-2, labels), (0, 1)).expand(heads, -1, -1)
    if isinstance(form, RelativeKeys):
        vectors = form.table(count)
        return torch.cat([vectors, vectors @ form.position_bias[..., None]], -1)
    return None


def curve(module: Any, like: Tensor, count: int) -> Tensor | None:
    """Return a module's bias, or factor, of the distances 0, 1, ..., (H, count); None if it has no such curve."""
    form = module.form(like)
    return form.table(count) if isinstance(form, (Bias, Slopes, Factors)) else None


def target_of(module: Any, like: Tensor, averages: Averages) -> Target:
    """Return the coefficients that would serve the averages best.

    A bias: the mean of what the base's positions add. A factor: least squares of the base's score by it times `q . k`.
    A vector: least squares of what the base's positions add by its product with the query.
    """
    form, weights = module.form(like), averages.pairs.expand_as(averages.difference)
    one = torch.ones(len(weights), 1, 1, dtype=torch.float64, device=weights.device)
    if isinstance(form, Factors):
        return Target((averages.product / averages.square.clamp(min=1e-12))[..., None], averages.square, one)
    if averages.by_query is None or averages.moment is None:
        return Target(averages.mean_difference[..., None], weights, one)
    metric = averages.moment / averages.pairs.sum()
    mean = averages.by_query / averages.pairs.clamp(min=1)[:, None]
    # Directions in which there are hardly any queries would get huge vectors from a few of them.
    ridge = RIDGE * metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    metric = metric + ridge * torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    return Target(torch.linalg.solve(metric, mean.mT).mT, weights, metric)


def fit(module: nn.Module, like: Tensor, targets: list[Target]) -> None:
    """Fit a module's parameters to coefficients, by least squares of float64.

    What is added to scores may differ by a constant of the head, which the softmax does not see. A tail beyond the
    distances that were seen weighs a little. Of curves it then weighs nothing: what was seen decides alone, and only
    numbers of which it says nothing keep what the tail gave them.

    Args:
        module: a scheme's.
        like: has the device, and the dtype beside which positions are computed.
        targets: one for each layer that the module serves.
    """
    owner: Any = copy.deepcopy(module).double()
    if not any(each.requires_grad for each in owner.parameters()):
        return
    wide = like.double()
    heads, seen, _ = targets[0].values.shape
    _search(owner, wide, targets, tail=TAIL_WEIGHT)
    if not takes_queries(owner.form(wide)):  # vectors that nothing holds beyond what was seen run away there
        _search(owner, wide, targets, tail=None)
    kept = [each.detach().clone() for each in module.parameters()]
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), owner.parameters(), strict=True):
            mine.copy_(theirs)
        found = coefficients(module, like, seen * TAIL, heads)
        assert found is not None
        if not torch.isfinite(found).all():  # the search ran off to infinity
            for mine, before in zip(module.parameters(), kept, strict=True):
                mine.copy_(before)


def _search(owner: Any, like: Tensor, targets: list[Target], *, tail: float | None) -> None:
    """Search for the parameters of a module in float64, from what they are.

    Args:
        owner: the module.
        like: float64.
        targets: see `fit`.
        tail: weight of distances that were not seen; None leaves them out.
    """
    heads = targets[0].values.shape[0]
    wanted = torch.stack([each.values if tail is None else _continued(each.values) for each in targets])
    weights = torch.stack([each.weights if tail is None else _with_tail(each.weights, tail) for each in targets])
    weights = weights / weights.sum(-1, keepdim=True)
    metric = torch.stack([each.metric for each in targets])
    added = not isinstance(owner.form(like), Factors)
    optimizer = torch.optim.LBFGS(
        [each for each in owner.parameters() if each.requires_grad],
        max_iter=STEPS,
        history_size=STEPS // 2,
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        had = coefficients(owner, like, wanted.shape[2], heads)
        assert had is not None
        off = had - wanted
        if added:
            off = off - (weights[..., None] * off).sum(-2, keepdim=True)
        value = (weights * ((off @ metric) * off).sum(-1)).sum()
        form = owner.form(like)
        if isinstance(form, ClippedVectors) and form.values is not None:
            value = value + form.values.square().sum()  # a base's scores say nothing of vectors beside values
        value.backward()
        return value

    optimizer.step(loss)


def _continued(target: Tensor) -> Tensor:
    """Return coefficients (H, T, K) with a tail that goes on as they end, (H, TAIL * T, K)."""
    seen = target.shape[1]
    end = target[:, -max(1, seen // 4) :].mean(1, keepdim=True)
    return torch.cat([target, end.expand(-1, seen * (TAIL - 1), -1)], 1)


def _with_tail(weight: Tensor, tail: float) -> Tensor:
    """Return weights (H, T) with those of the tail, (H, TAIL * T)."""
    beyond = tail * weight.mean(-1, keepdim=True)
    return torch.cat([weight, beyond.expand(-1, weight.shape[1] * (TAIL - 1))], -1)


# ------------------------------------------------------------------------------------------------------------ queries


@dataclass(frozen=True)
class Turn:
    """The mean rotation of each head and pair, which can be put into the projection that makes queries.

    Attributes:
        projection: makes the queries, rows in the order of heads.
        factors: (H, pairs) complex.
        size: D.
        interleaved: whether neighbouring dimensions are a pair, and not `(u, u + R/2)`.
    """

    projection: nn.Linear
    factors: Tensor
    size: int
    interleaved: bool

    @torch.no_grad()
    def apply(self, heads: Tensor) -> None:
        """Turn the rows of some heads, bool (H,)."""
        pairs = self.factors.shape[1]
        order = torch.arange(2 * pairs)
        real, imaginary = (order[::2], order[1::2]) if self.interleaved else (order[:pairs], order[pairs:])
        tensors = [self.projection.weight] + ([] if self.projection.bias is None else [self.projection.bias])
        for tensor in tensors:
            rows = tensor.view(-1, self.size, *tensor.shape[1:])
            for head in heads.nonzero()[:, 0].tolist():
                factor = self.factors[head].to(tensor.device)
                shape = (-1, *([1] * (tensor.ndim - 1)))
                re, im = (each.view(shape) for each in (factor.real, factor.imag))
                a, b = rows[head, real].double(), rows[head, imaginary].double()
                rows[head, real] = (re * a - im * b).to(tensor.dtype)
                rows[head, imaginary] = (im * a + re * b).to(tensor.dtype)


def turn_of(base: BaseModel, layer: int, rotary: nn.Module, mass: Tensor, kind: str | None) -> Turn | None:
    """Return the mean rotation of a layer's heads, weighted by where the base attends to; None if queries hide it.

    `sum_d mass(d) e^(i w d)` of each pair with angle `w` per token: what the rotation does on average to the product of
    a pair. It goes into the projection where that alone makes the queries: not through a norm, a fused or a latent
    projection.

    Args:
        base: the model.
        layer: index.
        rotary: the base's rotary module.
        mass: (H, T) attention weights of the base by distance.
        kind: layer type, for a rotary module that asks for it.
    """
    attention: Any = base.found.attention_of[layer]
    dims, projection = base.sizes[layer], getattr(base.found.attention_of[layer], "q_proj", None)
    normed = any("norm" in name and name.startswith(("q_", "qk_", "query_")) for name, _ in attention.named_children())
    if not isinstance(projection, nn.Linear) or normed or base.family.rotary_part is not None:
        return None
    if projection.out_features != dims.num_heads * dims.head_dim:
        return None
    distances = torch.arange(mass.shape[1], device=mass.device)
    turned = rotary(
        projection.weight.new_empty(0, dtype=torch.float32), distances[None], *(() if kind is None else (kind,))
    )
    cos, sin = (each[0].double() for each in by_pair(turned, base.family.angles))
    share = mass / mass.sum(-1, keepdim=True).clamp(min=1e-12)
    factors = torch.complex(share @ cos, share @ sin) * torch.hypot(cos[0], sin[0])  # queries and keys both have it
    if torch.allclose(factors, torch.ones_like(factors)):  # a base that has been patched, and turns nothing
        return None
    return Turn(projection, factors, dims.head_dim, base.pairs == "interleaved")
