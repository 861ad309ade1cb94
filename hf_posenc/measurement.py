"""Results of measurements, which are written as JSON."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor


class Result:
    """A dataclass of numbers.

    Attributes:
        derived: names of the properties that `to_dict` returns beside the fields.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON; a complex number is a pair of its real and imaginary part."""
        return {name: _plain(getattr(self, name)) for name in (*self.__dict__, *self.derived)}


def _plain(value: object) -> object:
    """Return a value of a result with numbers, lists and dicts for tensors, tuples and results."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Tensor):
        return (torch.view_as_real(value) if value.is_complex() else value).tolist()
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
