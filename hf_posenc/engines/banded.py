"""Exact ALiBi in less than the time of plain causal attention: keys that provably do not count are skipped.

Let `s_ij = scaling q_i . k_j` be the score and `m` the slope. Row `i` sees itself at distance 0, so its softmax
denominator is at least `exp(s_ii)`. For any vector `c`, the same for all keys of a head,

    s_ij - s_ii = scaling (q_i . (k_j - c) - q_i . (k_i - c)) <= scaling (r_i - q_i . (k_i - c)) = g_i,

where `r_i` bounds `q_i . (k_j - c)` over `j <= i`. It is the smaller of two bounds: `|q_i| max_j |k_j - c|` by
Cauchy-Schwarz, and `sum_t |q_it| max_j |k_jt - c_t|` by coordinates. In trained models keys have a large part in
common, which `c` removes, and a few large coordinates, for which the second bound is tighter. Without both, `r_i` would
be several times larger. The share of a row's weight on keys further away than `w` is then at most

    sum_(d > w) exp(g_i - m d) <= exp(g_i - m (w + 1)) / (1 - exp(-m)),

which is below `epsilon` as soon as `w + 1 >= (g_i + ln(1 / epsilon) - ln(1 - exp(-m))) / m`. With `epsilon = 2^-24`,
skipping these keys changes a row's weights by less than the rounding of float32. The bound is computed from the inputs
of the call. It costs O(L D) and holds for any input. A head and chunk of queries has the largest bound of its rows over
the batch. `c` is the middle of each coordinate's range. Heads with steep slopes need few keys, so with growing length
the cost falls from O(L^2) towards O(L).

Accuracy class: that of `toeplitz`, which computes the keys that are not skipped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.forms import Slopes
from . import toeplitz
from .spans import SpanEngine

EPSILON = 2.0**-24
"""Largest share of a row's weight that may be left out: half a unit in the last place of float32."""

SHRINK = 0.8
"""Heads share a kernel call if the smallest number of keys they need is above this share of the largest."""

AT_ONCE = 2**18
"""Most elements of the keys that are bounded at once. The bound passes over them a dozen times, in the CPU's caches."""

KEY_STEP = 64
"""Windows are rounded up to this many keys."""


