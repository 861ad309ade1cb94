"""Measure the scores between position vectors of a table, and the share of them that a bias by distance explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..analysis import probe
from ..attention_call import Call
from ..calibration.observe import attending, attention_call, observe
from ..errors import UnsupportedModelError
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.patch_record import patch_of
from ..live.watch import entering
from ..measurement import Result


@dataclass(frozen=True)
class PositionScores(Result):
    """Scores between positions, over all pairs of a query and a key at or before it.

    Attributes:
        label: the model's class, or the caller's name for the table.
        first: first position that counts, for queries and keys.
        explained: (H,) share of the variance of the scores that their mean by distance explains (R^2).
        explained_in_rows: (H,) share that `bias` explains of the scores' squared deviations from their query's mean.
            The softmax ignores a constant that all scores of a query share.
        mean: (H, T) float64, mean score by distance.
        bias: (H, T) float64, least-squares fit of a bias by distance to the scores. Every query has a free constant.
            The mean of the bias over pairs is 0.
        deviation: (H,) root mean square of the scores' deviations from their query's mean, in nats. It is the effect of
            positions alone on attention.
    """

    label: str
    first: int
    explained: Tensor
    explained_in_rows: Tensor
    mean: Tensor
    bias: Tensor
    deviation: Tensor

    def __str__(self) -> str:
        """Return a table, one line for each head."""
        last = self.first + self.mean.shape[1] - 1
        lines = [
            f"{self.label}: scores between positions {self.first} to {last}",
            "  head  deviation (nats)  explained by distance  up to a constant of each query",
        ]
        for head, (deviation, whole, in_rows) in enumerate(
            zip(self.deviation.tolist(), self.explained.tolist(), self.explained_in_rows.tolist(), strict=True)
        ):
            lines.append(f"  {head:>4}  {deviation:>16.3f}  {whole:>21.1%}  {in_rows:>30.1%}")
        return "\n".join(lines)


@torch.no_grad()
def position_scores(
    model: PreTrainedModel,
    tokens: Tensor | None = None,
    *,
    length: int | None = None,
    first: int = 0,
    samples: int = 32,
    progress: bool = False,
) -> PositionScores:
    """Measure the scores between the position vectors of a model's table, in its first layer.

    There the hidden state is the sum of token and position. But a norm divides it by the length of the sum before
    queries and keys are computed, so positions have no separate part. Two quantities are well defined:

    - Without tokens, the position vectors alone enter the layer.
    - With tokens, the queries and keys at each position are averaged over these tokens. Their product is the mean score
      of two positions over pairs of tokens. It includes the effect of a key's position on an average query.

    Args:
        model: a stock model with a table of positions that is added to its hidden states.
        tokens: (n,) or (B, T) integers; None means positions alone.
        length: number of positions from 0; None means the whole table.
        first: first position that counts. The very first positions are often unlike all others.
        samples: largest number of tokens in the average, evenly spread over `tokens`. Each token takes one pass through
            the layer's queries and keys.
        progress: show a progress bar.

    Returns:
        PositionScores with the heads of the first layer.

    Raises:
        UnsupportedModelError: if the model has no table of positions, is patched, or has an unsupported family.
        ValueError: if the table is shorter than `length`, if fewer than 3 positions count, or if `tokens` is empty.
    """
    if patch_of(model) is not None:
        raise UnsupportedModelError("the table of a stock model is measured: unpatch the model first")
    base = BaseModel.of(model)
    table = probe.position_vectors(model, length)
    if base.modules.position_table is None or table is None:
        raise UnsupportedModelError(f"this {type(model).__name__} adds no table of positions to its hidden states")
    if tokens is not None and not tokens.numel():
        raise ValueError("there are no tokens")
    with evaluation(model), attending(model, base):
        calls = _calls(model, base, table, tokens, samples, progress)
    query = torch.stack([call.query[0].double() for call in calls]).mean(0)
    key = torch.stack([call.key[0].double() for call in calls]).mean(0)
    return scores_between(query, key, scaling=calls[0].scaling, first=first, label=type(model).__name__)


def _calls(
    model: PreTrainedModel, base: BaseModel, table: Tensor, tokens: Tensor | None, samples: int, progress: bool
) -> list[Call]:
    """Return calls of the first layer's attention with all position vectors: alone, or one call for each token."""
    weight = next(base.modules.token_embedding.parameters())
    layer = min(base.sizes)
    module, attention = base.modules.layers[layer], base.modules.attention_of[layer]
    dummy = torch.zeros(1, len(table), dtype=torch.int64, device=weight.device)
    observed = observe(model, dummy, [layer])[layer]
    hidden = [vectors := table.to(weight)]
    if tokens is not None:
        chosen = tokens.flatten()[torch.linspace(0, tokens.numel() - 1, min(samples, tokens.numel())).long()]
        texts = chosen.to(weight.device).view(-1, 1, 1)  # of one token
        hidden = [entering(base.modules.decoder, module, text)[0, 0] - vectors[0] + vectors for text in texts]
    bar = tqdm(hidden, disable=not progress, desc="scores of positions", unit="token")
    return [attention_call(module, attention, each[None], observed.layer).widened() for each in bar]


