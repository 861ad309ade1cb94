"""Five properties of an ideal position encoding, tested numerically for a scheme.

The properties follow Kazemnejad 2019 (kazemnejad.com/blog/transformer_architecture_positional_encoding) and Su 2021:

1. every position has a unique encoding, at any length;
2. a linear map leads from any position to any other;
3. the encoding generalises beyond the training length;
4. it is deterministic: a rule generates it;
5. it extends to several dimensions.

The tests read what an untrained scheme feeds into a model, not the model's output. For the third property measure
perplexity by length as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..api import schemes_of
from ..core.dims import Dims
from ..core.measurement import Result
from ..core.modules import ScoreModule, WithoutPositions, owner_of, query_modules
from ..model.base_model import BaseModel
from ..schemes.base import Scheme
from . import probe

Verdict = Literal["yes", "no", "not applicable"]
Finding = tuple[Verdict, str]
"""A verdict, and a sentence with the numbers behind it."""

UNIQUE = 1e-9
"""Two positions count as equal if their representations are closer than this, relative to their size."""
LINEAR = 1e-4
"""Largest relative residual of a linear map. transformers computes the cosines of `rope` in float32."""
EXCESS = 0.01
"""A coordinate leaves the range seen in training if it exceeds the range by more than this share of it."""


@dataclass(frozen=True)
class Property(Result):
    """The verdict on one property.

    Attributes:
        name: `unique`, `linear`, `generalises`, `deterministic` or `dimensions`.
        verdict: `yes`, `no` or `not applicable`.
        evidence: a sentence with the numbers behind the verdict.
    """

    name: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Properties(Result):
    """The five properties of one scheme.

    Attributes:
        scheme: name of the scheme.
        trained_length: length of the training, in tokens.
        tested_length: number of positions that were tested.
        rows: the properties, in the order of the list above.
    """

    scheme: str
    trained_length: int
    tested_length: int
    rows: tuple[Property, ...]

    def __str__(self) -> str:
        """Return a table."""
        lines = [f"{self.scheme}, on a base trained at {self.trained_length}, tested up to {self.tested_length}"]
        return "\n".join(lines + [f"  {row.name:<14} {row.verdict:<15} {row.evidence}" for row in self.rows])


def linear_map(frequencies: Tensor, shift: int, *, size: int, layout: str = "interleaved") -> Tensor:
    """Return the matrix `M_k` that shifts sinusoids by `k` positions, `p(t + k) = M_k p(t)` for every t.

    It rotates every pair (sine, cosine) by the angle `k w_u`.

    Args:
        frequencies: (E/2,) radians per token.
        shift: k in tokens, positive or negative.
        size: E, even. Sinusoids of odd size have no such map, because their last sine has no cosine.
        layout: layout of the scheme, `interleaved` or `split`.

    Returns:
        (E, E) float64.

    Raises:
        ValueError: for an odd size.
    """
    if size % 2:
        raise ValueError(f"a table of odd size {size} ends on a sine without its cosine: no linear map shifts it")
    pairs = torch.arange(size // 2)
    sines, cosines = (2 * pairs, 2 * pairs + 1) if layout == "interleaved" else (pairs, pairs + size // 2)
    angles = shift * frequencies.double()
    matrix = torch.zeros(size, size, dtype=torch.float64)
    matrix[sines, sines] = matrix[cosines, cosines] = angles.cos()
    matrix[sines, cosines] = angles.sin()
    matrix[cosines, sines] = -angles.sin()
    return matrix


@torch.no_grad()
def properties(
    scheme: str | Scheme,
    *,
    trained_length: int = probe.TRAINED_LENGTH,
    factor: int = 4,
    dims: Dims = probe.DIMS,
    seed: int = 0,
    **hyperparameters: object,
) -> Properties:
    """Test the five properties of a scheme with its initial parameters.

    A position is represented by the vector that is added (`sinusoidal`, `learned`), or by the cosines and sines that
    rotate a query (`rope`). Schemes on scores depend on distances only. There a distance is represented by the scores
    of a few fixed queries and keys.

    Args:
        scheme: a registered name, or an instance.
        trained_length: length in tokens that the base was trained at. For RoPE with a scaling, this is the length
            before the scaling, and the range seen in training is that of RoPE without it.
        factor: positions up to `factor * trained_length` are tested; time grows with the square.
        dims: sizes of the attention.
        seed: seed of parameters with random initial values.
        **hyperparameters: hyper-parameters, for a name.
    """
    model = probe.build(scheme, dims=dims, trained_length=trained_length, seed=seed, **hyperparameters)
    subject, length = _subject(model), factor * trained_length
    findings = WITHOUT_POSITIONS if subject is None else _findings(subject, trained_length, length)
    rows = tuple(Property(name, *finding) for name, finding in findings.items())
    return Properties(schemes_of(model)[-1].name, trained_length, length, rows)


WITHOUT_POSITIONS: dict[str, Finding] = {
    "unique": ("no", "all positions are the same: there are none"),
    "linear": ("not applicable", "positions have no representation"),
    "generalises": ("not applicable", "without positions nothing is new at a longer context"),
    "deterministic": ("yes", "without positions nothing is drawn"),
    "dimensions": ("not applicable", "no dimension has positions"),
}
"""The findings on a scheme without positions."""

Represent = Callable[[Tensor], Tensor]
"""Positions (T,) -> their representations (T, F), float64, with gradients to the parameters."""


@dataclass(frozen=True)
class _Subject:
    """The scheme that is tested.

    Attributes:
        represent: function from positions to representations.
        module: the module that encodes positions.
        seen: `represent` at the time of the base's training; None if it was the same.
        limit: number of positions that exist, or None if there is no limit.
        what: `distances` or `positions`, whichever is represented.
    """

    represent: Represent
    module: nn.Module
    seen: Represent | None = None
    limit: int | None = None
    what: Literal["distances", "positions"] = "positions"

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the position encoding."""
        return tuple(self.module.parameters())


