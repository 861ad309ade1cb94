"""Our classes, `PosEnc<Stock>` of every family, by name. Checkpoints, pickles and AutoConfig find them here."""

from __future__ import annotations

from typing import Any

from .registry import family_for


def __getattr__(name: str) -> Any:
    """Return the class `PosEnc<Stock>` of a supported family. It is made when it is first asked for.

    Raises:
        UnsupportedModelError: for a class of transformers whose model type no family serves; the file beside a
            checkpoint that `trust_remote_code=True` runs asks for it.
        PluginError: if the package that offers the family cannot be imported.
        AttributeError: for any other name.
    """
    if not name.startswith("PosEnc"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .checkpoints.class_names import stock_classes

    config, model = stock_classes(name)
    if config is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "text_config" not in config.sub_configs:  # a multimodal config says which language model is inside
        family_for(config.model_type)
    from .checkpoints.building import config_class, model_class

    return config_class(config) if model is None else model_class(model, config)
