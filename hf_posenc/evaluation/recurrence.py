"""Segment recurrence: a text is read in segments, each with a memory of the tokens before it (Dai et al. 2019).

Transformer-XL (arXiv:1901.02860, section 3.2) keeps each layer's hidden states of the last `M` tokens. In the next
segment of `T` tokens the queries of every layer see them beside their own segment. Where distances alone matter, keys
and values are functions of one token's hidden state, so they can be kept instead of being made again. A key-value cache
that holds its last `M` entries, through which no gradient flows, is therefore the memory. Transformers has that cache
layer for sliding windows. Here it is given to a model whose mask has no such window, so that every token of a segment
sees all the memory.

The result is exactly one long forward in which, in every layer, a token sees its segment and `M` tokens before that.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..api import schemes_of
from ..errors import UnsupportedModelError
from ..families.base import language_config
from ..live.base_model import BaseModel
from ..live.patch_record import without_adapter
from ..measurement import Result
from ..modules import PositionEmbedding
from ..patching.changes import NoEmbedding
from ..schemes.base import by_layer_type
from ..upstream.rotary import IdentityRotary
from .batches import IGNORED, Reader, progress_bar, reading, token_losses
from .context import PositionLoss, check_documents, losses_by_position, position_edges
from .perplexity import Perplexity

KEEPS_KEYS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers of transformers that hold nothing but keys and values of single tokens."""

BY_LENGTH = ("dynamic", "longrope")
"""Values of `rope_type` whose frequencies depend on the number of tokens read."""


@dataclass(frozen=True, kw_only=True)
class RecurrenceMeasurement(Result):
    """Perplexity of a text that was read in segments, and how fast it was read.

    Attributes:
        segment: tokens in a segment, `T`.
        memory: tokens before it that each layer sees beside it, `M`; 0 means independent segments.
        perplexity: perplexity of every token but the first of each document. Its `length` is `M + T`, its `windows` are
            segments.
        by_position: loss by the token's place in its segment, in bins `[0, 1), [1, 2), [2, 4), ...`. The token at place
            0 is predicted by the last one of the segment before.
        bits_per_byte: bits per byte of the text, as in `ContextMeasurement`; None if the bytes are not known.
        tokens_per_second: speed of reading, the loss included.
    """

    segment: int
    memory: int
    perplexity: Perplexity
    by_position: tuple[PositionLoss, ...]
    bits_per_byte: float | None
    tokens_per_second: float = field(compare=False)


