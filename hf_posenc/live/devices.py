"""Spreading a patched model over several devices, by the options of `from_pretrained` in transformers."""

from __future__ import annotations

from typing import Any

import accelerate
from transformers import PreTrainedModel

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device_map` that have accelerate choose a device for each module."""


def take_dispatch_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the options that spread a model over several devices; none for a model on one.

    transformers would use them while it loads, before there are new modules to place.

    Args:
        options: of `from_pretrained`; those that are returned are removed.
    """
    device_map = options.get("device_map")
    several = isinstance(device_map, dict) and len(set(device_map.values())) > 1
    if not several and not (isinstance(device_map, str) and device_map in _AUTOMATIC):
        return {}
    names = ("device_map", "max_memory", "offload_folder", "offload_buffers")
    return {name: options.pop(name) for name in names if name in options}


def dispatch(
    model: PreTrainedModel,
    device_map: object,
    max_memory: object = None,
    offload_folder: object = None,
    **options: object,
) -> PreTrainedModel:
    """Spread a patched model over several devices, by the options of `from_pretrained`."""
    if isinstance(device_map, str):
        whole = list(model._no_split_modules or [])
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = accelerate.utils.get_balanced_memory(model, max_memory, whole, low_zero=low_zero)
        device_map = accelerate.infer_auto_device_map(model, max_memory, whole)
    return accelerate.dispatch_model(model, device_map, offload_dir=offload_folder, **options)
