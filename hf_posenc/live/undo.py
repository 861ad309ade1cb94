"""Inverse steps: every change of a live model is recorded with what takes it back, before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layer_state import STATE, OnAttention, OnDecoder, OnLayer


class Undo:
    """Inverse steps, newest first. Each is recorded before its step is taken; if that step then fails, it does nothing.

    They are a list of (function, arguments), not an ExitStack, because `deepcopy` and `pickle` follow arguments. So a
    copied model undoes its own changes, not those of the model that it was copied from. They do not follow closures.
    """

    def __init__(self) -> None:
        """Start with nothing to undo."""
        self.steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def add(self, step: Callable[..., None], *arguments: Any) -> None:
        """Record a step: a module-level function and its arguments."""
        self.steps.append((step, arguments))

    def roll_back(self) -> None:
        """Undo everything."""
        while self.steps:
            step, arguments = self.steps.pop()
            step(*arguments)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Undo everything for the length of a `with` block; afterwards all is back, the same modules and values."""
        kept: list[tuple[Any, _Snapshot]] = []
        try:
            for step, arguments in reversed(self.steps):
                kept.append((arguments[0], _Snapshot(arguments[0])))
                step(*arguments)
            yield
        finally:
            for owner, snapshot in reversed(kept):
                snapshot.restore(owner)


class _Snapshot:
    """The parts of a module or config that inverse steps change: class, attributes, children, buffers and pre-hooks."""

    TABLES = ("_modules", "_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")

    def __init__(self, owner: Any) -> None:
        self.cls = type(owner)
        self.attributes = {name: value for name, value in owner.__dict__.items() if name not in self.TABLES}
        self.tables = {name: dict(owner.__dict__[name]) for name in self.TABLES if name in owner.__dict__}

    def restore(self, owner: Any) -> None:
        owner.__class__ = self.cls
        for name in [name for name in owner.__dict__ if name not in self.attributes and name not in self.TABLES]:
            del owner.__dict__[name]
        owner.__dict__.update(self.attributes)
        for name, entries in self.tables.items():  # the dictionaries stay the same: handles of hooks refer to them
            table = owner.__dict__[name]
            table.clear()
            table.update(entries)


def set_module(undo: Undo, owner: nn.Module, name: str, module: nn.Module) -> None:
    """Set or replace a sub-module."""
    undo.add(_restore_module, owner, name, owner._modules.get(name), _home(owner), owner.training)
    owner.add_module(name, module)


def _home(owner: nn.Module) -> torch.dtype | None:
    parameter = next(owner.parameters(), None)
    return None if parameter is None else parameter.dtype


def _restore_module(
    owner: nn.Module, name: str, module: nn.Module | None, dtype: torch.dtype | None, training: bool
) -> None:
    if module is None:
        owner._modules.pop(name, None)
        return
    # The module was kept aside while the model may have been moved or cast.
    parameter = next(owner.parameters(), None)
    if parameter is not None and not parameter.is_meta:
        module.to(parameter.device)
        if parameter.dtype != dtype:
            for tensor in module.parameters():
                tensor.data = tensor.data.to(parameter.dtype)
    if owner.training != training:
        module.train(owner.training)
    owner._modules[name] = module


def register_buffer(undo: Undo, owner: nn.Module, name: str, buffer: Tensor) -> None:
    """Register a new buffer."""
    undo.add(_remove_buffer, owner, name)
    owner.register_buffer(name, buffer)


def _remove_buffer(layer: nn.Module, name: str) -> None:
    layer._buffers.pop(name, None)


def set_attribute(undo: Undo, owner: Any, name: str, value: Any) -> None:
    """Set or replace a plain attribute of a module or config."""
    if name in owner.__dict__:
        undo.add(_restore_attribute, owner, name, owner.__dict__[name])
    else:
        undo.add(_remove_attribute, owner, name)
    object.__setattr__(owner, name, value)


def keep(undo: Undo, owner: nn.Module, state: OnAttention | OnLayer | OnDecoder, **changes: Any) -> None:
    """Keep a changed state on a module, see `hf_posenc.layer_state`.

    Args:
        undo: where the inverse step goes.
        owner: an attention, a layer or a decoder.
        state: what is kept there now.
        **changes: fields of the state.
    """
    set_attribute(undo, owner, STATE, replace(state, **changes))


def _restore_attribute(owner: Any, name: str, value: Any) -> None:
    object.__setattr__(owner, name, value)


def _remove_attribute(owner: Any, name: str) -> None:
    owner.__dict__.pop(name, None)


def set_class(undo: Undo, owner: Any, cls: type) -> None:
    """Change the class of an object."""
    if "forward" in owner.__dict__ and has_own_forward(owner):
        # A bound method that stood for nothing (accelerate leaves one when its hook is removed) would keep the old one.
        undo.add(_restore_attribute, owner, "forward", owner.__dict__["forward"])
        del owner.__dict__["forward"]
    undo.add(_restore_class, owner, type(owner))
    owner.__class__ = cls


def _restore_class(owner: Any, cls: type) -> None:
    if has_own_forward(owner):
        owner.__dict__.pop("forward", None)
    owner.__class__ = cls


def has_own_forward(module: Any) -> bool:
    """Return whether a module runs the forward of its class, and no other that was put on the instance."""
    forward = module.__dict__.get("forward")
    return forward is None or (
        getattr(forward, "__self__", None) is module
        and getattr(forward, "__func__", None) is getattr(type(module), "forward", None)
    )


def add_pre_hook(undo: Undo, owner: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook that sees keyword arguments."""
    undo.add(_remove_pre_hook, owner, hook)
    owner.register_forward_pre_hook(hook, with_kwargs=True)


def _remove_pre_hook(owner: nn.Module, hook: Callable[..., Any]) -> None:
    for number in [number for number, registered in owner._forward_pre_hooks.items() if registered is hook]:
        del owner._forward_pre_hooks[number]
        owner._forward_pre_hooks_with_kwargs.pop(number, None)
