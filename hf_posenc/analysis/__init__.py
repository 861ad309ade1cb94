"""Measures of what positions do, for a scheme on its own and for a real model. `plots` draws them."""

from .decay import Decay, decay, model_decay
from .frequencies import Frequencies, frequencies
from .order import Equivariance, LayerEquivariance, equivariance
from .probe import position_vectors, scheme_vectors

__all__ = [
    "Decay",
    "Equivariance",
    "Frequencies",
    "LayerEquivariance",
    "decay",
    "equivariance",
    "frequencies",
    "model_decay",
    "position_vectors",
    "scheme_vectors",
]
