"""Causal attention written out, one head and one query at a time, and models that attend by it.

It is the reference of schemes that join other positions. These are computed by a stock or patched model, all but
ALiBi's bias, which is written out too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from families import tiny
from situations import distance
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from hf_posenc import patch_model
from hf_posenc.schemes import Alibi, Nope, Rope
from hf_posenc.schemes.alibi import alibi_slopes

BESIDE: dict[str, Callable[[], list[Any]]] = {
    "the-base": lambda: [],
    "rope": lambda: [Rope(rope_theta=50.0)],
    "nope": lambda: [Nope()],
    "alibi": lambda: [Alibi()],
}
"""What a scheme joins."""

Scores = Callable[[Any, Tensor, Tensor, int, int, float], Tensor]
"""(module, query (B, H, T, D), key (B, K, T, D), head, index of the query, scaling) -> scores of keys up to it (B, i + 1)."""


def products(query: Tensor, key: Tensor, head: int, i: int) -> Tensor:
    """Return the products of one query with the keys up to it, (B, i + 1)."""
    shared_by = query.shape[1] // key.shape[1]
    return (key[:, head // shared_by, : i + 1] @ query[:, head, i, :, None])[..., 0]


def attend_literally(
    model: PreTrainedModel, scores: Scores, slopes: list[float] | None = None, sinks: bool = False
) -> PreTrainedModel:
    """Let a model attend literally, in place.

    Args:
        model: a model without a scheme on its scores.
        scores: the scores of one query.
        slopes: of ALiBi, one for each head.
        sinks: whether the model has one more score per head, whose weight is dropped.
    """

    def attend(module, query, key, value, attention_mask, *, scaling, s_aux=None, **_):
        shared_by = query.shape[1] // key.shape[1]
        heads = []
        for h in range(query.shape[1]):
            rows = []
            for i in range(query.shape[2]):
                row = scores(module, query, key, h, i, scaling)
                if slopes is not None:
                    row = row - slopes[h] * torch.arange(i, -1, -1, dtype=row.dtype)
                if sinks:
                    row = torch.cat([row, s_aux[h].expand(len(row), 1)], -1)
                weights = row.softmax(-1)[:, : i + 1]
                rows.append((weights[..., None] * value[:, h // shared_by, : i + 1]).sum(1))
            heads.append(torch.stack(rows, 1))
        return torch.stack(heads, 2), None

    AttentionInterface.register("literal", attend)
    model.set_attn_implementation("literal")
    return model


def peer_beside(beside: str, family: str) -> tuple[PreTrainedModel, list[float] | None]:
    """Return a float64 model with the positions of a row of `BESIDE`, and the slopes that are still to be written out."""
    peer = tiny(family).double()
    if beside == "alibi":
        return patch_model(peer, "nope"), alibi_slopes(4)
    if schemes := BESIDE[beside]():
        patch_model(peer, schemes)
    return peer, None


def assert_same_gradients(model: PreTrainedModel, actual: Tensor, peer: PreTrainedModel, expected: Tensor) -> None:
    """Send the same random direction back through both outputs, and compare the gradients of the peer's parameters."""
    direction = torch.randn(actual.shape, generator=torch.Generator().manual_seed(0), dtype=actual.dtype)
    (actual * direction).sum().backward()
    (expected * direction).sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in peer.named_parameters():
        if parameter.grad is not None:
            assert distance(ours[name], parameter.grad) < 1e-8, name
