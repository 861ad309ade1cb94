"""Statistics of token and position embeddings, for the assumptions of Su's expansion.

Su Jianlin (2021, spaces.ac.cn/archives/8231) expands a model to second order in the vectors that two positions add to
the embeddings, `f ~ f_0 + p_m . df/dp_m + p_n . df/dp_n + ... + p_m^T H p_n`. He assumes that `H` is close to diagonal,
and arrives at sinusoids. Whether positions are small beside tokens is measured here, and `H` itself in `expansion.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis import probe
from ..measurement import Result


@dataclass(frozen=True)
class VectorStatistics(Result):
    """Statistics of a set of vectors.

    Attributes:
        count: number of vectors.
        mean_norm: mean of the Euclidean norms.
        std_norm: standard deviation of the Euclidean norms.
        diagonal_share: sum of the squared diagonal entries of the covariance over the sum of all squared entries. It is
            1 for a diagonal covariance, about 1/E for one direction that is spread over all coordinates.
        independent_share: mean `diagonal_share` of as many vectors of independent normal coordinates with these
            variances. It is below 1, because a covariance of n vectors is an estimate.
        correlation: root mean square of the correlations of two coordinates. With n vectors of independent coordinates
            it is `1 / sqrt(n - 1)`.
        dimensions: number of directions that the vectors spread over, between 1 and E: `(sum of the eigenvalues)^2 /
            sum of their squares` of the covariance.
        common: norm of the mean vector over the mean norm, the share of a vector that all have in common.
    """

    count: int
    mean_norm: float
    std_norm: float
    diagonal_share: float
    independent_share: float
    correlation: float
    dimensions: float
    common: float


@dataclass(frozen=True)
class EmbeddingStatistics(Result):
    """Statistics of token and position embeddings of a model.

    Attributes:
        label: the model's class.
        tokens: token embeddings as they enter the model, each as often as the text has it. Without a text, each row of
            the matrix once.
        positions: position vectors of as many positions as the text has tokens, without a text of all rows. None, as
            are the following, if the model adds no vectors.
        ratio: mean norm of positions over mean norm of tokens.
        neighbour_distances: (T - 1,) `|p_{t+1} - p_t|`.
        distance_share: share of the distance in the products `<p_m, p_n>`, see `distance_share`.
    """

    label: str
    tokens: VectorStatistics
    positions: VectorStatistics | None
    ratio: float | None
    neighbour_distances: Tensor | None
    distance_share: float | None


def vector_statistics(vectors: Tensor) -> VectorStatistics:
    """Return the statistics of vectors (n, E), n >= 2."""
    vectors = vectors.double()
    norms, mean = vectors.norm(dim=-1), vectors.mean(0)
    covariance = (vectors - mean).T @ (vectors - mean) / (len(vectors) - 1)
    variances = covariance.diagonal()
    # Wishart: an estimated covariance of two independent coordinates is 0 on average, its square v w / (n - 1).
    diagonal = variances.square().sum()
    others = (variances.sum().square() - diagonal) / (len(vectors) - 1)
    size = len(variances)
    squares = covariance.square() / (variances[:, None] * variances).clamp(min=1e-300)
    correlations = squares.sum() - squares.diagonal().sum()
    return VectorStatistics(
        count=len(vectors),
        mean_norm=norms.mean().item(),
        std_norm=norms.std().item(),
        diagonal_share=diagonal_share(covariance),
        independent_share=(diagonal / (diagonal + others).clamp(min=1e-300)).item(),
        correlation=(correlations / max(1, size * (size - 1))).sqrt().item(),
        dimensions=(variances.sum().square() / covariance.square().sum().clamp(min=1e-300)).item(),
        common=(mean.norm() / norms.mean().clamp(min=1e-300)).item(),
    )


def diagonal_share(matrix: Tensor, rows: Sequence[int] | None = None) -> float:
    """Return the squared diagonal of (n, E) over all its squares; row r has its diagonal entry in column `rows[r]`."""
    index = torch.arange(len(matrix)) if rows is None else torch.tensor(list(rows))
    squares = matrix.double().square()
    return (squares.gather(1, index[:, None]).sum() / squares.sum().clamp(min=1e-300)).item()


@torch.no_grad()
def embedding_statistics(model: PreTrainedModel, tokens: Tensor | None = None) -> EmbeddingStatistics:
    """Compare token and position embeddings of a model.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text, T >= 2; None means the whole matrices, every row once.

    Returns:
        EmbeddingStatistics.

    Raises:
        ValueError: as `position_vectors`.
    """
    embedding, label = probe.parts(model).token_embedding, type(model).__name__
    if tokens is None:
        weight, length = next(embedding.parameters()), None
        tokens = torch.arange(len(weight), device=weight.device)[None]
    else:
        tokens = probe.check_tokens(tokens, 2)
        length = tokens.shape[1]
    words = vector_statistics(embedding(tokens).flatten(0, -2).cpu())
    vectors = probe.position_vectors(model, length)
    if vectors is None:
        return EmbeddingStatistics(label, words, None, None, None, None)
    places = vector_statistics(vectors)
    ratio = places.mean_norm / words.mean_norm
    share = distance_share(vectors @ vectors.T)
    return EmbeddingStatistics(label, words, places, ratio, neighbour_distances(vectors), share)


def distance_share(products: Tensor) -> float:
    """Return the share of the variance of products (T, T) of two positions that their distance alone explains.

    It is 1 for sinusoids and for everything else that depends on `m - n` only; the rest is absolute. The products of a
    position with itself do not count.
    """
    products = products.double()
    size = len(products)
    distance = (torch.arange(size)[:, None] - torch.arange(size)).flatten() + size - 1
    apart = distance != size - 1
    values, distance = products.flatten()[apart], distance[apart]
    means = distance.bincount(values) / distance.bincount().clamp(min=1)
    total = (values - values.mean()).square().sum()
    return (1 - (values - means[distance]).square().sum() / total.clamp(min=1e-300)).item()


def neighbour_distances(vectors: Tensor) -> Tensor:
    """Return `|p_{t+1} - p_t|` of vectors (T, E), (T - 1,) float64.

    For sinusoids all are one number, `2 sqrt(sum_u sin^2(w_u / 2))` times the scale. So no position is closer to its
    neighbour than another, and in a table where the first ones are, training made them so.
    """
    return vectors.double().diff(dim=0).norm(dim=-1)
