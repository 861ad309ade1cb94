"""LLaMA: the plain rotary decoder; every field has its default."""

from .base import Adapter

ADAPTER = Adapter(model_types=("llama",))
