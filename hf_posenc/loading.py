"""`from_pretrained`: load a patched checkpoint, or a stock one straight into a patched model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import accelerate
from transformers import PreTrainedModel
from transformers.utils import logging

from .api import parse_schemes, patch_model
from .checkpoints.building import saved_class
from .checkpoints.inspecting import read_config
from .checkpoints.stock import check_checkpoint_served, stock_loader
from .errors import CheckpointError
from .families.base import base_model_type
from .layer_state import STATE, OnAttention, use_engine
from .live.state import patch_of
from .modules import WithoutPositions
from .registry import family_for, scheme_class
from .schemes.base import Scheme
from .upstream.attention import check_engine

logger = logging.get_logger(f"transformers.{__name__}")  # below transformers' own: its verbosity decides

UNCALIBRATED = (
    "This model is patched, not calibrated: most schemes make it predict badly until hf_posenc.calibrate(model, "
    "windows) has fitted them to what the base's positions did."
)


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    scheme: str | Scheme | Sequence[Scheme] | None = None,
    attention: str = "auto",
    seed: int | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a patched checkpoint, or a stock one and patch it.

    A stock checkpoint is loaded once and patched in place. It is not calibrated then, and transformers' logger warns of
    that once. With a `device_map` of several places it is first loaded to the CPU, patched, and then dispatched, so
    that new modules are placed like the rest.

    Args:
        name_or_path: a directory or a Hub id.
        scheme: as for `patch_model`, for a stock checkpoint; None for a patched one.
        attention: as for `patch_model`.
        seed: as for `patch_model`; only where there is something to draw.
        **kwargs: of `from_pretrained` in transformers: dtype, device_map, revision, ...; and, where `scheme` is a name,
            its hyper-parameters.

    Returns:
        The model, in eval mode: of the class that the checkpoint names, a causal language model if it names none.

    Raises:
        CheckpointError: if a stock checkpoint is loaded without a scheme, or a patched one with a scheme or a seed; if
            a patched one's entry or weights are not exactly what its scheme needs, or not what was saved.
        UnknownSchemeError: if there is no such scheme.
        UnsupportedModelError: if the base family is not supported.
        OSError: if there is no such checkpoint, or it cannot be read.
        ValueError: for an unknown `attention`, or one that the scheme does not have.
    """
    check_engine(attention)
    raw = read_config(name_or_path, kwargs)
    model_type = str(raw.get("model_type", ""))
    if not model_type.startswith("posenc_"):
        if scheme is None:
            raise CheckpointError(
                f"hf_posenc: {name_or_path} is a stock {model_type} checkpoint: say which scheme to patch it with"
            )
        fields = dataclasses.fields(scheme_class(scheme)) if isinstance(scheme, str) else ()
        values = {field.name: kwargs.pop(field.name) for field in fields if field.name in kwargs}
        schemes = parse_schemes(scheme, values)
        check_checkpoint_served(raw)  # before the weights are read
        dispatch = _take_dispatch_options(kwargs)
        model = stock_loader(raw).from_pretrained(name_or_path, **kwargs)
        model = patch_model(model, schemes, attention=attention, seed=seed)
        if dispatch:
            model = _dispatch(model, **dispatch)
        logger.warning_once(UNCALIBRATED)
        return model
    if scheme is not None:
        raise CheckpointError(f"hf_posenc: {name_or_path} is patched already: load it without scheme")
    if seed is not None:
        raise CheckpointError(f"hf_posenc: {name_or_path} is patched already: seed={seed} would draw nothing")
    model = saved_class(raw).from_pretrained(name_or_path, **kwargs)
    _choose_engine(model, attention)
    return model


_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device_map` that have accelerate choose a device for each module."""


def _take_dispatch_options(options: dict[str, Any]) -> dict[str, Any]:
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


def _dispatch(
    model: PreTrainedModel, device_map: Any, max_memory: Any = None, offload_folder: Any = None, **options: Any
) -> PreTrainedModel:
    """Spread a patched model over several devices, by the options of `from_pretrained`."""
    if isinstance(device_map, str):
        whole = list(model._no_split_modules or [])
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = accelerate.utils.get_balanced_memory(model, max_memory, whole, low_zero=low_zero)
        device_map = accelerate.infer_auto_device_map(model, max_memory, whole)
    return accelerate.dispatch_model(model, device_map, offload_dir=offload_folder, **options)


def _choose_engine(model: PreTrainedModel, attention: str) -> None:
    """Set the engine that computes the attention of a patched model.

    Args:
        model: patched.
        attention: `auto` or an engine's name.

    Raises:
        ValueError: if the scheme keeps the model's own attention and this is not `auto`.
    """
    patch = patch_of(model)
    assert patch is not None
    if attention == "auto":
        return
    if not patch.attends:
        raise ValueError(
            f"{patch.name} keeps the model's own attention; attention={attention!r} can be chosen for schemes that "
            "change scores only"
        )
    patch.attention = attention
    replaced = family_for(base_model_type(model.config)).always_replaced
    for module in model.modules():
        state = getattr(module, STATE, None)
        if isinstance(state, OnAttention) and "posenc" in module._modules:
            if replaced or state.window is not None or not isinstance(module.posenc, WithoutPositions):
                use_engine(module, attention)
