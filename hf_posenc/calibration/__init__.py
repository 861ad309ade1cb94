"""Calibration: fit a scheme to the attention of the base, before any fine-tuning."""

from .choices import LayerCost
from .report import HeldOutLoss, LayerFit

__all__ = ["HeldOutLoss", "LayerCost", "LayerFit"]
