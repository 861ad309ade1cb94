"""A stand-in for the kernels of flash attention: what they promise, in any dtype and on a CPU.

transformers' own code around the kernels (masks, padding, packing, caches) runs unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils

Calls = list[tuple[str, tuple[int, ...]]]
"""Name of the kernel, and shape of its queries."""


def one_document(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: tuple[int, int], softcap: float
) -> Tensor:
    """Attend inside one document: q (Q, H, D), k and v (L, K, D). The last query sees the last key."""
    shared_by, behind = q.shape[1] // k.shape[1], len(k) - len(q)
    output = torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    heads = []
    for h in range(q.shape[1]):
        rows = []
        for i in range(len(q)):
            last = i + behind if causal else len(k) - 1
            first = 0 if window[0] < 0 else max(0, i + behind - window[0])
            seen = slice(first, last + 1)
            scores = k[seen, h // shared_by] @ q[i, h] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            seen_any = last >= first and len(k) > 0
            rows.append(scores.softmax(0) @ v[seen, h // shared_by] if seen_any else output[i, h])
        heads.append(torch.stack(rows))
    return torch.stack(heads, 1)


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Let transformers find the stand-in as flash attention 2; return the list of the calls to come."""
    calls: Calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0,
    ):  # fmt: skip
        calls.append(("varlen", tuple(q.shape)))
        queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert (sum(queries), sum(keys)) == (len(q), len(k))
        assert int(max_seqlen_q) == max(queries)
        assert int(max_seqlen_k) == max(keys)
        parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        return torch.cat(
            [one_document(*part, softmax_scale, causal, window_size, softcap) for part in parts if len(part[0])]
        )

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
        calls.append(("plain", tuple(q.shape)))
        rows = zip(q, k, v, strict=True)
        return torch.stack([one_document(*row, softmax_scale, causal, window_size, softcap) for row in rows])

    def imports(implementation: str | None, *_: Any, **__: Any) -> tuple[Any, ...]:
        assert implementation == "flash_attention_2"
        pads = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
        return flash_attn_func, flash_attn_varlen_func, None, *pads

    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", imports)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    return calls
