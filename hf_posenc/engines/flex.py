"""CUDA: torch's FlexAttention with the scheme in `score_mod` and blocks of the mask built on the device. O(L) memory.

A score `s` at distance `d` is changed in one of three ways. The function does not depend on sizes, so a scheme compiles
to one kernel per dtype and phase (with gradients or without), not one per call:

- linear: `s - m_h d`, one multiplication, for slopes that are not learned (ALiBi).
- table: `s + b_h(d)` or `f_h(d) s`. The table (H, distances) is computed outside the kernel (learned slopes, ALiBi with
  a window per head, T5, KERPLE, DA-Transformer), and gradients flow through it.
- labelled: `s + c q_i . a_min(d, m)`, with `c` the factor of the scores. The products (B, H, Q, m + 1) are computed
  outside the kernel (Shaw, keys only).

FlexAttention sums the gradients of tables by atomic addition. They are right, but not the same bits twice, so calls
under `torch.use_deterministic_algorithms` are refused. FlexAttention allows score_mod to read each table
only once.

Visibility comes from the compact channel. A block of 128 queries and 128 keys is skipped, computed with the mask, or
computed without it. The smallest and largest index, segment and position of the block decide. So the mask needs
(Q / 128)(L / 128) numbers, not one per pair of tokens, and to build it never waits for the device.

With a linear bias, learned or not, blocks out of reach are skipped as well. The scores of row `i` are bounded by
`s_ij <= a_i = scaling |q_i| max_(j <= i) |k_j|`. Fewer than L of its keys are at distances of at least `w`. Divided by
the weight of key `i`, their weights sum to

    sum exp(a_i - m d) / exp(s_ii) <= L exp(a_i - s_ii - m w),

which is below `epsilon` where `w >= (a_i - s_ii + ln(L / epsilon)) / m`. The bound of `banded` counts distances. This
one counts keys, and so also holds for position_ids that repeat or leave gaps.

A call with a table waits for the device once, to read the length of the table. The linear way needs no length.

The kernels are compiled by torch.compile with `fullgraph=True`. More than `GRAPHS` of them is an error, never a silent
change to uncompiled attention, which would need Q x L numbers. `TORCH_LOGS=recompiles` reports each one.

Accuracy class: flash attention in the dtype of the inputs, scores and tables in float32. It is tested on CPUs against
the reference engine, and on the user's device by `selftest` before `auto` takes it. Nothing was measured on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..attention_call import Call
from ..forms import Bias, ClippedVectors, Factors, Form, Slopes, for_form
from ..positions import Positions
from . import selftest
from .banded import EPSILON
from .base import Engine, why_not_near_keys

BLOCK = 128
"""Queries and keys per block."""

GRAPHS = 64
"""Kernels that may be compiled, counting each scheme, dtype, phase and kind of shape."""

SMALLEST_HEAD = 16
"""Smallest head size that the Triton kernel takes."""

INVISIBLE = torch.iinfo(torch.int32).min
"""Segment of padding keys. No query is in it."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch row, head, query slot, key slot) -> changed score."""


# -------------------------------------------------------------------------------------------------------- the scores


def _capped(score: Tensor, h: Tensor, caps: Tensor | None) -> Tensor:
    return score if caps is None else caps[h] * torch.tanh(score / caps[h])


