"""A self-test of FlexAttention on the user's device, made once per process and kind of call.

The user's own compiler and driver build the kernels of FlexAttention. So the kernels are tried before `auto` hands them
a kind of call. They compute the output and the gradients of a small example, with two documents, padding, a sliding
window and more than one block. The reference engine computes the same in float64. If the kernels cannot be compiled,
or their numbers differ, a warning says so and the next engine is taken. A kind that passed is not tried again by other
processes with the same device and versions: its name is kept in a file in the folder of Hugging Face (`HF_HOME`).

A separate thread computes the example, so that gradient mode, autocast and checkpointing hooks of the user's call do
not affect it.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.forms import Bias, ClippedVectors, Content, Factors, Form, Ranges, Slopes
from ..core.positions import Positions, pack, unpack
from ..core.version import VERSION
from . import reference

logger = logging.getLogger(__name__)

LENGTH = 300
"""Tokens of the example: two blocks of queries and part of a third."""

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest error relative to the largest number of a tensor, by dtype. Products of float32 may be computed in TF32."""

FORMS: Mapping[str, Callable[[Tensor, Tensor], Form]] = {
    "added": lambda table, _: Bias(lambda distance: table[:, distance], table.device),
    "rescaled": lambda table, _: Factors(lambda distance: table[:, distance], table.device, relu=True),
    "clipped": lambda table, values: ClippedVectors(table[..., values.shape[-1] :], table[..., : values.shape[-1]]),
    "turned": lambda *_: Ranges((40,)),
    "sloped": lambda table, _: Slopes(table[:, 0].detach().abs()),
    "kept": lambda *_: Content(),
}
"""`Kind.change` -> function of a random table, and of values, that returns the form to try."""

COMPARED = ("the output", *(f"the gradient of the {name}" for name in ("query", "key", "value", "table")))
"""What is compared. Without gradients only the output is."""

HOME = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
PASSED = HOME / "hf_posenc" / "flex_attention_passed.txt"
"""File of the kinds that passed, a line each."""


@dataclass(frozen=True)
class Kind:
    """A kind of call, with kernels of its own.

    Attributes:
        change: how scores are changed, see `flex.CHANGES`.
        dtype: of queries and keys.
        size: D.
        values: V.
        grouped: whether query heads share keys.
        capped: whether scores have a soft cap.
        aligned: whether distances are those of slots.
        gradients: whether gradients are taken.
        device: device of queries and keys.
    """

    change: str
    dtype: torch.dtype
    size: int
    values: int
    grouped: bool
    capped: bool
    aligned: bool
    gradients: bool
    device: torch.device


Attend = Callable[..., tuple[Tensor, Tensor | None]]
"""A call, and `kernel_options` -> its output (B, Q, H, V), and its weights or None."""

SMALL = {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 1}
"""Options for kernels that do not fit the device's shared memory."""

