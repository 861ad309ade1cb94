"""Sinusoidal: fixed (or trained) waves added to the hidden states."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..core.dims import Dims
from ..core.dtypes import geometric_frequencies, sinusoids, wide_dtype
from ..core.modules import Native, PositionEmbedding, parameter
from ..core.registry import register_scheme
from .base import EmbeddingScheme, init


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(EmbeddingScheme):
    """Sines and cosines of the position, added to the hidden states.

    Equation (section 3.5): `p[t, 2u] = sin(t w_u)`, `p[t, 2u + 1] = cos(t w_u)`, `w_u = base^(-2u/E)`; an odd E ends on
    a sine.
    Beyond the training length: no limit, but models rarely understand positions that they never saw.
    Deviations: the vectors are scaled to the RMS of the table they replace (`scale`), since the embeddings of a
    pretrained model need not have the norm sqrt(E). Chosen and trained frequencies are Su Jianlin's, 2021,
    spaces.ac.cn/archives/8231. A trained number is the logarithm of the ratio of a frequency to its start. So an
    optimizer step changes every wavelength by the same share, no frequency turns negative, and weight decay pulls back
    to the start.
    Source: Vaswani et al. 2017, arXiv:1706.03762.

    Args:
        base: base of the exponential frequencies.
        layout: `interleaved` (sine, cosine, sine, ...: the paper) or `split` (all sines, then all cosines: the authors'
            code).
        frequencies: ceil(E/2) frequencies in radians per token, in place of those of `base`.
        trainable: train the frequencies: `w_u exp(r_u)` with a parameter `log_ratios` (ceil(E/2),) that starts at 0.
        placement: add to the `input`, or before `every_layer`.
        scale: factor of the vectors; `match` gives them the RMS of the position table that they replace, or of the
            token embeddings.
    """

    name: ClassVar[str] = "sinusoidal"
    base: float = 10000.0
    layout: Literal["interleaved", "split"] = "interleaved"
    frequencies: tuple[float, ...] | None = None
    trainable: bool = False
    placement: Literal["input", "every_layer"] = "input"
    scale: Literal["match"] | float = "match"

    def __post_init__(self) -> None:
        self.positive("base")
        self.one_of("layout", ("interleaved", "split"))
        if self.frequencies is not None:
            self.number("frequencies", math.isfinite, "finite, in radians per token", listed=True)
        self.one_of("placement", ("input", "every_layer"))
        self.flags("trainable")
        if isinstance(self.scale, str):
            self.one_of("scale", ("match", "a positive number"))
        else:
            self.positive("scale")

    @property
    def every_layer(self) -> bool:
        return self.placement == "every_layer"

    def resolve(self, native: Native, dims: Dims) -> EmbeddingScheme:
        """Return the scheme with `scale` as a number; ValueError if it cannot be measured or a field has no effect."""
        pairs = (dims.hidden_size + 1) // 2
        if self.frequencies is not None and self.base != 10000.0:
            raise ValueError("sinusoidal: frequencies take the place of base: leave base out")
        if self.frequencies is not None and len(self.frequencies) != pairs:
            raise ValueError(
                f"sinusoidal: vectors of size {dims.hidden_size} have {pairs} frequencies, not {len(self.frequencies)}"
            )
        if self.scale != "match":
            return self
        if native.rms == 0:
            raise ValueError(
                "sinusoidal: scale='match' needs embeddings to measure, but those of this model are on the meta device "
                "or all zero: pass a number, or patch the model after its weights are loaded"
            )
        return replace(self, scale=native.rms * 2**0.5)  # a sinusoid has an RMS of sqrt(1/2)

    def build(self, dims: Dims) -> PositionEmbedding:
        return Waves(self, dims.hidden_size)


class Waves(PositionEmbedding):
    """The module of `sinusoidal`. It has a parameter `log_ratios` (ceil(E/2),) if trainable."""

    def __init__(self, scheme: Sinusoidal, size: int) -> None:
        """Store the hyper-parameters.

        Args:
            scheme: the resolved scheme.
            size: E.
        """
        super().__init__()
        if isinstance(scheme.scale, str):
            raise ValueError("sinusoidal: scale has not been decided")
        self.scheme = scheme
        self.scale = scheme.scale
        self.size = size
        self.log_ratios = parameter((size + 1) // 2) if scheme.trainable else None

    def fixed_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies at the start of training, (ceil(E/2),), float64."""
        if self.scheme.frequencies is not None:
            return torch.tensor(self.scheme.frequencies, dtype=wide_dtype(device), device=device)
        return geometric_frequencies(self.size, self.scheme.base, device)

    def waves(self, device: torch.device) -> Tensor:
        """Return the current frequencies, (ceil(E/2),) in radians per token. Gradients flow to the parameter."""
        fixed = self.fixed_frequencies(device)
        return fixed if self.log_ratios is None else fixed * self.log_ratios.to(fixed.dtype).exp()

    def reset_parameters(self) -> None:
        """Start at the fixed frequencies."""
        if self.log_ratios is not None:
            init.zeros_(self.log_ratios)

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return the vectors (B|1, T, E) of positions (B|1, T), float64 (float32 on MPS)."""
        sines, cosines = sinusoids(position_ids, self.waves(position_ids.device))
        if self.scheme.layout == "interleaved":
            waves = torch.stack([sines, cosines], -1).flatten(-2)
        else:
            waves = torch.cat([sines, cosines], -1)
        return waves[..., : self.size] * self.scale
