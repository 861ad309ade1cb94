"""What a scheme gives to a distance: in formula, as its parameters stand, and as attention that is really paid.

All schemes share one measure, so that their curves share one axis: the attention score of a key at distance `d` whose
content alone would score 1 (for position vectors: the inner product of two positions, of size 1 at distance 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..live.eval_mode import evaluation
from ..modules import owner_of
from ..schemes.base import Dims, PositionEmbedding, Scheme, ScoreModule
from ..upstream import NAME
from . import probe


@dataclass(frozen=True)
class Decay:
    """Score by distance.

    Attributes:
        label: what was looked at.
        distances: (n,) tokens, int64 or float64.
        scores: (N, H, n) float64, one row per layer and head; (1, 1, n) where they do not differ.
    """

    label: str
    distances: Tensor
    scores: Tensor

    @property
    def mean(self) -> Tensor:
        """Scores averaged over layers and heads, (n,)."""
        return self.scores.mean((0, 1))

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"label": self.label, "distances": self.distances.tolist(), "scores": self.scores.tolist()}


def decay(
    scheme: str | Scheme,
    distances: int | Sequence[int] = 512,
    *,
    dims: Dims = probe.DIMS,
    trained_length: int = probe.TRAINED_LENGTH,
    seed: int = 0,
    **hyperparameters: Any,
) -> Decay:
    """Return the score of a scheme by distance, as it starts.

    `sinusoidal` and `learned`: `<p_m, p_{m+d}>` averaged over m, divided by the mean of `|p_m|^2`. `rope`: the expected
    product of a query and key that are equal in every pair, `(2/D) sum_u cos(d w_u)`, times the square of a scaling's
    attention factor. Schemes that change scores: their score for a query and key of equal entries whose content scores
    1: `1 - m_h d` for ALiBi, `f_h(d)` for DA-Transformer, `1 + q . a_d / sqrt(D)` for Shaw. `nope`: 1.

    Args:
        scheme: a registered name or an instance.
        distances: to evaluate, in tokens; a number n means 0 .. n - 1. They may be negative, a key ahead of its query,
            where a scheme knows both directions: those that add vectors or turn pairs.
        dims: sizes of the attention.
        trained_length: of the base, in tokens.
        seed: of parameters that start at random.
        **hyperparameters: beside a name.

    Returns:
        Decay with one row per head.

    Raises:
        ValueError: for distances that do not exist.
    """
    d = _distances(distances)
    resolved, module = probe.build(scheme, dims=dims, trained_length=trained_length, seed=seed, **hyperparameters)
    farthest = int(d.abs().max())
    if module is None:
        scores = torch.ones(1, 1, len(d), dtype=torch.float64)
    elif isinstance(module, PositionEmbedding):
        rows = resolved.limit or farthest + 1
        if rows <= farthest:
            raise ValueError(f"{resolved.name} has {rows} positions: no distance of {farthest}")
        with torch.no_grad():
            scores = _of_vectors(module.embed(torch.arange(rows)[None])[0].double(), d)
    elif isinstance(module, ScoreModule):
        query = torch.full((dims.num_heads, dims.head_dim), dims.head_dim**-0.25, dtype=torch.float64)
        scores = _of_scores(module, query, d, dims.head_dim**-0.5)[None]
    else:
        scores = _of_rotation(module, d, None, "list twice")
    return Decay(resolved.name, d, scores)


@torch.no_grad()
def model_decay(model: PreTrainedModel, tokens: Tensor, distances: int | Sequence[int] | None = None) -> Decay:
    """Return the score by distance of a model as it stands, layer by layer and head by head.

    As `decay`, with the model's own tables, angles and parameters. For schemes that change scores the query is the mean
    query of each head on the text, and the key is parallel to it.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text.
        distances: as for `decay`; None means 0 .. T - 1.

    Returns:
        Decay.

    Raises:
        ValueError: for distances that do not exist.
    """
    tokens = probe.check_tokens(tokens, 2)
    d = _distances(tokens.shape[1] if distances is None else distances)
    label = type(model).__name__
    found = probe.parts(model)
    if model.config._attn_implementation == NAME:
        rows: list[Tensor] = []

        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            owner = owner_of(module)
            query, scaling = args[0].query.double().mean((0, 2)), args[0].scaling
            length = query.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            rows.append(_of_scores(owner, query, d, scaling, query / length**2 / scaling).cpu())

        hooks = [a.posenc.register_forward_pre_hook(record, with_kwargs=True) for a in found.attentions]
        try:
            with evaluation(model):
                model(tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return Decay(label, d, torch.stack(rows))
    rotary, angles = probe.rotary_of(model)
    if rotary is not None:
        kinds = getattr(model.config, "layer_types", None) if getattr(rotary, "layer_types", None) else None
        per_layer: list[str | None] = [kinds[layer] for layer in found.attention_of] if kinds else [None]
        return Decay(label, d, torch.cat([_of_rotation(rotary, d, kind, angles) for kind in per_layer]))
    vectors = probe.position_vectors(model)
    if vectors is None:
        return Decay(label, d, torch.ones(1, 1, len(d), dtype=torch.float64))
    if len(vectors) <= (farthest := int(d.abs().max())):
        raise ValueError(f"the model has {len(vectors)} positions: no distance of {farthest}")
    return Decay(label, d, _of_vectors(vectors, d))


def _distances(distances: int | Sequence[int]) -> Tensor:
    found = torch.arange(distances) if isinstance(distances, int) else torch.tensor(list(distances), dtype=torch.int64)
    if not len(found):
        raise ValueError("distances are numbers of tokens, at least one")
    return found


def _of_vectors(vectors: Tensor, distances: Tensor) -> Tensor:
    """Return mean inner products over all pairs at each distance, (1, 1, n), by the autocorrelation theorem.

    `<p_m, p_n>` is `<p_n, p_m>`, so that the direction of a distance does not matter.
    """
    rows = len(vectors)
    spectrum = torch.fft.rfft(vectors, n=2 * rows, dim=0)
    sums = torch.fft.irfft(spectrum.abs().square().sum(-1), n=2 * rows)[:rows]
    means = sums / torch.arange(rows, 0, -1)
    return (means[distances.abs()] / means[0])[None, None]


def _of_rotation(rotary: nn.Module, distances: Tensor, kind: str | None, angles: str) -> Tensor:
    # The cosine of an angle is that of its negative.
    cos, _ = probe.rotations(rotary, torch.cat([torch.zeros(1, dtype=torch.int64), distances.abs()]), kind, angles)
    return (cos[1:] * cos[0]).mean(-1)[None, None]  # position 0 shows the attention factor


@torch.no_grad()
def _of_scores(
    module: ScoreModule, query: Tensor, distances: Tensor, scaling: float, key: Tensor | None = None
) -> Tensor:
    """Return (H, n) scores of a query (H, D) against the same key at each distance; ValueError for negative ones."""
    if int(distances.min()) < 0:
        raise ValueError("the scores of this scheme are for causal attention: distances must be >= 0")
    keys = (query if key is None else key)[None, :, None].expand(-1, -1, len(distances), -1)
    return probe.scores_at(module, query[None, :, None], keys, distances, scaling)[0, :, 0].double()


# --------------------------------------------------------------------------------------------------- measured attention


@dataclass(frozen=True)
class AttentionByDistance:
    """Attention that is really paid to each distance.

    Attributes:
        label: the model's class.
        mass: (N, H, T) float64, share of a query's attention at each distance, averaged over queries; sums to 1.
        first_query: position of the first query that was counted.
        queries: number of queries per layer and head.
    """

    label: str
    mass: Tensor
    first_query: int
    queries: int

    @property
    def mean_distance(self) -> Tensor:
        """Mean distance of a token attended to, in tokens, (N, H)."""
        return self.mass @ torch.arange(self.mass.shape[-1], dtype=torch.float64)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "label": self.label,
            "first_query": self.first_query,
            "queries": self.queries,
            "mean_distance": self.mean_distance.tolist(),
            "mass": self.mass.tolist(),
        }


@torch.no_grad()
def attention_by_distance(
    model: PreTrainedModel, tokens: Tensor, *, first_query: int | None = None, progress: bool = False
) -> AttentionByDistance:
    """Measure how much attention each layer and head pays to each distance.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text without padding; takes B H T^2 numbers of memory per layer.
        first_query: position from which queries count; None means the second half, where every query has at least T/2
            keys, so that short distances are not favoured by queries that have no others.
        progress: show a progress bar.

    Returns:
        AttentionByDistance.

    Raises:
        ValueError: if there are under 2 tokens, or no queries from `first_query` on.
    """
    tokens = probe.check_tokens(tokens, 2)
    batch, length = tokens.shape
    first = length // 2 if first_query is None else first_query
    if not 0 <= first < length:
        raise ValueError(f"first_query must lie between 0 and {length - 1}, not {first}")
    index = torch.arange(length)
    lag = (index[first:, None] - index).clamp(min=0)  # what lies ahead has no weight
    sums: dict[int, Tensor] = {}

    def see(layer: int, weights: Tensor) -> None:
        rows = weights[:, :, first:].double().sum(0).cpu().flatten(1)
        total = torch.zeros(weights.shape[1], length, dtype=torch.float64)
        total.scatter_add_(1, lag.flatten().expand_as(rows), rows)
        sums[layer] = sums.get(layer, 0) + total

    with evaluation(model), probe.dense_attention(model, see):
        for row in tqdm(tokens, disable=not progress, desc="attention", unit="text"):
            model(row[None], use_cache=False)
    count = batch * (length - first)
    mass = torch.stack([sums[layer] for layer in sorted(sums)]) / count
    return AttentionByDistance(type(model).__name__, mass, first, count)
