"""What layers were called with in a forward pass, so that one of them can be called again by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class LayerCall:
    """What one layer was called with, before hooks of this package saw it, unless it was recorded behind them.

    Attributes:
        hidden_states: (B, T, E).
        args: the other positional arguments.
        kwargs: the other arguments by name.
    """

    hidden_states: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def recorded(layers: Sequence[nn.Module], *, behind_hooks: bool = False) -> Iterator[list[LayerCall]]:
    """Write down what layers, or attentions, are called with while a model runs.

    Args:
        layers: which.
        behind_hooks: with what hooks of a scheme have added to the hidden states.

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


def first(output: Any) -> Tensor:
    """Return the hidden states that a layer returned, alone or with others."""
    return output[0] if isinstance(output, tuple) else output
