"""Gated attention: what a head returns is multiplied by a gate, which the query's hidden state decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import TokenModule
from ..core.registry import register_scheme
from .base import HiddenNumbers, TokenScheme

HEAD, ELEMENT = "head", "element"

OVER = (ELEMENT, HEAD)
"""Values of `over`."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Gated(TokenScheme):
    """Outputs of heads times gates that hidden states decide, beside a layer's positions. The gates start at 1.

    Equation: `o_i -> 2 sigmoid(W x_i) o_i`, where `x_i` is the hidden state that enters the attention, and `o_i` what a
    head returns. `W` makes a gate for each dimension of each head, or for each head.
    Neutral start: `W` starts at 0, so every gate is exactly 1.
    Beyond the training length: no limit; gates depend on tokens and not on positions.
    Deviations: the factor 2, for the neutral start; the projection behind the heads can take it up. Any engine, and any
    kernel of transformers, computes the attention.
    Source: Qiu et al. 2025, arXiv:2505.06708, gates after the attention (G1), as in Qwen3-Next.

    Args:
        over: `element` or `head`: what has a gate of its own, each dimension of each head, or each head.
    """

    name: ClassVar[str] = "gated"
    place = "on the outputs of heads"
    uses_tokens = False
    uses_queries = True
    over: str = ELEMENT

    def __post_init__(self) -> None:
        self.one_of("over", OVER)

    def build(self, dims: Dims) -> TokenModule:
        return OutputGates(dims, 1 if self.over == HEAD else dims.value_dim or dims.head_dim)


class OutputGates(TokenModule):
    """The module of `gated`. Its child `queries` has the parameter `weight` (H V, E), or (H, E)."""

    def __init__(self, dims: Dims, width: int) -> None:
        """Make the gates of one layer.

        Args:
            dims: sizes of the layer's attention.
            width: number of gates of a head.
        """
        super().__init__()
        self.queries = HiddenNumbers(dims, width)

    def forward(self, call: Call) -> Call:
        assert call.query_numbers is not None
        gates = 2 * call.query_numbers.sigmoid().transpose(1, 2)

        def gated(output: Tensor) -> Tensor:
            return (output * gates).to(output.dtype)

        return replace(call, output_changes=(*call.output_changes, gated))
