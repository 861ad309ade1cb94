"""What the processes of test_distributed.py run: each function is called on every rank at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from families import VOCAB_SIZE, tiny, tokens
from torch import Tensor, nn

from hf_posenc import context_parallel, patch_model, shard_sequence
from hf_posenc.schemes.base import PositionModule

IGNORED = -100


def build(family: str, scheme: str | None, *, attention: str = "auto", dtype: torch.dtype = torch.float64, **more: Any):
    """A tiny model in training mode, same on every rank, whose position parameters are far from where they start."""
    config = more.pop("config", {})
    model = tiny(family, **config).to(dtype)
    if scheme is not None:
        patch_model(model, scheme, attention=attention, seed=3, **more)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PositionModule):
                for parameter in module.parameters():
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model.train()


def make_batch(kind: str, length: int) -> dict[str, Tensor]:
    """Two sequences: plain, packed (documents of uneven length) or with padding on the left."""
    ids = tokens(2, length)
    labels = ids.clone()
    labels[0, 3:5] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        cuts = ([0, 5, 6, 14, length], [0, length // 2 + 1, length])
        rows = [torch.cat([torch.arange(b - a) for a, b in zip(c, c[1:], strict=False)]) for c in cuts]
        batch["position_ids"] = torch.stack(rows)
    elif kind == "left":
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        mask[1, :1] = 0
        batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        labels[mask == 0] = IGNORED
        labels[:, 1:][mask[:, :-1] == 0] = IGNORED  # what padding predicts is nobody's business
    return batch


def one_process(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, mean loss over all labels, and gradients."""
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, use_cache=False).logits
    targets = batch["labels"][:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE).double(), targets, ignore_index=IGNORED)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), loss.item(), gradients


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference relative to the largest entry of each tensor."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp(min=1e-3)).item() for n in wanted)


def compare_context_parallel(
    family: str,
    scheme: str | None,
    kind: str = "plain",
    *,
    length: int = 22,
    balanced: bool = False,
    checkpointing: bool = False,
    by_hand: bool = False,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> dict[str, float]:
    """Differences between one process and a sequence shared by all: of logits, loss and gradients."""
    model = build(family, scheme, dtype=dtype, **more)
    batch = make_batch(kind, length)
    logits, loss, gradients = one_process(model, batch)
    if checkpointing:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    rank, size = dist.get_rank(), dist.get_world_size()
    count = 2 * size if balanced else size
    pieces = torch.arange(length + -length % count).view(count, -1)
    own = pieces[[rank, count - 1 - rank] if balanced else [rank]].flatten()
    with context_parallel(model):
        if by_hand:  # nothing but what the interface asks for
            targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)[:, own]
            mask = batch["attention_mask"][:, own] if "attention_mask" in batch else None
            ids = batch["position_ids"] if "position_ids" in batch else torch.arange(length)[None].expand(2, -1)
            out = model(input_ids=batch["input_ids"][:, own], attention_mask=mask, position_ids=ids[:, own])
            count = (batch["labels"][:, 1:] != IGNORED).sum()
            local = nn.functional.cross_entropy(
                out.logits.flatten(0, 1).double(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            local = local / count
        else:
            out = model(**shard_sequence(batch, balanced=balanced))
            local = out.loss
        local.backward()
    total = local.detach().clone()
    dist.all_reduce(total)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for gradient in found.values():
        dist.all_reduce(gradient)
    real = own < length
    seen = batch.get("attention_mask", torch.ones(2, length))[:, own[real]].bool()  # padding computes anything
    difference = (out.logits[:, real] - logits[:, own[real]])[seen].abs().max().item()
    return {"logits": difference, "loss": abs(total.item() - loss), "gradients": worst(found, gradients)}
