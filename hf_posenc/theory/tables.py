"""What trained tables hold: statistics of token and position embeddings, scores between positions, negative products.

Su Jianlin (2021, spaces.ac.cn/archives/8231) expands a model to second order in the vectors of two positions. The
expansion assumes that these vectors are small compared to token embeddings, which is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis import probe
from ..calibration.observe import attending, attention_call, observe
from ..core.errors import UnsupportedModelError
from ..core.measurement import Result
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation


@dataclass(frozen=True)
class VectorStatistics(Result):
    """Statistics of a set of vectors.

    Attributes:
        mean_norm: mean of the Euclidean norms.
        diagonal_share: squared diagonal entries of the covariance, divided by all squared entries. It is 1 for a
            diagonal covariance, and about 1/E if all vectors lie along one direction.
    """

    mean_norm: float
    diagonal_share: float


@dataclass(frozen=True)
class EmbeddingStatistics(Result):
    """Statistics of token and position embeddings of a model. Without position vectors, all but `tokens` are None.

    Attributes:
        tokens: statistics of the token embeddings.
        positions: statistics of the position vectors.
        ratio: mean norm of position vectors, divided by the mean norm of token embeddings.
        neighbour_distances: (T - 1,) distances `|p_{t+1} - p_t|`, all equal for
            sinusoids: `2 sqrt(sum_u sin^2(w_u / 2))` times the scale.
        distance_share: share of the products `<p_m, p_n>` that depends on distance, see `distance_share`.
    """

    tokens: VectorStatistics
    positions: VectorStatistics | None = None
    ratio: float | None = None
    neighbour_distances: Tensor | None = None
    distance_share: float | None = None


def vector_statistics(vectors: Tensor) -> VectorStatistics:
    """Return the statistics of vectors (n, E), n >= 2."""
    vectors = vectors.double()
    return VectorStatistics(vectors.norm(dim=-1).mean().item(), diagonal_share(vectors.T.cov()))


def diagonal_share(matrix: Tensor, rows: Sequence[int] | None = None) -> float:
    """Return the squared diagonal entries of a matrix (n, E), divided by all squared entries.

    Args:
        matrix: some rows of a square matrix.
        rows: column of each row's diagonal entry; None means 0 .. n - 1.
    """
    index = torch.arange(len(matrix)) if rows is None else torch.tensor(list(rows))
    squares = matrix.double().square()
    return (squares.gather(1, index[:, None]).sum() / squares.sum().clamp(min=1e-300)).item()


@torch.no_grad()
def embedding_statistics(model: PreTrainedModel) -> EmbeddingStatistics:
    """Compare the token and position embeddings of a model, patched or stock: all rows of both tables."""
    embedding = BaseModel.of(model).modules.token_embedding
    weight = next(embedding.parameters())
    tokens = vector_statistics(embedding(torch.arange(len(weight), device=weight.device)).cpu())
    vectors = probe.position_vectors(model)
    if vectors is None:
        return EmbeddingStatistics(tokens)
    positions = vector_statistics(vectors)
    ratio, share = positions.mean_norm / tokens.mean_norm, distance_share(vectors @ vectors.T)
    return EmbeddingStatistics(tokens, positions, ratio, vectors.diff(dim=0).norm(dim=-1), share)


def distance_share(products: Tensor) -> float:
    """Return the share of the variance of products (T, T) of two positions that their distance explains.

    It is 1 if the products depend only on `m - n`, as for sinusoids. Products of a position with itself do not count.
    """
    products = products.double()
    size = len(products)
    distance = (torch.arange(size)[:, None] - torch.arange(size)).flatten() + size - 1
    apart = distance != size - 1
    values, distance = products.flatten()[apart], distance[apart]
    means = distance.bincount(values) / distance.bincount().clamp(min=1)
    total = (values - values.mean()).square().sum()
    return (1 - (values - means[distance]).square().sum() / total.clamp(min=1e-300)).item()


@dataclass(frozen=True)
class PositionScores(Result):
    """Scores between positions, over all pairs of a query and a key at or before it.

    Attributes:
        explained_in_rows: (H,) share that `bias` explains of the scores' squared deviations from their query's mean.
            The softmax ignores a constant that all scores of a query share.
        bias: (H, T) float64, least-squares fit of a bias by distance to the scores. Every query has a free constant.
            The mean of the bias over pairs is 0.
    """

    explained_in_rows: Tensor
    bias: Tensor


@torch.no_grad()
def position_scores(model: PreTrainedModel, length: int | None = None) -> PositionScores:
    """Measure the scores between the position vectors of a model's table, in its first layer.

    There the hidden state is the sum of token and position. But a norm divides it by the length of the sum before
    queries and keys are computed, so positions have no separate part. Here the position vectors alone enter the layer.

    Args:
        model: a model with a table of positions that is added to its hidden states.
        length: number of positions from 0; None means the whole table.

    Raises:
        UnsupportedModelError: if the model has no table of positions, or an unsupported family.
        ValueError: if the table is shorter than `length`.
    """
    base = BaseModel.of(model)
    table = probe.position_vectors(model, length)
    if base.modules.position_table is None or table is None:
        raise UnsupportedModelError(f"this {type(model).__name__} adds no table of positions to its hidden states")
    weight = next(base.modules.token_embedding.parameters())
    layer = min(base.sizes)
    dummy = torch.zeros(1, len(table), dtype=torch.int64, device=weight.device)
    with evaluation(model), attending(model, base):
        observed = observe(model, dummy, [layer])[layer]
        modules = base.modules.layers[layer], base.modules.attention_of[layer]
        call = attention_call(*modules, table.to(weight)[None], observed.layer).widened()
    heads = zip(call.query[0].double(), call.key[0].double(), strict=True)
    fits = [fitted_bias(query @ key.T * call.scaling) for query, key in heads]
    return PositionScores(*(torch.stack(each).cpu() for each in zip(*fits, strict=True)))


def fitted_bias(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a bias by distance to scores (T, T) of a query with keys at or before it, each query up to a constant.

    Returns:
        The share of the scores' squared deviations from their query's mean that the bias explains, (), and the bias,
        (T,), both float64. See `PositionScores`.
    """
    count = len(scores)
    index = torch.arange(count, device=scores.device)
    lag = index[:, None] - index
    past = lag >= 0
    pairs = count - index.double()  # number of pairs at each distance
    keys = 1 + index.double()  # number of keys of each query

    def within(values: Tensor) -> Tensor:
        values = values.masked_fill(~past, 0.0)
        return (values - values.sum(1, keepdim=True) / keys[:, None]).masked_fill(~past, 0.0)

    # Normal equations of the bias, without the queries' constants. Queries from max(d, d') on have both distances.
    common = (1 / keys).flip(0).cumsum(0).flip(0)[torch.maximum(index[:, None], index)]
    normal = torch.diag(pairs) - common + 1.0  # + 1 makes the bias sum to 0, as its constant is free
    centred = within(scores.double())
    by_distance = centred.new_zeros(count).index_add_(0, lag[past], centred[past])
    bias = torch.linalg.solve(normal, by_distance)
    bias = bias - (bias * pairs).sum() / pairs.sum()
    residual = within(centred - bias[lag.clamp(min=0)])
    tiny = torch.finfo(torch.float64).tiny
    return 1 - residual.square().sum() / centred.square().sum().clamp(min=tiny), bias


@torch.no_grad()
def negative_products(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the share of negative products of queries and keys, rotated where a model rotates them.

    DA-Transformer (Wu et al. 2021, arXiv:2010.06925) clips products at 0 before it multiplies them by its factors. So a
    factor above 1 does not lower a negative product further. The paper calls the result sparse. The scores are sparse,
    but the weights are not: a score of 0 contributes `e^0` to the softmax.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text without padding, T >= 2; takes B H T^2 numbers of memory.

    Returns:
        (N, H) float64, 0 .. 1, over all visible pairs, for the N layers that attend.
    """
    tokens = probe.check_tokens(tokens, 2)
    shares = []
    with evaluation(model):
        for seen in observe(model, tokens, list(BaseModel.of(model).modules.attention_of)).values():
            call = seen.call.widened()
            visible = call.visible()
            negative = (call.products() < 0) & visible
            pairs = visible.expand(negative.shape).sum((0, 2, 3))
            shares.append((negative.sum((0, 2, 3)).double() / pairs).cpu())
    return torch.stack(shares)
