"""Sinusoidal: fixed (or trained) waves added to the hidden states."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..dims import Dims
from ..dtypes import wide_dtype
from ..modules import Native, PositionEmbedding, parameter
from ..registry import register_scheme
from ..sinusoids import geometric_frequencies, sinusoids
from .base import EmbeddingScheme, init


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(EmbeddingScheme):
    """Sines and cosines of the position, added to the hidden states.

    Equation (section 3.5): `p[t, 2u] = sin(t w_u)`, `p[t, 2u + 1] = cos(t w_u)`, `w_u = base^(-2u/E)`; an odd E ends on
    a sine.
    Beyond the training length: no limit, but models rarely understand positions that they never saw.
    Deviations: the vectors are scaled to the RMS of the table they replace (`scale`), since the embeddings of a
    pretrained model need not have the norm sqrt(E). Power-law frequencies `w_u = (2u/E)^alpha`, chosen ones and trained
    ones are Su Jianlin's, 2021, spaces.ac.cn/archives/8231. A trained number is the logarithm of the ratio of a
    frequency to its start. So an optimizer step changes every wavelength by the same share, no frequency turns
    negative, and weight decay pulls back to the start. Trained in radians per token, a step that is small for the first
    waves is many times the frequency of the last waves, and the long waves are lost.
    Source: Vaswani et al. 2017, arXiv:1706.03762.

    Args:
        base: base of the exponential frequencies.
        layout: `interleaved` (sine, cosine, sine, ...: the paper) or `split` (all sines, then all cosines: the authors'
            code).
        frequencies: `exponential` (the paper), `power`, or a list of ceil(E/2) frequencies in radians per token.
        alpha: exponent of the power law.
        trainable: train the frequencies: `w_u exp(r_u)` with a parameter `log_ratios` (ceil(E/2),) that starts at 0.
            `"radians"` trains a parameter `frequencies` (ceil(E/2),) in radians per token, as version 0.1 did.
        placement: add to the `input`, or before `every_layer`.
        scale: factor of the vectors; `match` gives them the RMS of the position table that they replace, or of the
            token embeddings.
    """

    name: ClassVar[str] = "sinusoidal"
    base: float = 10000.0
    layout: Literal["interleaved", "split"] = "interleaved"
    frequencies: Literal["exponential", "power"] | tuple[float, ...] = "exponential"
    alpha: float = 2.0
    trainable: bool | Literal["radians"] = False
    placement: Literal["input", "every_layer"] = "input"
    scale: Literal["match"] | float = "match"

    def __post_init__(self) -> None:
        self.positive("base")
        self.positive("alpha")
        self.one_of("layout", ("interleaved", "split"))
        if isinstance(self.frequencies, (tuple, list)):
            self._check_list(self.frequencies)
        else:
            self.one_of("frequencies", ("exponential", "power", "a list of numbers"))
        self.one_of("placement", ("input", "every_layer"))
        if self.trainable != "radians":
            self.flags("trainable")
        if isinstance(self.scale, str):
            self.one_of("scale", ("match", "a positive number"))
        else:
            self.positive("scale")

    def _check_list(self, listed: Sequence[float]) -> None:
        if not all(isinstance(w, (int, float)) and not isinstance(w, bool) for w in listed):
            raise TypeError(f"sinusoidal: frequencies must be numbers, radians per token, not {listed!r}")
        if not all(map(math.isfinite, listed)):
            raise ValueError(f"sinusoidal: frequencies must be finite, not {listed!r}")

    @property
    def every_layer(self) -> bool:
        return self.placement == "every_layer"

    def resolve(self, native: Native, dims: Dims) -> EmbeddingScheme:
        """Return the scheme with `scale` as a number; ValueError if it cannot be measured or a field has no effect."""
        used = {"exponential": "base", "power": "alpha"}.get(str(self.frequencies))
        for field, default in {"base": 10000.0, "alpha": 2.0}.items():
            if field != used and getattr(self, field) != default:
                raise ValueError(f"sinusoidal: {field} is not read by frequencies={self.frequencies!r}: leave it out")
        pairs = (dims.hidden_size + 1) // 2
        if not isinstance(self.frequencies, str) and len(self.frequencies) != pairs:
            raise ValueError(
                f"sinusoidal: vectors of size {dims.hidden_size} have {pairs} frequencies, not {len(self.frequencies)}"
            )
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
        return Waves(self, dims.hidden_size)


class Waves(PositionEmbedding):
    """The module of `sinusoidal`.

    It has a parameter `log_ratios` (ceil(E/2),) if trainable, or `frequencies` (ceil(E/2),) if trained in radians.
    """

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
        self.log_ratios = parameter((size + 1) // 2) if scheme.trainable is True else None
        self.frequencies = parameter((size + 1) // 2) if scheme.trainable == "radians" else None

    def fixed_frequencies(self, device: torch.device) -> Tensor:
        """Return the frequencies at the start of training, (ceil(E/2),), float64."""
        choice = self.scheme.frequencies
        if not isinstance(choice, str):
            return torch.tensor(choice, dtype=wide_dtype(device), device=device)
        if choice == "exponential":
            return geometric_frequencies(self.size, self.scheme.base, device)
        return (torch.arange(0, self.size, 2, dtype=wide_dtype(device), device=device) / self.size) ** self.scheme.alpha

    def waves(self, device: torch.device) -> Tensor:
        """Return the current frequencies, (ceil(E/2),) in radians per token. Gradients flow to the parameter."""
        if self.frequencies is not None:
            return self.frequencies
        fixed = self.fixed_frequencies(device)
        return fixed if self.log_ratios is None else fixed * self.log_ratios.to(fixed.dtype).exp()

    def reset_parameters(self) -> None:
        """Start at the fixed frequencies."""
        if self.log_ratios is not None:
            init.zeros_(self.log_ratios)
        if self.frequencies is not None and not self.frequencies.is_meta:
            init.copy_(self.frequencies, self.fixed_frequencies(self.frequencies.device).to(self.frequencies.dtype))

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return the vectors (B|1, T, E) of positions (B|1, T), float64 (float32 on MPS)."""
        sines, cosines = sinusoids(position_ids, self.waves(position_ids.device))
        if self.scheme.layout == "interleaved":
            waves = torch.stack([sines, cosines], -1).flatten(-2)
        else:
            waves = torch.cat([sines, cosines], -1)
        return waves[..., : self.size] * self.scale
