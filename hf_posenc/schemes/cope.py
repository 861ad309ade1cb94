"""CoPE: the position of a key is the number of tokens from the key to the query that the query counts."""

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
class CoPE(ScoreScheme):
    """Positions counted by content: gates of each query say which tokens count; each count has a vector.

    Equations (3) to (6): gates `g_ij = sigmoid(q_i . k_j / sqrt(D))`, positions `p_ij = sum_(t=j..i) g_it`, at most
    `num_positions - 1`, and `softmax_j((q_i . k_j + q_i . e[p_ij]) / sqrt(D))`. Between integers `q_i . e[p]` is
    interpolated linearly.
    Beyond the training length: no limit; a query that counts few tokens reaches far, and all keys from
    `num_positions - 1` counted tokens on look alike.
    Deviations: the equations leave out the division by `sqrt(D)`. The authors' code divides both terms and the logits
    of the gates, and so does this class. The listing in the paper does not divide `q_i . e[p_ij]`, which is the same
    with `e` times `sqrt(D)`. Only visible keys are counted: no padding, no other documents, nothing beyond a sliding
    window. Only the order of positions matters: gaps between them are not counted. `e` starts at 0, which is attention
    without positions. All heads share `e`, as in the authors' code. A soft cap on scores (Gemma 2) caps the sum of both
    terms, but not the logits of the gates, which the sigmoid bounds. Separate keys or values for the gates (section 4)
    are not offered.
    Source: Golovneva, Wang, Weston, Sukhbaatar 2024, arXiv:2405.18719, and the authors' code.

    Args:
        num_positions: number of vectors, for the positions 0, 1, ...; the paper's `p_max` plus one. At least 2.
        share_layers: one table for all layers, or one per layer.
    """

    name: ClassVar[str] = "cope"
    num_positions: int = 64
    share_layers: bool = False

    def __post_init__(self) -> None:
        self.positive("num_positions", int)
        self.flags("share_layers")
        if self.num_positions < 2:
            raise ValueError("cope: num_positions must be at least 2: with 1 all keys have the same position")

    def build(self, dims: Dims) -> ScoreModule:
        return ContextualPositions(self.num_positions, dims.head_dim)


class ContextualPositions(ScoreModule):
    """The module of `cope`, with the parameter `position_embeddings` (`e`, (num_positions, D))."""

    def __init__(self, num_positions: int, head_dim: int) -> None:
        """Make the table.

        Args:
            num_positions: rows of the table.
            head_dim: D.
        """
        super().__init__()
        self.position_embeddings = parameter(num_positions, head_dim)

    def reset_parameters(self) -> None:
        """Start without positions."""
        init.zeros_(self.position_embeddings)

    def scores(self, call: Call) -> Tensor:
        content = call.query @ call.key.mT * call.scaling
        by_position = call.query @ self.position_embeddings.to(call.query.dtype).mT * call.scaling
        position = self.positions(call, content).clamp(max=by_position.shape[-1] - 1)
        below = position.detach().floor()
        low = by_position.gather(-1, below.long())
        high = by_position.gather(-1, position.detach().ceil().long())
        return call.cap(content + low.lerp(high, position - below))

    @staticmethod
    def positions(call: Call, content: Tensor) -> Tensor:
        """Return how many tokens a query counts from a key to itself, for each pair, (B, H, Q, L).

        Args:
            call: the call, in float32 or float64.
            content: logits of the gates, (B, H, Q, L).
        """
        gates = content.sigmoid().masked_fill(~call.visible(), 0.0)
        # All queries see the keys in the same order. Tokens at equal positions are ordered by their slots.
        near_first = call.positions.distance()[:, :, :1].argsort(dim=-1, descending=True, stable=True).flip(-1)
        back = near_first.argsort(-1).expand(gates.shape)
        return gates.gather(-1, near_first.expand(gates.shape)).cumsum(-1).gather(-1, back)
