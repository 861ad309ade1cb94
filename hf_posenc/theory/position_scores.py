"""Scores that a table of positions gives by itself, and the share of them that a bias by distance can carry."""

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
    """Scores between positions, over all pairs of a query and a key that is not ahead of it.

    Attributes:
        label: the model's class, or the caller's name for the table.
        first: position of the first query and key that count.
        explained: (H,) share of the variance of the scores that their mean by distance explains (R^2).
        explained_in_rows: (H,) share of the scores' squared deviations from their query's mean that `bias` explains.
            Each query may add a constant to its scores, because the softmax does not see it.
        mean: (H, T) float64, mean score by distance.
        bias: (H, T) float64, the bias by distance that is closest to the scores by least squares, up to a constant of
            each query. Its mean over pairs is 0.
        deviation: (H,) root mean square of the scores' deviations from their query's mean, in nats: the effect of
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
    """Measure the scores that the table of positions of a model gives in its first layer.

    There the hidden state is exactly token plus position. Before queries and keys are made a norm divides by the length
    of the sum, so positions have no separate part. Two quantities are well defined. Without tokens, positions enter the
    layer alone, normed by their own length. With tokens, queries and keys are averaged at each position over these
    tokens, norm included. The product of the two means is then the mean score of two positions over pairs of tokens. It
    includes the effect of a key's position on an average query.

    Args:
        model: stock, with a table of positions that is added to its hidden states.
        tokens: (n,) or (B, T) integers; None means positions alone.
        length: number of positions from 0; None means the whole table.
        first: position from which queries and keys count; the very first ones are often unlike all others.
        samples: largest number of tokens that are averaged over, evenly spread; each costs the queries and keys of one
            layer.
        progress: show a progress bar.

    Returns:
        PositionScores with the heads of the first layer.

    Raises:
        UnsupportedModelError: if the model has no table of positions, is patched, or its layers are not served.
        ValueError: for positions that the table does not have, fewer than 3 that count, or no tokens.
    """
    if patch_of(model) is not None:
        raise UnsupportedModelError("the table of a stock model is measured: unpatch the model first")
    base = BaseModel.of(model)
    table = probe.position_vectors(model, length)
    if base.found.position_table is None or table is None:
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
    """Return calls of the first layer's attention with all positions: alone, or added to each of some tokens."""
    some = next(base.found.token_embedding.parameters())
    layer = min(base.sizes)
    found, attention = base.found.layers[layer], base.found.attention_of[layer]
    dummy = torch.zeros(1, len(table), dtype=torch.int64, device=some.device)
    seen = observe(model, dummy, [layer])[layer]
    hidden = [vectors := table.to(some)]
    if tokens is not None:
        chosen = tokens.flatten()[torch.linspace(0, tokens.numel() - 1, min(samples, tokens.numel())).long()]
        singles = chosen.to(some.device).view(-1, 1, 1)
        hidden = [entering(base.found.decoder, found, each)[0, 0] - vectors[0] + vectors for each in singles]
    bar = tqdm(hidden, disable=not progress, desc="scores of positions", unit="token")
    return [attention_call(found, attention, each[None], seen.layer).widened() for each in bar]


@torch.no_grad()
def scores_between(query: Tensor, key: Tensor, *, scaling: float, first: int = 0, label: str = "") -> PositionScores:
    """Measure how much of the scores of queries and keys of positions depends on their distance alone.

    Args:
        query: (H, T, D) of the positions 0, 1, ...
        key: (H, T, D).
        scaling: factor of the scores, 1/sqrt(D) as a rule.
        first: position from which queries and keys count.
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
    pairs = count - index.double()  # at each distance
    keys = 1 + index.double()  # of each query
    # Normal equations of the bias, the constants of the queries eliminated: queries from max(d, d') on have both.
    common = (1 / keys).flip(0).cumsum(0).flip(0)[torch.maximum(index[:, None], index)]
    normal = torch.diag(pairs) - common + 1.0  # a constant is free, and this one makes the bias sum to 0
    factor = torch.linalg.cholesky(normal)
    rows = []
    for q, k in zip(query[:, first:].double(), key[:, first:].double(), strict=True):
        scores = (q @ k.T * scaling).masked_fill(~past, 0.0)

        def by_distance(values: Tensor) -> Tensor:
            return values.new_zeros(count).index_add_(0, lag[past], values[past])

        def within(values: Tensor) -> Tensor:
            return (values - values.sum(1, keepdim=True) / keys[:, None]).masked_fill(~past, 0.0)

        mean = by_distance(scores) / pairs
        whole = (scores - scores.sum() / past.sum())[past].square().sum()
        left = (scores - mean[lag.clamp(min=0)])[past].square().sum()
        centred = within(scores)
        bias = torch.cholesky_solve(by_distance(centred)[:, None], factor)[:, 0]
        bias = bias - (bias * pairs).sum() / pairs.sum()
        in_rows = centred.square().sum()
        unexplained = within((scores - bias[lag.clamp(min=0)]).masked_fill(~past, 0.0)).square().sum()
        tiny = torch.finfo(torch.float64).tiny
        shares = 1 - left / whole.clamp(min=tiny), 1 - unexplained / in_rows.clamp(min=tiny)
        rows.append((*shares, mean, bias, (in_rows / past.sum()).sqrt()))
    return PositionScores(label, first, *(torch.stack(part).cpu() for part in zip(*rows, strict=True)))
