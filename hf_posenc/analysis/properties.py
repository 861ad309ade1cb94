"""Five properties of an ideal position encoding, tested numerically for an untrained scheme or for a model.

The properties follow Kazemnejad 2019 (kazemnejad.com/blog/transformer_architecture_positional_encoding) and Su 2021:

1. every position has a unique encoding, at any length;
2. a linear map leads from any position to any other;
3. the encoding generalises beyond the training length;
4. it is deterministic: a rule generates it;
5. it extends to several dimensions.

The tests read what a scheme feeds into a model, not the model's output. For the third property measure perplexity by
length as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..api import parse_schemes
from ..dims import Dims
from ..families.base import language_config
from ..layer_state import on_attention, on_layer
from ..live.base_model import BaseModel
from ..live.patch_record import patch_of
from ..measurement import Result
from ..modules import PositionEmbedding, ScoreModule, WithoutPositions, owner_of
from ..schemes.base import Scheme, by_layer_type
from ..schemes.sinusoidal import Waves
from ..upstream.rotary import ORIGINAL_LENGTH, PartialRotary, make_rotary
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
    """The five properties of one scheme or model.

    Attributes:
        scheme: name of the scheme, or the model's class.
        trained_length: length of the training, in tokens.
        tested_length: number of positions that were tested.
        rows: the properties, in the order of the list above.
        untrained: whether the scheme has parameters, and these have their initial values.
    """

    scheme: str
    trained_length: int
    tested_length: int
    rows: tuple[Property, ...]
    untrained: bool

    def __str__(self) -> str:
        """Return a table."""
        name = f"{self.scheme} (untrained)" if self.untrained else self.scheme
        lines = [f"{name}, on a base trained at {self.trained_length}, tested up to {self.tested_length}"]
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
    scheme: str | Scheme | PreTrainedModel,
    *,
    trained_length: int | None = None,
    factor: int = 4,
    dims: Dims = probe.DIMS,
    layer: int = 0,
    seed: int = 0,
    progress: bool = False,
    **hyperparameters: object,
) -> Properties:
    """Test the five properties of an untrained scheme, or of a model with its trained parameters.

    A position is represented by the vector that is added (`sinusoidal`, `learned`), or by the cosines and sines that
    rotate a query (`rope`). Schemes on scores depend on distances only. There a distance is represented by the scores
    of a few fixed queries and keys.

    Args:
        scheme: a registered name, an instance, or a patched or stock model.
        trained_length: length in tokens that the base was trained at. None means the length in a model's config, and
            512 for a scheme. For RoPE with a scaling, this is the length before the scaling, and the range seen in
            training is that of RoPE without it.
        factor: positions up to `factor * trained_length` are tested; time grows with the square.
        dims: sizes of the attention, for a scheme.
        layer: index of the layer whose attention is tested, for a model.
        seed: seed of parameters with random initial values, for a scheme.
        progress: show a progress bar.
        **hyperparameters: hyper-parameters, for a name.

    Returns:
        Properties.

    Raises:
        ValueError: if a model's config does not give the trained length, if `layer` has no attention, or if layers have
            different rotations.
    """
    if isinstance(scheme, PreTrainedModel):
        subject = _model_subject(scheme, layer)
        trained_length = trained_length or _trained_length_of(scheme, subject)
    else:
        trained_length = trained_length or probe.TRAINED_LENGTH
        (wanted,) = parse_schemes(scheme, hyperparameters)
        subject = _scheme_subject(wanted, dims=dims, trained_length=trained_length, seed=seed)
    length = factor * trained_length
    reach = min(length, subject.limit or length)
    table = _has_table(subject)
    signature = None if subject.represent is None else subject.represent(torch.arange(reach))
    findings = {
        "unique": _unique(signature, subject, length, progress),
        "linear": _linear(signature, subject, table),
        "generalises": _generalises(signature, subject, trained_length, length),
        "deterministic": _deterministic(subject, table),
        "dimensions": _dimensions(subject, table),
    }
    rows = tuple(Property(name, *finding) for name, finding in findings.items())
    return Properties(subject.name, trained_length, length, rows, subject.untrained and bool(subject.parameters))


Represent = Callable[[Tensor], Tensor]
"""Positions (T,) -> their representations (T, F), float64, with gradients to the parameters."""


@dataclass(frozen=True)
class _Subject:
    """The scheme or model that is tested.

    Attributes:
        name: name of the scheme, or the model's class.
        represent: function from positions to representations; None without position encoding.
        untrained: whether the parameters have their initial values.
        seen: `represent` at the time of the base's training; None if it was the same.
        limit: number of positions that exist, or None if there is no limit.
        measures_distances: whether distances are represented instead of positions.
        module: the module that encodes positions; None without position encoding.
    """

    name: str
    represent: Represent | None
    untrained: bool
    seen: Represent | None = None
    limit: int | None = None
    measures_distances: bool = False
    module: nn.Module | None = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the position encoding."""
        return () if self.module is None else tuple(self.module.parameters())

    @property
    def what(self) -> str:
        """`distances` or `positions`, whichever is represented."""
        return "distances" if self.measures_distances else "positions"


