"""The dtypes in which positions are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for computing positions with this tensor: float64 for float64, else float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for angles: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
