"""Whether FlexAttention computes what it should on this device, tried once per engine and kind of call.

Its kernels are made on the user's machine, by the compiler, the driver and the device that are there. So before `auto`
hands a kind of call to them they compute a small example of it (grouped heads, two documents, padding, a sliding
window, more than one block), outputs and gradients, which is compared with attention written out in float64. If they
cannot be compiled, or give other numbers, a warning says so and the next engine is taken.

The example is computed in a thread of its own, where gradient modes, autocast and the hooks of activation checkpointing
of the call that gave rise to it do not reach.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..forms import Bias, ClippedVectors, Factors, Form, Slopes
from ..positions import Positions, pack, unpack
from . import flex

LENGTH = 300
"""Tokens of the example: two blocks of queries and part of a third."""

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest error, relative to the largest number of each tensor; in float32 products may be of the TF32 format."""

SCALING = 0.2
SOFTCAP = 2.0


@dataclass(frozen=True)
class Kind:
    """What kernels are compiled for.

    Attributes:
        form: `linear`, `added`, `rescaled`, `rescaled and clipped` or `labelled`, see `flex`.
        dtype: of queries and keys.
        size: D.
        grouped: whether query heads share keys.
        capped: whether scores have a soft cap.
        gradients: whether gradients are taken.
        device: where.
    """

    form: str
    dtype: torch.dtype
    size: int
    grouped: bool
    capped: bool
    gradients: bool
    device: torch.device


def kind_of(form: Form, query: Tensor, key: Tensor, softcap: float | None) -> Kind:
    """Return what kind of call this is, of a form that `flex.why_not` has nothing against.

    Args:
        form: how the scores depend on distance.
        query: (B, H, Q, D).
        key: (B, K, L, D).
        softcap: cap on the scores or None.
    """
    gradients = torch.is_grad_enabled()
    if isinstance(form, ClippedVectors):
        kind = "labelled"
    elif flex.is_linear(form):
        kind = "linear"
    elif isinstance(form, Factors):
        kind = "rescaled and clipped" if form.relu else "rescaled"
    else:
        kind = "added"
    grouped = query.shape[1] != key.shape[1]
    return Kind(kind, query.dtype, query.shape[3], grouped, softcap is not None, gradients, query.device)


def fault(kind: Kind, tried: dict[Kind, str | None]) -> str | None:
    """Return why FlexAttention must not compute such calls here, or None if it passes its self-test; warns of a fault.

    Args:
        kind: of the call.
        tried: what was found before, by kind; gets what is found now.
    """
    if kind in tried:
        return tried[kind]
    if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "it was not tried before this CUDA graph was captured"
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(_compare, kind).result()
    if found is not None:
        warnings.warn(
            f"FlexAttention failed its self-test on {kind.device} ({kind.form}, {kind.dtype}, heads of {kind.size}): "
            f"{found}. Another engine computes such calls, exactly but more slowly; which_engine(...) names it.",
            stacklevel=2,
        )
        found = f"it failed its self-test on this device: {found}"
    tried[kind] = found
    return found


def _compare(kind: Kind) -> str | None:
    try:
        if kind.device.type == "cuda":
            torch.cuda.set_device(kind.device)  # of this thread
        actual = _results(kind, _by_flex)
    except Exception as error:  # whatever compilers, drivers and devices may come up with
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    for name, expected in _results(kind, _written_out).items():
        off = ((actual[name].double() - expected).abs().max() / expected.abs().max()).item()
        if not off <= TOLERANCE[kind.dtype]:  # NaN as well
            return f"{name} is off by {off:.1e} of its largest number"
    return None


def _example(form: str, table: Tensor) -> Form:
    """Return a form of the kind with these numbers."""
    if form == "labelled":
        return ClippedVectors(table, None)
    if form == "linear":
        return Slopes(table[:, 0])
    if form == "added":
        return Bias(lambda distance: table[:, distance], table.device)
    return Factors(lambda distance: table[:, distance], table.device, form.endswith("clipped"))


Compute = Callable[[Kind, Tensor, Tensor, Tensor, Tensor, Positions], Tensor]


def _results(kind: Kind, compute: Compute) -> dict[str, Tensor]:
    """Return the output, and the gradients if the kind has any, of the same example each time."""
    heads, shared = 4, 2 if kind.grouped else 4
    positions = _positions(kind.device)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(kind.device, kind.dtype)

    tensors = {
        "query": random(2, heads, LENGTH, kind.size),
        "key": random(2, shared, LENGTH, kind.size),
        "value": random(2, shared, LENGTH, kind.size),
    }
    weight = random(2, heads, LENGTH, kind.size) * positions.query_valid[:, None, :, None]
    # Slopes, biases or factors of 2 * LENGTH distances, or vectors of 17 labels: float32, as parameters are.
    sizes = (17, kind.size) if kind.form == "labelled" else (heads, 2 * LENGTH)
    table = random(*sizes).float()
    if kind.form == "linear":
        table = table.abs() / 10
    tensors["table"] = table
    with torch.set_grad_enabled(kind.gradients):
        leaves = {
            name: each.requires_grad_(kind.gradients and not (name == "table" and kind.form == "linear"))
            for name, each in tensors.items()
        }
        q, k, v, table = leaves.values()
        output = compute(kind, q, k, v, table, positions) * positions.query_valid[:, None, :, None]
        learned = {name: each for name, each in leaves.items() if each.requires_grad}
        results = {"the output": output.detach()}
        if kind.gradients:
            found = torch.autograd.grad((output * weight).sum(), list(learned.values()))
            results |= {f"the gradient of the {name}": each for name, each in zip(learned, found, strict=True)}
    return results


def _positions(device: torch.device) -> Positions:
    """Return two rows: two documents; and one behind padding. Both with a sliding window."""
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


def _by_flex(kind: Kind, q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Positions) -> Tensor:
    softcap = SOFTCAP if kind.capped else None
    return flex.attend(_example(kind.form, table), q, k, v, positions, scaling=SCALING, softcap=softcap)


def _written_out(kind: Kind, q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Positions) -> Tensor:
    """Return softmax attention in float64, by the definitions of the forms."""
    q, k, v, table = (each.double() for each in (q, k, v, table))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.mT * SCALING
    distance = positions.distance().long().clamp(min=0)  # (B, 1, Q, L)
    if kind.form == "labelled":
        by_label = q @ table.mT * SCALING
        labels = distance.clamp(max=len(table) - 1).expand(scores.shape)
        scores = scores + by_label.gather(-1, labels)
    if kind.capped:
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    if kind.form == "linear":
        scores = scores - table[:, :1, None] * distance
    elif kind.form != "labelled":
        at_distance = table[:, distance[:, 0]].transpose(0, 1)  # (B, H, Q, L)
        content = scores.relu() if kind.form == "rescaled and clipped" else scores
        scores = content + at_distance if kind.form == "added" else content * at_distance
    hidden = ~positions.visible() & positions.query_valid[:, None, :, None]  # padding sees all: its rows are not read
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
