"""CUDA: torch's FlexAttention with the scheme in `score_mod` and blocks of the mask built on the device. O(L) memory.

What a scheme does to a score of distance `d` is one of three forms, each a single function whatever the sizes, so that
a scheme compiles to one kernel per dtype and phase and not one per call:

- linear: `s - m_h d`, one multiplication, for slopes that are not learned (ALiBi);
- table: `s + b_h(d)` or `f_h(d) s`, read from a table (H, distances) that is computed outside the kernel (learned
  slopes; DA-Transformer), and through which gradients reach what it was computed from;
- labels: `s + c q_i . a_min(d, m)`, read from (B, H, Q, m + 1) products that are computed outside (Shaw, keys only).

Gradients of tables are FlexAttention's gradients of captured tensors. They are sums by atomic addition: right, but not
the same bits twice, so calls under `torch.use_deterministic_algorithms` are refused, and FlexAttention allows each
table to be read once in the function, as here.

Visibility comes from the compact channel. A block of 128 queries and 128 keys is skipped, computed with the mask, or
computed without it, by the smallest and largest index, segment and position in it: (Q / 128)(L / 128) numbers, no
number per pair of tokens, no wait for the device. With a linear bias or a learned one, blocks out of reach are
skipped too: if `s_ij <= a_i = scaling |q_i| max_(j <= i) |k_j|`, the keys of row `i` at distances of at least `w`,
fewer than L, weigh

    sum exp(a_i - m d) / exp(s_ii) <= L exp(a_i - s_ii - m w)

of what the row's own key weighs, which is below `epsilon` where `w >= (a_i - s_ii + ln(L / epsilon)) / m`. Unlike the
bound of `banded` this one counts keys and not distances, and so also holds for position_ids that repeat or leave gaps.

Longest distance: tables need one number from the device per call, which is waited for; the linear form does not.

The kernels are compiled by torch.compile with `fullgraph=True`: more than `GRAPHS` of them is an error, never a silent
change to uncompiled attention, which would need Q x L numbers; `TORCH_LOGS=recompiles` reports each one.

Accuracy class: flash attention in the dtype of the inputs, scores and tables in float32. Tested on CPUs against the
reference engine, and on the user's device by `selftest` before it is taken unasked; nothing was measured on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..call import Call
from ..forms import Bias, ClippedVectors, Factors, Form, Slopes
from ..positions import Positions
from .banded import EPSILON
from .base import Engine, why_not_in_blocks

if TYPE_CHECKING:
    from .selftest import Kind

BLOCK = 128
"""Queries and keys per block."""

GRAPHS = 64
"""Kernels that may be compiled, counting each scheme, dtype, phase and kind of shape."""

SMALLEST_HEAD = 16
"""Head sizes below this are not taken by the Triton kernel."""

INVISIBLE = torch.iinfo(torch.int32).min
"""Segment of keys that are padding: no query has it."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex(Engine):
    """ALiBi, DA-Transformer and Shaw without vectors for values, on CUDA; soft cap, every mask but a user's 4-D one.

    On a CPU only if asked for, with a C++ compiler and without gradients. No weights, no dropout. O(L) memory.

    Attributes:
        tried: what the self-test found, by kind of call.
    """

    name = "flex"
    forms = (Bias, Slopes, Factors, ClippedVectors)
    tried: dict[Kind, str | None]

    def __init__(self, floors: Mapping[torch.dtype | None, int] | None = None) -> None:
        """Set what is measured; nothing was tried yet.

        Args:
            floors: see `Engine`.
        """
        super().__init__(floors)
        self.tried = {}

    def considered(self, call: Call) -> bool:
        """Return whether the call is on CUDA."""
        return call.query.device.type == "cuda"

    def why_not(self, call: Call) -> str | None:
        if (reason := why_not_in_blocks(call)) is not None:
            return reason
        if call.dropout > 0:
            return "attention dropout needs the weights"
        return why_not(call.form, call.query)

    def distrust(self, call: Call) -> str | None:
        """Return what the self-test on this device found, or None if it was passed."""
        from . import selftest  # which uses this module

        return selftest.fault(selftest.kind_of(call.form, call.query, call.key, call.softcap), self.tried)

    def attend(self, call: Call) -> tuple[Tensor, None]:
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


