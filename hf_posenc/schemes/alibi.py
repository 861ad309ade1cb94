"""ALiBi: a bias that falls linearly with the distance."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from ..dims import Dims
from ..forms import Slopes
from ..modules import ScoreModule, parameter
from ..registry import register_scheme
from ..sinusoids import compute_dtype
from .base import ScoreScheme, init


def alibi_slopes(num_heads: int) -> list[float]:
    """Return one slope per head, the geometric sequence of the paper.

    If the number of heads n is a power of two, head h = 1 .. n gets `2 ** (-8 h / n)`. Otherwise the first p heads get
    the slopes of p heads, p the largest power of two below n. The rest get every second slope of 2p heads, as in the
    authors' code.

    Args:
        num_heads: number of query heads H.

    Returns:
        H positive numbers, in score units (nats) per token of distance.

    Raises:
        ValueError: if num_heads < 1.

    Source: Press, Smith, Lewis 2022, arXiv:2108.12409, section 3 and the authors' `get_slopes`.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, not {num_heads}")
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (num_heads - power), 2)]


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Alibi(ScoreScheme):
    """A bias that falls linearly with the distance, steeper in some heads than in others.

    Equation (section 3): `softmax_j(q_i . k_j / sqrt(D) - m_h (i - j))`.
    Beyond the training length: no limit; made for it.
    Deviations: `trainable=True` is the paper's negative result (its section 3), offered to reproduce it. With a soft
    cap on scores (Gemma 2) the bias is added after the cap, like a mask.
    Source: Press, Smith, Lewis 2022, arXiv:2108.12409.

    Args:
        slopes: H slopes, positive or zero; None means the paper's slopes.
        trainable: every layer gets its slopes as a parameter `slopes` (H,).
    """

    name: ClassVar[str] = "alibi"
    slopes: tuple[float, ...] | None = None
    trainable: bool = False

    def __post_init__(self) -> None:
        self.flags("trainable")
        if self.slopes is None:
            return
        if not isinstance(self.slopes, (tuple, list)) or not all(
            isinstance(m, Real) and not isinstance(m, bool) for m in self.slopes
        ):
            raise TypeError(f"alibi: slopes must be a list of one number per head, not {self.slopes!r}")
        if not all(0 <= m < math.inf for m in self.slopes):
            raise ValueError(f"alibi: slopes must be finite and not negative, not {self.slopes!r}")
        object.__setattr__(self, "slopes", tuple(float(m) for m in self.slopes))

    def check(self, dims: Dims) -> None:
        """Raise ValueError unless there is one slope per head."""
        if self.slopes is not None and len(self.slopes) != dims.num_heads:
            raise ValueError(f"alibi: {len(self.slopes)} slopes were given for {dims.num_heads} heads")

    def build(self, dims: Dims) -> ScoreModule:
        start = alibi_slopes(dims.num_heads) if self.slopes is None else list(self.slopes)
        return LinearBias(start, self.trainable)


class LinearBias(ScoreModule):
    """The scores `q . k - m_h d`, with a parameter `slopes` (H,) if trainable."""

    def __init__(self, start: list[float], trainable: bool) -> None:
        """Store the slopes.

        Args:
            start: H slopes, the start values if they are trained.
            trainable: whether the slopes are a parameter.
        """
        super().__init__()
        self.start = start
        self.slopes = parameter(len(start)) if trainable else None

    def reset_parameters(self) -> None:
        """Start at the slopes `start`."""
        if self.slopes is not None:
            init.copy_(self.slopes, torch.tensor(self.start).to(self.slopes))

    def form(self, like: Tensor) -> Slopes:
        dtype = compute_dtype(like)
        if self.slopes is not None:
            return Slopes(self.slopes.to(dtype))
        return Slopes(torch.tensor(self.start, dtype=dtype, device=like.device))
