"""Scores by distance as sums of waves, and the integrals that these sums approach.

The product of two sinusoidal vectors is the real part of a mean of waves `h_u e^(i d w_u)` over the pairs `u`. The same
holds for a query and a key that RoPE has rotated. With many pairs the mean approaches
`integral_0^1 h(t) e^(i d theta(t)) dt` (Su 2021, spaces.ac.cn/archives/8231). The function `theta(t)` gives the
frequencies: `base^-t`, a power of t, or any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis import probe
from ..calibration.observe import observe
from ..core.errors import UnsupportedModelError
from ..core.layer_state import on_attention, on_layer
from ..core.measurement import Result
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation

Function = Callable[[Tensor], Tensor]
"""float64 tensor of numbers t between 0 and 1 -> tensor of values, of the same shape."""


@dataclass(frozen=True)
class WaveDecay(Result):
    """Mean of waves by distance: the sum over F pairs, and the integral that it approaches.

    Attributes:
        distances: (n,) float64, tokens, positive or negative.
        sum: (n,) complex128, `1/F sum_u h_u e^(i d w_u)`; its real part is the score.
        integral: (n,) complex128, `integral_0^1 h(t) e^(i d theta(t)) dt`.
    """

    distances: Tensor
    sum: Tensor
    integral: Tensor


def wave_decay(
    distances: int | Sequence[int] | Tensor,
    theta: float | Function,
    weights: complex | Function = 1.0,
    *,
    pairs: int = 64,
) -> WaveDecay:
    """Return the mean of waves by distance, for any frequencies and weights: the finite sum and the integral.

    Args:
        distances: tokens, positive or negative; a number n means -n .. n.
        theta: the frequencies, see `wave_integral`.
        weights: `h`, see `wave_integral`.
        pairs: F, the number of terms of the sum, at `t = u / F`, as in Vaswani et al. 2017.

    Raises:
        ValueError: for the reasons of `wave_integral`.
    """
    d = torch.as_tensor(range(-distances, distances + 1) if isinstance(distances, int) else distances).double()
    t = torch.arange(pairs, dtype=torch.float64) / pairs
    frequencies, h = _functions(theta, weights)
    return WaveDecay(d, wave_sum(d, frequencies(t), h(t)), wave_integral(d, theta, weights))


def wave_sum(distances: Tensor, frequencies: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of waves, `1/F sum_u h_u e^(i d w_u)`.

    Args:
        distances: (n,) tokens, positive or negative.
        frequencies: (F,) radians per token.
        weights: `h`, (..., F) real or complex.

    Returns:
        (..., n) complex128. With real weights its real part is the same for d and -d, its imaginary part changes sign.
    """
    angles = distances.double()[:, None] * frequencies.double()
    waves = torch.polar(torch.ones_like(angles), angles)
    return weights.to(waves.dtype) @ waves.T / len(frequencies)


NODES = 16
"""Gauss-Legendre nodes per panel."""

PANELS = 2**17
"""Largest number of panels. With more, further halving does not help."""


def wave_integral(distances: Tensor, theta: float | Function, weights: complex | Function = 1.0) -> Tensor:
    """Return the limit of `wave_sum` for many pairs, `integral_0^1 h(t) e^(i d theta(t)) dt`.

    The quadrature is in `t^(1/4)`, where also roots of t are smooth. It halves its panels until nothing changes.

    Args:
        distances: (n,) tokens, positive or negative.
        theta: the frequencies in radians per token: a number b for `b^-t` (10000 in Vaswani et al. 2017), or a function
            such as `lambda t: t**2`.
        weights: `h`, real or complex: a number, or a function of t.

    Returns:
        (n,) complex128, to about 1e-11 of the size of h for distances of thousands of tokens.

    Raises:
        ValueError: for values that are not finite, or functions that oscillate too fast to be integrated.
    """
    nodes, shares = (torch.from_numpy(each) for each in numpy.polynomial.legendre.leggauss(NODES))
    functions = _functions(theta, weights)
    return torch.cat([_integral(d, *functions, nodes, shares) for d in distances.double().split(16)])


def _functions(theta: float | Function, weights: complex | Function) -> tuple[Function, Function]:
    """Return the functions for frequencies (a number is their base) and weights (a number is all of them)."""
    return (
        theta if callable(theta) else lambda t: theta**-t,
        weights if callable(weights) else lambda t: weights * torch.ones_like(t),
    )


