"""A self-test of FlexAttention on the user's device, made once per process and kind of call.

The user's own compiler and driver build the kernels of FlexAttention. So the kernels are tried before `auto` hands them
a kind of call. They compute the output and the gradients of a small example, with two documents, padding, a sliding
window and more than one block. The reference engine computes the same in float64. If the kernels cannot be compiled,
or their numbers differ, a warning says so and the next engine is taken.

A separate thread computes the example, so that gradient mode, autocast and checkpointing hooks of the user's call do
not affect it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.forms import Bias, ClippedVectors, Factors, Form
from ..core.positions import Positions, pack, unpack
from . import reference

LENGTH = 300
"""Tokens of the example: two blocks of queries and part of a third."""

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest error relative to the largest number of a tensor, by dtype. Products of float32 may be computed in TF32."""

FORMS: Mapping[str, Callable[[Tensor], Form]] = {
    "added": lambda table: Bias(lambda distance: table[:, distance], table.device),
    "rescaled": lambda table: Factors(lambda distance: table[:, distance], table.device, relu=True),
    "labelled": lambda table: ClippedVectors(table, None),
}
"""`Kind.change` -> function of a random table that returns the form to try."""

COMPARED = ("the output", *(f"the gradient of the {name}" for name in ("query", "key", "value", "table")))
"""What is compared. Without gradients only the output is."""


@dataclass(frozen=True)
class Kind:
    """A kind of call, with kernels of its own.

    Attributes:
        change: how scores are changed, see `flex.CHANGES`.
        dtype: of queries and keys.
        size: D.
        grouped: whether query heads share keys.
        capped: whether scores have a soft cap.
        gradients: whether gradients are taken.
        device: device of queries and keys.
    """

    change: str
    dtype: torch.dtype
    size: int
    grouped: bool
    capped: bool
    gradients: bool
    device: torch.device


Attend = Callable[[Call], tuple[Tensor, Tensor | None]]
"""A call -> its output (B, Q, H, V), and its weights or None."""

FOUND: dict[Kind, str | None] = {}
"""What the process has tried -> the fault that was found, or None."""


def fault(kind: Kind, attend: Attend) -> str | None:
    """Return why an engine must not compute calls of a kind, or None if it passes its self-test. A fault warns once.

    Args:
        kind: kind of the call.
        attend: the engine's `attend`.
    """
    if kind not in FOUND:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "its self-test had not run before this CUDA graph was captured"
        with ThreadPoolExecutor(1) as thread:
            FOUND[kind] = finding = thread.submit(_compare, kind, attend).result()
        if finding is not None:
            warnings.warn(
                f"FlexAttention on {kind.device} {finding}, with {kind.change} scores, {kind.dtype} and heads of "
                f"{kind.size}. Another engine computes such calls, exactly but slower; which_engine(...) names it.",
                stacklevel=3,
            )
    return FOUND[kind]


def _compare(kind: Kind, attend: Attend) -> str | None:
    try:
        if kind.device.type == "cuda":
            torch.cuda.set_device(kind.device)  # each thread has its own current device
        found = _results(kind, attend)
    except Exception as error:  # whatever compilers, drivers and devices may come up with
        return f"failed its self-test ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    for name, actual, expected in zip(COMPARED, found, _results(kind, reference.attend, torch.float64), strict=False):
        error_size = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
        if not error_size <= TOLERANCE[kind.dtype]:  # NaN as well
            return f"failed its self-test ({name} is off by {error_size:.1e} of its largest number)"
    return None


def _results(kind: Kind, attend: Attend, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the example's output, and its gradients if the kind takes any. The example is the same every time.

    Args:
        kind: kind of the call.
        attend: computes the call.
        dtype: dtype to which queries, keys, values and the table are converted; None leaves them as they are.
    """
    heads, key_heads, positions = 4, 2 if kind.grouped else 4, _positions(kind.device)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(kind.device, kind.dtype)

    leaves = [random(2, each, LENGTH, kind.size) for each in (heads, key_heads, key_heads)]
    leaves.append(random(*((17, kind.size) if kind.change == "labelled" else (heads, 2 * LENGTH))).float())
    weight = random(2, LENGTH, heads, kind.size) * positions.query_valid[:, :, None, None]
    with torch.set_grad_enabled(kind.gradients):
        query, key, value, table = (each.requires_grad_(kind.gradients).to(dtype or each.dtype) for each in leaves)
        form, softcap = FORMS[kind.change](table), 2.0 if kind.capped else None
        output, _ = attend(Call(query, key, value, positions, scaling=0.2, softcap=softcap, form=form))
        weighted = output * weight
        gradients = torch.autograd.grad(weighted.sum(), leaves) if kind.gradients else ()
    return [weighted.detach(), *gradients]


def _positions(device: torch.device) -> Positions:
    """Return positions with left padding, two documents and a sliding window."""
    index = torch.arange(LENGTH, device=device)[None]
    segment, valid = (index >= 170).int(), index >= 40
    tokens = {"positions": (index - 40 - 130 * segment).clamp(min=0), "valid": valid, "segment": segment}
    both: dict[str, Any] = {f"{side}_{name}": each for name, each in tokens.items() for side in ("query", "key")}
    return unpack(pack(index, index, **both, window=100), LENGTH)
