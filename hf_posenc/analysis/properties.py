"""Five properties of an ideal position encoding, tested numerically where a scheme can be tested.

The list (after Kazemnejad 2019, kazemnejad.com/blog/transformer_architecture_positional_encoding, and Su 2021): unique
per position whatever the length; a linear map between any two positions; generalises beyond the training length;
deterministic; extends to several dimensions. Tests look at what a scheme feeds to a model, not at what a model makes of
it: for the third measure perplexity by length as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..forms import ClippedVectors
from ..schemes.base import Dims, PositionEmbedding, Scheme, ScoreModule
from ..schemes.sinusoidal import Waves
from . import probe

Verdict = Literal["yes", "no", "not applicable"]

UNIQUE = 1e-9
"""Smallest distance of two positions' representations, relative to their size, that counts as different."""
LINEAR = 1e-4
"""Largest relative residual of a linear map: transformers makes the cosines of `rope` in float32."""
SEEN = 0.01
"""How far beyond what was seen in training a representation may go, relative to what it spans there."""


@dataclass(frozen=True)
class Property:
    """One property.

    Attributes:
        name: `unique`, `linear`, `generalises`, `deterministic` or `dimensions`.
        verdict: `yes`, `no` or `not applicable`.
        evidence: what was computed, in words and numbers.
    """

    name: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class Properties:
    """The five properties of one scheme, as it starts.

    Attributes:
        scheme: name.
        trained_length: tokens.
        tested_length: tokens, the positions looked at.
        rows: the properties, in the order above.
    """

    scheme: str
    trained_length: int
    tested_length: int
    rows: tuple[Property, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**self.__dict__, "rows": [dict(row.__dict__) for row in self.rows]}

    def __str__(self) -> str:
        """Return a table."""
        lines = [f"{self.scheme}, trained at {self.trained_length}, looked at to {self.tested_length}"]
        return "\n".join(lines + [f"  {row.name:<14} {row.verdict:<15} {row.evidence}" for row in self.rows])


