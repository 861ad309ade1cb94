"""What layers were called with in a forward pass, so that one of them can be called again by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class LayerCall:
    """What one layer was called with, before hooks of this package saw it.

    Attributes:
        hidden_states: (B, T, E).
        args: the other positional arguments.
        kwargs: the other arguments by name.
    """

    hidden_states: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def recorded(layers: Sequence[nn.Module]) -> Iterator[list[LayerCall]]:
    """Write down what layers, or attentions, are called with while a model runs.

    Args:
        layers: which.

    Yields:
        One entry per call, in the order of the calls.
    """
    calls: list[LayerCall] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        calls.append(LayerCall(args[0], args[1:], rest) if args else LayerCall(kwargs["hidden_states"], (), rest))

    with ExitStack() as hooks:
        for layer in layers:
            # First in line: hooks of a scheme add positions to what this one has seen.
            hooks.callback(layer.register_forward_pre_hook(record, prepend=True, with_kwargs=True).remove)
        yield calls


def first(output: Any) -> Tensor:
    """Return the hidden states that a layer returned, alone or with others."""
    return output[0] if isinstance(output, tuple) else output
