"""The attention function of this package, registered with transformers under the name `hf_posenc` on import."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import output_capturing

from ..core.attention_call import Call
from ..core.layer_state import OnAttention, on_attention
from ..core.modules import WithoutPositions, query_modules
from ..core.positions import DensePositions, Positions, ensure, read
from ..engines import dispatch
from ..families.own_attention import Stock
from . import NAME, POSITION_IDS, QUERY_NUMBERS, Arguments, flash
from .masks import BIDIRECTIONAL
from .token_numbers import NO_NUMBERS, NO_QUERY_NUMBERS, split

KEEPING = "nope, sinusoidal, learned, rope"
"""Schemes that keep the model's own attention, for messages."""

SPLIT_HEADS = (
    "tensor parallelism (tp_size) and sequence parallelism by heads (sp_size, Ulysses) give each process some of the "
    "heads, but parameters of all. Use data parallelism, FSDP, hf_posenc.context_parallel for long sequences, or a "
    f"scheme that keeps the stock attention: {KEEPING}"
)

_IN_CHANNEL = "cache use_cache cache_position sliding_window is_causal output_attentions seq_idx"
_DOCUMENTS = "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k"
_OF_MODEL = "logits_to_keep output_hidden_states output_router_logits return_dict token_type_ids num_items_in_batch"
_OF_LOSS_AND_GENERATE = "shift_labels ignore_index tokenizer assistant_tokenizer"
PASSED_OVER = frozenset(f"{_IN_CHANNEL} {_DOCUMENTS} {_OF_MODEL} {_OF_LOSS_AND_GENERATE}".split())
"""Arguments that models hand to attention, and our attention function may ignore."""

CHECKED = "posenc_checked"
"""Attribute of a mask that holds the position ids that were checked against it, and whether they change anything."""

UNKNOWN_DOCUMENTS = (
    "cu_seq_lens_q divides the batch into documents unknown to the position channel: pass position_ids that start "
    "again at each document too, without attention_mask and with use_cache=False"
)


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
        module: a patched attention module. It has `posenc`, a state (`hf_posenc.core.layer_state`) and `scaling`.
        query: (B, H, Q, D).
        key: (B, K, L, D), including cached keys.
        value: (B, K, L, V), as a rule V = D.
        attention_mask: the position channel, or a user's own 4-D mask.
        scaling: factor of the scores; None means the module's.
        dropout: probability that an attention weight is dropped.
        softcap: cap on the scores.
        position_ids: (B|1, Q).
        **kwargs: other arguments of families, see `PASSED_OVER`; `s_aux` (H,), where the module has sinks, or `sinks`
            (B, H, Q, 1), which each query makes; and `position_bias` (B, H, Q, L), the base's own positions.

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
    of_queries = kwargs.pop(QUERY_NUMBERS, {})
    sinks = kwargs.pop("s_aux", None) if hasattr(module, "sinks") else None
    if (of_each_query := kwargs.pop("sinks", None)) is not None:
        sinks = of_each_query[..., 0]
    base_bias = kwargs.pop("position_bias", None)
    _check_arguments(module, state, query.shape[1], attention_mask, kwargs)
    assert attention_mask is not None
    if state.exchange is None:
        positions = read(attention_mask, query.shape[2], key.shape[2])
    else:
        key, value, positions = state.exchange(key, value, attention_mask, kwargs.get("sliding_window"))
    if (starts := kwargs.get("cu_seq_lens_q")) is not None:
        ensure(positions.divided_at(starts[1:-1]), UNKNOWN_DOCUMENTS)
    additions: Any = module._modules.get("posenc_additions")
    numbers = None
    if additions is not None and (count := sum(additions.widths())):
        parts = split(key, query.shape[-1], query.shape[1], count)
        if parts is None:
            raise ValueError(NO_NUMBERS.format(name=type(module).__name__))
        key, numbers = parts
    if query_modules(module).keys() - of_queries.keys():
        raise ValueError(NO_QUERY_NUMBERS.format(name=type(module).__name__))
    position_ids = position_ids if handed_down is None else handed_down
    positions = _follow(positions, position_ids, attention_mask, state)
    attention: Stock = module
    # Some families do not hand `output_attentions` down. The reference engine, which is traced, returns weights anyway.
    recorded = None if torch.compiler.is_compiling() else output_capturing._active_collector.get()
    asked = kwargs.get("output_attentions") or getattr(attention.config, "output_attentions", False)
    wants_weights = not torch.compiler.is_compiling() and bool("attentions" in (recorded or {}) or asked)
    call = Call(
        query,
        key,
        value,
        state.within_window(positions),
        scaling=attention.scaling if scaling is None else scaling,
        vector_scaling=attention.scaling,
        softcap=softcap,
        dropout=dropout,
        weights=wants_weights,
        sinks=sinks,
        base_bias=base_bias,
        by_module=of_queries,
    )
    attend: Any = partial(dispatch.attend, wanted=state.engine)
    # Flash attention gives no weights, and knows no exchange with other processes.
    if state.backend and state.exchange is None and not call.weights:
        attend = partial(flash.attend, stock=call, module=module, backend=state.backend, mask=attention_mask)
    if additions is not None:
        call = additions(call, numbers)
    if "posenc" not in module._modules:
        return WithoutPositions()(replace(call, weights=False), dispatch.attend)
    return attention.posenc(call, attend)


