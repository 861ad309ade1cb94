"""Attention without positions by torch's own kernels, for layers without a scheme on their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_call import Call
from ..forms import Content
from ..positions import DensePositions
from . import chunked
from .base import Engine
from .spans import spans

WHOLE = 2**18
"""Largest mask, in entries, that is made for all queries at once on a CPU.

Above it, masks of few queries on the keys that they may see were always faster: at 4096 tokens they took 1/15 of the
time with a window of 64, and half without a window.
"""

PAIRS = 2**20
"""Largest mask of a few queries on a CPU, in entries."""

PAIRS_ELSEWHERE = 2**25
"""Largest mask on other devices, in entries, of all queries or a few. Small kernels are slow there."""

ROWS = 256
"""Largest number of queries at a time on a CPU. Their mask has every key that any of them sees."""


class Sdpa(Engine):
    """`scaled_dot_product_attention`. O(L) memory, except with a user's 4-D mask and while torch compiles."""

    name = "sdpa"
    forms = (Content,)
    wrong_form = "it computes attention without positions, and this scheme changes scores"
    traced = True
    token_bias = True
    real = True
    value_sizes = True

    def considered(self, call: Call) -> bool:
        """Return whether no scheme changes the scores."""
        return self.why_not_form(call) is None

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        if (reason := self.why_not_form(call)) is not None:
            return reason
        if call.weights:
            return "attention weights were asked for, which only the reference engine has"
        if call.softcap is not None:
            return "the kernel has no soft cap on scores"
        if call.has_token_bias and call.query.dtype not in (torch.float32, torch.float64):
            return f"the kernel would add numbers of tokens in {call.query.dtype}"
        return None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        if not call.has_token_bias and _is_plainly_causal(call):
            return _attend(call, causal=True), None
        if (rows := _rows(call)) < call.query.shape[2]:
            return chunked.by_rows(call, rows, _attend), None
        return _attend(call), None


def _attend(call: Call, *, causal: bool = False) -> Tensor:
    """Return the kernel's output (B, Q, H, V). It gets a mask if attention is not plainly causal."""
    output = torch.nn.functional.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        None if causal else _mask(call),
        dropout_p=call.dropout,
        is_causal=causal,
        scale=call.scaling,
        enable_gqa=bool(call.groups != 1),  # sizes are tensors in torch.jit.trace
    )
    return output.transpose(1, 2).to(call.query.dtype).contiguous()


def _rows(call: Call) -> int:
    """Return how many queries are computed at a time: all of them if their mask is small or a user's 4-D one."""
    positions = call.positions
    if torch.compiler.is_compiling() or isinstance(positions, DensePositions):
        return call.query.shape[2]  # as it is: int() would fix the length of an exported program
    queries, keys = int(call.query.shape[2]), int(call.key.shape[2])  # sizes are tensors in torch.jit.trace
    masks = max(positions.key_valid.shape[0], positions.query_index.shape[0])
    if call.has_token_bias:
        masks = call.query.shape[0] * call.query.shape[1]
    on_cpu = call.query.device.type == "cpu"
    if masks * queries * keys <= (WHOLE if on_cpu else PAIRS_ELSEWHERE):
        return queries
    if not on_cpu:  # reading the window would wait for the device
        return max(16, PAIRS_ELSEWHERE // (masks * keys))
    keys = min(keys, int(positions.window.max()) + ROWS)
    return min(ROWS, max(16, PAIRS // (masks * keys)))


def _mask(call: Call) -> Tensor:
    """Return which keys are visible, bool; or what is added to scores: a user's own float mask, and token biases."""
    positions = call.positions
    if call.has_token_bias:
        return positions.mask(call.token_bias()).to(call.query.dtype)
    if isinstance(positions, DensePositions) and positions.seen.is_floating_point():
        return positions.seen.to(call.query.dtype)
    return positions.visible()


def _is_plainly_causal(call: Call) -> bool:
    """Return whether queries and keys are the tokens of one document, without padding, cache and window.

    False while torch compiles, and on devices other than a CPU, where reading positions would wait for the device.
    """
    positions, length = call.positions, call.query.shape[2]
    if torch.compiler.is_compiling() or call.query.device.type != "cpu" or isinstance(positions, DensePositions):
        return False
    if length != call.key.shape[2] or int(positions.window.min()) < length:
        return False
    everything = slice(None)
    return spans(positions) == [(everything, everything, slice(0, length))]
