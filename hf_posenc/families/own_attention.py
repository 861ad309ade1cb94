"""The pieces of a stock attention. `ReplacedAttention` computes the attention from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]
"""Query (B, H, T, D), key and value (B, K, T, D)."""

Arguments = dict[str, Any]
"""Arguments of a stock attention by name."""


Stock = Any
"""A stock attention module. Its attributes differ by family, so type checkers know none of them."""


@dataclass(frozen=True)  # so that copies compare equal
class OwnAttention:
    """The pieces of a base's attention. A family derives from this class, and overrides what differs.

    Families have an `OwnAttention` if no rotary module of theirs serves the schemes. There are two kinds. Attention of
    the first kind calls transformers' attention interface; the package replaces it in layers that a scheme rotates.
    Attention of the second kind bypasses the interface (`bypasses_interface`); the package replaces it in every layer,
    whatever the scheme. Layers that keep the base's positions then get them from `alibi` and `rope_parameters`.

    The first argument of most methods is the stock attention module.

    Attributes:
        bypasses_interface: the stock attention never calls transformers' attention interface.
        query_is_scaled: the stock attention multiplies queries by `attention.scaling`, and calls the attention function
            with `scaling=1.0`.
        output_projection: attribute of the attention that holds its output projection.
        cache: argument of the attention that holds the key-value cache.
        idle_rotary: path from the decoder to a rotary module whose cos and sin our replacement does not read.
        positions_in_mask: `position_ids` do not reach the layers, so the package puts them into the position channel.
        mask_as_bool: the decoder converts the mask to bool, or to two numbers that stand for True and False.
        positions: the base's own positions in a few words, for the list of families. `None` means that other fields of
            the family tell.
        decoder_attributes: attribute of the decoder -> the value that switches off the decoder's own positions.
        dropout_at: attribute of the attention with the probability of `dropout`.
        scaling_at: attribute of the attention with the factor of the scores.
        alibi_factor: value of `alibi`.
    """

    bypasses_interface: ClassVar[bool] = False
    query_is_scaled: ClassVar[bool] = False
    output_projection: ClassVar[str] = "out_proj"
    cache: ClassVar[str] = "past_key_values"
    idle_rotary: ClassVar[str | None] = None
    positions_in_mask: ClassVar[bool] = False
    mask_as_bool: ClassVar[bool] = False
    positions: ClassVar[str | None] = None
    decoder_attributes: ClassVar[Mapping[str, Any]] = {}
    dropout_at: ClassVar[str] = "dropout"
    scaling_at: ClassVar[str] = "scaling"
    alibi_factor: ClassVar[float | None] = None

    def split_heads(self, attention: Stock, hidden_states: Tensor) -> Heads:
        """Return query, key and value of hidden states (B, T, E), as the stock attention makes them."""
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        return query * attention.scaling if self.query_is_scaled else query, key, value

    def merge_heads(self, attention: Stock, output: Tensor, arguments: Arguments) -> Tensor:
        """Return (B, T, E) from the attention function's output (B, T, H, D).

        If the stock attention applies residual dropout or adds the residual, this method does so too.

        Args:
            attention: the stock attention.
            output: output of the attention function.
            arguments: arguments of the stock attention by name.
        """
        merged: Tensor = getattr(attention, self.output_projection)(output.flatten(2))
        return merged

    def dropout(self, attention: Stock) -> float:
        """Return the probability with which attention weights are dropped while training."""
        return attrgetter(self.dropout_at)(attention)

    def scaling(self, attention: Stock) -> float:
        """Return the factor of the scores."""
        return attrgetter(self.scaling_at)(attention)

    def window(self, attention: Stock) -> int | None:
        """Return the layer's sliding window, with the query's own token; `None` if it has none or the mask has it."""
        return None

    def outputs(self, attention: Stock, output: Tensor, weights: Tensor | None) -> object:
        """Return output (B, T, E) and weights in the form in which the stock attention returns them."""
        return output, weights

    def alibi(self, attention: Stock) -> float | None:
        """Return the factor by which the base multiplies ALiBi's slopes; `None` if the base has no ALiBi."""
        return self.alibi_factor

    def rope_parameters(self, config: Any) -> dict[str, Any]:
        """Return the base's rotation as transformers' `rope_parameters`, empty if it rotates nothing."""
        return getattr(config, "rope_parameters", None) or {}

    def without_positions(self, attention: Stock, arguments: Arguments) -> Arguments:
        """Return the arguments of the stock forward, changed so that the base's positions have no effect.

        Only for an attention that bypasses the interface. `verify` compares its output with that of its replacement.

        Args:
            attention: the stock attention.
            arguments: arguments by name, without the hidden states; `attention_mask` is a float mask, added to scores.
        """
        return arguments


class DroppingAttention(OwnAttention):
    """The pieces of an attention with two dropout modules, `attn_dropout` and `resid_dropout`."""

    dropout_at = "attn_dropout.p"

    def merge_heads(self, attention: Stock, output: Tensor, arguments: Arguments) -> Tensor:
        """Return the merged heads (B, T, E), after residual dropout."""
        return attention.resid_dropout(super().merge_heads(attention, output, arguments))


def split_fused(fused: Tensor, num_heads: int, head_dim: int) -> Heads:
    """Return query, key and value from a fused projection (B, T, H * 3 * D), which has all three head by head."""
    query, key, value = fused.view(*fused.shape[:-1], num_heads, 3, head_dim).transpose(1, 2).unbind(-2)
    return query, key, value
