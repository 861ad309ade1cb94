"""What is assumed of embeddings when positions are derived by expansion, tested on a real model.

Su Jianlin (2021, spaces.ac.cn/archives/8231) expands a model to second order in what two positions add to the
embeddings, `f ~ f_0 + p_m . df/dp_m + p_n . df/dp_n + ... + p_m^T H p_n`, assumes that `H` is close to diagonal, and
arrives at sinusoids. Whether positions are small beside tokens, and whether `H` is diagonal, can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..modes import evaluation
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


@dataclass(frozen=True)
class Interaction:
    """Second-order interaction of two positions.

    Attributes:
        first: position m.
        second: position n.
        block: (rows, E) float64, `d^2 f / dx_m dx_n`: rows of the Hessian block for the coordinates in `rows`.
        rows: coordinates of x_m that the rows stand for.
        diagonal_share: squared diagonal entries over all squared entries of these rows; 1/E if there is no structure.
        term: `p_m^T H p_n` with the model's own position vectors; None if not all rows are known or it has none.
    """

    first: int
    second: int
    block: Tensor
    rows: tuple[int, ...]
    diagonal_share: float
    term: float | None

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**self.__dict__, "block": self.block.tolist(), "rows": list(self.rows)}


def interaction(
    model: PreTrainedModel,
    tokens: Tensor,
    first: int,
    second: int,
    *,
    rows: int | None = 64,
    progress: bool = False,
) -> Interaction:
    """Differentiate a model twice, by what is added to the embeddings of two positions.

    The function is the log-probability, at the last position but one, of the last token. Attention runs densely, which
    has second derivatives.

    Args:
        model: a causal language model, patched or stock; best in float32 or float64.
        tokens: (T,) text, T >= 3.
        first: m, 0 .. T - 2.
        second: n, 0 .. T - 2, another one.
        rows: number of rows of the block, evenly spread, each one backward pass; None means all E.
        progress: show a progress bar.

    Returns:
        Interaction.

    Raises:
        ValueError: for positions out of range or equal, or more than one text.
    """
    tokens = probe.check_tokens(tokens, 3)
    length = tokens.shape[1]
    if len(tokens) != 1:
        raise ValueError("one text at a time")
    if not (0 <= first < length - 1 and 0 <= second < length - 1) or first == second:
        raise ValueError(f"first and second must be two positions from 0 to {length - 2}, not {first} and {second}")
    embedding = probe.parts(model).token_embedding
    with torch.enable_grad(), evaluation(model), probe.dense_attention(model):
        start = embedding(tokens[:, :-1]).detach()
        size = start.shape[-1]
        at = [torch.zeros(size, dtype=start.dtype, device=start.device, requires_grad=True) for _ in range(2)]
        index = torch.arange(length - 1, device=start.device)[:, None]
        inputs = start + (index == first) * at[0] + (index == second) * at[1]
        logits = model(inputs_embeds=inputs, use_cache=False).logits[0, -1]
        value = logits.log_softmax(-1)[tokens[0, -1]]
        (slope,) = torch.autograd.grad(value, at[0], create_graph=True)
        count = size if rows is None else min(rows, size)
        chosen = [k * size // count for k in range(count)]
        block = torch.stack(
            [
                torch.autograd.grad(slope[k], at[1], retain_graph=True)[0].double().cpu()
                for k in tqdm(chosen, disable=not progress, desc="Hessian", unit="row")
            ]
        )
    vectors = probe.position_vectors(model, length - 1) if count == size else None
    term = None if vectors is None else (vectors[first] @ block @ vectors[second]).item()
    return Interaction(first, second, block, tuple(chosen), diagonal_share(block, chosen), term)
