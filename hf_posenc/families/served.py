"""Which family serves the models of a config."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError
from ..registry import family_for, reason_against, reason_around
from .base import Family, base_model_type
from .refused import DECODER_HALF, MULTIMODAL


def family_of(config: Any) -> Family:
    """Return the family that serves the models of a config, stock or ours; UnsupportedModelError if none does."""
    model_type = base_model_type(config)
    return family_for(model_type)


def check_served(config: Any) -> None:
    """Raise UnsupportedModelError if no family serves the models of a config. The error names a language model inside.

    Args:
        config: stock or ours. What is inside differs between checkpoints of a type, so the config is asked for it.
    """
    model_type = base_model_type(config)
    try:
        family_for(model_type)
        return
    except UnsupportedModelError:
        inner = config.get_text_config(decoder=True)
        if reason_against(model_type) is not None or (inner is config and not config.is_encoder_decoder):
            raise
    reason = (
        f"it is an encoder-decoder, {DECODER_HALF.partition(', ')[2]}"
        if config.is_encoder_decoder
        else reason_around(MULTIMODAL, inner.model_type)
    )
    raise UnsupportedModelError(f"model type {model_type!r} cannot be patched: {reason}")
