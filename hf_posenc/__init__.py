"""Replace the position handling of Hugging Face causal language models, in place, by any documented scheme.

Importing this imports nothing heavy: a public name is looked up when it is first used. AutoConfig is told the model
types of patched models as soon as it is imported, by whomever.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .deferred import after_import

if TYPE_CHECKING:
    from .api import describe, is_patched, patch_model, patched, schemes_of, unpatch_model, which_engine
    from .calibration.calibrate import Calibration, Matching, calibrate
    from .call import Call
    from .checkpoint import from_pretrained, inspect
    from .classes import register_family
    from .errors import (
        AlreadyPatchedError,
        CheckpointError,
        HfPosencError,
        NotPatchedError,
        PluginError,
        UnknownSchemeError,
        UnsupportedModelError,
    )
    from .export import export_stock
    from .families.base import Family
    from .forms import Bias, ClippedVectors, Factors, Form, RelativeKeys, Slopes
    from .lora import load_adapter, lora_config
    from .modules import PositionEmbedding, Rotation, ScoreModule
    from .parallel import context_group, context_parallel, shard_sequence
    from .registry import available_schemes, register_scheme
    from .schemes.base import Dims, EmbeddingScheme, RotaryScheme, Scheme, ScoreScheme
    from .verification import verify
    from .version import VERSION as __version__

__all__ = [
    "AlreadyPatchedError",
    "Bias",
    "Calibration",
    "Call",
    "CheckpointError",
    "ClippedVectors",
    "Dims",
    "EmbeddingScheme",
    "Factors",
    "Family",
    "Form",
    "HfPosencError",
    "Matching",
    "NotPatchedError",
    "PluginError",
    "PositionEmbedding",
    "RelativeKeys",
    "RotaryScheme",
    "Rotation",
    "Scheme",
    "ScoreModule",
    "ScoreScheme",
    "Slopes",
    "UnknownSchemeError",
    "UnsupportedModelError",
    "__version__",
    "available_schemes",
    "calibrate",
    "context_group",
    "context_parallel",
    "describe",
    "export_stock",
    "from_pretrained",
    "inspect",
    "is_patched",
    "load_adapter",
    "lora_config",
    "patch_model",
    "patched",
    "register_family",
    "register_scheme",
    "schemes_of",
    "shard_sequence",
    "unpatch_model",
    "verify",
    "which_engine",
]

_FROM = {
    ".api": (
        "describe",
        "is_patched",
        "patch_model",
        "patched",
        "schemes_of",
        "unpatch_model",
        "which_engine",
    ),
    ".calibration": (
        "Calibration",
        "Matching",
        "calibrate",
    ),
    ".call": ("Call",),
    ".checkpoint": (
        "from_pretrained",
        "inspect",
    ),
    ".classes": ("register_family",),
    ".errors": (
        "AlreadyPatchedError",
        "CheckpointError",
        "HfPosencError",
        "NotPatchedError",
        "PluginError",
        "UnknownSchemeError",
        "UnsupportedModelError",
    ),
    ".export": ("export_stock",),
    ".families.base": ("Family",),
    ".forms": (
        "Bias",
        "ClippedVectors",
        "Factors",
        "Form",
        "RelativeKeys",
        "Slopes",
    ),
    ".lora": (
        "load_adapter",
        "lora_config",
    ),
    ".version": ("__version__",),
    ".modules": (
        "PositionEmbedding",
        "Rotation",
        "ScoreModule",
    ),
    ".parallel": (
        "context_group",
        "context_parallel",
        "shard_sequence",
    ),
    ".registry": (
        "available_schemes",
        "register_scheme",
    ),
    ".schemes.base": (
        "Dims",
        "EmbeddingScheme",
        "RotaryScheme",
        "Scheme",
        "ScoreScheme",
    ),
    ".verification": ("verify",),
}
"""Module -> the public names that it has."""

_MODULE_OF = {name: module for module, names in _FROM.items() for name in names}


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
    """Return the public names, looked up or not."""
    return sorted({*globals(), *__all__})


def _announce() -> None:
    from .classes import announce_all

    announce_all()


after_import("transformers.models.auto.configuration_auto", _announce)
