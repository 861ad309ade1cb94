"""What is assumed of embeddings when positions are derived by expansion, tested on a real model.

Su Jianlin (2021, spaces.ac.cn/archives/8231) expands a model to second order in what two positions add to the
embeddings, `f ~ f_0 + p_m . df/dp_m + p_n . df/dp_n + ... + p_m^T H p_n`, assumes that `H` is close to diagonal, and
arrives at sinusoids. Whether positions are small beside tokens can be measured here, and `H` itself in `expansion.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis import probe


@dataclass(frozen=True)
class VectorStatistics:
    """A set of vectors.

    Attributes:
        count: number of vectors.
        mean_norm: Euclidean norm, mean.
        std_norm: and standard deviation.
        diagonal_share: sum of the squared diagonal entries of the covariance over the sum of all squared entries: 1 for
            a diagonal covariance, about 1/E for one direction that is spread over all coordinates.
        independent_share: what `diagonal_share` is on average for so many vectors of independent normal coordinates
            with these variances: below 1, since a covariance of n vectors is an estimate.
        correlation: root mean square of the correlations of two coordinates; those of n vectors of independent
            coordinates have `1 / sqrt(n - 1)`.
        dimensions: `(sum of the eigenvalues)^2 / sum of their squares` of the covariance: between 1 and E, the number
            of directions that the vectors spread over.
        common: norm of the mean vector over the mean norm: how much of a vector all of them share.
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
class EmbeddingStatistics:
    """Token against position embeddings.

    Attributes:
        label: the model's class.
        tokens: as they enter the model, each as often as the text has it; without a text, each row of the matrix once.
        positions: of the same number of positions, without a text of all rows; None if the model adds no vectors.
        ratio: mean norm of positions over mean norm of tokens; None likewise.
        neighbour_distances: (T - 1,) `|p_{t+1} - p_t|`; None likewise.
        distance_share: of the products `<p_m, p_n>`, see `distance_share`; None likewise.
    """

    label: str
    tokens: VectorStatistics
    positions: VectorStatistics | None
    ratio: float | None
    neighbour_distances: Tensor | None
    distance_share: float | None

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "label": self.label,
            "tokens": dict(self.tokens.__dict__),
            "positions": None if self.positions is None else dict(self.positions.__dict__),
            "ratio": self.ratio,
            "neighbour_distances": None if self.neighbour_distances is None else self.neighbour_distances.tolist(),
            "distance_share": self.distance_share,
        }


def vector_statistics(vectors: Tensor) -> VectorStatistics:
    """Describe vectors (n, E), n >= 2."""
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
    """Return the squared diagonal of (n, E) over all its squares; row r has its diagonal entry in column rows[r]."""
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
    found = probe.parts(model)
    if tokens is None:
        weight: Any = found.token_embedding.weight
        entering = found.token_embedding(torch.arange(len(weight), device=weight.device)[None])[0].cpu()
        length = None
    else:
        tokens = probe.check_tokens(tokens, 2)
        entering = found.token_embedding(tokens).flatten(0, -2).cpu()
        length = tokens.shape[1]
    words = vector_statistics(entering)
    vectors = probe.position_vectors(model, length)
    label = type(model).__name__
    if vectors is None:
        return EmbeddingStatistics(label, words, None, None, None, None)
    places = vector_statistics(vectors)
    ratio = places.mean_norm / words.mean_norm
    share = distance_share(vectors @ vectors.T)
    return EmbeddingStatistics(label, words, places, ratio, neighbour_distances(vectors), share)


def distance_share(products: Tensor) -> float:
    """Return how much of the variance of products (T, T) of two positions is a function of their distance alone.

    1 for sinusoids and whatever else depends on `m - n` only; what is left is absolute. The products of a position with
    itself do not count.
    """
    products = products.double()
    size = len(products)
    distance = (torch.arange(size)[:, None] - torch.arange(size)).flatten() + size - 1
    apart = distance != size - 1
    values, distance = products.flatten()[apart], distance[apart]
    sums, counts = (torch.zeros(2 * size - 1, dtype=torch.float64) for _ in range(2))
    sums.index_add_(0, distance, values)
    counts.index_add_(0, distance, torch.ones_like(values))
    means = sums / counts.clamp(min=1)
    total = (values - values.mean()).square().sum()
    return (1 - (values - means[distance]).square().sum() / total.clamp(min=1e-300)).item()


def neighbour_distances(vectors: Tensor) -> Tensor:
    """Return `|p_{t+1} - p_t|` of vectors (T, E), (T - 1,) float64.

    For sinusoids it is one number, `2 sqrt(sum_u sin^2(w_u / 2))` times the scale: no position is closer to its
    neighbour than another, and where the first ones look closer in a trained table it is training that made them so.
    """
    return vectors.double().diff(dim=0).norm(dim=-1)