def _scheme_subject(wanted: Scheme, *, dims: Dims, trained_length: int, seed: int) -> _Subject:
    """Return the subject of an untrained scheme."""
    resolved, module = probe.build(wanted, dims=dims, trained_length=trained_length, seed=seed)
    if module is None or resolved.acts_on.joins():  # a joining scheme gives a layer no positions
        return _Subject(resolved.name, None, True)
    name, limit = resolved.name, resolved.limit
    if isinstance(module, PositionEmbedding):
        return _Subject(name, probe.Added(module, limit), True, None, limit, False, module)
    if isinstance(module, ScoreModule):
        return _Subject(name, _score_representation(module, dims), True, None, limit, True, module)
    _, base = probe.build(wanted.without_scaling(), dims=dims, trained_length=trained_length)
    assert base is not None
    return _Subject(name, _rotary_representation(module), True, _rotary_representation(base), limit, False, module)


def _model_subject(model: PreTrainedModel, layer: int) -> _Subject:
    """Return the subject of a model. If layers differ, it is the position encoding of `layer`."""
    base, label = BaseModel.of(model), type(model).__name__
    attention = base.modules.attention_of.get(layer)
    if attention is None:
        raise ValueError(
            f"layer {layer} of this {label} has no attention; these have: {list(base.modules.attention_of)}"
        )
    owner = owner_of(attention._modules.get("posenc"))
    if isinstance(owner, ScoreModule) and not isinstance(owner, WithoutPositions):
        return _Subject(
            label, _score_representation(owner, base.sizes[layer]), False, measures_distances=True, module=owner
        )
    if (added := probe.added_to(model)) is not None:
        return _Subject(label, added, False, limit=added.limit, module=added.module)
    rotary, angles = probe.rotary_of(model)
    if on_layer(base.modules.layers[layer]).rotation is not None:
        raise ValueError(f"the layers of this {label} have different rotations: test its schemes one by one")
    if rotary is None or not (on_attention(attention).rotation is not None or base.rotated[layer]):
        return _Subject(label, None, False)
    kind = probe.layer_type(model, rotary, layer)
    unscaled = _unscaled(rotary, base, kind, angles)
    seen = None if unscaled is None else _rotary_representation(unscaled)
    return _Subject(label, _rotary_representation(rotary, kind, angles), False, seen, module=rotary)


def _rope_parameters_of(rotary: nn.Module, kind: str | None) -> dict[str, Any]:
    """Return the `rope_parameters` of a rotary module of transformers; empty for a module of this package."""
    config = getattr(rotary.rotary if isinstance(rotary, PartialRotary) else rotary, "config", None)
    types = by_layer_type(getattr(config, "rope_parameters", None) or {})
    return dict(types.get(kind) or types.get(None) or {})


def _unscaled(rotary: nn.Module, base: BaseModel, kind: str | None, angles: str) -> nn.Module | None:
    """Return the rotary module of a base without its scaling, or None if it has no scaling."""
    scaled = _rope_parameters_of(rotary, kind)
    if scaled.get("rope_type", "default") in ("default", "proportional"):
        return None
    plain: dict[str, Any] = {key: scaled[key] for key in ("rope_theta", "partial_rotary_factor") if key in scaled}
    unscaled = make_rotary({"rope_type": "default", **plain}, base.model.config, base.rotation.dims, None, True)
    pairs = probe.rotations(rotary, torch.arange(2), kind, angles)[0].shape[-1]
    return PartialRotary(unscaled, 2 * pairs)  # includes the pairs with frequency 0, as `rotary` does


