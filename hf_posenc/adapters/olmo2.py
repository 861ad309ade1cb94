"""OLMo 2: norms after the sub-layers; queries and keys are normalised over all heads at once before rotation."""

from hf_posenc.adapters.base import Adapter

ADAPTER = Adapter(model_types=("olmo2",))
