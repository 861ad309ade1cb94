"""The attention function of this package, registered with transformers under the name `hf_posenc` on import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import output_capturing

from ..attention_call import Call
from ..engines import dispatch
from ..families.own_attention import Stock
from ..layer_state import OnAttention, on_attention
from ..modules import WithoutPositions
from ..positions import DensePositions, Positions, ensure, read
from . import NAME, POSITION_IDS, flash
from .masks import BIDIRECTIONAL
from .token_numbers import NO_NUMBERS, split

NO_MASK = (
    "the attention mask, which carries the positions, did not arrive at the attention layer. The context parallelism "
    "of accelerate (cp_size) and some wrappers drop it; attention would then run without positions, or inside one "
    "shard of the sequence. Launch without cp_size and use hf_posenc.context_parallel(model, group) instead"
)
SPLIT_HEADS = (
    "tensor parallelism (tp_size) and sequence parallelism by heads (sp_size, Ulysses) give each process some of the "
    "heads, and the scheme's parameters of other heads would be used there. Use data parallelism, FSDP, or "
    "hf_posenc.context_parallel for long sequences; or a scheme that keeps the stock attention: nope, sinusoidal, "
    "learned, rope"
)
PAGED = (
    "paged attention and continuous batching hand over keys without their positions, so a scheme that changes "
    "attention scores "
    "cannot run with them: use generate(), or a scheme that keeps the stock attention (nope, sinusoidal, learned, rope)"
)

PASSED_OVER = {
    "cache": "the cache of paged attention, which is refused",
    "logits_to_keep": "read by the head; some multimodal models also hand it to the layers",
    "use_cache": "the cached keys and values are already among those that arrive",
    "cache_position": "the slots are in the channel",
    "sliding_window": "the window is in the channel",
    "is_causal": "refused if it is False",
    "cu_seq_lens_q": "documents are in the channel, and these are compared with them",
    "cu_seq_lens_k": "the same as `cu_seq_lens_q` without a cache",
    "max_length_q": "read by flash attention",
    "max_length_k": "read by flash attention",
    "seq_idx": "documents, for state-space layers",
    "output_attentions": "decides which engine is chosen",
    "output_hidden_states": "read by the model",
    "output_router_logits": "read by the model",
    "return_dict": "read by the model",
    "token_type_ids": "read by embeddings, where a family has them",
    "num_items_in_batch": "read by the loss",
    "shift_labels": "read by the loss",
    "ignore_index": "read by the loss",
    "tokenizer": "read by generate for `stop_strings`, and handed on",
    "assistant_tokenizer": "read by generate for an assistant model with another vocabulary, and handed on",
}
"""Argument that models hand to attention -> why our attention function may ignore it."""

CHECKED = "posenc_checked"
"""Attribute of a mask that holds the position ids that were checked against it."""

UNKNOWN_DOCUMENTS = (
    "cu_seq_lens_q divides the batch into documents that the position channel does not know of: pass position_ids that "
    "start again at each document too, without attention_mask and with use_cache=False"
)


def check_engine(attention: str) -> None:
    """Raise ValueError unless `attention` is a value for `patch_model(..., attention=...)`: `auto` or an engine."""
    if attention != "auto":
        dispatch.find_engine(attention)


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
    """Attend with the scheme of an attention module. transformers calls this for the attention name `hf_posenc`.

    Args:
        module: a patched attention module. It has `posenc`, a state (`hf_posenc.layer_state`) and `scaling`.
        query: (B, H, Q, D).
        key: (B, K, L, D), including cached keys.
        value: (B, K, L, V), as a rule V = D.
        attention_mask: the position channel, or a user's own 4-D mask.
        scaling: factor of the scores; None means the module's.
        dropout: probability that an attention weight is dropped.
        softcap: cap on the scores.
        position_ids: (B|1, Q).
        **kwargs: other arguments of families, see `PASSED_OVER`; and `s_aux` (H,), where the module has sinks.

    Returns:
        output (B, Q, H, V) and weights (B, H, Q, L) or None.

    Raises:
        ValueError: if the module has no scheme, the mask did not arrive, heads are missing (tensor parallelism), or the
            caller chose other position ids than the filled cache continues with.
        TypeError: for an argument that is neither in `PASSED_OVER` nor None.
        NotImplementedError: for paged attention.
    """
    state = on_attention(module)
    handed_down = kwargs.pop(POSITION_IDS, None)
    sinks = kwargs.pop("s_aux", None) if hasattr(module, "sinks") else None
    _check_arguments(module, state, attention_mask, kwargs)
    _check_heads(module, state, query.shape[1])
    assert attention_mask is not None
    if state.exchange is None:
        positions = read(attention_mask, query.shape[2], key.shape[2])
    else:
        key, value, positions = state.exchange(key, value, attention_mask, kwargs.get("sliding_window"))
    if (starts := kwargs.get("cu_seq_lens_q")) is not None:
        ensure(positions.divided_at(starts[1:-1]), UNKNOWN_DOCUMENTS)
    has_cache = query.shape[2] != key.shape[2]
    additions: Any = module._modules.get("posenc_additions")
    numbers = None
    if additions is not None and (count := len(additions.token_modules())):
        parts = split(key, query.shape[-1], query.shape[1], count)
        if parts is None:
            raise ValueError(NO_NUMBERS.format(name=type(module).__name__))
        key, numbers = parts
    position_ids = position_ids if handed_down is None else handed_down
    positions = _follow(positions, position_ids, attention_mask, has_cache)
    attention: Stock = module
    call = Call(
        query,
        key,
        value,
        state.within_window(positions),
        scaling=attention.scaling if scaling is None else scaling,
        vector_scaling=attention.scaling,
        softcap=softcap,
        dropout=dropout,
        weights=_wants_weights(module, kwargs),
        sinks=sinks,
    )
    attend: Any = partial(dispatch.attend, wanted=state.engine)
    # Flash attention gives no weights, and knows no exchange with other processes.
    if state.backend and state.exchange is None and not call.weights:
        given = {"module": module, "backend": state.backend, "mask": attention_mask, "position_ids": position_ids}
        attend = partial(flash.attend, stock=call, **given)
    if additions is not None:
        call = additions(call, numbers)
    if "posenc" not in module._modules:
        return WithoutPositions()(replace(call, weights=False), dispatch.attend)
    return attention.posenc(call, attend)


def _check_arguments(
    module: nn.Module, state: OnAttention, attention_mask: Tensor | None, others: Mapping[str, object]
) -> None:
    """Check the arguments of an attention, see `scheme_attention`.

    Args:
        module: the attention.
        state: its state.
        attention_mask: its mask.
        others: its arguments that `scheme_attention` does not name.
    """
    if others.get("cache") is not None:
        raise NotImplementedError(PAGED)
    if "posenc" not in module._modules and state.exchange is None:
        raise ValueError(
            f"{type(module).__name__} runs with the attention implementation {NAME!r} but carries no position "
            "encoding: call hf_posenc.patch_model on the model instead of setting the implementation"
        )
    if attention_mask is None:
        raise ValueError(NO_MASK)
    if unknown := sorted(name for name in others.keys() - PASSED_OVER.keys() if others[name] is not None):
        raise TypeError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which the one of hf_posenc does not "
            "know and would ignore. If it is an argument of your own call of the model, leave it out; otherwise use a "
            "scheme that keeps the stock attention (nope, sinusoidal, learned, rope)"
        )
    if others.get("is_causal") is False:
        raise ValueError(BIDIRECTIONAL)


def _check_heads(module: nn.Module, state: OnAttention, num_heads: int) -> None:
    heads = state.heads or getattr(module.config, "num_attention_heads", num_heads)
    if num_heads != heads:
        raise ValueError(f"{num_heads} of {heads} heads arrived at the attention layer: {SPLIT_HEADS}")


def _follow(
    positions: Positions | DensePositions, position_ids: Tensor | None, attention_mask: Tensor, has_cache: bool
) -> Positions | DensePositions:
    """Return positions with the ids that the caller chose, see `Positions.follow`.

    With a cache this only checks the ids. All layers of a forward pass get the same two tensors, so the first layer
    checks, and records the ids on the mask.
    """
    if not has_cache or torch.compiler.is_compiling():
        return positions.follow(position_ids)
    if getattr(attention_mask, CHECKED, None) is not position_ids:
        positions.follow(position_ids)
        setattr(attention_mask, CHECKED, position_ids)
    return positions


def _wants_weights(module: nn.Module, others: Mapping[str, object]) -> bool:
    """Return whether the caller wants attention weights; some families do not hand `output_attentions` to attention."""
    if torch.compiler.is_compiling():  # the reference engine, which is traced, returns them anyway
        return False
    recording = output_capturing._active_collector.get() or {}
    return bool(
        "attentions" in recording
        or others.get("output_attentions")
        or getattr(module.config, "output_attentions", False)
    )


AttentionInterface.register(NAME, scheme_attention)
