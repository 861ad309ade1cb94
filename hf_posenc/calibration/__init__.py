"""Calibration: fit a scheme's parameters to what the base's positions did, before anything is trained."""

from .calibrate import calibrate
from .matching import Matching
from .report import Calibration, HeldOutLoss, LayerFit

__all__ = ["Calibration", "HeldOutLoss", "LayerFit", "Matching", "calibrate"]
