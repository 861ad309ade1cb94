"""Transformer-XL: content and position terms with sinusoids of the distance."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..core.dims import Dims
from ..core.dtypes import compute_dtype, geometric_frequencies, waves, wide_dtype
from ..core.forms import LinearVectors, RelativeKeys, Waves
from ..core.modules import Native, ScoreModule, parameter
from ..core.registry import register_scheme
from .base import ScoreScheme, StockForm, init

if TYPE_CHECKING:
    from ..model.base_model import BaseModel

PAPERS = 10000
"""The paper's ratio of the highest frequency to the end of the ladder."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class TransformerXL(ScoreScheme):
    """Content terms, and position terms from a projected sinusoid of the distance.

    Equation (section 3.3): `(q_i . k_j + q_i . W R_d + u . k_j + v . W R_d) / sqrt(D)`, `R_d` the sinusoid of `d`.
    Beyond the training length: no limit; the paper gains from longer attention at test time.
    Deviations: `R_d` has few frequencies; the paper's has size E, so E / 2 of them. With F of them attention costs as
    much as over heads of D + 2F, in any kernel. The paper's segment recurrence is left out, since it is no position
    encoding. `R_d` is `[sin | cos]` as in the authors' code, not interleaved. Each layer has its own `u` and `v`
    (`untie_r` there). With GQA every query head has its own slice of `W`.
    Source: Dai et al. 2019, arXiv:1901.02860.

    Args:
        frequencies: number F of frequencies, `longest^(-t/F)` radians per token for t = 0 .. F - 1; or a list of them.
            The paper has E / 2, and 10,000 as `longest`. More than 128, or 64 in 16 bits, run on a slow engine.
        longest: where the ladder of frequencies ends; None means four times the length in the base's config, at most
            the paper's 10,000. A few frequencies have to be those that tell its distances apart.
    """

    name: ClassVar[str] = "transformer_xl"
    two_sided = True
    frequencies: int | tuple[float, ...] = 16
    longest: int | None = None

    def __post_init__(self) -> None:
        if self.longest is not None:
            self.positive("longest", int)
        if not isinstance(self.frequencies, (tuple, list)):
            self.positive("frequencies", int)
            return
        if self.longest is not None:
            raise ValueError("transformer_xl: longest is not read beside a list of frequencies: leave longest out")
        if not self.frequencies:
            raise ValueError("transformer_xl: frequencies must be positive, and at least one")
        self.number("frequencies", lambda w: 0 < w < math.inf, "positive and finite", listed=True)

    def resolve(self, native: Native, dims: Dims) -> TransformerXL:
        """Return the scheme with the end of its ladder."""
        if self.longest is not None or not isinstance(self.frequencies, int):
            return self
        return replace(self, longest=min(PAPERS, 4 * (native.max_positions or PAPERS)))

    def stock_form(self, base: BaseModel, form: StockForm) -> StockForm:
        """Return the form with waves in the scheme's layers, unrotated but for them."""
        return form.unturned(base.layers_of(self), waves=True)

    def build(self, dims: Dims) -> ScoreModule:
        return RelativeSinusoids(dims, self)

    def frequencies_on(self, device: torch.device) -> Tensor:
        """Return the frequencies (F,) in radians per token, in `wide_dtype`. A ladder is made on the device itself."""
        if isinstance(self.frequencies, int):
            return geometric_frequencies(2 * self.frequencies, float(self.longest or PAPERS), device)
        return torch.tensor(self.frequencies, dtype=wide_dtype(device), device=device)


class RelativeSinusoids(ScoreModule):
    """The module of one layer: `position_projection` (`W`, (H D, 2F)), `content_bias` and `position_bias` (H, D)."""

    def __init__(self, dims: Dims, scheme: TransformerXL) -> None:
        """Make the parameters.

        Args:
            dims: sizes of the attention.
            scheme: has the frequencies.
        """
        super().__init__()
        self.dims = dims
        self.scheme = scheme
        self.position_projection = parameter(
            dims.num_heads * dims.head_dim, 2 * len(scheme.frequencies_on(torch.device("cpu")))
        )
        self.content_bias = parameter(dims.num_heads, dims.head_dim)
        self.position_bias = parameter(dims.num_heads, dims.head_dim)

    def reset_parameters(self) -> None:
        """Start `W` small and the biases at zero."""
        init.normal_(self.position_projection, std=0.02)
        init.zeros_(self.content_bias)
        init.zeros_(self.position_bias)

    def form(self, like: Tensor) -> RelativeKeys:
        """Return `W R_d`, `u` and `v`, see `ScoreModule.form`."""
        dtype, projection = compute_dtype(like), self._projection()

        def frequencies() -> Tensor:  # most layers do not ask: what an earlier one made of them serves all
            return self.scheme.frequencies_on(like.device)

        def rows(distances: Tensor) -> Tensor:
            return waves(distances, frequencies(), dtype) @ projection.to(dtype).mT

        made = Waves(projection, frequencies, (self.scheme.frequencies, self.scheme.longest))
        return RelativeKeys(rows, self.content_bias, self.position_bias, made)

    def linear_vectors(self, distances: Tensor, like: Tensor) -> LinearVectors:
        """Return `W` and `v`; the features of a distance are its sinusoids, see `ScoreModule.linear_vectors`."""
        features = waves(distances, self.scheme.frequencies_on(like.device), like.dtype)
        return LinearVectors(features, self._projection().mT, self.position_bias)

    def _projection(self) -> Tensor:
        """Return `W` by head, (H, D, 2F)."""
        return self.position_projection.view(self.dims.num_heads, self.dims.head_dim, -1)
