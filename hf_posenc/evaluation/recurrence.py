"""Segment recurrence: read a text in segments, each with a memory of the tokens before it (Dai et al. 2019).

Transformer-XL (arXiv:1901.02860, section 3.2) stores the hidden states of the last `M` tokens in every layer. In the
next segment of `T` tokens, queries see these and their own segment. If positions act by distance alone, keys and values
depend only on a token's hidden state, so they can be stored instead. The memory is then a key-value cache of the last
`M` tokens, without gradients. transformers has such a cache layer for sliding windows. This file uses it for models
without a window in their mask, so that every token of a segment sees the whole memory.

The result equals one long forward pass in which, in every layer, a token sees its segment and `M` tokens before that.
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
from ..live.logits import IGNORED, token_losses
from ..live.patch_record import without_adapter
from ..measurement import Result
from ..modules import PositionEmbedding
from ..patching.changes import NoEmbedding
from ..schemes.base import by_layer_type, depends_on_length
from ..upstream.rotary import IdentityRotary
from .batches import Reader, progress_bar, reading
from .context import PositionLoss, check_documents, losses_by_position, position_edges
from .perplexity import Perplexity

KEY_VALUE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers of transformers that store only keys and values of single tokens."""


@dataclass(frozen=True, kw_only=True)
class RecurrenceMeasurement(Result):
    """Perplexity of a text that was read in segments, and how fast it was read.

    Attributes:
        segment: tokens in a segment, `T`.
        memory: tokens of memory before a segment, `M`; 0 means independent segments.
        perplexity: perplexity of all tokens except the first of each document. Its `length` is `M + T`, and its
            `windows` are the segments.
        by_position: loss by the token's position in its segment, in bins `[0, 1), [1, 2), [2, 4), ...`. The last token
            of a segment predicts the token at position 0 of the next one.
        bits_per_byte: bits per byte of the text, see `ContextMeasurement`; None without byte counts.
        tokens_per_second: speed of reading and computing the loss.
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
    """Read documents segment by segment with memory, and score all tokens except the first of each document.

    With `L` layers the context of a token reaches `L * memory` tokens before its segment, because the tokens in memory
    have themselves read a memory. Every token is computed once, and attends to at most `memory + segment` tokens. For
    comparison, `memory=0` scores the same tokens from independent segments. In
    `sliding_window_perplexity(length=memory + segment, stride=segment)` the context ends after the same span in every
    layer, and the text is computed `(memory + segment) / segment` times.

    Position ids count through a whole document. Schemes on scores read their differences, which are exact. Rotary
    angles are float32 in transformers: at position `p` their error is up to `p * 6e-8` radians.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        documents: sequences `(N,)` int64; at least one has 2 tokens. Memory never crosses documents.
        segment: tokens in a segment, at least 1.
        memory: tokens of memory, at least 0.
        byte_counts: number of bytes of each document's text, for bits per byte.
        batch_size: documents per forward pass. None means about 8192 tokens, 1024 on a CPU. Segments of one document
            are never in one batch, because each needs the memory of the one before.
        progress: show a progress bar, in tokens.

    Raises:
        ValueError: for a number out of range, or if all documents are too short to predict a token.
        UnsupportedModelError: with memory, if positions act by more than distances (position vectors, rotary
            frequencies that depend on the length, factors that grow with the position), or if the model stores more
            of the past than keys and values.
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
        start = time.perf_counter()
        nll, counts = torch.zeros(2, segment, dtype=torch.float64)
        for batch in batches:
            for losses, counted in _read_segments(reader, [longest_first[index] for index in batch], segment, memory):
                nll[: losses.shape[1]] += losses.sum(0)
                counts[: losses.shape[1]] += counted.sum(0)
                bar.update(int(counted.sum()))
        speed = total / (time.perf_counter() - start)
    windows = sum(math.ceil((len(document) - 1) / segment) for document in longest_first)
    # Sums are by the position of the output. The predicted token is one position further on.
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
    """Return the measurement from sums of losses, and numbers of losses, by position in the segment, (T,)."""
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
    """Return a cache for reading segments, in which every layer stores the last `memory` tokens.

    Pass it as `past_key_values` to successive forward passes. Sliding windows in the model's mask still apply.

    Args:
        memory: M, at least 1.
    """
    return Cache(layer_class_to_replicate=partial(DynamicSlidingWindowLayer, memory + 1))


def check_memory(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for a model that cannot be read with memory, see `measure_recurrence`."""
    for reason in _reasons_against_memory(without_adapter(model)):
        raise UnsupportedModelError(reason)


def _reasons_against_memory(model: PreTrainedModel) -> Iterator[str]:
    """Yield the reasons why a model cannot be read with memory."""
    base, schemes = BaseModel.of(model), schemes_of(model)
    table, rotary = base.modules.position_table, base.modules.rotary
    if base.hides_attention:
        yield (
            f"the attention of this {base.name} does not go through transformers' attention interface, and its own "
            "tables or masks do not include memory: patch it first"
        )
    adding = [module for module in model.modules() if isinstance(module, PositionEmbedding)]
    if isinstance(table, torch.nn.Embedding) or not all(isinstance(module, NoEmbedding) for module in adding):
        yield (
            f"this {base.name} adds position vectors, so positions act by more than distances: in segments they would "
            "grow past every length that the model has seen. Memory needs a scheme of distances, or nope: measure "
            "sliding windows instead"
        )
    rotations = [parameters or {} for scheme in schemes for parameters in scheme.acts_on.rotations(scheme)]
    if not isinstance(rotary, IdentityRotary | None):
        rotations.append(base.rotation.own())
    every = [each for rotation in rotations for each in by_layer_type(rotation).values()]
    if by_length := sorted(str(each["rope_type"]) for each in every if depends_on_length(each)):
        yield (
            f"the rotary frequencies of this {base.name} depend on the length that has been read (rope_type "
            f"{by_length[0]}), and the keys in memory were rotated with other frequencies"
        )
    switches = base.family.rotation.attention_temperature.items()
    if base.has_temperature or any(
        getattr(each, name) != off for each in base.modules.attentions for name, off in switches
    ):
        yield (
            f"this {base.name} multiplies its queries by a factor that grows with the position, so scores with tokens "
            "in memory depend on more than the distance"
        )
    if base.family.names.attention_layer_index is None:
        yield f"this {base.name} has no cache, so no keys and values of earlier segments"
    layers = DynamicCache(config=language_config(model.config)).layers
    # Layers that borrow keys and values store none.
    kinds_of_layers = {type(layer) for index, layer in enumerate(layers) if index not in base.lenders}
    if base.family.hybrid or kinds_of_layers - set(KEY_VALUE_LAYERS):
        yield (
            f"layers of this {base.name} store something else than keys and values of single tokens, which cannot be "
            "cut to the last tokens"
        )


def _read_segments(
    reader: Reader, documents: Sequence[Tensor], segment: int, memory: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read a batch of documents, longest first. Yield for each segment its losses and a mask of the scored tokens.

    Both are (B, up to T) float64 on the CPU, and the mask is 0 or 1. Documents are padded at their end, where the
    causal mask hides the padding.
    """
    segments = [(document[:-1].split(segment), document[1:].split(segment)) for document in documents]
    cache, rows = memory_cache(memory) if memory else None, len(documents)
    for number in range(len(segments[0][0])):
        parts = [(inputs[number], targets[number]) for inputs, targets in segments if number < len(inputs)]
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
                "the model does not store its keys and values in the cache that it is called with"
            )
        yield losses.view_as(targets).double().cpu(), (targets != IGNORED).double().cpu()
