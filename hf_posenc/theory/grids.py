"""Positions with several coordinates: sinusoids and RoPE on a grid, and the linear map that shifts them.

A pair of dimensions is rotated by `w . x`, where `w` has one frequency for each coordinate of the place `x`. With
`axis_frequencies` every pair depends on one coordinate. For any frequencies, a shift by `s` rotates every pair by
`w . s`. So a shift is one linear map for all places, and products depend only on the difference of two places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..analysis.properties import linear_map


def axis_frequencies(size: int, axes: int = 2, *, base: float = 10000.0) -> Tensor:
    """Return frequencies that give every coordinate the same number F of pairs, with frequencies `base^(-u / F)`.

    Args:
        size: size of the vectors, E or D; a multiple of `2 * axes`.
        axes: number of coordinates.
        base: base of the frequencies.

    Returns:
        (size / 2, axes) float64, radians per step; the pairs of the first coordinate first.

    Raises:
        ValueError: for a size that is not a multiple of `2 * axes`.
    """
    if axes < 1 or size < 1 or size % (2 * axes):
        raise ValueError(f"{axes} coordinates need a size that is a multiple of {2 * axes}, not {size}")
    count = size // (2 * axes)
    waves = base ** -(torch.arange(count, dtype=torch.float64) / count)
    frequencies = torch.zeros(axes, count, axes, dtype=torch.float64)
    for axis in range(axes):
        frequencies[axis, :, axis] = waves
    return frequencies.flatten(0, 1)


def grid_sinusoids(places: Tensor, frequencies: Tensor) -> Tensor:
    """Return sinusoidal vectors of places, `p[2u] = sin(w_u . x)`, `p[2u + 1] = cos(w_u . x)`.

    Args:
        places: (..., axes) coordinates, integers or not.
        frequencies: (F, axes) radians per step.

    Returns:
        (..., 2 F) float64.
    """
    angles = places.double() @ frequencies.double().T
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def grid_shift(frequencies: Tensor, shift: Tensor) -> Tensor:
    """Return the matrix `M_s` that shifts the sinusoids of every place x by `s`, `p(x + s) = M_s p(x)`.

    Args:
        frequencies: (F, axes) radians per step.
        shift: (axes,) steps of either sign.

    Returns:
        (2 F, 2 F) float64, a rotation.
    """
    angles = frequencies.double() @ shift.double()
    return linear_map(angles, 1, size=2 * len(angles))


def grid_rotation(vectors: Tensor, places: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate queries or keys by their places, as RoPE does: the pair `(2u, 2u + 1)` by the angle `w_u . x`.

    Args:
        vectors: (..., 2 F).
        places: (..., axes) coordinates, integers or not.
        frequencies: (F, axes) radians per step.

    Returns:
        (..., 2 F) float64.
    """
    angles = places.double() @ frequencies.double().T
    turned = torch.view_as_complex(vectors.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def grid_decay(frequencies: Tensor, length: int) -> Tensor:
    """Return the product of two places of a grid by their shift, the mean of `cos(w . s)` over the pairs.

    It is 1 for a shift of 0. It is the product of two sinusoidal vectors, and of a query and a key that are equal in
    every pair and rotated by their places.

    Args:
        frequencies: (F, 2) radians per step.
        length: n, steps.

    Returns:
        (2 n + 1, 2 n + 1) float64, for shifts of -n .. n along the first coordinate and along the second.
    """
    steps = torch.arange(-length, length + 1, dtype=torch.float64)
    shifts = torch.cartesian_prod(steps, steps)
    return (shifts @ frequencies.double().T).cos().mean(-1).view(len(steps), len(steps))
