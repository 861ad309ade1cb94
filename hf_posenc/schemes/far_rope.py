"""Rotation at each call: keys are cached unrotated, and far keys get another distance than their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.dtypes import compute_dtype, constant, wide_dtype
from ..core.forms import Content, Ranges
from ..core.modules import ScoreModule
from ..core.positions import NO_WINDOW, Positions, can_read, is_tracing
from ..core.registry import register_scheme
from .base import RotatedScheme
from .rope import apply_rotary

_READ = {"rerope": ("near", "leak"), "self_extend": ("near", "group"), "dual_chunk": ("chunk", "length")}
"""Kind -> the hyper-parameters that it reads."""

_SHARES = {"rerope": 1 / 2, "self_extend": 1 / 4, "dual_chunk": 3 / 4}
"""Kind -> the share of the trained length that its `near`, or `chunk`, is by default."""

_ALSO = {"rerope": ["leaky_rerope"], "self_extend": ["selfextend"], "dual_chunk": ["dca", "chunkllama"]}
"""Kind -> other names of it."""


@dataclass(frozen=True)
class BaseAngles:
    """How a layer of the base rotates queries and keys.

    Attributes:
        frequencies: angle per token of each pair, in radians, as transformers computes them.
        factor: factor on cosines and sines (YaRN's attention factor).
        pairs: which dimensions are a pair where the call arrives, `half` or `interleaved`, see `apply_rotary`.
        start: first rotated dimension of a head. From there on two dimensions for each frequency are rotated.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    pairs: str = "half"
    start: int = 0

    @classmethod
    def of_head(cls, head_dim: int) -> BaseAngles:
        """Return the rotation of whole heads with a `rope_theta` of 10000, for a base model that does not rotate."""
        pairs = head_dim // 2
        return cls(tuple(10000.0 ** (-u / pairs) for u in range(pairs)))

    def waves(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions (B|1, T), integers or fractions, as `apply_rotary` takes them."""
        frequencies = constant(self.frequencies, dtype, positions)
        angles = positions.to(dtype)[..., None] * frequencies  # as transformers does, so that the bits are the same
        cos, sin = (torch.cat([each, each], -1) * self.factor for each in (angles.cos(), angles.sin()))
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries or keys (B, H, T, D) rotated by `waves`, in the dtype of these."""
        x = x.to(cos.dtype)
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
    Beyond the training length: no limit. `rerope` without `leak` and `dual_chunk` keep every distance inside the
    trained ones. Distances of `self_extend` grow by 1 in `group` tokens, those of leaky ReRoPE by `leak` per token.
    Deviations: none.
    Source: Su 2023, https://github.com/bojone/rerope; Jin et al. 2024, arXiv:2401.01325; An et al. 2024,
    arXiv:2402.17463.

    Frequencies, rotated dimensions and YaRN's factor are the base's own, layer by layer. Layers that the base does not
    rotate stay unrotated. A base without rotation gets that of `rope`. Bases whose frequencies depend on the length of
    the context are refused. A float32 model with `sdpa` on a CPU computes the bits of the base's attention in short
    contexts: `near` tokens (`rerope`, `self_extend`), or the smaller of `length` and two chunks (`dual_chunk`).

    With `window` and `sinks`, `rerope` without a leak keeps the first tokens at the distance `near`, and `dual_chunk`
    below `length`. With a leak and with `self_extend` their distance grows with the text.

    Args:
        kind: `rerope`, `self_extend` or `dual_chunk`.
        near: number of distances, in tokens, that stay as they are. None means half the length at which the base was
            trained (`rerope`) or a quarter (`self_extend`).
        leak: by how much the distance of far keys grows per token, from 0 to below 1. None means 0.
        group: number of neighbouring positions that far keys share, at least 2. None means 8.
        chunk: number of positions of a chunk, below `length`. None means 3/4 of `length`.
        length: length in tokens at which the base was trained. None means what its config says.
    """

    name: ClassVar[str] = "far_rope"
    known_as: ClassVar[Mapping[str, str]] = {
        other: f'far_rope with kind="{kind}"' for kind, others in _ALSO.items() for other in (kind, *others)
    }
    kind: Literal["rerope", "self_extend", "dual_chunk"] = "rerope"
    near: int | None = None
    leak: float | None = None
    group: int | None = None
    chunk: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        """Check the hyper-parameters, each by itself and against the kind."""
        self.one_of("kind", tuple(_READ))
        given = [field for field in ("near", "leak", "group", "chunk", "length") if getattr(self, field) is not None]
        for field in given:
            if field not in (read := _READ[self.kind]):
                raise ValueError(f"far_rope: kind={self.kind!r} does not read {field}; it reads {', '.join(read)}")
            if field == "leak":
                self.number(field, lambda leak: 0 <= leak < 1, "from 0 to below 1")
            else:
                self.positive(field, int)
        if self.group == 1:
            raise ValueError("far_rope: group must be at least 2: groups of one position change nothing")
        if self.chunk is not None and self.length is not None and self.chunk >= self.length:
            raise ValueError(
                f"far_rope: chunk={self.chunk} must be below length={self.length}: their difference is the number of "
                "tokens that keep their distance across two chunks"
            )

    @property
    def distances(self) -> Distances:
        """The distances of the fitted scheme."""
        near, chunk = self.near or 0, self.chunk or 0
        if self.kind == "dual_chunk":
            return Chunks(chunk, self.length or 0)
        return Clamped(near, self.leak or 0.0) if self.kind == "rerope" else Grouped(near, self.group or 0)

    @property
    def acts_from(self) -> int:
        """Number of tokens in the shortest context that the fitted scheme changes."""
        return self.distances.unchanged + 1

    def with_base(
        self, length: int | None, angles: Mapping[int, BaseAngles | None], sizes: Mapping[int, Dims]
    ) -> FarRope:
        return self.filled(length if self.length is None else self.length)

    def filled(self, length: int | None) -> FarRope:
        """Return the scheme with a number for everything that its kind reads.

        Raises:
            ValueError: if a number depends on the length of the base, which is None.
        """
        missing = [field for field in _READ[self.kind] if getattr(self, field) is None]
        depending = [field for field in ("near", "chunk", "length") if field in missing]
        if depending and length is None:
            raise ValueError(
                f"far_rope: the config does not say the length at which the base was trained, so give "
                f"{' and '.join(depending)}"
            )
        share = max(1, int((length or 0) * _SHARES[self.kind]))
        defaults: dict[str, Any] = {"near": share, "leak": 0.0, "group": 8, "chunk": share, "length": length}
        return replace(self, **{field: defaults[field] for field in missing})

    def build(self, dims: Dims) -> FarRotation:
        return self.build_at(0, dims, BaseAngles.of_head(dims.head_dim))

    def build_at(self, number: int, dims: Dims, angles: BaseAngles | None) -> FarRotation:
        return FarRotation(angles, self.filled(self.length).distances)


class Distances:
    """The distance that each pair of query and key gets.

    A variant is one rotation of queries and keys. A prepared call holds all variants side by side.

    Attributes:
        near: the distance from which on keys take the second variant.
    """

    near: int

    @property
    def form(self) -> Ranges:
        """Which variant each pair takes."""
        return Ranges((self.near,))

    @property
    def unchanged(self) -> int:
        """Number of tokens in the longest context in which no distance changes."""
        return self.near

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        """Return the positions of queries in each variant, from their own positions (B|1, Q)."""
        raise NotImplementedError(type(self).__name__)

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        """Return the positions of keys in each variant, from their own positions (B|1, L)."""
        raise NotImplementedError(type(self).__name__)

    def keeps(self, last: int, farthest: int) -> bool:
        """Return whether no distance changes in a call with this last position and no distance above `farthest`."""
        return farthest < self.unchanged


@dataclass(frozen=True)
class Clamped(Distances):
    """Distances that grow by `leak` from `near` on."""

    near: int
    leak: float

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, self.near + self.leak * (at.to(wide_dtype(at.device)) - self.near)

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, self.leak * at.to(wide_dtype(at.device))

    @property
    def unchanged(self) -> int:
        return self.near + 1  # the distance `near` itself stays


@dataclass(frozen=True)
class Grouped(Distances):
    """Distances between groups of positions from `near` on."""

    near: int
    group: int

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, at // self.group + self.near - self.near // self.group

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return at, at // self.group


@dataclass(frozen=True)
class Chunks(Distances):
    """Distances inside a chunk, to the chunk before, and to earlier chunks."""

    chunk: int
    length: int

    @property
    def form(self) -> Ranges:
        return Ranges((1, 2), self.chunk)

    def query_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        inside = at % self.chunk
        return inside, (inside + self.chunk).clamp(max=self.length - 1), torch.full_like(at, self.length - 1)

    def key_positions(self, at: Tensor) -> tuple[Tensor, ...]:
        return (at % self.chunk,)

    @property
    def unchanged(self) -> int:
        return min(self.length, 2 * self.chunk)

    def keeps(self, last: int, farthest: int) -> bool:
        return last < self.unchanged


def key_positions(call: Call) -> Tensor:
    """Return the positions of the keys, (B|1, L), 0 for padding."""
    return call.positions.key_positions.clamp(min=0)


class Rotated(ScoreModule):
    """A module that rotates queries and keys of a call. `angles` is None in layers that the base does not rotate."""

    def __init__(self, angles: BaseAngles | None) -> None:
        """Set the rotation.

        Args:
            angles: the rotation of the base.
        """
        super().__init__()
        self.angles = angles

    def scores(self, call: Call) -> Tensor:
        """Return the scores before masking, see `ScoreModule.scores`."""
        prepared = self.prepared(call)
        return prepared.formula.scores(prepared)

    def prepared(self, call: Call) -> Call:
        """Return a call with rotated queries and keys, and the formula of its scores."""
        if self.angles is None:
            return replace(call, module=self, form=Content())
        return self.turned(call, self.angles)

    def turned(self, call: Call, angles: BaseAngles) -> Call:
        """Return a call whose queries and keys are rotated by their own positions."""
        (of_query,), (of_key,) = _waves(call, angles)
        query, key = angles.rotate(call.query, *of_query), angles.rotate(call.key, *of_key)
        return replace(call, query=query.to(call.query.dtype), key=key.to(call.key.dtype), form=Content())


def _waves(call: Call, angles: BaseAngles, distances: Distances | None = None) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the waves of each variant of queries and keys, or of their own positions; once for all layers."""
    dtype = compute_dtype(call.query)

    def made() -> list[list[tuple[Tensor, Tensor]]]:
        i, j = call.positions.query_positions.clamp(min=0), key_positions(call)
        sides = [(i,), (j,)] if distances is None else [distances.query_positions(i), distances.key_positions(j)]
        return [[angles.waves(each, dtype) for each in side] for side in sides]

    return call.positions.once((angles, distances, dtype), made)


class FarRotation(Rotated):
    """The module of one layer, without parameters."""

    def __init__(self, angles: BaseAngles | None, distances: Distances) -> None:
        """Set the rotation and the distances.

        Args:
            angles: the rotation of the base.
            distances: the distances of near and far keys.
        """
        super().__init__(angles)
        self.distances = distances

    def reach(self, call: Call) -> tuple[int, int] | None:
        """Return upper bounds of the positions and of the visible distances of a call, or None where none is known.

        On a CPU they are read. Elsewhere to read would wait for the device, and slots tell them, without padding.
        """
        if is_tracing():  # a trace would keep the numbers of its example
            return None
        positions, keys = call.positions, call.key.shape[2]
        if not can_read(positions.query_positions):
            if positions.aligned:
                return keys - 1, keys - 1
            cached = call.query.shape[2] < keys and isinstance(positions, Positions) and positions.key_kept is None
            return (NO_WINDOW, keys - 1) if cached else None  # between tokens of a cache are no gaps
        last = positions.query_positions.amax()
        farthest = last - key_positions(call).amin()
        if isinstance(positions, Positions) and positions.key_kept is None:
            slots = positions.key_index.diff()
            counted = ((positions.key_positions.diff() <= slots) & (slots >= 0)).all()  # as a window counts slots
            farthest = torch.where(counted, torch.minimum(farthest, positions.window.amax() - 1), farthest)
        return int(last), int(farthest)

    def turned(self, call: Call, angles: BaseAngles) -> Call:
        """Return a call with all variants of queries and keys side by side, or with one if that is enough."""
        reach = self.reach(call)
        if reach is not None and self.distances.keeps(*reach):
            return super().turned(call, angles)
        queries, keys = _waves(call, angles, self.distances)
        dtype = compute_dtype(call.query)
        query, key = call.query.to(dtype), call.key.to(dtype)  # once, because each conversion rounds a gradient
        return replace(
            call,
            query=torch.cat([angles.rotate(query, *each) for each in queries], -1),
            key=torch.cat([angles.rotate(key, *each) for each in keys], -1),
            module=self,
            form=self.distances.form,
        )
