"""Transformer-XL: content and position terms with sinusoids of the distance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..dims import Dims
from ..dtypes import compute_dtype
from ..forms import LinearVectors, RelativeKeys
from ..modules import PositionModule, Reference, ScoreModule, parameter
from ..registry import register_scheme
from ..sinusoids import geometric_frequencies, sinusoids
from ..table_cache import KeptTable
from .base import ScoreScheme, init

AT_ONCE = 1024
"""Number of distances whose sinusoids are computed at once."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class TransformerXL(ScoreScheme):
    """Content terms, and position terms from a projected sinusoid of the distance.

    Equation (section 3.3): `(q_i . k_j + q_i . W R_d + u . k_j + v . W R_d) / sqrt(D)`, `R_d` the sinusoid of `d`, size
    E.
    Beyond the training length: no limit; the paper gains from longer attention at test time.
    Deviations: none in attention. The paper's segment recurrence is left out, since it is no position encoding. `R_d`
    is `[sin | cos]` as in the authors' code, not interleaved. With GQA every query head has its own slice of `W`.
    Source: Dai et al. 2019, arXiv:1901.02860.

    Args:
        share_biases: one `u` and one `v` for all layers (the authors' code without `untie_r`), or a pair per layer.
    """

    name: ClassVar[str] = "transformer_xl"
    share_biases: bool = False

    def __post_init__(self) -> None:
        self.flags("share_biases")

    def build(self, dims: Dims) -> ScoreModule:
        return RelativeSinusoids(dims, own_biases=not self.share_biases)

    def build_shared(self, dims: Dims) -> PositionModule | None:
        return SharedBiases(dims) if self.share_biases else None

    def attach_shared(self, module: ScoreModule, shared: Reference) -> nn.Module:
        """Let the module read the shared biases."""
        module.shared_biases = shared  # type: ignore[assignment]  # not a module
        return module


class SharedBiases(PositionModule):
    """The biases that all layers share: parameters `content_bias` (`u`) and `position_bias` (`v`), both (H, D)."""

    def __init__(self, dims: Dims) -> None:
        """Make the parameters.

        Args:
            dims: sizes of the attention.
        """
        super().__init__()
        self.content_bias = parameter(dims.num_heads, dims.head_dim)
        self.position_bias = parameter(dims.num_heads, dims.head_dim)

    def reset_parameters(self) -> None:
        """Start at zero, so that `q . W R_d` is the only new term of the scores."""
        init.zeros_(self.content_bias)
        init.zeros_(self.position_bias)

    def forward(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of `u` and `v`, both (H, D), in the dtype and on the device of `like`.

        A sharding hook may free the parameters themselves as soon as this returns.
        """
        return self.content_bias.to(like, copy=True), self.position_bias.to(like, copy=True)


class RelativeSinusoids(ScoreModule):
    """The module of one layer, with the parameter `position_projection` (`W`, (H D, E)).

    Unless the biases are shared, it also has `content_bias` (`u`) and `position_bias` (`v`), both (H, D).
    """

    shared_biases: Reference

    def __init__(self, dims: Dims, own_biases: bool) -> None:
        """Make the parameters.

        Args:
            dims: sizes of the attention.
            own_biases: whether this layer has its own `u` and `v`.
        """
        super().__init__()
        self.dims = dims
        self.kept = KeptTable()
        self.position_projection = parameter(dims.num_heads * dims.head_dim, dims.hidden_size)
        self.content_bias = parameter(dims.num_heads, dims.head_dim) if own_biases else None
        self.position_bias = parameter(dims.num_heads, dims.head_dim) if own_biases else None

    def reset_parameters(self) -> None:
        """Start `W` small and the biases at zero."""
        init.normal_(self.position_projection, std=0.02)
        if self.content_bias is not None and self.position_bias is not None:
            init.zeros_(self.content_bias)
            init.zeros_(self.position_bias)

    def form(self, like: Tensor) -> RelativeKeys:
        """Return `W R_d`, `u` and `v`, see `ScoreModule.form`."""
        wide = like.new_empty(0, dtype=compute_dtype(like))

        def table(count: int) -> Tensor:
            self.kept.drop()
            return self.projected_sinusoids(count, wide)

        def rows(distances: Tensor) -> Tensor:
            return self._by_head(self._projected(distances, wide))

        return RelativeKeys(table, *self.biases(wide), self.kept_sinusoids, rows)

    def linear_vectors(self, distances: Tensor, like: Tensor) -> LinearVectors:
        """Return `W` and `v`; the features of a distance are its sinusoids, see `ScoreModule.linear_vectors`."""
        weight = self.position_projection.view(self.dims.num_heads, self.dims.head_dim, -1)
        bias = self.biases(like)[1] if self.position_bias is None else self.position_bias
        return LinearVectors(self._sinusoids(distances, like), weight.mT, bias)

    def kept_sinusoids(self, count: int, like: Tensor) -> Tensor:
        """Return the cached `W R_d` of distances 0 .. count-1, (H, count, D), in the dtype of `like`, no gradients."""
        wide = like.new_empty(0, dtype=compute_dtype(like))
        weight = self.position_projection.detach()
        return self.kept.read(count, like, weight, lambda length: self.projected_sinusoids(length, wide))

    def biases(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return `u` and `v`, both (H, D), in the dtype of `like`."""
        if self.content_bias is None or self.position_bias is None:
            return self.shared_biases()(like)
        return self.content_bias.to(like), self.position_bias.to(like)

    def projected_sinusoids(self, count: int, like: Tensor) -> Tensor:
        """Return `W R_d` for distances 0 .. count-1, (H, count, D), in the dtype of `like`."""
        weight = self.position_projection

        def part(first: int, last: int) -> Tensor:
            return self._projected(torch.arange(first, last, device=like.device), like)

        # Part by part, because sinusoids in float64 take several times the memory of the result.
        if torch.compiler.is_compiling():  # a loop would fix the number of parts in the graph
            projected = part(0, count)
        elif torch.is_grad_enabled() and weight.requires_grad:
            projected = torch.cat([part(i, min(i + AT_ONCE, count)) for i in range(0, count, AT_ONCE)])
        else:
            projected = like.new_empty(count, weight.shape[0])
            for i in range(0, count, AT_ONCE):
                projected[i : i + AT_ONCE] = part(i, min(i + AT_ONCE, count))
        return self._by_head(projected)

    def _projected(self, distances: Tensor, like: Tensor) -> Tensor:
        """Return `W R_d` of distances (N,), as (N, H D) in the dtype of `like`."""
        return self._sinusoids(distances, like) @ self.position_projection.to(like.dtype).T

    def _sinusoids(self, distances: Tensor, like: Tensor) -> Tensor:
        """Return `R_d` of distances (N,), as (N, E) in the dtype of `like`."""
        size = self.dims.hidden_size
        frequencies = geometric_frequencies(size, 10000.0, like.device)
        sines, cosines = sinusoids(distances, frequencies)
        return torch.cat([sines, cosines], -1)[:, :size].to(like.dtype)

    def _by_head(self, projected: Tensor) -> Tensor:
        """Return (N, H D) as (H, N, D)."""
        return projected.view(-1, self.dims.num_heads, self.dims.head_dim).transpose(0, 1)
