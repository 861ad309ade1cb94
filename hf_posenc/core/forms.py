"""Forms: how scores depend on distance. A scheme has at most one form; an engine takes some of them.

A form holds the tensors that a scheme computes from its parameters, and the dense formula. So each formula is written
once: the reference engine computes `scores` and `mix`, and the fast engines read the tables. Forms hold functions of
the distance, because only a call knows the distances.

Notation: `H` query heads, `D` head size, `d >= 0` distance, `m` largest distance with a vector of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_call import Call
from .dims import require_shape
from .dtypes import compute_dtype, waves
from .positions import DensePositions, Positions

T = TypeVar("T")

OfDistance = Callable[[Tensor], Tensor]
"""Distances >= 0 of any shape -> one number per head and distance, (H, *shape), float32 or float64.

They are integers, or real numbers too if `ScoreModule.real` says so.
"""


class Form:
    """How scores depend on distance. By default a form adds nothing, has no curve, and leaves values as they are.

    Attributes:
        positional: whether scores depend on the distance at all.
        multiplies: whether the curve multiplies the score; otherwise it is added.
        by_head: names of the tensors whose first dimension is H.
        edges: the distances from which pairs take the next variant of what queries hold side by side.
    """

    positional: ClassVar[bool] = True
    edges: tuple[int, ...] = ()
    multiplies: ClassVar[bool] = False
    by_head: ClassVar[tuple[str, ...]] = ()

    def scores(self, call: Call) -> Tensor:
        """Return the scores of a widened call before masking, (B, H, Q, L)."""
        raise NotImplementedError(type(self).__name__)

    def mix(self, call: Call, weights: Tensor) -> Tensor:
        """Return the weighted sum of values (B, H, Q, D), from weights (B, H, Q, L) of a widened call."""
        return weights @ call.value

    def checked(self, heads: int, of: str) -> Form:
        """Return the form; ValueError if its tensors are not for so many heads, which kernels would not see.

        Args:
            heads: H.
            of: name of the class that made the form, for the message.
        """
        for name in self.by_head:
            if (each := getattr(self, name)) is not None:
                require_shape(each, (heads, *[None] * (each.ndim - 1)), f"the {name} of {of}, (H, ...),")
        return self

    @property
    def value_table(self) -> Tensor | None:
        """The vectors that are added to values, (m + 1, V) or (H, m + 1, V), or None."""
        return None

    @property
    def line(self) -> Tensor | None:
        """The slopes `m` (H,) if the scores are `q . k - m_h d` at every distance, or None."""
        return None

    def content(self, products: Tensor) -> Tensor:
        """Return the scores to which the curve is added, or which it multiplies, from scores without positions."""
        return products

    def curve(self, count: int) -> Tensor | None:
        """Return the bias, or factor, of the distances 0, 1, ..., (H, count), float32 or float64, or None."""
        return None

    def coefficients(self, distances: Tensor) -> Tensor | None:
        """Return the coefficients of scores that are linear in the query, at some distances.

        Args:
            distances: integers (N,).

        Returns:
            None if the form has no coefficients. A form with a curve returns its values, (H, N, 1). A form with a
            vector for each distance appends a number to each vector, (N, D + 1) or (H, N, D + 1). The product of both
            with `(scaling q, vector_scaling)` is added to the score.
        """
        curve = self.curve(int(distances.max()) + 1)
        return None if curve is None else curve.index_select(1, distances)[..., None]

    def with_table(self, count: int) -> Form:
        """Return the form with the vectors of the first `count` distances computed, if it computes any."""
        return self

    def width(self, call: Call) -> int | None:
        """Return the number X of dimensions of `sides`, or None if none are exact for a call. It computes nothing."""
        return None

    def sides(self, call: Call) -> Sides:
        """Return two sides whose product is what positions add to the scores, up to a number of each query.

        A form that has them is attention without positions over wider queries and keys, which any kernel computes.

        Args:
            call: a call for which `width` is not None, not widened, without a soft cap.
        """
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True)
class Sides:
    """Two sides of scores: `scaling [query_features | query] . [key_features | key]` and a number of each query.

    Attributes:
        query: (B, H, Q, D), what is multiplied by the keys.
        query_features: (B|1, H, Q, X). They know the query and its position.
        key_features: (B|1, 1|K, L, X), of positions alone.
    """

    query: Tensor
    query_features: Tensor
    key_features: Tensor


def pieces(numbers: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Return numbers as a sum of `count` tensors in `dtype`. Gradients flow through the first."""
    parts = [numbers.to(dtype)]
    while len(parts) < count:
        numbers = numbers.detach() - parts[-1].detach()
        parts.append(numbers.to(dtype))
    return parts


