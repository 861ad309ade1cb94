"""The reference engine: dense, readable, the definition that every other engine is tested against."""

import torch
from torch import Tensor

from ..core.attention_call import Call
from .base import Engine


class Reference(Engine):
    """The engine for every scheme, mask and dtype, with weights. O(Q L) memory."""

    name = "reference"
    traced = True
    sinks = True
    token_bias = True
    weight_changes = True
    real = True
    value_sizes = True

    def attend(self, call: Call) -> tuple[Tensor, Tensor]:
        """Attend densely, see `attend`."""
        return attend(call)


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Attend densely, in float64 for float64 models and in float32 for all others, also under autocast.

    Args:
        call: any call.

    Returns:
        output (B, Q, H, V) and weights (B, H, Q, L) after dropout, both in the query's dtype.
    """
    with torch.autocast(call.query.device.type, enabled=False):
        wide = call.widened()
        weights = wide.weigh(wide.positions.mask(wide.scores()))
        weights = torch.nn.functional.dropout(weights, wide.dropout, training=wide.dropout > 0)
        output = wide.mix(weights)
    dtype = call.query.dtype
    return output.transpose(1, 2).to(dtype).contiguous(), weights.to(dtype)
