"""`from_pretrained`: load a patched checkpoint, or load a stock checkpoint and patch it."""

from __future__ import annotations

import dataclasses
import os

from transformers import PreTrainedModel
from transformers.utils import logging

from .api import Schemes, parse_schemes, patch_model
from .checkpoints.inspecting import read_config
from .checkpoints.model_classes import saved_class
from .checkpoints.stock_checkpoints import stock_loader
from .errors import CheckpointError
from .live.devices import dispatch, take_dispatch_options
from .live.our_attention import choose_engine
from .registry import scheme_class
from .upstream.attention import check_engine

logger = logging.get_logger(f"transformers.{__name__}")  # a child of transformers' logger, which sets its verbosity

UNCALIBRATED = (
    "This model is patched, not calibrated: with most schemes it predicts badly until hf_posenc.calibrate(model, "
    "windows) has fitted it to the attention of the base."
)


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    scheme: Schemes | None = None,
    attention: str = "auto",
    seed: int | None = None,
    **kwargs: object,
) -> PreTrainedModel:
    """Load a patched checkpoint, or load a stock checkpoint and patch the model in place.

    A stock checkpoint is not calibrated then, and transformers' logger warns of that once. With a `device_map` of
    several devices, the model is loaded to the CPU, patched, and then dispatched. So new modules get devices like all
    other modules.

    Args:
        name_or_path: a directory or a Hub id.
        scheme: the scheme for a stock checkpoint, as for `patch_model`; None for a patched checkpoint.
        attention: as for `patch_model`.
        seed: as for `patch_model`; None for a patched checkpoint.
        **kwargs: options of `from_pretrained` in transformers (dtype, device_map, revision, ...), and the
            hyper-parameters if `scheme` is a name.

    Returns:
        The model in eval mode, of the class that the checkpoint names. Without a name it is a causal language model.

    Raises:
        CheckpointError: if a stock checkpoint is loaded without a scheme, or a patched checkpoint with a scheme or a
            seed; if the entry or the weights of a patched checkpoint do not fit its scheme, or were altered after
            saving.
        UnknownSchemeError: if there is no such scheme.
        UnsupportedModelError: if the base family is not supported.
        OSError: if the checkpoint does not exist or cannot be read.
        ValueError: for an unknown `attention`, or an engine that does not take the scheme.
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
    hyperparameters = {field.name: kwargs.pop(field.name) for field in fields if field.name in kwargs}
    schemes = parse_schemes(scheme, hyperparameters)
    loader = stock_loader(raw)  # refuses unsupported models before it reads weights
    dispatch_options = take_dispatch_options(kwargs)
    model = patch_model(loader.from_pretrained(name_or_path, **kwargs), schemes, attention=attention, seed=seed)
    if dispatch_options:
        model = dispatch(model, **dispatch_options)
    logger.warning_once(UNCALIBRATED)
    return model
