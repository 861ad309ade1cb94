"""Sinusoidal: fixed (or trained) waves added to the hidden states."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..registry import register_scheme
from .base import (
    Dims,
    EmbeddingScheme,
    Native,
    PositionEmbedding,
    geometric_frequencies,
    init,
    parameter,
    sinusoids,
    wide_dtype,
)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(EmbeddingScheme):
    """Sines and cosines of the position, added to the hidden states.

    Equation (section 3.5): `p[t, 2u] = sin(t w_u)`, `p[t, 2u + 1] = cos(t w_u)`, `w_u = base^(-2u/E)`; an odd E ends on
    a sine.
    Beyond the training length: no limit, but models rarely understand positions that they never saw.
    Deviations: the table is scaled to the size of what it replaces (`scale`), since a pretrained model's embeddings
    have no reason to be of size sqrt(E). Power-law frequencies `w_u = (2u/E)^alpha` and trained ones (they start at the
    fixed ones) are Su Jianlin's, 2021, spaces.ac.cn/archives/8231.
    Source: Vaswani et al. 2017, arXiv:1706.03762.

    Args:
        base: of the exponential frequencies.
        layout: `interleaved` (sine, cosine, sine, ...: the paper) or `split` (all sines, then all cosines: the authors'
            code).
        frequencies: `exponential` (the paper) or `power`.
        alpha: exponent of the power law.
        trainable: make the frequencies a parameter, `frequencies` (ceil(E/2),).
        placement: add to the `input`, or before `every_layer`.
        scale: factor of the table; `match` gives it the RMS of the position table it replaces, or of the token
            embeddings.
    """

    name: ClassVar[str] = "sinusoidal"
    base: float = 10000.0
    layout: Literal["interleaved", "split"] = "interleaved"
    frequencies: Literal["exponential", "power"] = "exponential"
    alpha: float = 2.0
    trainable: bool = False
    placement: Literal["input", "every_layer"] = "input"
    scale: Literal["match"] | float = "match"

    def __post_init__(self) -> None:
        """Check the hyper-parameters."""
        self.positive("base")
        self.positive("alpha")
        self.one_of("layout", ("interleaved", "split"))
        self.one_of("frequencies", ("exponential", "power"))
        self.one_of("placement", ("input", "every_layer"))
        self.flags("trainable")
        if isinstance(self.scale, str):
            self.one_of("scale", ("match", "a positive number"))
        else:
            self.positive("scale")

    @property
    def every_layer(self) -> bool:
        """Whether the waves are added before each layer, or once at the input."""
        return self.placement == "every_layer"

    def resolve(self, native: Native, dims: Dims) -> EmbeddingScheme:
        """Return the scheme with `scale` a number; ValueError if it cannot be, or if a hyper-parameter is not read."""
        unread = ("alpha", 2.0) if self.frequencies == "exponential" else ("base", 10000.0)
        if getattr(self, unread[0]) != unread[1]:
            raise ValueError(f"sinusoidal: {unread[0]} is not read by frequencies={self.frequencies!r}: leave it out")
        if self.scale != "match":
            return self
        rms = native.token_rms
        if native.table is not None:
            rms = 0.0 if native.table.is_meta else native.table.double().square().mean().sqrt().item()
        if rms == 0:
            raise ValueError(
                "sinusoidal: scale='match' needs embeddings to measure, but those of this model are on the meta device "
                "or all zero: pass a number, or patch the model after its weights are loaded"
            )
        return replace(self, scale=rms * 2**0.5)  # a sinusoid has an RMS of sqrt(1/2)

    def build(self, dims: Dims) -> PositionEmbedding:
        """Return the module that makes the vectors; `scale` must be a number."""
        return Waves(self, dims.hidden_size)


class Waves(PositionEmbedding):
    """Parameter `frequencies` (ceil(E/2),) if trainable."""

    def __init__(self, scheme: Sinusoidal, size: int) -> None:
        """Keep the hyper-parameters.

        Args:
            scheme: with a numeric scale.
            size: E.
        """
        super().__init__()
        if isinstance(scheme.scale, str):
            raise ValueError("sinusoidal: scale has not been decided")
        self.scheme = scheme
        self.scale = scheme.scale
        self.size = size
        self.frequencies = parameter((size + 1) // 2) if scheme.trainable else None

    def fixed_frequencies(self, device: torch.device) -> Tensor:
        """Return `w_u`, (ceil(E/2),), float64."""
        if self.scheme.frequencies == "exponential":
            return geometric_frequencies(self.size, self.scheme.base, device)
        return (torch.arange(0, self.size, 2, dtype=wide_dtype(device), device=device) / self.size) ** self.scheme.alpha

    def reset_parameters(self) -> None:
        """Start at the fixed frequencies."""
        if self.frequencies is not None and not self.frequencies.is_meta:
            init.copy_(self.frequencies, self.fixed_frequencies(self.frequencies.device).to(self.frequencies.dtype))

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return the vectors (B|1, T, E) of positions (B|1, T), float64 (float32 on MPS)."""
        frequencies = self.fixed_frequencies(position_ids.device) if self.frequencies is None else self.frequencies
        sines, cosines = sinusoids(position_ids, frequencies)
        if self.scheme.layout == "interleaved":
            waves = torch.stack([sines, cosines], -1).flatten(-2)
        else:
            waves = torch.cat([sines, cosines], -1)
        return waves[..., : self.size] * self.scale
