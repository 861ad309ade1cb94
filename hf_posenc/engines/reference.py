"""The reference engine: dense, readable, the definition that every other engine is tested against."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..positions import DensePositions, Positions


class Formula(Protocol):
    """What the engine needs of a scheme's module, see `hf_posenc.schemes.base.ScoreModule`."""

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        distance: Tensor,
        scaling: float,
        vector_scaling: float,
        cap: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the logits (B, H, Q, L) before masking."""

    def mix(self, weights: Tensor, value: Tensor, distance: Tensor) -> Tensor:
        """Return the weighted sum of values (B, H, Q, D)."""


def attend(
    module: Formula,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Positions | DensePositions,
    *,
    scaling: float,
    vector_scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend densely, in float32 whatever the model's dtype (float64 for float64), also under autocast.

    Costs O(B H Q L) memory.

    Args:
        module: the scheme's formula.
        query: (B, H, Q, D).
        key: (B, K, L, D).
        value: (B, K, L, D).
        positions: of these queries and keys.
        scaling: factor of terms that contain the query.
        vector_scaling: factor of terms that do not.
        softcap: `cap * tanh(score / cap)` on the scores; None means none.
        dropout: probability that a weight is dropped.

    Returns:
        output (B, Q, H, D) and weights (B, H, Q, L) after dropout, both in the query's dtype.
    """

    def cap(scores: Tensor) -> Tensor:
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    dtype = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = query.to(dtype), key.to(dtype), value.to(dtype)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        distance = positions.distance().clamp(min=0)
        logits = module.scores(q, k, distance, scaling, vector_scaling, cap)
        weights = positions.mask(logits).softmax(-1)
        weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
        output = module.mix(weights, v, distance)
    return output.transpose(1, 2).to(query.dtype).contiguous(), weights.to(query.dtype)
