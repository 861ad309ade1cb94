"""Attention without positions by torch's own kernels: what layers without a scheme on their scores compute."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call import Call
from ..forms import Content
from ..positions import DensePositions
from .base import Engine
from .spans import spans


class Plain(Engine):
    """`scaled_dot_product_attention`: O(L) memory for plain causal attention on a CPU, otherwise with a mask."""

    name = "sdpa"
    forms = (Content,)
    traced = True
    value_sizes = True

    def considered(self, call: Call) -> bool:
        """Return whether no scheme is on the scores."""
        return isinstance(call.form, Content)

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        if not isinstance(call.form, Content):
            return "it computes attention without positions, and this scheme changes scores"
        if call.weights:
            return "attention weights were asked for, which only the reference engine has"
        if call.softcap is not None:
            return "the kernel has no soft cap on scores"
        return None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Attend, see `Engine.attend`."""
        mask = None if (causal := _is_plainly_causal(call)) else _mask(call)
        output = torch.nn.functional.scaled_dot_product_attention(
            call.query,
            call.key,
            call.value,
            mask,
            dropout_p=call.dropout,
            is_causal=causal,
            scale=call.scaling,
            enable_gqa=bool(call.groups != 1),  # sizes are tensors in torch.jit.trace
        )
        return output.transpose(1, 2).to(call.query.dtype).contiguous(), None


def _mask(call: Call) -> Tensor:
    """Return which keys are seen, bool; or a user's own float mask."""
    positions = call.positions
    if isinstance(positions, DensePositions) and positions.seen.is_floating_point():
        return positions.seen.to(call.query.dtype)
    return positions.visible()


def _is_plainly_causal(call: Call) -> bool:
    """Return whether queries and keys are the same tokens, one document without padding or window, all of it visible.

    Only asked where values can be read without waiting for a device.
    """
    positions, length = call.positions, call.query.shape[2]
    if torch.compiler.is_compiling() or call.query.device.type != "cpu" or isinstance(positions, DensePositions):
        return False
    if length != call.key.shape[2] or int(positions.window.min()) < length:
        return False
    everything = slice(None)
    return spans(positions) == [(everything, everything, slice(0, length))]
