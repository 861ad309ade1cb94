"""KERPLE: biases that fall with the logarithm of the distance, with learned rates."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..core.dims import Dims
from ..core.dtypes import compute_dtype
from ..core.forms import Bias
from ..core.modules import ScoreModule, by_head, parameter
from ..core.registry import register_scheme
from .base import ScoreScheme, init

SMALLEST_START = 0.01
"""Smallest start value of a rate, as in the authors' code."""


def positive(raw: Tensor) -> Tensor:
    """Return `ln(1 + exp(raw))`, the positive numbers that trained numbers stand for, in their dtype."""
    return softplus(raw, threshold=40.0)  # from 40 on the two agree in every digit of float64


def raw_of(number: Tensor) -> Tensor:
    """Return the trained numbers that stand for positive numbers: the inverse of `positive`."""
    return number + torch.log(-torch.expm1(-number))


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Kerple(ScoreScheme):
    """A bias that falls with the logarithm of the distance, at rates that each head learns.

    Equation: `softmax_j(q_i . k_j / sqrt(D) - r_h ln(1 + s_h d))` with `r, s > 0`, the paper's logarithmic variant,
    which extrapolates better than its powers of the distance.
    Beyond the training length: no limit; made for it, the biases keep falling.
    Deviations: the authors' code trains `r` and `s` themselves, and in each forward pass clips them to at least 0.01.
    Here a trained number `x` stands for `ln(1 + exp(x))`, so that no step can leave the range. They start as in that
    code: `r` is uniform in (0, 2) and `s` in (0, 1), none below 0.01.
    With a soft cap on scores (Gemma 2) the bias is added after the cap, like a mask.
    Source: Chi, Fan, Ramadge, Rudnicky 2022, arXiv:2205.09921, and the authors' code. Powers of the distance: `bam`.

    Args:
        share_layers: the same numbers in all layers (the authors' code), or separate numbers per layer.
    """

    name: ClassVar[str] = "kerple"
    share_layers: bool = True

    def __post_init__(self) -> None:
        self.flags("share_layers")

    def build(self, dims: Dims) -> ScoreModule:
        return LogarithmicBias(dims.num_heads)


class LogarithmicBias(ScoreModule):
    """`q . k - r_h ln(1 + s_h d)`; parameters `raw_scale` (H,) for `r` and `raw_rate` (H,) for `s`."""

    real = True

    def __init__(self, num_heads: int) -> None:
        """Make the parameters.

        Args:
            num_heads: H.
        """
        super().__init__()
        self.raw_scale = parameter(num_heads)
        self.raw_rate = parameter(num_heads)

    def reset_parameters(self) -> None:
        """Start at numbers drawn uniformly."""
        for raw, most in ((self.raw_scale, 2.0), (self.raw_rate, 1.0)):
            drawn = most * torch.rand(raw.shape, dtype=torch.float32, device=raw.device)
            init.copy_(raw, raw_of(drawn.clamp(min=SMALLEST_START)).to(raw))

    def form(self, like: Tensor) -> Bias:
        dtype = compute_dtype(like)
        scale, rate = positive(self.raw_scale.to(dtype)), positive(self.raw_rate.to(dtype))

        def values(distance: Tensor) -> Tensor:
            return -by_head(scale, distance) * torch.log1p(by_head(rate, distance) * distance.to(dtype))

        return Bias(values, scale.device)
