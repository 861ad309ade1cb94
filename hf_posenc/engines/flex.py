"""CUDA: torch's FlexAttention with the scheme in `score_mod` and blocks of the mask built on the device. O(L) memory.

A score `s` at distance `d` is changed in one of four ways. The function does not depend on sizes, so a scheme compiles
to one kernel per dtype and phase (with gradients or without), not one per call:

- kept: `s`. Attention without positions, or over wider heads (`wide`), with masks of some shape.
- sloped: `s - m_h d` (ALiBi). Nothing is looked up.
- added: `s + b_h(d)` (T5, KERPLE, slopes that are trained), and rescaled: `f_h(d) s` (DA-Transformer). The table
  (H, distances) is computed outside the kernel, and gradients flow through it.

Where distances are those of slots (`Positions.aligned`), `d` is `i - j`. Elsewhere the kernel looks two positions up
for every score, which costs more than the attention.

FlexAttention sums the gradients of tables by atomic addition. They are right, but not the same bits twice, so calls
under `torch.use_deterministic_algorithms` are refused. FlexAttention allows score_mod to read each table
only once.

Visibility comes from the compact channel. A block of 128 queries and 128 keys is skipped, computed with the mask, or
computed without it. The smallest and largest index, segment and position of the block decide. So the mask needs
(Q / 128)(L / 128) numbers, not one per pair of tokens, and to build it never waits for the device. All layers of a
forward pass share it.

A call with a table and other positions waits for the device once, to read the length of the table.

The kernels are compiled by torch.compile with `fullgraph=True`. More than `GRAPHS` of them is an error, never a silent
change to uncompiled attention, which would need Q x L numbers. `TORCH_LOGS=recompiles` reports each one. While torch
compiles a whole model, the attention of tables is part of its graph.

Accuracy class: flash attention in the dtype of the inputs, scores and tables in float32. It is tested on CPUs against
the reference engine, and on the user's device by `selftest` before `auto` takes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..core.attention_call import Call
from ..core.forms import Bias, ClippedVectors, Content, Factors, Form, Ranges, Slopes, for_form, steps
from ..core.positions import NO_WINDOW, DensePositions, Positions
from . import selftest
from .base import Engine, why_not_kernel, why_not_near_keys

DEVICE = "cuda"
"""Type of the devices that the engine takes calls on."""

BLOCK = 128
"""Queries and keys per block."""

GRAPHS = 64
"""Kernels that may be compiled, counting each scheme, dtype, phase and kind of shape."""

SCORES = 1024**2
"""Scores per head (Q times L) from which `auto` takes the engine. Its kernels take seconds to compile."""

GAPPED_TABLE = "position_ids with gaps cannot be compiled with a scheme that has a number for each distance"

SMALLEST_HEAD = 16
"""Smallest head size that the Triton kernel takes."""

INVISIBLE = torch.iinfo(torch.int32).min
"""Segment of padding keys. No query is in it."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch row, head, query slot, key slot) -> changed score."""


# -------------------------------------------------------------------------------------------------------- the scores


CHANGES: Mapping[type[Form], str] = {
    Content: "kept",
    Bias: "added",
    Slopes: "sloped",
    Factors: "rescaled",
    Ranges: "turned",
    ClippedVectors: "clipped",
}
"""Form -> how its scores are changed, see the top of this file, and of `near_far` for the last two."""


PLAIN = ("kept", "turned", "clipped")
"""Changes that the function of scores has no part in, but for a soft cap."""


def change_of(form: Any) -> str:
    """Return how the scores of a form are changed. Slopes that are trained, or have windows, are a table."""
    change = for_form(CHANGES, form)
    is_line = (
        change == "sloped" and form.windows is None and not (form.slopes.requires_grad and torch.is_grad_enabled())
    )
    return change if is_line or change != "sloped" else "added"


