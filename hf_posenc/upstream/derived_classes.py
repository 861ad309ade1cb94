"""Tools for classes made on demand, of a mixin and a stock class. Their pickles and copies name the stock class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def stock_class(cls: type, mixin: type) -> type:
    """Return the stock class among the bases of a class that was made of `mixin` and a stock class."""
    return next(base for base in cls.__bases__ if not issubclass(base, mixin))


def revive(make: Callable[..., type], *stock: type) -> Any:
    """Return an empty instance of `make(*stock)`, for pickle and copy."""
    cls = make(*stock)
    return object.__new__(cls)
