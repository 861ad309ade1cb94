"""Mistral: LLaMA with a sliding window (`config.sliding_window`), the same in every layer."""

from .base import Adapter

ADAPTER = Adapter(model_types=("mistral",))
