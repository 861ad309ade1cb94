"""The pieces of an attention, from which another class can attend in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]
"""Query (B, H, T, D), key and value (B, K, T, D)."""


@dataclass(frozen=True)  # equal wherever the class is, also after copying
class OwnAttention:
    """The pieces of a base's attention. A family derives from this class, and overrides what differs.

    Two kinds of base have them, neither with a rotary module. In one, the attention calls transformers' attention
    interface, and is replaced in layers that are to rotate. In the other it does not (`bypasses_interface`), and is
    replaced in every layer under every scheme, so that no layer keeps what the base has.

    Methods get the stock attention module first.

    Attributes:
        bypasses_interface: the stock attention never calls transformers' attention interface.
        query_is_scaled: queries reach the attention function already multiplied by `attention.scaling`, and it is
            called with `scaling=1.0`.
        output_projection: attribute of the attention that holds its output projection.
        cache: argument of the attention that holds the key-value cache.
        residual: argument of the attention that holds the residual, where `merge_heads` adds that. `None` means that
            the layer adds it.
        idle_rotary: path from the decoder to a module that makes cos and sin which nobody reads once the attention is
            replaced.
        decoder_attributes: attributes of the decoder, each with the value that switches off positions which the decoder
            makes itself.
    """

    bypasses_interface: ClassVar[bool] = False
    query_is_scaled: ClassVar[bool] = False
    output_projection: ClassVar[str] = "out_proj"
    cache: ClassVar[str] = "past_key_values"
    residual: ClassVar[str | None] = None
    idle_rotary: ClassVar[str | None] = None
    decoder_attributes: ClassVar[Mapping[str, Any]] = {}

    def split_heads(self, attention: Any, hidden_states: Tensor) -> Heads:
        """Return query, key and value of hidden states (B, T, E), as the stock attention makes them."""
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        return query * attention.scaling if self.query_is_scaled else query, key, value

    def merge_heads(self, attention: Any, output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return (B, T, E) from the attention function's output (B, T, H, D).

        Residual dropout is included where the stock attention has it, and so is the residual.

        Args:
            attention: the stock attention.
            output: of the attention function.
            arguments: the stock attention's, by name.
        """
        merged: Tensor = getattr(attention, self.output_projection)(output.flatten(2))
        return merged

    def dropout(self, attention: Any) -> float:
        """Return the probability with which attention weights are dropped while training."""
        return attention.dropout

    def scaling(self, attention: Any) -> float:
        """Return the factor of the scores."""
        return attention.scaling

    def window(self, attention: Any) -> int | None:
        """Return the layer's sliding window in tokens, its query's own included, where the mask does not have it."""
        return None

    def outputs(self, attention: Any, output: Tensor, weights: Tensor | None) -> Any:
        """Return what the stock attention returns, from its output (B, T, E) and its weights."""
        return output, weights

    def rope_parameters(self, config: Any) -> dict[str, Any]:
        """Return the base's own rotation as transformers' `rope_parameters`, empty if it rotates nothing."""
        return getattr(config, "rope_parameters", None) or {}

    def without_positions(self, attention: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the stock forward, changed so that the base's own positions do nothing.

        Only for an attention that bypasses the interface: `verify` compares the result with its replacement's.

        Args:
            attention: the stock attention.
            arguments: by name, without the hidden states; `attention_mask` is a float mask that is added to scores.
        """
        return arguments


class DroppingAttention(OwnAttention):
    """The pieces of an attention that has a module for each of its two dropouts."""

    def merge_heads(self, attention: Any, output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        """Return (B, T, E), some of it dropped while training."""
        return attention.resid_dropout(super().merge_heads(attention, output, arguments))

    def dropout(self, attention: Any) -> float:
        """Return the probability with which attention weights are dropped while training."""
        return attention.attn_dropout.p


def split_fused(fused: Tensor, num_heads: int, head_dim: int) -> Heads:
    """Return query, key and value of a projection (B, T, H * 3 * D) that makes all three, head by head."""
    query, key, value = fused.view(*fused.shape[:-1], num_heads, 3, head_dim).transpose(1, 2).unbind(-2)
    return query, key, value
