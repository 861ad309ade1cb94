"""Softpick: a softmax that can leave a query without any key."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import QueryModule, parameter
from ..core.registry import register_scheme
from .base import WeightScheme, init

SMALLEST = 1e-6
"""Least sum that weights are divided by, relative to the largest exponential."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Softpick(WeightScheme):
    """A softmax that gives weak keys no weight, beside a layer's positions. It starts as the softmax.

    Equation: `w_ij = max(0, exp(s_ij) - a_h) / sum_t |exp(s_it) - a_h|`, over the keys that a query sees. With `a = 1`
    this is softpick: keys with a score below 0 get no weight, but count in the sum, so a query may take next to
    nothing. With `a = 0`, the default, it is the softmax.
    Beyond the training length: no limit; it does not depend on positions.
    Deviations: the paper has `a = 1` from the start, which a trained model does not survive. Here `a` is trained, one
    number per head. The sum is at least 1e-6 of the largest exponential, where the paper adds 1e-8. Attention sinks of
    the base, which are scores without a value, count as keys.
    Source: Zuhri, Fuadi, Aji 2025, arXiv:2504.20966.

    Args:
        offset: start of `a`; 0 is the softmax, and 1 the paper's softpick.
    """

    name: ClassVar[str] = "softpick"
    offset: float = 0.0

    def __post_init__(self) -> None:
        self.number("offset", lambda offset: 0 <= offset < math.inf, "finite and not negative")

    def build(self, dims: Dims) -> QueryModule:
        return Offsets(dims.num_heads, self.offset)


class Offsets(QueryModule):
    """The module of `softpick`, with the parameter `offset` (H,), the `a`."""

    def __init__(self, num_heads: int, start: float) -> None:
        """Make the offsets.

        Args:
            num_heads: H.
            start: start of `offset`.
        """
        super().__init__()
        self.start = start
        self.offset = parameter(num_heads)

    def reset_parameters(self) -> None:
        """Start at the offset of the scheme."""
        init.constant_(self.offset, self.start)

    def forward(self, call: Call) -> Call:
        return replace(call, normaliser=partial(softpick, offset=self.offset))


def softpick(scores: Tensor, offset: Tensor) -> Tensor:
    """Return the weights of masked scores (B, H, Q, L), see `Softpick`.

    Args:
        scores: float32 or float64.
        offset: (H,) or (1,).
    """
    seen, offset = scores > torch.finfo(scores.dtype).min / 2, offset.to(scores.dtype)[:, None, None]
    # The exponentials are divided by the largest of them, which cancels. A row that sees no key has none.
    most = torch.maximum(scores.amax(-1, keepdim=True), offset.abs().log()).detach().clamp(min=-80)
    above = ((scores - most).exp() - offset * (-most).exp()).masked_fill(~seen, 0)
    return above.relu() / above.abs().sum(-1, keepdim=True).clamp(min=SMALLEST)