def linear_map(frequencies: Tensor, shift: int, *, size: int, layout: str = "interleaved") -> Tensor:
    """Construct the map of sinusoids from any position to the one `shift` further on, `p(t + k) = M_k p(t)`.

    Each pair (sine, cosine) is turned by `k w_u`: `M_k` is a rotation, the same for every t.

    Args:
        frequencies: (E/2,) radians per token.
        shift: k, tokens, of either sign.
        size: E, even: an odd one ends on a sine whose cosine is missing, and has no such map.
        layout: as the scheme's.

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
    **hyperparameters: Any,
) -> Properties:
    """Test the five properties of a scheme, as it starts.

    What stands for a position: the vector that is added (`sinusoidal`, `learned`), the cosines and sines that turn a
    query (`rope`); for schemes that know distances only, the scores of a few fixed queries and keys at that distance.

    Args:
        scheme: a registered name or an instance.
        trained_length: tokens.
        factor: positions are looked at up to `factor * trained_length`.
        dims: sizes of the attention.
        seed: of parameters that start at random.
        **hyperparameters: beside a name.

    Returns:
        Properties.
    """
    resolved, module = probe.build(scheme, dims=dims, trained_length=trained_length, seed=seed, **hyperparameters)
    length = factor * trained_length
    reach = min(length, resolved.limit or length)
    signature = None if module is None else _signature(module, torch.arange(reach), dims)
    rows = (
        _unique(signature, resolved, length, module),
        _linear(signature, module, resolved),
        _generalises(signature, resolved, trained_length, length),
        _deterministic(signature, module, dims, reach),
        _dimensions(module, resolved, dims),
    )
    return Properties(resolved.name, trained_length, length, rows)


def _signature(module: nn.Module, positions: Tensor, dims: Dims) -> Tensor:
    """Return what stands for each position, (T, F) float64."""
    if isinstance(module, PositionEmbedding):
        return module.embed(positions[None])[0].double()
    if isinstance(module, ScoreModule):
        generator = torch.Generator().manual_seed(0)
        # Non-negative contents, so that DA-Transformer's ReLU does not hide its factor.
        query, key = (
            torch.rand(4, dims.num_heads, 1, dims.head_dim, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        keys = key.expand(-1, -1, len(positions), -1)
        return probe.scores_at(module, query, keys, positions, dims.head_dim**-0.5).flatten(0, 2).T.double()
    return torch.cat(probe.rotations(module, positions), -1)


def _unique(signature: Tensor | None, scheme: Scheme, length: int, module: nn.Module | None) -> Property:
    name = "unique"
    if signature is None:
        return Property(name, "no", "all positions are the same: there are none")
    what = "distances" if scheme.acts_on.measures == "distances" else "positions"
    closest, pair = _closest(signature)
    found = f"closest of {len(signature)} {what}: {pair[0]} and {pair[1]}, {closest:.1e} of their size apart"
    if closest <= UNIQUE:
        return Property(name, "no", found)
    if scheme.limit is not None and scheme.limit < length:
        return Property(name, "no", f"{found}; no vector from {what[:-1]} {scheme.limit} on")
    return Property(name, "yes", found)


def _closest(vectors: Tensor) -> tuple[float, tuple[int, int]]:
    """Return the smallest distance of two rows relative to the mean norm about the mean row, and which they are."""
    size = (vectors - vectors.mean(0)).norm(dim=-1).mean().clamp(min=1e-300)
    best, pair = float("inf"), (0, 0)
    for start in range(0, len(vectors), 512):
        # By differences, not by inner products: those lose half of the digits.
        block = torch.cdist(vectors[start : start + 512], vectors, compute_mode="donot_use_mm_for_euclid_dist")
        rows = torch.arange(len(block))
        block[rows, rows + start] = float("inf")
        value, place = block.flatten().min(0)
        if value < best:
            best, pair = value.item(), (start + int(place) // len(vectors), int(place) % len(vectors))
    return best / size.item() if best > 0 else 0.0, pair


def _linear(signature: Tensor | None, module: nn.Module | None, scheme: Scheme) -> Property:
    name = "linear"
    if signature is None or scheme.acts_on.measures == "distances":
        return Property(name, "not applicable", "no position has a representation of its own, only distances count")
    shift = 7
    before, after = signature[:-shift], signature[shift:]
    if isinstance(module, Waves) and module.size % 2 == 0:
        matrix = linear_map(module.waves(before.device), shift, size=module.size, layout=module.scheme.layout)
        how = f"M_{shift} constructed from the frequencies"
        residual = ((after - before @ matrix.T).norm() / after.norm()).item()
    else:
        # Fitted on the even rows, checked on the odd ones: a table fits any map on few enough rows.
        fitted = torch.linalg.lstsq(before[::2], after[::2], driver="gelsd").solution
        residual = ((after[1::2] - before[1::2] @ fitted).norm() / after[1::2].norm()).item()
        how = f"M_{shift} fitted on half of the positions, checked on the others"
    found = f"{how}: |p(t + {shift}) - M p(t)| / |p| = {residual:.1e}"
    return Property(name, "yes" if residual < LINEAR else "no", found)


def _generalises(signature: Tensor | None, scheme: Scheme, trained: int, length: int) -> Property:
    name = "generalises"
    if signature is None:
        return Property(name, "not applicable", "there is nothing that could be new at a longer context")
    if len(signature) < length:
        return Property(name, "no", f"position {len(signature)} does not exist")
    if scheme.acts_on.measures == "distances":
        # What enters the sum over keys: a bias of -20 or -40 is no weight either way.
        signature = (signature - signature[0]).exp()
    seen, beyond = signature[:trained], signature[trained:]
    low, high = seen.amin(0), seen.amax(0)
    if scheme.acts_on.measures == "distances":
        low = low.clamp(max=0)  # a key without weight is as good as absent, and shorter contexts have shown that
    span = (high - low).clamp(min=1e-12 * signature.abs().max().item())
    excess = torch.maximum(low - beyond, beyond - high).clamp(min=0).amax(0) / span
    new = int((excess > SEEN).sum())
    what = "weights of heads and probes" if scheme.acts_on.measures == "distances" else "coordinates"
    found = f"between {trained} and {length}, {new} of {len(excess)} {what} leave the range seen in training"
    if scheme.acts_on.measures != "distances":
        # A wave that has not shown its full range shows new angles even where its range is left by little.
        return Property(name, "yes" if new == 0 else "no", found)
    return Property(name, "yes" if new == 0 else "no", f"{found} by more than {SEEN:.0%}")


def _deterministic(signature: Tensor | None, module: nn.Module | None, dims: Dims, reach: int) -> Property:
    name = "deterministic"
    if signature is None or module is None:
        return Property(name, "yes", "nothing is drawn")
    module.train()
    again = _signature(module, torch.arange(reach), dims)
    count = sum(p.numel() for p in module.parameters())
    same = bool(torch.equal(signature, again))
    start = f"; its {count:,} parameters are trained" if count else "; no parameters"
    return Property(name, "yes" if same else "no", f"two calls {'agree' if same else 'differ'} in every bit{start}")


def _dimensions(module: nn.Module | None, scheme: Scheme, dims: Dims) -> Property:
    name = "dimensions"
    if module is None:
        return Property(name, "not applicable", "no dimension has positions")
    if scheme.limit is not None or (
        isinstance(module, ScoreModule) and isinstance(module.form(torch.empty(0)), ClippedVectors)
    ):
        return Property(name, "no", "a table of one axis: another axis needs another table, trained")
    axis = torch.tensor([0, 3, 11, 40])
    shift = 5

    def grid(offset: int) -> Tensor:
        part = _signature(module, axis + offset, dims)
        x, y = part[:, None].expand(-1, 4, -1), part[None].expand(4, -1, -1)
        return torch.cat([x, y], -1).flatten(0, 1)

    if scheme.acts_on.measures == "distances":
        separate, _ = _closest(grid(0))
        verdict: Verdict = "yes" if separate > UNIQUE else "no"
        return Property(name, verdict, f"scores of the two distances of a grid: closest places {separate:.1e} apart")
    here, there = grid(0), grid(shift)
    products, moved = here @ here.T, there @ there.T
    residual = ((products - moved).norm() / products.norm()).item()
    separate, _ = _closest(here)
    verdict = "yes" if residual < LINEAR and separate > UNIQUE else "no"
    found = f"half of the size per axis: products of grid points change by {residual:.1e} when the grid is shifted"
    return Property(name, verdict, found)
