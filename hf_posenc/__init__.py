"""Replace the position handling of Hugging Face causal language models, in place, by any documented scheme.

Importing hf_posenc imports nothing heavy, because each public name is imported when it is first used. The model types
of patched models are registered with AutoConfig as soon as any package imports AutoConfig.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .checkpoints.auto_classes import announce_when_imported

_PUBLIC_NAMES = {
    ".api": "is_patched patch_model patched schemes_of unpatch_model",
    ".calibration.calibrate": "Calibration Matching calibrate",
    ".calibration.choices": "LayerChoice choose_layers",
    ".core.attention_call": "Call",
    ".checking.check": "check",
    ".checking.describe": "describe which_engine",
    ".checking.other_engines": "OtherEngine",
    ".checking.verify": "verify",
    ".checkpoints.auto_classes": "register_family",
    ".checkpoints.export": "export_stock",
    ".checkpoints.gguf_export": "export_gguf",
    ".core.errors": "AlreadyPatchedError CheckpointError HfPosencError NotPatchedError PluginError UnknownSchemeError "
    "UnsupportedModelError",
    ".families.base": "Family",
    ".core.forms": "Bias ClippedVectors Factors Form LinearVectors RelativeKeys Sides Slopes Waves",
    ".loading": "from_pretrained inspect",
    ".checkpoints.lora": "load_adapter lora_config",
    ".core.modules": "PositionEmbedding QueryModule Rotation ScoreModule TokenModule",
    ".parallel": "context_group context_parallel shard_sequence",
    ".core.registry": "available_schemes register_scheme",
    ".schemes.base": "Dims EmbeddingScheme HiddenNumbers QueryScheme RotaryScheme Scheme ScoreScheme TokenScheme "
    "WeightScheme",
}
"""Module -> its public names. `__init__.pyi` lists the same names for type checkers."""

_MODULE_OF = {name: module for module, names in _PUBLIC_NAMES.items() for name in names.split()} | {
    "__version__": ".core.version"
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, when it is first used."""
    if name in _MODULE_OF:
        module = import_module(_MODULE_OF[name], __name__)
        value = getattr(module, "VERSION" if name == "__version__" else name)
    elif name.startswith("_") or find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        value = import_module(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names, imported or not."""
    return sorted({*globals(), *__all__})


announce_when_imported()
