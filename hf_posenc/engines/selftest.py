"""A self-test of FlexAttention on the user's device, made once per engine and kind of call.

The user's own compiler and driver build the kernels of FlexAttention. So the kernels are tried before `auto` hands them
a kind of call. They compute the output and the gradients of a small example, with two documents, padding, a sliding
window and more than one block. The reference engine computes the same in float64. If the kernels cannot be compiled,
or their numbers differ, a warning says so and the next engine is taken.

A separate thread computes the example, so that gradient mode, autocast and checkpointing hooks of the user's call do
not affect it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_call import Call
from ..forms import Bias, ClippedVectors, Factors, Form, Slopes
from ..positions import Positions, pack, unpack
from . import reference

LENGTH = 300
"""Tokens of the example: two blocks of queries and part of a third."""

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest error relative to the largest number of a tensor, by dtype. Products of float32 may be computed in TF32."""

SCALING = 0.2
"""Factor of the example's scores."""

SOFTCAP = 2.0
"""Cap on the example's scores, where the kind has one."""


@dataclass(frozen=True)
class Kind:
    """A kind of call, with kernels of its own.

    Attributes:
        form: `linear`, `added`, `rescaled`, `rescaled relu` or `labelled`, see `flex.Modifier`.
        dtype: of queries and keys.
        size: D.
        grouped: whether query heads share keys.
        capped: whether scores have a soft cap.
        gradients: whether gradients are taken.
        device: device of queries and keys.
    """

    form: str
    dtype: torch.dtype
    size: int
    grouped: bool
    capped: bool
    gradients: bool
    device: torch.device


Attend = Callable[[Call], tuple[Tensor, Tensor | None]]
"""A call -> its output (B, Q, H, V), and its weights or None."""


@dataclass(frozen=True)
class Example:
    """A form of the self-test, with a random table.

    Attributes:
        form: returns the form that has this table.
        labels: the table has vectors of 17 labels, (17, D). Otherwise it has numbers by distance, (H, 2 * LENGTH).
        learned: whether gradients of the table are compared.
    """

    form: Callable[[Tensor], Form]
    labels: bool = False
    learned: bool = True


EXAMPLES = {
    "linear": Example(lambda table: Slopes(table[:, 0].abs() / 10), learned=False),
    "added": Example(lambda table: Bias(lambda distance: table[:, distance], table.device)),
    "rescaled": Example(lambda table: Factors(lambda distance: table[:, distance], table.device, relu=False)),
    "rescaled relu": Example(lambda table: Factors(lambda distance: table[:, distance], table.device, relu=True)),
    "labelled": Example(lambda table: ClippedVectors(table, None), labels=True),
}
"""`Kind.form` -> the form to try."""


class _Capturing(Exception):
    """Raised when the self-test cannot run, because a CUDA graph is being captured."""


def fault(kind: Kind, attend: Attend) -> str | None:
    """Return why an engine must not compute calls of a kind, or None if it passes its self-test. A fault warns once.

    Args:
        kind: kind of the call.
        attend: the engine's `attend`.
    """
    try:
        return tried(kind, attend)
    except _Capturing:
        return "its self-test had not run before this CUDA graph was captured"


@functools.cache
def tried(kind: Kind, attend: Attend) -> str | None:
    """Try a kind of call, see `fault`. The result is cached for the process, as the compiled kernels are."""
    if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise _Capturing
    with ThreadPoolExecutor(1) as thread:
        finding = thread.submit(_compare, kind, attend).result()
    if finding is None:
        return None
    warnings.warn(
        f"FlexAttention failed its self-test on {kind.device} ({kind.form}, {kind.dtype}, heads of {kind.size}): "
        f"{finding}. Another engine computes such calls, exactly but more slowly; which_engine(...) names it.",
        stacklevel=3,
    )
    return f"it failed its self-test on this device: {finding}"


def _compare(kind: Kind, attend: Attend) -> str | None:
    try:
        if kind.device.type == "cuda":
            torch.cuda.set_device(kind.device)  # each thread has its own current device
        actual = _results(kind, attend)
    except Exception as error:  # whatever compilers, drivers and devices may come up with
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    for name, expected in _results(kind, reference.attend, torch.float64).items():
        error_size = ((actual[name].double() - expected).abs().max() / expected.abs().max()).item()
        if not error_size <= TOLERANCE[kind.dtype]:  # NaN as well
            return f"{name} is off by {error_size:.1e} of its largest number"
    return None


def _results(kind: Kind, attend: Attend, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the example's output, and its gradients if the kind takes any. The example is the same every time.

    Args:
        kind: kind of the call.
        attend: computes the call.
        dtype: dtype to which queries, keys, values and the table are converted; None leaves them as they are.
    """
    example, heads, key_heads = EXAMPLES[kind.form], 4, 2 if kind.grouped else 4
    positions = _positions(kind.device)
    valid = positions.query_valid[:, :, None, None]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(kind.device, kind.dtype)

    tensors = {
        "query": random(2, heads, LENGTH, kind.size),
        "key": random(2, key_heads, LENGTH, kind.size),
        "value": random(2, key_heads, LENGTH, kind.size),
    }
    weight = random(2, heads, LENGTH, kind.size).transpose(1, 2) * valid
    # parameters are float32
    tensors["table"] = random(*((17, kind.size) if example.labels else (heads, 2 * LENGTH))).float()
    with torch.set_grad_enabled(kind.gradients):
        learned = {
            name: each for name, each in tensors.items() if kind.gradients and (name != "table" or example.learned)
        }
        for each in learned.values():
            each.requires_grad_()
        q, k, v, table = (each if dtype is None else each.to(dtype) for each in tensors.values())
        softcap = SOFTCAP if kind.capped else None
        output, _ = attend(Call(q, k, v, positions, scaling=SCALING, softcap=softcap, form=example.form(table)))
        output = output * valid
        results = {"the output": output.detach()}
        if kind.gradients:
            gradients = torch.autograd.grad((output * weight).sum(), list(learned.values()))
            results |= {f"the gradient of the {name}": each for name, each in zip(learned, gradients, strict=True)}
    return results


def _positions(device: torch.device) -> Positions:
    """Return the positions of two rows with a sliding window: one with two documents, one with left padding."""
    index = torch.arange(LENGTH, device=device)[None]
    start = torch.tensor([[0], [40]], device=device)
    valid = index >= start
    segment = ((index >= 170) & (start == 0)).int()
    position = torch.where(segment == 1, index - 170, (index - start).clamp(min=0))
    channel = pack(
        index,
        index,
        query_positions=position,
        key_positions=position,
        query_valid=valid,
        key_valid=valid,
        query_segment=segment,
        key_segment=segment,
        window=200,
    )
    return unpack(channel, LENGTH)
