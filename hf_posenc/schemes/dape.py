"""DAPE: scores as a picture of many channels, to which a small network adds what it makes of neighbouring keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import QueryModule, parameter
from ..core.registry import register_scheme
from .base import WeightScheme, init


@register_scheme
@dataclass(frozen=True, kw_only=True)
class DAPE(WeightScheme):
    """Scores plus what a small network makes of all heads' scores of neighbouring keys. It starts with 0 added.

    Equation: `S -> S + f(S)`, where `S` are the scores of a query with everything that positions do to them, a channel
    per head. `f` is two convolutions over the keys, of `width` keys each, with a leaky ReLU between them. With
    `width=1` it mixes heads only, as in the first DAPE.
    Neutral start: the second convolution starts at 0.
    Beyond the training length: no limit; made for it.
    Deviations: `f` reads the sum of content and bias, and not both one by one, so that it acts beside every scheme. The
    authors hide later keys from the first convolution, and here from the second one too: without it a score would
    depend on how many queries come at once. Neighbours are those among the keys that a query sees; beyond the first and
    last of them is 0. The second convolution has no bias, which the softmax ignores.
    Source: Zheng et al. 2024, arXiv:2410.04798 (DAPE V2), and the authors' code; arXiv:2405.14722 (DAPE).

    Args:
        hidden_size: number of channels between the convolutions.
        width: number of neighbouring keys, odd.
    """

    name: ClassVar[str] = "dape"
    hidden_size: int = 32
    width: int = 3

    def __post_init__(self) -> None:
        self.positive("hidden_size", int)
        self.positive("width", int)
        if self.width % 2 == 0:
            raise ValueError(f"dape: width must be odd, not {self.width}")

    def build(self, dims: Dims) -> QueryModule:
        return ScoreNetwork(dims.num_heads, self.hidden_size, self.width)


class ScoreNetwork(QueryModule):
    """The module of `dape`: `first_weight` (C, H, width), `first_bias` (C,) and `second_weight` (H, C, width)."""

    def __init__(self, num_heads: int, hidden_size: int, width: int) -> None:
        """Make the parameters.

        Args:
            num_heads: H.
            hidden_size: C.
            width: number of neighbouring keys.
        """
        super().__init__()
        self.first_weight, self.first_bias = parameter(hidden_size, num_heads, width), parameter(hidden_size)
        self.second_weight = parameter(num_heads, hidden_size, width)

    def reset_parameters(self) -> None:
        """Start as torch's convolutions, and with 0 in the second one."""
        bound = self.first_weight[0].numel() ** -0.5
        for each in (self.first_weight, self.first_bias):
            init.uniform_(each, -bound, bound)
        init.zeros_(self.second_weight)

    def forward(self, call: Call) -> Call:
        first, bias, second = self.first_weight, self.first_bias, self.second_weight

        def change(call: Call, scores: Tensor) -> Tensor:
            seen = scores > torch.finfo(scores.dtype).min / 2
            hidden = (~seen).all(1, keepdim=True)
            order = hidden.to(torch.uint8).argsort(dim=-1, stable=True)  # the keys that the query sees come first
            near = scores.masked_fill(~seen, 0).gather(-1, order.expand(scores.shape))
            made = F.leaky_relu(convolved(near, first) + bias.to(near.dtype)[:, None, None])
            made = convolved(made.masked_fill(hidden.gather(-1, order), 0), second)
            return scores + made.gather(-1, order.argsort(-1).expand(scores.shape))

        return replace(call, score_changes=(*call.score_changes, change))


def convolved(channels: Tensor, weight: Tensor) -> Tensor:
    """Return a convolution over the keys, (B, O, Q, L), of channels (B, C, Q, L), by a weight (O, C, width)."""
    return F.conv2d(channels, weight.to(channels.dtype)[:, :, None], padding=(0, weight.shape[-1] // 2))
