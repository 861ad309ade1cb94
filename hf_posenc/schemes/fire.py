"""FIRE: a bias that a small network makes of the distance, divided by the position of the query."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.attention_call import Call
from ..core.dims import Dims
from ..core.modules import ScoreModule, parameter
from ..core.registry import register_scheme
from .base import ScoreScheme, init


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Fire(ScoreScheme):
    """A bias that a small network makes of the distance divided by the position of the query.

    Equation (5): `softmax_j(q_i . k_j / sqrt(D) + f_h(psi(i - j) / psi(max(L, i))))` with `psi(x) = ln(|c x| + 1)` and
    a network `f` with one hidden layer of ReLUs and one output for each head. `c` and the threshold `L` are trained.
    Beyond the training length: no limit; the network only sees ratios between 0 and 1.
    Deviations: none in the formula. The output of `f` has no offset, because a number that is the same for all keys
    cancels in the softmax. As in the authors' code, what is trained is `L` divided by its start. With a soft cap on
    scores (Gemma 2) the bias is added after the cap, like a mask.
    Source: Li, You, Guruganesh et al. 2024, arXiv:2310.04418, and the listing in its appendix.

    Args:
        hidden_size: number of ReLUs of the network.
        threshold: `L` at the start, in tokens.
        share_layers: one network for all layers (the paper's FIRE-S), or one per layer.
    """

    name: ClassVar[str] = "fire"
    hidden_size: int = 32
    threshold: float = 512.0
    share_layers: bool = False

    def __post_init__(self) -> None:
        self.positive("hidden_size", int)
        self.positive("threshold")
        self.flags("share_layers")

    def build(self, dims: Dims) -> ScoreModule:
        return RelativeBias(dims.num_heads, self.hidden_size, self.threshold)


class RelativeBias(ScoreModule):
    """The module of `fire`: `input_weight` and `input_bias` (W,), `output_weight` (H, W), `rate` and `reach` (1,)."""

    real = True

    def __init__(self, num_heads: int, hidden_size: int, threshold: float) -> None:
        """Make the parameters.

        Args:
            num_heads: H.
            hidden_size: W, the number of ReLUs.
            threshold: the position that `reach` multiplies.
        """
        super().__init__()
        self.threshold = threshold
        self.input_weight = parameter(hidden_size)
        self.input_bias = parameter(hidden_size)
        self.output_weight = parameter(num_heads, hidden_size)
        self.rate = parameter(1)
        self.reach = parameter(1)

    def reset_parameters(self) -> None:
        """Start as the authors' listing does: torch's linear layers, `c` at 0.1."""
        bound = len(self.input_weight) ** -0.5
        init.uniform_(self.input_weight, -1.0, 1.0)
        init.uniform_(self.input_bias, -1.0, 1.0)
        init.uniform_(self.output_weight, -bound, bound)
        init.constant_(self.rate, 0.1)
        init.ones_(self.reach)

    def scores(self, call: Call) -> Tensor:
        like = call.query
        rate, threshold = self.rate.to(like), (self.reach.to(like) * self.threshold).abs()
        position = call.query_position().to(like).maximum(threshold)
        ratio = (rate * call.distance()).abs().log1p() / (rate * position).abs().log1p()
        hidden = (ratio[:, 0, :, :, None] * self.input_weight.to(like) + self.input_bias.to(like)).relu()
        return call.products() + (hidden @ self.output_weight.to(like).mT).permute(0, 3, 1, 2)
