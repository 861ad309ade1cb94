"""`from_pretrained`: load a patched checkpoint, or a stock one straight into a patched model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .api import parse_schemes, patch_model
from .checkpoints.building import saved_class
from .checkpoints.inspecting import read_config
from .checkpoints.stock_checkpoints import stock_loader
from .errors import CheckpointError
from .live.attend import choose_engine
from .live.devices import dispatch, take_dispatch_options
from .registry import scheme_class
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
    if model_type.startswith("posenc_"):
        if scheme is not None:
            raise CheckpointError(f"hf_posenc: {name_or_path} is patched already: load it without scheme")
        if seed is not None:
            raise CheckpointError(f"hf_posenc: {name_or_path} is patched already: seed={seed} would draw nothing")
        model: PreTrainedModel = saved_class(raw).from_pretrained(name_or_path, **kwargs)
        choose_engine(model, attention)
        return model
    if scheme is None:
        raise CheckpointError(
            f"hf_posenc: {name_or_path} is a stock {model_type} checkpoint: say which scheme to patch it with"
        )
    fields = dataclasses.fields(scheme_class(scheme)) if isinstance(scheme, str) else ()
    values = {field.name: kwargs.pop(field.name) for field in fields if field.name in kwargs}
    schemes = parse_schemes(scheme, values)
    loader = stock_loader(raw)  # refuses what is not served, before the weights are read
    places = take_dispatch_options(kwargs)
    model = patch_model(loader.from_pretrained(name_or_path, **kwargs), schemes, attention=attention, seed=seed)
    if places:
        model = dispatch(model, **places)
    logger.warning_once(UNCALIBRATED)
    return model
