"""Attention without positions by torch's own kernels, for layers without a scheme on their scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from ..core.attention_call import Call
from ..core.forms import Content
from ..core.positions import DensePositions, Positions, is_tracing
from . import chunked
from .base import Engine
from .flex import Flex
from .spans import Span, spans

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
    """`scaled_dot_product_attention`. O(L) memory, except for a 4-D mask, and compiled calls not plainly causal."""

    name = "sdpa"
    forms = (Content,)
    wrong_form = "it computes attention without positions, and this scheme changes scores"
    traced = True
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
        return None

    def distrust(self, call: Call) -> str | None:
        """Return why FlexAttention is to compute a call, or None."""
        return "its mask has an entry for every score" if Flex().is_better(call) else None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        if isinstance(call.positions, Positions) and call.positions.plain:
            return _attend(call, causal=True), None
        if (documents := _documents(call)) is not None:
            return _by_documents(call, documents), None
        if (rows := _rows(call)) < call.query.shape[2]:
            return chunked.by_rows(call, rows, _attend), None
        return _attend(call), None


def _attend(call: Call, *, causal: bool = False) -> Tensor:
    """Return the kernel's output (B, Q, H, V). It gets a mask if attention is not plainly causal."""
    size, mask = call.value.shape[-1], None if causal else _mask(call)
    key, value = _suited(call, mask)
    options: dict[str, Any] = {"dropout_p": call.dropout, "is_causal": causal, "scale": call.scaling}
    options["enable_gqa"] = bool(call.query.shape[1] != key.shape[1])  # sizes are tensors in torch.jit.trace
    output = torch.nn.functional.scaled_dot_product_attention(call.query, key, value, mask, **options)
    return output[..., :size].transpose(1, 2).to(call.query.dtype).contiguous()


def _suited(call: Call, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return keys and values in a shape that a fast kernel takes: values padded, or keys repeated for their heads.

    For other shapes torch silently computes all scores. Only cuDNN takes values narrower than queries with shared keys.
    """
    key, value, rest = call.key, call.value, call.query.shape[-1] - call.value.shape[-1]
    if not call.query.is_cuda:
        if rest > 0 and value.device.type == "cpu":  # its flash kernel takes one size only
            value = pad(value, (0, rest))
        return key, value
    if torch.compiler.is_compiling():  # which kernels there are is not known
        value = pad(value, (0, max(rest, 0)))
        shared = call.groups > 1 and (mask is not None or call.query.dtype == torch.float32)
        return _repeated(key, call.groups) if shared else key, _repeated(value, call.groups) if shared else value
    for groups in sorted({1, call.groups}):
        for padding in sorted({0, max(rest, 0)}):
            some_key, some_value = _repeated(key, groups), _repeated(pad(value, (0, padding)), groups)
            if _takes(call, some_key, some_value, mask):
                return some_key, some_value
    return key, value


def _takes(call: Call, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch would choose a fast kernel."""
    shared = call.query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(
        call.query, key, value, mask, call.dropout, is_causal=mask is None, scale=call.scaling, enable_gqa=shared
    )
    return bool(chosen != SDPBackend.MATH.value)


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _by_documents(call: Call, documents: list[Span]) -> Tensor:
    """Return the output (B, Q, H, V) of plainly causal attention in each document."""
    everything = slice(None)
    if len(documents) == 1 and documents[0][1] == everything:
        return _attend(call, causal=True)
    output = call.query.new_empty(*call.query.shape[:3], call.value.shape[-1]).transpose(1, 2)
    for rows, tokens, _ in documents:
        query, key, value = (each[rows, :, tokens] for each in (call.query, call.key, call.value))
        output[rows, tokens] = _attend(replace(call, query=query, key=key, value=value), causal=True)
    return output


def _rows(call: Call) -> int:
    """Return how many queries are computed at a time: all of them if their mask is small or a user's 4-D one."""
    positions = call.positions
    if torch.compiler.is_compiling() or isinstance(positions, DensePositions):
        return call.query.shape[2]  # as it is: int() would fix the length of an exported program
    queries, keys = int(call.query.shape[2]), int(call.key.shape[2])  # sizes are tensors in torch.jit.trace
    masks = max(positions.key_valid.shape[0], positions.query_index.shape[0])
    on_cpu = call.query.device.type == "cpu"
    if masks * queries * keys <= (WHOLE if on_cpu else PAIRS_ELSEWHERE):
        return queries
    if not on_cpu:  # reading the window would wait for the device
        return max(16, PAIRS_ELSEWHERE // (masks * keys))
    keys = min(keys, int(positions.window.max()) + ROWS)
    return min(ROWS, max(16, PAIRS // (masks * keys)))


def _mask(call: Call) -> Tensor:
    """Return which keys are visible, bool; or a user's own float mask, which is added to scores."""
    positions = call.positions
    if isinstance(positions, DensePositions) and positions.seen.is_floating_point():
        return positions.seen.to(call.query.dtype)
    return positions.visible()


def _documents(call: Call) -> list[Span] | None:
    """Return the documents of a call whose queries and keys are the same tokens, without padding and window.

    None while torch makes a graph, and on devices other than a CPU, where reading positions would wait for the device.
    """
    positions, length = call.positions, call.query.shape[2]
    if is_tracing() or call.query.device.type != "cpu" or isinstance(positions, DensePositions):
        return None
    if length != call.key.shape[2] or int(positions.window.min()) < length or not bool(positions.key_valid.all()):
        return None  # what padding computes is read where a prompt ends in it
    documents = spans(positions)
    if documents is None or any(queries != keys and queries != slice(None) for _, queries, keys in documents):
        return None
    return documents
