"""Run a function after another package's module is imported."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call a function once, right after a module is imported: now, if it is imported already.

    Args:
        name: of the module, absolute.
        action: is called after the module's own code has run.
    """
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder of one module. It finds the module as the others do, gives it a loader that calls back, and is gone."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of our module, and None for every other."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.action)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that loads a module as its own loader does, and then calls back."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self.loader = loader
        self.action = action

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # whatever else loaders have: get_source, is_package, ...

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, restore its own loader, and call back."""
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.action()
