"""BAM: a bias whose weights follow a generalized Gaussian of the distance, with learned width, shape and centre."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.dims import Dims
from ..core.dtypes import compute_dtype
from ..core.forms import Bias
from ..core.modules import ScoreModule, by_head, parameter
from ..core.registry import register_scheme
from .alibi import alibi_slopes
from .base import ScoreScheme, init
from .kerple import positive, raw_of

OFFSET = 1e-5
"""What the authors' code adds to the distance from the centre, so that a power of it has a gradient everywhere."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class BAM(ScoreScheme):
    """A generalized Gaussian prior over distances, whose width and shape each head learns.

    Equation: `softmax_j(q_i . k_j / sqrt(D) - r_h (|d - c_h| + 1e-5)^p_h)` with `r, p > 0`. In the paper's words
    `r = alpha^-p`, `p` is the shape `beta` and `c` the location `mu`. `p = 1` and `c = 0` make it ALiBi.
    Beyond the training length: no limit; made for it, the biases keep falling, slowly where `p` is small.
    Deviations: the authors' code leaves the sign of `p` free. With a negative `p` the bias at the centre is near
    `-10^(5 |p|)`, and its gradient is larger still. Here a trained number `x` stands for `ln(1 + exp(x))` in `r` and
    `p`; the authors' code takes `exp(x)` for `r`, and `exp(x) - exp(-x)` for the centre, which is trained as it is
    here. That code starts without positions, at `r = 1` and `p = 0`. Here every head starts as ALiBi: `r` at ALiBi's
    slopes, `p` at 1, `c` at 0. The scalable softmax that the paper combines with this prior is not part of it. With a
    soft cap on scores (Gemma 2) the bias is added after the cap, like a mask.
    Source: Bianchessi, Aguirre, Barros, Kupssinskü 2025, arXiv:2505.22842, and the authors' code.

    Args:
        centre: whether the centres are trained. False keeps them at 0 (the authors' default).
        share_layers: the same numbers in all layers, or separate numbers per layer (the authors' code).
    """

    name: ClassVar[str] = "bam"
    centre: bool = False
    share_layers: bool = False

    def __post_init__(self) -> None:
        self.flags("centre")
        self.flags("share_layers")

    def build(self, dims: Dims) -> ScoreModule:
        return GeneralizedGaussian(dims.num_heads, self.centre)


class GeneralizedGaussian(ScoreModule):
    """`q . k - r_h (|d - c_h| + 1e-5)^p_h`; parameters `raw_scale`, `raw_exponent` and perhaps `centre`, (H,)."""

    real = True

    def __init__(self, num_heads: int, centre: bool) -> None:
        """Make the parameters.

        Args:
            num_heads: H.
            centre: whether the centres are a parameter; otherwise they are 0.
        """
        super().__init__()
        self.raw_scale = parameter(num_heads)
        self.raw_exponent = parameter(num_heads)
        self.centre = parameter(num_heads) if centre else None

    def reset_parameters(self) -> None:
        """Start as ALiBi."""
        slopes = torch.tensor(alibi_slopes(len(self.raw_scale)), dtype=torch.float64)
        init.copy_(self.raw_scale, raw_of(slopes).to(self.raw_scale))
        init.copy_(self.raw_exponent, raw_of(torch.ones_like(slopes)).to(self.raw_exponent))
        if self.centre is not None:
            init.zeros_(self.centre)

    def form(self, like: Tensor) -> Bias:
        dtype = compute_dtype(like)
        scale, exponent = positive(self.raw_scale.to(dtype)), positive(self.raw_exponent.to(dtype))
        centre = None if self.centre is None else self.centre.to(dtype)

        def values(distance: Tensor) -> Tensor:
            away = distance.to(dtype) if centre is None else (distance.to(dtype) - by_head(centre, distance)).abs()
            return -by_head(scale, distance) * (away + OFFSET) ** by_head(exponent, distance)

        return Bias(values, scale.device)