def _integral(d: Tensor, theta: Function, weights: Function, nodes: Tensor, shares: Tensor) -> Tensor:
    """Return integrals (n,) over panels, which are halved until two results agree."""
    before, edges = None, torch.linspace(0, 1, 9, dtype=torch.float64) ** 0.25
    while len(edges) <= PANELS:
        width, middle = edges.diff()[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
        r = (middle + width * nodes).flatten()
        t, h = r**4, weights(r**4).to(torch.complex128) * (4 * r**3 * (width * shares).flatten())
        frequencies = theta(t)
        if not frequencies.isfinite().all() or not h.isfinite().all():
            raise ValueError("frequencies and weights must be finite between 0 and 1")
        angles = d[:, None] * frequencies
        total = torch.polar(torch.ones_like(angles), angles) @ h
        # Angles are rounded, too.
        allowed = weights(t).abs().max() * (1e-12 + 1e-15 * (frequencies.abs().max() * d.abs().max()))
        if before is not None and (total - before).abs().max() <= allowed:
            return total
        before, edges = total, torch.cat([edges, middle[:, 0]]).sort().values
    raise ValueError("waves oscillate too fast to be integrated: give fewer tokens or lower frequencies")


# -------------------------------------------------------------------------------------------------- waves of a model


@dataclass(frozen=True)
class RotaryWeights(Result):
    """Mean products of a query and a key before RoPE rotates them, by layer, head and pair of dimensions.

    Attributes:
        layers: indices of the N layers that rotate.
        frequencies: (N, F) float64, radians per token.
        weights: (N, H, F) complex128, `h_u` times the scaling of the scores. A pair (x, y) of q or k is the complex
            number x + iy, and `h_u` is the mean of `q_u conj(k_u)`.
        still: (N, H) float64, the mean product of the dimensions that are not rotated, times the scaling.
    """

    layers: tuple[int, ...]
    frequencies: Tensor
    weights: Tensor
    still: Tensor

    def decay(self, distances: Sequence[int]) -> Tensor:
        """Return the mean score by distance, for queries and keys that do not depend on the distance between them.

        It is `still + Re sum_u h_u e^(i d w_u)`, (N, H, n) float64, for distances in tokens, positive or negative. The
        curve is not scaled to 1 at distance 0, because its value there can be negative.
        """
        d = torch.tensor(list(distances))
        sums = [wave_sum(d, w, h) for w, h in zip(self.frequencies, self.weights, strict=True)]
        return torch.stack(sums).real * self.frequencies.shape[1] + self.still[..., None]


@torch.no_grad()
def rotary_weights(model: PreTrainedModel, tokens: Tensor) -> RotaryWeights:
    """Measure the mean products of a text's queries and keys, over all pairs of a query and a key at or before it.

    Args:
        model: a patched or stock model. All its layers that rotate must use the same rotary module.
        tokens: (T,) or (B, T) text without padding, T >= 2.

    Raises:
        ValueError: if the model rotates nothing, or if its layers have different rotations.
        UnsupportedModelError: for latent attention.
    """
    tokens = probe.check_tokens(tokens, 2)
    base, label = BaseModel.of(model), type(model).__name__
    rotary, angles = probe.rotary_of(model)
    if rotary is None:
        raise ValueError(f"this {label} rotates nothing")
    states = [on_attention(attention) for attention in base.modules.attentions]
    layouts = {None if state.rotation is None else state.pairs for state in states}
    if len(layouts) > 1 or any(on_layer(layer).rotation is not None for layer in base.modules.layers):
        raise ValueError(f"the layers of this {label} have different rotations")
    if base.family.rotation.attention_part is not None:
        raise UnsupportedModelError(f"{label}: pairs of latent attention cannot be measured")
    patched_layout = layouts.pop()  # None unless a patch rotates in attention modules
    rotating = [index for index in base.modules.attention_of if patched_layout or base.rotated[index]]
    with evaluation(model):
        calls = {index: each.call.widened() for index, each in observe(model, tokens, rotating).items()}
    measured: list[tuple[Tensor, Tensor, Tensor]] = []
    for index, call in calls.items():
        layer_type = probe.layer_type(model, rotary, index)
        cos, sin = probe.rotations(rotary, torch.arange(tokens.shape[1]), layer_type, angles)
        inverse = torch.polar(torch.ones_like(cos), -torch.atan2(sin, cos))
        layout = patched_layout or base.rotation.pairs
        (query, still_query), (key, still_key) = (
            _in_pairs(each.double().cpu(), len(inverse[0]), layout) for each in (call.query, call.key)
        )
        weights = _mean_product(query * inverse, key * inverse)
        still = _mean_product(still_query, still_key).sum(-1)
        # The frequency of a pair is its angle at position 1.
        measured.append((-inverse[1].angle(), weights * call.scaling, still * call.scaling))
    return RotaryWeights(tuple(calls), *(torch.stack(each) for each in zip(*measured, strict=True)))


def _in_pairs(x: Tensor, pairs: int, layout: str) -> tuple[Tensor, Tensor]:
    """Split (B, H, T, D) into the rotated pairs, complex (B, H, T, pairs), and the other dimensions."""
    rotated, still = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if layout == "half":
        return torch.complex(rotated[..., :pairs], rotated[..., pairs:]), still
    return torch.complex(rotated[..., ::2], rotated[..., 1::2]), still


def _mean_product(query: Tensor, key: Tensor) -> Tensor:
    """Return the mean of `q_i conj(k_j)` over texts and positions j <= i, (H, F), for inputs (B, H, T, F)."""
    batch, _, length, _ = query.shape
    return (query * key.cumsum(2).conj()).sum((0, 2)) / (batch * length * (length + 1) / 2)
