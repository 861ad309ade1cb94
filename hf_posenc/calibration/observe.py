"""Record the arguments of layers and of their attention, and compute scores from these, a few queries at a time.

No tensor of queries times keys stays in memory. A few rows of scores are computed at a time, and computed again for
the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoints.config import stock_config
from ..checkpoints.model_classes import model_class
from ..core.attention_call import Call
from ..core.forms import Content
from ..core.modules import owner_of
from ..families.own_attention import Stock
from ..model.base_model import BaseModel
from ..model.undo import SetClass, Undo
from ..model.watch import LayerCall, caught, recorded
from ..patching.changes import AttendThroughUs, place
from ..patching.plan import Plan

SCORES_AT_ONCE = 2**20
"""Largest number of scores that are computed at once, counted over batch and heads."""


@dataclass(frozen=True)
class Rows:
    """Some rows of attention scores.

    Attributes:
        scores: (B, H, R, L) float32 or float64, invisible keys at the dtype's minimum.
        visible: (B, H, R, L) bool.
        call: the widened call of these rows.
    """

    scores: Tensor
    visible: Tensor
    call: Call

    @cached_property
    def log_weights(self) -> Tensor:
        """Return the logarithms of the attention weights, (B, H, R, L), or (B, H, R, L + 1) with sinks."""
        if not self.call.changes_weights:
            return self.call.final_scores(self.scores).log_softmax(-1)
        # Weights that are no softmax may be 0, or negative: they count as the least number.
        return self.weights.clamp(min=torch.finfo(self.scores.dtype).tiny).log()

    @cached_property
    def weights(self) -> Tensor:
        """Return the attention weights, of the shape of `log_weights`."""
        return self.call.normalise(self.call.final_scores(self.scores))

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
    # Queries and keys are the same tokens, and keys after the last query are invisible.
    wide = call.cut(part, slice(0, part.stop)).widened()
    scores = wide.positions.mask(Content().scores(wide) if content else wide.scores())
    # A key is visible if its score is not masked. Positions alone do not say it: a scheme's heads may have windows.
    return Rows(scores, scores > torch.finfo(scores.dtype).min / 2, wide)


def _with_form(module: nn.Module, call: Call) -> Call:
    """Return a call, completed with the module that computes its scores and the form of that module."""
    owner = owner_of(module)
    return replace(call, module=owner, form=owner.form(call.query))


@contextmanager
def attending(model: PreTrainedModel, base: BaseModel) -> Iterator[None]:
    """Route all attention of a model, patched or stock, through the attention function of this package.

    Raises:
        UnsupportedModelError: if the model attends by a function of its own.
    """
    base.require_equal_attention("observe its scores")
    undo = Undo()
    try:
        if base.hides_attention:  # a patch without schemes makes the calls visible and keeps the base's positions
            undo.apply(*place(Plan(base, (), "auto")).pending)
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

    def record(index: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        calls[index] = _with_form(module, args[0])

    with attending(model, base), ExitStack() as hooks:
        for index in layers:
            module: Any = base.modules.attention_of[index].posenc
            hooks.callback(module.register_forward_pre_hook(partial(record, index)).remove)
        entered = hooks.enter_context(recorded(base.modules.layers))
        model.base_model(tokens, use_cache=False)
    return {index: Observed(entered[index], calls[index]) for index in layers}


def attention_call(layer: nn.Module, attention: Stock, hidden_states: Tensor, arguments: LayerCall) -> Call:
    """Return the call of a layer's attention on some hidden states, with gradients if they are enabled.

    Args:
        layer: a decoder layer of a model within `attending`.
        attention: the attention of this layer.
        hidden_states: (B, T, E) input of the layer.
        arguments: arguments of the layer besides the hidden states.
    """
    module = attention.posenc
    (call, *_), _ = caught(module, lambda: layer(hidden_states, *arguments.args, **arguments.kwargs))
    return _with_form(module, call)
