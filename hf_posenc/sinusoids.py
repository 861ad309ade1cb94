"""Sines and cosines of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from .dtypes import wide_dtype


def geometric_frequencies(size: int, base: float, device: torch.device) -> Tensor:
    """Return `w_u = base^(-2u/size)` in radians per token, u from 0: (ceil(size / 2),), in `wide_dtype`."""
    return base ** -(torch.arange(0, size, 2, dtype=wide_dtype(device), device=device) / size)


def sinusoids(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return sines and cosines of position times frequency.

    Angles are computed in `wide_dtype`: at position 100,000 a float32 product is wrong by up to 0.004 radians.

    Args:
        positions: integers of any shape (...).
        frequencies: (F,) in radians per token; gradients flow to them.

    Returns:
        sines and cosines, (..., F), in `wide_dtype`.
    """
    wide = wide_dtype(positions.device)
    angles = positions[..., None].to(wide) * frequencies.to(wide)
    return angles.sin(), angles.cos()
