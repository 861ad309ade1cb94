"""Numbers that schemes make of the hidden state of each token. They are cached as further channels of the keys.

The layers of a cache hold keys and values only. Whatever a cache does (cut, reorder, slide, offload), it does to the
keys. So a pre-hook of the attention makes the numbers, and wraps the cache that the attention got. The wrapper appends
the numbers to the keys before it stores them. Our attention function takes them off again. Numbers of the queries need
no cache: they are one more argument of the attention, which hands it on to our attention function.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils

from ..core.dims import require_shape
from ..core.layer_state import on_attention
from ..core.modules import query_modules
from . import QUERY_NUMBERS

ARGUMENTS = ("past_key_values", "layer_past")
"""Names that families give the argument of an attention that holds the cache."""

_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer")
STORES = tuple(getattr(cache_utils, name).update for name in _LAYERS)
"""Methods that store keys of any width as they are."""

UNKNOWN_CACHE = (
    "the scheme keeps numbers beside the keys in the cache, which {cache} may lose: use a dynamic or static cache of "
    "transformers, or use_cache=False"
)
OTHER_KEYS = (
    "the cache holds keys without the numbers that the scheme keeps beside them: begin with an empty cache. PEFT's "
    "prefix tuning fills it in every call: take prompt tuning or LoRA instead"
)
NO_NUMBERS = (
    "the numbers that a scheme keeps beside the keys did not arrive at the attention of {name}: something calls its "
    "forward without its hooks, or it does not hand its keys to the cache as they are"
)

NO_QUERY_NUMBERS = (
    "the numbers that a scheme makes of the queries did not arrive at the attention of {name}: something calls its "
    "forward without its hooks, or it hands its attention function no further arguments"
)


_EMPTY: dict[str, Any] = {
    "get_mask_sizes": lambda length, layer: (length, 0),
    "get_query_offset": lambda layer: 0,
    "get_conv_state": lambda layer, **kwargs: None,
    "update_conv_state": lambda states, layer, **kwargs: states,
}
"""What an attention with short convolutions asks of a cache, and what an empty one answers."""


class KeysWithNumbers:
    """A cache as one attention sees it. `update` appends numbers to the keys. Everything else is the cache's own."""

    def __init__(self, cache: Any, numbers: Tensor) -> None:
        """Wrap a cache.

        Args:
            cache: the cache, or None. Without a cache `update` stores nothing.
            numbers: (B, H, T, N) of the tokens that the attention gets.
        """
        self.cache = cache
        self.numbers = numbers

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the numbers to the keys (B, K, T, D) and store them; return all cached keys and values."""
        key = join(key, self.numbers)
        if self.cache is None:
            return key, value
        layer = args[0] if args else kwargs["layer_idx"]
        if layer < len(self.cache.layers):
            keys = self.cache.layers[layer].keys
            if keys is not None and keys.numel() and keys.shape[-1] != key.shape[-1]:
                raise ValueError(OTHER_KEYS)
        stored: tuple[Tensor, Tensor] = self.cache.update(key, value, *args, **kwargs)
        return stored

    def get_seq_length(self, *args: object, **kwargs: object) -> int:
        """Return the number of cached tokens, 0 without a cache."""
        length: int = 0 if self.cache is None else self.cache.get_seq_length(*args, **kwargs)
        return length

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the cache, or of an empty one."""
        return _EMPTY[name] if self.cache is None and name in _EMPTY else getattr(self.cache, name)


def join(key: Tensor, numbers: Tensor) -> Tensor:
    """Append numbers to keys.

    A dtype of fewer bits than float32 holds a number as the sum of two: the rounded number, and the rounded rest.

    Args:
        key: (B, K, T, D).
        numbers: (B, H, T, N), float32 or float64.

    Returns:
        (B, K, T, D + H / K * N), or twice as many channels for the numbers.
    """
    rows = numbers.unflatten(1, (key.shape[1], -1)).transpose(2, 3).flatten(3)
    rounded = rows.to(key.dtype)
    if key.dtype in (torch.float32, torch.float64):
        return torch.cat([key, rounded], -1)
    return torch.cat([key, rounded, (rows - rounded).to(key.dtype)], -1)


