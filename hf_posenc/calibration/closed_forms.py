"""Closed forms: a scheme's parameters, and queries, fitted to what a base's positions do to scores on average."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention_call import Call
from ..forms import ClippedVectors, Form, RelativeKeys, is_one_of
from ..live.base_model import BaseModel
from ..modules import ScoreModule
from ..upstream.rotary import by_pair
from .observe import parts, rows_of

VECTORS = (ClippedVectors, RelativeKeys)
"""Forms with a vector for each distance, by which the query is multiplied."""

WAVES = (RelativeKeys,)
"""Forms whose vectors are made of waves, so that every distance, however far, has one of its own."""

TAIL = 4
"""A curve is fitted to this many times the distances that were seen. Beyond these its target goes on as it ended."""

REACH = 16
"""Vectors made of waves, which could do anything at unseen distances, are fitted to this many times the seen ones."""

FALL = 2
"""What such vectors add to a score falls, beyond the T distances that were seen, by this many times the logarithm of
the distance. By position alone, all further keys then weigh less than T keys at the end:
`sum_(d > T) (T / d)^2 < T`."""

TAIL_WEIGHT = 1e-3
"""Weight of a distance that was not seen, relative to the mean weight of those that were."""

STEPS = 100
"""Steps of the search for a scheme's parameters, at most; most searches end before."""

RIDGE = 1e-4
"""Added to the mean square of each number of the queries, relative to their average, before it is inverted."""


@dataclass
class Averages:
    """Sums over the pairs of a query and a visible key of one layer, by distance.

    Attributes:
        pairs: (T,) number of pairs.
        difference: (H, T) sum of the base's score minus `q . k` of the scheme's queries and keys.
        product: (H, T) sum of the base's score times that `q . k`, clipped at 0 if the scheme clips it; 0 unless the
            scheme's form multiplies.
        square: (H, T) sum of the squares of that `q . k`; 0 unless the scheme's form multiplies.
        mass: (H, T) sum of the base's attention weights, if it is wanted.
        by_query: (H, T, D + 1) sum of that difference times `(scaling q, vector_scaling)`; None if it is not wanted.
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
    def empty(cls, heads: int, distances: int, device: torch.device, *, size: int | None = None) -> Averages:
        """Return sums over no pairs.

        Args:
            heads: H.
            distances: T.
            device: device of the sums.
            size: D, where sums by query are wanted.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        found = cls(zeros(distances), *(zeros(heads, distances) for _ in range(4)))
        if size is not None:
            found.by_query = zeros(heads, distances, size + 1)
            found.moment = zeros(heads, size + 1, size + 1)
        return found

    @torch.no_grad()
    def add(self, base: Call, scheme: Call, *, mass: bool = True) -> None:
        """Add the pairs of a batch.

        Args:
            base: call of the base's attention.
            scheme: call of the scheme's attention on the same hidden states.
            mass: whether to sum the base's attention weights.
        """
        for part in parts(base):
            theirs, ours = rows_of(base, part), rows_of(scheme, part, content=True)
            shape = theirs.scores.shape
            visible = (theirs.visible & ours.visible).expand(shape)
            at = theirs.distance.expand(shape).long()

            def by_distance(values: Tensor, at: Tensor = at, visible: Tensor = visible) -> Tensor:
                """Sum by distance, (B, H|1, R, L) -> (B, H|1, R, T). A query has each distance once, as a rule."""
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
            if scheme.form is not None and scheme.form.multiplies:
                content = scheme.form.content(n)
                self.product += total(s * content)
                self.square += total(content * content)
            if self.by_query is not None and self.moment is not None:
                query = scheme.scaling * scheme.query[:, :, part].double()
                query = F.pad(query, (0, 1), value=scheme.ratio * scheme.scaling)
                self.by_query += torch.einsum("bhrt,bhrd->htd", difference.double(), query)
                self.moment += torch.einsum("bhr,bhrd,bhre->hde", visible.double().sum(-1), query, query)

    @property
    def mean_difference(self) -> Tensor:
        """Return the mean by distance of the base's score minus `q . k`, (H, T)."""
        return self.difference / self.pairs.clamp(min=1)


