"""Wavelengths of sinusoids and of RoPE, compared with the length that a model was trained at.

A wave that completes no turn in training has angles at longer contexts that the model has never seen. NTK-aware scaling
and YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2) interpolate these waves, but not waves with many turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..api import schemes_of
from ..core.dims import Dims
from ..core.measurement import Result
from ..schemes.base import Scheme
from ..schemes.sinusoidal import Waves
from . import probe


@dataclass(frozen=True)
class Frequencies(Result):
    """The waves of a scheme or model.

    Attributes:
        label: name of the scheme, or the model's class.
        frequencies: (F,) float64, radians per token, in the scheme's order; 0 means no rotation.
        trained_length: length that the base was trained at, in tokens.
    """

    label: str
    frequencies: Tensor
    trained_length: int

    @property
    def wavelengths(self) -> Tensor:
        """The number of tokens per turn, (F,); infinite for frequency 0."""
        return 2 * math.pi / self.frequencies.abs()

    @property
    def turns(self) -> Tensor:
        """The number of turns within the trained length, (F,)."""
        return self.trained_length / self.wavelengths

    @property
    def completed(self) -> int:
        """The number of waves that complete a turn within the trained length."""
        return int((self.turns >= 1).sum())


def frequencies(
    scheme: str | Scheme | PreTrainedModel,
    *,
    trained_length: int | None = None,
    length: int | None = None,
    dims: Dims = probe.DIMS,
    **hyperparameters: Any,
) -> list[Frequencies]:
    """Read the waves of a scheme or of a model.

    Args:
        scheme: `sinusoidal` or `rope`, by name or as an instance, or a model that has either.
        trained_length: length that the base was trained at, in tokens. None means a model's
            `max_position_embeddings`, and 512 for a scheme.
        length: length of the context, for scalings that depend on it (dynamic, longrope); None means the trained
            length.
        dims: sizes of the attention, for a scheme.
        **hyperparameters: hyper-parameters, for a name.

    Returns:
        One entry, or one for each type of layer if these rotate differently (Gemma 3).

    Raises:
        ValueError: if there are no waves, or if a model's config does not give the trained length.
    """
    if isinstance(scheme, PreTrainedModel):
        model, label = scheme, type(scheme).__name__
        trained = trained_length or getattr(model.config, "max_position_embeddings", 0)
        if not trained:
            raise ValueError(f"give trained_length: the config of this {label} does not say it")
    else:
        trained = trained_length or probe.TRAINED_LENGTH
        model = probe.build(scheme, dims=dims, trained_length=trained, **hyperparameters)
        label = schemes_of(model)[-1].name
    waves = next((module for module in model.modules() if isinstance(module, Waves)), None)
    if waves is not None:
        return [Frequencies(label, waves.waves(probe.device_of(waves)).detach().double().cpu(), trained)]
    rotary, angles = probe.rotary_of(model)
    if rotary is None:
        raise ValueError(f"{label} has no waves: only sinusoidal and rope have")
    found = []
    for layer_type in getattr(rotary, "layer_types", None) or [None]:
        last = max(2, length or trained) - 1
        cos, sin = probe.rotations(rotary, torch.tensor([1, last]), layer_type, angles)
        name = label if layer_type is None else f"{label}, {layer_type}"
        found.append(Frequencies(name, torch.atan2(sin[0], cos[0]), trained))  # frequencies are at most pi
    return found
