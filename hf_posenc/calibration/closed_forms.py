"""Closed forms: fit a scheme's parameters, and rotate queries, to imitate the mean effect of a base's positions.

The target at every distance has a closed form: a mean, or the solution of least squares. A search that reads no text
then fits the scheme's parameters to it.
"""

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
"""Forms with one vector per distance. The score adds the product of this vector with the query."""

WAVES = (RelativeKeys,)
"""Forms whose vectors are sums of waves. Every distance has a vector of its own, and there is no largest distance."""

TAIL = 4
"""Windows of T tokens have T distances. A curve is fitted at `TAIL * T` distances. The target of those beyond T, the
tail, is the mean target of the last quarter of the T distances."""

REACH = 16
"""Vectors made of waves are fitted up to distance `REACH * T`. Without targets there they could take any value."""

FALL = 2
"""Slope of the tail of vectors made of waves. The target of a score falls by `FALL * log(d / T)` at a distance d > T.
If only positions counted, all keys beyond T would then weigh less than T keys at the end of the windows: `sum_(d > T)
(T / d)^2 < T`."""

TAIL_WEIGHT = 1e-3
"""Weight of a distance in the tail, relative to the mean weight of the T distances of the windows."""

STEPS = 100
"""Largest number of steps in the search for a scheme's parameters. Most searches end earlier."""

RIDGE = 1e-4
"""Ridge of the least squares by queries, relative to the mean square of a coordinate of the queries."""


@dataclass
class DistanceSums:
    """Sums by distance, over the pairs of a query and a visible key in one layer.

    The content `c` is `q . k` of the scheme's queries and keys, or its positive part for a scheme that takes that.

    Attributes:
        pairs: (T,) number of pairs.
        difference: (H, T) sum of the base's score minus `q . k`.
        product: (H, T) sum of the base's score times `c`; 0 unless the scheme's form multiplies.
        square: (H, T) sum of `c^2`; 0 unless the scheme's form multiplies.
        mass: (H, T) sum of the base's attention weights; 0 if `add` was told to leave them out.
        by_query: (H, T, D + 1) sum of the difference times the vector `(scaling q, vector_scaling)`. None unless the
            scheme's form takes queries.
        moment: (H, D + 1, D + 1) sum over all pairs of the outer product of that vector with itself, or None.
    """

    pairs: Tensor
    difference: Tensor
    product: Tensor
    square: Tensor
    mass: Tensor
    by_query: Tensor | None = None
    moment: Tensor | None = None

    @classmethod
    def empty(cls, heads: int, distances: int, device: torch.device, *, size: int | None = None) -> DistanceSums:
        """Return sums over no pairs.

        Args:
            heads: H.
            distances: T.
            device: device of the sums.
            size: D for sums by query as well; None leaves `by_query` and `moment` out.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        empty = cls(zeros(distances), *(zeros(heads, distances) for _ in range(4)))
        if size is not None:
            empty.by_query = zeros(heads, distances, size + 1)
            empty.moment = zeros(heads, size + 1, size + 1)
        return empty

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
                """Sum by distance, (B, H|1, R, L) -> (B, H|1, R, T). As a rule a query has one key per distance."""
                heads = slice(0, values.shape[1])
                sums = values.new_zeros(*values.shape[:-1], len(self.pairs))
                return sums.scatter_add_(-1, at[:, heads], values.masked_fill(~visible[:, heads], 0.0))

            def total(values: Tensor, by_distance: Callable[[Tensor], Tensor] = by_distance) -> Tensor:
                return by_distance(values).sum(2).sum(0, dtype=torch.float64)

            base_scores, products = theirs.scores, ours.scores
            self.pairs += total(torch.ones_like(base_scores[:, :1]))[0]
            if mass:
                self.mass += total(theirs.weights[..., : shape[-1]])
            if scheme.form is not None and scheme.form.multiplies:
                content = scheme.form.content(products)
                self.product += total(base_scores * content)
                self.square += total(content * content)
            difference = by_distance(base_scores - products)
            self.difference += difference.sum(2).sum(0, dtype=torch.float64)
            if self.by_query is not None and self.moment is not None:
                query = (scheme.scaling * scheme.query[:, :, part]).to(difference.dtype)
                query = F.pad(query, (0, 1), value=scheme.ratio * scheme.scaling)
                seen = visible.sum(-1)[..., None] * query
                self.by_query += (difference.mT @ query).sum(0, dtype=torch.float64)
                self.moment += (seen.mT @ query).sum(0, dtype=torch.float64)

    @property
    def mean_difference(self) -> Tensor:
        """Return the mean by distance of the base's score minus `q . k`, (H, T)."""
        return self.difference / self.pairs.clamp(min=1)


