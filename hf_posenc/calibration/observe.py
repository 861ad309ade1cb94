"""Record the arguments of layers and of their attention, and compute scores from these, a few queries at a time.

No tensor of queries times keys stays in memory. A few rows of scores are computed at a time, and computed again for
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..attention_call import Call
from ..checkpoints.config import stock_config
from ..checkpoints.model_classes import model_class
from ..errors import UnsupportedModelError
from ..families.own_attention import Stock
from ..forms import Content
from ..live.base_model import BaseModel
from ..live.our_attention import AttendThroughUs
from ..live.undo import SetClass, Undo
from ..live.watch import LayerCall, recorded
from ..modules import owner_of
from ..patching.changes import place
from ..patching.plan import Plan

SCORES_AT_ONCE = 2**20
"""Largest number of scores that are computed at once, counted over batch and heads."""


@dataclass(frozen=True)
class Rows:
    """Some rows of attention scores.

    Attributes:
        scores: (B, H, R, L) float32 or float64, invisible keys at the dtype's minimum.
        visible: (B, H, R, L) bool.
        sinks: (H,) or None.
    """

    scores: Tensor
    visible: Tensor
    sinks: Tensor | None

    @cached_property
    def log_weights(self) -> Tensor:
        """Return the logarithms of the attention weights, (B, H, R, L), or (B, H, R, L + 1) with sinks."""
        return self._with_sinks.log_softmax(-1)

    @cached_property
    def weights(self) -> Tensor:
        """Return the attention weights, of the shape of `log_weights`."""
        return self._with_sinks.softmax(-1)

    @property
    def _with_sinks(self) -> Tensor:
        if self.sinks is None:
            return self.scores
        sinks = self.sinks.to(self.scores.dtype)[:, None, None].expand(*self.scores.shape[:-1], 1)
        return torch.cat([self.scores, sinks], -1)

    def confined(self, visible: Tensor) -> Rows:
        """Return the same rows with more keys masked. With a scheme's window it gives the base's attention within it.

        Args:
            visible: (B|1, 1|H, R, L) bool, False for the keys to mask.
        """
        if visible.shape == self.visible.shape and visible.equal(self.visible):
            return self
        scores = self.scores.masked_fill(~visible, torch.finfo(self.scores.dtype).min)
        return replace(self, scores=scores, visible=self.visible & visible)


def parts(call: Call) -> Iterator[slice]:
    """Split the queries of a call into parts with at most `SCORES_AT_ONCE` scores."""
    batch, heads, queries, _ = call.query.shape
    rows = max(1, min(queries, SCORES_AT_ONCE // (batch * heads * call.key.shape[2])))
    for start in range(0, queries, rows):
        yield slice(start, min(start + rows, queries))


def summed(call: Call, quantity: Callable[[slice], Tensor]) -> Tensor:
    """Sum a quantity over all parts of the queries. If there are several parts, the backward pass recomputes them.

    Args:
        call: the call whose queries are split, see `parts`.
        quantity: part of the queries -> its quantity.
    """
    pieces = list(parts(call))
    total = call.query.new_zeros((), dtype=torch.float32)
    for part in pieces:
        total = total + (quantity(part) if len(pieces) == 1 else checkpoint(quantity, part, use_reentrant=False))
    return total


def with_table(call: Call) -> Call:
    """Return a call whose form has its table computed, once for all parts of the queries."""
    return call if call.form is None else replace(call, form=call.form.with_table(call.key.shape[2]))


def rows_of(call: Call, part: slice, *, content: bool = False) -> Rows:
    """Return the scores of some queries.

    Args:
        call: a call with its module and form.
        part: slice of the queries.
        content: return `q . k` alone, without the scheme.
    """
    wide = _queries(call, part)
    scores = wide.positions.mask(Content().scores(wide) if content else wide.scores())
    # A key is visible if its score is not masked. Positions alone do not say it: a scheme's heads may have windows.
    return Rows(scores, scores > torch.finfo(scores.dtype).min / 2, wide.sinks)


def _queries(call: Call, part: slice) -> Call:
    """Return the call for some queries and the keys up to the last of them, in at least float32, see `Call.widened`."""
    keys = slice(0, part.stop)  # queries and keys are the same tokens, and later keys are invisible
    return call.cut(part, keys).widened()


class _StopForward(BaseException):
    """Carry the call of an attention out of a running forward pass, and stop it."""

    def __init__(self, call: Call) -> None:
        self.call = call


def _with_form(module: nn.Module, call: Call) -> Call:
    """Return a call, completed with the module that computes its scores and the form of that module."""
    owner = owner_of(module)
    return replace(call, module=owner, form=owner.form(call.query))


@contextmanager
def attending(model: PreTrainedModel, base: BaseModel) -> Iterator[None]:
    """Route all attention of a model, patched or stock, through the attention function of this package."""
    undo = Undo()
    try:
        if base.hides_attention:  # a patch without schemes makes the calls visible and keeps the base's positions
            undo.apply(*place(Plan(replace(base, keeps_table=base.has_table), (), "auto")).pending)
            if base.positions_in_mask:
                decoder = base.model.base_model
                undo.apply(SetClass(decoder, model_class(type(decoder), stock_config(decoder.config))))
        undo.apply(AttendThroughUs(base))
        yield
    finally:
        undo.roll_back()


@dataclass(frozen=True)
class Observed:
    """The calls of one layer and of its attention.

    Attributes:
        layer: arguments of the decoder layer.
        call: the call of its attention.
    """

    layer: LayerCall
    call: Call


@torch.no_grad()
def observe(model: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> dict[int, Observed]:
    """Run a model and return layer index -> the recorded calls of this layer.

    Args:
        model: a patched or stock model, in evaluation mode.
        tokens: (B, T) documents without padding.
        layers: indices of the layers to record; all must have attention.
    """
    base = BaseModel.of(model)
    calls: dict[int, Call] = {}

    def record(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            calls[index] = _with_form(module, args[0])

        return hook

    with attending(model, base), ExitStack() as hooks:
        for index in layers:
            module: Any = base.modules.attention_of[index].posenc
            hooks.callback(module.register_forward_pre_hook(record(index)).remove)
        entered = hooks.enter_context(recorded(base.modules.layers))
        model.base_model(tokens, use_cache=False)
    return {index: Observed(entered[index], calls[index]) for index in layers}


@torch.no_grad()
def observe_again(model: PreTrainedModel, layers: Mapping[int, LayerCall]) -> dict[int, Observed]:
    """Return what `observe` returns, from the calls of the layers in an earlier pass within `attending`.

    Only the queries, keys and values of each layer are computed, because the hidden states are known.

    Args:
        model: a patched or stock model, in evaluation mode.
        layers: layer index -> its call.
    """
    base = BaseModel.of(model)
    with attending(model, base):
        return {
            index: Observed(
                each,
                attention_call(base.modules.layers[index], base.modules.attention_of[index], each.hidden_states, each),
            )
            for index, each in layers.items()
        }


def attention_call(layer: nn.Module, attention: Stock, hidden_states: Tensor, arguments: LayerCall) -> Call:
    """Return the call of a layer's attention on some hidden states, with gradients if they are enabled.

    Args:
        layer: a decoder layer of a model within `attending`.
        attention: the attention of this layer.
        hidden_states: (B, T, E) input of the layer.
        arguments: arguments of the layer besides the hidden states.
    """

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _StopForward(_with_form(module, args[0]))

    handle = attention.posenc.register_forward_pre_hook(hook)
    try:
        layer(hidden_states, *arguments.args, **arguments.kwargs)
    except _StopForward as stop:
        return stop.call
    finally:
        handle.remove()
    raise UnsupportedModelError(f"{type(layer).__name__} never called its attention")
