"""Rotation at each call: keys are cached unrotated, and far keys get another distance than their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..attention_call import Call
from ..dims import Dims
from ..dtypes import compute_dtype, wide_dtype
from ..forms import Content
from ..modules import ScoreModule
from ..positions import Positions
from ..registry import register_scheme
from .base import RotatedScheme
from .rope import apply_rotary

_READ = {
    "rerope": ("near", "leak"),
    "self_extend": ("near", "group"),
    "dual_chunk": ("chunk", "length"),
    "dynamic": ("chunk", "length", "factor"),
}
"""Kind -> the hyper-parameters that it reads."""

Attend = Callable[[Call], tuple[Tensor, Tensor | None]]
"""Computes a call of attention: output (B, Q, H, V), and weights (B, H, Q, L) or None."""


@dataclass(frozen=True)
class BaseAngles:
    """How a layer of the base rotates queries and keys.

    Attributes:
        frequencies: angle per token of each pair, in radians, as transformers computes them.
        factor: factor on cosines and sines (YaRN's attention factor).
        pairs: which dimensions are a pair where the call arrives, `half` or `interleaved`, see `apply_rotary`.
        start: first rotated dimension of a head. From there on two dimensions for each frequency are rotated.
        scaling: `rope_type` of the base.
        growth: factor of the base's own dynamic scaling; 1 without.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    pairs: str = "half"
    start: int = 0
    scaling: str = "default"
    growth: float = 1.0

    @classmethod
    def of_head(cls, head_dim: int) -> BaseAngles:
        """Return the rotation of whole heads with a `rope_theta` of 10000, for a base model that does not rotate."""
        pairs = head_dim // 2
        return cls(tuple(10000.0 ** (-u / pairs) for u in range(pairs)))

    def rotate(self, x: Tensor, positions: Tensor, stretch: Tensor | None = None) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: (B, H, T, D).
            positions: (B|1, T), integers or fractions.
            stretch: (B|1, 1) by how much the longest wave is stretched (NTK), or None.

        Returns:
            (B, H, T, D) in float32, or in float64 beside float64.
        """
        dtype = compute_dtype(x)
        frequencies = torch.tensor(self.frequencies, dtype=dtype, device=x.device)
        if stretch is not None:
            count = len(self.frequencies)
            powers = torch.arange(count, dtype=stretch.dtype, device=x.device) / max(count - 1, 1)
            frequencies = (frequencies.to(stretch.dtype) * stretch**-powers).to(dtype)[:, None]
        angles = positions.to(dtype)[..., None] * frequencies  # as transformers does, so that the bits are the same
        cos, sin = (torch.cat([each, each], -1) * self.factor for each in (angles.cos(), angles.sin()))
        x = x.to(dtype)
        return torch.cat([x[..., : self.start], apply_rotary(x[..., self.start :], cos, sin, self.pairs)], -1)

    @property
    def dimensions(self) -> list[tuple[int, int]]:
        """The two dimensions of each pair."""
        first, count = self.start, len(self.frequencies)
        if self.pairs == "half":
            return [(first + u, first + u + count) for u in range(count)]
        return [(first + 2 * u, first + 2 * u + 1) for u in range(count)]


@register_scheme
@dataclass(frozen=True, kw_only=True)
class FarRope(RotatedScheme):
    """The base's rotation, with far keys rotated as if they were nearer; no training. Keys are cached unrotated.

    Equation: `q'_i = R(a_i) q_i`, `k'_j = R(b_j) k_j`, with the base's frequencies, and `d = a_i - b_j`:
    `rerope`: `i - j` below `near`, else `near + leak (i - j - near)` (Su 2023: ReRoPE with `leak` 0, Leaky ReRoPE with
    `leak` 1/k).
    `self_extend`: `i - j` below `near`, else `floor(i/g) - floor(j/g) + near - floor(near/g)` (Jin et al. 2024,
    section 3).
    `dual_chunk`: `b_j = j mod s`, and `a_i` is `i mod s` in the chunk of the query, `min(s + i mod s, c - 1)` for the
    chunk before it, `c - 1` for all earlier ones (An et al. 2024, section 3; `s` is `chunk`, `c` is `length`).
    `dynamic`: `i - j`, and frequencies of the length `n` of the context, `theta' = theta (f n/c - f + 1)^(R/(R-2))`
    (bloc97 and emozilla 2023; `f` is `factor`, `R` the number of rotated dimensions).
    Beyond the training length: no limit. `rerope` without `leak` and `dual_chunk` keep every distance inside the
    trained ones. Distances of `self_extend` grow by 1 in `group` tokens, those of leaky ReRoPE by `leak` per token.
    `dynamic` stretches the waves.
    Deviations: with `dynamic` scaling, transformers rotates the keys of a call by the length of the context at that
    call. Cached keys keep the frequencies of shorter lengths. Here `n` depends on the query alone: it is the query's
    position plus 1, rounded up to whole chunks, and `length` up to there. Keys are rotated anew for each such length,
    so cached generation computes what a full pass computes.
    Source: Su 2023, https://github.com/bojone/rerope; Jin et al. 2024, arXiv:2401.01325; An et al. 2024,
    arXiv:2402.17463; Peng, Quesnelle, Fan, Shippole 2023, arXiv:2309.00071 (dynamic scaling).

    Frequencies, rotated dimensions and YaRN's factor are the base's own, layer by layer. Layers that the base does not
    rotate stay unrotated. A base without rotation gets that of `rope`. The kind `dynamic` takes bases without
    scaling and `dynamic` ones. The other kinds take every base whose frequencies do not depend on the length. A float32
    model with `sdpa` on a CPU computes the bits of the base's attention in short contexts: `near` tokens (`rerope`,
    `self_extend`), the smaller of `length` and two chunks (`dual_chunk`), or `length` (`dynamic`).

    With `window` and `sinks`, `rerope` without a leak keeps the first tokens at the distance `near`, and `dual_chunk`
    below `length`. With a leak, `self_extend` and `dynamic` their distance grows with the text.

    Args:
        kind: `rerope`, `self_extend`, `dual_chunk` or `dynamic`.
        near: number of distances, in tokens, that stay as they are. None means half the length at which the base was
            trained (`rerope`) or a quarter (`self_extend`).
        leak: by how much the distance of far keys grows per token, from 0 to below 1. None means 0.
        group: number of neighbouring positions that far keys share, at least 2. None means 8.
        chunk: number of positions of a chunk. None means 3/4 of `length` (`dual_chunk`), or an eighth (`dynamic`).
        length: length in tokens at which the base was trained. None means what its config says.
        factor: how fast `dynamic` stretches: the longest wave is `1 + factor (n / length - 1)` times as long in a
            context of `n` tokens. At least 1. None means the base's, or 1.
    """

    name: ClassVar[str] = "far_rope"
    known_as: ClassVar[Mapping[str, str]] = {
        other: f'far_rope with kind="{kind}"'
        for kind, others in {
            "rerope": ("rerope", "leaky_rerope"),
            "self_extend": ("self_extend", "selfextend"),
            "dual_chunk": ("dual_chunk", "dca", "chunkllama"),
            "dynamic": ("dynamic_ntk",),
        }.items()
        for other in others
    }
    kind: Literal["rerope", "self_extend", "dual_chunk", "dynamic"] = "rerope"
    near: int | None = None
    leak: float | None = None
    group: int | None = None
    chunk: int | None = None
    length: int | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        """Check the hyper-parameters, each by itself and against the kind."""
        self.one_of("kind", tuple(_READ))
        read = _READ[self.kind]
        for field in ("near", "leak", "group", "chunk", "length", "factor"):
            if getattr(self, field) is not None and field not in read:
                raise ValueError(f"far_rope: kind={self.kind!r} does not read {field}; it reads {', '.join(read)}")
        for field in ("near", "group", "chunk", "length"):
            if getattr(self, field) is not None:
                self.positive(field, int)
        if self.group == 1:
            raise ValueError("far_rope: group must be at least 2: groups of one position change nothing")
        for field in ("leak", "factor"):
            value = getattr(self, field)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise TypeError(f"far_rope: {field} must be a number, not {value!r}")
        if self.leak is not None and not 0 <= self.leak < 1:
            raise ValueError(f"far_rope: leak must be from 0 to below 1, not {self.leak!r}")
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ValueError(f"far_rope: factor must be at least 1 and finite, not {self.factor!r}")
        if self.kind == "dual_chunk" and self.chunk is not None and self.length is not None:
            self._check_chunk(self.chunk, self.length)

    @staticmethod
    def _check_chunk(chunk: int, length: int) -> None:
        if chunk >= length:
            raise ValueError(
                f"far_rope: chunk={chunk} must be below length={length}: their difference is the number of tokens that "
                "keep their distance across two chunks"
            )

    @property
    def acts_from(self) -> int:
        """Number of tokens in the shortest context that the fitted scheme changes."""
        if self.kind == "rerope":  # the distance `near` itself stays
            return (self.near or 0) + 2
        if self.kind == "self_extend":
            return (self.near or 0) + 1
        return (min(self.length or 0, 2 * (self.chunk or 0)) if self.kind == "dual_chunk" else self.length or 0) + 1

    def with_base(
        self, length: int | None, angles: Mapping[int, BaseAngles | None], sizes: Mapping[int, Dims]
    ) -> FarRope:
        """Return the scheme with everything that was None taken from the base, see `RotatedScheme.with_base`.

        Raises:
            ValueError: if a number is missing, or the base's frequencies are not those of one table.
        """
        rotated = [each for each in angles.values() if each is not None]
        for each in rotated:
            if self.kind == "dynamic" and each.scaling not in ("default", "dynamic"):
                raise ValueError(
                    f"far_rope: kind='dynamic' stretches unscaled frequencies, and this base has a scaling of type "
                    f"{each.scaling}: choose rerope, self_extend or dual_chunk, or name other layers"
                )
            if self.kind != "dynamic" and each.scaling == "dynamic":
                raise ValueError(
                    "far_rope: the frequencies of this base depend on the length of the context (dynamic), so they are "
                    "no table from which distances could be changed: choose kind='dynamic'"
                )
        growth = max((each.growth for each in rotated), default=1.0)
        return self.filled(length if self.length is None else self.length, growth)

    def filled(self, length: int | None, growth: float = 1.0) -> FarRope:
        """Return the scheme with a number for everything that its kind reads.

        Raises:
            ValueError: if a number depends on the length of the base, which is None.
        """
        values: dict[str, Any] = {field: getattr(self, field) for field in _READ[self.kind]}
        missing = [field for field in ("near", "chunk", "length") if values.get(field, 0) is None]
        if missing and length is None:
            raise ValueError(
                f"far_rope: the config does not say the length at which the base was trained, so give "
                f"{' and '.join(missing)}"
            )
        shares = {"rerope": 1 / 2, "self_extend": 1 / 4, "dual_chunk": 3 / 4, "dynamic": 1 / 8}
        share = max(1, int((length or 0) * shares[self.kind]))
        defaults: dict[str, Any] = {
            "near": share,
            "leak": 0.0,
            "group": 8,
            "chunk": share,
            "length": length,
            "factor": growth,
        }
        chosen: dict[str, Any] = {key: defaults[key] if value is None else value for key, value in values.items()}
        return replace(self, **chosen)

    def build(self, dims: Dims) -> ScoreModule:
        """Return the module of one layer, with the rotation of `rope`; the placement gives it that of the base."""
        scheme, angles = self.filled(self.length), BaseAngles.of_head(dims.head_dim)
        near, chunk, length = scheme.near or 0, scheme.chunk or 0, scheme.length or 0
        if self.kind == "dynamic":
            return GrowingRotation(angles, chunk, length, scheme.factor or 1.0)
        if self.kind == "dual_chunk":
            return FarRotation(angles, Chunks(chunk, length))
        if self.kind == "self_extend":
            return FarRotation(angles, Grouped(near, scheme.group or 0))
        return FarRotation(angles, Clamped(near, scheme.leak or 0.0))

    def build_at(self, number: int, dims: Dims, angles: BaseAngles | None) -> ScoreModule:
        """Return the module of one layer, see `RotatedScheme.build_at`."""
        module: Any = self.build(dims)
        module.angles = angles
        return module


class Distances:
    """The distance that each pair of query and key gets.

    A variant is one rotation of queries and keys. A prepared call holds all variants side by side, and `scores` picks
    one for each pair.

    Attributes:
        variants: number of variants of a query. Keys have as many, or one for all of them.
    """

    variants: ClassVar[int] = 2

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        """Return the positions of queries in each variant, from their own positions (B|1, Q)."""
        raise NotImplementedError(type(self).__name__)

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        """Return the positions of keys in each variant, from their own positions (B|1, L)."""
        raise NotImplementedError(type(self).__name__)

    def variant(self, call: Call) -> Tensor:
        """Return which variant each pair takes, integers (B|1, 1, Q, L); anything for keys that come later."""
        raise NotImplementedError(type(self).__name__)

    def keeps(self, last: int, farthest: int) -> bool:
        """Return whether no distance changes in a call with this last position and no distance above `farthest`."""
        raise NotImplementedError(type(self).__name__)

    def scores(self, call: Call) -> Tensor:
        """Return the scores of a widened call before masking, (B, H, Q, L)."""
        queries = call.query.chunk(self.variants, -1)
        keys = call.key.split(queries[0].shape[-1], -1)
        variant = self.variant(call)
        scores = queries[0] @ keys[0].mT
        for n in range(1, self.variants):
            scores = torch.where(variant == n, queries[n] @ keys[n % len(keys)].mT, scores)
        return call.cap(scores * call.scaling)

    def mix(self, call: Call, weights: Tensor) -> Tensor:
        """Return the weighted sum of values (B, H, Q, V), from weights (B, H, Q, L) of a widened call."""
        return weights @ call.value


@dataclass(frozen=True)
class Clamped(Distances):
    """Distances that grow by `leak` from `near` on."""

    near: int
    leak: float

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, self.near + self.leak * (at.to(wide_dtype(at.device)) - self.near)

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, self.leak * at.to(wide_dtype(at.device))

    def variant(self, call: Call) -> Tensor:
        return (own_distance(call) >= self.near).to(torch.uint8)

    def keeps(self, last: int, farthest: int) -> bool:
        return farthest <= self.near


@dataclass(frozen=True)
class Grouped(Distances):
    """Distances between groups of positions from `near` on."""

    near: int
    group: int

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, at // self.group + self.near - self.near // self.group

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, at // self.group

    def variant(self, call: Call) -> Tensor:
        return (own_distance(call) >= self.near).to(torch.uint8)

    def keeps(self, last: int, farthest: int) -> bool:
        return farthest < self.near


@dataclass(frozen=True)
class Chunks(Distances):
    """Distances inside a chunk, to the chunk before, and to earlier chunks."""

    chunk: int
    length: int
    variants: ClassVar[int] = 3

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        inside = at % self.chunk
        return inside, (inside + self.chunk).clamp(max=self.length - 1), torch.full_like(at, self.length - 1)

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return (at % self.chunk,)

    def variant(self, call: Call) -> Tensor:
        queries, keys = call.positions.query_positions.clamp(min=0), key_positions(call)
        return (queries[:, None, :, None] // self.chunk - keys[:, None, None] // self.chunk).clamp(0, 2)

    def keeps(self, last: int, farthest: int) -> bool:
        return last < min(self.length, 2 * self.chunk)


def key_positions(call: Call) -> Tensor:
    """Return the positions of the keys, (B|1, L), 0 for padding."""
    return call.positions.positions_of_keys().clamp(min=0)


def own_distance(call: Call) -> Tensor:
    """Return query position minus key position, (B|1, 1, Q, L), also of first tokens that stay behind a window."""
    return call.positions.query_positions.clamp(min=0)[:, None, :, None] - key_positions(call)[:, None, None]


class Rotated(ScoreModule):
    """A module that rotates queries and keys of a call. `angles` is None in layers that the base does not rotate."""

    def __init__(self, angles: BaseAngles | None) -> None:
        """Set the rotation.

        Args:
            angles: the rotation of the base; the placement replaces it.
        """
        super().__init__()
        self.angles = angles

    def reach(self, call: Call) -> tuple[int, int] | None:
        """Return the last position of a call and an upper bound of its visible distances, or None while it is traced.

        This reads from the device.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a trace would keep the numbers of its example
            return None
        positions = call.positions
        last = positions.query_positions.amax()
        farthest = last - key_positions(call).amin()
        if isinstance(positions, Positions) and positions.key_kept is None:
            slots = positions.key_index.diff()
            counted = ((positions.key_positions.diff() <= slots) & (slots >= 0)).all()  # as a window counts slots
            farthest = torch.where(counted, torch.minimum(farthest, positions.window.amax() - 1), farthest)
        return int(last), int(farthest)

    def turned(self, call: Call, *, wide: bool, stretch: Tensor | None = None) -> Call:
        """Return a call whose queries and keys are rotated by their own positions.

        Args:
            call: the call.
            wide: whether queries, keys and values shall be in float32 or float64, instead of their dtypes.
            stretch: see `BaseAngles.rotate`.
        """
        assert self.angles is not None
        query = self.angles.rotate(call.query, call.positions.query_positions.clamp(min=0), stretch)
        key = self.angles.rotate(call.key, key_positions(call), stretch)
        if not wide:
            return replace(call, query=query.to(call.query.dtype), key=key.to(call.key.dtype), form=Content())
        return replace(call, query=query, key=key, value=call.value.to(query.dtype), form=Content())