@dataclass(frozen=True)
class Content(Form):
    """`q . k`: attention without distances."""

    positional = False

    def scores(self, call: Call) -> Tensor:
        """Return the scores, see `Form.scores`."""
        return call.products()


@dataclass(frozen=True)
class Curves(Form):
    """A curve per head: one number for each distance.

    Attributes:
        values: distances -> their numbers.
        device: device of the distances that `values` takes.
    """

    values: OfDistance
    device: torch.device

    def checked(self, heads: int, of: str) -> Curves:
        """Return the form, whose numbers are checked where they are computed, see `Form.checked`."""

        def values(distances: Tensor) -> Tensor:
            return require_shape(self.values(distances), (heads, *distances.shape), f"the curve of {of}, (H, ...),")

        return replace(self, values=values)

    def curve(self, count: int) -> Tensor:
        """Return the numbers, see `Form.curve`."""
        return self.values(torch.arange(count, device=self.device))

    def by_pair(self, call: Call) -> Tensor:
        """Return the number for each pair of query and key, (B|1, H, Q, L)."""
        distance = call.distance()
        # A table would need a length, which is unknown while compiling, and has no rows between the integers.
        if torch.compiler.is_compiling() or call.positions.real:
            return self.values(distance[:, 0]).transpose(0, 1)
        # There are Q times fewer distances than pairs, and reading a table costs less than most formulas.
        return at_distance(self.curve(call.distances()), distance)


@dataclass(frozen=True)
class Bias(Curves):
    """`q . k + b_h(d)`, where `b_h` is the curve."""

    def scores(self, call: Call) -> Tensor:
        """Return the scores, see `Form.scores`."""
        return call.products() + self.by_pair(call)


