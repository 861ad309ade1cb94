"""One long sequence on several processes: context parallelism, exact for every scheme.

Each process holds a shard of the sequence. Attention alone mixes tokens. Before each attention the processes exchange
keys and values, so that every query meets every key at its true position. Each process then computes what a single
process would, for fewer queries. Activations shrink with the number of processes, except for keys and values: those of
the whole sequence are held for one layer at a time with gradient checkpointing, and for all layers without.

Ring attention (`cp_size` in accelerate and torch) exchanges keys and values piece by piece inside stock attention. It
has no place for terms of the scores that depend on positions. It also drops the mask, which carries positions here. So
schemes that change scores refuse it.

The gradient rule. `shard_sequence` adds `num_items_in_batch` to every shard: the number of labels in the *whole* batch.
So the losses of a group's shards *sum* to the loss of the batch, and so do their gradients. DistributedDataParallel and
FSDP average gradients over all processes. Under them, multiply the loss by the size of the group. A training loop needs
no other change:

    group, data_rank, data_size = context_group(4)              # processes 0..3 share a batch, 4..7 the next one
    # Keep the backward pass inside: checkpointing runs attention again there.
    with context_parallel(model, group):
        for batch in loader:
            shard = shard_sequence(batch, group)                # the same batch on all processes of the group
            loss = model(**shard).loss * dist.get_world_size(group)
            loss.backward()

The mean of `loss` over all processes is the mean loss of the batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from .core import positions
from .core.errors import UnsupportedModelError
from .core.layer_state import on_attention, on_decoder
from .families.base import language_config
from .model.base_model import BaseModel
from .model.logits import IGNORED
from .model.patch_record import without_adapter
from .model.undo import AddPreHook, Keep, SetAttribute, Undo
from .model.watch import Args, Kwargs
from .schemes.base import by_layer_type, depends_on_length
from .transformers_glue import NAME
from .transformers_glue.masks import causal_documents, position_channel, shown

_BATCH_KEYS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")


class _Gather(torch.autograd.Function):
    """Differentiable all-gather: stacks the tensors (...) of a group's processes into (processes, ...).

    In the backward pass, each process gets the gradient of its own tensor, summed over all processes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, tensor = group, tensor.contiguous()
        parts = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
        dist.all_gather(list(parts), tensor, group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        own_gradient = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter(own_gradient, list(gradient.contiguous()), group=ctx.group)
        return own_gradient, None


def exchange_keys(
    group: dist.ProcessGroup | None, key: Tensor, value: Tensor, channel: Tensor, window: int | None
) -> tuple[Tensor, Tensor, positions.Positions]:
    """Return the keys, values and positions of the whole sequence, from all shards. An attention has it in its state.

    Args:
        group: torch.distributed process group; None means all processes.
        key: (B, K, T, D) of this shard.
        value: (B, K, T, V) of this shard.
        channel: position channel (B|1, 1, ROWS, T + L).
        window: sliding window of this layer in tokens, or None. The channel does not hold it.

    Returns:
        key (B, K, L, D), value (B, K, L, V), and the positions of the shard's queries and of all keys.
    """
    gathered = _Gather.apply(torch.cat([key, value], -1), group)  # (processes, B, K, T, D + V)
    sequence = positions.unpack(channel, key.shape[2])
    if window is not None:
        sequence = replace(sequence, window=torch.full_like(sequence.window, window), plain=False)
    keys, values = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3).split([key.shape[3], value.shape[3]], -1)
    return keys, values, sequence


