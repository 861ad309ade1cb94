"""Measures of what positions do, for a scheme on its own and for a real model. `plots` draws them."""

from .decay import Decay, decay, model_decay
from .frequencies import Frequencies, frequencies
from .probe import position_vectors, scheme_vectors

__all__ = ["Decay", "Frequencies", "decay", "frequencies", "model_decay", "position_vectors", "scheme_vectors"]
