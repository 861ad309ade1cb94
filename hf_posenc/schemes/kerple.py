"""KERPLE: biases that fall with the logarithm or a power of the distance, with learned rates."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..dims import Dims
from ..forms import Bias
from ..modules import ScoreModule, by_head, parameter
from ..registry import register_scheme
from ..sinusoids import compute_dtype
from .base import ScoreScheme, init

LEAST = 0.01
"""The smallest value that a number of the formula starts from, that of the authors' code."""


def positive(raw: Tensor) -> Tensor:
    """Return the positive number that each trained one stands for, `ln(1 + exp(raw))`, in its dtype."""
    return softplus(raw, threshold=40.0)  # from 40 on the two agree in every digit of float64


def raw_of(number: Tensor) -> Tensor:
    """Return the trained number that stands for each positive one, the inverse of `positive`."""
    return number + torch.log(-torch.expm1(-number))


def drawn(like: Tensor) -> Tensor:
    """Return float32 numbers uniform in (0, 1), in the shape of `like` and on its device."""
    return torch.rand(like.shape, dtype=torch.float32, device=like.device)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Kerple(ScoreScheme):
    """A bias that falls with the logarithm or a power of the distance, at rates that each head learns.

    Equation: `softmax_j(q_i . k_j / sqrt(D) - r_h ln(1 + s_h d))` with `r, s > 0` for `variant="log"`, and
    `softmax_j(q_i . k_j / sqrt(D) - r_h d^p_h)` with `r > 0`, `0 < p < 2` for `variant="power"`: the two conditionally
    positive definite kernels that the paper tests, of which the logarithm extrapolates best.
    Beyond the training length: no limit; made for it, the biases keep falling.
    Deviations: the authors' code trains `r`, `s` and `p` themselves, and in each forward pass clips them to at least
    0.01, `p` also to at most 2. Here any trained `x` stands for a number of the range, `ln(1 + exp(x))` for `r` and
    `s`, `2 / (1 + exp(-x))` for `p`, so that no step can leave it. The numbers start as in that code. `r` beside a
    logarithm and `p` are uniform in (0, 2), `s` and `r` beside a power in (0, 1). None starts below 0.01, and `p` not
    above 1.99.
    With a soft cap on scores (Gemma 2) the bias is added after the cap, like a mask.
    Source: Chi, Fan, Ramadge, Rudnicky 2022, arXiv:2205.09921, and the authors' code.

    Args:
        variant: `log` or `power`.
        share_layers: the same numbers in all layers (the authors' code), or numbers of their own.
    """

    name: ClassVar[str] = "kerple"
    variant: str = "log"
    share_layers: bool = True

    def __post_init__(self) -> None:
        self.one_of("variant", ("log", "power"))
        self.flags("share_layers")

    def build(self, dims: Dims) -> ScoreModule:
        return LogarithmicBias(dims.num_heads) if self.variant == "log" else PowerBias(dims.num_heads)


class LogarithmicBias(ScoreModule):
    """`q . k - r_h ln(1 + s_h d)`; parameters `raw_scale` (H,) for `r` and `raw_rate` (H,) for `s`."""

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
            init.copy_(raw, raw_of((most * drawn(raw)).clamp(min=LEAST)).to(raw))

    def form(self, like: Tensor) -> Bias:
        dtype = compute_dtype(like)
        scale, rate = positive(self.raw_scale.to(dtype)), positive(self.raw_rate.to(dtype))

        def values(distance: Tensor) -> Tensor:
            return -by_head(scale, distance) * torch.log1p(by_head(rate, distance) * distance.to(dtype))

        return Bias(values, scale.device)


class PowerBias(ScoreModule):
    """`q . k - r_h d^p_h`; parameters `raw_scale` (H,) for `r` and `raw_exponent` (H,) for `p`."""

    def __init__(self, num_heads: int) -> None:
        """Make the parameters.

        Args:
            num_heads: H.
        """
        super().__init__()
        self.raw_scale = parameter(num_heads)
        self.raw_exponent = parameter(num_heads)

    def reset_parameters(self) -> None:
        """Start at numbers drawn uniformly."""
        init.copy_(self.raw_scale, raw_of(drawn(self.raw_scale).clamp(min=LEAST)).to(self.raw_scale))
        init.copy_(self.raw_exponent, drawn(self.raw_exponent).logit(eps=LEAST / 2).to(self.raw_exponent))

    def form(self, like: Tensor) -> Bias:
        dtype = compute_dtype(like)
        scale, exponent = positive(self.raw_scale.to(dtype)), 2 * torch.sigmoid(self.raw_exponent.to(dtype))

        def values(distance: Tensor) -> Tensor:
            return -by_head(scale, distance) * distance.to(dtype) ** by_head(exponent, distance)

        return Bias(values, scale.device)