@torch.no_grad()
def scores_between(query: Tensor, key: Tensor, *, scaling: float, first: int = 0, label: str = "") -> PositionScores:
    """Measure how much of the scores between positions their distance explains.

    Args:
        query: (H, T, D) queries of the positions 0 .. T - 1.
        key: (H, T, D) keys of these positions.
        scaling: factor of the scores, usually 1/sqrt(D).
        first: first position that counts, for queries and keys.
        label: name of the table.

    Returns:
        PositionScores, for distances up to `T - 1 - first`; computed in float64, head by head.

    Raises:
        ValueError: if fewer than 3 positions count.
    """
    count = query.shape[1] - first
    if first < 0 or count < 3:
        raise ValueError(f"of {query.shape[1]} positions at least 3 must be left from first={first} on")
    index = torch.arange(count, device=query.device)
    lag = index[:, None] - index
    past = lag >= 0
    pairs = count - index.double()  # number of pairs at each distance
    keys = 1 + index.double()  # number of keys of each query
    # Normal equations of the bias, without the queries' constants. Queries from max(d, d') on have both distances.
    common = (1 / keys).flip(0).cumsum(0).flip(0)[torch.maximum(index[:, None], index)]
    normal = torch.diag(pairs) - common + 1.0  # + 1 makes the bias sum to 0, as its constant is free
    factor = torch.linalg.cholesky(normal)
    rows = []
    for q, k in zip(query[:, first:].double(), key[:, first:].double(), strict=True):
        scores = (q @ k.T * scaling).masked_fill(~past, 0.0)

        def by_distance(values: Tensor) -> Tensor:
            return values.new_zeros(count).index_add_(0, lag[past], values[past])

        def within(values: Tensor) -> Tensor:
            return (values - values.sum(1, keepdim=True) / keys[:, None]).masked_fill(~past, 0.0)

        mean = by_distance(scores) / pairs
        variance = (scores - scores.sum() / past.sum())[past].square().sum()
        residual = (scores - mean[lag.clamp(min=0)])[past].square().sum()
        centred = within(scores)
        bias = torch.cholesky_solve(by_distance(centred)[:, None], factor)[:, 0]
        bias = bias - (bias * pairs).sum() / pairs.sum()
        variance_in_rows = centred.square().sum()
        residual_in_rows = within((scores - bias[lag.clamp(min=0)]).masked_fill(~past, 0.0)).square().sum()
        tiny = torch.finfo(torch.float64).tiny
        shares = 1 - residual / variance.clamp(min=tiny), 1 - residual_in_rows / variance_in_rows.clamp(min=tiny)
        rows.append((*shares, mean, bias, (variance_in_rows / past.sum()).sqrt()))
    return PositionScores(label, first, *(torch.stack(part).cpu() for part in zip(*rows, strict=True)))
