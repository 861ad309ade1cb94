"""Calibration: a scheme's own parameters take over what the base's positions did, before anything is trained."""

from .calibrate import calibrate
from .report import Calibration, HeldOutLoss, LayerFit

__all__ = ["Calibration", "HeldOutLoss", "LayerFit", "calibrate"]