@dataclass(frozen=True)
class Target:
    """The coefficients that a scheme is fitted to in one layer, see `coefficients`.

    Attributes:
        values: (H, T, C) the coefficients, C at each distance.
        weights: (H, T) weight of each distance in the fit.
        metric: (H, C, C) positive matrix: an error `e` at one distance costs `e metric e`.
        last_factor: (H,) number that a score multiplies the last coefficient by. This coefficient meets no query, so
            the tail falls by it. None if the form's vectors are not made of waves.
    """

    values: Tensor
    weights: Tensor
    metric: Tensor
    last_factor: Tensor | None = None


def takes_queries(form: Form | None) -> bool:
    """Return whether what a form adds to a score is linear in the query; False without a form."""
    return is_one_of(form, VECTORS)


def coefficients(module: ScoreModule, like: Tensor, distances: Tensor, heads: int) -> Tensor | None:
    """Return `Form.coefficients` of a module's form, as (H, M, C), or None if there are none."""
    form = module.form(like)
    values = None if form is None else form.coefficients(distances)
    return None if values is None else values.expand(heads, -1, -1)


def target_of(module: ScoreModule, like: Tensor, sums: DistanceSums) -> Target:
    """Return the best coefficients for a layer, at every distance separately, from its sums.

    - A bias is the mean of what the base's positions add.
    - A factor `f` minimises the squares of the base's score minus `f q . k`.
    - A vector `v` minimises the squares of what the base's positions add minus `q . v`.
    """
    form, weights = _form_of(module, like), sums.pairs.expand_as(sums.difference)
    one = torch.ones(len(weights), 1, 1, dtype=torch.float64, device=weights.device)
    if form.multiplies:
        return Target((sums.product / sums.square.clamp(min=1e-12))[..., None], sums.square, one)
    if sums.by_query is None or sums.moment is None:
        return Target(sums.mean_difference[..., None], weights, one)
    metric = sums.moment / sums.pairs.sum()
    mean = sums.by_query / sums.pairs.clamp(min=1)[:, None]
    # Without the ridge, vectors would become huge in directions that hardly any query has.
    ridge = RIDGE * metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    metric = metric + ridge * torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)
    last_factor = sums.moment[:, -1, -1].div(sums.pairs.sum()).sqrt() if is_one_of(form, WAVES) else None
    return Target(torch.linalg.solve(metric, mean.mT).mT, weights, metric, last_factor)


def _form_of(module: ScoreModule, like: Tensor) -> Form:
    form = module.form(like)
    assert form is not None
    return form


def fit(module: ScoreModule, like: Tensor, targets: list[Target]) -> None:
    """Fit a module's parameters to coefficients, by least squares in float64.

    Every head has a free constant, because the softmax ignores it. The first search includes a tail of distances beyond
    those of the windows, with a small weight. Curves are then fitted again without the tail. So the tail decides only
    parameters that have no effect at the distances of the windows.

    Args:
        module: module of a scheme.
        like: empty tensor with the device and dtype of the queries.
        targets: the targets of the layers that the module serves.
    """
    wide_module = copy.deepcopy(module).double()
    if not any(each.requires_grad for each in wide_module.parameters()):
        return
    wide = like.double()
    heads, seen, _ = targets[0].values.shape
    _search(wide_module, wide, targets, tail=TAIL_WEIGHT)
    if not takes_queries(wide_module.form(wide)):  # vectors need the tail: without it they diverge at greater distances
        _search(wide_module, wide, targets, tail=None)
    initial = [each.detach().clone() for each in module.parameters()]
    with torch.no_grad():
        for parameter, fitted in zip(module.parameters(), wide_module.parameters(), strict=True):
            parameter.copy_(fitted)
        distances, _ = _fit_distances(_form_of(wide_module, wide), seen, wide.device)
        values = coefficients(module, like, distances, heads)
        assert values is not None
        if not torch.isfinite(values).all():  # the search diverged
            for parameter, before in zip(module.parameters(), initial, strict=True):
                parameter.copy_(before)