def why_not(form: Form | None, query: Tensor) -> str | None:
    """Return why the engine cannot compute a form on these queries, or None if it can.

    Args:
        form: how the scores depend on distance.
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
    if isinstance(form, ClippedVectors):
        if query.device.type == "cpu":
            return "torch cannot compile products per query and label for a CPU once lengths vary"
        if form.values is not None:
            return (
                "it has no vectors for values: how much each label weighs is known to no kernel that hides the weights"
            )
        read = [form.keys, query]
    elif isinstance(form, (Bias, Slopes, Factors)):
        read = [form.table(1)]
    else:
        return "the scheme is neither a table of distances nor vectors of clipped distances for keys"
    if torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled() and any(t.requires_grad for t in read):
        return "it sums gradients of tables by atomic addition, and deterministic algorithms were asked for"
    return None


# -------------------------------------------------------------------------------------------------------- the scores


def _capped(score: Tensor, h: Tensor, caps: Tensor | None) -> Tensor:
    return score if caps is None else caps[h] * torch.tanh(score / caps[h])


def linear(slopes: Tensor, query_place: Tensor, key_place: Tensor, caps: Tensor | None) -> ScoreMod:
    """Return `cap(s) - m_h d`; slopes (H,) float32, places (B, Q) and (B, L)."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (query_place[b, i] - key_place[b, j]).clamp(min=0)
        return _capped(score, h, caps) - slopes[h] * distance

    return score_mod


def added(table: Tensor, query_place: Tensor, key_place: Tensor, caps: Tensor | None) -> ScoreMod:
    """Return `cap(s) + b_h(d)`; table (H, distances) float32."""
    last = table.shape[1] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Masked pairs are evaluated too: their distances are put inside the table.
        distance = (query_place[b, i] - key_place[b, j]).clamp(min=0, max=last)
        return _capped(score, h, caps) + table[h, distance]

    return score_mod


def rescaled(table: Tensor, query_place: Tensor, key_place: Tensor, relu: bool, caps: Tensor | None) -> ScoreMod:
    """Return `relu(cap(s)) f_h(d)`; table (H, distances) float32."""
    last = table.shape[1] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (query_place[b, i] - key_place[b, j]).clamp(min=0, max=last)
        content = _capped(score, h, caps)
        return (content.relu() if relu else content) * table[h, distance]

    return score_mod


def labelled(by_label: Tensor, query_place: Tensor, key_place: Tensor, caps: Tensor | None) -> ScoreMod:
    """Return `cap(s + r(b, h, i, min(d, m)))`; by_label (B, H, Q, m + 1) float32."""
    last = by_label.shape[3] - 1

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        label = (query_place[b, i] - key_place[b, j]).clamp(min=0, max=last)
        return _capped(score + by_label[b, h, i, label], h, caps)

    return score_mod


