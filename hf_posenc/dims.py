"""Sizes of an attention, and the layers that a scheme can be for."""

from __future__ import annotations

from dataclasses import dataclass

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
