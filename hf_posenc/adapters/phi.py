"""Phi-1, 1.5 and 2: partial rotation, one layer norm feeding attention and MLP in parallel."""

from .base import Adapter

ADAPTER = Adapter(
    model_types=("phi",),
    slices_rotary=True,
    # Sliced by each attention's own number, not by the width of cos.
    rotary_size="rotary_ndims",
)