def _subject(model: PreTrainedModel) -> _Subject | None:
    """Return what encodes the positions in a model of one layer; None if nothing does."""
    base = BaseModel.of(model)
    attention = base.modules.attentions[0]
    owner = owner_of(attention._modules.get("posenc"))
    if isinstance(owner, ScoreModule) and not isinstance(owner, WithoutPositions) and not query_modules(attention):
        return _Subject(_score_representation(owner, base.sizes[0]), owner, what="distances")
    if (added := probe.added_to(model)) is not None:
        return _Subject(added, added.module, limit=added.limit)
    rotary, angles = probe.rotary_of(model)
    if rotary is None:
        return None

    def represent(positions: Tensor) -> Tensor:
        cos, sin = probe.rotations(rotary, positions, angles=angles)
        return torch.cat([cos, sin], -1) / torch.hypot(cos, sin).repeat(1, 2)  # without a scaling's attention factor

    config = getattr(getattr(rotary, "rotary", rotary), "config", None)  # one for a part of each head wraps another
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type", "default") in ("default", "proportional"):
        return _Subject(represent, rotary)
    pairs = represent(torch.arange(1)).shape[-1] // 2
    turned = int(pairs * scaling.get("partial_rotary_factor", 1.0))
    waves = torch.zeros(pairs, dtype=torch.float64)  # those of the pairs that are not turned stay 0
    waves[:turned] = scaling["rope_theta"] ** -(torch.arange(turned, dtype=torch.float64) / turned)

    def without_scaling(positions: Tensor) -> Tensor:
        angle = positions[:, None] * waves
        return torch.cat([angle.cos(), angle.sin()], -1)

    return _Subject(represent, rotary, seen=without_scaling)


def _findings(subject: _Subject, trained: int, length: int) -> dict[str, Finding]:
    """Return name of a property -> finding, for positions up to `length`."""
    table = _has_table(subject)
    signature = subject.represent(torch.arange(min(length, subject.limit or length)))
    return {
        "unique": _unique(signature, subject, length),
        "linear": _linear(signature, subject, table),
        "generalises": _generalises(signature, subject, trained, length),
        "deterministic": _deterministic(subject, table),
        "dimensions": _dimensions(subject, table),
    }


def _score_representation(module: ScoreModule, dims: Dims) -> Represent:
    """Return the representation of distances by scores. Every head and fixed query gives one coordinate."""
    generator = torch.Generator().manual_seed(0)
    # Non-negative products, because DA-Transformer's ReLU would set negative ones to 0 whatever the factor.
    query, key = (
        torch.rand(4, dims.num_heads, 1, dims.head_dim, generator=generator, dtype=torch.float64) for _ in range(2)
    )

    def represent(positions: Tensor) -> Tensor:
        keys = key.expand(-1, -1, len(positions), -1)
        scores = probe.scores_at(module, query, keys, positions, dims.head_dim**-0.5)
        hidden = scores < torch.finfo(scores.dtype).min / 2  # outside a window: sizes of finite scores
        scores = scores.masked_fill(hidden, scores.masked_fill(hidden, 0).amin())
        return scores.flatten(0, 2).T.double()

    return represent