def _trained_length_of(model: PreTrainedModel, subject: _Subject) -> int:
    """Return the length that a model was trained at, without scaling; ValueError if its config does not give it."""
    rotary, _ = probe.rotary_of(model)
    scaling = {} if rotary is None or subject.seen is None else _rope_parameters_of(rotary, None)
    config = language_config(model.config)
    length = scaling.get(ORIGINAL_LENGTH) or subject.limit or getattr(config, "max_position_embeddings", None)
    if not length or (subject.limit is None and patch_of(model) is not None and not scaling):
        raise ValueError(
            f"give trained_length: the config of this {type(model).__name__} does not say what its base was trained at"
        )
    return int(length)


def _score_representation(module: ScoreModule, dims: Dims) -> Represent:
    """Return the representation of distances by scores. Every head and fixed query gives one coordinate."""
    generator = torch.Generator().manual_seed(0)
    # Non-negative products, because DA-Transformer's ReLU would set negative ones to 0 whatever the factor.
    query, key = (
        torch.rand(4, dims.num_heads, 1, dims.head_dim, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    device = probe.device_of(module)

    def represent(positions: Tensor) -> Tensor:
        keys = key.to(device).expand(-1, -1, len(positions), -1)
        scores = probe.scores_at(module, query.to(device), keys, positions, dims.head_dim**-0.5)
        hidden = scores < torch.finfo(scores.dtype).min / 2  # outside a window: sizes of finite scores
        scores = scores.masked_fill(hidden, scores.masked_fill(hidden, 0).amin())
        return scores.flatten(0, 2).T.double().cpu()

    return represent


def _rotary_representation(rotary: nn.Module, kind: str | None = None, angles: str = "list twice") -> Represent:
    """Return the representation of positions by cosines and sines, without a scaling's attention factor."""

    def represent(positions: Tensor) -> Tensor:
        cos, sin = probe.rotations(rotary, positions, kind, angles)
        return torch.cat([cos, sin], -1) / torch.hypot(cos, sin).repeat(1, 2)

    return represent


def _has_table(subject: _Subject) -> bool:
    """Return whether positions have parameters of their own. Gradients show which parameters a position uses.

    They have if two positions share none. A network of ReLUs (FIRE) uses other units at other distances, but all of
    them use the parameters of its input.
    """
    if subject.represent is None or not subject.parameters:
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


def _unique(signature: Tensor | None, subject: _Subject, length: int, progress: bool) -> Finding:
    if signature is None:
        return "no", "all positions are the same: there are none"
    closest, pair = _closest(signature, progress)
    evidence = f"closest of {len(signature)} {subject.what}: {pair[0]} and {pair[1]}, {closest:.1e} of their size apart"
    if closest <= UNIQUE:
        return "no", evidence
    if subject.limit is not None and subject.limit < length:
        return "no", f"{evidence}; no vector from {subject.what[:-1]} {subject.limit} on"
    return "yes", evidence


def _closest(vectors: Tensor, progress: bool = False) -> tuple[float, tuple[int, int]]:
    """Return the smallest distance of two rows and their indices. The unit is the mean norm of the centred rows."""
    size = (vectors - vectors.mean(0)).norm(dim=-1).mean().clamp(min=1e-300)
    best, pair = float("inf"), (0, 0)
    for start in tqdm(range(0, len(vectors), 512), disable=not progress, desc="pairs", unit="block"):
        # Inner products would lose half of the digits.
        block = torch.cdist(vectors[start : start + 512], vectors, compute_mode="donot_use_mm_for_euclid_dist")
        rows = torch.arange(len(block))
        block[rows, rows + start] = float("inf")
        value, place = block.flatten().min(0)
        if value < best:
            best, pair = value.item(), (start + int(place) // len(vectors), int(place) % len(vectors))
    return best / size.item() if best > 0 else 0.0, pair


def _linear(signature: Tensor | None, subject: _Subject, table: bool) -> Finding:
    if signature is None or subject.measures_distances:
        return "not applicable", "positions have no representation, only pairs of them have"
    shift = 7
    before, after = signature[:-shift], signature[shift:]
    if isinstance(waves := subject.module, Waves) and waves.size % 2 == 0:
        matrix = linear_map(waves.waves(before.device), shift, size=waves.size, layout=waves.scheme.layout)
        how = f"M_{shift} constructed from the frequencies"
        residual = ((after - before @ matrix.T).norm() / after.norm()).item()
    else:
        # Fitted on even rows and checked on odd rows, because some map fits any table with few rows.
        fitted = torch.linalg.lstsq(before[::2], after[::2], driver="gelsd").solution
        residual = ((after[1::2] - before[1::2] @ fitted).norm() / after[1::2].norm()).item()
        how = f"M_{shift} fitted on half of the positions, checked on the others"
    evidence = f"{how}: |p(t + {shift}) - M p(t)| / |p| = {residual:.1e}"
    if table and subject.untrained:
        return "no", f"rows that are trained one by one follow no map; before training, {evidence}"
    return "yes" if residual < LINEAR else "no", evidence


def _generalises(signature: Tensor | None, subject: _Subject, trained: int, length: int) -> Finding:
    if signature is None:
        return "not applicable", "without positions nothing is new at a longer context"
    if len(signature) < length:
        return "no", f"position {len(signature)} does not exist"
    seen, beyond = signature[:trained], signature[trained:]
    if subject.seen is not None:
        seen = subject.seen(torch.arange(trained))
    if subject.measures_distances:
        # Weights instead of scores, because biases of -20 and -40 both give a weight of almost 0.
        seen, beyond = ((each - signature[0]).exp() for each in (seen, beyond))
    low, high = seen.amin(0), seen.amax(0)
    size = torch.maximum(low.abs(), high.abs()).amax().item()
    if subject.measures_distances:
        low = low.clamp(max=0)  # a key with weight 0 is like a missing key, which shorter contexts had
    span = (high - low).clamp(min=1e-12 * size)
    excess = torch.maximum(low - beyond, beyond - high).clamp(min=0).amax(0) / span
    new = int((excess > EXCESS).sum())
    what = "weights of heads and probes" if subject.measures_distances else "coordinates"
    evidence = (
        f"between {trained} and {length}, {new} of {len(excess)} {what} leave the range seen in training by more than "
        f"{EXCESS:.0%}"
    )
    return "yes" if new == 0 else "no", evidence


def _deterministic(subject: _Subject, table: bool) -> Finding:
    if subject.represent is None:
        return "yes", "without positions nothing is drawn"
    count = sum(p.numel() for p in subject.parameters)
    if table:
        return "no", f"a table of {count:,} trained numbers, with separate rows for {subject.what}"
    trained = f"with {count:,} trained numbers that all {subject.what} share" if count else "without trained numbers"
    return "yes", f"generated by a rule, {trained}"


def _dimensions(subject: _Subject, table: bool) -> Finding:
    represent = subject.represent
    if represent is None:
        return "not applicable", "no dimension has positions"
    if table or subject.limit is not None:
        return "no", "a table of one axis: another axis needs another trained table"
    axis = torch.tensor([0, 3, 11, 40])
    shift = 5

    def grid(offset: int) -> Tensor:
        part = represent(axis + offset)
        x, y = part[:, None].expand(-1, 4, -1), part[None].expand(4, -1, -1)
        return torch.cat([x, y], -1).flatten(0, 1)

    if subject.measures_distances:
        separate, _ = _closest(grid(0))
        evidence = f"scores of the two distances of a grid: closest places {separate:.1e} apart"
        return "yes" if separate > UNIQUE else "no", evidence
    points, shifted_points = grid(0), grid(shift)
    products, shifted_products = points @ points.T, shifted_points @ shifted_points.T
    residual = ((products - shifted_products).norm() / products.norm()).item()
    separate, _ = _closest(points)
    evidence = f"half of the size per axis: products of grid points change by {residual:.1e} when the grid is shifted"
    return "yes" if residual < LINEAR and separate > UNIQUE else "no", evidence
