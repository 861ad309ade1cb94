"""Exact ALiBi in less than the time of plain causal attention: keys that provably do not count are skipped.

Let `s_ij = scaling q_i . k_j` be the score and `m` the slope. Row `i` sees itself at distance 0, so its softmax
denominator is at least `exp(s_ii)`. For any vector `c`, the same for all keys of a head,

    s_ij - s_ii = scaling (q_i . (k_j - c) - q_i . (k_i - c)) <= scaling (r_i - q_i . (k_i - c)) = g_i,

where `r_i` bounds `q_i . (k_j - c)` over `j <= i`: by Cauchy-Schwarz `|q_i| max_j |k_j - c|`, and by coordinates
`sum_t |q_it| max_j |k_jt - c_t|`; the smaller one counts. In trained models keys have large parts in common, which `c`
removes, and a few large coordinates, which the second bound sees. Without both the bound is several times larger. The
share of a row's weight on keys further away than `w` is then at most

    sum_(d > w) exp(g_i - m d) <= exp(g_i - m (w + 1)) / (1 - exp(-m)),

which is below `epsilon` as soon as `w + 1 >= (g_i + ln(1 / epsilon) - ln(1 - exp(-m))) / m`. With `epsilon = 2^-24`
leaving them out moves a row's weights by less than the rounding of float32. The bound costs O(L D), holds for any
input, and is taken from the inputs of the call. For each head and chunk of queries it is the largest over the rows and
the batch. `c` is the middle of each coordinate's range. Heads with steep slopes need few keys, so the cost falls from
O(L^2) towards O(L) with the length.

Accuracy class: that of `toeplitz`, which computes the other keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..attention_call import Call
from ..forms import Slopes
from . import toeplitz
from .spans import SpanEngine

EPSILON = 2.0**-24
"""Largest share of a row's weight that may be left out: half a unit in the last place of float32."""

SHRINK = 0.8
"""Heads share a kernel call where each needs more than this share of the keys of any other."""

AT_ONCE = 2**18
"""Numbers that the bound is computed from at once, in a dozen passes, so that they stay in the caches."""

KEY_STEP = 64
"""Windows are rounded up to this many keys."""


class Banded(SpanEngine[Slopes]):
    """A bias per head that falls linearly with the distance (ALiBi), exactly; sliding windows."""

    name = "banded"
    forms = (Slopes,)
    wrong_form = "the scheme is no linear bias per head"

    def attend_span(self, form: Slopes, call: Call, query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
        """Compute plain causal attention, see `SpanEngine.attend_span`."""
        return attend(query, key, value, form.slopes, scaling=call.scaling, window=window)


def windows(query: Tensor, key: Tensor, slopes: Tensor, scaling: float, rows: int, epsilon: float = EPSILON) -> Tensor:
    """Return how many keys, counted back from a query and itself included, may matter.

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
    room = scaling * torch.cat([_gaps(q.float(), k.float(), rows) for q, k in pairs]).double()
    slope = slopes.double()[:, None]
    needed = (room + math.log(1 / epsilon) - torch.log(-torch.expm1(-slope))) / slope
    # A learned slope may also reward distance, and inputs may not be finite: then the bound does not hold.
    return torch.where((slope > 0) & ~needed.isnan(), needed, math.inf)


def _gaps(query: Tensor, key: Tensor, rows: int) -> Tensor:
    """Return the largest `g_i / scaling` of each head and chunk, (H, chunks)."""
    shift, queries = key.shape[2] - query.shape[2], query.shape[2]
    centre = (key.amax(2, keepdim=True) + key.amin(2, keepdim=True)) / 2
    key = key - centre
    norms = torch.linalg.vector_norm(query, dim=-1)
    reach = torch.linalg.vector_norm(key, dim=-1).cummax(-1).values
    largest = reach[..., -1:] + torch.linalg.vector_norm(centre, dim=-1)  # at least the longest key
    bound = norms * reach[..., shift:]
    own = (query * key[:, :, shift:]).sum(-1)
    # Rounding of sums of D products, and of the differences, may not make the bound too small.
    slack = 2.0**-15 * norms * largest
    side = key[:, :, :shift].abs().amax(2) if shift else torch.zeros_like(key[:, :, 0])
    largest_gaps = []
    for start in range(0, queries, rows):
        here = slice(start, min(start + rows, queries))
        side = torch.maximum(side, key[:, :, shift + here.start : shift + here.stop].abs().amax(2))
        by_coordinate = (query[:, :, here].abs() @ side[..., None])[..., 0]
        gaps = torch.minimum(bound[..., here], by_coordinate) + slack[..., here] - own[..., here]
        largest_gaps.append(gaps.amax((0, 2)))
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
        while first < len(reach):  # neighbours of nearly the same width go together: no head is copied
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
    window: int | None = None,
    rows: int = toeplitz.ROWS,
) -> Tensor:
    """Attend causally with a bias that is linear in the distance, skipping keys that provably do not count.

    Args:
        query: (B, H, Q, D) on a CPU, float32 or bfloat16.
        key: (B, H, L, D), L >= Q; the last query sits on the last key.
        value: (B, H, L, D).
        slopes: (H,) float32. Gradients flow to them.
        scaling: factor of the scores.
        window: a key is visible while it is less than this behind the query; None means no such limit.
        rows: queries per chunk.

    Returns:
        (B, H, Q, D) in the query's dtype.
    """
    length = key.shape[2]
    distance = torch.arange(length, dtype=slopes.dtype, device=slopes.device)
    with torch.no_grad():
        needed = windows(query, key, slopes, scaling, rows)
        if window is not None:
            needed = needed.clamp(max=window)
        pieces = plan(needed, query.shape[2], length, rows)
        # Also within a piece, whose keys are those of its widest head. There, weights that do not count could be
        # denormal numbers, which the processor multiplies many times more slowly.
        beyond = distance >= needed.amax(1, keepdim=True)
    table = (-slopes[:, None] * distance).masked_fill(beyond, -math.inf)
    return toeplitz.attend(query, key, value, table, scaling=scaling, pieces=pieces)
