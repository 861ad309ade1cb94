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

from . import probe


@dataclass(frozen=True)
class VectorStatistics:
    """A set of vectors.

    Attributes:
        count: number of vectors.
        mean_norm: Euclidean norm, mean.
        std_norm: and standard deviation.
        diagonal_share: sum of the squared diagonal entries of the covariance over the sum of all squared entries: 1 for
            a diagonal covariance, about 1/E for one direction that is spread over all coordinates.
    """

    count: int
    mean_norm: float
    std_norm: float
    diagonal_share: float


@dataclass(frozen=True)
class EmbeddingStatistics:
    """Token against position embeddings.

    Attributes:
        label: the model's class.
        tokens: of the text, as they enter the model, each as often as it occurs.
        positions: of the same number of positions; None if the model adds no position vectors.
        ratio: mean norm of positions over mean norm of tokens; None likewise.
        neighbour_distances: (T - 1,) `|p_{t+1} - p_t|`; None likewise.
    """

    label: str
    tokens: VectorStatistics
    positions: VectorStatistics | None
    ratio: float | None
    neighbour_distances: Tensor | None

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "label": self.label,
            "tokens": dict(self.tokens.__dict__),
            "positions": None if self.positions is None else dict(self.positions.__dict__),
            "ratio": self.ratio,
            "neighbour_distances": None if self.neighbour_distances is None else self.neighbour_distances.tolist(),
        }


def vector_statistics(vectors: Tensor) -> VectorStatistics:
    """Describe vectors (n, E), n >= 2."""
    vectors = vectors.double()
    norms = vectors.norm(dim=-1)
    centred = vectors - vectors.mean(0)
    covariance = centred.T @ centred / (len(vectors) - 1)
    return VectorStatistics(len(vectors), norms.mean().item(), norms.std().item(), diagonal_share(covariance))


def diagonal_share(matrix: Tensor, rows: Sequence[int] | None = None) -> float:
    """Return the squared diagonal of (n, E) over all its squares; row r has its diagonal entry in column rows[r]."""
    index = torch.arange(len(matrix)) if rows is None else torch.tensor(list(rows))
    squares = matrix.double().square()
    return (squares.gather(1, index[:, None]).sum() / squares.sum().clamp(min=1e-300)).item()


@torch.no_grad()
def embedding_statistics(model: PreTrainedModel, tokens: Tensor) -> EmbeddingStatistics:
    """Compare token and position embeddings of a model.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text, T >= 2.

    Returns:
        EmbeddingStatistics.
    """
    tokens = probe.check_tokens(tokens, 2)
    found = probe.parts(model)
    entering = found.token_embedding(tokens).flatten(0, -2).cpu()
    words = vector_statistics(entering)
    vectors = probe.position_vectors(model, tokens.shape[1])
    label = type(model).__name__
    if vectors is None:
        return EmbeddingStatistics(label, words, None, None, None)
    places = vector_statistics(vectors)
    return EmbeddingStatistics(label, words, places, places.mean_norm / words.mean_norm, neighbour_distances(vectors))


def neighbour_distances(vectors: Tensor) -> Tensor:
    """Return `|p_{t+1} - p_t|` of vectors (T, E), (T - 1,) float64.

    For sinusoids it is one number, `2 sqrt(sum_u sin^2(w_u / 2))` times the scale: no position is closer to its
    neighbour than another, and where the first ones look closer in a trained table it is training that made them so.
    """
    return vectors.double().diff(dim=0).norm(dim=-1)