def _check_arguments(module: nn.Module, state: OnAttention, heads: int, mask: Tensor | None, others: Arguments) -> None:
    """Check the arguments of an attention, see `scheme_attention`. `others` are those that it does not name."""
    name = type(module).__name__
    if others.get("cache") is not None:
        raise NotImplementedError(
            "paged attention and continuous batching hand over keys without their positions: use generate(), or a "
            f"scheme that keeps the stock attention ({KEEPING})"
        )
    if "posenc" not in module._modules and state.exchange is None:
        raise ValueError(
            f"{name} runs with the attention implementation {NAME!r} but carries no position encoding: call "
            "hf_posenc.patch_model on the model instead of setting the implementation"
        )
    if mask is None:
        raise ValueError(
            "the attention mask, which carries the positions, did not arrive at the attention layer: the context "
            "parallelism of accelerate and some wrappers drop it. Launch without cp_size; use "
            "hf_posenc.context_parallel(model, group)"
        )
    if unknown := sorted(name for name in others.keys() - PASSED_OVER if others[name] is not None):
        raise TypeError(
            f"{name} hands {', '.join(unknown)} to its attention, which the one of hf_posenc would ignore: leave it "
            f"out of your call of the model, or use a scheme that keeps the stock attention ({KEEPING})"
        )
    if others.get("is_causal") is False:
        raise ValueError(BIDIRECTIONAL)
    wanted = state.heads or getattr(module.config, "num_attention_heads", heads)
    if heads != wanted:
        raise ValueError(f"{heads} of {wanted} heads arrived at the attention layer: {SPLIT_HEADS}")


def _follow(
    positions: Positions | DensePositions, position_ids: Tensor | None, attention_mask: Tensor, state: OnAttention
) -> Positions | DensePositions:
    """Return positions with the ids that the caller chose, see `Positions.follow`.

    All layers of a forward pass get the same two tensors, and the channel is made for this pass. So the first layer
    checks the ids, and records on the channel what they change. A user's own mask may come again after it was changed.
    """
    if position_ids is None or torch.compiler.is_compiling() or isinstance(positions, DensePositions):
        return positions.follow(position_ids, check=state.ordered)
    checked, changes = getattr(attention_mask, CHECKED, (None, {}))
    if checked is not position_ids:
        followed = positions.follow(position_ids, check=state.ordered)
        changes = {}
        if followed is not positions:  # tensors of their own, no views of the channel, which would keep itself alive
            names = ("query_positions", "key_positions", "aligned")
            changes = {name: getattr(followed, name) for name in names} | {"memo": {}}
        setattr(attention_mask, CHECKED, (position_ids, changes))
    return replace(positions, **changes) if changes else positions


AttentionInterface.register(NAME, scheme_attention)