def require_position_channel(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Refuse a cache, and any mask but the position channel of the whole sequence: a forward pre-hook of a decoder."""
    arguments = {**dict(zip(on_decoder(decoder).arguments, args, strict=False)), **kwargs}
    if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
        raise ValueError(
            "context parallelism has no key-value cache: a process holds only the keys of its own shard. Pass "
            "use_cache=False, and generate outside of context_parallel"
        )
    arguments["use_cache"] = False
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.dtype != torch.int32:
        raise ValueError(
            "context parallelism needs to know where the shard sits in the sequence: pass what "
            "hf_posenc.shard_sequence(batch, group) returns, its attention_mask included"
        )
    positions.check(mask, 0)
    return (), arguments


@contextmanager
def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> Iterator[nn.Module]:
    """Let the processes of a group share each sequence, for the length of a `with` block.

    Inside, all processes call the model at the same time, each on its own shard, which `shard_sequence` makes. Outputs,
    loss and gradients equal those of one process on the whole sequence (see the top of this file for the gradient
    rule). Run the backward pass inside as well, because gradient checkpointing computes attention again.

    Inside the block, stock models, and schemes that keep the stock attention, attend through
    `scaled_dot_product_attention` with a mask, whichever attention of transformers they have. Gemma 2 caps its scores,
    so it attends through an engine that can. The block restores the attention implementation at its end.

    Args:
        model: a model patched with any scheme, or a stock model of a supported family. It may be wrapped in
            DistributedDataParallel, sharded by FSDP2, or carry a PEFT adapter.
        group: torch.distributed process group; None means all processes.

    Yields:
        The model itself.

    Raises:
        ValueError: if the model is context parallel already. A forward pass inside the block also raises it: for a
            cache, for inputs that `shard_sequence` did not make, and if something (accelerate's `cp_size`) has dropped
            the mask.
        UnsupportedModelError: for models of other families, for models that attend by a function of their own, and for
            rotary scalings that depend on the length of the sequence.
    """
    base = _divisible(without_adapter(extract_model_from_parallel(model)))
    family, modules = base.family, base.modules
    arguments = tuple(inspect.signature(type(modules.decoder).forward).parameters)[1:]
    exchange, undo = partial(exchange_keys, group), Undo()
    # For checkpointing, accelerate wraps the whole layer; before 1.15 it wrapped the modules inside.
    attentions = [getattr(module, "_checkpoint_wrapped_module", module) for module in modules.attentions]
    try:
        undo.apply(
            SetAttribute(base.config, "_attn_implementation_internal", NAME),
            Keep(modules.decoder, on_decoder, {"exchange": exchange, "arguments": arguments}),
            *(SetAttribute(modules.decoder, name, value) for name, value in family.decoder_attributes.items()),
        )
        for attention in attentions:
            name = family.names.attention_heads
            heads = on_attention(attention).heads if name is None else getattr(attention, name)
            undo.apply(Keep(attention, on_attention, {"exchange": exchange, "heads": heads}))
        undo.apply(AddPreHook(modules.decoder, require_position_channel))
        yield model
    finally:
        undo.roll_back()


def _divisible(model: object) -> BaseModel:
    """Describe a model.

    Raises:
        UnsupportedModelError: if the sequences of the model cannot be divided over processes.
        ValueError: if the model is inside `context_parallel` already.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"a transformers PreTrainedModel is needed, not {name}")
    if language_config(model.config) is not model.config:
        raise UnsupportedModelError(
            f"{name} is multimodal: parts of an image cannot be divided over processes like tokens"
        )
    base = BaseModel.of(model)
    family, modules = base.family, base.modules
    if len(modules.attentions) < len(modules.layers):
        raise UnsupportedModelError(
            f"{name} has layers without attention: their state would have to travel from shard to shard, but only "
            "attention can be divided over processes"
        )
    if family.undivided is not None:
        raise UnsupportedModelError(f"the sequences of a {name} cannot be divided over processes: {family.undivided}")
    if on_decoder(modules.decoder).exchange is not None:
        raise ValueError("this model is inside context_parallel already")
    if base.hides_attention:
        raise UnsupportedModelError(
            f"the attention of a stock {name} never calls transformers' attention interface, so it would stay inside "
            "its shard: patch the model first"
        )
    base.require_equal_attention("divide its sequences")
    for module in modules.decoder.modules():
        if hasattr(module, "rope_type"):  # a rotary module of transformers
            rotary: Any = module
            for each in by_layer_type(rotary.config.rope_parameters).values():
                if depends_on_length(each):
                    raise UnsupportedModelError(
                        f"rope_type={each['rope_type']!r} chooses its frequencies by the largest position in its "
                        "input, which differs from shard to shard: under context parallelism use a rope_type that does "
                        "not depend on the length (default, linear, yarn, llama3)"
                    )
    return base


def context_group(size: int) -> tuple[dist.ProcessGroup, int, int]:
    """Divide all processes into groups; the processes of a group share each sequence. Call it on every process.

    A group consists of neighbouring ranks. They usually sit on one node, where they exchange keys fastest.

    Args:
        size: number of processes per group. It must divide the number of all processes.

    Returns:
        group: the group of this process, for `context_parallel` and `shard_sequence`.
        data_rank: index of the group. All its processes read this same share of the data.
        data_size: number of groups, as in `DistributedSampler(data, num_replicas=data_size, rank=data_rank)`.

    Raises:
        ValueError: if torch.distributed is not set up, or the size does not divide the number of processes.
    """
    group, _ = dist.new_subgroups(size)
    return group, dist.get_rank() // size, dist.get_world_size() // size


def shard_sequence(batch: Mapping[str, Tensor | None], group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return this process's shard of a batch, cut along the sequence, for a model inside `context_parallel`.

    Every process of the group passes the same whole batch, so the processes need not communicate here. Padding fills
    the sequence up to a length that divides evenly. The model then computes what one process computes with
    `model(**batch, use_cache=False)`. In a batch without attention mask, `position_ids` that restart mark packed
    documents, which do not see each other.

    Args:
        batch: `input_ids` (B, T). Optional: `attention_mask` (B, T), zero for padding; `position_ids` (B|1, T);
            `labels` (B, T), or `shift_labels` (B, T), which are shifted already.
        group: torch.distributed process group; None means all processes.

    Returns:
        `input_ids`, `position_ids`, and `attention_mask`: the position channel of the shard's queries and of all keys.
        If the batch has labels, also `labels` and `shift_labels`, both shifted (entry t is the token to predict from
        token t), and `num_items_in_batch`, the number of labels in the whole batch.

    Raises:
        TypeError: for an unknown key.
        ValueError: if torch.distributed is not set up, if the tensors do not fit together, or packed documents come
            with an attention mask.
    """
    tensors = _checked_batch(batch)
    rows, length = tensors["input_ids"].shape
    ids = tensors.get("position_ids", torch.arange(length, device=tensors["input_ids"].device)[None])
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    slots = torch.arange(length + -length % size, device=ids.device)
    mine, index = slots.view(size, -1)[rank], slots[None]

    def filled(tensor: Tensor, value: int = 0) -> Tensor:
        """Return a tensor (B, T) with this value in the padding behind the sequences."""
        return nn.functional.pad(tensor, (0, len(slots) - length), value=value)

    # The positions as one process would count them.
    mask = tensors.get("attention_mask")
    positions.check_padding(mask)
    mask = shown(ids, rows) if mask is None else mask
    documents = None if mask is not None else find_packed_sequence_indices(ids.expand(rows, -1))
    visible = causal_documents(documents)
    padding = None if mask is None else mask.bool()
    channel = position_channel(rows, length, length, mask_function=visible, attention_mask=padding, device=ids.device)
    found = positions.unpack(channel, length).follow(ids)
    own: dict[str, Any] = {name: filled(getattr(found, f"key_{name}")) for name in ("positions", "valid", "segment")}
    whole = positions.pack(
        index, index, **{f"{of}_{name}": row for of in ("query", "key") for name, row in own.items()}
    )
    shard = {
        "input_ids": filled(tensors["input_ids"])[:, mine],
        "position_ids": filled(ids)[:, mine].expand(rows, -1),
        "attention_mask": whole[..., torch.cat([mine, len(slots) + slots])],
    }
    labels = tensors.get("shift_labels")
    if "labels" in tensors:
        labels = nn.functional.pad(tensors["labels"][:, 1:], (0, 1), value=IGNORED)
    if labels is not None:
        shard["labels"] = shard["shift_labels"] = filled(labels, IGNORED)[:, mine]
        shard["num_items_in_batch"] = (labels != IGNORED).sum()
    return shard


def _checked_batch(batch: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the tensors of a batch, without its None values; TypeError or ValueError if it cannot be sharded."""
    if unknown := sorted(set(batch) - set(_BATCH_KEYS)):
        raise TypeError(f"cannot shard {', '.join(unknown)}; a batch may have {', '.join(_BATCH_KEYS)}")
    tensors = {key: value for key, value in batch.items() if value is not None}
    if "input_ids" not in tensors or {"labels", "shift_labels"} <= set(tensors):
        raise ValueError("a batch has input_ids, and no more than one of labels and shift_labels")
    if "position_ids" in tensors:
        positions.require_whole(tensors["position_ids"], "context parallelism")
    rows, length = tensors["input_ids"].shape
    for key, value in tensors.items():
        if value.shape != (rows, length) and not (key == "position_ids" and value.shape == (1, length)):
            raise ValueError(f"{key} of shape {tuple(value.shape)} does not belong to {rows} sequences of {length}")
    return tensors
