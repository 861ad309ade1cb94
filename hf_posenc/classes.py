"""Our classes `PosEnc<Stock>`, for every family, by name. Checkpoints, pickles and AutoConfig import them from here."""

from __future__ import annotations

from typing import Any

from .core.registry import family_for


def __getattr__(name: str) -> Any:
    """Return the class `PosEnc<Stock>` of a supported family, or its config class by the model type `posenc_<stock>`.

    The first access creates it.

    Raises:
        UnsupportedModelError: if no family serves the model type of the stock class. The code in a checkpoint that
            `trust_remote_code=True` runs may ask for such a class. Also if nobody has registered a config of the type.
        PluginError: if the package that offers the family cannot be imported.
        AttributeError: for any other name.
    """
    if not name.lower().startswith("posenc"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .checkpoints.auto_classes import stock_config_class
    from .checkpoints.class_names import stock_classes

    config: Any
    model: Any
    if name.startswith("posenc_"):
        family_for(model_type := name.removeprefix("posenc_"))  # imports the package that offers it, and its classes
        config, model = stock_config_class(model_type), None
    else:
        config, model = stock_classes(name)
    if config is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "text_config" not in config.sub_configs:  # only its config says which language model a multimodal one has
        family_for(config.model_type)
    from .checkpoints.model_classes import config_class, model_class

    return config_class(config) if model is None else model_class(model, config)
