"""Changes of a live model, and their inverse steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..layer_state import STATE, OnAttention, OnDecoder, OnLayer


class Change(Protocol):
    """A change of a live model. `Undo.apply` makes it."""

    def apply(self, undo: Undo) -> None:
        """Record the inverse step, then make the change."""


class Undo:
    """The inverse steps of changes that were made.

    Each is recorded before its change is made. If the change then fails, its inverse step does nothing.

    Steps are pairs (function, arguments), because `deepcopy` and `pickle` copy arguments but not closures, which an
    ExitStack holds. So a copied model undoes its own changes, not those of the original.
    """

    def __init__(self) -> None:
        """Start without steps."""
        self.steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

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
        snapshots: list[tuple[object, _Snapshot]] = []
        try:
            for step, arguments in reversed(self.steps):
                snapshots.append((arguments[0], _Snapshot(arguments[0])))
                step(*arguments)
            yield
        finally:
            for owner, snapshot in reversed(snapshots):
                snapshot.restore(owner)


class _Snapshot:
    """An object's class and attributes, and the entries of its dictionaries (children, buffers, hooks, ...)."""

    def __init__(self, owner: object) -> None:
        self.cls = type(owner)
        self.attributes = dict(owner.__dict__)
        self.tables = [(value, dict(value)) for value in self.attributes.values() if isinstance(value, dict)]

    def restore(self, owner: object) -> None:
        owner.__class__ = self.cls
        owner.__dict__.clear()
        owner.__dict__.update(self.attributes)
        for table, entries in self.tables:  # the dictionaries stay the same objects, because hook handles refer to them
            table.clear()
            table.update(entries)


@contextmanager
def restored_after_failure(model: nn.Module, parts: Callable[[str], bool]) -> Iterator[None]:
    """Restore a model if the body of a `with` block raises: its modules, their attributes, and `requires_grad`.

    Args:
        model: any module.
        parts: function of a parameter's name: whether to restore the parameter's values too.
    """
    snapshots = [(module, _Snapshot(module)) for module in model.modules()]
    requires_grad = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    values = [(parameter, parameter.detach().clone()) for name, parameter in model.named_parameters() if parts(name)]
    try:
        yield
    except BaseException:
        for module, snapshot in snapshots:
            snapshot.restore(module)
        for parameter, required in requires_grad:
            parameter.requires_grad_(required)
        for parameter, old_values in values:
            parameter.data = old_values
        raise


@dataclass(frozen=True)
class SetModule:
    """Sets or replaces a sub-module."""

    owner: nn.Module
    name: str
    module: nn.Module

    def apply(self, undo: Undo) -> None:
        """Set the module. The inverse restores the old one, on the device and in the dtype that its owner has then."""
        owner, parameter = self.owner, next(self.owner.parameters(), None)
        dtype = None if parameter is None else parameter.dtype
        undo.add(_restore_module, owner, self.name, owner._modules.get(self.name), dtype, owner.training)
        owner.add_module(self.name, self.module)


def _restore_module(
    owner: nn.Module, name: str, module: nn.Module | None, dtype: torch.dtype | None, training: bool
) -> None:
    if module is None:
        owner._modules.pop(name, None)
        return
    # The model may have been moved or cast while this module was not part of it.
    parameter = next(owner.parameters(), None)
    if parameter is not None and not parameter.is_meta:
        module.to(parameter.device)
        if parameter.dtype != dtype:
            for tensor in module.parameters():
                tensor.data = tensor.data.to(parameter.dtype)
    if owner.training != training:
        module.train(owner.training)
    owner._modules[name] = module


@dataclass(frozen=True)
class AddBuffer:
    """Registers a new buffer."""

    owner: nn.Module
    name: str
    buffer: Tensor

    def apply(self, undo: Undo) -> None:
        """Register the buffer; the inverse removes it."""
        undo.add(_remove_buffer, self.owner, self.name)
        self.owner.register_buffer(self.name, self.buffer)


def _remove_buffer(layer: nn.Module, name: str) -> None:
    layer._buffers.pop(name, None)


@dataclass(frozen=True)
class SetAttribute:
    """Sets or replaces a plain attribute."""

    owner: object
    name: str
    value: object

    def apply(self, undo: Undo) -> None:
        """Set the attribute; the inverse restores or removes it."""
        if self.name in self.owner.__dict__:
            undo.add(_restore_attribute, self.owner, self.name, self.owner.__dict__[self.name])
        else:
            undo.add(_remove_attribute, self.owner, self.name)
        object.__setattr__(self.owner, self.name, self.value)


def _restore_attribute(owner: object, name: str, value: object) -> None:
    object.__setattr__(owner, name, value)


def _remove_attribute(owner: object, name: str) -> None:
    owner.__dict__.pop(name, None)


@dataclass(frozen=True)
class Keep:
    """Changes fields of the state of a patched module, see `hf_posenc.layer_state`.

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
class SetClass:
    """Changes the class of an object."""

    owner: object
    cls: type

    def apply(self, undo: Undo) -> None:
        """Change the class; the inverse restores it."""
        owner = self.owner
        if "forward" in owner.__dict__ and has_own_forward(owner):
            # accelerate leaves a bound method behind, which would still call the forward of the old class.
            undo.add(_restore_attribute, owner, "forward", owner.__dict__["forward"])
            del owner.__dict__["forward"]
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
class AddPreHook:
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
