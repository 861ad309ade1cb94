"""Watching a live model: the calls of its layers, and the hidden states that enter one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError

_STANCE = threading.RLock()
"""Held while the stance of torch.compile is changed: all threads share it, and each puts back what it found."""


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of a layer, from which it can be called again by itself.

    Attributes:
        hidden_states: (B, T, E), as a rule before hooks of this package have added to them, see `recorded`.
        args: the other positional arguments.
        kwargs: the other arguments by name.
    """

    hidden_states: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def recorded(layers: Sequence[nn.Module], *, behind_hooks: bool = False) -> Iterator[list[LayerCall]]:
    """Record the calls of layers, or attentions, while a model runs.

    Args:
        layers: whose calls.
        behind_hooks: record the hidden states to which hooks of a scheme have added, not those before.

    Yields:
        One entry per call, in the order of the calls.
    """
    calls: list[LayerCall] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        calls.append(LayerCall(args[0], args[1:], rest) if args else LayerCall(kwargs["hidden_states"], (), rest))

    with ExitStack() as hooks:
        for layer in layers:
            # First in line as a rule: hooks of a scheme add positions to what this one has seen.
            hook = layer.register_forward_pre_hook(record, prepend=not behind_hooks, with_kwargs=True)
            hooks.callback(hook.remove)
        yield calls


def caught(module: nn.Module, run: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which a module is called during a run, before other hooks see them.

    The run stops there. The module stays in its place: transformers may install hooks in this pass that record outputs,
    once and for all, on the layers that it finds. Code that the caller has compiled runs uncompiled here, because
    torch.compile cannot trace the hook and would compile for this pass alone.

    Args:
        module: that is called, as a rule a layer.
        run: a forward pass, to be called without arguments.

    Raises:
        UnsupportedModelError: if the run never calls the module.
    """
    looking = {threading.get_ident()}

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() in looking:  # other threads compute on; so does a copy that has this hook
            raise _Caught(args, kwargs)

    hook = module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        with _STANCE, torch.compiler.set_stance("force_eager"):
            run()
    except _Caught as call:
        return call.arguments
    finally:
        hook.remove()
        looking.clear()
    raise UnsupportedModelError(f"a {type(module).__name__} of this model is never called")


class _Caught(Exception):  # no error: it stops a forward pass
    """Carries the arguments of a module out of a forward pass."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = args, kwargs


@torch.no_grad()
def entering(decoder: nn.Module, layer: nn.Module, tokens: Tensor) -> Tensor:
    """Return the hidden states that enter a layer, before hooks of a scheme add to them.

    Args:
        decoder: patched or stock, in evaluation mode.
        layer: one of its layers.
        tokens: (B, T), documents without padding.

    Returns:
        (B, T, E).

    Raises:
        UnsupportedModelError: if the decoder never calls the layer.
    """
    args, kwargs = caught(layer, lambda: decoder.forward(input_ids=tokens, use_cache=False))
    hidden_states: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden_states


def first(output: Any) -> Tensor:
    """Return the hidden states that a layer returned, alone or with others."""
    return output[0] if isinstance(output, tuple | list) else output
