"""Replace the position handling of Hugging Face causal language models, in place, by any documented scheme."""

from . import families, schemes  # noqa: F401  (importing them fills the registries)
from .api import describe, is_patched, patch_model, patched, schemes_of, unpatch_model, which_engine
from .call import Call
from .checkpoint import from_pretrained, inspect
from .classes import register_auto as _register_auto
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
from .model_types.entry import VERSION as __version__
from .modules import PositionEmbedding, Rotation, ScoreModule
from .parallel import context_group, context_parallel, shard_sequence
from .registry import available_schemes, register_scheme
from .registry import find_plugins as _find_plugins
from .schemes.base import Dims, EmbeddingScheme, RotaryScheme, Scheme, ScoreScheme
from .verification import verify

__all__ = [
    "AlreadyPatchedError",
    "Bias",
    "Call",
    "CheckpointError",
    "ClippedVectors",
    "Dims",
    "EmbeddingScheme",
    "Factors",
    "Family",
    "Form",
    "HfPosencError",
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

_find_plugins()
_register_auto()
