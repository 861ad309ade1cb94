"""The attention function of this package, registered with transformers under the name `hf_posenc` on import."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import output_capturing

from ..call import Call
from ..engines import dispatch
from ..layer_state import on_attention
from ..modules import WithoutPositions
from ..positions import ensure, read
from . import NAME, POSITION_IDS
from .masks import BIDIRECTIONAL

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

PASSED_OVER = {
    "cache": "of paged attention, refused by itself",
    "logits_to_keep": "read by the head, which some multimodal models hand on",
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
    "tokenizer": "read by generate, for `stop_strings`, which hands it on",
    "assistant_tokenizer": "read by generate, for an assistant with words of its own, which hands it on",
}
"""What models hand down to attention that does not change what ours computes, and why."""

UNKNOWN_DOCUMENTS = (
    "cu_seq_lens_q divides the batch into documents that the position channel does not know of: pass position_ids that "
    "start again at each document too, without attention_mask and with use_cache=False"
)


def check_engine(attention: str) -> None:
    """Raise ValueError unless this is a value of `patch_model(..., attention=...)`: `auto` or an engine's name."""
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
    """Attend with the scheme that sits on the module; the function behind the attention name `hf_posenc`.

    Args:
        module: a model's attention, patched: it has `posenc`, a state (`hf_posenc.layer_state`) and `scaling`.
        query: (B, H, Q, D).
        key: (B, K, L, D), including cached keys.
        value: (B, K, L, V), as a rule V = D.
        attention_mask: the position channel, or a user's own 4-D mask.
        scaling: factor of the scores; None means the module's.
        dropout: probability that an attention weight is dropped.
        softcap: cap on the scores.
        position_ids: (B|1, Q).
        **kwargs: what families pass besides, see `PASSED_OVER`; `s_aux` (H,), where the module has sinks.

    Returns:
        output (B, Q, H, V) and weights (B, H, Q, L) or None.

    Raises:
        ValueError: if the module has no scheme, the mask did not arrive, heads are missing (tensor parallelism), or
            chosen position ids meet a filled cache.
        TypeError: for an argument that is not known here and not None.
        NotImplementedError: for paged attention.
    """
    if kwargs.get("cache") is not None:
        raise NotImplementedError(PAGED)
    state = on_attention(module)
    exchange = state.exchange  # inside context_parallel
    if "posenc" not in module._modules and exchange is None:
        raise ValueError(
            f"{type(module).__name__} runs with the attention implementation {NAME!r} but carries no position "
            "encoding: "
            "apply hf_posenc.patch_model to the model instead of naming the implementation"
        )
    if attention_mask is None:
        raise ValueError(NO_MASK)
    handed_down = kwargs.pop(POSITION_IDS, None)
    position_ids = position_ids if handed_down is None else handed_down
    sinks = kwargs.pop("s_aux", None) if hasattr(module, "sinks") else None
    if unknown := sorted(key for key in kwargs.keys() - PASSED_OVER.keys() if kwargs[key] is not None):
        raise TypeError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which the one of hf_posenc does not "
            "know and would ignore. If it is an argument of your own call of the model, leave it out; otherwise use a "
            "scheme that keeps the stock attention (nope, sinusoidal, learned, rope)"
        )
    if kwargs.get("is_causal") is False:
        raise ValueError(BIDIRECTIONAL)
    heads = state.heads or getattr(module.config, "num_attention_heads", query.shape[1])
    if query.shape[1] != heads:
        raise ValueError(f"{query.shape[1]} of {heads} heads arrived at the attention layer: {SPLIT_HEADS}")
    if exchange is None:
        positions = read(attention_mask, query.shape[2], key.shape[2])
    else:
        key, value, positions = exchange(key, value, attention_mask, kwargs.get("sliding_window"))
    if (starts := kwargs.get("cu_seq_lens_q")) is not None:
        ensure(positions.divided_at(starts[1:-1]), UNKNOWN_DOCUMENTS)
    if query.shape[2] == key.shape[2] or torch.compiler.is_compiling():
        positions = positions.follow(position_ids)
    elif attention_mask.__dict__.get("posenc_checked") is not position_ids:
        # With a cache this only checks: once for all layers, which get the same two tensors.
        positions.follow(position_ids)
        attention_mask.__dict__["posenc_checked"] = position_ids
    if state.window is not None:
        positions = positions.within(state.window)
    attention: Any = module
    call = Call(
        query,
        key,
        value,
        positions,
        scaling=attention.scaling if scaling is None else scaling,
        vector_scaling=attention.scaling,
        softcap=softcap,
        dropout=dropout,
        weights=_wants_weights(module, kwargs),
        sinks=sinks,
    )
    if "posenc" not in module._modules:
        return WithoutPositions()(replace(call, weights=False), dispatch.attend)
    return attention.posenc(call, partial(dispatch.attend, wanted=state.engine))


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


AttentionInterface.register(NAME, scheme_attention)
