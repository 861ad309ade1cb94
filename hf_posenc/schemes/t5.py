"""T5: learned biases for buckets of distances."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.dims import Dims
from ..core.dtypes import compute_dtype
from ..core.forms import Bias, LinearVectors
from ..core.modules import ScoreModule, parameter
from ..core.registry import register_scheme
from .base import ScoreScheme, init


def buckets(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance. The first half has one distance per bucket, the others grow logarithmically.

    Args:
        distance: integers >= 0 of any shape.
        num_buckets: number of buckets.
        max_distance: every distance from here on is in the last bucket.

    Returns:
        int64, of the same shape.
    """
    exact = num_buckets // 2
    share = torch.log(distance.clamp(min=1).double() / exact) / math.log(max_distance / exact)
    wide = exact + (share * (num_buckets - exact)).long()
    return torch.where(distance < exact, distance.long(), wide.clamp(max=num_buckets - 1))


@register_scheme
@dataclass(frozen=True, kw_only=True)
class T5(ScoreScheme):
    """Learned biases for buckets of distances, narrow for near keys and wide for far ones.

    Equation (section 2.1): `softmax_j(q_i . k_j / sqrt(D) + b_h(bucket(i - j)))`. The first half of the buckets holds
    one distance each, the others grow logarithmically up to `max_distance`.
    Beyond the training length: no limit; all distances from `max_distance` on look alike.
    Deviations: the paper does not divide by `sqrt(D)`; here a model keeps its own division. A decoder has only
    distances `d >= 0`, so all buckets are for these. The biases start at 0, which is attention without positions. With
    a soft cap on scores (Gemma 2) the bias is added after the cap, like a mask.
    Source: Raffel et al. 2020, arXiv:1910.10683; buckets as in the authors' code.

    Args:
        num_buckets: number of buckets, even.
        max_distance: every distance from here on is in the last bucket; more than half of `num_buckets`.
        share_layers: one table for all layers (the paper), or one per layer.
    """

    name: ClassVar[str] = "t5"
    num_buckets: int = 32
    max_distance: int = 128
    share_layers: bool = True

    def __post_init__(self) -> None:
        self.positive("num_buckets", int)
        self.positive("max_distance", int)
        self.flags("share_layers")
        if self.num_buckets % 2:
            raise ValueError(f"t5: num_buckets must be even, not {self.num_buckets}")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"t5: max_distance must be above num_buckets / 2 = {self.num_buckets // 2}, not {self.max_distance}"
            )

    def build(self, dims: Dims) -> ScoreModule:
        return BucketedBias(dims.num_heads, self.num_buckets, self.max_distance)


class BucketedBias(ScoreModule):
    """The module of `t5`, with the parameter `biases` (num_buckets, H)."""

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int) -> None:
        """Make the table.

        Args:
            num_heads: H.
            num_buckets: rows of the table.
            max_distance: distance from which on the last bucket is used.
        """
        super().__init__()
        self.max_distance = max_distance
        self.biases = parameter(num_buckets, num_heads)

    def reset_parameters(self) -> None:
        """Start without any bias."""
        init.zeros_(self.biases)

    def form(self, like: Tensor) -> Bias:
        # Converted before indexing, so that the gradients of a bucket's distances are also summed in that dtype.
        biases = self.biases.to(compute_dtype(like)).T  # (H, num_buckets)

        def values(distance: Tensor) -> Tensor:
            return biases[:, buckets(distance, biases.shape[1], self.max_distance)]

        return Bias(values, biases.device)

    def linear_vectors(self, distances: Tensor, like: Tensor) -> LinearVectors:
        """Return the table: a distance chooses one of its rows, see `ScoreModule.linear_vectors`."""
        rows = buckets(distances, len(self.biases), self.max_distance)
        return LinearVectors(F.one_hot(rows, len(self.biases)).to(like), self.biases.T[..., None])
