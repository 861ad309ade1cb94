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
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import positions
from .errors import UnsupportedModelError
from .families.base import Family, Resolved, language_config, resolve
from .families.lookup import family_of
from .layer_state import on_attention, on_decoder
from .live.patch_record import patch_of
from .live.undo import AddPreHook, Keep, SetAttribute, Undo
from .live.watch import Args, Kwargs
from .schemes.base import by_layer_type, depends_on_length
from .upstream import NAME
from .upstream.masks import causal_documents, position_channel

IGNORED = -100
"""Label that excludes a token from the loss, as in transformers."""

NO_PROCESS_GROUP = (
    "context parallelism needs torch.distributed: start with torchrun or accelerate launch, and call this "
    "function after torch.distributed.init_process_group or accelerate.Accelerator()"
)
NO_CACHE = (
    "context parallelism has no key-value cache: a process holds only the keys of its own shard. Pass "
    "use_cache=False, and generate outside of context_parallel"
)
NO_POSITIONS = (
    "context parallelism needs to know where the shard sits in the sequence: pass position_ids, or the whole batch "
    "through hf_posenc.shard_sequence(batch, group)"
)
REPEATED_POSITIONS = (
    "position_ids repeat over the shards of a sequence, so they tell neither the order of the keys nor their "
    "documents: shard packed documents with hf_posenc.shard_sequence(batch, group), whose attention_mask tells both"
)

LENGTH_DEPENDENT = (
    "rope_type={kind!r} chooses its frequencies by the largest position in its input, which differs from shard to "
    "shard: under context parallelism use a rope_type that does not depend on the length (default, linear, yarn, "
    "llama3)"
)

_BATCH_KEYS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")


class _Gather(torch.autograd.Function):
    """Differentiable all-gather.

    In the backward pass, each process gets the gradient of its own tensor, summed over all processes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_gather(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        own_gradient = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter(own_gradient, list(gradient.contiguous()), group=ctx.group)
        return own_gradient, None


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Stack the tensors (...) of a group's processes into (processes, ...)."""
    tensor = tensor.contiguous()
    parts = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(parts), tensor, group=group)
    return parts


class Exchange:
    """Fetches the keys and values of the other shards. An attention layer holds it in its state."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Exchange within a group.

        Args:
            group: torch.distributed process group; None means all processes.
        """
        self.group = group

    def __call__(
        self, key: Tensor, value: Tensor, channel: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, positions.Positions]:
        """Return the keys, values and positions of the whole sequence, with the keys in causal order.

        Args:
            key: (B, K, T, D) of this shard.
            value: (B, K, T, V) of this shard.
            channel: position channel (B|1, 1, ROWS, T + L). Its keys are in the order of the processes.
            window: sliding window of this layer in tokens, or None. The channel does not hold it.

        Returns:
            key (B, K, L, D), value (B, K, L, V), and the positions of the shard's queries and of all keys.
        """
        queries, head_sizes = key.shape[2], [key.shape[3], value.shape[3]]
        gathered = _Gather.apply(torch.cat([key, value], -1), self.group)  # (processes, B, K, T, D + V)
        gathered = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)
        sequence = positions.read(channel, queries, gathered.shape[2])
        assert isinstance(sequence, positions.Positions)
        order = sequence.key_index.argsort(dim=-1, stable=True)
        if order.shape[0] == 1:
            gathered = gathered.index_select(2, order[0])
        else:
            gathered = gathered.gather(2, order[:, None, :, None].expand(gathered.shape))
        key, value = gathered.split(head_sizes, -1)

        def ordered(of_keys: Tensor) -> Tensor:
            return of_keys.expand(order.shape[0], -1).gather(-1, order)

        sequence = replace(
            sequence,
            key_positions=ordered(sequence.key_positions),
            key_index=ordered(sequence.key_index),
            key_valid=ordered(sequence.key_valid),
            key_segment=ordered(sequence.key_segment),
            window=sequence.window if window is None else torch.full_like(sequence.window, window),
        )
        return key, value, sequence


