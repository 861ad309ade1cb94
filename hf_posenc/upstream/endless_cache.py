"""A cache of constant size, for models whose layers all have a sliding window: the first keys and the last ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from ..errors import UnsupportedModelError
from ..layer_state import STATE, OnAttention
from ..positions import pack
from .masks import count_positions

NOT_HERE = (
    "EndlessCache holds some of the keys, and this model asks for a mask as if it held all: it needs a model of "
    "patch_model with window= in every layer, whose layers get position_ids. Take DynamicCache"
)
NO_CROP = "EndlessCache has dropped keys and cannot go back: no assisted generation and no crop; take DynamicCache"


class _FirstAndLast(DynamicLayer):
    """The cache of one layer: after each update it holds the first `kept` and the last `last` keys and values."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last
        self.kept = 0
        self.cumulative_length = 0
        self.is_croppable = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the held keys and values with the new ones behind them, then drop what no later query sees."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        self.keys, self.values = (self._held(each) for each in (keys, values))
        return keys, values

    def _held(self, states: Tensor) -> Tensor:
        length = states.shape[-2]
        if length <= self.kept + self.last:
            return states
        return torch.cat([states[..., : self.kept, :], states[..., length - self.last :, :]], -2)

    def get_seq_length(self) -> int:
        """Return the number of tokens that were read, dropped ones included: positions count on from it."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Raise ValueError: keys with a gap between them have no offset."""
        raise ValueError(NOT_HERE)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise NotImplementedError: dropped keys do not come back."""
        raise NotImplementedError(NO_CROP)


class EndlessCache(Cache):
    """A cache of constant size for texts without end: it holds the first `sinks` keys and the last `window - 1`.

    Give it to `model(...)` or `model.generate(...)` as `past_key_values`. What a model computes with it equals what it
    computes without a cache, because no layer sees the dropped keys. Rotated keys keep their own positions;
    StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) rotates them by their place in the cache instead. With padding it
    also holds the slots of padding before the first tokens; pass `attention_mask` (B, all tokens) in every call then.

    The cache is for one model: it holds as many keys as the layer with the most sinks and the one with the widest
    window need. It cannot be cropped, so there is no assisted generation, and torch.compile does not trace it.

    Args:
        model: a patched model, each layer of which has a scheme with `window`.

    Raises:
        UnsupportedModelError: if a layer sees all keys or has no attention, or the base has sliding windows or chunks
            of its own: its `DynamicCache` is of constant size by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        """Make an empty cache for a model."""
        config: Any = model.config
        config = config.get_text_config(decoder=True)
        states = _states(model)
        if any(DynamicCache(config=config).is_sliding):
            raise UnsupportedModelError("EndlessCache: this base drops keys in caches of its own: take DynamicCache")
        without = config.num_hidden_layers - sum(state.window is not None for state in states)
        if without > 0:
            raise UnsupportedModelError(
                f"EndlessCache would lose keys: {without} of {config.num_hidden_layers} layers have no window of a "
                "scheme. Give every layer one, as in patch_model(model, 'rope', window=256, sinks=4)"
            )
        self.window = max(state.window or 0 for state in states)
        self.sinks = max(state.kept_first for state in states)
        super().__init__(layers=[_FirstAndLast(self.window - 1) for _ in range(config.num_hidden_layers)])

    def crop(self, tokens_to_remove: int) -> None:
        """Raise NotImplementedError: dropped keys do not come back."""
        raise NotImplementedError(NO_CROP)

    def channel(self, decoder: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return the position channel of new tokens behind the held keys, and choose which keys to hold from now on.

        Args:
            decoder: the decoder that reads the tokens.
            tokens: (B, Q) or (B, Q, E).
            mask: attention mask (B, all tokens that were read, and the new ones), zero for padding; None for none.

        Raises:
            ValueError: if the cache is too small for the decoder, torch compiles, or the mask is of another shape or
                shows padding that earlier calls did not know of.
        """
        if any((state.window or 0) > self.window or state.kept_first > self.sinks for state in _states(decoder)):
            raise ValueError("this EndlessCache was made for a model with a smaller window or fewer sinks")
        if torch.compiler.is_compiling():
            raise ValueError("torch.compile does not trace EndlessCache: take another cache")
        read, total = self.get_seq_length(), self.get_seq_length() + tokens.shape[1]
        if mask is not None and mask.shape != (tokens.shape[0], total):
            raise ValueError(
                f"with EndlessCache pass an attention mask {(tokens.shape[0], total)} of all tokens, cached ones "
                f"included, or none, not one of shape {tuple(mask.shape)}"
            )
        valid = None if mask is None else mask.to(tokens.device).bool()
        held = self.layers[0].kept if read else 0
        kept = max(held, self._kept(valid, total))
        if held < kept and held < read:
            raise ValueError("attention_mask shows padding that earlier calls with this EndlessCache did not know of")
        for layer in self.layers:
            layer.kept = kept
        last = min(max(kept, read - self.window + 1), read)
        first_slots, last_slots, queries = (
            torch.arange(start, end, device=tokens.device)
            for start, end in ((0, min(kept, read)), (last, total), (read, total))
        )
        keys, queries = torch.cat([first_slots, last_slots])[None], queries[None]
        return pack(queries, keys, **count_positions(valid, queries, keys))

    def _kept(self, valid: Tensor | None, total: int) -> int:
        """Return how many slots hold the first tokens of every row; all slots as long as a row has too few tokens."""
        if self.sinks == 0 or valid is None:
            return min(self.sinks, total)
        return min(int((valid.cumsum(-1) < self.sinks).sum(-1).max()) + 1, total)


def _states(model: nn.Module) -> list[OnAttention]:
    """Return the states of the attentions of a patched model."""
    states = [getattr(module, STATE, None) for module in model.modules()]
    return [state for state in states if isinstance(state, OnAttention)]
