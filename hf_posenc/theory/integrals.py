"""Scores by distance as sums of waves, and the integrals that these sums approach.

The product of two sinusoidal vectors is the real part of a mean of waves `h_u e^(i d w_u)` over the pairs `u`. The same
holds for a query and a key that RoPE has rotated. With many pairs the mean approaches
`integral_0^1 h(t) e^(i d theta(t)) dt` (Su 2021, spaces.ac.cn/archives/8231). The function `theta(t)` gives the
frequencies: `base^-t`, a power of t, or any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..analysis.decay import Decay
from ..measurement import Result

Function = Callable[[Tensor], Tensor]
"""float64 tensor of numbers t between 0 and 1 -> tensor of values, of the same shape."""

EULER = 0.5772156649015329


def cosine_integral(x: Tensor) -> Tensor:
    """Return `Ci(x) = gamma + ln x + integral_0^x (cos t - 1)/t dt` of positive numbers, float64, to about 1e-13.

    It is a power series up to x = 4, and the continued fraction of `E1(ix)` beyond (Numerical Recipes, section 6.8).
    """
    x = x.double()
    small = x.clamp(max=4.0)
    total = torch.zeros_like(small)
    term = torch.ones_like(small)
    for n in range(1, 31):
        term = -term * small.square() / ((2 * n - 1) * (2 * n))
        total = total + term / (2 * n)
    series = EULER + small.log() + total

    t = x.clamp(min=2.0)
    b = torch.complex(torch.ones_like(t), t)
    c = torch.full_like(b, 1e300)
    d = 1 / b
    h = d
    for n in range(1, 200):
        a = -float(n * n)
        b = b + 2
        d = 1 / (a * d + b)
        c = b + a / c
        h = h * c * d
    fraction = -(torch.complex(t.cos(), -t.sin()) * h).real
    return torch.where(x < 4, series, fraction)


def sinusoidal_integral(distances: Tensor, *, base: float = 10000.0) -> Tensor:
    """Return the limit of the sinusoidal score for many dimensions, `integral_0^1 cos(d base^-s) ds`.

    Its closed form is `(Ci(|d|) - Ci(|d| / base)) / ln(base)`. For `1 << d << base` that is about `1 - (gamma + ln d) /
    ln(base)`: the score falls with the logarithm of the distance. With base 1 all waves are equal, and it is `cos d`.

    Args:
        distances: (n,) tokens, positive or negative.
        base: base of the frequencies, positive.

    Returns:
        (n,) float64.

    Raises:
        ValueError: for a base that is not positive and finite.

    Source: Su 2021, spaces.ac.cn/archives/8231.
    """
    _check_base(base)
    d = distances.double().abs()
    if abs(math.log(base)) < 0.1:  # the closed form would divide two small numbers
        return wave_integral(d, base).real
    positive = d.clamp(min=1e-300)
    values = (cosine_integral(positive) - cosine_integral(positive / base)) / math.log(base)
    return torch.where(d > 0, values, 1.0)


def power_integral(distances: Tensor, *, alpha: float) -> Tensor:
    """Return the limit of the score with frequencies `s^alpha`, `integral_0^1 cos(d s^alpha) ds`, by quadrature.

    Args:
        distances: (n,) tokens, positive or negative.
        alpha: exponent of the power law, positive.

    Returns:
        (n,) float64.
    """
    return wave_integral(distances, lambda t: t**alpha).real


def power_asymptote(distances: Tensor, *, alpha: float) -> Tensor:
    """Return the leading term of `power_integral`, `Gamma(1 + 1/alpha) cos(pi/(2 alpha)) |d|^(-1/alpha)`.

    Args:
        distances: (n,) tokens, positive or negative, not 0.
        alpha: exponent of the power law, above 1.

    Returns:
        (n,) float64.
    """
    size = distances.double().abs()
    return math.gamma(1 + 1 / alpha) * math.cos(math.pi / (2 * alpha)) * size ** (-1 / alpha)


# ------------------------------------------------------------------------------------------ any frequencies and weights

Values = complex | Sequence[complex] | Tensor | Function
"""Frequencies or weights: a number, a list, or a function of t between 0 and 1, see `wave_integral`."""


@dataclass(frozen=True)
class WaveDecay(Result):
    """Mean of waves by distance: the sum over F pairs, and the integral that it approaches.

    Attributes:
        distances: (n,) float64, tokens, positive or negative.
        frequencies: (F,) float64, radians per token of the terms of the sum.
        weights: (F,) complex128, `h_u` of the terms of the sum.
        sum: (n,) complex128, `1/F sum_u h_u e^(i d w_u)`; its real part is the score.
        integral: (n,) complex128, `integral_0^1 h(t) e^(i d theta(t)) dt`.
    """

    distances: Tensor
    frequencies: Tensor
    weights: Tensor
    sum: Tensor
    integral: Tensor

    def curves(self) -> dict[str, Decay]:
        """Return the real parts of sum and integral, for `plots.wave_curves`."""
        both = {"sum": self.sum, "integral": self.integral}
        return {label: Decay(label, self.distances, each.real[None, None]) for label, each in both.items()}


def wave_decay(
    distances: int | Sequence[int] | Tensor, theta: Values, weights: Values | None = None, *, pairs: int | None = None
) -> WaveDecay:
    """Return the mean of waves by distance, for any frequencies and weights: the finite sum and the integral.

    Args:
        distances: tokens, positive or negative; a number n means -n .. n.
        theta: the frequencies, see `wave_integral`.
        weights: `h`, see `wave_integral`.
        pairs: F, the number of terms of the sum; None means the length of a list, or 64. A function is evaluated at
            `t = u / F`, as in Vaswani et al. 2017.

    Returns:
        WaveDecay.

    Raises:
        ValueError: if lists and `pairs` differ in number, or for the reasons of `wave_integral`.
    """
    listed = range(-distances, distances + 1) if isinstance(distances, int) else distances
    d = torch.as_tensor(listed if isinstance(listed, Tensor) else list(listed), dtype=torch.float64)
    curves = _make_curve(theta, "theta"), _make_curve(1.0 if weights is None else weights, "weights")
    counts = {len(each.listed) for each in curves if each.listed is not None} | ({pairs} if pairs else set())
    if len(counts) > 1:
        raise ValueError(f"frequencies, weights and pairs are of different number: {sorted(counts)}")
    count = counts.pop() if counts else 64
    frequencies, h = (each.terms(count) for each in curves)
    total = wave_sum(d, frequencies.real, h)
    return WaveDecay(d, frequencies.real, h.to(torch.complex128), total, _integral(d, *curves))


def wave_sum(distances: Tensor, frequencies: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of waves, `1/F sum_u h_u e^(i d w_u)`.

    Args:
        distances: (n,) tokens, positive or negative.
        frequencies: (F,) radians per token.
        weights: `h`, (..., F) real or complex; None means 1.

    Returns:
        (..., n) complex128. With real weights its real part is the same for d and -d, its imaginary part changes sign.
    """
    angles = distances.double()[:, None] * frequencies.double()
    waves = torch.polar(torch.ones_like(angles), angles)
    return waves.mean(-1) if weights is None else weights.to(waves.dtype) @ waves.T / len(frequencies)


