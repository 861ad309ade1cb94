"""Qwen3: Qwen2 whose queries and keys are normalised per head before they are rotated."""

from .base import Adapter

ADAPTER = Adapter(model_types=("qwen3",))
