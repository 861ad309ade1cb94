"""Calibration: fit a scheme to the attention of the base, before any fine-tuning."""

from .calibrate import calibrate
from .layer_choice import LayerChoice, LayerCost, choose_layers
from .matching import Matching
from .report import Calibration, HeldOutLoss, LayerFit

__all__ = [
    "Calibration",
    "HeldOutLoss",
    "LayerChoice",
    "LayerCost",
    "LayerFit",
    "Matching",
    "calibrate",
    "choose_layers",
]
