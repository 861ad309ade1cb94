"""Products rounded to bfloat16, as in transformers' eager attention: faster where bfloat16 products are, less accurate.

It is taken only if it is asked for, `attention="rounded"`, and computes as the engines for the same forms do.

Accuracy class: "eager".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call
from ..forms import Bias, Factors, RelativeKeys, Slopes
from . import banded, rescaled, skewed
from .spans import SpanEngine


class Rounded(SpanEngine):
    """ALiBi, DA-Transformer and Transformer-XL in bfloat16 on a CPU; sliding windows."""

    name = "rounded"
    forms = (Bias, Slopes, Factors, RelativeKeys)
    wrong_form = "it takes biases of distance, factors of distance and relative keys only"

    def considered(self, call: Call) -> bool:
        """Return False: it trades accuracy for speed, which only a user can decide."""
        return False

    def why_not_form(self, call: Call) -> str | None:
        """Return why the engine does not take the scheme's form or dtype, or None if it does."""
        if call.query.dtype != torch.bfloat16:
            return f"it rounds products to bfloat16, the tensors are {call.query.dtype}"
        return super().why_not_form(call)

    def part(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        form, keys = call.form, key.shape[2]
        if isinstance(form, RelativeKeys):
            return skewed.by_form(call, query, key, value, window, rounded=True)
        factors = bias = reach = None
        if isinstance(form, Factors):
            factors = form.table(keys)
        else:
            bias = form.table(keys)
            if isinstance(form, Slopes):
                reach = banded.reaches(query, key, form.slopes, call.scaling, rescaled.rows_of(keys))
        relu = isinstance(form, Factors) and form.relu
        return rescaled.attend(
            query,
            key,
            value,
            factors,
            bias,
            scaling=call.scaling,
            relu=relu,
            window=window,
            reach=reach,
            rounded=True,
        )
