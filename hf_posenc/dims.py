"""Sizes of an attention, and the choice of layers that a scheme is for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Layers = tuple[int, ...] | str | None
"""Layers that a scheme is for: indices, a slice as text (`"3::4"`), a layer type of the config, or None for all."""


@dataclass(frozen=True)
class Dims:
    """Sizes of the attention that a scheme is built for.

    Attributes:
        num_heads: H.
        num_key_value_heads: K.
        head_dim: D, of queries and keys.
        hidden_size: E.
        num_layers: N.
        value_dim: of values; None: D. It differs in latent attention (MLA).
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    num_layers: int
    value_dim: int | None = None


def select_layers(name: str, layers: Any, count: int, layer_types: Sequence[str] | None) -> tuple[int, ...] | None:
    """Return the indices of the layers that a scheme is for.

    Args:
        name: of the scheme, for messages.
        layers: see `Layers`; any sequence of integers will do. Negative indices count from the last layer.
        count: number of layers of the model.
        layer_types: the config's type of each layer, or None.

    Returns:
        Indices in order; None for every layer.

    Raises:
        TypeError: for anything but indices, text and None.
        ValueError: for layers that do not exist, layers that are named twice, and a selection of no layer.
    """
    if layers is None:
        return None
    if isinstance(layers, str):
        chosen = _by_text(name, layers, count, layer_types or ())
    else:
        indices = _indices(name, layers)
        if wrong := [index for index in indices if not -count <= index < count]:
            raise ValueError(
                f"{name}: there is no layer {', '.join(map(str, wrong))}: the model has {count}, counted from 0"
            )
        chosen = sorted(index % count for index in indices)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{name}: layers={indices} names a layer twice")
    if not chosen:
        raise ValueError(f"{name}: layers={layers!r} selects none of the {count} layers")
    return None if len(chosen) == count else tuple(chosen)


def _by_text(name: str, layers: str, count: int, layer_types: Sequence[str]) -> list[int]:
    """Return the layers of a layer type, or of a slice."""
    known = sorted(set(layer_types))
    if layers in known:
        return [index for index, layer_type in enumerate(layer_types) if layer_type == layers]
    try:
        bounds = [int(part) if part.strip() else None for part in layers.split(":")]
        if 2 <= len(bounds) <= 3:
            return list(range(count))[slice(*bounds)]
    except ValueError:  # no number, or a step of 0
        pass
    choices = f"{', '.join(known)}, or " if known else ""
    raise ValueError(
        f"{name}: layers={layers!r} is neither a layer type of this model nor a slice: give {choices}a "
        "slice like '3::4', or a list of indices"
    )


def _indices(name: str, layers: Any) -> list[int]:
    """Return indices of layers as numbers of Python; TypeError if they are no integers."""
    try:
        indices = list(layers)
        if not any(isinstance(index, bool) for index in indices):
            return [operator.index(index) for index in indices]
    except TypeError:
        pass
    raise TypeError(f"{name}: layers must be a list of indices, a slice as text, a layer type or None: {layers!r}")
