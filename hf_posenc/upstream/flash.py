"""Calls of attention that the flash attention of transformers computes, after a scheme has changed queries and keys.

Its kernels take no positions and no 4-D mask. So the padding, the documents and the window that they need are read from
the position channel, from which all engines of this package read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention_call import Call
from ..positions import DensePositions, Positions

LAYOUT = "posenc_layout"
"""Attribute of a mask that holds its layout, and the position ids that were compared with it."""

DENSE = "flash attention takes no 4-D attention mask: pass a 2-D mask (batch, keys), or no mask; {instead}"
CHANGES_SCORES = (
    "{scheme} changes {what} of an attention call, and flash attention takes other queries and keys only: {instead}"
)
GAPS = (
    "the attention mask hides tokens between visible ones, and this layer has a sliding window, which counts hidden "
    "tokens too; flash attention would not count them: {instead}"
)
PADDED_DOCUMENTS = (
    "flash attention computes packed documents, or chunks, without padding and without cached tokens only: {instead}"
)
REORDERED = "flash attention takes keys in the order of the tokens, with those of the queries last: {instead}"
RESTARTING = (
    "position_ids start again inside a row, and the attention mask knows of no documents there: pass position_ids that "
    "start again at each document without attention_mask and with use_cache=False"
)
INSTEAD = 'load the model with attn_implementation="sdpa" for such a call'


def is_flash(backend: str | None) -> bool:
    """Return whether an attention implementation is transformers' own flash attention, over any kernel.

    Some kernels of the Hub bring another attention function and another mask.
    """
    return backend is not None and ALL_ATTENTION_FUNCTIONS.get(backend) is flash_attention_forward


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
def attend(
    call: Call, *, module: nn.Module, backend: str, stock: Call, mask: Tensor, position_ids: Tensor | None
) -> tuple[Tensor, None]:
    """Compute a call by flash attention.

    Args:
        call: the call, with changed queries and keys.
        module: the attention.
        backend: name of the attention implementation.
        stock: the call without the changes.
        mask: the attention mask that the layer got.
        position_ids: (B|1, Q) or None.

    Returns:
        output (B, Q, H, V), and None for the weights.

    Raises:
        ValueError: for what flash attention cannot compute, or would compute differently from the engines of this
            package.
    """
    given = (field.name for field in fields(Call) if field.name not in ("query", "key", "numbers", "module", "form"))
    if changed := [name for name in given if getattr(call, name) is not getattr(stock, name)]:
        additions = ", ".join(name for name, _ in module.get_submodule("posenc_additions").named_children())
        raise ValueError(CHANGES_SCORES.format(scheme=additions, what=", ".join(changed), instead=INSTEAD))
    known, ids = getattr(mask, LAYOUT, (None, None))
    if known is None or ids is not position_ids:  # all layers of a forward pass get the same two tensors
        known = layout_of(call.positions, len(call.query), position_ids)
        setattr(mask, LAYOUT, (known, position_ids))
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
    return output, None


def layout_of(positions: Positions | DensePositions, rows: int, position_ids: Tensor | None) -> Layout:
    """Return what flash attention has to be told of the tokens of a call.

    Args:
        positions: positions and visibility of queries and keys.
        rows: B.
        position_ids: (B|1, Q) or None.

    Raises:
        ValueError: if flash attention cannot compute attention with this visibility.
    """
    if isinstance(positions, DensePositions) or positions.key_kept is not None:
        raise ValueError(DENSE.format(instead=INSTEAD))
    queries, keys = positions.query_index.shape[-1], positions.key_index.shape[-1]
    first, last = int(positions.key_index[0, 0]), int(positions.query_index[0, -1])
    seen = last + 1 - first
    slots = torch.arange(first, first + keys, device=positions.key_index.device)
    in_order = (positions.key_index == slots).all() and queries <= seen <= keys
    if not in_order or not (positions.query_index == slots[seen - queries : seen]).all():
        raise ValueError(REORDERED.format(instead=INSTEAD))
    valid, segment = positions.key_valid[:, :seen].expand(rows, -1), positions.key_segment[:, :seen].expand(rows, -1)
    window = int(positions.window.min())
    if window != int(positions.window.max()):
        raise ValueError(DENSE.format(instead=INSTEAD))
    layout = Layout(seen, None if valid.all() else valid, {}, window if window < seen else None)
    if (segment != segment[:, :1]).any():
        if layout.valid is not None or queries != seen:
            raise ValueError(PADDED_DOCUMENTS.format(instead=INSTEAD))
        return Layout(seen, None, _documents(segment), layout.window)
    if layout.valid is None:
        if position_ids is not None and queries == seen and _restart(position_ids):
            raise ValueError(RESTARTING)
    elif layout.window is not None and _have_gaps(valid):
        raise ValueError(GAPS.format(instead=INSTEAD))
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


def _restart(position_ids: Tensor) -> bool:
    """Return whether a row of position ids (B|1, T) returns to its first id, and has no smaller one."""
    at_first = position_ids == position_ids[:, :1]
    return bool((at_first.sum(-1) > 1).logical_and((position_ids >= position_ids[:, :1]).all(-1)).any())


def _have_gaps(valid: Tensor) -> bool:
    """Return whether a row (B, L) has padding between tokens."""
    ends = valid[:, :-1] & ~valid[:, 1:]
    return bool((ends.sum(-1) + valid[:, -1] > 1).any())
