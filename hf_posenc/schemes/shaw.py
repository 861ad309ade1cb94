"""Shaw et al.: learned vectors for clipped distances, in keys and values."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ..core.dims import Dims
from ..core.forms import ClippedVectors, LinearVectors
from ..core.modules import ScoreModule, parameter
from ..core.registry import register_scheme
from .base import ScoreScheme, init


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Shaw(ScoreScheme):
    """Learned vectors for clipped distances, added to keys and to values.

    Equations (4) and (3), causal: `e_ij = q_i . (k_j + aK_c) / sqrt(D)`, `z_i = sum_j p_ij (v_j + aV_c)`, `c = min(d,
    max_distance)`.
    Beyond the training length: no limit; all keys farther than `max_distance` look alike.
    Deviations: a causal model has only `d >= 0`, so only `max_distance + 1` of the paper's `2k + 1` labels exist.
    Source: Shaw, Uszkoreit, Vaswani 2018, arXiv:1803.02155.

    Args:
        max_distance: clipping distance, the paper's `k`. All keys at this distance or further share a vector. With 0
            all keys share one vector, and only the causal mask gives order.
        share_heads: one table for all heads (section 3.3), or one per head (the base model of section 4.1).
        share_layers: one pair of tables for the whole model, or one per layer.
        values: also add vectors to the values (the paper finds that keys matter more).
    """

    name: ClassVar[str] = "shaw"
    max_distance: int = 32
    share_heads: bool = True
    share_layers: bool = False
    values: bool = True

    def __post_init__(self) -> None:
        self.number("max_distance", lambda value: value >= 0, "0 or more", int)
        self.flags("share_heads", "share_layers", "values")

    def build(self, dims: Dims) -> ScoreModule:
        heads = () if self.share_heads else (dims.num_heads,)
        rows = (*heads, self.max_distance + 1)
        values = dims.value_dim or dims.head_dim
        return ClippedDistanceVectors((*rows, dims.head_dim), (*rows, values) if self.values else None)


class ClippedDistanceVectors(ScoreModule):
    """The module of `shaw`, with the parameters `key_embeddings` and `value_embeddings`.

    Their shape is (max_distance + 1, D), or (H, max_distance + 1, D) unless heads share. In latent attention (MLA) the
    vectors for values have the size of values instead of D.
    """

    def __init__(self, keys: tuple[int, ...], values: tuple[int, ...] | None) -> None:
        """Make the tables.

        Args:
            keys: shape of the table for keys.
            values: shape of the table for values, or None.
        """
        super().__init__()
        self.key_embeddings = parameter(*keys)
        self.value_embeddings = None if values is None else parameter(*values)

    def reset_parameters(self) -> None:
        """Start small, as transformers starts embeddings."""
        init.normal_(self.key_embeddings, std=0.02)
        if self.value_embeddings is not None:
            init.normal_(self.value_embeddings, std=0.02)

    def form(self, like: Tensor) -> ClippedVectors:
        return ClippedVectors(self.key_embeddings, self.value_embeddings)

    def linear_vectors(self, distances: Tensor, like: Tensor) -> LinearVectors:
        """Return the table of keys: a distance chooses one of its rows, see `ScoreModule.linear_vectors`."""
        rows, size = self.key_embeddings.shape[-2:]
        features = F.one_hot(distances.clamp(max=rows - 1), rows).to(like)
        return LinearVectors(features, self.key_embeddings.view(-1, rows, size))
