"""Decay with distance: of a scheme's scores, and of a model's scores.

All schemes share one measure: the score of a key at distance `d` whose content alone scores 1. So their curves share
one axis. For position vectors the measure is the inner product of two positions, divided by its value at distance 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..api import schemes_of
from ..calibration.observe import observe
from ..core.dims import Dims
from ..core.measurement import Result
from ..core.modules import ON_ATTENTION, ScoreModule, WithoutPositions, owner_of, query_modules
from ..families.base import language_config
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..schemes.base import Scheme
from ..transformers_glue import NAME
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
    trained_length: int | None = None,
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
        trained_length: length that the base was trained at, in tokens; None means 512.
        seed: seed of random initial parameters.
        **hyperparameters: hyper-parameters, for a name.

    Returns:
        Decay with one row per head.

    Raises:
        ValueError: for distances that the scheme does not have, or for a scheme that joins the positions of a layer
            (`temperature`), which has no scores of its own.
    """
    model = probe.build(scheme, dims=dims, trained_length=trained_length, seed=seed, **hyperparameters)
    resolved = schemes_of(model)[-1]
    if resolved.joins:
        raise ValueError(f"{resolved.name} joins the positions of a layer, and has no scores by distance of its own")
    return _decay(model, resolved.name, _distances(distances), None)


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
    return _decay(model, type(model).__name__, d, tokens)


@torch.no_grad()
def _decay(model: PreTrainedModel, label: str, d: Tensor, tokens: Tensor | None) -> Decay:
    """Return the scores of a model, with the mean queries of a text, or with queries of equal entries."""
    base = BaseModel.of(model)
    if any(ON_ATTENTION in query_modules(each) for each in base.modules.attentions):
        raise ValueError(f"the scores of {label} depend on the hidden states of queries, and not on distances alone")
    if language_config(model.config)._attn_implementation == NAME:
        rows = _heads(model, base, tokens)
        if any(not isinstance(module, WithoutPositions) for module, *_ in rows):
            return Decay(label, d, torch.stack([_scores_of_module(*row, d) for row in rows]))
    rotary, angles = probe.rotary_of(model)
    if rotary is not None:
        layers = base.modules.attention_of if probe.layer_type(model, rotary, 0) else [0]
        # The sign of a distance does not matter, because the cosine is even.
        positions = torch.cat([torch.zeros(1, dtype=torch.int64), d.abs()])
        cosines = [
            probe.rotations(rotary, positions, probe.layer_type(model, rotary, layer), angles)[0] for layer in layers
        ]
        # At position 0 the cosines are the attention factor.
        return Decay(label, d, torch.stack([(cos[1:] * cos[0]).mean(-1)[None] for cos in cosines]))
    _, limit = probe.added_by(model) or (None, None)
    vectors = probe.position_vectors(model, max(int(d.abs().max()) + 1, limit or 0))  # of a table, all
    without = torch.ones(1, 1, len(d), dtype=torch.float64)
    return Decay(label, d, without if vectors is None else _scores_of_vectors(vectors, d))


def _heads(model: PreTrainedModel, base: BaseModel, tokens: Tensor | None) -> list[tuple[Any, Tensor, float]]:
    """Return for each layer its module, a query for each head (H, D), and the scaling of its scores."""
    if tokens is None:
        (attention,), (sizes,) = base.modules.attentions, base.sizes.values()
        query = torch.full((sizes.num_heads, sizes.head_dim), sizes.head_dim**-0.25, dtype=torch.float64)
        return [(owner_of(attention.get_submodule("posenc")), query, sizes.head_dim**-0.5)]
    with evaluation(model):
        calls = [each.call for each in observe(model, tokens, list(base.modules.attention_of)).values()]
    return [(call.module, call.query.double().mean((0, 2)), call.scaling) for call in calls]


def _distances(distances: int | Sequence[int]) -> Tensor:
    """Return distances as (n,) int64."""
    return torch.arange(distances) if isinstance(distances, int) else torch.tensor(list(distances), dtype=torch.int64)


def _scores_of_vectors(vectors: Tensor, distances: Tensor) -> Tensor:
    """Return the mean inner product of all pairs at each distance, (1, 1, n), by the autocorrelation theorem.

    The sign of a distance does not matter, because `<p_m, p_n>` is `<p_n, p_m>`.
    """
    rows = len(vectors)
    spectrum = torch.fft.rfft(vectors, n=2 * rows, dim=0)
    sums = torch.fft.irfft(spectrum.abs().square().sum(-1), n=2 * rows)[:rows]
    means = sums / torch.arange(rows, 0, -1)
    return (means[distances.abs()] / means[0])[None, None]


def _scores_of_module(module: ScoreModule, query: Tensor, scaling: float, distances: Tensor) -> Tensor:
    """Return the scores (H, n) of a query (H, D) and a key along it at each distance; ValueError if one is negative."""
    if int(distances.min()) < 0:
        raise ValueError("the scores of this scheme are for causal attention: distances must be >= 0")
    key = query / query.norm(dim=-1, keepdim=True).clamp(min=1e-30) ** 2 / scaling
    keys = key[None, :, None].expand(-1, -1, len(distances), -1)
    return probe.scores_at(module, query[None, :, None], keys, distances, scaling)[0, :, 0].double().cpu()