@dataclass(frozen=True)
class Target:
    """The coefficients that would serve a layer best, see `coefficients`.

    Attributes:
        values: (H, T, K) the coefficients.
        weights: (H, T) weight of each distance.
        metric: (H, K, K) positive: an error `e` of one distance costs `e metric e`.
        unit: (H,) factor of the last coefficient in a score, or None where it can do nothing by itself.
    """

    values: Tensor
    weights: Tensor
    metric: Tensor
    unit: Tensor | None = None


def takes_queries(form: Form | None) -> bool:
    """Return whether what a form adds to a score is linear in the query; False without a form."""
    return is_one_of(form, VECTORS)


def coefficients(module: ScoreModule, like: Tensor, distances: Tensor, heads: int) -> Tensor | None:
    """Return `Form.coefficients` of the form of a module, as (H, N, K); None if there are none."""
    form = module.form(like)
    found = None if form is None else form.coefficients(distances)
    return None if found is None else found.expand(heads, -1, -1)


def target_of(module: ScoreModule, like: Tensor, averages: Averages) -> Target:
    """Return the coefficients that would serve the averages best.

    A bias: the mean of what the base's positions add. A factor: least squares of the base's score by it times `q . k`.
    A vector: least squares of what the base's positions add by its product with the query.
    """
    form, weights = _form_of(module, like), averages.pairs.expand_as(averages.difference)
    one = torch.ones(len(weights), 1, 1, dtype=torch.float64, device=weights.device)
    if form.multiplies:
        return Target((averages.product / averages.square.clamp(min=1e-12))[..., None], averages.square, one)
    if averages.by_query is None or averages.moment is None:
        return Target(averages.mean_difference[..., None], weights, one)
    metric = averages.moment / averages.pairs.sum()
    mean = averages.by_query / averages.pairs.clamp(min=1)[:, None]
    # Directions in which there are hardly any queries would get huge vectors from a few of them.
    ridge = RIDGE * metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    metric = metric + ridge * torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    unit = averages.moment[:, -1, -1].div(averages.pairs.sum()).sqrt() if is_one_of(form, WAVES) else None
    return Target(torch.linalg.solve(metric, mean.mT).mT, weights, metric, unit)


def _form_of(module: ScoreModule, like: Tensor) -> Form:
    form = module.form(like)
    assert form is not None
    return form


def fit(module: ScoreModule, like: Tensor, targets: list[Target]) -> None:
    """Fit a module's parameters to coefficients, by least squares of float64.

    A constant of each head is left open, because the softmax does not see it. A tail beyond the seen distances weighs a
    little. Curves are then fitted again to the seen distances alone, so that the tail decides only the numbers that no
    seen distance reaches.

    Args:
        module: module of a scheme.
        like: empty tensor with the device and dtype of the queries.
        targets: one for each layer that the module serves.
    """
    owner = copy.deepcopy(module).double()
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
        distances, _ = _reach(_form_of(owner, wide), seen, wide.device)
        found = coefficients(module, like, distances, heads)
        assert found is not None
        if not torch.isfinite(found).all():  # the search ran off to infinity
            for mine, before in zip(module.parameters(), kept, strict=True):
                mine.copy_(before)