OPTIONS: Mapping[bool, tuple[Mapping[str, Any], ...]] = {
    False: ({}, SMALL),
    True: ({"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2}, SMALL),
}
"""Whether scores look numbers up -> options of kernels, tried in turn. Triton keeps such tiles in shared memory."""

LOOKED_UP = ("added", "rescaled")
"""Changes of scores that look numbers up for each pair."""

_LOCK = threading.Lock()

FOUND: dict[Kind, int | str] = {}
"""What the process has tried -> the number of the options that passed, or the fault that was found."""


def options(kind: Kind) -> Mapping[str, Any]:
    """Return the options with which a kind passed; the first ones if it was not tried."""
    number, choices = FOUND.get(kind), OPTIONS[kind.change in LOOKED_UP]
    return choices[number if isinstance(number, int) else 0]


def fault(kind: Kind, attend: Attend) -> str | None:
    """Return why an engine must not compute calls of a kind, or None if it passes its self-test. A fault warns once.

    Args:
        kind: kind of the call.
        attend: computes a call.
    """
    with _LOCK:  # one thread tries a kind, others wait for what it finds
        if kind not in FOUND:
            if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "its self-test had not run before this CUDA graph was captured"
            FOUND[kind] = _try(kind, attend)
        found = FOUND[kind]
    return found if isinstance(found, str) else None


def _try(kind: Kind, attend: Attend) -> int | str:
    """Return the number of the first options that pass, which a file may say, or the fault of the last ones."""
    logger.warning(
        "FlexAttention compiles kernels for %s scores, %s and heads of %d on %s, once: 10 to 40 seconds",
        *(kind.change, kind.dtype, kind.size, kind.device),
    )
    kept, finding = _passed(), None
    lines = [f"{_line(kind)} {number}" for number in range(2)]
    for line in kept.intersection(lines):
        return lines.index(line)
    for number, line in enumerate(lines):
        one = partial(attend, kernel_options=OPTIONS[kind.change in LOOKED_UP][number])
        with ThreadPoolExecutor(1) as thread:
            finding = thread.submit(_compare, kind, one).result()
        if finding is None:
            if kind.device.type == "cuda":
                _keep(line)
            return number
    warnings.warn(
        f"FlexAttention on {kind.device} {finding}, with {kind.change} scores, {kind.dtype} and heads of {kind.size}. "
        "Another engine computes such calls, exactly but slower; which_engine(...) names it.",
        stacklevel=4,
    )
    return str(finding)


def _line(kind: Kind) -> str:
    """Return the line of the file for a kind, without the number of its options: what its kernels depend on."""
    if kind.device.type != "cuda":
        return ""
    device = torch.cuda.get_device_name(kind.device)
    return f"{device} torch {torch.__version__} CUDA {torch.version.cuda} hf_posenc {VERSION} {kind}"


def _passed() -> frozenset[str]:
    try:
        return frozenset(PASSED.read_text(encoding="utf-8").splitlines())
    except OSError:  # there is none yet, or it cannot be read: the test is made again
        return frozenset()


def _keep(line: str) -> None:
    try:
        PASSED.parent.mkdir(parents=True, exist_ok=True)
        with PASSED.open("a", encoding="utf-8") as file:  # short lines of several processes are appended whole
            file.write(line + "\n")
    except OSError:  # a folder that cannot be written: the next process makes the test again
        logger.info("the self-test of FlexAttention cannot be kept in %s", PASSED)


def _compare(kind: Kind, attend: Callable[[Call], Any]) -> str | None:
    try:
        if kind.device.type == "cuda":
            torch.cuda.set_device(kind.device)  # each thread has its own current device
        found = _results(kind, attend)
        wanted = _results(kind, reference.attend, torch.float64)
    except Exception as error:  # whatever compilers, drivers and devices may come up with
        return f"failed its self-test ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    for name, actual, expected in zip(COMPARED, found, wanted, strict=False):
        error_size = ((actual.double() - expected).abs().max() / expected.abs().max()).item()
        if not error_size <= TOLERANCE[kind.dtype]:  # NaN as well
            return f"failed its self-test ({name} is off by {error_size:.1e} of its largest number)"
    return None


def _results(
    kind: Kind, attend: Callable[[Call], tuple[Tensor, Tensor | None]], dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the example's output, and its gradients if the kind takes any. The example is the same every time.

    Args:
        kind: kind of the call.
        attend: computes the call.
        dtype: dtype to which queries, keys, values and the table are converted; None leaves them as they are.
    """
    heads, key_heads, positions = 4, 2 if kind.grouped else 4, _positions(kind.device, aligned=kind.aligned)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(kind.device, kind.dtype)

    size = kind.size * (2 if kind.change == "turned" else 1)  # two variants side by side
    sizes = ((heads, size), (key_heads, size), (key_heads, kind.values))
    leaves = [random(2, each, LENGTH, size) for each, size in sizes]
    shape = (17, kind.values + size) if kind.change == "clipped" else (heads, 2 * LENGTH)
    leaves.append(random(*shape).float())
    weight = random(2, LENGTH, heads, kind.values) * positions.query_valid[:, :, None, None]
    with torch.set_grad_enabled(kind.gradients):
        query, key, value, table = (each.requires_grad_(kind.gradients).to(dtype or each.dtype) for each in leaves)
        form, softcap = FORMS[kind.change](table, value), 2.0 if kind.capped else None
        output, _ = attend(Call(query, key, value, positions, scaling=0.2, softcap=softcap, form=form))
        weighted = output * weight
        used = leaves[:3] if kind.change in ("sloped", "kept", "turned") else leaves
        gradients = torch.autograd.grad(weighted.sum(), used) if kind.gradients else ()
    return [weighted.detach(), *gradients]


def _positions(device: torch.device, *, aligned: bool) -> Positions:
    """Return positions with two documents, a sliding window, and left padding unless they are to be aligned."""
    index = torch.arange(LENGTH, device=device)[None]
    padding = 0 if aligned else 40
    segment, valid = (index >= 170).int(), index >= padding
    restarted = (index - padding - (170 - padding) * segment).clamp(min=0)
    tokens = {"positions": restarted, "valid": valid, "segment": segment}
    both: dict[str, Any] = {f"{side}_{name}": each for name, each in tokens.items() for side in ("query", "key")}
    return unpack(pack(index, index, **both, window=100, aligned=aligned), LENGTH)
