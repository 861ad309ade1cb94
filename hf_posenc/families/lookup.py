"""The family that serves the models of a config."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError
from ..registry import family_for, reason_against
from .base import Family, base_model_type
from .refused import DECODER_HALF


def family_of(config: Any) -> Family:
    """Return the family that serves the models of a config, or the language model inside them.

    Args:
        config: stock or ours. Checkpoints of one multimodal type may have different language models inside.

    Raises:
        UnsupportedModelError: if no family does.
    """
    model_type, inside = str(type(config).model_type).removeprefix("posenc_"), base_model_type(config)
    try:
        return family_for(inside)
    except UnsupportedModelError as error:
        if reason_against(model_type) is not None or (inside == model_type and not config.is_encoder_decoder):
            raise
        reason = (
            f"it is an encoder-decoder, {DECODER_HALF.partition(', ')[2]}"
            if config.is_encoder_decoder
            else f"of the language model inside it is said: {error}"
        )
        raise UnsupportedModelError(f"model type {model_type!r} cannot be patched: {reason}") from None
