"""Features of the CPU that decide which engine is faster.

torch tells them under private names only. Where such a name is missing, the answer is no.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def has_amx() -> bool:
    """Return whether the CPU multiplies matrices in tiles (AMX). If so, the flash kernel is also fast in bfloat16."""
    return _reports("_is_amx_tile_supported")


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether the CPU has instructions for products of bfloat16 (AVX512-BF16)."""
    return _reports("_is_avx512_bf16_supported")


def _reports(name: str) -> bool:
    supported = getattr(torch.cpu, name, None)
    return supported is not None and bool(supported())
