"""The one file that knows transformers' attention interface, mask interface and rotary modules.

Importing it registers one attention function and one mask function under the name `hf_posenc`; nothing else is changed.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, LlamaConfig, PreTrainedConfig
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_overlay,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import output_capturing

from . import positions
from .call import Call
from .engines import dispatch
from .registry import adapter_for
from .schemes.base import Dims, ScoreModule
from .schemes.rope import PROPORTIONAL, Rope, apply_rotary, by_layer_type

NAME = "hf_posenc"
"""Name of our attention and mask function."""

ORIGINAL_LENGTH = "original_max_position_embeddings"
"""Key of `rope_parameters`, and attribute of some configs, which transformers prefers to the key."""

NO_MASK = (
    "the attention mask, which carries the positions, did not arrive at the attention layer. The context parallelism "
    "of accelerate (cp_size) and some wrappers drop it; attention would then run without positions, or inside one "
    "shard of the sequence. Launch without cp_size and use hf_posenc.context_parallel(model, group) instead"
)
SPLIT_HEADS = (
    "tensor parallelism (tp_size) and sequence parallelism by heads (sp_size, Ulysses) give each process some of the "
    "heads, and what this scheme holds per head would meet the wrong ones. Use data parallelism, FSDP, or "
    "hf_posenc.context_parallel for long sequences; or a scheme that keeps the stock attention: nope, sinusoidal, "
    "learned, rope"
)
PAGED = (
    "paged attention and continuous batching hand over keys without their positions, so a scheme that changes "
    "attention scores "
    "cannot run with them: use generate(), or a scheme that keeps the stock attention (nope, sinusoidal, learned, rope)"
)

BIDIRECTIONAL = (
    "is_causal is False: no scheme here defines distances to keys that come later. Set config.is_causal "
    "back to True and do not pass is_causal, or unpatch the model"
)

PASSED_OVER = {
    "cache": "of paged attention, refused by itself",
    "use_cache": "the keys and values that arrive are those of the cache already",
    "cache_position": "the slots are in the channel",
    "sliding_window": "the window is in the channel",
    "is_causal": "refused if it is False",
    "cu_seq_lens_q": "documents are in the channel, and compared with these",
    "cu_seq_lens_k": "the same as those of the queries without a cache",
    "max_length_q": "lengths that flash attention wants to know",
    "max_length_k": "lengths that flash attention wants to know",
    "seq_idx": "documents, for layers that have a state instead of attention",
    "output_attentions": "decides which engine is chosen",
    "output_hidden_states": "read by the model",
    "output_router_logits": "read by the model",
    "return_dict": "read by the model",
    "token_type_ids": "read by embeddings, where a family has them",
    "num_items_in_batch": "read by the loss",
    "shift_labels": "read by the loss",
    "ignore_index": "read by the loss",
}
"""What models hand down to attention that does not change what ours computes, and why."""

UNKNOWN_DOCUMENTS = (
    "cu_seq_lens_q divides the batch into documents that the position channel does not know of: pass position_ids that "
    "start again at each document too, without attention_mask and with use_cache=False"
)


def check_engine(attention: str) -> None:
    """Raise ValueError unless this is a value of `patch_model(..., attention=...)`: `auto` or an engine's name."""
    if attention != "auto":
        dispatch.named(attention)


