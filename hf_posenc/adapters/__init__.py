"""The families that can be patched. Importing this package registers the `ADAPTER` of every sibling module."""

from importlib import import_module
from pkgutil import iter_modules

from ..registry import register_adapter
from .base import Adapter, Resolved, resolve

__all__ = ["Adapter", "Resolved", "resolve"]

for _module in iter_modules(__path__):
    if _module.name != "base":
        register_adapter(import_module(f"{__name__}.{_module.name}").ADAPTER)
