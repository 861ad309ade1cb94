"""Scores of one head and a few queries at a time, which engines share: (rows, L), small enough for caches.

A chunk has some consecutive queries and the keys that any of them sees. Its rows are in reverse order, so that a
function of the distance depends on `row + key` only. So tables of O(L) numbers are read, and summed, through strided
views.

Scores are float32. bfloat16 inputs are converted to float32, which is exact. Accuracy class: float32 throughout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Chunk = tuple[int, int, int, int]
"""First and last + 1 query, first and last + 1 key that any of them sees."""


def split(queries: int, keys: int, window: int, rows: int) -> list[Chunk]:
    """Return the chunks of plain causal attention; the last query sits on the last key.

    Args:
        queries: Q.
        keys: L.
        window: keys at this distance or further are not seen.
        rows: queries per chunk.
    """
    shift = keys - queries
    starts = ((i, min(i + rows, queries)) for i in range(0, queries, rows))
    return [(i, end, max(0, shift + i - window + 1), shift + end) for i, end in starts]


def windowed(table: Tensor, window: int) -> Tensor:
    """Return biases of distance (H, L) with those outside a sliding window masked: `-inf` from `window` on."""
    if window >= table.shape[1]:
        return table
    return torch.cat([table[:, :window], torch.full_like(table[:, window:], -math.inf)], 1)


def reversed_table(table: Tensor, later: float) -> Tensor:
    """Return a table (H, L) backwards, and after it L times the number for keys after the query: (H, 2 L)."""
    return torch.cat([table.flip(1), torch.full_like(table, later)], 1)


def by_pair(reversed_: Tensor, last: int, first_key: int, rows: int, keys: int) -> Tensor:
    """Return the entries of a chunk's pairs as a view. Rows are reversed: row `r` and key `j` have entry `r + j`.

    Args:
        reversed_: (..., 2 L), see `reversed_table`.
        last: key slot that the chunk's last query, row 0, sits on.
        first_key: first key.
        rows: queries of the chunk.
        keys: number of keys.

    Returns:
        (..., rows, keys).
    """
    # as_strided counts from the start of the storage
    start = reversed_.storage_offset() + reversed_.shape[-1] // 2 - 1 - last + first_key
    return reversed_.as_strided((*reversed_.shape[:-1], rows, keys), (*reversed_.stride()[:-1], 1, 1), start)


def later(rows: int) -> Tensor:
    """Return which of the last keys of a chunk are after the query: bool (rows, rows)."""
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


class Buffers:
    """Memory for the scores of one chunk, used again for the next: fresh memory costs as much as a pass over it."""

    def __init__(self, numel: int, count: int) -> None:
        """Allocate the memory.

        Args:
            numel: largest number of scores of a chunk.
            count: how many float32 numbers per score are needed at once.
        """
        self.memory = torch.empty(count, numel)

    def room(self, rows: int, columns: int, buffer: int) -> Tensor:
        """Return a buffer as (rows, columns) float32; its numbers are those of the last use."""
        return self.memory[buffer, : rows * columns].view(rows, columns)

    def product(self, a: Tensor, b: Tensor, buffer: int) -> Tensor:
        """Return `a @ b`, (rows, n), in a buffer."""
        return torch.mm(a, b, out=self.room(a.shape[0], b.shape[1], buffer))


def softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    """Turn the gradient of weights (rows, keys) into that of their scores, float32, in place."""
    torch.ops.aten._softmax_backward_data(gradient, weights, -1, gradient.dtype, grad_input=gradient)
    return gradient


class Diagonals:
    """Sums of a chunk along each `r + j`. Written with rows one longer than they are, diagonals become columns."""

    def __init__(self, rows: int, keys: int) -> None:
        """Allocate the memory.

        Args:
            rows: most rows of a chunk.
            keys: most keys, no fewer than rows.
        """
        self.memory = torch.empty(rows * (keys + rows))

    def room(self, rows: int, keys: int) -> Tensor:
        """Return the view to write a chunk to, float32 (rows, keys)."""
        around = self._columns(rows, keys)
        around[:, :rows], around[:, keys:] = 0.0, 0.0
        return self.memory.as_strided((rows, keys), (keys + rows + 1, 1))

    def add_to(self, sums: Tensor, at: int, rows: int, keys: int) -> None:
        """Add the sums of the chunk that was written to `sums[at + r + j]`, of (2 L,)."""
        sums[at : at + keys + rows - 1] += self._columns(rows, keys).sum(0)[:-1]

    def _columns(self, rows: int, keys: int) -> Tensor:
        return self.memory[: rows * (keys + rows)].view(rows, keys + rows)
