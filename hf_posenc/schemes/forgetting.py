"""Forgetting Transformer: every token decides by a gate how much of what came before stays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import TokenModule
from ..core.registry import register_scheme
from .base import HiddenNumbers, TokenScheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Forgetting(TokenScheme):
    """Forget gates, as in the Forgetting Transformer (FoX). They act beside the positions that a layer has.

    Equation: the token at `t`, whose hidden state `x_t` enters the attention, has a gate for each head,
    `f_t = sigmoid(w . x_t + b)`. The score of query `i` and key `j` gets the bias
    `D_ij = log f_(j+1) + ... + log f_i`, which is 0 for the token itself. `w` and `b` are trained.

    Beyond the training length: no limit; gates depend on tokens and not on positions.
    Deviations: `w` starts at 0 and `b` at `bias`, so that a trained model changes little at first. At the start `D_ij`
    is `-log(1 + exp(-bias))` for each token of distance. With 5 that is -0.0067, so a score changes by -0.067 at a
    distance of 10 tokens and by -3.4 at 512. Tokens that a query cannot see, such as padding, have no gate for it. The
    paper's gates of outputs and its norms are not part of the scheme.
    Source: Lin et al. 2025, arXiv:2503.02130.

    Args:
        bias: start of `b` in every head. A gate starts at `sigmoid(bias)`.
    """

    name: ClassVar[str] = "forgetting"
    bias: float = 5.0

    def __post_init__(self) -> None:
        self.number("bias", math.isfinite, "finite")

    def build(self, dims: Dims) -> TokenModule:
        return ForgetGates(dims, self.bias)


class ForgetGates(TokenModule):
    """The module of `forgetting`. Its child `tokens` has the parameters."""

    def __init__(self, dims: Dims, bias: float) -> None:
        """Make the gates of one layer.

        Args:
            dims: sizes of the layer's attention.
            bias: start of the parameter `bias`.
        """
        super().__init__()
        self.tokens: nn.Module = LogGates(dims, bias=bias)

    def forward(self, call: Call) -> Call:
        return replace(call, log_gates=call.numbers)


class LogGates(HiddenNumbers):
    """Maps hidden states to logarithms of gates, by the parameters `weight` (H, E) and `bias` (H,)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return logarithms of gates (B, H, T) of hidden states (B, T, E), in float32, or float64 beside float64."""
        return F.logsigmoid(super().forward(hidden_states)[..., 0])
