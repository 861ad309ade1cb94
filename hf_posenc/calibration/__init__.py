"""Calibration: fit a scheme to the attention of the base, before any fine-tuning."""

from .calibrate import calibrate
from .factor_search import DivideAndConquer, Evolution
from .frequency_search import FrequencySearch, Improvement, search_frequencies
from .layer_choice import LayerChoice, LayerCost, choose_layers
from .matching import Matching
from .pair_choice import PairChoice, choose_pairs
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
    "PairChoice",
    "calibrate",
    "choose_layers",
    "choose_pairs",
    "search_frequencies",
]
