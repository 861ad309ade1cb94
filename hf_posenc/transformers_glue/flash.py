"""Calls of attention that the flash attention of transformers computes, after a scheme has changed queries and keys.

Schemes on scores that are a product of two sides change them too: they widen heads, as the engine `wide` does. The
kernels take no positions and no 4-D mask. So the padding, the documents and the window that they need are read from the
position channel, from which all engines of this package read them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..core.attention_call import Call
from ..core.positions import DensePositions, Positions
from ..engines.wide import Wide, widened

WIDEST = 256
"""Largest head size of flash attention's kernels."""

LAYOUT = "posenc_layout"
"""Attribute of a mask that holds its layout."""

INSTEAD = 'load the model with attn_implementation="sdpa" for such a call'
DENSE = f"flash attention takes no 4-D attention mask: pass a 2-D mask (batch, keys), or no mask; {INSTEAD}"
CHANGES_SCORES = "{scheme} changes {what} of an attention call, not only queries and keys as flash attention needs: "
GAPS = (
    "the attention mask hides tokens between visible ones, which flash attention would not count in the sliding window "
    f"of this layer: {INSTEAD}"
)
PADDED_DOCUMENTS = f"flash attention computes packed documents only without padding and cached tokens: {INSTEAD}"
REORDERED = f"flash attention takes keys in the order of the tokens, with those of the queries last: {INSTEAD}"


def is_flash(backend: str | None) -> bool:
    """Return whether an attention implementation is transformers' own flash attention, over any kernel.

    Some kernels of the Hub bring another attention function and another mask.
    """
    return backend is not None and ALL_ATTENTION_FUNCTIONS.get(backend) is flash_attention_forward


def is_plain(backend: str | None, attention: nn.Module | None = None) -> bool:
    """Return whether an attention implementation is the eager attention, sdpa or FlexAttention of transformers.

    The function decides, because anybody may register another one, under any of these names.

    Args:
        backend: name of the implementation; None stands for eager attention.
        attention: the attention that looks the name up. Its file may have an interface of its own.
    """
    file = {} if attention is None else inspect.unwrap(type(attention).forward).__globals__
    function = file.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS).get(backend)
    is_eager = function is None and backend in (None, "eager")
    return is_eager or function in (sdpa_attention_forward, flex_attention_forward)


@dataclass(frozen=True)
class Layout:
    """What flash attention is told of the tokens.

    Attributes:
        seen: number of keys up to the last query. A static cache holds more.
        valid: (B, seen) bool, False for padding; None without padding.
        documents: arguments that divide all rows, one after the other, into documents; empty if each row is one.
        window: sliding window in tokens; None if no query sees further.
    """

    seen: int
    valid: Tensor | None
    documents: dict[str, Any] = field(default_factory=dict)
    window: int | None = None


class _Seen:
    """A view of an object in which some attributes are others."""

    def __init__(self, whole: object, **others: object) -> None:
        self.__dict__.update(others, whole=whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


@torch.compiler.disable
def attend(call: Call, *, module: nn.Module, backend: str, stock: Call, mask: Tensor) -> tuple[Tensor, None]:
    """Compute a call by flash attention.

    Args:
        call: the call, with changed queries and keys.
        module: the attention.
        backend: name of the attention implementation.
        stock: the call without the changes.
        mask: the attention mask that the layer got.

    Returns:
        output (B, Q, H, V), and None for the weights.

    Raises:
        ValueError: for what flash attention cannot compute, or would compute differently from the engines of this
            package.
    """
    allowed = ("query", "key", "numbers", "query_numbers", "module", "form", "log_gates", "key_bias", "output_changes")
    given = (field.name for field in fields(Call) if field.name not in allowed)
    if changed := [name for name in given if getattr(call, name) is not getattr(stock, name)]:
        additions = ", ".join(name for name, _ in module.get_submodule("posenc_additions").named_children())
        raise ValueError(CHANGES_SCORES.format(scheme=additions, what=", ".join(changed)) + INSTEAD)
    size = call.value.shape[-1]
    if call.form is None or call.form.positional or call.has_token_bias:
        if (reason := Wide().why_not(call)) is not None:
            raise ValueError(f"flash attention cannot compute this scheme on scores: {reason}; {INSTEAD}")
        call = widened(call)
        if (wide := call.query.shape[-1]) > WIDEST:
            raise ValueError(
                f"flash attention takes heads of at most {WIDEST}, and this scheme needs {wide}: {INSTEAD}"
            )
        call = replace(call, value=pad(call.value, (0, wide - size)))  # kernels take one size
    known = getattr(mask, LAYOUT, None)
    if known is None:  # all layers of a forward pass get the same mask
        known = layout_of(call.positions, len(call.query))
        setattr(mask, LAYOUT, known)
    config = _Seen(module.config, _attn_implementation=backend)
    seen_module: Any = _Seen(module, config=config)
    output, _ = flash_attention_forward(
        seen_module,
        call.query,
        call.key[:, :, : known.seen],
        call.value[:, :, : known.seen],
        known.valid,
        dropout=call.dropout,
        scaling=call.scaling,
        sliding_window=known.window,
        softcap=call.softcap,
        is_causal=True,
        **known.documents,
    )
    return output[..., :size], None


def layout_of(positions: Positions | DensePositions, rows: int) -> Layout:
    """Return what flash attention has to be told of the tokens of a call.

    Args:
        positions: positions and visibility of queries and keys.
        rows: B.

    Raises:
        ValueError: if flash attention cannot compute attention with this visibility.
    """
    if isinstance(positions, DensePositions) or positions.key_kept is not None:
        raise ValueError(DENSE)
    queries, keys = positions.query_index.shape[-1], positions.key_index.shape[-1]
    if positions.plain:
        return Layout(keys, None)
    first, last = int(positions.key_index[0, 0]), int(positions.query_index[0, -1])
    seen = last + 1 - first
    slots = torch.arange(first, first + keys, device=positions.key_index.device)
    in_order = (positions.key_index == slots).all() and queries <= seen <= keys
    if not in_order or not (positions.query_index == slots[seen - queries : seen]).all():
        raise ValueError(REORDERED)
    valid, segment = positions.key_valid[:, :seen].expand(rows, -1), positions.key_segment[:, :seen].expand(rows, -1)
    window = int(positions.window.min())
    if window != int(positions.window.max()):
        raise ValueError(DENSE)
    layout = Layout(seen, None if valid.all() else valid, {}, window if window < seen else None)
    if (segment != segment[:, :1]).any():
        if layout.valid is not None or queries != seen:
            raise ValueError(PADDED_DOCUMENTS)
        return Layout(seen, None, _documents(segment), layout.window)
    ends = (valid[:, :-1] & ~valid[:, 1:]).sum(-1) + valid[:, -1]  # more than one where padding is between tokens
    if layout.valid is not None and layout.window is not None and (ends > 1).any():
        raise ValueError(GAPS)
    return layout


def _documents(segment: Tensor) -> dict[str, Any]:
    """Return the arguments of flash attention that divide rows into documents.

    Args:
        segment: (B, T) numbers of the documents. Neighbouring tokens with one number are of one document.
    """
    starts = pad(segment[:, 1:] != segment[:, :-1], (1, 0), value=True).flatten().nonzero()[:, 0]
    ends = pad(starts, (0, 1), value=segment.numel()).to(torch.int32)
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
