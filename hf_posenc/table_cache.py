"""A table of distances, cached between decoding steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

STEP = 1024
"""A cached table has a multiple of this many distances, so that it is seldom rebuilt as the key-value cache grows."""


class KeptTable:
    """A table of distances that is computed from a weight, and cached until the weight changes.

    A copy of the weight shows changes. Moving averages and merged models edit weights through `.data`, which leaves no
    other trace. Copies and pickles of the cache are empty.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.table: Tensor | None = None
        self.weight: Tensor | None = None

    def read(self, count: int, like: Tensor, weight: Tensor, make: Callable[[int], Tensor]) -> Tensor:
        """Return the table. Rebuild it if it is too short or belongs to another weight, dtype or device.

        Args:
            count: number of distances.
            like: tensor with the dtype and the device of the table.
            weight: the weight that determines the table.
            make: number of distances -> table (H, distances, ...).

        Returns:
            (H, count, ...).
        """
        table, weight_of_table = self.table, self.weight
        if (
            table is None
            or weight_of_table is None
            or table.shape[1] < count
            or (table.dtype, table.device) != (like.dtype, like.device)
            or not equal(weight_of_table, weight)
        ):
            table = make(-(-count // STEP) * STEP).to(like.dtype).contiguous()
            self.table, self.weight = table, weight.clone()
        return table[:, :count]

    def drop(self) -> None:
        """Free the table. A call that is not a decoding step calls this, because generation has ended."""
        if not torch.compiler.is_compiling():
            self.table = self.weight = None

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty cache, for copies and pickles."""
        return {"table": None, "weight": None}


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, device, shape and numbers."""
    if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
        return False
    words = 8 // a.element_size()
    if all(t.is_contiguous() and t.numel() % words == t.storage_offset() % words == 0 for t in (a, b)):
        a, b = a.flatten().view(torch.int64), b.flatten().view(torch.int64)  # several times as fast
    return torch.equal(a, b)