class FarRotation(Rotated):
    """The module of one layer, without parameters, for the kinds that change distances of far keys."""

    def __init__(self, angles: BaseAngles | None, distances: Distances) -> None:
        """Set the rotation and the distances.

        Args:
            angles: the rotation of the base; the placement replaces it.
            distances: the distances of near and far keys.
        """
        super().__init__(angles)
        self.distances = distances

    def forward(self, call: Call, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """Hand a call with rotated queries and keys to an engine, see `ScoreModule.forward`."""
        self.check_positions(call)
        output, weights = attend(self.prepared(call))
        return output.to(call.query.dtype), None if weights is None else weights.to(call.query.dtype)

    def scores(self, call: Call) -> Tensor:
        """Return the scores before masking, see `ScoreModule.scores`."""
        prepared = self.prepared(call)
        return prepared.formula.scores(prepared)

    def prepared(self, call: Call) -> Call:
        """Return a call with rotated queries and keys, and the formula of its scores."""
        if self.angles is None:
            return replace(call, module=self, form=Content())
        reach = self.reach(call)
        if reach is not None and self.distances.keeps(*reach):
            return self.turned(call, wide=False)
        queries = self.distances.query_positions(call.positions.query_positions.clamp(min=0))
        keys = self.distances.key_positions(key_positions(call))
        dtype = compute_dtype(call.query)
        query, key = call.query.to(dtype), call.key.to(dtype)  # once, because each conversion rounds a gradient
        return replace(
            call,
            query=torch.cat([self.angles.rotate(query, at) for at in queries], -1),
            key=torch.cat([self.angles.rotate(key, at) for at in keys], -1),
            module=self.distances,
            form=None,
        )


class GrowingRotation(Rotated):
    """The module of one layer, without parameters, for waves that grow with the length of the context."""

    def __init__(self, angles: BaseAngles | None, chunk: int, length: int, factor: float) -> None:
        """Set the rotation and its growth.

        Args:
            angles: the rotation of the base; the placement replaces it.
            chunk: number of positions whose queries share their frequencies.
            length: length in tokens at which the base was trained.
            factor: see `FarRope`.
        """
        super().__init__(angles)
        self.chunk, self.length, self.factor = chunk, length, factor

    def forward(self, call: Call, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """Hand calls with rotated queries and keys to an engine, one for each length, see `ScoreModule.forward`."""
        self.check_positions(call)
        if torch.compiler.is_compiling() and call.query.shape[2] > 1:
            return self.outside_of_graphs(call, attend)
        return self.attended(call, attend)

    @torch.compiler.disable
    def outside_of_graphs(self, call: Call, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """Attend without being traced: how many lengths there are in a call is known when it runs."""
        return self.attended(call, attend)

    def attended(self, call: Call, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """Return the output and the weights of a call, see `ScoreModule.forward`."""
        dtype = call.query.dtype
        found = [(chosen, *attend(part)) for chosen, part in self.parts(call)]
        output = _together([(chosen, part) for chosen, part, _ in found], 1, call.query.shape[2]).to(dtype)
        weights = [(chosen, part) for chosen, _, part in found if part is not None]
        return output, _together(weights, 2, call.query.shape[2]).to(dtype) if weights else None

    def scores(self, call: Call) -> Tensor:
        """Return the scores before masking, see `ScoreModule.scores`."""
        found = [(chosen, part.formula.scores(part)) for chosen, part in self.parts(call)]
        return _together(found, 2, call.query.shape[2])

    def lengths(self, call: Call) -> Tensor:
        """Return the length of the context by which each query is rotated, integers (B|1, Q)."""
        seen = call.positions.query_positions.clamp(min=0) + 1
        chunks = (seen + self.chunk - 1) // self.chunk
        return torch.where(seen <= self.length, self.length, chunks * self.chunk)

    def stretch(self, lengths: Tensor) -> Tensor:
        """Return by how much the longest wave is stretched for these lengths, in the shape of `lengths`."""
        return self.factor * lengths.to(wide_dtype(lengths.device)) / self.length - (self.factor - 1)

    def parts(self, call: Call) -> list[tuple[Chosen | None, Call]]:
        """Return calls with rotated queries and keys, and which queries each of them is for; None means all."""
        if self.angles is None:
            return [(None, replace(call, module=self, form=Content()))]
        lengths = self.lengths(call)
        if lengths.shape[1] == 1 and torch.compiler.is_compiling():
            return [(None, self.turned(call, wide=True, stretch=self.stretch(lengths)))]
        if torch.jit.is_tracing():
            raise NotImplementedError(
                "far_rope: torch.jit.trace would keep the lengths of its example, and kind='dynamic' depends on them: "
                "choose another kind, or torch.compile"
            )
        found = [int(length) for length in lengths.unique()]
        if found == [self.length]:
            return [(None, self.turned(call, wide=False))]
        if lengths.shape[1] == 1:  # a single query per sequence: one call, with a length for each sequence
            return [(None, self.turned(call, wide=True, stretch=self.stretch(lengths)))]
        parts: list[tuple[Chosen | None, Call]] = []
        dtype = compute_dtype(call.query)
        call = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))
        for length in found:
            here = lengths == length
            rows = here.any(0).nonzero()[:, 0]
            part = call.cut(rows, slice(None))
            stretch = self.stretch(lengths.new_full((1, 1), length))
            parts.append((Chosen(rows, here[:, rows]), self.turned(part, wide=True, stretch=stretch)))
        return parts


class Chosen(NamedTuple):
    """Some of the queries of a call.

    Attributes:
        rows: (N,) their places among the Q queries.
        here: (B|1, N) whether a row of the batch takes this query.
    """

    rows: Tensor
    here: Tensor


def _together(parts: list[tuple[Chosen | None, Tensor]], dim: int, count: int) -> Tensor:
    """Join the results of several calls into one tensor, with `count` queries along dimension `dim` (1 or 2)."""
    chosen, first = parts[0]
    if chosen is None:
        return first
    together = first.new_zeros(*first.shape[:dim], count, *first.shape[dim + 1 :])
    for chosen, found in parts:
        assert chosen is not None
        here = chosen.here[(slice(None), *[None] * (dim - 1), slice(None), *[None] * (found.ndim - dim - 1))]
        together = together.index_add(dim, chosen.rows, torch.where(here, found, 0))
    return together