@dataclass(frozen=True)
class Slopes(Form):
    """`q . k - m_h d`: a bias that is linear in the distance, in the window of each head.

    Attributes:
        slopes: `m`, (H,), float32 or float64.
        windows: (H,) int64 or None. A head does not see keys at this distance or further.
        name: equal for equal slopes; None for slopes that are trained, or have windows.
    """

    slopes: Tensor
    windows: Tensor | None = None
    name: Hashable = None
    by_head = ("slopes", "windows")

    @property
    def line(self) -> Tensor | None:
        """The slopes, see `Form.line`."""
        return self.slopes if self.windows is None else None

    def width(self, call: Call) -> int | None:
        """Return X, see `Form.width`. Windows of heads are no product, and 16 bits cut whole positions only."""
        narrow = call.query.dtype.itemsize < 4
        if self.windows is not None or (narrow and call.positions.real):
            return None
        return 7 if narrow else 4

    def sides(self, call: Call) -> Sides:
        """Return the sides of `-m (i - j)`, see `Form.sides`.

        Positions are counted from the last query. A row's own number `-m i` changes no weight. It is there to cancel
        the large part of `m j` before anything small is added, so products must be exact: slopes are in pieces of 8
        bits, and in 16 bits `j = 256 h + l`. (Past 65,536 tokens before the last query `h` is even in bfloat16.)
        """
        if self.name is None:
            return Sides(call.query, *self._columns(call))
        key = (self.name, call.scaling, call.query.dtype)
        return Sides(call.query, *call.positions.once(key, lambda: self._columns(call)))

    def _columns(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return the columns of the queries and of the keys."""
        dtype, narrow = call.query.dtype, call.query.dtype.itemsize < 4
        wide = compute_dtype(call.query)
        slopes = self.slopes.to(wide)[:, None] / call.scaling
        i, j = call.positions.query_positions, call.key_positions()
        i, j = (each.clamp(min=0) - i[:, -1:].clamp(min=0) for each in (i, j))
        i = i[:, None].to(wide)
        first = slopes.detach().to(torch.bfloat16).to(wide)
        rest = slopes - first
        if narrow:
            high = torch.div(j + 128, 256, rounding_mode="floor")  # small parts are small numbers near the last query
            of_query = [*pieces(-slopes * i / 256, dtype, 3), *(m * up for m in (first, rest) for up in (256.0, 1.0))]
            of_key = [torch.full_like(j, 256)] * 3 + [high, j - 256 * high] * 2
        else:
            of_query, of_key = [-first * i, first, -rest * i, rest], [torch.ones_like(j), j] * 2
        query = torch.stack(torch.broadcast_tensors(*of_query), -1).to(dtype)
        return query, torch.stack(of_key, -1)[:, None].to(dtype)

    def hide(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Return scores, or biases, with the dtype's minimum outside each head's window, as where a mask hides a key.

        Args:
            scores: (..., H, Q, L).
            distance: (..., 1, Q, L) or (L,).
        """
        if self.windows is None:
            return scores
        return scores.masked_fill(distance >= self.windows[:, None, None], torch.finfo(scores.dtype).min)

    def curve(self, count: int) -> Tensor:
        """Return the biases, see `Form.curve`."""
        distance = torch.arange(count, dtype=self.slopes.dtype, device=self.slopes.device)
        return self.hide((-self.slopes[:, None] * distance)[:, None], distance)[:, 0]

    def scores(self, call: Call) -> Tensor:
        """Return the scores, see `Form.scores`, without a table."""
        scores = call.products() - self.slopes[:, None, None] * call.distance()
        return self.hide(scores, call.distance())


@dataclass(frozen=True)
class Factors(Curves):
    """`f_h(d) q . k`, or `f_h(d) max(0, q . k)`, where `f_h` is the curve.

    Attributes:
        relu: whether negative scores are clipped at 0 first.
    """

    relu: bool
    multiplies = True

    def content(self, products: Tensor) -> Tensor:
        """Return the scores that the factors multiply, see `Form.content`."""
        return products.relu() if self.relu else products

    def scores(self, call: Call) -> Tensor:
        """Return the scores, see `Form.scores`."""
        return self.content(call.products()) * self.by_pair(call)


@dataclass(frozen=True)
class ClippedVectors(Form):
    """`q . (k + a_c)`, and values `v + b_c`, with `c = min(d, m)`.

    Attributes:
        keys: `a`, (m + 1, D) or (H, m + 1, D).
        values: `b`, (m + 1, V) or (H, m + 1, V), or None.
    """

    keys: Tensor
    values: Tensor | None

    @property
    def value_table(self) -> Tensor | None:
        """`b`, see `Form.value_table`."""
        return self.values

    def near(self, table: Tensor, count: int) -> Tensor:
        """Return the vectors of `count` distances less that of far keys, which cancels: furthest first, (H|1, N, ...).

        At most as many distances as have a vector of their own, but one.
        """
        wide = table.float() if table.ndim == 3 else table.float()[None]
        return (wide[:, : max(1, min(count, wide.shape[1] - 1))] - wide[:, -1:]).flip(1)

    def coefficients(self, distances: Tensor) -> Tensor:
        """Return the vectors, with 0 appended, see `Form.coefficients`."""
        return F.pad(self.keys.index_select(-2, distances.clamp(max=self.keys.shape[-2] - 1)), (0, 1))

    def scores(self, call: Call) -> Tensor:
        """Return the scores, see `Form.scores`."""
        by_label = call.query @ self.keys.to(call.query.dtype).mT  # (B, H, Q, m + 1)
        content = call.query @ call.key.mT
        return call.cap((content + by_label.gather(-1, self._labels(call, content))) * call.scaling)

    def mix(self, call: Call, weights: Tensor) -> Tensor:
        """Return the weighted sum of values and of their vectors, see `Form.mix`."""
        output = weights @ call.value
        if self.values is None:
            return output
        # Keys with one label share one vector: add their weights first, then multiply once.
        by_label = weights.new_zeros(*weights.shape[:-1], self.values.shape[-2])
        by_label = by_label.scatter_add(-1, self._labels(call, weights), weights)
        return output + by_label @ self.values.to(weights.dtype)

    def _labels(self, call: Call, like: Tensor) -> Tensor:
        """Return clipped distances as indices of the shape of `like`, (B, H, Q, L) int64."""
        return call.distance().clamp(max=self.keys.shape[-2] - 1).to(torch.int64).expand(like.shape)


@dataclass(frozen=True)
class Ranges(Form):
    """`q_n . k_n`: queries and keys hold variants side by side, and the range of a distance says which a pair takes.

    Attributes:
        edges: the distance from which pairs take the second variant, and each further one, see `Form`. Keys have as
            many variants as queries, or one.
        unit: number of neighbouring positions that count as one.
    """

    edges: tuple[int, ...]
    unit: int = 1

    def variants(self, call: Call) -> list[tuple[Tensor, Tensor]]:
        """Return queries (B, H, Q, D) and keys (B, H|K, L, D) of each variant."""
        queries = call.query.chunk(len(self.edges) + 1, -1)
        keys = call.key.split(queries[0].shape[-1], -1)
        return [(query, keys[n % len(keys)]) for n, query in enumerate(queries)]

    def scores(self, call: Call) -> Tensor:
        """Return the scores, see `Form.scores`."""
        first, *others = (query @ key.mT for query, key in self.variants(call))
        i, j = steps(call.positions, self.unit)
        for edge, each in zip(self.edges, others, strict=True):
            first = torch.where(i[:, None, :, None] - j[:, None, None] >= edge, each, first)
        return call.cap(first * call.scaling)


@dataclass(frozen=True)
class RelativeKeys(Form):
    """`(q + u) . k + (q + v) . r_d`: a key for each distance, and biases of the queries.

    Attributes:
        rows: distances, integers (N,) -> their `r`, (H, N, D), float32 or float64.
        content_bias: `u`, (H, D).
        position_bias: `v`, (H, D).
        waves: what `r` is made of, if it is made of waves.
    """

    rows: Callable[[Tensor], Tensor]
    content_bias: Tensor
    position_bias: Tensor
    waves: Waves | None = None
    by_head = ("content_bias", "position_bias")

    def table(self, count: int) -> Tensor:
        """Return `r` of the distances 0, 1, ..., (H, count, D)."""
        return self.rows(torch.arange(count, device=self.content_bias.device))

    def coefficients(self, distances: Tensor) -> Tensor:
        """Return `r_d`, with `v . r_d` appended, see `Form.coefficients`."""
        vectors = self.rows(distances)
        return torch.cat([vectors, vectors @ self.position_bias.to(vectors)[..., None]], -1)

    def with_table(self, count: int) -> RelativeKeys:
        """Return the form with `r` of the first distances computed, see `Form.with_table`."""
        table = self.table(count)
        return replace(self, rows=lambda distances: table.index_select(1, distances))

    def width(self, call: Call) -> int | None:
        """Return X, see `Form.width`: 2 F, and in 16 bits 4 F; None if `r` is not made of waves."""
        columns = 1 if call.query.dtype.itemsize >= 4 else 2
        return None if self.waves is None else columns * self.waves.projection.shape[-1]

    def sides(self, call: Call) -> Sides:
        """Return the sides by the addition theorem, see `Form.sides`.

        With `p = W^T (q + v)`, a sine and a cosine part, `p . [sin w(i - j) | cos w(i - j)]` is the product of `p`
        rotated by `w i` and `[cos w j | sin w j]`.
        """
        assert self.waves is not None
        made, positions = self.waves, call.positions
        dtype, wide = call.query.dtype, compute_dtype(call.query)
        u, v = self.content_bias[:, None], self.position_bias.to(wide)[:, None]
        if call.ratio != 1:
            u, v = call.ratio * u, call.ratio * v

        def columns() -> tuple[Tensor, Tensor, Tensor]:
            i, j = (
                waves(each.clamp(min=0), made.frequencies(), wide)[:, None]
                for each in (positions.query_positions, call.key_positions())
            )
            sin, cos = i.chunk(2, -1)
            # In 16 bits the rest of the key side has columns of its own: half the error.
            j = torch.cat(pieces(j, dtype, 2), -1) if dtype.itemsize < 4 else j.to(dtype)
            return torch.cat([sin, sin], -1), torch.cat([-cos, cos], -1), j

        sin, cos, of_key = positions.once((made.name, dtype), columns)
        projected = (call.query + v) @ made.projection.to(wide)
        turned = projected.roll(projected.shape[-1] // 2, -1)  # sines and cosines change places
        of_query = torch.addcmul(projected * cos, turned, sin).to(dtype)
        copies = of_key.shape[-1] // of_query.shape[-1]
        return Sides((call.query + u).to(dtype), of_query if copies == 1 else of_query.repeat(1, 1, 1, copies), of_key)

    def scores(self, call: Call) -> Tensor:
        """Return the scores, see `Form.scores`."""
        # Everything that contains the query is scaled by `scaling`, the rest by `vector_scaling`.
        u, v = (call.ratio * bias.to(call.query.dtype)[:, None] for bias in (self.content_bias, self.position_bias))
        content = (call.query + u) @ call.key.mT
        by_distance = (call.query + v) @ self.table(call.distances()).mT  # (B, H, Q, distances)
        at = call.distance().to(torch.int64).expand(content.shape)
        return call.cap((content + by_distance.gather(-1, at)) * call.scaling)


@dataclass(frozen=True)
class Waves:
    """Vectors by distance that are made of waves: `r_d = W [sin(w d) | cos(w d)]`.

    Attributes:
        projection: `W`, (H, D, 2F).
        frequencies: returns `w`, (F,), in radians per token.
        name: equal for equal frequencies.
    """

    projection: Tensor
    frequencies: Callable[[], Tensor]
    name: Hashable


@dataclass(frozen=True)
class LinearVectors:
    """Parameters that the vectors by distance of a form, or its bias, are linear in: `r_d = features_d weight`.

    Attributes:
        features: (N, E) of some distances.
        weight: (H, E, D), or (1, E, D) if the heads share it: a view of a parameter. (H, E, 1) for a bias.
        position_bias: (H, D) `v` of `RelativeKeys`: the module's own parameter, or another module's values. None for a
            form without it.
    """

    features: Tensor
    weight: Tensor
    position_bias: Tensor | None = None


def is_one_of(form: Form | None, forms: tuple[type[Form], ...]) -> bool:
    """Return whether a scheme's form is an instance of one of these classes; False for a scheme without a form."""
    return isinstance(form, forms)


def for_form(entries: Mapping[type[Form], T], form: Form) -> T:
    """Return the entry for the class of a form, or for a base of this class; LookupError if there is none."""
    for form_class, entry in entries.items():
        if isinstance(form, form_class):
            return entry
    raise LookupError(type(form).__name__)


def steps(positions: Positions | DensePositions, unit: int) -> tuple[Tensor, Tensor]:
    """Return the positions of queries (B|1, Q) and keys (B|1, L), 0 for padding, in units of so many."""
    i, j = (each.clamp(min=0) for each in (positions.query_positions, positions.key_positions))
    return (i, j) if unit == 1 else (i // unit, j // unit)


def at_distance(table: Tensor, distance: Tensor) -> Tensor:
    """Look up the distance of each pair of query and key in a table.

    Args:
        table: (H, number of distances).
        distance: integers (B|1, 1, Q, L), smaller than the number of distances in the table.

    Returns:
        (B|1, H, Q, L).
    """
    return table.index_select(1, distance.flatten()).view(-1, *distance[:, 0].shape).transpose(0, 1)
