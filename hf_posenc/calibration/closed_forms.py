"""Closed forms: fit a scheme's parameters, and rotate queries, to imitate the mean effect of a base's positions.

The target at every distance has a closed form: a mean, or the solution of least squares. `fitting` then fits the
scheme's parameters to it, without reading text.
"""

from __future__ import annotations

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
            visible, seen = theirs.visible & ours.visible, slice(theirs.scores.shape[-1])

            def total(values: Tensor, visible: Tensor = visible) -> Tensor:
                return _by_distance(values, visible).sum(2).sum(0, dtype=torch.float64).flip(-1)

            base_scores, products = theirs.scores, ours.scores
            self.pairs[seen] += total(torch.ones_like(base_scores[:, :1]))[0]
            if mass:
                self.mass[:, seen] += total(theirs.weights[..., seen])
            if scheme.form is not None and scheme.form.multiplies:
                content = scheme.form.content(products)
                self.product[:, seen] += total(base_scores * content)
                self.square[:, seen] += total(content * content)
            difference = _by_distance(base_scores - products, visible)
            self.difference[:, seen] += difference.sum(2).sum(0, dtype=torch.float64).flip(-1)
            if self.by_query is not None and self.moment is not None:
                query = (scheme.scaling * scheme.query[:, :, part]).to(difference.dtype)
                query = F.pad(query, (0, 1), value=scheme.ratio * scheme.scaling)
                self.by_query[:, seen] += (difference.mT @ query).sum(0, dtype=torch.float64).flip(1)
                self.moment += ((visible.sum(-1)[..., None] * query).mT @ query).sum(0, dtype=torch.float64)

    @property
    def mean_difference(self) -> Tensor:
        """Return the mean by distance of the base's score minus `q . k`, (H, T)."""
        return self.difference / self.pairs.clamp(min=1)


def _by_distance(values: Tensor, visible: Tensor) -> Tensor:
    """Return what each query has at each distance, from the largest to 0; 0 where its key is invisible or none.

    This is a view with one step more from row to row: in the next row the same distance is one key further right.

    Args:
        values: (B, H, R, L) numbers of R queries and L keys. The last query is the last key, without gaps between them.
        visible: (B|1, 1|H, R, L) bool.

    Returns:
        (B, H, R, L), the distance L - 1 first.
    """
    padded = F.pad(values.masked_fill(~visible[:, : values.shape[1]], 0.0), (values.shape[2], 0))
    batch, head, row, key = padded.stride()
    return padded.as_strided(values.shape, (batch, head, row + key, key), key)


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
    form, weights = form_of(module, like), sums.pairs.expand_as(sums.difference)
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


def form_of(module: ScoreModule, like: Tensor) -> Form:
    """Return the form of a module that has one."""
    form = module.form(like)
    assert form is not None
    return form


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
