"""Tools for classes made on demand, of a mixin and a stock class. Their pickles and copies name the stock class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def made_class(cls: type, mixin: type) -> type:
    """Return the class that was made of `mixin` and a stock class: `cls`, or the one that FSDP derived it from."""
    return next(each for each in cls.__mro__ if issubclass(each.__bases__[0], mixin))


def stock_class(cls: type, mixin: type) -> type:
    """Return the stock class of which, and of `mixin`, a class was made."""
    return next(base for base in made_class(cls, mixin).__bases__ if not issubclass(base, mixin))


def revive(make: Callable[..., type], *stock: type) -> Any:
    """Return an empty instance of `make(*stock)`, for pickle and copy."""
    return object.__new__(make(*stock))
