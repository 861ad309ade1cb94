"""Closed forms: fit a scheme's parameters, and rotate queries, to imitate the mean effect of a base's positions.

The target at every distance has a closed form: a mean, or the solution of least squares. `fitting` then fits the
scheme's parameters to it, without reading text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.attention_call import Call
from ..core.forms import ClippedVectors, Form, RelativeKeys, is_one_of
from ..core.modules import ScoreModule
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
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        by_query = () if size is None else (zeros(heads, distances, size + 1), zeros(heads, size + 1, size + 1))
        return cls(zeros(distances), *(zeros(heads, distances) for _ in range(4)), *by_query)

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
            self.difference[:, seen] += total(base_scores - products)
            if self.by_query is not None and self.moment is not None:
                difference = _by_distance(base_scores - products, visible)
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


def is_by_distance(module: ScoreModule, like: Tensor) -> bool:
    """Return whether parameters of a module set numbers or vectors by distance, see `coefficients`."""
    form = module.form(like) if list(module.parameters()) else None
    return form is not None and form.coefficients(torch.arange(1, device=like.device)) is not None


def coefficients(module: ScoreModule, like: Tensor, distances: Tensor, heads: int) -> Tensor:
    """Return `Form.coefficients` of a module whose form has them, as (H, M, C)."""
    values = form_of(module, like).coefficients(distances)
    assert values is not None
    return values.expand(heads, -1, -1)


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
        order, rotated = torch.arange(2 * pairs), heads.nonzero()
        real, imaginary = (order[::2], order[1::2]) if self.interleaved else (order[:pairs], order[pairs:])
        for tensor in self.projection.parameters(recurse=False):
            rows = tensor.view(-1, self.size, *tensor.shape[1:])
            factors = self.factors.to(tensor.device)[rotated[:, 0]].view(-1, pairs, *[1] * (tensor.ndim - 1))
            a, b = rows[rotated, real].double(), rows[rotated, imaginary].double()
            rows[rotated, real] = (factors.real * a - factors.imag * b).to(tensor.dtype)
            rows[rotated, imaginary] = (factors.imag * a + factors.real * b).to(tensor.dtype)
