"""The base class of engines. An engine computes calls of attention, or says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.forms import Form, is_one_of
from ..core.positions import DensePositions, Positions


class Engine:
    """Computes calls of attention.

    Attributes:
        name: the value of `patch_model(..., attention=name)` that chooses it.
        forms: the forms that it takes. None means every scheme, also one without a form.
        wrong_form: reason for refusing a scheme of another form.
        floors: dtype -> scores per head (Q times L) below which `auto` skips the engine, because the next one is
            faster. The key None stands for any other dtype.
        few_kernels: whether it launches fewer kernels than the next one, so that on CUDA no size is too small for it.
        traced: whether torch.compile can trace it.
        sinks: whether it takes calls with attention sinks.
        token_bias: whether it takes calls with forget gates, biases of keys or a bias of the base.
        weight_changes: whether it takes calls whose weights are something else than the softmax of scores.
        real: whether it takes positions that are real numbers.
        value_sizes: whether it takes values whose size differs from that of queries and keys. Otherwise smaller
            values are padded with zeros.
    """

    name: ClassVar[str]
    traced: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    token_bias: ClassVar[bool] = False
    weight_changes: ClassVar[bool] = False
    real: ClassVar[bool] = False
    value_sizes: ClassVar[bool] = False
    few_kernels: ClassVar[bool] = False
    forms: ClassVar[tuple[type[Form], ...] | None] = None
    wrong_form: ClassVar[str]
    floors: Mapping[torch.dtype | None, int]

    def __init__(self, floors: Mapping[torch.dtype | None, int] | None = None) -> None:
        """Set the measured sizes.

        Args:
            floors: see the class.
        """
        self.floors = floors or {}

    def considered(self, call: Call) -> bool:
        """Return whether `auto` considers this engine for a call. If not, the reason of its choice leaves it out."""
        return True

    def floor(self, call: Call) -> int:
        """Return the scores per head below which `auto` skips the engine."""
        if self.few_kernels and call.query.is_cuda:
            return 0
        return self.floors.get(call.query.dtype, self.floors.get(None, 0))

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        return self.why_not_form(call)

    def why_not_form(self, call: Call) -> str | None:
        """Return why the engine does not take the scheme's form, or None if it does."""
        return None if self.forms is None or is_one_of(call.form, self.forms) else self.wrong_form

    def refusal(self, call: Call) -> str | None:
        """Return why the engine refuses a call, for `why_not` or what the flags say; None if it computes it."""
        if call.sinks is not None and not self.sinks:
            return "the model has attention sinks, which this engine does not compute"
        if call.has_token_bias and not self.token_bias:
            return "the layer adds forget gates or a bias of the base to scores, which this engine does not compute"
        if call.changes_weights and not self.weight_changes:
            return "the layer has functions of its scores or weights, which this engine does not compute"
        if call.positions.real and not self.real:
            return "the positions are real numbers, and this engine counts whole distances"
        size, values = call.query.shape[-1], call.value.shape[-1]
        if values != size and not self.value_sizes:
            if values > size:
                return f"it takes values no larger than queries and keys; here they have {values} and not {size}"
            if call.form is not None and call.form.value_table is not None:
                return f"the scheme adds vectors to values, which have {values} dimensions where queries have {size}"
        return self.why_not(call)

    def distrust(self, call: Call) -> str | None:
        """Return why `auto` does not rely on the engine for a call that it can carry, or None if it does."""
        return None

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Compute a call that the engine does not refuse.

        Returns:
            output (B, Q, H, V) in the query's dtype, and the weights (B, H, Q, L) or None.
        """
        raise NotImplementedError(type(self).__name__)


def why_not_in_blocks(call: Call, *, traced: bool = False) -> str | None:
    """Return why a call cannot be computed block by block, without the weights, or None if it can.

    Args:
        call: the call.
        traced: whether torch.compile can trace the computation.
    """
    if torch.compiler.is_compiling() and not traced:
        return "torch.compile traces the reference engine"
    if call.weights:
        return "attention weights were asked for, which only the reference engine has"
    if isinstance(call.positions, DensePositions):
        return "the mask is given pair by pair"
    return None


def why_not_kernel(call: Call, device: str, *dtypes: torch.dtype) -> str | None:
    """Return why a kernel for a type of device, and for some dtypes, cannot carry a call, or None if it can."""
    query = call.query
    if query.device.type != device:
        return f"it is written for {device.upper()}, the tensors are on {query.device.type}"
    if query.dtype not in dtypes:
        return f"the kernel takes {', '.join(str(each).removeprefix('torch.') for each in dtypes)}, not {query.dtype}"
    return "attention dropout needs the weights" if call.dropout > 0 else None


def why_not_near_keys(call: Call, *, traced: bool = False) -> str | None:
    """Return why a call cannot be computed from near keys alone, as `why_not_in_blocks` does, or None if it can."""
    if (reason := why_not_in_blocks(call, traced=traced)) is not None:
        return reason
    if isinstance(call.positions, Positions) and call.positions.key_kept is not None:
        return "the first tokens stay visible outside the window, and it computes near keys only"
    return None
