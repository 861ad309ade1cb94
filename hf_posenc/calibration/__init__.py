"""Calibration: a scheme's own parameters take over what the base's positions did, before anything is trained."""

from .calibrate import Calibration, LayerFit, calibrate

__all__ = ["Calibration", "LayerFit", "calibrate"]
