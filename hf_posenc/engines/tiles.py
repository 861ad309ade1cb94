"""Tools of the engines that compute scores of one head and a few queries at a time, (rows, L).

A chunk has some consecutive queries and the keys that any of them sees. Its scores fit into the caches of a CPU. With
its rows in reverse order, the distance depends on `row + key` only. So a table of O(L) numbers is read, and its
gradients are summed, through strided views.

It computes in float32 throughout. bfloat16 inputs are converted to float32, which is exact.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Chunk = tuple[int, int, int, int]
"""First query, last query + 1, first key that any of them sees, last key + 1."""


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
    """Return biases by distance (H, L) with `-inf` outside a sliding window, from distance `window` on."""
    if window >= table.shape[1]:
        return table
    return torch.cat([table[:, :window], torch.full_like(table[:, window:], -math.inf)], 1)


def reversed_table(table: Tensor, later: float) -> Tensor:
    """Return a table (H, L) in reverse order, followed by L times the number for later keys: (H, 2 L)."""
    return torch.cat([table.flip(1), torch.full_like(table, later)], 1)


def by_pair(reversed_: Tensor, last: int, first_key: int, rows: int, keys: int) -> Tensor:
    """Return a view of a reversed table that has its entry for every pair of a chunk, at row `r` and key `j`.

    Args:
        reversed_: (..., 2 L), see `reversed_table`.
        last: key slot on which the chunk's last query, row 0, sits.
        first_key: first key of the chunk.
        rows: number of queries.
        keys: number of keys.

    Returns:
        (..., rows, keys).
    """
    # as_strided counts from the start of the storage
    start = reversed_.storage_offset() + reversed_.shape[-1] // 2 - 1 - last + first_key
    return reversed_.as_strided((*reversed_.shape[:-1], rows, keys), (*reversed_.stride()[:-1], 1, 1), start)


class Buffers:
    """Memory for the scores of one chunk, reused by the next, since new memory costs as much as a pass over it."""

    def __init__(self, numel: int, count: int) -> None:
        """Allocate the memory.

        Args:
            numel: largest number of scores of a chunk.
            count: number of buffers.
        """
        self.memory = torch.empty(count, numel)

    def room(self, rows: int, columns: int, buffer: int) -> Tensor:
        """Return a buffer as (rows, columns) float32. It still holds the numbers of its last use."""
        return self.memory[buffer, : rows * columns].view(rows, columns)

    def product(self, a: Tensor, b: Tensor, buffer: int) -> Tensor:
        """Return `a @ b`, (rows, n), in a buffer."""
        return torch.mm(a, b, out=self.room(a.shape[0], b.shape[1], buffer))


def softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    """Turn the gradient of weights (rows, keys) into the gradient of their scores, float32, in place."""
    torch.ops.aten._softmax_backward_data(gradient, weights, -1, gradient.dtype, grad_input=gradient)
    return gradient


class Diagonals:
    """Sums of a chunk along its diagonals `r + j`. In memory rows are one number longer: diagonals become columns."""

    def __init__(self, rows: int, keys: int) -> None:
        """Allocate the memory.

        Args:
            rows: largest number of rows of a chunk.
            keys: largest number of keys, at least as many as rows.
        """
        self.memory = torch.empty(rows * (keys + rows))

    def room(self, rows: int, keys: int) -> Tensor:
        """Return the view to write a chunk to, float32 (rows, keys)."""
        around = self._columns(rows, keys)
        around[:, :rows], around[:, keys:] = 0.0, 0.0
        return self.memory.as_strided((rows, keys), (keys + rows + 1, 1))

    def add_to(self, sums: Tensor, at: int, rows: int, keys: int) -> None:
        """Add the diagonal sums of the chunk to sums (2 L,). Diagonal `r + j` is added to `sums[at + r + j]`."""
        sums[at : at + keys + rows - 1] += self._columns(rows, keys).sum(0)[:-1]

    def _columns(self, rows: int, keys: int) -> Tensor:
        return self.memory[: rows * (keys + rows)].view(rows, keys + rows)
