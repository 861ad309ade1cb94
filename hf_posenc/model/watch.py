"""Record the calls of a live model's layers, and the hidden states that enter a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import UnsupportedModelError

Args = tuple[Any, ...]
"""Positional arguments of the call of a module."""

Kwargs = dict[str, Any]
"""Keyword arguments of the call of a module."""


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of a layer, with which the layer can be called again.

    Attributes:
        hidden_states: (B, T, E), usually without the vectors that hooks of this package add, see `recorded`.
        args: the other positional arguments.
        kwargs: the other keyword arguments.
    """

    hidden_states: Tensor
    args: Args
    kwargs: Kwargs


@contextmanager
def recorded(layers: Sequence[nn.Module], *, behind_hooks: bool = False) -> Iterator[list[LayerCall]]:
    """Record the calls of layers, or attentions, while a model runs.

    Args:
        layers: the layers or attentions whose calls are recorded.
        behind_hooks: whether to record hidden states after a scheme's hooks have added vectors, not before.

    Yields:
        One entry per call, in the order of the calls.
    """
    calls: list[LayerCall] = []

    def record(layer: nn.Module, args: Args, kwargs: Kwargs) -> None:
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        calls.append(LayerCall(args[0], args[1:], rest) if args else LayerCall(kwargs["hidden_states"], (), rest))

    with ExitStack() as hooks:
        for layer in layers:
            # Usually before the hooks of a scheme, which add position vectors.
            hook = layer.register_forward_pre_hook(record, prepend=not behind_hooks, with_kwargs=True)
            hooks.callback(hook.remove)
        yield calls


uncompiled = partial(torch.compiler.set_stance, "force_eager")
"""Runs compiled code uncompiled within a `with` block, because torch.compile cannot trace hooks of this package."""


def caught(module: nn.Module, run: Callable[[], object]) -> tuple[Args, Kwargs]:
    """Return the arguments of the first call of a module during a forward pass, before other hooks change them.

    The forward pass stops at this call. A hook catches the call, because replacing the module
    would break output recording: transformers installs its recording hooks once, on the layers that it finds. Compiled
    code runs uncompiled here.

    Args:
        module: the module that is called, usually a layer.
        run: function without arguments that runs the forward pass.

    Raises:
        UnsupportedModelError: if the forward pass never calls the module.
    """
    calls: list[tuple[Args, Kwargs]] = []

    def catch(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        calls.append((args, kwargs))
        raise _Caught

    hook = module.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
    try:
        with uncompiled():
            run()
    except _Caught:
        pass
    finally:
        hook.remove()
    if not calls:
        raise UnsupportedModelError(f"a {type(module).__name__} of this model is never called")
    return calls[0]


class _Caught(Exception):
    """Stops a forward pass once a call is caught. It is no error."""


@torch.no_grad()
def entering(decoder: nn.Module, layer: nn.Module, tokens: Tensor) -> Tensor:
    """Return the hidden states that enter a layer, without the vectors that a scheme's hooks add.

    Args:
        decoder: a patched or stock decoder in evaluation mode.
        layer: one of the decoder's layers.
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
    """Return the hidden states in a layer's output, which may be a tuple."""
    return output[0] if isinstance(output, tuple | list) else output
