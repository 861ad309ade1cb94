"""StarCoder2: LLaMA with biases, layer norms and a sliding window, the same in every layer."""

from .base import Adapter

ADAPTER = Adapter(model_types=("starcoder2",))
