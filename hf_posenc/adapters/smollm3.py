"""SmolLM3: LLaMA that leaves every fourth layer unrotated (`config.no_rope_layers`: 1 means rotated)."""

from .base import Adapter

ADAPTER = Adapter(model_types=("smollm3",), use_rope_flag="use_rope", rotated_layers="no_rope_layers")
