"""Sizes of an attention, and how to name the layers of a scheme."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

Layers = tuple[int, ...] | str | None
"""Layers of a scheme: indices, a slice as text (`"3::4"`), a layer type of the config, `rest`, or None for all."""

REST = "rest"
"""`layers` of a scheme that goes into the layers that no other scheme names."""


@dataclass(frozen=True)
class Dims:
    """Sizes of the attention that a scheme is built for.

    Attributes:
        num_heads: number of query heads, H.
        num_key_value_heads: number of key-value heads, K.
        head_dim: head size of queries and keys, D.
        hidden_size: size of hidden states, E.
        num_layers: number of layers, N.
        value_dim: head size of values; None means D. Latent attention (MLA) has another size.
        layer: index of the layer.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int
    num_layers: int
    value_dim: int | None = None
    layer: int = field(default=0, compare=False)


def require_shape(found: Tensor, wanted: tuple[int | None, ...], what: str) -> Tensor:
    """Return a tensor; ValueError if it has another shape.

    Args:
        found: the tensor.
        wanted: its shape; None stands for any size.
        what: what it is and who computes it, for the message.
    """
    shape = tuple(found.shape)
    if len(shape) != len(wanted) or any(size not in (None, own) for size, own in zip(wanted, shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ValueError(f"{what} must have the shape ({sizes}), not {shape}")
    return found
