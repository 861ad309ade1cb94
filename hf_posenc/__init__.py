"""Replace the position handling of Hugging Face causal language models, in place, by any documented scheme."""

from . import families, schemes  # noqa: F401  (importing them fills the registries)
from .api import describe, is_patched, patch_model, patched, schemes_of, unpatch_model, which_engine
from .checkpoint import from_pretrained, inspect
from .classes import register_auto as _register_auto
from .errors import (
    AlreadyPatchedError,
    CheckpointError,
    HfPosencError,
    NotPatchedError,
    UnknownSchemeError,
    UnsupportedModelError,
)
from .export import export_stock
from .lora import load_adapter, lora_config
from .model_types.entry import VERSION as __version__
from .parallel import context_group, context_parallel, shard_sequence
from .registry import available_schemes
from .schemes.base import Scheme
from .verification import verify

__all__ = [
    "AlreadyPatchedError",
    "CheckpointError",
    "HfPosencError",
    "NotPatchedError",
    "Scheme",
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
    "schemes_of",
    "shard_sequence",
    "unpatch_model",
    "verify",
    "which_engine",
]

_register_auto()
