"""Phi-1, 1.5 and 2: partial rotation, one layer norm feeding attention and MLP in parallel."""

from hf_posenc.adapters.base import Adapter

ADAPTER = Adapter(
    model_types=("phi",),
    # Partial, but sliced by each attention's own `rotary_ndims`: a cos of any other width does not fit.
    slices_rotary=False,
)
