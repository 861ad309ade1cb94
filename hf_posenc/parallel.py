"""One long sequence on several processes: context parallelism, exact for every scheme.

Each process holds a shard of the sequence. Everything but attention works token by token; before each attention the
processes exchange keys and values, so that every query meets every key, with that key's true position. Attention is
then what one process would compute, on fewer queries: activations shrink with the number of processes, while the keys
and values of one layer at a time are held in full.

Ring attention, which accelerate and torch offer as `cp_size`, exchanges them piece by piece inside stock attention. It
has no place for a term of the scores that depends on positions, and drops the mask that carries them here; so schemes
that change scores refuse it.

The gradient rule. `shard_sequence` gives every shard `num_items_in_batch`, the number of labels in the *whole* batch,
so that the losses of a group's shards *sum* to the loss of the batch, and so do their gradients.
DistributedDataParallel and FSDP take the mean over all processes: under them multiply the loss by the size of the
group. That is the only change to a training loop:

    group, data_rank, data_size = context_group(4)              # processes 0..3 share a batch, 4..7 the next one
    with context_parallel(model, group):                        # around the backward pass too: checkpointing runs
        for batch in loader:                                    # attention again there
            shard = shard_sequence(batch, group)                # the same batch on all processes of the group
            loss = model(**shard).loss * dist.get_world_size(group)
            loss.backward()

The mean of that loss over all processes is the mean loss of the batches.
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
from .upstream import NAME
from .upstream.masks import causal_documents, position_channel

IGNORED = -100
"""Label of a token whose prediction does not count, as everywhere in transformers."""

ALONE = (
    "context parallelism needs several processes that know of each other: start with torchrun or accelerate launch, "
    "and call this after torch.distributed.init_process_group or accelerate.Accelerator()"
)
NO_CACHE = (
    "context parallelism has no key-value cache: the keys of one process are only a part of the sequence. Pass "
    "use_cache=False, and generate outside of context_parallel"
)
NO_POSITIONS = (
    "context parallelism needs to know where the shard sits in the sequence: pass position_ids, or the whole batch "
    "through hf_posenc.shard_sequence(batch, group)"
)
REPEATED = (
    "position_ids repeat over the shards of a sequence, so that they do not tell which keys come first or belong to "
    "the same document: shard packed documents with hf_posenc.shard_sequence(batch, group), whose attention_mask does"
)

LENGTH_DEPENDENT = (
    "rope_type={kind!r} chooses its frequencies by the largest position it is shown, which differs from shard to "
    "shard: under context parallelism use a rope_type that does not depend on the length (default, linear, yarn, "
    "llama3)"
)

_KEYS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")


class _Gather(torch.autograd.Function):
    """Concatenates what the processes of a group hold; backward, each gets the sum of the gradients of its part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        own = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter(own, list(gradient.contiguous()), group=ctx.group)
        return own, None