def wave_integral(distances: Tensor, theta: Values, weights: Values | None = None) -> Tensor:
    """Return the limit of `wave_sum` for many pairs, `integral_0^1 h(t) e^(i d theta(t)) dt`, by adaptive quadrature.

    Args:
        distances: (n,) tokens, positive or negative.
        theta: the frequencies in radians per token: a number b for `b^-t` (10000 in Vaswani et al. 2017), a function
            such as `lambda t: t**2`, or a list. A list of F values is interpolated linearly between t = (u + 1/2) / F.
        weights: `h`, real or complex: a number, a function of t, or a list that is interpolated. None means 1.

    Returns:
        (n,) complex128, to about 1e-11 of the size of h for distances of thousands of tokens.

    Raises:
        ValueError: for a base that is not positive and finite, an empty list, values that are not finite, or functions
            that oscillate too fast to be integrated.
    """
    return _integral(
        distances.double(), _make_curve(theta, "theta"), _make_curve(1.0 if weights is None else weights, "weights")
    )


@dataclass(frozen=True)
class _Curve:
    """A function of t between 0 and 1, and the list of values that it interpolates, or None."""

    function: Function
    listed: Tensor | None = None

    def terms(self, count: int) -> Tensor:
        """Return the terms of a sum, (count,)."""
        return self.function(torch.arange(count, dtype=torch.float64) / count) if self.listed is None else self.listed

    @property
    def knots(self) -> Tensor:
        """The numbers t in (0, 1) where an interpolated function can have a corner."""
        count = 0 if self.listed is None else len(self.listed)
        return (torch.arange(count, dtype=torch.float64) + 0.5) / max(count, 1)


