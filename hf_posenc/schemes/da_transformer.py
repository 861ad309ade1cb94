"""DA-Transformer: scores rescaled by a learned function of distance."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.dims import Dims
from ..core.dtypes import compute_dtype
from ..core.forms import Factors
from ..core.modules import ScoreModule, by_head, parameter
from ..core.registry import register_scheme
from .base import ScoreScheme, init


@register_scheme
@dataclass(frozen=True, kw_only=True)
class DATransformer(ScoreScheme):
    """Scores multiplied by a learned, saturating function of distance, one per head.

    Equations (2) to (5): `softmax_j(ReLU(q_i . k_j) f_h(d) / sqrt(D))`, `f_h(d) = (1 + exp(v_h)) / (1 + exp(v_h - w_h
    d))`.
    Beyond the training length: no limit; `f` saturates at `1 + exp(v_h)` or 0.
    Deviations: the paper is an encoder with `|i - j|`; here `d >= 0`. `w` starts at 0, where `f = 1`, so that a patched
    model starts as attention without distances. `relu=False` drops the ReLU, because few models that were trained
    without it survive it. A factor above 1 then makes negative scores more negative.
    Source: Wu, Wu, Huang 2021, arXiv:2010.06925.

    Args:
        relu: clip negative scores at 0 before they are rescaled, as in the paper.
    """

    name: ClassVar[str] = "da_transformer"
    relu: bool = True

    def __post_init__(self) -> None:
        self.flags("relu")

    def build(self, dims: Dims) -> ScoreModule:
        return DistanceRescaling(dims.num_heads, self.relu)


class DistanceRescaling(ScoreModule):
    """The module of `da_transformer`, with the parameters `distance_weight` (`w`) and `saturation` (`v`), both (H,)."""

    real = True

    def __init__(self, num_heads: int, relu: bool) -> None:
        """Make the parameters.

        Args:
            num_heads: H.
            relu: whether negative scores are clipped.
        """
        super().__init__()
        self.relu = relu
        self.distance_weight = parameter(num_heads)
        self.saturation = parameter(num_heads)

    def reset_parameters(self) -> None:
        """Start at `f = 1`."""
        init.zeros_(self.distance_weight)
        init.zeros_(self.saturation)

    def form(self, like: Tensor) -> Factors:
        dtype = compute_dtype(like)
        return Factors(lambda distance: self.factors(distance.to(dtype)), like.device, self.relu)

    def factors(self, distance: Tensor) -> Tensor:
        """Return `f_h(d)` of distances of any shape, (H, *shape), in their dtype, float32 or float64.

        It is computed as `(a + b) / (a + b exp(-w d))`, with `a = exp(-v)`, `b = 1` for `v > 0`, else `a = 1`,
        `b = exp(v)`, because `exp(v)` alone may overflow. `w d` is clipped where `exp` reaches the third root of the
        largest number (29.6 in float32), so that gradients, which contain `f` squared, stay finite.
        """
        parameters = (self.distance_weight, self.saturation)
        weight, saturation = (by_head(p.to(distance.dtype), distance) for p in parameters)
        # At v = 0, the start, exactly one of the two must pass the gradient on: relu's is 0 there, clamp's is 1.
        a, b = torch.exp(-saturation.relu()), torch.exp(saturation.clamp(max=0))
        largest = math.log(torch.finfo(distance.dtype).max) / 3
        return (a + b) / (a + b * torch.exp(-(weight * distance).clamp(-largest, largest)))
