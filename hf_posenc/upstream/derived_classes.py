"""Classes that are made on demand, a mixin in front of a stock class; pickles and copies name the stock class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stock_class(cls: type, mixin: type) -> type:
    """Return the class that `mixin`, or a class derived from it, was put in front of."""
    return next(base for base in cls.__bases__ if not issubclass(base, mixin))


def revive(make: Callable[..., type], *stock: type) -> Any:
    """Return an empty instance of the class that `make` derives from stock classes, for pickle and copy."""
    cls = make(*stock)
    return object.__new__(cls)
