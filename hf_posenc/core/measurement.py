"""Results of measurements, ready for JSON."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor


class Result:
    """Base of dataclasses that hold measured numbers.

    Attributes:
        derived: names of the properties that `to_dict` returns in addition to the fields.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return name -> value, ready for JSON."""
        return {name: _to_json(getattr(self, name)) for name in (*self.__dict__, *self.derived)}


def _to_json(value: object) -> object:
    """Convert tensors and tuples to lists, and results to dicts."""
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Tensor):
        return value.tolist()
    return [_to_json(each) for each in value] if isinstance(value, tuple | list) else value