class Banded(SpanEngine):
    """The engine for a bias that falls linearly with the distance (ALiBi), with windows of layers and of heads."""

    name = "banded"
    forms = (Slopes,)
    wrong_form = "the scheme is no linear bias per head"

    def attend_span(self, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Compute plain causal attention, see `SpanEngine.attend_span`."""
        form: Slopes = call.form
        widest = torch.full(form.slopes.shape, window) if form.windows is None else form.windows.clamp(max=window)
        return attend(query, key, value, form.slopes, scaling=call.scaling, window=widest)


def windows(query: Tensor, key: Tensor, slopes: Tensor, scaling: float, rows: int, epsilon: float = EPSILON) -> Tensor:
    """Return how many keys may matter, counted back from a query and including its own key.

    Args:
        query: (B, H, Q, D).
        key: (B, H, L, D), the last query sits on the last key.
        slopes: (H,).
        scaling: factor of the scores.
        rows: queries per chunk.
        epsilon: largest share of a row's weight that may be left out.

    Returns:
        (H, chunks) float64; infinite for slopes that are not positive and for inputs that are not finite.
    """
    heads = max(1, AT_ONCE // key[:, 0].numel())
    pairs = zip(query.split(heads, 1), key.split(heads, 1), strict=True)
    gaps = scaling * torch.cat([_gaps(q.float(), k.float(), rows) for q, k in pairs]).double()
    slope = slopes.double()[:, None]
    needed = (gaps + math.log(1 / epsilon) - torch.log(-torch.expm1(-slope))) / slope
    # A learned slope may also reward distance, and inputs may not be finite: then the bound does not hold.
    return torch.where((slope > 0) & ~needed.isnan(), needed, math.inf)


def _gaps(query: Tensor, key: Tensor, rows: int) -> Tensor:
    """Return the largest `g_i / scaling` of each head and chunk, (H, chunks)."""
    shift, queries = key.shape[2] - query.shape[2], query.shape[2]
    centre = (key.amax(2, keepdim=True) + key.amin(2, keepdim=True)) / 2
    key = key - centre
    norms = torch.linalg.vector_norm(query, dim=-1)
    longest_key = torch.linalg.vector_norm(key, dim=-1).cummax(-1).values
    largest = longest_key[..., -1:] + torch.linalg.vector_norm(centre, dim=-1)  # at least the longest key
    bound = norms * longest_key[..., shift:]
    own_products = (query * key[:, :, shift:]).sum(-1)
    # Rounding of sums of D products, and of the differences, may not make the bound too small.
    slack = 2.0**-15 * norms * largest
    largest_coordinates = key[:, :, :shift].abs().amax(2) if shift else torch.zeros_like(key[:, :, 0])
    largest_gaps = []
    for start in range(0, queries, rows):
        here = slice(start, min(start + rows, queries))
        largest_coordinates = torch.maximum(
            largest_coordinates, key[:, :, shift + here.start : shift + here.stop].abs().amax(2)
        )
        by_coordinate = (query[:, :, here].abs() @ largest_coordinates[..., None])[..., 0]
        gaps = torch.minimum(bound[..., here], by_coordinate) + slack[..., here] - own_products[..., here]
        largest_gaps.append(gaps.amax((0, 2)))  # over the batch and the rows
    return torch.stack(largest_gaps, 1)


def plan(needed: Tensor, queries: int, keys: int, rows: int) -> list[toeplitz.Piece]:
    """Return the pieces that reach every key that may matter.

    Args:
        needed: (H, chunks) from `windows`.
        queries: Q.
        keys: L.
        rows: queries per chunk.
    """
    shift, pieces = keys - queries, []
    counts = (needed.clamp(max=2.0**40) / KEY_STEP).ceil().mul(KEY_STEP).long().tolist()
    for chunk, i in enumerate(range(0, queries, rows)):
        end = min(i + rows, queries)
        reach = [min(shift + end, end - i + count[chunk]) for count in counts]
        first = 0
        while first < len(reach):  # only neighbours share a piece, because a slice of heads needs no copy
            last, narrow, wide = first + 1, reach[first], reach[first]
            while last < len(reach) and min(narrow, reach[last]) > SHRINK * max(wide, reach[last]):
                narrow, wide = min(narrow, reach[last]), max(wide, reach[last])
                last += 1
            pieces.append((i, end, first, last, shift + end - wide))
            first = last
    return pieces


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *,
    scaling: float,
    window: Tensor | None = None,
    rows: int = toeplitz.ROWS,
) -> Tensor:
    """Attend causally with a bias that is linear in the distance, skipping keys that provably do not count.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q; the last query sits on the last key.
        value: (B, H, L, D).
        slopes: (H,) float32. Gradients flow to them.
        scaling: factor of the scores.
        window: (H,). A head does not see keys at this distance or further; None means no such limit.
        rows: queries per chunk.

    Returns:
        (B, H, Q, D) in the query's dtype.
    """
    length = key.shape[2]
    distance = torch.arange(length, dtype=slopes.dtype, device=slopes.device)
    with torch.no_grad():
        needed = windows(query, key, slopes, scaling, rows)
        if window is not None:
            needed = torch.minimum(needed, window[:, None])
        pieces = plan(needed, query.shape[2], length, rows)
        # A piece has the keys of its widest head. For the other heads, keys beyond their own reach are masked: their
        # weights could be denormal numbers, which the processor multiplies many times more slowly.
        beyond = distance >= needed.amax(1, keepdim=True)
    table = (-slopes[:, None] * distance).masked_fill(beyond, -math.inf)
    return toeplitz.attend(query, key, value, table, scaling=scaling, pieces=pieces)
