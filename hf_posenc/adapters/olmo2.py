"""OLMo 2: norms after the sub-layers; queries and keys are normalised over all heads at once before rotation."""

from .base import Adapter

ADAPTER = Adapter(model_types=("olmo2",))
