"""Measure the weights of RoPE's waves in a model: the mean products of queries and keys before they are rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..analysis import probe
from ..analysis.decay import Decay
from ..calibration.observe import observe
from ..errors import UnsupportedModelError
from ..layer_state import on_attention, on_layer
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..measurement import Result
from .integrals import wave_integral, wave_sum


@dataclass(frozen=True)
class RotaryWeights(Result):
    """Mean products of a query and a key before RoPE rotates them, by layer, head and pair of dimensions.

    Attributes:
        label: the model's class.
        layers: indices of the N layers that rotate.
        frequencies: (N, F) float64, radians per token.
        weights: (N, H, F) complex128, `h_u` times the scaling of the scores. A pair (x, y) of q or k is the complex
            number x + iy, and `h_u` is the mean of `q_u conj(k_u)`.
        still: (N, H) float64, the mean product of the dimensions that are not rotated, times the scaling.
    """

    label: str
    layers: tuple[int, ...]
    frequencies: Tensor
    weights: Tensor
    still: Tensor

    def decay(self, distances: Sequence[int]) -> Decay:
        """Return the mean score by distance, for queries and keys that do not depend on the distance between them.

        It is `still + Re sum_u h_u e^(i d w_u)`. The curve is not scaled to 1 at distance 0,
        because its value there can be negative.

        Args:
            distances: distances in tokens, positive or negative.
        """
        d = torch.tensor(list(distances), dtype=torch.int64)
        # `wave_sum` is a mean over pairs
        sums = [wave_sum(d, w, h).real * len(w) for w, h in zip(self.frequencies, self.weights, strict=True)]
        return Decay(self.label, d, torch.stack(sums) + self.still[..., None])

    def integral(self, distances: Sequence[int], *, progress: bool = False) -> Decay:
        """Return the limit of `decay` for infinitely many pairs, interpolated between the F pairs of the model.

        It is `still + F Re integral_0^1 h(t) e^(i d theta(t)) dt`, see `wave_integral`.

        Args:
            distances: distances in tokens, positive or negative.
            progress: show a progress bar.
        """
        d = torch.tensor(list(distances), dtype=torch.int64)
        layers = zip(self.frequencies, self.weights, strict=True)
        # `wave_integral` is the limit of a mean over pairs
        rows = [
            torch.stack([wave_integral(d, w, head).real * len(w) for head in h])
            for w, h in tqdm(layers, total=len(self.layers), disable=not progress, desc="integrals", unit="layer")
        ]
        return Decay(self.label, d, torch.stack(rows) + self.still[..., None])

    def curves(self, distances: Sequence[int], *, progress: bool = False) -> dict[str, Decay]:
        """Return `sum` (from `decay`) and `integral`, for `plots.wave_curves`.

        Args:
            distances: distances in tokens, positive or negative.
            progress: show a progress bar.
        """
        return {"sum": self.decay(distances), "integral": self.integral(distances, progress=progress)}


@torch.no_grad()
def rotary_weights(model: PreTrainedModel, tokens: Tensor, *, progress: bool = False) -> RotaryWeights:
    """Measure the mean products of a text's queries and keys, over all pairs of a query and a key at or before it.

    Args:
        model: a patched or stock model. All its layers that rotate must use the same rotary module.
        tokens: (T,) or (B, T) text without padding, T >= 2.
        progress: show a progress bar.

    Returns:
        RotaryWeights.

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
        calls = {index: each.call for index, each in observe(model, tokens.to(model.device), rotating).items()}
    measured: list[tuple[Tensor, Tensor, Tensor]] = []
    for index, call in tqdm(calls.items(), disable=not progress, desc="products", unit="layer"):
        layer_type = probe.layer_type(model, rotary, index)
        cos, sin = probe.rotations(rotary, torch.arange(tokens.shape[1]), layer_type, angles)
        inverse = torch.polar(torch.ones_like(cos), -torch.atan2(sin, cos))
        call = call.widened()
        layout = patched_layout or base.rotation.pairs
        (query, still_query), (key, still_key) = (
            _in_pairs(each.double().cpu(), len(inverse[0]), layout) for each in (call.query, call.key)
        )
        weights = _mean_product(query * inverse, key * inverse)
        still = _mean_product(still_query, still_key).sum(-1)
        # The frequency of a pair is its angle at position 1.
        measured.append((-inverse[1].angle(), weights * call.scaling, still * call.scaling))
    frequencies, weights, still = (torch.stack(each) for each in zip(*measured, strict=True))
    return RotaryWeights(label, tuple(calls), frequencies, weights, still)


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
