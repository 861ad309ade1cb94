"""What engines share that make the scores of one head and a few queries at a time: (rows, L), small enough for caches.

Scores are float32. In bfloat16 there are two ways to the products of queries and keys, and of weights and values:

- widened: inputs are converted to float32, which is exact. Accuracy class: float32 throughout.
- rounded: products are bfloat16, as in transformers' eager attention, which rounds every score to 8 bits and is faster
  by the ratio of the processor's rates. Accuracy class "eager"; only if it is asked for, `attention="rounded"`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Chunk = tuple[int, int, int, int]
"""First and last + 1 query, first and last + 1 key that any of them sees."""


def split(queries: int, keys: int, window: int, rows: int, reach: list[int] | None = None) -> list[Chunk]:
    """Return the chunks of plain causal attention; the last query sits on the last key.

    Args:
        queries: Q.
        keys: L.
        window: keys at this distance or further are not seen.
        rows: queries per chunk.
        reach: of each chunk, the distance from which keys need not be seen; None for none.
    """
    shift, found = keys - queries, []
    for number, i in enumerate(range(0, queries, rows)):
        end = min(i + rows, queries)
        nearest = window if reach is None else min(window, reach[number])
        found.append((i, end, max(0, shift + i - nearest + 1), shift + end))
    return found


def windowed(table: Tensor, window: int) -> Tensor:
    """Return biases of distance (H, L) with those outside a sliding window masked: `-inf` from `window` on."""
    if window >= table.shape[1]:
        return table
    return torch.cat([table[:, :window], torch.full_like(table[:, window:], -math.inf)], 1)


def reversed_table(table: Tensor, later: float) -> Tensor:
    """Return a table (H, L) backwards, and as many numbers for keys after the query behind it: (H, 2 L)."""
    return torch.cat([table.flip(1), torch.full_like(table, later)], 1)


def by_pair(reversed_: Tensor, last: int, first_key: int, rows: int, keys: int) -> Tensor:
    """Return the entries of a chunk's pairs as a view: of row `r` and key `j`, rows reversed, that of `r + j`.

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


class Block:
    """Room for the scores of one chunk, used again for the next: fresh memory costs as much as a pass over it."""

    def __init__(self, numel: int, dtype: torch.dtype, buffers: int) -> None:
        """Take the memory.

        Args:
            numel: largest number of scores of a chunk.
            dtype: of the products: float32, or bfloat16 to round them.
            buffers: how many float32 numbers per score are needed at once.
        """
        self.wide = torch.empty(buffers, numel)
        self.narrow = None if dtype == torch.float32 else torch.empty(numel, dtype=dtype)

    def room(self, rows: int, columns: int, buffer: int) -> Tensor:
        """Return a buffer as (rows, columns) float32, whatever is in it."""
        return self.wide[buffer, : rows * columns].view(rows, columns)

    def product(self, a: Tensor, b: Tensor, buffer: int) -> Tensor:
        """Return `a @ b` (rows, n) in float32, in a buffer."""
        wide = self.room(a.shape[0], b.shape[1], buffer)
        if self.narrow is None:
            return torch.mm(a, b, out=wide)
        # Converted once: an operation on two dtypes takes ten times as long as on one.
        return wide.copy_(torch.mm(a, b, out=self.narrow[: wide.numel()].view(wide.shape)))

    def factor(self, scores: Tensor) -> Tensor:
        """Return what is like scores as a factor of the next product: as it is, or rounded, until the next call."""
        return scores if self.narrow is None else self.narrow[: scores.numel()].view(scores.shape).copy_(scores)


def softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of scores (rows, keys) from that of their weights, float32, in place."""
    # Its sums are over what the products gave: rounded ones would not cancel against sums over the output.
    torch.ops.aten._softmax_backward_data(gradient, weights, -1, gradient.dtype, grad_input=gradient)
    return gradient


def add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to float32 sums, in place."""
    if a.dtype == torch.float32:
        sums.addmm_(a, b)
    else:
        sums.add_((a @ b).float())


class Diagonals:
    """Sums of a chunk along each `r + j`: written with rows one longer than they are, diagonals become columns."""

    def __init__(self, rows: int, keys: int) -> None:
        """Take the memory.

        Args:
            rows: most rows of a chunk.
            keys: most keys, no fewer than rows.
        """
        self.memory = torch.empty(rows * (keys + rows))

    def room(self, rows: int, keys: int) -> Tensor:
        """Return where to write a chunk, float32 (rows, keys)."""
        around = self._columns(rows, keys)
        around[:, :rows], around[:, keys:] = 0.0, 0.0
        return self.memory.as_strided((rows, keys), (keys + rows + 1, 1))

    def add_to(self, sums: Tensor, at: int, rows: int, keys: int) -> None:
        """Add the sums of the chunk that was written to `sums[at + r + j]`, of (2 L,)."""
        sums[at : at + keys + rows - 1] += self._columns(rows, keys).sum(0)[:-1]

    def _columns(self, rows: int, keys: int) -> Tensor:
        return self.memory[: rows * (keys + rows)].view(rows, keys + rows)