def linear(slopes: Tensor, query_positions: Tensor, key_positions: Tensor, caps: Tensor | None) -> ScoreMod:
    """Return the ScoreMod that computes `cap(s) - m_h d`.

    `m` are the slopes, (H,) float32. Positions are (B, Q) and (B, L), caps (H,).
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (query_positions[b, i] - key_positions[b, j]).clamp(min=0)
        return _capped(score, h, caps) - slopes[h] * distance

    return score_mod


def added(table: Tensor, query_positions: Tensor, key_positions: Tensor, caps: Tensor | None) -> ScoreMod:
    """Return the ScoreMod that computes `cap(s) + b_h(d)`. The table has `b`, (H, distances) float32."""
    last = table.shape[1] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Masked pairs are evaluated too. Their distances are clamped, so that they stay inside the table.
        distance = (query_positions[b, i] - key_positions[b, j]).clamp(min=0, max=last)
        return _capped(score, h, caps) + table[h, distance]

    return score_mod


def rescaled(
    table: Tensor, query_positions: Tensor, key_positions: Tensor, caps: Tensor | None, *, relu: bool
) -> ScoreMod:
    """Return the ScoreMod that computes `relu(cap(s)) f_h(d)`, or `cap(s) f_h(d)` without `relu`.

    The table has `f`, (H, distances) float32.
    """
    last = table.shape[1] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (query_positions[b, i] - key_positions[b, j]).clamp(min=0, max=last)
        content = _capped(score, h, caps)
        return (content.relu() if relu else content) * table[h, distance]

    return score_mod


def labelled(by_label: Tensor, query_positions: Tensor, key_positions: Tensor, caps: Tensor | None) -> ScoreMod:
    """Return the ScoreMod that computes `cap(s + by_label[b, h, i, min(d, m)])`.

    The label of a pair is its distance, at most `m`. `by_label` has the product of each query with the vector of each
    label, (B, H, Q, m + 1) float32.
    """
    last = by_label.shape[3] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        label = (query_positions[b, i] - key_positions[b, j]).clamp(min=0, max=last)
        return _capped(score + by_label[b, h, i, label], h, caps)

    return score_mod


@dataclass(frozen=True)
class Modifier:
    """How FlexAttention modifies the scores for a form.

    Attributes:
        kind: name of the modification. The self-test tries every kind once.
        make: returns the `ScoreMod`, from the result of `operand`, the positions of queries and keys, and the caps.
        operand: returns the slopes, table or products. Arguments: the queries, a function that returns the number of
            distances (calling it may wait for the device), and the factor of the scores.
        slopes: (H,) slopes of a bias that is linear in the distance, or None.
        on_cpu: whether torch can also compile it for a CPU.
    """

    kind: str
    make: Callable[[Tensor, Tensor, Tensor, Tensor | None], ScoreMod]
    operand: Callable[[Tensor, Callable[[], int], float], Tensor]
    slopes: Tensor | None = None
    on_cpu: bool = True


def _slopes(form: Slopes) -> Modifier:
    if form.windows is not None or (form.slopes.requires_grad and torch.is_grad_enabled()):
        return replace(_table("added", added, form), slopes=form.slopes)
    return Modifier("linear", linear, lambda *_: form.slopes.float().contiguous(), form.slopes)


def _factors(form: Factors) -> Modifier:
    kind = "rescaled relu" if form.relu else "rescaled"
    return _table(kind, functools.partial(rescaled, relu=form.relu), form)


def _clipped_vectors(form: ClippedVectors) -> Modifier:
    def operand(query: Tensor, _: Callable[[], int], scaling: float) -> Tensor:
        # `form.keys` is (m + 1, D) or (H, m + 1, D). The products are float32, because they are scores.
        return query.float() @ form.keys.float().mT * scaling

    return Modifier("labelled", labelled, operand, on_cpu=False)


def _table(kind: str, make: Callable[..., ScoreMod], form: Bias | Slopes | Factors) -> Modifier:
    return Modifier(kind, make, lambda query, count, scaling: form.table(count()).float().contiguous())


MODIFIERS: Mapping[type[Form], Callable[[Any], Modifier]] = {
    Bias: lambda form: _table("added", added, form),
    Slopes: _slopes,
    Factors: _factors,
    ClippedVectors: _clipped_vectors,
}
"""Form -> function that returns its modifier."""


def modifier_of(form: Form) -> Modifier:
    """Return how FlexAttention modifies the scores for a form."""
    return for_form(MODIFIERS, form)(form)


def score_mod(form: Form, query: Tensor, positions: Positions, scaling: float, softcap: float | None) -> ScoreMod:
    """Return the function by which FlexAttention changes a score.

    Args:
        form: a form that `why_not` does not refuse.
        query: (B, H, Q, D).
        positions: positions of the queries and keys.
        scaling: factor of the scores.
        softcap: cap on the scores, or None.
    """
    # These are copies, because compiling for a CPU does not take views that overlap themselves or each other.
    query_positions, key_positions = (
        each.expand(query.shape[0], -1).clone(memory_format=torch.contiguous_format)
        for each in (positions.query_positions, positions.key_positions)
    )
    # The caps are a tensor. torch.compile makes a number a symbol when it sees a second value, and score_mod takes no
    # symbols.
    caps = None if softcap is None else torch.full(query.shape[1:2], softcap, device=query.device)
    modifier = modifier_of(form)
    operand = modifier.operand(query, lambda: table_length(positions), scaling)
    return modifier.make(operand, query_positions, key_positions, caps)


def table_length(positions: Positions) -> int:
    """Return the number of distances that a table needs, rounded up to a power of two.

    So few shapes exist, and few kernels are compiled.
    """
    furthest = int(positions.query_positions.max() - positions.key_positions.min())
    return max(BLOCK, 1 << max(furthest, 0).bit_length())


# --------------------------------------------------------------------------------------------------------- the masks


@dataclass(frozen=True)
class _Tokens:
    """Index, position and segment of queries or of keys, (B, T) int32. Padding is in the segment INVISIBLE."""

    index: Tensor
    position: Tensor
    segment: Tensor


def block_mask(positions: Positions, batch_size: int, reach: Tensor | None = None) -> BlockMask:
    """Build the mask on the device, O((Q / 128) (L / 128)) numbers, without waiting for the device.

    Args:
        positions: positions of the queries and keys.
        batch_size: B of the queries. The lists of blocks have B rows only if the rows of the batch differ.
        reach: (H, blocks of queries) distance from which on keys provably do not count, see `reaches`; or None.
    """
    p = positions
    per_token = (p.query_index, p.query_positions, p.query_segment, p.key_index, p.key_positions, p.key_segment)
    batch = max(each.shape[0] for each in (*per_token, p.key_valid, p.window))
    expanded = [each.expand(batch, -1).int() for each in per_token]
    queries, keys = _Tokens(*expanded[:3]), _Tokens(*expanded[3:])
    keys = replace(keys, segment=torch.where(p.key_valid, keys.segment, INVISIBLE))
    window = p.window.expand(batch, 1).int()

    computed, full = (each[:, None] for each in _blocks(queries, keys, window))
    if reach is not None:
        nearest = _extremes(queries.position)[0][..., :, None] - _extremes(keys.position)[1][..., None, :]
        computed = computed & (nearest[:, None] < reach[None, :, :, None])
    full = full & computed
    shape = (1 if reach is None else reach.shape[0], *computed.shape[2:])
    partial = _ordered((computed & ~full).expand(batch, *shape))
    whole = _ordered(full.expand(batch, *shape))

    query_index, key_index, query_segment, key_segment, windows = (
        each.expand(batch_size, -1).clone(memory_format=torch.contiguous_format)
        for each in (queries.index, keys.index, queries.segment, keys.segment, window)
    )

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        lag = query_index[b, i] - key_index[b, j]
        return (lag >= 0) & (lag < windows[b, 0]) & (query_segment[b, i] == key_segment[b, j])

    lengths = (queries.index.shape[1], keys.index.shape[1])
    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths)


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


def reaches(
    query: Tensor, key: Tensor, slopes: Tensor, positions: Positions, scaling: float, epsilon: float = EPSILON
) -> Tensor:
    """Return, for each block of queries, the distance from which on keys do not count.

    The bound is at the top of this file.

    Args:
        query: (B, H, Q, D).
        key: (B, K, Q, D), keys of the same tokens: key `i` belongs to query `i`.
        slopes: (H,).
        positions: positions of the queries and keys.
        scaling: factor of the scores.
        epsilon: largest share of a row's weight that may be left out.

    Returns:
        (H, blocks of queries) float32; infinite where the bound does not hold.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    own_products = torch.einsum("bkgqd,bkqd->bkgq", query.float().view(batch, -1, groups, length, size), key.float())
    key_norms = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32).cummax(-1).values
    query_norms = torch.linalg.vector_norm(query, dim=-1, dtype=torch.float32)
    # With scores of a few hundred and a slope of 2^-8, float32 still leaves several digits. The factor 1 + 2^-12 covers
    # the rounding of products.
    products = query_norms.view(own_products.shape) * key_norms[:, :, None]
    excess = scaling * (products * (1.0 + 2.0**-12) - own_products)
    excess = _extremes(excess.view(batch * heads, length))[1].view(batch, heads, -1).amax(0)
    reach = (excess + math.log(length / epsilon)) / slopes.float()[:, None]
    p = positions
    # Queries and keys are slots of the same tokens, and each visible key sits at or before its query.
    same_tokens = (p.query_index == p.key_index).all() & (p.query_positions == p.key_positions).all()
    same_tokens = (
        same_tokens & (p.query_segment == p.key_segment).all() & (p.key_index[:, 1:] > p.key_index[:, :-1]).all()
    )
    bound_holds = (slopes[:, None] > 0) & (scaling > 0) & ~reach.isnan() & same_tokens
    return torch.where(bound_holds, reach, math.inf)