def scheme_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the scheme that sits on the module; the function behind the attention name `hf_posenc`.

    Args:
        module: a model's attention, patched: it has `posenc`, `posenc_engine` and `scaling`.
        query: (B, H, Q, D).
        key: (B, K, L, D), including cached keys.
        value: (B, K, L, D).
        attention_mask: the position channel, or a user's own 4-D mask.
        scaling: factor of the scores; None means the module's.
        dropout: probability that an attention weight is dropped.
        softcap: cap on the scores.
        position_ids: (B|1, Q).
        **kwargs: what families pass besides, see `PASSED_OVER`.

    Returns:
        output (B, Q, H, D) and weights (B, H, Q, L) or None.

    Raises:
        ValueError: if the module has no scheme, the mask did not arrive, heads are missing (tensor parallelism), or
            chosen position ids meet a filled cache.
        TypeError: for an argument that is not known here and not None: attention sinks (`s_aux`), for one.
        NotImplementedError: for paged attention.
    """
    if kwargs.get("cache") is not None:
        raise NotImplementedError(PAGED)
    exchange = module.__dict__.get("posenc_exchange")  # inside context_parallel
    if "posenc" not in module._modules and exchange is None:
        raise ValueError(
            f"{type(module).__name__} runs with the attention implementation {NAME!r} but carries no position "
            "encoding: "
            "apply hf_posenc.patch_model to the model instead of naming the implementation"
        )
    if attention_mask is None:
        raise ValueError(NO_MASK)
    if unknown := sorted(key for key in kwargs.keys() - PASSED_OVER.keys() if kwargs[key] is not None):
        raise TypeError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which the one of hf_posenc does not "
            "know and would ignore. If it is an argument of your own call of the model, leave it out; otherwise use a "
            "scheme that keeps the stock attention (nope, sinusoidal, learned, rope)"
        )
    if kwargs.get("is_causal") is False:
        raise ValueError(BIDIRECTIONAL)
    heads = getattr(module.config, "num_attention_heads", query.shape[1])
    if query.shape[1] != heads:
        raise ValueError(f"{query.shape[1]} of {heads} heads arrived at the attention layer: {SPLIT_HEADS}")
    if exchange is None:
        where = positions.read(attention_mask, query.shape[2], key.shape[2])
    else:
        key, value, where = exchange(key, value, attention_mask, kwargs.get("sliding_window"))
    if (starts := kwargs.get("cu_seq_lens_q")) is not None:
        positions.ensure(where.divided_at(starts[1:-1]), UNKNOWN_DOCUMENTS)
    if query.shape[2] == key.shape[2] or torch.compiler.is_compiling():
        where = where.follow(position_ids)
    elif attention_mask.__dict__.get("posenc_checked") is not position_ids:
        # With a cache this only checks: once for all layers, which get the same two tensors.
        where.follow(position_ids)
        attention_mask.__dict__["posenc_checked"] = position_ids
    call = Call(
        query,
        key,
        value,
        where,
        scaling=module.scaling if scaling is None else scaling,
        vector_scaling=module.scaling,
        softcap=softcap,
        dropout=dropout,
        weights=_wants_weights(module, kwargs),
    )
    if "posenc" not in module._modules:
        return stock_attention(call)
    return module.posenc(call, partial(dispatch.attend, wanted=module.posenc_engine))


def stock_attention(call: Call) -> tuple[Tensor, Tensor | None]:
    """Attend without a scheme, where queries and keys are not the same tokens: inside context parallelism.

    Args:
        call: of whose positions only what is visible counts.

    Returns:
        output (B, Q, H, D), and None.
    """
    if call.softcap is not None:  # which no stock kernel has
        return ScoreModule()(replace(call, weights=False), dispatch.attend)
    output = nn.functional.scaled_dot_product_attention(
        call.query,
        call.key,
        call.value,
        call.visible(),
        dropout_p=call.dropout,
        scale=call.scaling,
        enable_gqa=call.groups != 1,
    )
    return output.transpose(1, 2).contiguous(), None


def _wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether the attention weights are to be recorded; some families do not hand the argument down."""
    if torch.compiler.is_compiling():  # the engine that is traced returns them anyway
        return False
    recording = output_capturing._active_collector.get() or {}
    return bool(
        "attentions" in recording
        or kwargs.get("output_attentions")
        or getattr(module.config, "output_attentions", False)
    )


# ---------------------------------------------------------------------------------------------------------------- masks