def _search(module: ScoreModule, like: Tensor, targets: list[Target], *, tail: float | None) -> None:
    """Search for the parameters of a module, starting from their present values.

    Args:
        module: the module, in float64.
        like: empty float64 tensor on the device of the queries.
        targets: the targets of the layers that the module serves.
        tail: weight of the distances in the tail; None leaves them out.
    """
    form = _form_of(module, like)
    heads, seen, _ = targets[0].values.shape
    distances, counts = _fit_distances(form, seen, like.device)
    if tail is None:
        distances, counts = distances[:seen], counts[:seen]
    wanted = torch.stack([_with_tail(each, distances) for each in targets])
    weights = torch.stack([each.weights for each in targets])
    tail_weights = weights.mean(-1, keepdim=True) * counts[seen:] * (tail or 0.0)
    weights = torch.cat([weights, tail_weights], -1)
    weights = weights / weights.sum(-1, keepdim=True)
    metric = torch.stack([each.metric for each in targets])
    optimizer = torch.optim.LBFGS(
        [each for each in module.parameters() if each.requires_grad],
        max_iter=STEPS,
        history_size=STEPS // 2,
        tolerance_grad=1e-14,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        present = coefficients(module, like, distances, heads)
        assert present is not None
        error = present - wanted
        if not form.multiplies:
            error = error - (weights[..., None] * error).sum(-2, keepdim=True)
        value = (weights * ((error @ metric) * error).sum(-1)).sum()
        if (vectors := _form_of(module, like).value_table) is not None:
            value = value + vectors.square().sum()  # scores do not determine vectors that are added to values
        value.backward()
        return value

    optimizer.step(loss)


def _fit_distances(form: Form, seen: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the distances that a form is fitted at, (M,), and how many distances each of them stands for.

    The distances of the windows come first, then the tail. For vectors made of waves a few distances are enough in the
    tail: the windows already determine the fast waves.
    """
    if is_one_of(form, WAVES):
        ends = seen * REACH ** torch.linspace(0, 1, seen + 1, dtype=torch.float64, device=device)
        beyond = torch.unique(ends.round().long())
        distances = torch.cat([torch.arange(seen, device=device), beyond[:-1]])
        return distances, torch.cat([torch.ones(seen, device=device), beyond.diff()])
    return torch.arange(TAIL * seen, device=device), torch.ones(TAIL * seen, device=device)


def _with_tail(target: Target, distances: Tensor) -> Tensor:
    """Return the coefficients of a target, (H, M, C), continued beyond the distances of the windows.

    The tail has the mean coefficients of the last quarter of the windows' distances. For vectors made of waves, their
    score also falls with the distance, see `FALL`.
    """
    seen = target.values.shape[1]
    beyond = distances[seen:]
    tail = target.values[:, -max(1, seen // 4) :].mean(1, keepdim=True).repeat(1, len(beyond), 1)
    if target.last_factor is not None:
        tail[..., -1] -= FALL * (beyond / seen).log() / target.last_factor[:, None]
    return torch.cat([target.values, tail], 1)


# ------------------------------------------------------------------------------------------------------------ queries


@dataclass(frozen=True)
class MeanRotation:
    """The mean rotation of a layer's queries, and the projection whose weights can absorb it.

    Attributes:
        projection: projection of the queries, with its rows in the order of heads.
        factors: (H, pairs) complex factor of each pair of dimensions.
        size: D, the number of dimensions of a head.
        interleaved: whether pairs are neighbouring dimensions. Otherwise pair `u` has the dimensions `u` and `u +
            pairs`.
    """

    projection: nn.Linear
    factors: Tensor
    size: int
    interleaved: bool

    @torch.no_grad()
    def apply(self, heads: Tensor) -> None:
        """Rotate the rows of the projection for the heads that are True, bool (H,)."""
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


def mean_factors(mass: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the mean rotation of each head and pair, complex (H, pairs) of magnitude 1 or less.

    A pair of dimensions that turns by the angle `w` per token has the factor `sum_d m(d) e^(i w d)`. Here `m(d)` is the
    share of the base's attention at distance `d`. On average, the base's rotation multiplies the product of a query's
    and a key's pair by this factor.

    Args:
        mass: (H, T) attention weights of the base by distance.
        cos: (T, pairs) cosines of the angles `w d`.
        sin: (T, pairs) their sines.
    """
    share = mass / mass.sum(-1, keepdim=True).clamp(min=1e-12)
    return torch.complex(share @ cos, share @ sin)


def mean_rotation_of(
    base: BaseModel,
    layer: int,
    projection: nn.Linear,
    rotary: nn.Module,
    mass: Tensor,
    layer_type: str | None,
    rotated: Tensor | None = None,
) -> MeanRotation | None:
    """Return the mean rotation of a layer's heads, see `mean_factors`, or None if it is the identity.

    Args:
        base: the patched model.
        layer: index of the layer.
        projection: the module whose outputs are the layer's queries, see `Pair.projections`.
        rotary: the base's rotary module.
        mass: (H, T) attention weights of the base by distance.
        layer_type: type of the layer, for a rotary module that takes it; otherwise None.
        rotated: (H, pairs) bool, the pairs that the scheme rotates as the base does; None if there are none.
    """
    distances = torch.arange(mass.shape[1], device=mass.device)
    layer_types = () if layer_type is None else (layer_type,)
    angles = rotary(projection.weight.new_empty(0, dtype=torch.float32), distances[None], *layer_types)
    cos, sin = (each[0].double() for each in by_pair(angles, base.family.rotation.angles))
    # cos and sin may carry a factor (YaRN's). Queries and keys are both multiplied by it, so it counts twice.
    factor = torch.hypot(cos[0], sin[0])
    factors = mean_factors(mass, cos, sin)
    if rotated is None:
        factors = factors * factor
    else:  # such a scheme leaves the factor on all pairs
        factors = torch.where(rotated.to(factors.device), 1, factors / factor)
    if torch.allclose(factors, torch.ones_like(factors)):  # the base is patched, and its rotary module rotates nothing
        return None
    return MeanRotation(projection, factors, base.sizes[layer].head_dim, base.rotation.pairs == "interleaved")