# --------------------------------------------------------------------------------------------------------- the engine


@functools.cache
def compiled(device: str) -> Callable[..., Any]:
    """Return FlexAttention, compiled on its first call. It raises rather than run uncompiled.

    Args:
        device: `cuda` or `cpu`. On a CPU every shape gets its own kernel. Otherwise sizes are symbols, and with more
            than ten of them torch writes C++ that does not compile: it replaces a symbol's name inside longer names.
    """
    return torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)


def attend(
    form: Form,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Positions,
    *,
    scaling: float,
    softcap: float | None = None,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Attend by FlexAttention.

    Args:
        form: a form that `why_not` does not refuse.
        query: (B, H, Q, D).
        key: (B, K, L, D), K divides H.
        value: (B, K, L, D).
        positions: positions of these queries and keys.
        scaling: factor of the scores.
        softcap: cap on the scores, or None.
        kernel: function to call in place of the compiled FlexAttention.

    Returns:
        (B, H, Q, D) in the query's dtype; rows that see no key are 0.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)  # under autocast they may differ
    modified = score_mod(form, query, positions, scaling, softcap)
    with torch.no_grad():
        reach = None
        if (slopes := modifier_of(form).slopes) is not None and softcap is None and query.shape[2] == key.shape[2]:
            reach = reaches(query, key, slopes, positions, scaling)
        mask = block_mask(positions, query.shape[0], reach)
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        output: Tensor = (kernel or compiled(query.device.type))(
            query,
            key,
            value,
            score_mod=modified,
            block_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output


def why_not(form: Form, query: Tensor) -> str | None:
    """Return why the kernel cannot take these queries with this form, or None if it can.

    Args:
        form: one of the forms of `MODIFIERS`.
        query: (B, H, Q, D).
    """
    if query.device.type not in ("cuda", "cpu"):
        return f"it is written for CUDA, the tensors are on {query.device.type}"
    if query.device.type == "cpu" and torch.is_grad_enabled():
        return "FlexAttention has no backward on a CPU; use torch.no_grad()"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the kernel takes float32, bfloat16 and float16, not {query.dtype}"
    if query.device.type == "cuda" and query.shape[-1] < SMALLEST_HEAD:
        return f"the kernel takes heads of at least {SMALLEST_HEAD}, not {query.shape[-1]}"
    if query.device.type == "cpu" and not modifier_of(form).on_cpu:
        return "on a CPU, torch cannot compile products of queries with labels once lengths vary"
    if form.value_table is not None:
        return "it has no vectors for values: they need the attention weights, which the kernel does not return"
    if torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled():
        if modifier_of(form).operand(query[:, :, :1], lambda: 1, 1.0).requires_grad:
            return "it sums gradients of tables by atomic addition, and deterministic algorithms were asked for"
    return None


def kind_of(call: Call) -> selftest.Kind:
    """Return the kind under which the self-test tries a call. The engine must not refuse the call."""
    return selftest.Kind(
        form=modifier_of(call.form).kind,
        dtype=call.query.dtype,
        size=call.query.shape[3],
        grouped=call.groups > 1,
        capped=call.softcap is not None,
        gradients=torch.is_grad_enabled(),
        device=call.query.device,
    )


class Flex(Engine):
    """FlexAttention on CUDA, for tables by distance (ALiBi, DA-Transformer) and for Shaw without vectors for values.

    It takes a soft cap, and every mask but a user's 4-D one. It takes no dropout and returns no weights. O(L) memory.
    On a CPU it runs only if asked for, with a C++ compiler and without gradients.
    """

    name = "flex"
    forms = tuple(MODIFIERS)
    wrong_form = "the scheme is neither a table of distances nor vectors of clipped distances for keys"

    def considered(self, call: Call) -> bool:
        """Return whether the call is on CUDA."""
        return call.query.device.type == "cuda"

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        if (reason := why_not_near_keys(call)) is not None:
            return reason
        if call.dropout > 0:
            return "attention dropout needs the weights"
        return self.why_not_form(call) or why_not(call.form, call.query)

    def distrust(self, call: Call) -> str | None:
        """Return the fault that the self-test found on this device, or None if the device passed.

        Every kind of call is tried once per process: `selftest.tried` keeps the results.
        """
        return selftest.fault(kind_of(call), self.attend)

    def attend(self, call: Call) -> tuple[Tensor, None]:
        """Compute a call, see `Engine.attend`."""
        assert isinstance(call.positions, Positions)
        with torch.autocast(call.query.device.type, enabled=False):
            output = attend(
                call.form,
                call.query,
                call.key,
                call.value,
                call.positions,
                scaling=call.scaling,
                softcap=call.softcap,
            )
        return output.transpose(1, 2), None
