"""Replace the position handling of Hugging Face causal language models, in place, by any documented scheme.

Importing hf_posenc imports nothing heavy, because each public name is imported when it is first used. The model types
of patched models are registered with AutoConfig as soon as any package imports AutoConfig.
"""

from importlib import import_module
from typing import Any

from .checkpoints.after_import import after_import

_PUBLIC_NAMES = {
    ".api": "is_patched patch_model patched schemes_of unpatch_model",
    ".calibration.calibrate": "Calibration Matching calibrate",
    ".calibration.factor_search": "DivideAndConquer Evolution",
    ".calibration.frequency_search": "FrequencySearch search_frequencies",
    ".calibration.layer_choice": "LayerChoice choose_layers",
    ".calibration.pair_choice": "PairChoice choose_pairs",
    ".calibration.temperature_fit": "TemperatureFit fit_temperature",
    ".attention_call": "Call",
    ".checking.check": "check",
    ".checkpoints.auto_classes": "register_family",
    ".checkpoints.export": "export_stock",
    ".checkpoints.gguf_export": "export_gguf",
    ".checkpoints.inspecting": "inspect",
    ".description": "describe which_engine",
    ".errors": "AlreadyPatchedError CheckpointError HfPosencError NotPatchedError PluginError UnknownSchemeError "
    "UnsupportedModelError",
    ".families.base": "Family",
    ".forms": "Bias ClippedVectors Factors Form LinearVectors RelativeKeys Slopes",
    ".loading": "from_pretrained",
    ".lora": "load_adapter lora_config",
    ".modules": "PositionEmbedding QueryModule Rotation ScoreModule TokenModule",
    ".parallel": "context_group context_parallel shard_sequence",
    ".registry": "available_schemes register_scheme",
    ".schemes.base": "Dims EmbeddingScheme QueryScheme RotaryScheme Scheme ScoreScheme TokenScheme",
    ".upstream.endless_cache": "EndlessCache",
    ".verification": "verify",
}
"""Module -> its public names. `__init__.pyi` lists the same names for type checkers."""

_MODULE_OF = {name: module for module, names in _PUBLIC_NAMES.items() for name in names.split()} | {
    "__version__": ".version"
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, when it is first used."""
    if name in _MODULE_OF:
        module = import_module(_MODULE_OF[name], __name__)
        value = getattr(module, "VERSION" if name == "__version__" else name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names, imported or not."""
    return sorted({*globals(), *__all__})


def _announce_patched_types() -> None:
    from .checkpoints.auto_classes import announce_all

    announce_all()


def _announce_multimodal_types() -> None:
    from .checkpoints.auto_classes import announce_multimodal

    announce_multimodal()


after_import("transformers.models.auto.modeling_auto", _announce_multimodal_types)
after_import("transformers.models.auto.configuration_auto", _announce_patched_types)
