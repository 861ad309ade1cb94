"""ALiBi as a sum of a few waves of the distance, within a stated length.

Near distances get the bias itself. Where it is below a bound, which is so far below the model's own scores that a key
has no weight, the waves only have to stay below the bound. This leaves them small: without it, their amplitudes would
be thousands of times as large, and cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NEAR, LARGEST = 1e-3, 500.0
"""Largest error of a bias that is seen, in nats, and largest sum of amplitudes: float32 keeps six digits of it."""

SLACK = 1.0
"""The waves may be this much above the bound."""

LONGEST = 4096
"""Largest length that is tried: beyond, no reasonable number of waves is exact, and to find that out takes minutes."""

STEPS = 25


class Lines(NamedTuple):
    """Biases `-m d` as waves `sum of cosine_t cos(w_t d) + sine_t sin(w_t d)`, up to a number of each slope.

    Attributes:
        frequencies: `w`, (F,), in radians per token.
        cosines: (N, F) for N slopes.
        sines: (N, F).
        error: largest error of a bias above the bound.
    """

    frequencies: Tensor
    cosines: Tensor
    sines: Tensor
    error: float


def fit_lines(slopes: Tensor, length: int, bound: float, count: int) -> Lines | None:
    """Return slopes (N,) as waves, or None if no number of them is exact to `NEAR`.

    Args:
        slopes: float64.
        length: number of distances.
        bound: a positive number; biases below its negative need not be exact.
        count: F.
    """
    best: Lines | None = None
    for top in (0.5, 1.0, 2.0):  # radians per token; the longest wave is ten times the length
        frequencies = top * (0.6 / length / top) ** (torch.arange(count, dtype=torch.float64) / max(1, count - 1))
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        features = torch.cat([angles.cos(), angles.sin(), torch.ones_like(angles[:, :1])], 1)
        fits = [_fit(slope, features, bound) for slope in slopes.tolist()]
        error = max(each for each, _ in fits)
        if error <= NEAR and (best is None or error < best.error):
            cosines, sines, _ = torch.stack([each for _, each in fits]).split([count, count, 1], 1)
            best = Lines(frequencies, cosines, sines, error)
    return best


def _fit(slope: float, features: Tensor, bound: float) -> tuple[float, Tensor]:
    """Return the largest error of biases above the bound and the coefficients (2 F + 1,), the best of some penalties.

    Least squares, with a hinge beyond the bound: Newton's steps solve for the distances that are near or too high.
    """
    wanted = -slope * torch.arange(len(features), dtype=torch.float64)
    near = wanted > -bound
    wanted = torch.where(near, wanted, SLACK - bound)
    best, least = features.new_zeros(features.shape[1]), float("inf")
    for penalty in (1e-7, 1e-9, 1e-11, 1e-13):
        weight = near.double()
        for _ in range(STEPS):
            weighted = features * weight[:, None]
            moments = weighted.T @ features / weight.sum()
            moments.diagonal()[:-1] += penalty
            found = torch.linalg.solve(moments, weighted.T @ wanted / weight.sum())
            fitted = features @ found
            error = (fitted - wanted)[near].abs().max().item()
            low = bool((fitted[~near] <= 2 * SLACK - bound).all())
            if low and error < least and found[:-1].abs().sum() <= LARGEST:
                best, least = found, error
            changed = torch.where(near, 1.0, 0.01 * (fitted > wanted).double())
            if torch.equal(changed, weight):
                break
            weight = changed
        if least <= NEAR / 10:
            break
    return least, best