def _gathered(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensors (...) of the processes of a group as (processes, ...)."""
    tensor = tensor.contiguous()
    parts = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(parts), tensor, group=group)
    return parts


class Exchange:
    """Fetches the keys of the other shards for an attention layer, which has it in its state."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Exchange within a group.

        Args:
            group: torch.distributed process group; None means all processes.
        """
        self.group = group

    def __call__(
        self, key: Tensor, value: Tensor, channel: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, positions.Positions]:
        """Return keys, values and positions of the whole sequence, keys in causal order.

        Args:
            key: (B, K, T, D) of this shard.
            value: (B, K, T, V).
            channel: compact channel (B|1, 1, ROWS, T + L), its keys in the order of the processes.
            window: sliding window of this layer, which the channel does not know.

        Returns:
            key (B, K, L, D), value (B, K, L, V), and the positions of the shard's queries and of all keys.
        """
        queries, sizes = key.shape[2], [key.shape[3], value.shape[3]]
        both = _Gather.apply(torch.cat([key, value], -1), self.group)  # (processes, B, K, T, D + V)
        both = both.permute(1, 2, 0, 3, 4).flatten(2, 3)
        whole = positions.read(channel, queries, both.shape[2])
        assert isinstance(whole, positions.Positions)
        order = whole.key_index.argsort(dim=-1, stable=True)
        if order.shape[0] == 1:
            both = both.index_select(2, order[0])
        else:
            both = both.gather(2, order[:, None, :, None].expand(both.shape))
        key, value = both.split(sizes, -1)

        def ordered(row: Tensor) -> Tensor:
            return row.expand(order.shape[0], -1).gather(-1, order)

        whole = replace(
            whole,
            key_positions=ordered(whole.key_positions),
            key_index=ordered(whole.key_index),
            key_valid=ordered(whole.key_valid),
            key_segment=ordered(whole.key_segment),
            window=whole.window if window is None else torch.full_like(whole.window, window),
        )
        return key, value, whole


def locate_shard(decoder: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Forward pre-hook of a decoder: puts the position channel of the whole sequence in place of the mask."""
    given = inspect.signature(type(decoder).forward).bind_partial(decoder, *args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    del given["self"]
    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise ValueError(NO_CACHE)
    given["use_cache"] = False
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    ids: Any = given.get("position_ids")
    mask: Any = given.get("attention_mask")
    is_channel = isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.int32
    if (ids is None and not is_channel) or tokens is None:
        raise ValueError(NO_POSITIONS)
    if is_channel:
        positions.check(mask, 0)
    else:
        given["attention_mask"] = _channel_of_positions(ids, mask, tokens.shape[:2], on_decoder(decoder).exchange.group)
    return (), given


def _channel_of_positions(
    ids: Tensor, mask: Tensor | None, shape: torch.Size, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the channel (B, 1, ROWS, T + L) of one document per row, whose order is that of its position ids.

    Args:
        ids: (B|1, T) of this shard.
        mask: (B, T) of this shard, zero for padding, or None.
        shape: B, T.
        group: whose shards make up the sequence.
    """
    if mask is not None and mask.shape != shape:
        raise ValueError(
            f"under context parallelism an attention mask belongs to the shard's own tokens, {tuple(shape)}, or comes "
            f"from hf_posenc.shard_sequence; this one is {tuple(mask.shape)} of {mask.dtype}"
        )
    valid = torch.ones(shape, dtype=torch.bool, device=ids.device) if mask is None else mask.bool()
    position = torch.where(valid, ids.expand(shape), -1).to(torch.int32)
    positions_of_all = _gathered(position, group).movedim(0, 1).flatten(1)
    ordered = positions_of_all.sort(-1).values
    repeats = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()
    if repeats.is_cuda:
        torch._assert_async(~repeats, REPEATED)  # reading the value would stall the device
    elif bool(repeats):
        raise ValueError(REPEATED)
    return positions.pack(position, positions_of_all, query_valid=valid, key_valid=positions_of_all >= 0)


@contextmanager
def context_parallel(model: nn.Module, group: dist.ProcessGroup | None = None) -> Iterator[nn.Module]:
    """Let the processes of a group share each sequence, for the length of a `with` block.

    Inside, every process calls the model on its own shard, at the same time, with `position_ids` that say where in the
    sequence its tokens sit, in any order; outputs, loss and gradients are those of one process on the whole sequence
    (see the top of this file for the gradient rule). `shard_sequence` makes the shards; packed documents need it.
    The backward pass belongs inside too: gradient checkpointing runs attention again.

    Schemes that keep the stock attention, and stock models, attend through `scaled_dot_product_attention` with a mask
    meanwhile (with a soft cap on scores, Gemma 2, through an engine that has one), whatever their attention
    implementation is; it is back in place afterwards.

    Args:
        model: patched with any scheme, or a stock model of a supported family; wrapped in DistributedDataParallel,
            sharded by FSDP2 or carrying a PEFT adapter, or none of these.
        group: torch.distributed process group; None means all processes.

    Yields:
        The model itself.

    Raises:
        RuntimeError: if torch.distributed is not set up.
        ValueError: if the model is context parallel already; inside, from its forward pass: for caches, missing or
            repeated position ids, and where something (accelerate's `cp_size`) takes the mask away.
        UnsupportedModelError: for models of other families, and rotary scalings that depend on the sequence's length.
    """
    _check_distributed()
    inner = extract_model_from_parallel(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # PEFT
    family, found = _divisible(inner)
    exchange, undo = Exchange(group), Undo()
    # For checkpointing accelerate before 1.15 wraps what is in a layer, later ones the layer.
    attentions = [getattr(each, "_checkpoint_wrapped_module", each) for each in found.attentions]
    try:
        undo.make(
            SetAttribute(inner.config, "_attn_implementation_internal", NAME),
            Keep(found.decoder, on_decoder, {"exchange": exchange}),
            *(SetAttribute(found.decoder, name, value) for name, value in family.decoder_attributes.items()),
        )
        for attention in attentions:
            name = family.names.attention_heads
            heads = on_attention(attention).heads if name is None else getattr(attention, name)
            undo.make(Keep(attention, on_attention, {"exchange": exchange, "heads": heads}))
        undo.make(AddPreHook(found.decoder, locate_shard))
        yield model
    finally:
        undo.roll_back()


def _divisible(model: object) -> tuple[Family, Resolved]:
    """Return the family and the modules of a model; UnsupportedModelError if it cannot be divided over processes."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"a transformers PreTrainedModel is needed, not {name}")
    if language_config(model.config) is not model.config:
        raise UnsupportedModelError(
            f"{name} is multimodal: parts of an image cannot be divided over processes like tokens"
        )
    family = family_of(model.config)
    found = resolve(family, model)
    if len(found.attentions) < len(found.layers):
        raise UnsupportedModelError(
            f"{name} has layers without attention, whose state would have to travel from shard to shard: only "
            "attention can be divided over processes"
        )
    if family.undivided is not None:
        raise UnsupportedModelError(f"the sequences of a {name} cannot be divided over processes: {family.undivided}")
    if on_decoder(found.decoder).exchange is not None:
        raise ValueError("this model is inside context_parallel already")
    if family.always_replaced and patch_of(model) is None:
        raise UnsupportedModelError(
            f"the attention of a stock {name} never calls transformers' attention interface, and stays inside each "
            "shard: patch the model first"
        )
    _check_rotary(found.decoder)
    return family, found


def _check_rotary(decoder: nn.Module) -> None:
    for module in decoder.modules():
        kinds = getattr(module, "rope_type", None)  # one, or one per layer type
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise UnsupportedModelError(LENGTH_DEPENDENT.format(kind=kind))


def _check_distributed() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(ALONE)


def context_group(size: int) -> tuple[dist.ProcessGroup, int, int]:
    """Divide all processes into groups of neighbours that share a sequence each. Call it on every process.

    Neighbours, because a node's processes have neighbouring ranks, and exchange keys faster.

    Args:
        size: processes per group; divides their number.

    Returns:
        group: this process's, for `context_parallel` and `shard_sequence`.
        data_rank: number of the group: which share of the data its processes read, all the same.
        data_size: number of groups: `DistributedSampler(data, num_replicas=data_size, rank=data_rank)`.

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
    """Return this process's share of a batch, cut along the sequence, for a model inside `context_parallel`.

    Every process of the group passes the same whole batch, so nothing is communicated. The sequence is filled up with
    padding to a length that can be shared evenly. What the model computes is what one process computes when it calls
    `model(**batch, use_cache=False)`; so `position_ids` that start again at each document, without an attention mask,
    mean packed documents, which do not see each other.

    Args:
        batch: `input_ids` (B, T) or `inputs_embeds` (B, T, E); and, if wanted, `attention_mask` (B, T), zero for
            padding, `position_ids` (B|1, T), `labels` (B, T), or `shift_labels` (B, T) that are shifted already.
        group: torch.distributed process group; None means all processes.
        balanced: give each process one piece of the head and one of the tail of the sequence (the first and the last
            of 2 N pieces, the second and the last but one, ...), so that causal attention costs all the same where it
            skips later keys. Otherwise contiguous shards, for which the fast engines of the CPU work.

    Returns:
        `input_ids` or `inputs_embeds`, `position_ids`, and `attention_mask`: the position channel of the shard's
        queries and of all keys. With labels also `labels` and `shift_labels`, both shifted: entry t is the token to
        predict from token t; and `num_items_in_batch`, the number of labels of the whole batch.

    Raises:
        RuntimeError: if torch.distributed is not set up.
        TypeError: for an unknown key.
        ValueError: for tensors that do not fit together, and packed documents under an attention mask.
    """
    _check_distributed()
    given = _checked_batch(batch)
    name = "input_ids" if "input_ids" in given else "inputs_embeds"
    rows, length = given[name].shape[:2]
    ids = given.get("position_ids", torch.arange(length, device=given[name].device)[None])
    cut = _Cut.of(length, group, balanced, given[name].device)
    shard = {
        name: cut.own(given[name], 0),
        "position_ids": cut.own(ids, 0).expand(rows, -1),
        "attention_mask": cut.channel(_whole(ids, given.get("attention_mask"), rows, length)),
    }
    labels = given.get("shift_labels")
    if "labels" in given:
        labels = nn.functional.pad(given["labels"][:, 1:], (0, 1), value=IGNORED)
    if labels is not None:
        shard["labels"] = shard["shift_labels"] = cut.own(labels, IGNORED)
        shard["num_items_in_batch"] = (labels != IGNORED).sum()
    return shard


def _checked_batch(batch: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return what is given of a batch; TypeError or ValueError if it is none that can be sharded."""
    if unknown := sorted(set(batch) - set(_KEYS)):
        raise TypeError(f"cannot shard {', '.join(unknown)}; a batch may have {', '.join(_KEYS)}")
    given = {key: value for key, value in batch.items() if value is not None}
    names = [key for key in ("input_ids", "inputs_embeds") if key in given]
    if len(names) != 1 or len(given.keys() & {"labels", "shift_labels"}) == 2:
        raise ValueError(
            "a batch has either input_ids or inputs_embeds, and no more than one of labels and shift_labels"
        )
    rows, length = given[names[0]].shape[:2]
    for key, value in given.items():
        if value.shape[:2] != (rows, length) and not (key == "position_ids" and value.shape == (1, length)):
            raise ValueError(f"{key} of shape {tuple(value.shape)} does not belong to {rows} sequences of {length}")
    return given


@dataclass(frozen=True)
class _Cut:
    """How a sequence is divided over the processes of a group.

    Attributes:
        padding: number of tokens that fill it up to a length that can be shared evenly.
        mine: indices of this process's tokens, in the filled sequence.
        all: those of all processes, one process after the other.
    """

    padding: int
    mine: Tensor
    all: Tensor

    @classmethod
    def of(cls, length: int, group: dist.ProcessGroup | None, balanced: bool, device: torch.device) -> _Cut:
        """Divide a sequence of some length, see `shard_sequence`."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        pieces = 2 * size if balanced else size
        padding = -length % pieces
        slots = torch.arange(length + padding, device=device).view(pieces, -1)
        shards = [slots[[n, pieces - 1 - n] if balanced else [n]].flatten() for n in range(size)]
        return cls(padding, shards[rank], torch.cat(shards))

    def fill(self, tensor: Tensor, value: int) -> Tensor:
        """Return a tensor (B, T, ...) whose sequences are filled up with a value."""
        behind = (0, 0, 0, self.padding) if tensor.ndim > 2 else (0, self.padding)
        return nn.functional.pad(tensor, behind, value=value)

    def own(self, tensor: Tensor, value: int) -> Tensor:
        """Return this process's share of a tensor (B, T, ...), filled up with a value."""
        return self.fill(tensor, value)[:, self.mine]

    def channel(self, whole: positions.Positions) -> Tensor:
        """Return the position channel of this process's queries and all keys."""
        index = torch.arange(len(self.all), device=self.all.device)[None]
        position, segment = self.fill(whole.key_positions, 0), self.fill(whole.key_segment, 0)
        valid = self.fill(whole.key_valid, False)
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


def _whole(ids: Tensor, mask: Tensor | None, rows: int, length: int) -> positions.Positions:
    """Return the positions that one process would find for a whole batch."""
    restarts = ids[:, 1:] - ids[:, :-1] != 1
    seen = None if mask is None else mask.bool()
    sees = causal_documents(None)
    if seen is not None:
        if bool((restarts & seen[:, 1:] & seen[:, :-1]).any()):
            raise ValueError(
                "position_ids jump inside what the attention mask shows: transformers takes packed documents into "
                "account only without an attention mask. Leave it out"
            )
    elif bool(restarts.any()):
        segments = nn.functional.pad(restarts.cumsum(-1), (1, 0)).expand(rows, -1)
        sees = causal_documents(segments)
    channel = position_channel(rows, length, length, mask_function=sees, attention_mask=seen, device=ids.device)
    return positions.unpack(channel, length).follow(ids)
