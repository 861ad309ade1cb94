"""Wavelengths of sinusoids and of RoPE, against the length a model was trained at.

A wave that never completes a turn in training shows angles at longer contexts that the model has never seen. NTK-aware
scaling and YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2) interpolate these waves, and leave those that
complete many turns alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..dims import Dims
from ..measurement import Result
from ..schemes.base import Scheme
from ..schemes.sinusoidal import Waves
from . import probe


@dataclass(frozen=True)
class Frequencies(Result):
    """Waves of one scheme.

    Attributes:
        label: name of the scheme, or the model's class.
        frequencies: (F,) float64, radians per token, in the scheme's order; 0 does not turn.
        trained_length: length of the training, in tokens.
    """

    derived = ("wavelengths", "turns", "completed")

    label: str
    frequencies: Tensor
    trained_length: int

    @property
    def wavelengths(self) -> Tensor:
        """The tokens per turn, (F,); infinite where nothing turns."""
        return 2 * math.pi / self.frequencies.abs()

    @property
    def turns(self) -> Tensor:
        """The number of turns within the trained length, (F,)."""
        return self.trained_length / self.wavelengths

    @property
    def completed(self) -> int:
        """The number of waves that complete a turn within the trained length."""
        return int((self.turns >= 1).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON; a wave that does not turn has a wavelength of None."""
        lengths = [length if math.isfinite(length) else None for length in self.wavelengths.tolist()]
        return {**super().to_dict(), "wavelengths": lengths}

    def __str__(self) -> str:
        """Return one line."""
        count = len(self.frequencies)
        return f"{self.label}: {self.completed} of {count} waves complete a turn in {self.trained_length} tokens"


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
        trained_length: length of the training in tokens; None means the model's `max_position_embeddings`, 512 without
            a model.
        length: length of the context, for scalings that depend on it (dynamic, longrope); None means the trained
            length.
        dims: sizes of the attention, without a model.
        **hyperparameters: hyper-parameters beside a name.

    Returns:
        One entry, or one for each kind of layer where these differ (Gemma 3).

    Raises:
        ValueError: if there are no waves, or if the config of a model does not say at what length it was trained.
    """
    if isinstance(scheme, PreTrainedModel):
        label = type(scheme).__name__
        trained = trained_length or getattr(scheme.config, "max_position_embeddings", 0)
        if not trained:
            raise ValueError(f"give trained_length: the config of this {label} does not say it")
        waves = next((module for module in scheme.modules() if isinstance(module, Waves)), None)
        rotary, angles = probe.rotary_of(scheme)
    else:
        trained = trained_length or probe.TRAINED_LENGTH
        resolved, module = probe.build(scheme, dims=dims, trained_length=trained, **hyperparameters)
        label, waves = resolved.name, module if isinstance(module, Waves) else None
        rotary, angles = module if resolved.acts_on.needs_queries() else None, "list twice"
    if waves is not None:
        return [Frequencies(label, waves.waves(probe.device_of(waves)).detach().double().cpu(), trained)]
    if rotary is None:
        raise ValueError(f"{label} has no waves: only sinusoidal and rope have")
    found = []
    for kind in getattr(rotary, "layer_types", None) or [None]:
        last = max(2, length or trained) - 1
        cos, sin = probe.rotations(rotary, torch.tensor([1, last]), kind, angles)
        name = label if kind is None else f"{label}, {kind}"
        found.append(Frequencies(name, torch.atan2(sin[0], cos[0]), trained))  # no pair turns by more than pi at once
    return found