_SLIDING = sliding_window_overlay(1).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_AND = and_masks(causal_mask_function).__code__


def _remapping_code() -> object:
    """Return the code of 5.23's remapping of packed indices; older releases have none."""
    from transformers import masking_utils

    make = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    return None if make is None else make(causal_mask_function, torch.zeros(1, 1)).__code__


_REMAPPED = _remapping_code()


def describe_mask(mask_function: Callable[..., Any]) -> dict[str, Any] | None:
    """Take a mask function of transformers apart.

    Its closures are recognised by the identity of their code, so that an unknown one is never mistaken for a known one.

    Args:
        mask_function: (batch, head, query index, key index) -> visible.

    Returns:
        A dict with `causal` (True if present), `window` (int) and `segments` (B|1, T) if present; None if any part is
        unknown.
    """
    if mask_function is causal_mask_function:
        return {"causal": True}
    code = getattr(mask_function, "__code__", None)
    if code not in (_SLIDING, _PACKED, _AND, _REMAPPED) or code is None:
        return None
    inside = inspect.getclosurevars(mask_function).nonlocals
    if code is _SLIDING:
        return {"window": inside["sliding_window"]}
    if code is _PACKED:
        return {"segments": inside["packed_sequence_mask"]}
    if code is _REMAPPED:  # positions of one packed document are consecutive: order and lags are those of the indices
        return describe_mask(inside["mask_function"])
    parts = [describe_mask(part) for part in inside["mask_functions"]]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or sum("window" in part for part in known) > 1:
        return None
    return {key: value for part in known for key, value in part.items()}


def probe_mask(
    mask_function: Callable[..., Any], query_index: Tensor, batch_size: int, same_tokens: bool, window: int | None
) -> dict[str, Any]:
    """Find window and segments by asking the mask function about O(Q) pairs.

    For compiling, where closures cannot be taken apart. The decoder masks of transformers are conjunctions of
    causality, one sliding window and packed segments; each family that is supported builds its masks from these only.

    Args:
        mask_function: a conjunction of the above.
        query_index: (1, Q) slots.
        batch_size: B.
        same_tokens: whether queries and keys are the same tokens: only then can there be segments.
        window: the config's sliding window, which this mask may or may not have.

    Returns:
        as `describe_mask`, with `window` a tensor.
    """
    found: dict[str, Any] = {"causal": True}
    rows = torch.arange(batch_size, device=query_index.device)[:, None]
    index = query_index.expand(batch_size, -1)
    same_segment = torch.ones_like(index, dtype=torch.bool)
    if same_tokens:
        joined = mask_function(rows, 0, index, (index - 1).clamp(min=0))
        found["segments"] = (~joined).cumsum(-1)
    if window is not None:
        behind = (index - window).clamp(min=0)
        if same_tokens:
            same_segment = found["segments"] == found["segments"].gather(-1, behind)
        beyond = mask_function(rows, 0, index, behind) & same_segment & (index >= window)
        found["window"] = torch.where(beyond.any(), positions.NO_WINDOW, window)
    return found


