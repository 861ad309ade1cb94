"""Shaw et al.: learned vectors for clipped distances, in keys and values."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..forms import ClippedVectors
from ..registry import register_scheme
from .base import Dims, PositionModule, ScoreModule, ScoreScheme, init, parameter


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Shaw(ScoreScheme):
    """Learned vectors for clipped distances, added to keys and to values.

    Equations (4) and (3), causal: `e_ij = q_i . (k_j + aK_c) / sqrt(D)`, `z_i = sum_j p_ij (v_j + aV_c)`, `c = min(d,
    max_distance)`.
    Beyond the training length: no limit; all keys farther than `max_distance` look alike.
    Deviations: a causal model only ever sees `d >= 0`, so only `max_distance + 1` of the paper's `2k + 1` labels exist.
    Source: Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155.

    Args:
        max_distance: largest distance with a vector of its own, the paper's `k`.
        share_heads: one table for all heads (the paper), or one per head.
        share_layers: one pair of tables for the whole model, or one per layer.
        values: also add vectors to the values (the paper finds that keys matter more).
    """

    name: ClassVar[str] = "shaw"
    max_distance: int = 32
    share_heads: bool = True
    share_layers: bool = False
    values: bool = True

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        self.positive("max_distance", int)
        self.flags("share_heads", "share_layers", "values")

    def build(self, dims: Dims) -> ScoreModule:
        """Return the module of one attention layer."""
        heads = () if self.share_heads else (dims.num_heads,)
        return ClippedDistanceVectors((*heads, self.max_distance + 1, dims.head_dim), self.values)

    def build_shared(self, dims: Dims) -> PositionModule | None:
        """Return the one module of the whole model if the layers share it."""
        return self.build(dims) if self.share_layers else None


class ClippedDistanceVectors(ScoreModule):
    """Parameters `key_embeddings`, `value_embeddings`: (max_distance + 1, D) or (H, max_distance + 1, D)."""

    def __init__(self, shape: tuple[int, ...], values: bool) -> None:
        """Make the tables.

        Args:
            shape: of a table.
            values: whether there is one for the values.
        """
        super().__init__()
        self.key_embeddings = parameter(*shape)
        self.value_embeddings = parameter(*shape) if values else None

    def reset_parameters(self) -> None:
        """Start small, as transformers starts embeddings."""
        init.normal_(self.key_embeddings, std=0.02)
        if self.value_embeddings is not None:
            init.normal_(self.value_embeddings, std=0.02)

    def form(self, like: Tensor) -> ClippedVectors:
        """Return the tables, see `ScoreModule.form`."""
        return ClippedVectors(self.key_embeddings, self.value_embeddings)