def operand(call: Call) -> Tensor:
    """Return what a score is changed by in float32: slopes (H,), or a table by distance."""
    form: Any = call.form
    change = change_of(form)
    if change in PLAIN:
        return call.query.new_empty(0, dtype=torch.float32)
    if change == "sloped":
        return form.slopes.float()
    return form.curve(_table_length(call)).float().contiguous()


def _table_length(call: Call) -> int:
    """Return how many distances a table needs."""
    positions, count = call.positions, call.key.shape[2]
    if not positions.aligned:

        def furthest() -> Tensor:
            return (positions.query_positions.amax(-1) - positions.key_positions.amin(-1)).amax()

        if torch.compiler.is_compiling():
            torch._assert_async(furthest() < count, GAPPED_TABLE)
        else:
            count = positions.once("table length", lambda: int(furthest()) + 1)
    # A power of two, so that few shapes exist, and few kernels are compiled.
    return count if torch.compiler.is_compiling() else max(BLOCK, 1 << max(count - 1, 0).bit_length())


def score_mod(call: Call) -> ScoreMod | None:
    """Return the function by which FlexAttention changes a score, or None if it changes nothing."""
    batch, positions = call.query.shape[0], call.positions
    # The caps are a tensor. torch.compile makes a number a symbol when it sees a second value, and score_mod takes no
    # symbols.
    caps = None if call.softcap is None else torch.full(call.query.shape[1:2], call.softcap, device=call.query.device)
    change, numbers = change_of(call.form), operand(call)
    relu = change == "rescaled" and call.form.relu
    last = numbers.shape[-1] - 1

    def difference(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i - j

    if not positions.aligned:
        # These are copies, because a kernel takes no views that overlap themselves or each other.
        query_positions, key_positions = positions.once(
            ("copies", batch),
            lambda: tuple(
                each.expand(batch, -1).clone(memory_format=torch.contiguous_format)
                for each in (positions.query_positions, positions.key_positions)
            ),
        )

        def difference(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return query_positions[b, i] - key_positions[b, j]

    def distance(b: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Masked pairs are evaluated too. Their distances are clamped, so that they stay inside the table.
        return difference(b, i, j).clamp(min=0, max=last)

    def capped(score: Tensor, h: Tensor) -> Tensor:
        return score if caps is None else caps[h] * torch.tanh(score / caps[h])

    def kept(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return capped(score, h)

    def sloped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return capped(score, h) - numbers[h] * difference(b, i, j)

    def added(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return capped(score, h) + numbers[h, distance(b, i, j)]

    def rescaled(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        content = capped(score, h).relu() if relu else capped(score, h)
        return content * numbers[h, distance(b, i, j)]

    if change in PLAIN:
        return None if caps is None else kept
    return {"sloped": sloped, "added": added, "rescaled": rescaled}[change]


# --------------------------------------------------------------------------------------------------------- the masks


@dataclass(frozen=True)
class _Tokens:
    """Index and segment of queries or of keys, (B, T) int32. Padding is in the segment INVISIBLE."""

    index: Tensor
    segment: Tensor


@dataclass(frozen=True)
class Range:
    """A range of distances: from `low` to below `high`, where `unit` neighbouring positions count as one."""

    low: int = -NO_WINDOW
    high: int = NO_WINDOW
    unit: int = 1


def block_mask(positions: Positions, batch_size: int, within: Range | None = None) -> BlockMask:
    """Build the mask on the device, O((Q / 128) (L / 128)) numbers, without waiting for the device.

    Args:
        positions: positions of the queries and keys.
        batch_size: B of the queries. The lists of blocks have B rows only if the rows of the batch differ.
        within: the distances of the pairs that are shown; None means all.
    """
    p = positions
    per_token = [p.query_index, p.query_segment, p.key_index, p.key_segment]
    if within is not None:
        per_token += steps(p, within.unit)
    batch = max(each.shape[0] for each in (*per_token, p.key_valid, p.window))
    expanded = [each.expand(batch, -1).int() for each in per_token]
    queries, keys = _Tokens(*expanded[:2]), _Tokens(*expanded[2:4])
    keys = replace(keys, segment=torch.where(p.key_valid, keys.segment, INVISIBLE))
    window = p.window.expand(batch, 1).int()

    computed, full = (each[:, None] for each in _blocks(queries, keys, window))
    if within is not None:
        nearest, furthest = _differences(*expanded[4:])
        computed &= (furthest >= within.low) & (nearest < within.high)
        full &= (nearest >= within.low) & (furthest < within.high)
    partial, whole = _ordered(computed & ~full), _ordered(full & computed)

    bounds = [] if within is None else [window.new_full((1, 1), each) for each in (within.low, within.high)]
    query_index, key_index, query_segment, key_segment, windows, *others = (
        each.expand(batch_size, -1).clone(memory_format=torch.contiguous_format)
        for each in (queries.index, keys.index, queries.segment, keys.segment, window, *expanded[4:], *bounds)
    )

    aligned = p.aligned  # not `p`, whose memo will hold the mask

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        lag = i - j if aligned else query_index[b, i] - key_index[b, j]
        return (lag >= 0) & (lag < windows[b, 0]) & (query_segment[b, i] == key_segment[b, j])

    shown = mask_mod
    if within is not None:
        query_steps, key_steps, low, high = others

        def shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = query_steps[b, i] - key_steps[b, j]
            return mask_mod(b, h, i, j) & (distance >= low[b, 0]) & (distance < high[b, 0])

    lengths = (queries.index.shape[1], keys.index.shape[1])
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=shown, seq_lengths=lengths)


def _differences(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest difference of numbers in each block, both (B, 1, blocks, blocks)."""
    (q_low, q_high), (k_low, k_high) = _extremes(queries), _extremes(keys)
    return (q_low[..., None] - k_high[:, None])[:, None], (q_high[..., None] - k_low[:, None])[:, None]


def _blocks(queries: _Tokens, keys: _Tokens, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return which blocks hold a visible pair, and which hold visible pairs only, both bool (B, blocks, blocks)."""
    q_low, q_high = _extremes(queries.index)
    k_low, k_high = _extremes(keys.index)
    q_first, q_last = _extremes(queries.segment)
    # Padding belongs to no segment: the range of segments leaves it out, and a block with padding needs the mask.
    lowest, k_last = _extremes(keys.segment)
    padded = lowest == INVISIBLE
    k_first, _ = _extremes(keys.segment.masked_fill(keys.segment == INVISIBLE, torch.iinfo(torch.int32).max))
    rows, columns = (..., slice(None), None), (..., None, slice(None))
    visible = (q_high[rows] >= k_low[columns]) & (q_low[rows] - k_high[columns] < window[:, :, None])
    visible &= (q_first[rows] <= k_last[columns]) & (k_first[columns] <= q_last[rows])
    full = (q_low[rows] >= k_high[columns]) & (q_high[rows] - k_low[columns] < window[:, :, None])
    same_segment = (q_first == q_last)[rows] & (k_first == k_last)[columns] & (q_first[rows] == k_first[columns])
    full &= same_segment & ~padded[columns]
    if queries.index.shape[1] % BLOCK:
        full[:, -1] = False
    if keys.index.shape[1] % BLOCK:
        full[:, :, -1] = False
    return visible, full


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest of the values (B, T) in each block, both (B, blocks)."""
    missing = -values.shape[1] % BLOCK
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], 1)
    blocks = values.view(values.shape[0], -1, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many key blocks are chosen for each query block, and its key blocks in order, chosen ones first."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int().contiguous()


# --------------------------------------------------------------------------------------------------------- the engine


@functools.cache
def compiled() -> Callable[..., Any]:
    """Return FlexAttention, compiled on its first call. It raises rather than run uncompiled."""
    return torch.compile(flex_attention, fullgraph=True)


class Flex(Engine):
    """FlexAttention on CUDA, for tables by distance (ALiBi, DA-Transformer) and for masks of some shape.

    It takes a soft cap, and every mask but a user's 4-D one. It takes no dropout and returns no weights. O(L) memory.
    """

    name = "flex"
    traced = True
    value_sizes = True
    forms: ClassVar[tuple[type[Form], ...]] = (Content, Bias, Slopes, Factors)
    wrong_form = "the scheme is no table of distances"

    def considered(self, call: Call) -> bool:
        """Return whether the call is on CUDA."""
        return call.query.device.type == DEVICE

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        reason = why_not_near_keys(call, traced=True) or self.why_not_form(call)
        if reason := reason or why_not_kernel(call, DEVICE, torch.float32, torch.bfloat16, torch.float16):
            return reason
        if (size := min(_size(call), call.value.shape[-1])) < SMALLEST_HEAD:
            return f"the kernel takes heads of at least {SMALLEST_HEAD}, not {size}"
        if torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled() and operand(call).requires_grad:
            return "it sums gradients of tables by atomic addition, and deterministic algorithms were asked for"
        return None

    def distrust(self, call: Call) -> str | None:
        """Return the fault that the self-test found on this device, or None if the device passed."""
        if call.query.shape[2] < BLOCK:
            return "few queries have kernels of their own, which its self-test does not try"
        return selftest.fault(self.kind(call), self.compute)

    def is_better(self, call: Call) -> bool:
        """Return whether `auto` prefers the engine for a call that other kernels compute with a mask."""
        positions = call.positions
        if not call.query.is_cuda or torch.compiler.is_compiling() or isinstance(positions, DensePositions):
            return False
        if positions.plain or call.query.shape[2] * call.key.shape[2] < SCORES:
            return False
        return self.refusal(call) is None and self.distrust(call) is None

    def attend(self, call: Call) -> tuple[Tensor, None]:
        """Compute a call, see `Engine.attend`. Rows that see no key are 0."""
        if torch.compiler.is_compiling():
            return self.compute(call, selftest.OPTIONS[change_of(call.form) in selftest.LOOKED_UP][0])
        return self.compute(call, selftest.options(self.kind(call)))

    def kind(self, call: Call) -> selftest.Kind:
        """Return the kind of a call, which has kernels of its own."""
        value, capped = call.value, call.softcap is not None
        what = (change_of(call.form), value.dtype, _size(call), value.shape[3], call.groups > 1, capped)
        return selftest.Kind(*what, call.positions.aligned, torch.is_grad_enabled(), value.device)

    def compute(self, call: Call, kernel_options: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Compute a call with some options of the kernel."""
        with torch.autocast(call.query.device.type, enabled=False):
            return by_kernel(call, kernel_options).transpose(1, 2).to(call.query.dtype), None


def _size(call: Call) -> int:
    """Return the size of a head, of which queries may hold several side by side."""
    return call.query.shape[-1] // (1 + len(call.form.edges))


def by_kernel(call: Call, kernel_options: Mapping[str, Any], within: Range | None = None, **options: Any) -> Any:
    """Return the output (B, H, Q, V) of FlexAttention, or what its options ask for.

    Args:
        call: the call, with one variant of queries and keys.
        kernel_options: options of the kernel.
        within: the distances that are seen; None means all.
        **options: other arguments of `flex_attention`.
    """
    value, positions = call.value, call.positions
    assert isinstance(positions, Positions)
    # They differ under autocast, and where a scheme rotates in float32.
    query, key = call.query.to(value.dtype), call.key.to(value.dtype)
    with torch.no_grad():
        name = ("block mask", len(query), within)
        options["block_mask"] = positions.once(name, lambda: block_mask(positions, len(query), within))
    options |= {"score_mod": score_mod(call), "scale": call.scaling, "kernel_options": dict(kernel_options) or None}
    options["enable_gqa"] = call.groups != 1
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, **options)
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        return compiled()(query, key, value, **options)
