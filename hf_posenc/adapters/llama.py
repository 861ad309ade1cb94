"""LLaMA: the plain rotary decoder; every field has its default."""

from hf_posenc.adapters.base import Adapter

ADAPTER = Adapter(model_types=("llama",))
