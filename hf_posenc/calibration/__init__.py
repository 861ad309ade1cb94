"""Calibration: fit a scheme to the attention of the base, before any fine-tuning."""

from .calibrate import calibrate
from .matching import Matching
from .report import Calibration, HeldOutLoss, LayerFit

__all__ = ["Calibration", "HeldOutLoss", "LayerFit", "Matching", "calibrate"]