def measure_recurrence(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    *,
    segment: int,
    memory: int,
    byte_counts: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: bool = False,
) -> RecurrenceMeasurement:
    """Read whole documents segment by segment with memory, and score every token but the first of each.

    With `L` layers the context of a token reaches `L * memory` tokens before its segment, because the memory of a layer
    has read its own memory. Each token is computed once, and attends to at most `memory + segment` others. For
    comparison, `memory=0` scores the same tokens from independent segments. In
    `sliding_window_perplexity(length=memory + segment, stride=segment)` the context ends after the same span in every
    layer, and the text is computed `(memory + segment) / segment` times.

    Position ids go on through a document. Schemes on scores read their differences, which are exact. Rotary angles are
    float32 in transformers: at position `p` they are off by up to `p * 6e-8` radians.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        documents: `(N,)` int64 each, at least 2 tokens in one of them. Memory never crosses documents.
        segment: tokens in a segment, at least 1.
        memory: tokens of memory, at least 0.
        byte_counts: bytes of each document's text, for bits per byte.
        batch_size: documents per forward; by default as many as make about 8192 tokens, 1024 on a CPU. One long
            document is read alone, because its segments follow each other.
        progress: show a progress bar, in tokens.

    Raises:
        ValueError: for a number out of range, or if no document is long enough to predict anything.
        UnsupportedModelError: with memory, for a model that does not read positions by their distances alone (position
            vectors, rotary frequencies that depend on the length, factors that grow with the position), or that keeps
            more of the past than keys and values.
    """
    check_documents(documents, byte_counts)
    for name, value, least in (("segment", segment, 1), ("memory", memory, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if memory:
        check_memory(model)
    longest_first = sorted((document for document in documents if len(document) > 1), key=len, reverse=True)
    total = sum(len(document) - 1 for document in longest_first)
    bar = progress_bar(total, f"segments {segment} + {memory}", "tok", progress)
    with reading(model, longest_first[0]) as reader, bar:
        batches = reader.batches([None] * len(longest_first), lambda _: segment, batch_size)
        began = time.perf_counter()
        nll, counts = torch.zeros(2, segment, dtype=torch.float64)
        for batch in batches:
            for losses, counted in _segments(reader, [longest_first[index] for index in batch], segment, memory):
                nll[: losses.shape[1]] += losses.sum(0)
                counts[: losses.shape[1]] += counted.sum(0)
                bar.update(int(counted.sum()))
        speed = total / (time.perf_counter() - began)
    windows = sum(math.ceil((len(document) - 1) / segment) for document in longest_first)
    # From the place of the output to that of the token it predicts.
    return _measurement(segment, memory, windows, nll.roll(1), counts.roll(1), byte_counts, speed)


def _measurement(
    segment: int,
    memory: int,
    windows: int,
    nll: Tensor,
    counts: Tensor,
    byte_counts: Sequence[int] | None,
    speed: float,
) -> RecurrenceMeasurement:
    """Return what sums of losses, and how many they are, at each place in a segment, (T,), add up to."""
    span = {"length": memory + segment, "stride": segment, "windows": windows, "tokens": int(counts.sum())}
    perplexity = Perplexity(method="segment_recurrence", nll=nll.sum().item(), **span)
    edges = [0, *position_edges(segment)]
    bins = [[values[first:last].sum().item() for first, last in pairwise(edges)] for values in (nll, counts)]
    return RecurrenceMeasurement(
        segment=segment,
        memory=memory,
        perplexity=perplexity,
        by_position=losses_by_position(edges, *bins),
        bits_per_byte=perplexity.bits_per_byte(byte_counts),
        tokens_per_second=speed,
    )


def memory_cache(memory: int) -> Cache:
    """Return a cache to read segments with: every layer hands out its last `memory` tokens, and keeps as many.

    Pass it as `past_key_values` to one forward after the other. A model's own sliding windows still apply.

    Args:
        memory: M, at least 1.
    """
    return Cache(layer_class_to_replicate=partial(DynamicSlidingWindowLayer, memory + 1))


def check_memory(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for a model that cannot be read with memory, see `measure_recurrence`."""
    for reason in _against_memory(without_adapter(model)):
        raise UnsupportedModelError(reason)


def _against_memory(model: PreTrainedModel) -> Iterator[str]:
    """Yield the reasons why a model cannot be read with memory, in words."""
    base, schemes = BaseModel.of(model), schemes_of(model)
    table, rotary = base.found.position_table, base.found.rotary
    if base.hides_attention:
        yield (
            f"the attention of this {base.name} does not go through transformers' attention interface, and has tables "
            "or masks of its own that do not know of memory: patch it first"
        )
    adding = [module for module in model.modules() if isinstance(module, PositionEmbedding)]
    if isinstance(table, torch.nn.Embedding) or not all(isinstance(module, NoEmbedding) for module in adding):
        yield (
            f"this {base.name} adds position vectors, which say where a token is and not how far from another: read in "
            "segments they would go on past every length that the model has seen. Memory needs a scheme of distances, "
            "or nope: measure sliding windows instead"
        )
    rotations = [parameters or {} for scheme in schemes for parameters in scheme.acts_on.rotations(scheme)]
    if not isinstance(rotary, IdentityRotary | None):
        rotations.append(base.rotation.own())
    kinds = {str(each.get("rope_type")) for rotation in rotations for each in by_layer_type(rotation).values()}
    if by_length := sorted(kinds.intersection(BY_LENGTH)):
        yield (
            f"the rotary frequencies of this {base.name} depend on the length that has been read (rope_type "
            f"{by_length[0]}), and the keys in memory were turned by others"
        )
    switches = base.family.rotation.attention_temperature.items()
    if base.has_temperature or any(
        getattr(each, name) != off for each in base.found.attentions for name, off in switches
    ):
        yield (
            f"this {base.name} multiplies its queries by a factor that grows with the position, so the distance alone "
            "does not say what a token in memory is to it"
        )
    others = {type(layer) for layer in DynamicCache(config=language_config(model.config)).layers} - set(KEEPS_KEYS)
    if base.family.hybrid or others:
        yield (
            f"layers of this {base.name} keep something else of the past than keys and values of single tokens, which "
            "cannot be cut down to the last tokens"
        )


def _segments(
    reader: Reader, documents: Sequence[Tensor], segment: int, memory: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read documents, longest first, side by side; yield losses and a mask of 0 and 1, (B, up to T) float64 on the CPU.

    Shorter documents are padded behind their end, where none of their tokens looks.
    """
    read = [(document[:-1].split(segment), document[1:].split(segment)) for document in documents]
    cache, rows = memory_cache(memory) if memory else None, len(documents)
    for number in range(len(read[0][0])):
        parts = [(inputs[number], targets[number]) for inputs, targets in read if number < len(inputs)]
        if cache is not None and len(parts) < rows:
            cache.batch_select_indices(torch.arange(len(parts)))
        rows = len(parts)
        tokens, targets = (
            pad_sequence(list(each), batch_first=True, padding_value=padding).to(reader.device)
            for each, padding in zip(zip(*parts, strict=True), (0, IGNORED), strict=True)
        )
        pieces = reader.logits_of(tokens, slice(0, tokens.shape[1]), cache)
        losses = torch.cat(list(token_losses(pieces, targets.flatten())))
        if cache is not None and not number and cache.get_seq_length() != tokens.shape[1]:
            raise UnsupportedModelError(
                "the model does not keep its keys and values in the cache that it is called with"
            )
        yield losses.view_as(targets).double().cpu(), (targets != IGNORED).double().cpu()
