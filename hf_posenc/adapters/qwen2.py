"""Qwen2: LLaMA with biased projections; with `use_sliding_window` the masks are a dict keyed by layer type."""

from .base import Adapter

ADAPTER = Adapter(model_types=("qwen2",))
