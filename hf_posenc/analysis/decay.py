"""Decay with distance: of a scheme's scores, of a model's scores, and of a model's attention.

All schemes share one measure: the score of a key at distance `d` whose content alone scores 1. So their curves share
one axis. For position vectors the measure is the inner product of two positions, divided by its value at distance 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..calibration.observe import observe
from ..dims import Dims
from ..families.base import language_config
from ..live.eval_mode import evaluation
from ..measurement import Result
from ..modules import PositionEmbedding, ScoreModule, WithoutPositions
from ..schemes.base import Scheme
from ..upstream import NAME
from . import probe


@dataclass(frozen=True)
class Decay(Result):
    """Score by distance.

    Attributes:
        label: name of the scheme, or the model's class.
        distances: (n,) distances in tokens, int64 or float64.
        scores: (N, H, n) float64, a row for each layer and head; (1, 1, n) if all are equal.
    """

    label: str
    distances: Tensor
    scores: Tensor

    @property
    def mean(self) -> Tensor:
        """The scores averaged over layers and heads, (n,)."""
        return self.scores.mean((0, 1))


def decay(
    scheme: str | Scheme,
    distances: int | Sequence[int] = 512,
    *,
    dims: Dims = probe.DIMS,
    trained_length: int = probe.TRAINED_LENGTH,
    seed: int = 0,
    **hyperparameters: object,
) -> Decay:
    """Return the score of a scheme by distance, with its initial parameters.

    - `sinusoidal` and `learned`: the mean of `<p_m, p_{m+d}>` over m, divided by the mean of `|p_m|^2`.
    - `rope`: the product of a query and a key that are equal in every pair, `(2/D) sum_u cos(d w_u)`, times the square
      of a scaling's attention factor.
    - Schemes on scores: the score of a query and a key with equal entries whose content scores 1. That is `1 - m_h d`
      for ALiBi, `f_h(d)` for DA-Transformer, `1 + q . a_d / sqrt(D)` for Shaw.
    - `nope`: 1.

    Args:
        scheme: a registered name or an instance.
        distances: distances in tokens; a number n means 0 .. n - 1. A negative distance is a key after its query, which
            only schemes that add vectors or rotate take.
        dims: sizes of the attention.
        trained_length: length that the base was trained at, in tokens.
        seed: seed of random initial parameters.
        **hyperparameters: hyper-parameters, for a name.

    Returns:
        Decay with one row per head.

    Raises:
        ValueError: for distances that the scheme does not have, or for a scheme that joins the positions of a layer
            (`temperature`), which has no scores of its own.
    """
    d = _distances(distances)
    resolved, module = probe.build(scheme, dims=dims, trained_length=trained_length, seed=seed, **hyperparameters)
    if resolved.acts_on.joins():
        raise ValueError(f"{resolved.name} joins the positions of a layer, and has no scores by distance of its own")
    farthest = int(d.abs().max())
    if module is None:
        scores = torch.ones(1, 1, len(d), dtype=torch.float64)
    elif isinstance(module, PositionEmbedding):
        rows = resolved.limit or farthest + 1
        if rows <= farthest:
            raise ValueError(f"{resolved.name} has {rows} positions: no distance of {farthest}")
        with torch.no_grad():
            scores = _scores_of_vectors(module.embed(torch.arange(rows)[None])[0].double(), d)
    elif isinstance(module, ScoreModule):
        query = torch.full((dims.num_heads, dims.head_dim), dims.head_dim**-0.25, dtype=torch.float64)
        scores = _scores_of_module(module, query, d, dims.head_dim**-0.5)[None]
    else:
        scores = _scores_of_rotation(module, d, None, "list twice")
    return Decay(resolved.name, d, scores)


@torch.no_grad()
def model_decay(model: PreTrainedModel, tokens: Tensor, distances: int | Sequence[int] | None = None) -> Decay:
    """Return the score by distance of a model, for every layer and head.

    The scores are those of `decay`, with the model's tables, angles and parameters. For schemes on scores the query is
    the mean query of a head on the text, and the key is parallel to it.

    Args:
        model: a patched or stock model.
        tokens: (T,) or (B, T) text.
        distances: distances in tokens, see `decay`; None means 0 .. T - 1.

    Returns:
        Decay.

    Raises:
        ValueError: for distances that the scheme or model does not have.
    """
    tokens = probe.check_tokens(tokens, 2)
    d = _distances(tokens.shape[1] if distances is None else distances)
    label = type(model).__name__
    modules = probe.parts(model)
    if language_config(model.config)._attn_implementation == NAME:
        rows = []
        with evaluation(model):
            observed = observe(model, tokens, list(modules.attention_of))
        calls = [each.call for each in observed.values()]
        for call in calls if any(not isinstance(call.module, WithoutPositions) for call in calls) else ():
            module: Any = call.module
            query = call.query.double().mean((0, 2))
            key = query / query.norm(dim=-1, keepdim=True).clamp(min=1e-30) ** 2 / call.scaling
            rows.append(_scores_of_module(module, query, d, call.scaling, key).cpu())
        if rows:
            return Decay(label, d, torch.stack(rows))
    rotary, angles = probe.rotary_of(model)
    if rotary is not None:
        layers = modules.attention_of if probe.layer_type(model, rotary, 0) else [0]
        layer_types = [probe.layer_type(model, rotary, layer) for layer in layers]
        return Decay(
            label, d, torch.cat([_scores_of_rotation(rotary, d, layer_type, angles) for layer_type in layer_types])
        )
    vectors = probe.position_vectors(model)
    if vectors is None:
        return Decay(label, d, torch.ones(1, 1, len(d), dtype=torch.float64))
    if len(vectors) <= (farthest := int(d.abs().max())):
        raise ValueError(f"the model has {len(vectors)} positions: no distance of {farthest}")
    return Decay(label, d, _scores_of_vectors(vectors, d))


def _distances(distances: int | Sequence[int]) -> Tensor:
    """Return distances as (n,) int64; ValueError if there are none."""
    tensor = torch.arange(distances) if isinstance(distances, int) else torch.tensor(list(distances), dtype=torch.int64)
    if not len(tensor):
        raise ValueError("distances must be at least one number of tokens")
    return tensor


def _scores_of_vectors(vectors: Tensor, distances: Tensor) -> Tensor:
    """Return the mean inner product of all pairs at each distance, (1, 1, n), by the autocorrelation theorem.

    The sign of a distance does not matter, because `<p_m, p_n>` is `<p_n, p_m>`.
    """
    rows = len(vectors)
    spectrum = torch.fft.rfft(vectors, n=2 * rows, dim=0)
    sums = torch.fft.irfft(spectrum.abs().square().sum(-1), n=2 * rows)[:rows]
    means = sums / torch.arange(rows, 0, -1)
    return (means[distances.abs()] / means[0])[None, None]


def _scores_of_rotation(rotary: nn.Module, distances: Tensor, layer_type: str | None, angles: str) -> Tensor:
    """Return the mean over pairs of the cosine of the angle at each distance, (1, 1, n)."""
    # The sign of a distance does not matter, because the cosine is even.
    cos, _ = probe.rotations(
        rotary, torch.cat([torch.zeros(1, dtype=torch.int64), distances.abs()]), layer_type, angles
    )
    return (cos[1:] * cos[0]).mean(-1)[None, None]  # at position 0 the cosines are the attention factor


@torch.no_grad()
def _scores_of_module(
    module: ScoreModule, query: Tensor, distances: Tensor, scaling: float, key: Tensor | None = None
) -> Tensor:
    """Return the scores (H, n) of a query (H, D) and the same key at each distance; ValueError if one is negative."""
    if int(distances.min()) < 0:
        raise ValueError("the scores of this scheme are for causal attention: distances must be >= 0")
    keys = (query if key is None else key)[None, :, None].expand(-1, -1, len(distances), -1)
    return probe.scores_at(module, query[None, :, None], keys, distances, scaling)[0, :, 0].double()


# --------------------------------------------------------------------------------------------------- measured attention


@dataclass(frozen=True)
class AttentionByDistance(Result):
    """Attention that a model pays to each distance.

    Attributes:
        label: the model's class.
        mass: (N, H, T) float64, share of a query's attention at each distance, averaged over queries. It sums to 1.
        first_query: position of the first query in the average.
        queries: number of queries per layer and head.
    """

    derived = ("mean_distance",)

    label: str
    mass: Tensor
    first_query: int
    queries: int

    @property
    def mean_distance(self) -> Tensor:
        """The mean distance of attention, in tokens, (N, H)."""
        return self.mass @ torch.arange(self.mass.shape[-1], dtype=torch.float64)


@torch.no_grad()
def attention_by_distance(
    model: PreTrainedModel, tokens: Tensor, *, first_query: int | None = None, progress: bool = False
) -> AttentionByDistance:
    """Measure how much attention each layer and head pays to each distance.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text without padding; takes B H T^2 numbers of memory per layer.
        first_query: position of the first query that counts; None means T // 2. Earlier queries see few keys, which
            would favour short distances.
        progress: show a progress bar.

    Returns:
        AttentionByDistance.

    Raises:
        ValueError: if there are fewer than 2 tokens, or no queries from `first_query` on.
    """
    tokens = probe.check_tokens(tokens, 2)
    batch, length = tokens.shape
    first = length // 2 if first_query is None else first_query
    if not 0 <= first < length:
        raise ValueError(f"first_query must lie between 0 and {length - 1}, not {first}")
    index = torch.arange(length)
    lag = (index[first:, None] - index).clamp(min=0)  # later tokens have weight 0
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
