"""Spread a patched model over several devices, as `from_pretrained` of transformers does with `device_map`."""

from __future__ import annotations

from typing import Any

import accelerate
from transformers import PreTrainedModel

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device_map` for which accelerate chooses the device of each module."""


def take_dispatch_options(options: dict[str, object]) -> dict[str, Any]:
    """Remove and return the options that spread a model over several devices; none for a model on one device.

    transformers would use them while it loads, before patching adds modules.

    Args:
        options: options of `from_pretrained`. The returned ones are removed from it.
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
    """Spread a patched model over several devices, with options of `from_pretrained`."""
    if isinstance(device_map, str):
        unsplit_classes = list(model._no_split_modules or [])
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = accelerate.utils.get_balanced_memory(model, max_memory, unsplit_classes, low_zero=low_zero)
        device_map = accelerate.infer_auto_device_map(model, max_memory, unsplit_classes)
    return accelerate.dispatch_model(model, device_map, offload_dir=offload_folder, **options)