def _has_table(subject: _Subject) -> bool:
    """Return whether positions have parameters of their own. Gradients show which parameters a position uses.

    They have if two positions share none. A network of ReLUs (FIRE) uses other units at other distances, but all of
    them use the parameters of its input.
    """
    if not subject.parameters:
        return False
    last = min(6, subject.limit or 6)
    with torch.enable_grad():
        rows = subject.represent(torch.arange(1, last))
        mixed = rows @ torch.rand(rows.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        used = []
        for each in mixed:
            gradients = torch.autograd.grad(each, subject.parameters, retain_graph=True, allow_unused=True)
            used.append(torch.cat([grad.flatten() != 0 for grad in gradients if grad is not None]))
    by_position = torch.stack(used).double()
    by_position = by_position[by_position.any(1)]
    return bool((by_position @ by_position.mT == 0).any())


def _unique(signature: Tensor, subject: _Subject, length: int) -> Finding:
    closest, pair = _closest(signature)
    evidence = f"closest of {len(signature)} {subject.what}: {pair[0]} and {pair[1]}, {closest:.1e} of their size apart"
    if len(signature) < length:
        return "no", f"{evidence}; no vector from {subject.what[:-1]} {len(signature)} on"
    return "yes" if closest > UNIQUE else "no", evidence


def _closest(vectors: Tensor) -> tuple[float, tuple[int, int]]:
    """Return the smallest distance of two rows and their indices. The unit is the mean norm of the centred rows."""
    size = (vectors - vectors.mean(0)).norm(dim=-1).mean().clamp(min=1e-300)
    # Inner products would lose half of the digits.
    distances = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
    closest, place = distances.fill_diagonal_(float("inf")).flatten().min(0)
    return (closest / size).item(), divmod(int(place), len(vectors))


def _linear(signature: Tensor, subject: _Subject, table: bool) -> Finding:
    if subject.what == "distances":
        return "not applicable", "positions have no representation, only pairs of them have"
    shift = 7
    before, after = signature[:-shift], signature[shift:]
    # Fitted on even rows and checked on odd rows, because some map fits any table with few rows.
    fitted = torch.linalg.lstsq(before[::2], after[::2], driver="gelsd").solution
    residual = ((after[1::2] - before[1::2] @ fitted).norm() / after[1::2].norm()).item()
    evidence = (
        f"M_{shift} fitted on half of the positions, checked on the others: |p(t + {shift}) - M p(t)| / |p| = "
        f"{residual:.1e}"
    )
    if table:
        return "no", f"rows that are trained one by one follow no map; before training, {evidence}"
    return "yes" if residual < LINEAR else "no", evidence


def _generalises(signature: Tensor, subject: _Subject, trained: int, length: int) -> Finding:
    if len(signature) < length:
        return "no", f"position {len(signature)} does not exist"
    seen, beyond = signature[:trained], signature[trained:]
    if subject.seen is not None:
        seen = subject.seen(torch.arange(trained))
    if subject.what == "distances":
        # Weights instead of scores, because biases of -20 and -40 both give a weight of almost 0.
        seen, beyond = ((each - signature[0]).exp() for each in (seen, beyond))
    low, high = seen.amin(0), seen.amax(0)
    size = torch.maximum(low.abs(), high.abs()).amax().item()
    if subject.what == "distances":
        low = low.clamp(max=0)  # a key with weight 0 is like a missing key, which shorter contexts had
    span = (high - low).clamp(min=1e-12 * size)
    excess = torch.maximum(low - beyond, beyond - high).clamp(min=0).amax(0) / span
    new = int((excess > EXCESS).sum())
    what = "weights of heads and probes" if subject.what == "distances" else "coordinates"
    evidence = (
        f"between {trained} and {length}, {new} of {len(excess)} {what} leave the range seen in training by more than "
        f"{EXCESS:.0%}"
    )
    return "yes" if new == 0 else "no", evidence


def _deterministic(subject: _Subject, table: bool) -> Finding:
    count = sum(p.numel() for p in subject.parameters)
    if table:
        return "no", f"a table of {count:,} trained numbers, with separate rows for {subject.what}"
    trained = f"with {count:,} trained numbers that all {subject.what} share" if count else "without trained numbers"
    return "yes", f"generated by a rule, {trained}"


def _dimensions(subject: _Subject, table: bool) -> Finding:
    if table or subject.limit is not None:
        return "no", "a table of one axis: another axis needs another trained table"
    axis = torch.tensor([0, 3, 11, 40])
    shift = 5

    def grid(offset: int) -> Tensor:
        part = subject.represent(axis + offset)
        x, y = part[:, None].expand(-1, 4, -1), part[None].expand(4, -1, -1)
        return torch.cat([x, y], -1).flatten(0, 1)

    points, shifted_points = grid(0), grid(shift)
    separate, _ = _closest(points)
    if subject.what == "distances":
        evidence = f"scores of the two distances of a grid: closest places {separate:.1e} apart"
        return "yes" if separate > UNIQUE else "no", evidence
    products, shifted_products = points @ points.T, shifted_points @ shifted_points.T
    residual = ((products - shifted_products).norm() / products.norm()).item()
    evidence = f"half of the size per axis: products of grid points change by {residual:.1e} when the grid is shifted"
    return "yes" if residual < LINEAR and separate > UNIQUE else "no", evidence
