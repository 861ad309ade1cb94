"""Watch what layers and their attention are called with, and compute scores from it, a few queries at a time.

No tensor of the size queries times keys is kept: a few rows of scores are computed and used, and computed again for a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..attention_call import Call
from ..checkpoints.building import model_class
from ..checkpoints.config import stock_config
from ..engines.chunked import cut
from ..errors import UnsupportedModelError
from ..forms import Content
from ..live.attend import AttendThroughUs
from ..live.base_model import BaseModel
from ..live.undo import SetClass, Undo
from ..live.watch import LayerCall, recorded
from ..modules import owner_of
from ..patching.changes import place
from ..patching.plan import Plan
from ..positions import Positions

SCORES = 2**21
"""Scores that are computed at once, over batch and heads."""


@dataclass(frozen=True)
class Rows:
    """Some rows of attention scores.

    Attributes:
        scores: (B, H, R, L) float32 or float64, invisible keys at the dtype's minimum.
        visible: (B|1, 1|H, R, L) bool.
        distance: (B|1, 1, R, L) integers.
        sinks: (H,) or None.
    """

    scores: Tensor
    visible: Tensor
    distance: Tensor
    sinks: Tensor | None

    def log_weights(self) -> Tensor:
        """Return the logarithms of the attention weights, (B, H, R, L), or (B, H, R, L + 1) with sinks."""
        scores = self.scores
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.log_softmax(-1)

    def confined(self, visible: Tensor) -> Rows:
        """Return the same rows with no other keys than these visible: a base's attention within a scheme's window.

        Args:
            visible: (B|1, 1|H, R, L) bool.
        """
        if visible.shape == self.visible.shape and visible.equal(self.visible):
            return self
        scores = self.scores.masked_fill(~visible, torch.finfo(self.scores.dtype).min)
        return replace(self, scores=scores, visible=self.visible & visible)


def parts(call: Call) -> Iterator[slice]:
    """Split the queries of a call, so that a part has at most `SCORES` scores."""
    batch, heads, queries, _ = call.query.shape
    rows = max(1, min(queries, SCORES // (batch * heads * call.key.shape[2])))
    for start in range(0, queries, rows):
        yield slice(start, min(start + rows, queries))


def summed(call: Call, quantity: Callable[[slice], Tensor]) -> Tensor:
    """Return the sum of a quantity over all parts of the queries; with several, each is computed again for a gradient.

    Args:
        call: a call, see `parts`.
        quantity: returns the quantity of a part.
    """
    pieces = list(parts(call))
    total = call.query.new_zeros((), dtype=torch.float32)
    for part in pieces:
        total = total + (quantity(part) if len(pieces) == 1 else checkpoint(quantity, part, use_reentrant=False))
    return total


def rows_of(call: Call, part: slice, *, content: bool = False) -> Rows:
    """Return the scores of some queries.

    Args:
        call: a call with its module and form.
        part: the queries.
        content: leave out what the scheme does: `q . k` alone.
    """
    wide = _queries(call, part)
    scores = (Content() if content else wide.formula).scores(wide)
    return Rows(wide.positions.mask(scores), wide.visible(), wide.distance(), wide.sinks)


def outputs_of(call: Call, part: slice) -> Tensor:
    """Return the outputs of the heads for some queries, (B, H, R, V) float32 or float64.

    Args:
        call: a call with its module and form.
        part: the queries.
    """
    rows, wide = rows_of(call, part), _queries(call, part)
    weights = rows.log_weights().exp()[..., : rows.scores.shape[-1]]  # without those of sinks, which have no value
    return wide.formula.mix(replace(wide, value=wide.value.to(weights.dtype)), weights)


def _queries(call: Call, part: slice) -> Call:
    """Return the call for some queries, widened as `Call.widened` does."""
    positions = call.positions
    assert isinstance(positions, Positions)
    sub = replace(call, query=call.query[:, :, part], positions=cut(positions, part, slice(0, call.key.shape[2])))
    return sub.widened()


class _Arrived(BaseException):
    """Carries what arrived at a place in a model out of it; the rest of the model is not run."""

    def __init__(self, what: Any) -> None:
        self.what = what


def _complete(module: nn.Module, call: Call) -> Call:
    """Return a call with the module that computes its scores, and its form."""
    owner = owner_of(module)
    return replace(call, module=owner, form=owner.form(call.query))


@contextmanager
def attending(model: PreTrainedModel, base: BaseModel) -> Iterator[None]:
    """Let all attention of a model, also of a stock one, go through the attention function of this package."""
    undo = Undo()
    try:
        if base.hides_attention:  # patched by no scheme: every layer keeps what the base has
            undo.make(*place(Plan(replace(base, keeps_table=base.has_table), (), "auto")).pending)
            if base.positions_in_mask:
                decoder = base.model.base_model
                undo.make(SetClass(decoder, model_class(type(decoder), stock_config(decoder.config))))
        undo.make(AttendThroughUs(base))
        yield
    finally:
        undo.roll_back()


@dataclass(frozen=True)
class Seen:
    """The calls of one layer and of its attention.

    Attributes:
        layer: arguments of the decoder layer.
        call: call of its attention.
    """

    layer: LayerCall
    call: Call


@torch.no_grad()
def observe(model: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> dict[int, Seen]:
    """Run a model and record the calls of some of its layers.

    Args:
        model: patched or stock, in evaluation mode.
        tokens: (B, T), documents without padding.
        layers: indices of layers with attention.
    """
    base = BaseModel.of(model)
    calls: dict[int, Call] = {}

    def record(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            calls[index] = _complete(module, args[0])

        return hook

    with attending(model, base), ExitStack() as hooks:
        for index in layers:
            module: Any = base.found.attention_of[index].posenc
            hooks.callback(module.register_forward_pre_hook(record(index)).remove)
        entered = hooks.enter_context(recorded(base.found.layers))
        model.base_model(tokens, use_cache=False)
    return {index: Seen(entered[index], calls[index]) for index in layers}


def attention_call(layer: nn.Module, attention: Any, hidden_states: Tensor, seen: LayerCall) -> Call:
    """Return the call of a layer's attention on some hidden states, with gradients where they are enabled.

    Args:
        layer: a decoder layer of a model that attends through this package.
        attention: its attention.
        hidden_states: (B, T, E) that enter the layer.
        seen: arguments of the layer beside the hidden states.
    """

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _Arrived(_complete(module, args[0]))

    handle = attention.posenc.register_forward_pre_hook(hook)
    try:
        layer(hidden_states, *seen.args, **seen.kwargs)
    except _Arrived as arrived:
        call: Call = arrived.what
        return call
    finally:
        handle.remove()
    raise UnsupportedModelError(f"{type(layer).__name__} never reached its attention")