def position_channel(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Make the position channel; the function behind the mask name `hf_posenc`.

    Args:
        batch_size: B.
        q_length: Q.
        kv_length: L.
        q_offset: slot of the first query; a static cache passes a live tensor.
        kv_offset: slot of the first key.
        mask_function: which pairs are visible, of slots.
        attention_mask: (B, slots) bool, False for padding, or None.
        use_vmap: how to evaluate a mask function that is not made of index arithmetic.
        device: of the model's inputs.
        **kwargs: the rest of the interface.

    Returns:
        The compact int32 channel (B|1, 1, ROWS, Q + L), or the dense form (B|1, 1, Q + 1, L) for mask functions that it
        cannot express.

    Raises:
        ValueError: for a mask function that shows later keys.
    """
    if mask_function is bidirectional_mask_function:
        raise ValueError(BIDIRECTIONAL)
    query_index = (torch.arange(q_length, device=device) + q_offset)[None]
    key_index = (torch.arange(kv_length, device=device) + kv_offset)[None]
    query_positions, key_positions = query_index, key_index
    query_valid = key_valid = query_resumed = None
    if attention_mask is not None:
        seen = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        counted = seen.cumsum(-1) - 1  # padding takes no position
        slots = torch.arange(seen.shape[-1], device=seen.device)
        since = slots - torch.where(seen, -1, slots).cummax(-1).values  # tokens since the last padding
        resumed = torch.where(since <= counted, since, counted)  # if there are others before that padding

        def at(table: Tensor, index: Tensor) -> Tensor:
            return table.gather(-1, index.clamp(max=table.shape[-1] - 1).expand(table.shape[0], -1))

        query_positions, key_positions = at(counted, query_index), at(counted, key_index)
        query_valid, key_valid = at(seen, query_index), at(seen, key_index)
        query_resumed = at(resumed, query_index)

    if torch.compiler.is_compiling() and getattr(mask_function, "__code__", None) is _AND:
        window = getattr(kwargs.get("config"), "sliding_window", None)
        same_tokens = q_length == kv_length and isinstance(q_offset, int) and q_offset == 0
        shape: dict[str, Any] | None = probe_mask(mask_function, query_index, batch_size, same_tokens, window)
    else:
        shape = describe_mask(mask_function)
    if shape is None or "causal" not in shape:
        visible = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        positions.ensure(
            ~(visible & (key_index[:, None, None] > query_index[:, None, :, None])).any(), positions.SHOWS_FUTURE
        )
        distance = (query_positions[:, :, None] - key_positions[:, None, :])[:, None]
        return positions.pack_dense(distance, visible)

    segments = shape.get("segments")
    if segments is not None:  # queries and keys are the same tokens; count positions from the start of each document
        index = torch.arange(q_length, device=segments.device)[None]
        starts = torch.nn.functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        query_positions = key_positions = index - torch.where(starts, index, 0).cummax(-1).values
    return positions.pack(
        query_index,
        key_index,
        query_positions=query_positions,
        key_positions=key_positions,
        query_valid=query_valid,
        key_valid=key_valid,
        query_segment=segments,
        key_segment=segments,
        window=shape.get("window"),
        query_resumed=query_resumed,
    )


def check_masks(arguments: Iterable[Any]) -> None:
    """Refuse 4-D masks that a decoder is called with, if they show later keys or are of integers.

    Args:
        arguments: of the decoder. What is 4-D among them is a mask; families with several kinds of layers may get a
            dict of masks. A cache says where the queries sit.

    Raises:
        ValueError: see `positions.check`.
    """
    found = [each for given in arguments for each in (given.values() if isinstance(given, dict) else (given,))]
    masks = [each for each in found if isinstance(each, Tensor) and each.ndim == 4]
    if masks:
        before = next((each.get_seq_length() for each in found if isinstance(each, Cache)), 0)
        for mask in masks:
            positions.check(mask, before.to(mask.device) if isinstance(before, Tensor) else before)


# --------------------------------------------------------------------------------------------------------------- rotary


class RotaryAttention(nn.Module):
    """Mixed in front of the attention of a base without rotary embedding: rotates before the cache, then attends.

    Why a class and not a hook on the projection: PEFT wraps the projection, and its update would be added after the
    hook.
    """

    posenc_family: str
    posenc_layout: str
    layer_idx: int
    scaling: float
    config: PreTrainedConfig

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with rotated queries and keys.

        Args:
            hidden_states: (B, T, E).
            past_key_values: a transformers cache, or None.
            attention_mask: as the stock attention gets it.
            position_ids: (B|1, T).
            **kwargs: handed on to the attention function.

        Returns:
            (B, T, E) and the attention weights or None.
        """
        adapter = adapter_for(self.posenc_family)
        assert adapter.split_heads
        assert adapter.merge_heads
        assert adapter.attention_dropout
        query, key, value = adapter.split_heads(self, hidden_states)
        if position_ids is None:
            raise ValueError("position_ids did not arrive at the attention layer, so nothing can be rotated")
        like = value.new_empty(0, dtype=torch.promote_types(value.dtype, torch.float32))
        cos, sin = self.posenc_rotary(like, position_ids)
        query = apply_rotary(query, cos, sin, self.posenc_layout)
        key = apply_rotary(key, cos, sin, self.posenc_layout)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        stock = stock_class(type(self), RotaryAttention)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, sys.modules[stock.__module__].eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=adapter.attention_dropout(self) if self.training else 0.0,
            scaling=1.0 if adapter.query_is_scaled else self.scaling,
            position_ids=position_ids,
            **kwargs,
        )
        return adapter.merge_heads(self, output), weights

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class, since this one is made on demand."""
        return revive, (rotary_class, stock_class(type(self), RotaryAttention)), self.__dict__


def stock_class(cls: type, mixin: type) -> type:
    """Return the class that `mixin` was put in front of."""
    return next(base for base in cls.__bases__ if base is not mixin)


def revive(make: Callable[[type], type], stock: type) -> Any:
    """Return an empty instance of the class that `make` derives from a stock class, for pickle and copy."""
    cls = make(stock)
    return object.__new__(cls)


def rotary_class(stock: type) -> type:
    """Return the rotating sub-class of a stock attention class."""
    return type("Rotary" + stock.__name__, (RotaryAttention, stock), {"__module__": __name__})


class IdentityRotary(nn.Module):
    """Stands in for a base's rotary module: cos 1, sin 0, which turns nothing, exactly."""

    def __init__(self, native: nn.Module) -> None:
        """Return as many cosines as the native module would.

        Args:
            native: the base's rotary module; its frequencies say how many dimensions of a head it turns.
        """
        super().__init__()
        self.size = 2 * next(b.shape[-1] for name, b in native.named_buffers() if name.endswith("inv_freq"))

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return ones and zeros (B|1, T, R) in the dtype of x; further arguments of families are ignored."""
        shape = (*position_ids.shape, self.size)
        return x.new_ones(1).expand(shape), x.new_zeros(1).expand(shape)


class PartialRotary(nn.Module):
    """Widens cos and sin for a base that turns whole heads: the added pairs stand still."""

    def __init__(self, rotary: nn.Module, size: int) -> None:
        """Wrap a rotary module.

        Args:
            rotary: a module that returns cos and sin of fewer dimensions.
            size: D.
        """
        super().__init__()
        self.rotary = rotary
        self.size = size

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (B|1, T, D) each."""
        cos, sin = self.rotary(x, position_ids, *args, **kwargs)
        half = cos.shape[-1] // 2
        padding = (0, self.size // 2 - half)
        pad = torch.nn.functional.pad
        cos, sin = pad(cos[..., :half], padding, value=1.0), pad(sin[..., :half], padding)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


class _Asked(dict[str, Any]):
    """`rope_parameters` that remember what transformers asked them for: the only true list of what it reads."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"rope: scaling {self.get('rope_type')} needs {key}")

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def unread(self) -> set[str]:
        """Return the keys that nobody asked for; the share of the head is ours to apply where the base does not.

        `type`, the old name of `rope_type`, is asked for, and then not used beside it.
        """
        return set(self) - (self.asked - {"type"}) - {"rope_type", "partial_rotary_factor"}


def own_rotation(config: PreTrainedConfig, dims: Dims, native: nn.Module | None, slices_rotary: bool) -> dict[str, Any]:
    """Return the base's own `rope_parameters`, as far as transformers reads them.

    Args:
        config: of the base model.
        dims: of its attention.
        native: its rotary module, or None.
        slices_rotary: whether its attention turns as many dimensions as there are cosines; otherwise it turns all.

    Returns:
        One dict, or one by layer type; empty if the config has none.
    """
    own = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    if not own:
        return {}
    for each in by_layer_type(own).values():
        each.setdefault("rope_type", each.get("type", "default"))
        if not slices_rotary and each["rope_type"] != PROPORTIONAL:
            each.pop("partial_rotary_factor", None)
    _, asked = _rotary(own, config, dims, native, slices_rotary)
    for each, read in zip(by_layer_type(own).values(), asked, strict=True):
        for key in read.unread():
            del each[key]
    return own


def check_scalings(scheme: Rope) -> None:
    """Raise ValueError unless transformers has every scaling that a scheme names."""
    for scaling in scheme.scalings():
        if (kind := scaling.get("rope_type")) not in tuple(ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"rope: scaling['rope_type'] must be one of {', '.join(ROPE_INIT_FUNCTIONS)}, not {kind!r}; "
                "scaling='none' switches scaling off"
            )


def make_rotary(
    parameters: dict[str, Any], config: PreTrainedConfig, dims: Dims, native: nn.Module | None, slices_rotary: bool
) -> nn.Module:
    """Return a rotary module with these parameters: the base's own class where it has one, else LLaMA's.

    Args:
        parameters: transformers' `rope_parameters`.
        config: of the base model, left as it is.
        dims: of its attention.
        native: its rotary module, or None.
        slices_rotary: whether its attention turns as many dimensions as there are cosines; otherwise it turns all.

    Returns:
        A module (x, position_ids (B|1, T), ...) -> cos, sin (B|1, T, R).

    Raises:
        ValueError: where transformers finds the parameters wrong or missing, or would not read one of them.
    """
    rotary, asked = _rotary(parameters, config, dims, native, slices_rotary)
    for each in asked:
        if unread := sorted(each.unread()):
            known = ", ".join(sorted(each.asked - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}))
            raise ValueError(
                f"rope: scaling {each['rope_type']} has no parameter {', '.join(unread)}; it has {known or 'none'}"
            )
    return rotary


def _rotary(
    parameters: dict[str, Any], config: PreTrainedConfig, dims: Dims, native: nn.Module | None, slices_rotary: bool
) -> tuple[nn.Module, list[_Asked]]:
    """As `make_rotary`, without the last check; also the parameters by layer type, with what was asked of them."""
    length = config.max_position_embeddings
    config = copy.deepcopy(config) if native is not None else LlamaConfig(max_position_embeddings=length)
    parameters = copy.deepcopy(parameters)
    types = by_layer_type(parameters)
    size = dims.head_dim
    if not slices_rotary:  # these classes know whole heads only: show them a smaller head
        shares = {
            1.0 if each["rope_type"] == PROPORTIONAL else each.pop("partial_rotary_factor", 1.0)
            for each in types.values()
        }
        if len(shares) > 1:
            raise ValueError("rope: this base turns whole heads, so partial_rotary_factor is one for all layer types")
        size = int(dims.head_dim * shares.pop())
        config.head_dim = size
    if None in types and hasattr(config, ORIGINAL_LENGTH) and ORIGINAL_LENGTH in parameters:
        setattr(config, ORIGINAL_LENGTH, parameters[ORIGINAL_LENGTH])  # the config's own would be taken instead
    asked = [_Asked(each) for each in types.values()]
    config.rope_parameters = asked[0] if None in types else dict(zip(types, asked, strict=True))
    try:
        rotary = (LlamaRotaryEmbedding if native is None else type(native))(config)
        config.rope_parameters = parameters
        config.validate_rope()
    except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"rope: transformers cannot compute {parameters}: {type(error).__name__} {error}") from error
    return rotary if native is None or size == dims.head_dim else PartialRotary(rotary, dims.head_dim), asked


AttentionInterface.register(NAME, scheme_attention)
AttentionMaskInterface.register(NAME, position_channel)
