"""Loading patched checkpoints, and stock ones straight into a patched model."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .classes import config_class, model_class, scheme_of
from .patching import parse_scheme, patch_model
from .registry import adapter_for
from .schemes.base import Scheme


def from_pretrained(
    name_or_path: str | os.PathLike[str], *, scheme: str | Scheme | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Load a patched checkpoint, or a stock one and patch it.

    Args:
        name_or_path: a directory or a Hub id.
        scheme: for a stock checkpoint, what to patch it with; None for a patched one.
        **kwargs: of `from_pretrained` in transformers.

    Returns:
        A causal language model.

    Raises:
        ValueError: if a stock checkpoint is loaded without a scheme, or a patched one with.
        UnsupportedModelError: if the base family is not supported.
    """
    raw, _ = PreTrainedConfig.get_config_dict(name_or_path)
    model_type = str(raw.get("model_type", ""))
    if not model_type.startswith("posenc_"):
        if scheme is None:
            raise ValueError(f"{name_or_path} is a stock {model_type} checkpoint: say which scheme to patch it with")
        wanted = parse_scheme(scheme, {})
        return patch_model(transformers.AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs), wanted)
    if scheme is not None:
        raise ValueError(f"{name_or_path} is patched already: load it without scheme")
    stock = model_type.removeprefix("posenc_")
    adapter_for(stock)
    config = config_class(type(AutoConfig.for_model(stock))).from_pretrained(name_or_path)
    scheme_of(config)
    cls = model_class(getattr(transformers, str(raw["architectures"][0]).removeprefix("PosEnc")))
    model, info = cls.from_pretrained(name_or_path, config=config, output_loading_info=True, **kwargs)
    problems = {
        kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]
    }
    if problems:
        raise ValueError(f"{name_or_path} does not fit {config.position_encoding}: {problems}")
    return model