def pass_position_channel(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Replace the mask by the position channel of the whole sequence, as a forward pre-hook of a decoder."""
    arguments = inspect.signature(type(decoder).forward).bind_partial(decoder, *args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    del arguments["self"]
    if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
        raise ValueError(NO_CACHE)
    arguments["use_cache"] = False
    tokens = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else arguments["inputs_embeds"]
    ids: Any = arguments.get("position_ids")
    mask: Any = arguments.get("attention_mask")
    is_channel = isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.int32
    if (ids is None and not is_channel) or tokens is None:
        raise ValueError(NO_POSITIONS)
    if is_channel:
        positions.check(mask, 0)
    else:
        arguments["attention_mask"] = _channel_of_positions(
            ids, mask, tokens.shape[:2], on_decoder(decoder).exchange.group
        )
    return (), arguments


def _channel_of_positions(
    ids: Tensor, mask: Tensor | None, shape: torch.Size, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the channel (B, 1, ROWS, T + L) of one document per row, ordered by its position ids.

    Args:
        ids: position ids (B|1, T) of this shard.
        mask: attention mask (B, T) of this shard, zero for padding, or None.
        shape: (B, T).
        group: the processes that share the sequence.
    """
    if mask is not None and mask.shape != shape:
        raise ValueError(
            f"under context parallelism pass an attention mask of the shard's own tokens, {tuple(shape)}, or the one "
            f"of hf_posenc.shard_sequence, not a mask {tuple(mask.shape)} of {mask.dtype}"
        )
    positions.require_whole(ids, "context parallelism")
    valid = torch.ones(shape, dtype=torch.bool, device=ids.device) if mask is None else mask.bool()
    position = torch.where(valid, ids.expand(shape), -1).to(torch.int32)
    all_positions = _all_gather(position, group).movedim(0, 1).flatten(1)
    ordered = all_positions.sort(-1).values
    repeats = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()
    if repeats.is_cuda:
        torch._assert_async(~repeats, REPEATED_POSITIONS)  # reading the value would stall the device
    elif bool(repeats):
        raise ValueError(REPEATED_POSITIONS)
    return positions.pack(position, all_positions, query_valid=valid, key_valid=all_positions >= 0)


@contextmanager
def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> Iterator[nn.Module]:
    """Let the processes of a group share each sequence, for the length of a `with` block.

    Inside, all processes call the model at the same time, each on its own shard. `position_ids` say where in the
    sequence the tokens of the shard sit, in any order. Outputs, loss and gradients equal those of one process on the
    whole sequence (see the top of this file for the gradient rule). `shard_sequence` makes the shards; packed documents
    need it. Run the backward pass inside as well, because gradient checkpointing computes attention again.

    Inside the block, stock models, and schemes that keep the stock attention, attend through
    `scaled_dot_product_attention` with a mask, whatever their attention implementation is. Gemma 2 caps its scores, so
    it attends through an engine that can. The block restores the attention implementation at its end.

    Args:
        model: a model patched with any scheme, or a stock model of a supported family. It may be wrapped in
            DistributedDataParallel, sharded by FSDP2, or carry a PEFT adapter.
        group: torch.distributed process group; None means all processes.

    Yields:
        The model itself.

    Raises:
        RuntimeError: if torch.distributed is not set up.
        ValueError: if the model is context parallel already. A forward pass inside the block also raises it: for a
            cache, for missing or repeated position ids, and if something (accelerate's `cp_size`) has dropped the mask.
        UnsupportedModelError: for models of other families, and for rotary scalings that depend on the length of the
            sequence.
    """
    _check_distributed()
    inner = extract_model_from_parallel(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # PEFT
    family, modules = _divisible_modules(inner)
    exchange, undo = Exchange(group), Undo()
    # For checkpointing, accelerate wraps the whole layer; before 1.15 it wrapped the modules inside.
    attentions = [getattr(module, "_checkpoint_wrapped_module", module) for module in modules.attentions]
    try:
        undo.apply(
            SetAttribute(inner.config, "_attn_implementation_internal", NAME),
            Keep(modules.decoder, on_decoder, {"exchange": exchange}),
            *(SetAttribute(modules.decoder, name, value) for name, value in family.decoder_attributes.items()),
        )
        for attention in attentions:
            heads_attribute = family.names.attention_heads
            heads = on_attention(attention).heads if heads_attribute is None else getattr(attention, heads_attribute)
            undo.apply(Keep(attention, on_attention, {"exchange": exchange, "heads": heads}))
        undo.apply(AddPreHook(modules.decoder, pass_position_channel))
        yield model
    finally:
        undo.roll_back()


def _divisible_modules(model: object) -> tuple[Family, Resolved]:
    """Return the family and the modules of a model.

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
    family = family_of(model.config)
    modules = resolve(family, model)
    if len(modules.attentions) < len(modules.layers):
        raise UnsupportedModelError(
            f"{name} has layers without attention: their state would have to travel from shard to shard, but only "
            "attention can be divided over processes"
        )
    if family.undivided is not None:
        raise UnsupportedModelError(f"the sequences of a {name} cannot be divided over processes: {family.undivided}")
    if on_decoder(modules.decoder).exchange is not None:
        raise ValueError("this model is inside context_parallel already")
    if family.always_replaced and patch_of(model) is None:
        raise UnsupportedModelError(
            f"the attention of a stock {name} never calls transformers' attention interface, so it would stay inside "
            "its shard: patch the model first"
        )
    _check_rotary(modules.decoder)
    return family, modules


def _check_rotary(decoder: nn.Module) -> None:
    for module in decoder.modules():
        if hasattr(module, "rope_type"):  # a rotary module of transformers
            config: Any = module.config
            for each in by_layer_type(config.rope_parameters).values():
                if depends_on_length(each):
                    raise UnsupportedModelError(LENGTH_DEPENDENT.format(kind=each["rope_type"]))


def _check_distributed() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(NO_PROCESS_GROUP)


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
        RuntimeError: if torch.distributed is not set up.
        ValueError: if the size does not divide the number of processes.
    """
    _check_distributed()
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"{world} processes cannot be divided into groups of {size}")
    group, _ = dist.new_subgroups(size)
    return group, dist.get_rank() // size, world // size


def shard_sequence(
    batch: Mapping[str, Tensor | None], group: dist.ProcessGroup | None = None, *, balanced: bool = False
) -> dict[str, Tensor]:
    """Return this process's shard of a batch, cut along the sequence, for a model inside `context_parallel`.

    Every process of the group passes the same whole batch, so the processes need not communicate here. Padding fills
    the sequence up to a length that divides evenly. The model then computes what one process computes with
    `model(**batch, use_cache=False)`. In a batch without attention mask, `position_ids` that restart mark packed
    documents, which do not see each other.

    Args:
        batch: `input_ids` (B, T) or `inputs_embeds` (B, T, E). Optional: `attention_mask` (B, T), zero for padding;
            `position_ids` (B|1, T); `labels` (B, T), or `shift_labels` (B, T), which are shifted already.
        group: torch.distributed process group; None means all processes.
        balanced: give process n of N the pieces n and 2 N - 1 - n of 2 N pieces. Causal attention that skips later
            keys then costs every process the same. By default shards are contiguous, as the CPU's fast engines need.

    Returns:
        `input_ids` or `inputs_embeds`, `position_ids`, and `attention_mask`: the position channel of the shard's
        queries and of all keys. If the batch has labels, also `labels` and `shift_labels`, both shifted (entry t is the
        token to predict from token t), and `num_items_in_batch`, the number of labels in the whole batch.

    Raises:
        RuntimeError: if torch.distributed is not set up.
        TypeError: for an unknown key.
        ValueError: if the tensors do not fit together, or packed documents come with an attention mask.
    """
    _check_distributed()
    tensors = _checked_batch(batch)
    tokens_key = "input_ids" if "input_ids" in tensors else "inputs_embeds"
    rows, length = tensors[tokens_key].shape[:2]
    ids = tensors.get("position_ids", torch.arange(length, device=tensors[tokens_key].device)[None])
    cut = _Cut.of(length, group, balanced, tensors[tokens_key].device)
    shard = {
        tokens_key: cut.shard(tensors[tokens_key], 0),
        "position_ids": cut.shard(ids, 0).expand(rows, -1),
        "attention_mask": cut.channel(_batch_positions(ids, tensors.get("attention_mask"), rows, length)),
    }
    labels = tensors.get("shift_labels")
    if "labels" in tensors:
        labels = nn.functional.pad(tensors["labels"][:, 1:], (0, 1), value=IGNORED)
    if labels is not None:
        shard["labels"] = shard["shift_labels"] = cut.shard(labels, IGNORED)
        shard["num_items_in_batch"] = (labels != IGNORED).sum()
    return shard


def _checked_batch(batch: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the tensors of a batch, without its None values; TypeError or ValueError if it cannot be sharded."""
    if unknown := sorted(set(batch) - set(_BATCH_KEYS)):
        raise TypeError(f"cannot shard {', '.join(unknown)}; a batch may have {', '.join(_BATCH_KEYS)}")
    tensors = {key: value for key, value in batch.items() if value is not None}
    token_keys = [key for key in ("input_ids", "inputs_embeds") if key in tensors]
    if len(token_keys) != 1 or len(tensors.keys() & {"labels", "shift_labels"}) == 2:
        raise ValueError(
            "a batch has either input_ids or inputs_embeds, and no more than one of labels and shift_labels"
        )
    if "position_ids" in tensors:
        positions.require_whole(tensors["position_ids"], "context parallelism")
    rows, length = tensors[token_keys[0]].shape[:2]
    for key, value in tensors.items():
        if value.shape[:2] != (rows, length) and not (key == "position_ids" and value.shape == (1, length)):
            raise ValueError(f"{key} of shape {tuple(value.shape)} does not belong to {rows} sequences of {length}")
    return tensors


@dataclass(frozen=True)
class _Cut:
    """How a sequence is divided over the processes of a group.

    Attributes:
        padding: number of tokens that fill the sequence up to a length that divides evenly.
        mine: indices of this process's tokens in the filled sequence.
        all: the same indices of all processes, one process after the other.
    """

    padding: int
    mine: Tensor
    all: Tensor

    @classmethod
    def of(cls, length: int, group: dist.ProcessGroup | None, balanced: bool, device: torch.device) -> _Cut:
        """Divide a sequence of this length, see `shard_sequence`."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        pieces = 2 * size if balanced else size
        padding = -length % pieces
        slots = torch.arange(length + padding, device=device).view(pieces, -1)
        shards = [slots[[n, pieces - 1 - n] if balanced else [n]].flatten() for n in range(size)]
        return cls(padding, shards[rank], torch.cat(shards))

    def fill(self, tensor: Tensor, value: int) -> Tensor:
        """Append the padding to the sequences of a tensor (B, T, ...), with this value."""
        behind = (0, 0, 0, self.padding) if tensor.ndim > 2 else (0, self.padding)
        return nn.functional.pad(tensor, behind, value=value)

    def shard(self, tensor: Tensor, value: int) -> Tensor:
        """Return this process's shard of a tensor (B, T, ...), with this value in the padding."""
        return self.fill(tensor, value)[:, self.mine]

    def channel(self, sequence: positions.Positions) -> Tensor:
        """Return the position channel of this process's queries and all keys, from the positions of the batch."""
        index = torch.arange(len(self.all), device=self.all.device)[None]
        position, segment = self.fill(sequence.key_positions, 0), self.fill(sequence.key_segment, 0)
        valid = self.fill(sequence.key_valid, False)
        return positions.pack(
            index[:, self.mine],
            index[:, self.all],
            query_positions=position[:, self.mine],
            key_positions=position[:, self.all],
            query_valid=valid[:, self.mine],
            key_valid=valid[:, self.all],
            query_segment=segment[:, self.mine],
            key_segment=segment[:, self.all],
        )


def _batch_positions(ids: Tensor, mask: Tensor | None, rows: int, length: int) -> positions.Positions:
    """Return the positions of a whole batch, as one process would count them.

    Args:
        ids: position ids (B|1, T).
        mask: attention mask (B, T), zero for padding, or None.
        rows: B.
        length: T.
    """
    restarts = ids[:, 1:] - ids[:, :-1] != 1
    visible = None if mask is None else mask.bool()
    mask_function = causal_documents(None)
    if visible is not None:
        if bool((restarts & visible[:, 1:] & visible[:, :-1]).any()):
            raise ValueError(
                "position_ids jump between tokens that the attention mask shows: transformers recognises packed "
                "documents only without an attention mask. Leave it out"
            )
    elif bool(restarts.any()):
        segments = nn.functional.pad(restarts.cumsum(-1), (1, 0)).expand(rows, -1)
        mask_function = causal_documents(segments)
    channel = position_channel(
        rows, length, length, mask_function=mask_function, attention_mask=visible, device=ids.device
    )
    return positions.unpack(channel, length).follow(ids)
