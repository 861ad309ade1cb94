"""What an engine is: something that computes calls of attention, and says of a call why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..call import Call
from ..forms import ClippedVectors, Form
from ..positions import DensePositions


class Engine:
    """Computes calls of attention.

    Attributes:
        name: under which it can be asked for, `patch_model(..., attention=name)`.
        forms: what it takes; None means every scheme, also one without a form.
        floors: scores per head (Q times L) below which `auto` passes it over because the next engine is faster, by
            dtype (None: any other).
        traced: whether torch.compile can trace it.
        sinks: whether it takes calls with attention sinks.
        value_sizes: whether it takes values of another size than queries and keys. If not, smaller ones reach it with
            zeros behind them.
    """

    name: ClassVar[str]
    traced: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    value_sizes: ClassVar[bool] = False
    forms: ClassVar[tuple[type[Form], ...] | None] = None
    floors: Mapping[torch.dtype | None, int]

    def __init__(self, floors: Mapping[torch.dtype | None, int] | None = None) -> None:
        """Set what is measured.

        Args:
            floors: see the class.
        """
        self.floors = floors or {}

    def considered(self, call: Call) -> bool:
        """Return whether `auto` thinks of this engine at all for such a call; if not it needs no words."""
        return True

    def floor(self, call: Call) -> int:
        """Return the scores per head below which `auto` passes the engine over."""
        return self.floors.get(call.query.dtype, self.floors.get(None, 0))

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        return None

    def refusal(self, call: Call) -> str | None:
        """Return why the engine does not get a call, or None if it may: what it lacks by its class, or `why_not`."""
        if call.sinks is not None and not self.sinks:
            return "the model has attention sinks, which it does not know"
        size, values = call.query.shape[-1], call.value.shape[-1]
        if values != size and not self.value_sizes:
            if values > size:
                return f"its values have the size of queries and keys, here they have {values} and not {size}"
            if isinstance(call.form, ClippedVectors) and call.form.values is not None:
                return (
                    f"the scheme adds vectors to values, which have {values} dimensions and not {size} as queries have"
                )
        return self.why_not(call)

    def distrust(self, call: Call) -> str | None:
        """Return why `auto` does not rely on the engine for a call that it can carry, or None if it does."""
        return None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Compute a call that there is nothing against.

        Returns:
            output (B, Q, H, V) in the query's dtype, and the weights (B, H, Q, L) or None.
        """
        raise NotImplementedError(type(self).__name__)


def why_not_in_blocks(call: Call) -> str | None:
    """Return why a call cannot be computed a block at a time, which hides the weights, or None if it can."""
    if torch.compiler.is_compiling():
        return "torch.compile traces the reference engine"
    if call.weights:
        return "attention weights were asked for, which only the reference engine has"
    if isinstance(call.positions, DensePositions):
        return "the mask is given pair by pair"
    return None