def _make_curve(values: Values, what: str) -> _Curve:
    """Return the function for frequencies (`what` is `theta`) or weights (`weights`)."""
    if isinstance(values, (int, float, complex)):
        if what == "weights":
            return _Curve(lambda t: values * torch.ones_like(t))
        base = _check_base(values)
        return _Curve(lambda t: base**-t)
    if not isinstance(values, (Sequence, Tensor)):
        return _Curve(values)
    if isinstance(values, Tensor):
        listed = values.detach().cpu().to(torch.complex128 if values.is_complex() else torch.float64)
    else:
        turns = any(isinstance(value, complex) for value in values)
        listed = torch.tensor(list(values), dtype=torch.complex128 if turns else torch.float64)
    if listed.ndim != 1 or not len(listed) or not listed.isfinite().all():
        raise ValueError(f"{what} must be a list of finite numbers, not {tuple(listed.shape)} of {listed}")

    def between(t: Tensor) -> Tensor:
        place = (t * len(listed) - 0.5).clamp(0, len(listed) - 1)
        low = place.floor().long()
        return listed[low] + (place - low) * (listed[(low + 1).clamp(max=len(listed) - 1)] - listed[low])

    return _Curve(between, listed)


def _check_base(base: complex) -> float:
    if isinstance(base, complex) or not 0 < base < math.inf:
        raise ValueError(f"the base of the frequencies must be positive and finite, not {base}")
    return base


NODES = 16
"""Gauss-Legendre nodes per panel."""

PANELS = 2**16
"""Largest number of panels at a time. With more, further halving does not help."""


def _integral(distances: Tensor, theta: _Curve, weights: _Curve) -> Tensor:
    """Return integrals, 64 distances at a time. Panels are halved until the two halves agree with the whole panel."""
    points, shares = _gauss_legendre(NODES)
    even = torch.arange(9, dtype=torch.float64) / 8
    edges = torch.cat([even, theta.knots, weights.knots]).unique()

    def panels(d: Tensor, low: Tensor, high: Tensor) -> Tensor:
        t = low[:, None] + (high - low)[:, None] * points
        h = weights.function(t).to(torch.complex128) * shares * (high - low)[:, None]
        angles = d[:, None, None] * theta.function(t)
        return (h * torch.polar(torch.ones_like(angles), angles)).sum(-1)  # (n, panels)

    t = (edges[:-1, None] + edges.diff()[:, None] * points).flatten()
    size, fastest = weights.function(t).abs().max().item(), theta.function(t).abs().max().item()
    if not math.isfinite(size) or not math.isfinite(fastest):
        raise ValueError("frequencies and weights must be finite between 0 and 1")
    results = []
    for d in distances.split(64):
        allowed = size * (1e-12 + 1e-15 * fastest * d.abs().max().item())  # includes the rounding of angles
        low, high = edges[:-1], edges[1:]
        whole, total = panels(d, low, high), torch.zeros(len(d), dtype=torch.complex128)
        while len(low):
            if len(low) > PANELS:
                raise ValueError("waves oscillate too fast to be integrated: give fewer tokens or lower frequencies")
            middle = (low + high) / 2
            left, right = panels(d, low, middle), panels(d, middle, high)
            done = (left + right - whole).abs().amax(0) <= allowed * (high - low).clamp(min=1e-3)
            total += (left + right)[:, done].sum(-1)
            whole = torch.cat([left[:, ~done], right[:, ~done]], -1)
            low, middle, high = low[~done], middle[~done], high[~done]
            low, high = torch.cat([low, middle]), torch.cat([middle, high])
        results.append(total)
    return torch.cat(results) if results else torch.zeros(0, dtype=torch.complex128)


def _gauss_legendre(nodes: int) -> tuple[Tensor, Tensor]:
    """Return points in (0, 1) and weights, by the eigenvalues of Legendre's Jacobi matrix (Golub and Welsch 1969)."""
    n = torch.arange(1, nodes, dtype=torch.float64)
    side = n / (4 * n.square() - 1).sqrt()
    points, vectors = torch.linalg.eigh(torch.diag(side, 1) + torch.diag(side, -1))
    return (points + 1) / 2, vectors[0].square()
