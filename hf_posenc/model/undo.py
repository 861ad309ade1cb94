"""Changes of a live model, and their inverse steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..core.layer_state import STATE, OnAttention, OnDecoder, OnLayer


class Change:
    """A change of a live model. `Undo.apply` makes it."""

    def apply(self, undo: Undo) -> None:
        """Record the inverse step, then make the change."""
        raise NotImplementedError(type(self).__name__)


@dataclass
class Undo:
    """The inverse steps of changes that were made.

    Each is recorded before its change is made. If the change then fails, its inverse step does nothing.

    Steps are pairs (function, arguments), because `deepcopy` and `pickle` copy arguments but not closures, which an
    ExitStack holds. So a copied model undoes its own changes, not those of the original.
    """

    steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def apply(self, *changes: Change) -> None:
        """Make changes, one after the other."""
        for change in changes:
            change.apply(self)

    def add(self, step: Callable[..., None], *arguments: object) -> None:
        """Record a step: a module-level function and its arguments."""
        self.steps.append((step, arguments))

    def roll_back(self) -> None:
        """Undo all changes, the newest first."""
        while self.steps:
            step, arguments = self.steps.pop()
            step(*arguments)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Undo all changes for a `with` block, and afterwards restore the same modules and values."""
        before = []
        try:
            for step, arguments in reversed(self.steps):
                owner = arguments[0]
                tables = [each for each in (owner.__dict__, *owner.__dict__.values()) if isinstance(each, dict)]
                before.append((owner, type(owner), [(table, dict(table)) for table in tables]))
                step(*arguments)
            yield
        finally:
            for owner, cls, contents in reversed(before):
                owner.__class__ = cls
                for table, entries in contents:  # it stays the same object, because handles of hooks refer to it
                    table.clear()
                    table.update(entries)


class Absent:
    """Stands for the value of an attribute that an object does not have. The class itself, because copies keep it."""


@dataclass(frozen=True)
class SetAttribute(Change):
    """Sets or replaces an entry of one of an object's dictionaries, or removes it if the value is `Absent`.

    Attributes:
        owner: a module, a config or another object.
        name: key of the entry.
        value: its new value.
        table: the dictionary: an empty string for plain attributes, `_buffers` for the buffers of a module.
    """

    owner: object
    name: str
    value: object
    table: str = ""

    def apply(self, undo: Undo) -> None:
        """Set the entry; the inverse restores or removes it."""
        entries = self.owner.__dict__[self.table] if self.table else self.owner.__dict__
        old = entries.get(self.name, Absent)
        undo.add(_set_entry, self.owner, self.table, self.name, old)
        _set_entry(self.owner, self.table, self.name, self.value)


def _set_entry(owner: object, table: str, name: str, value: object) -> None:
    entries = owner.__dict__[table] if table else owner.__dict__
    if value is Absent:
        entries.pop(name, None)
    else:
        entries[name] = value


@dataclass(frozen=True)
class SetModule(Change):
    """Sets or replaces a sub-module."""

    owner: nn.Module
    name: str
    module: nn.Module

    def apply(self, undo: Undo) -> None:
        """Set the module. The inverse restores the old one, on the device and in the dtype that its owner has then."""
        owner, parameter = self.owner, next(self.owner.parameters(), None)
        dtype = None if parameter is None else parameter.dtype
        old = owner._modules.get(self.name, Absent)
        undo.add(_restore_module, owner, self.name, old, dtype, owner.training)
        owner.add_module(self.name, self.module)


def _restore_module(owner: nn.Module, name: str, module: Any, dtype: torch.dtype | None, training: bool) -> None:
    # The model may have been moved, cast or set to another mode while this module was not part of it.
    parameter = next(owner.parameters(), None)
    if isinstance(module, nn.Module):
        if parameter is not None and not parameter.is_meta:
            module.to(parameter.device)
            for tensor in module.parameters() if parameter.dtype != dtype else ():
                tensor.data = tensor.data.to(parameter.dtype)
        if owner.training != training:
            module.train(owner.training)
    _set_entry(owner, "_modules", name, module)


@dataclass(frozen=True)
class Keep(Change):
    """Changes fields of the state of a patched module, see `hf_posenc.core.layer_state`.

    Attributes:
        owner: an attention, a layer or a decoder.
        read: function that returns its state: `on_attention`, `on_layer` or `on_decoder`.
        fields: name of a field -> its new value.
    """

    owner: nn.Module
    read: Callable[[nn.Module], OnAttention | OnLayer | OnDecoder]
    fields: dict[str, Any]

    def apply(self, undo: Undo) -> None:
        """Set a changed copy of the state; the inverse restores the old state."""
        SetAttribute(self.owner, STATE, replace(self.read(self.owner), **self.fields)).apply(undo)


@dataclass(frozen=True)
class SetClass(Change):
    """Changes the class of an object."""

    owner: object
    cls: type

    def apply(self, undo: Undo) -> None:
        """Change the class; the inverse restores it."""
        owner = self.owner
        if "forward" in owner.__dict__ and has_own_forward(owner):
            # accelerate leaves a bound method behind, which would still call the forward of the old class.
            SetAttribute(owner, "forward", Absent).apply(undo)
        undo.add(_restore_class, owner, type(owner))
        owner.__class__ = self.cls


def _restore_class(owner: object, cls: type) -> None:
    if has_own_forward(owner):
        owner.__dict__.pop("forward", None)
    owner.__class__ = cls


def has_own_forward(module: object) -> bool:
    """Return whether a module runs the forward of its class, not one that somebody has set on the instance."""
    forward = module.__dict__.get("forward")
    return forward is None or (
        getattr(forward, "__self__", None) is module
        and getattr(forward, "__func__", None) is getattr(type(module), "forward", None)
    )


@dataclass(frozen=True)
class AddPreHook(Change):
    """Registers a forward pre-hook that sees keyword arguments."""

    owner: nn.Module
    hook: Callable[..., Any]

    def apply(self, undo: Undo) -> None:
        """Register the hook; the inverse removes it."""
        undo.add(_remove_pre_hook, self.owner, self.hook)
        self.owner.register_forward_pre_hook(self.hook, with_kwargs=True)


def _remove_pre_hook(owner: nn.Module, hook: Callable[..., object]) -> None:
    for number in [number for number, registered in owner._forward_pre_hooks.items() if registered is hook]:
        del owner._forward_pre_hooks[number]
        owner._forward_pre_hooks_with_kwargs.pop(number, None)
