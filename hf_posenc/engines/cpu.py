"""What of a CPU decides which engine is faster there.

torch has no public names for it; where its private ones are gone, the answer is no.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_amx() -> bool:
    """Return whether matrices are multiplied in tiles (AMX): then the flash kernel is fast in bfloat16, too."""
    return _says("_is_amx_tile_supported")


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether there are instructions for products of bfloat16 (AVX512-BF16)."""
    return _says("_is_avx512_bf16_supported")


def _says(name: str) -> bool:
    supported = getattr(torch.cpu, name, None)
    return supported is not None and bool(supported())
