"""Statistics of token and position embeddings, for the assumptions of Su's expansion (`expansion.py`).

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
from ..measurement import Result


@dataclass(frozen=True)
class VectorStatistics(Result):
    """Statistics of a set of vectors.

    Attributes:
        count: number of vectors.
        mean_norm: mean of the Euclidean norms.
        std_norm: standard deviation of the Euclidean norms.
        diagonal_share: squared diagonal entries of the covariance, divided by all squared entries. It is 1 for a
            diagonal covariance, and about 1/E if all vectors lie along one direction.
        independent_share: expected `diagonal_share` of the same number of vectors, with independent normal coordinates
            of the same variances. It is below 1, because the covariance of n vectors is an estimate.
        correlation: root mean square correlation of two coordinates. For n vectors of independent coordinates it is
            `1 / sqrt(n - 1)`.
        dimensions: effective number of directions, between 1 and E: the squared sum of the covariance's eigenvalues,
            divided by the sum of their squares.
        common: norm of the mean vector, divided by the mean norm: the share that all vectors have in common.
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
        tokens: statistics of the embeddings of the text's tokens, with repetitions; without a text, of all rows.
        positions: statistics of the position vectors of the text's positions; without a text, of all rows. This and
            the following attributes are None if the model adds no vectors.
        ratio: mean norm of position vectors, divided by the mean norm of token embeddings.
        neighbour_distances: (T - 1,) distances `|p_{t+1} - p_t|`.
        distance_share: share of the products `<p_m, p_n>` that depends on distance, see `distance_share`.
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
    # Wishart: for independent coordinates the expected square of a covariance estimate is v w / (n - 1).
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
    """Return the squared diagonal entries of a matrix (n, E), divided by all squared entries.

    Args:
        matrix: some rows of a square matrix.
        rows: column of each row's diagonal entry; None means 0 .. n - 1.
    """
    index = torch.arange(len(matrix)) if rows is None else torch.tensor(list(rows))
    squares = matrix.double().square()
    return (squares.gather(1, index[:, None]).sum() / squares.sum().clamp(min=1e-300)).item()


@torch.no_grad()
def embedding_statistics(model: PreTrainedModel, tokens: Tensor | None = None) -> EmbeddingStatistics:
    """Compare the token and position embeddings of a model.

    Args:
        model: a patched or stock model.
        tokens: (T,) or (B, T) text, T >= 2; None means all rows of both tables.

    Returns:
        EmbeddingStatistics.

    Raises:
        ValueError: if there are too few position vectors, see `position_vectors`.
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


def neighbour_distances(vectors: Tensor) -> Tensor:
    """Return the distances `|p_{t+1} - p_t|` of vectors (T, E), (T - 1,) float64.

    For sinusoids all distances are equal, `2 sqrt(sum_u sin^2(w_u / 2))` times the scale. In a trained table they can
    differ.
    """
    return vectors.double().diff(dim=0).norm(dim=-1)
