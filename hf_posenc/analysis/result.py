"""Results of measurements, which are written as JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Result:
    """A dataclass of numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON; a complex number is a pair of its real and imaginary part."""
        return {name: _plain(value) for name, value in self.__dict__.items()}


def _plain(value: Any) -> Any:
    """Return a value of a result with numbers, lists and dicts for tensors, tuples and results."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Tensor):
        return (torch.view_as_real(value) if value.is_complex() else value).tolist()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
