"""Calibration: fit a scheme to the attention of the base, before any fine-tuning."""

from .calibrate import calibrate
from .factor_search import DivideAndConquer, Evolution
from .frequency_search import FrequencySearch, Improvement, search_frequencies
from .layer_choice import LayerChoice, LayerCost, choose_layers
from .matching import Matching
from .report import Calibration, HeldOutLoss, LayerFit

__all__ = [
    "Calibration",
    "DivideAndConquer",
    "Evolution",
    "FrequencySearch",
    "HeldOutLoss",
    "Improvement",
    "LayerChoice",
    "LayerCost",
    "LayerFit",
    "Matching",
    "calibrate",
    "choose_layers",
    "search_frequencies",
]
