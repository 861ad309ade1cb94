"""Measure the share of negative products of queries and keys. A ReLU before the softmax sets these to zero.

DA-Transformer (Wu et al. 2021, arXiv:2010.06925) clips products at 0 before it multiplies them by its factors. So a
factor above 1 does not lower a negative product further. The paper calls the result sparse. The scores are sparse, but
the weights are not: a score of 0 contributes `e^0` to the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..analysis import probe
from ..calibration.observe import observe
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..measurement import Result


@dataclass(frozen=True)
class NegativeProducts(Result):
    """Share of negative products of a query and a key that it sees.

    Attributes:
        label: the model's class.
        layers: indices of the N layers that attend.
        shares: (N, H) float64, 0 .. 1, over all visible pairs.
    """

    label: str
    layers: tuple[int, ...]
    shares: Tensor


@torch.no_grad()
def negative_products(model: PreTrainedModel, tokens: Tensor) -> NegativeProducts:
    """Count negative products of queries and keys, rotated where a model rotates them, by layer and head.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text without padding, T >= 2; takes B H T^2 numbers of memory.

    Returns:
        NegativeProducts.
    """
    tokens = probe.check_tokens(tokens, 2)
    wanted = list(BaseModel.of(model).modules.attention_of)
    rows = []
    with evaluation(model):
        for seen in observe(model, tokens, wanted).values():
            call = seen.call.widened()
            visible = call.visible()
            negative = (call.products() < 0) & visible
            pairs = visible.expand(negative.shape).sum((0, 2, 3))
            rows.append((negative.sum((0, 2, 3)).double() / pairs).cpu())
    return NegativeProducts(type(model).__name__, tuple(wanted), torch.stack(rows))