def score_mod(
    form: Form, query: Tensor, positions: Positions, scaling: float, softcap: float | None = None
) -> ScoreMod:
    """Return what the scheme does to the scores.

    Args:
        form: one that `why_not` has nothing against.
        query: (B, H, Q, D).
        positions: of the queries and keys.
        scaling: factor of the scores.
        softcap: cap on the scores or None.
    """
    batch = query.shape[0]
    # Copies: compiling for a CPU does not take views that overlap themselves or each other.
    query_place, key_place = (
        each.expand(batch, -1).clone(memory_format=torch.contiguous_format)
        for each in (positions.query_positions, positions.key_positions)
    )
    # A tensor, since a number would become a symbol as soon as a second one is seen, which score_mod does not take.
    caps = None if softcap is None else torch.full(query.shape[1:2], softcap, device=query.device)
    if isinstance(form, ClippedVectors):
        # (m + 1, D) or (H, m + 1, D); the products in float32, since they are scores
        return labelled(query.float() @ form.keys.float().mT * scaling, query_place, key_place, caps)
    if is_linear(form):
        return linear(form.slopes.float().contiguous(), query_place, key_place, caps)
    length = longest(positions)
    if isinstance(form, Factors):
        return rescaled(form.table(length).float().contiguous(), query_place, key_place, form.relu, caps)
    assert isinstance(form, (Bias, Slopes))
    return added(form.table(length).float().contiguous(), query_place, key_place, caps)


def is_linear(form: Form) -> TypeGuard[Slopes]:
    """Return whether a form needs no table: slopes that are not being learned."""
    return isinstance(form, Slopes) and not (form.slopes.requires_grad and torch.is_grad_enabled())


def longest(positions: Positions) -> int:
    """Return how many distances a table needs; rounded up to a power of two, so that few shapes exist."""
    furthest = int(positions.query_positions.max() - positions.key_positions.min())
    return max(BLOCK, 1 << max(furthest, 0).bit_length())


# --------------------------------------------------------------------------------------------------------- the masks


def block_mask(positions: Positions, size: int, reach: Tensor | None = None) -> BlockMask:
    """Build the mask on the device: O((Q / 128) (L / 128)) numbers, without waiting for it.

    Args:
        positions: of the queries and keys.
        size: B of the queries; the lists of blocks have it only where rows of the batch differ.
        reach: (H, blocks of queries) distances from which on keys provably do not count, see `reaches`; or None.
    """
    p = positions
    everyone = (p.query_index, p.key_index, p.query_positions, p.key_positions, p.query_segment, p.key_segment)
    batch = max(each.shape[0] for each in (*everyone, p.key_valid, p.window))
    query_index, key_index, query_place, key_place, query_segment, key_segment = (
        each.expand(batch, -1).int() for each in everyone
    )
    key_segment = torch.where(p.key_valid, key_segment, INVISIBLE)
    window = p.window.expand(batch, 1).int()
    queries, keys = query_index.shape[1], key_index.shape[1]

    q_low, q_high = _extremes(query_index)
    k_low, k_high = _extremes(key_index)
    q_first, q_last = _extremes(query_segment)
    # Padding belongs to no segment: it narrows nothing, and a block with any of it needs the mask.
    k_first, k_last = (
        _extremes(key_segment.masked_fill(~p.key_valid, torch.iinfo(torch.int32).max))[0],
        _extremes(key_segment)[1],
    )
    padded = _extremes(key_segment)[0] == INVISIBLE
    rows, columns = (..., slice(None), None), (..., None, slice(None))
    kept = (q_high[rows] >= k_low[columns]) & (q_low[rows] - k_high[columns] < window[:, :, None])
    kept &= (q_first[rows] <= k_last[columns]) & (k_first[columns] <= q_last[rows])
    full = (q_low[rows] >= k_high[columns]) & (q_high[rows] - k_low[columns] < window[:, :, None])
    one = (q_first == q_last)[rows] & (k_first == k_last)[columns] & (q_first[rows] == k_first[columns])
    full &= one & ~padded[columns]
    if queries % BLOCK:
        full[:, -1] = False
    if keys % BLOCK:
        full[:, :, -1] = False
    kept, full = kept[:, None], full[:, None]
    if reach is not None:
        nearest = _extremes(query_place)[0][rows] - _extremes(key_place)[1][columns]
        kept = kept & (nearest[:, None] < reach[None, :, :, None])
    full = full & kept

    shape = (1 if reach is None else reach.shape[0], *kept.shape[2:])
    partial = _ordered((kept & ~full).expand(batch, *shape))
    whole = _ordered(full.expand(batch, *shape))

    of_queries, of_keys, segment_of_queries, segment_of_keys, windows = (
        each.expand(size, -1).clone(memory_format=torch.contiguous_format)
        for each in (query_index, key_index, query_segment, key_segment, window)
    )

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        lag = of_queries[b, i] - of_keys[b, j]
        return (lag >= 0) & (lag < windows[b, 0]) & (segment_of_queries[b, i] == segment_of_keys[b, j])

    return BlockMask.from_kv_blocks(*partial, *whole, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(queries, keys))


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest of each block, (B, blocks), of values (B, T)."""
    spare = -values.shape[1] % BLOCK
    if spare:
        values = torch.cat([values, values[:, -1:].expand(-1, spare)], 1)
    blocks = values.view(values.shape[0], -1, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which: those first, in order."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int().contiguous()


def reaches(
    query: Tensor, key: Tensor, slopes: Tensor, positions: Positions, scaling: float, epsilon: float = EPSILON
) -> Tensor:
    """Return the distance from which on keys of a block of queries do not count, by the bound above.

    Args:
        query: (B, H, Q, D).
        key: (B, K, Q, D): the same tokens, so that each query's own key is known.
        slopes: (H,).
        positions: of the queries and keys.
        scaling: factor of the scores.
        epsilon: largest share of a row's weight that may be left out.

    Returns:
        (H, blocks of queries) float32; infinite where nothing is known.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    own = torch.einsum("bkgqd,bkqd->bkgq", query.float().view(batch, -1, groups, length, size), key.float())
    key_norms = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32).cummax(-1).values
    query_norms = torch.linalg.vector_norm(query, dim=-1, dtype=torch.float32)
    # Scores of a few hundred and a slope of 2^-8 leave float32 several digits; the slack covers rounding of products.
    products = query_norms.view(own.shape) * key_norms[:, :, None]
    room = scaling * (products * (1.0 + 2.0**-12) - own)
    room = _extremes(room.view(batch * heads, length))[1].view(batch, heads, -1).amax(0)
    needed = (room + math.log(length / epsilon)) / slopes.float()[:, None]
    p = positions
    # Queries and keys are slots of the same tokens, and each visible key sits at or before its query.
    same = (p.query_index == p.key_index).all() & (p.query_positions == p.key_positions).all()
    same = same & (p.query_segment == p.key_segment).all() & (p.key_index[:, 1:] > p.key_index[:, :-1]).all()
    known = (slopes[:, None] > 0) & (scaling > 0) & ~needed.isnan() & same
    return torch.where(known, needed, math.inf)


