"""Phi-3 and 3.5: fused projections, partial rotation, and LongRoPE, whose factors change with the length.

`Phi3ForCausalLM.prepare_inputs_for_generation` drops the cache when generation crosses
`config.original_max_position_embeddings`, because keys rotated with the short factors are useless from there on.
"""

from .base import Adapter

ADAPTER = Adapter(model_types=("phi3",), slices_rotary=True)