def _search(owner: ScoreModule, like: Tensor, targets: list[Target], *, tail: float | None) -> None:
    """Search for the parameters of a module in float64, from what they are.

    Args:
        owner: the module.
        like: float64.
        targets: see `fit`.
        tail: weight of unseen distances; None leaves them out.
    """
    form = _form_of(owner, like)
    heads, seen, _ = targets[0].values.shape
    distances, counts = _reach(form, seen, like.device)
    if tail is None:
        distances, counts = distances[:seen], counts[:seen]
    wanted = torch.stack([_continued(each, distances) for each in targets])
    weights = torch.stack([each.weights for each in targets])
    beyond = weights.mean(-1, keepdim=True) * counts[seen:] * (tail or 0.0)
    weights = torch.cat([weights, beyond], -1)
    weights = weights / weights.sum(-1, keepdim=True)
    metric = torch.stack([each.metric for each in targets])
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
        had = coefficients(owner, like, distances, heads)
        assert had is not None
        off = had - wanted
        if not form.multiplies:
            off = off - (weights[..., None] * off).sum(-2, keepdim=True)
        value = (weights * ((off @ metric) * off).sum(-1)).sum()
        if (vectors := _form_of(owner, like).value_table) is not None:
            value = value + vectors.square().sum()  # a base's scores say nothing of vectors beside values
        value.backward()
        return value

    optimizer.step(loss)


def _reach(form: Form, seen: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the distances that a form is fitted to, (N,), seen ones first, and how many distances each stands for.

    For vectors made of waves a few unseen distances are enough: waves that differ between neighbours were seen.
    """
    if is_one_of(form, WAVES):
        ends = seen * REACH ** torch.linspace(0, 1, seen + 1, dtype=torch.float64, device=device)
        beyond = torch.unique(ends.round().long())
        distances = torch.cat([torch.arange(seen, device=device), beyond[:-1]])
        return distances, torch.cat([torch.ones(seen, device=device), beyond.diff()])
    return torch.arange(TAIL * seen, device=device), torch.ones(TAIL * seen, device=device)


def _continued(target: Target, distances: Tensor) -> Tensor:
    """Return the coefficients of a target with a tail, (H, N, K), which goes on as they end, or falls from there."""
    seen = target.values.shape[1]
    beyond = distances[seen:]
    tail = target.values[:, -max(1, seen // 4) :].mean(1, keepdim=True).repeat(1, len(beyond), 1)
    if target.unit is not None:
        tail[..., -1] -= FALL * (beyond / seen).log() / target.unit[:, None]
    return torch.cat([target.values, tail], 1)


# ------------------------------------------------------------------------------------------------------------ queries


@dataclass(frozen=True)
class MeanRotation:
    """The mean rotation of each head and pair of dimensions, and the projection of queries that can take it.

    Attributes:
        projection: projection of the queries, rows in the order of heads.
        factors: (H, pairs) complex numbers to multiply the pairs by.
        size: D.
        interleaved: whether neighbouring dimensions are a pair; otherwise `(u, u + R/2)` are.
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


def mean_rotation_of(
    base: BaseModel, layer: int, projection: nn.Linear, rotary: nn.Module, mass: Tensor, kind: str | None
) -> MeanRotation | None:
    """Return the mean rotation of a layer's heads, or None where it is none.

    It is `sum_d m(d) e^(i w d)` for each pair with angle `w` per token, where `m(d)` is the share of the base's
    attention at distance `d`. On average the rotation multiplies the product of a pair by this number.

    Args:
        base: the patched model.
        layer: index of the layer.
        projection: the module whose outputs are the layer's queries, see `Pair.projections`.
        rotary: the base's rotary module.
        mass: (H, T) attention weights of the base by distance.
        kind: layer type, for a rotary module that takes it.
    """
    distances = torch.arange(mass.shape[1], device=mass.device)
    turned = rotary(
        projection.weight.new_empty(0, dtype=torch.float32), distances[None], *(() if kind is None else (kind,))
    )
    cos, sin = (each[0].double() for each in by_pair(turned, base.family.rotation.angles))
    share = mass / mass.sum(-1, keepdim=True).clamp(min=1e-12)
    factors = torch.complex(share @ cos, share @ sin) * torch.hypot(cos[0], sin[0])  # queries and keys both have it
    if torch.allclose(factors, torch.ones_like(factors)):  # a base that is patched, and rotates nothing
        return None
    return MeanRotation(projection, factors, base.sizes[layer].head_dim, base.rotation.pairs == "interleaved")