# --------------------------------------------------------------------------------------------------------- the calls


@functools.cache
def compiled(device: str) -> Callable[..., Any]:
    """Return FlexAttention, compiled on its first call; it raises rather than run uncompiled.

    Args:
        device: `cuda` or `cpu`. For a CPU each shape has a kernel of its own: with more than ten symbols for sizes
            torch writes C++ that does not compile (it replaces the name of one inside that of another).
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
    """Attend.

    Args:
        form: one that `why_not` has nothing against.
        query: (B, H, Q, D).
        key: (B, K, L, D), K divides H.
        value: (B, K, L, D).
        positions: of these queries and keys.
        scaling: factor of the scores.
        softcap: cap on the scores or None.
        kernel: stands in for the compiled FlexAttention.

    Returns:
        (B, H, Q, D) in the query's dtype; rows that see no key are 0.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)  # under autocast they may differ
    change = score_mod(form, query, positions, scaling, softcap)
    with torch.no_grad():
        reach = None
        if isinstance(form, Slopes) and softcap is None and query.shape[2] == key.shape[2]:
            reach = reaches(query, key, form.slopes, positions, scaling)
        mask = block_mask(positions, query.shape[0], reach)
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        output: Tensor = (kernel or compiled(query.device.type))(
            query,
            key,
            value,
            score_mod=change,
            block_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output