def split(key: Tensor, size: int, num_heads: int, count: int) -> tuple[Tensor, Tensor] | None:
    """Take numbers off keys, the inverse of `join`.

    Args:
        key: (B, K, L, D and channels of numbers).
        size: D.
        num_heads: H.
        count: N.

    Returns:
        The keys (B, K, L, D), and the numbers (B, H, L, N) in float32, or float64 beside float64. None if the keys have
        another number of channels.
    """
    dtype = torch.promote_types(key.dtype, torch.float32)
    parts = 1 if key.dtype == dtype else 2
    shape = (parts, num_heads // key.shape[1], count)
    if key.shape[-1] != size + shape[0] * shape[1] * shape[2]:
        return None
    rows = key[..., size:].to(dtype).unflatten(-1, shape).sum(-3)  # (B, K, L, H / K, N)
    return key[..., :size], rows.transpose(2, 3).flatten(1, 2)


def wrap_cache(attention: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Forward pre-hook of an attention: make the numbers of its modules, and wrap its cache.

    An attention without such modules has the hook too, because torch.compile does not guard hooks.
    """
    additions: Any = getattr(attention, "posenc_additions", None)
    modules = {} if additions is None else additions.token_modules()
    of_queries = query_modules(attention)
    if not modules and not of_queries:
        return None
    hidden_states: Any = args[0] if args else kwargs["hidden_states"]
    state = on_attention(attention)
    heads = state.heads or getattr(attention.config, "num_attention_heads", None)
    wanted = (hidden_states.shape[0], heads, hidden_states.shape[1])
    if of_queries:
        found = {name: make(hidden_states) for name, make in of_queries.items()}
        for name, own in found.items():
            require_shape(own, (*wanted, None), f"the numbers of queries of {name}, (B, H, T, N),")
        kwargs = kwargs | {QUERY_NUMBERS: found}
    if not modules:
        return args, kwargs
    made = []
    for (name, tokens), width in zip(modules.items(), additions.widths(), strict=True):
        own = tokens(hidden_states)
        own = own[..., None] if width == 1 else own  # (B, H, T) for one number
        made.append(require_shape(own, (*wanted, width), f"the numbers of tokens of {name}, (B, H, T, N),"))
    numbers = torch.cat(made, -1)
    index, name = state.cache
    if index < len(args):
        return (*args[:index], KeysWithNumbers(args[index], numbers), *args[index + 1 :]), kwargs
    return args, {**kwargs, name: KeysWithNumbers(kwargs.get(name), numbers)}


def cache_argument(attention: nn.Module) -> tuple[int, str] | None:
    """Return index and name of the argument of a stock attention that holds the cache; None if it has none."""
    names = tuple(inspect.signature(type(attention).forward).parameters)[1:]
    return next(((names.index(name), name) for name in ARGUMENTS if name in names), None)


def check_cache(cache: Any) -> None:
    """Refuse a cache that might lose the numbers beside the keys.

    Args:
        cache: the cache of a call, or None.

    Raises:
        ValueError: for such a cache. Nothing has been stored in it.
    """
    if cache is None:
        return
    if getattr(type(cache), "update", None) is not cache_utils.Cache.update:
        raise ValueError(UNKNOWN_CACHE.format(cache=type(cache).__name__))
    new_layer: Any = cache.layer_class_to_replicate
    if isinstance(new_layer, partial):
        new_layer = new_layer.func
    for layer in [type(layer) for layer in cache.layers] + ([] if new_layer is None else [new_layer]):
        if issubclass(layer, cache_utils.CacheLayerMixin) and not any(layer.update is update for update in STORES):
            raise ValueError(UNKNOWN_CACHE.format(cache=layer.__name__))
