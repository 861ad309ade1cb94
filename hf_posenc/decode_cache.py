"""A table that is kept between two steps of generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEP = 1024
"""A kept table has a multiple of this many distances, so that it is seldom made again as a cache grows."""


class KeptTable:
    """A table of distances that is computed from a weight, and kept until the weight changes.

    A copy of the weight is kept beside it, to notice a change. Nothing else would tell: edits through `.data`, such as
    those of moving averages and merged models, leave no trace. Copies and pickles start empty.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.table: Tensor | None = None
        self.weight: Tensor | None = None

    def read(self, count: int, like: Tensor, weight: Tensor, make: Callable[[int], Tensor]) -> Tensor:
        """Return the table, made anew if it is of another weight, dtype or device, or too short.

        Args:
            count: number of distances.
            like: has the dtype and the device of the table.
            weight: the weight that it is computed from.
            make: returns a table (H, distances, ...), from the number of distances.

        Returns:
            (H, count, ...).
        """
        table, kept = self.table, self.weight
        if (
            table is None
            or kept is None
            or table.shape[1] < count
            or (table.dtype, table.device) != (like.dtype, like.device)
            or not equal(kept, weight)
        ):
            table = make(-(-count // STEP) * STEP).to(like.dtype).contiguous()
            self.table, self.weight = table, weight.clone()
        return table[:, :count]

    def drop(self) -> None:
        """Free the table. Call it where another kind of call says that generation has ended."""
        if not torch.compiler.is_compiling():
            self.table = self.weight = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: nothing."""
        return {"table": None, "weight": None}


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are of one dtype, device and shape, and hold the same numbers."""
    if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
        return False
    words = 8 // a.element_size()
    if all(t.is_contiguous() and t.numel() % words == t.storage_offset() % words == 0 for t in (a, b)):
        a, b = a.flatten().view(torch.int64), b.flatten().view(torch.int64)  # several times as fast
    return torch.equal(a, b)
