"""Segment recurrence: a text is read in segments, each with the memory of what was read before it (Dai et al. 2019).

Transformer-XL (arXiv:1901.02860, section 3.2) keeps each layer's hidden states of the last `M` tokens; in the next
segment of `T` tokens the queries of every layer see them beside their own segment. Where distances alone matter, keys
and values are functions of one token's hidden state, so keeping those is the same as making them again: a key-value
cache that holds its last `M` entries, through which no gradient flows. That is transformers' own cache layer for
sliding windows, given to a model whose mask has no such window, so that every token of a segment sees all the memory.

So it is exactly one long forward in which, in every layer, a token sees its own segment and `M` tokens before that.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..api import schemes_of
from ..errors import UnsupportedModelError
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.state import without_adapter
from ..modules import PositionEmbedding
from ..patching.place import NoEmbedding
from ..schemes.base import by_layer_type
from ..upstream.rotary import IdentityRotary
from .context import PositionLoss, check_documents, position_edges
from .perplexity import Perplexity, default_batch_size, logits_function

KEEPS_KEYS = (DynamicLayer, DynamicSlidingWindowLayer)
"""What transformers keeps for layers that have nothing but keys and values of single tokens."""

BY_LENGTH = ("dynamic", "longrope")
"""The `rope_type` values whose frequencies depend on how far the text has been read."""

IGNORED = -100
"""Target of padding, which is not counted."""


@dataclass(frozen=True, kw_only=True)
class RecurrenceMeasurement:
    """What reading in segments gave.

    Attributes:
        segment: tokens in a segment, `T`.
        memory: tokens before it that each layer sees beside it, `M`; 0 means segments that know nothing of each other.
        perplexity: of every token but the first of each document. Its `length` is `M + T`, its `windows` are segments.
        by_position: loss by the token's place in its segment, in bins `[0, 1), [1, 2), [2, 4), ...`. The token at place
            0 is predicted by the last one of the segment before.
        bits_per_byte: of the text, as in `ContextMeasurement`; None if the bytes are not known.
        tokens_per_second: read, the loss included.
    """

    segment: int
    memory: int
    perplexity: Perplexity
    by_position: tuple[PositionLoss, ...]
    bits_per_byte: float | None
    tokens_per_second: float = field(compare=False)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, the derived ones included, ready for JSON."""
        return {
            "segment": self.segment,
            "memory": self.memory,
            "perplexity": self.perplexity.to_dict(),
            "by_position": [asdict(part) for part in self.by_position],
            "bits_per_byte": self.bits_per_byte,
            "tokens_per_second": self.tokens_per_second,
        }


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
    """Reads whole documents segment by segment with memory, and scores every token but the first of each.

    With `L` layers the context of a token reaches `L * memory` tokens before its segment, since the memory of a layer
    has read its own memory. Each token is computed once, and attends to at most `memory + segment` others. To compare
    with: `memory=0` scores the same tokens from segments that know nothing of each other, and
    `sliding_window_perplexity(length=memory + segment, stride=segment)` computes the same span again for every segment,
    `(memory + segment) / segment` times the text, with a context that ends there in every layer.

    Position ids go on through a document. Schemes on scores read their differences, which are exact. Rotary angles are
    float32 in transformers: at position `p` they are off by up to `p * 6e-8` radians.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        documents: `(N,)` int64 each, at least 2 tokens in one of them. Memory never crosses documents.
        segment: tokens in a segment, at least 1.
        memory: tokens of memory, at least 0.
        byte_counts: bytes of each document's text, for bits per byte.
        batch_size: documents per forward; by default as many as make about 8192 tokens, 1024 on a CPU. The segments of
            one document follow each other: one long document is read alone.
        progress: show a progress bar, in tokens.

    Raises:
        ValueError: a number out of range, no document long enough to predict anything.
        UnsupportedModelError: with memory, for a model that does not read positions by their distances alone (position
            vectors, rotary frequencies that depend on the length, factors that grow with the position), or that keeps
            something else of the past than keys and values.
    """
    check_documents(documents, byte_counts, batch_size)
    if segment < 1:
        raise ValueError(f"segment must be at least 1, not {segment}")
    if memory < 0:
        raise ValueError(f"memory must be at least 0, not {memory}")
    if memory:
        check_memory(model)
    device = next(model.parameters()).device
    longest_first = sorted((document for document in documents if len(document) > 1), key=len, reverse=True)
    size = batch_size or default_batch_size(device, segment)
    batches = [longest_first[start : start + size] for start in range(0, len(longest_first), size)]
    nll, counts = torch.zeros(2, segment, dtype=torch.float64)  # by the place of the output that predicts
    total = sum(len(document) - 1 for document in longest_first)
    with (
        evaluation(model),
        torch.no_grad(),
        tqdm(
            total=total,
            desc=f"segments {segment} + {memory}",
            unit="tok",
            unit_scale=True,
            leave=False,
            disable=not progress,
        ) as bar,
    ):
        logits_of = logits_function(model, longest_first[0])
        began = time.perf_counter()
        for batch in batches:
            for losses, counted in _segments(logits_of, batch, segment, memory, device):
                nll[: losses.shape[1]] += losses.sum(0)
                counts[: losses.shape[1]] += counted.sum(0)
                bar.update(int(counted.sum()))
        seconds = time.perf_counter() - began
    nll, counts = nll.roll(1), counts.roll(1)  # from the place of the output to that of the token it predicts
    edges = [0, *position_edges(segment)]
    bins = [(first, last, counts[first:last].sum(), nll[first:last].sum()) for first, last in pairwise(edges)]
    perplexity = Perplexity(
        method="segment_recurrence",
        length=memory + segment,
        stride=segment,
        windows=sum(-(-(len(document) - 1) // segment) for document in longest_first),
        tokens=total,
        nll=nll.sum().item(),
    )
    return RecurrenceMeasurement(
        segment=segment,
        memory=memory,
        perplexity=perplexity,
        by_position=tuple(
            PositionLoss(first=first, last=last, tokens=int(tokens), loss=(loss / tokens).item())
            for first, last, tokens, loss in bins
            if tokens
        ),
        bits_per_byte=perplexity.nll / log(2) / sum(byte_counts) if byte_counts is not None else None,
        tokens_per_second=total / seconds,
    )


def memory_cache(memory: int) -> Cache:
    """Return a cache to read segments with: every layer hands out its last `memory` tokens, and keeps as many.

    Pass it as `past_key_values` of one forward after the other. A model's own sliding windows go on to hold.

    Args:
        memory: M, at least 1.
    """
    return Cache(layer_class_to_replicate=partial(DynamicSlidingWindowLayer, memory + 1))


def check_memory(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be read with memory.

    Raises:
        UnsupportedModelError: see `measure_recurrence`.
    """
    model = without_adapter(model)
    base, schemes = BaseModel.of(model), schemes_of(model)
    table, rotary = base.found.position_table, base.found.rotary
    if base.hides_attention:
        raise UnsupportedModelError(
            f"the attention of this {base.name} does not go through transformers' attention interface, and has tables "
            "or masks of its own that do not know of memory: patch it first"
        )
    adding = [module for module in model.modules() if isinstance(module, PositionEmbedding)]
    if isinstance(table, torch.nn.Embedding) or not all(isinstance(module, NoEmbedding) for module in adding):
        raise UnsupportedModelError(
            f"this {base.name} adds position vectors, which say where a token is and not how far from another: read in "
            "segments they would go on past every length that the model has seen. Memory needs a scheme of distances, "
            "or nope: measure sliding windows instead"
        )
    rotations = [parameters or {} for scheme in schemes for parameters in scheme.acts_on.rotations(scheme, base)]
    if not isinstance(rotary, IdentityRotary | None):
        rotations.append(base.rotation.own())
    kinds = {str(each.get("rope_type")) for rotation in rotations for each in by_layer_type(rotation).values()}
    if by_length := sorted(kinds.intersection(BY_LENGTH)):
        raise UnsupportedModelError(
            f"the rotary frequencies of this {base.name} depend on the length that has been read (rope_type "
            f"{by_length[0]}), and the keys in memory were turned by others"
        )
    switches = base.family.rotation.attention_temperature.items()
    if base.has_temperature or any(
        getattr(each, name) != off for each in base.found.attentions for name, off in switches
    ):
        raise UnsupportedModelError(
            f"this {base.name} multiplies its queries by a factor that grows with the position, so the distance alone "
            "does not say what a token in memory is to it"
        )
    others = {type(layer) for layer in DynamicCache(config=model.config).layers} - set(KEEPS_KEYS)
    if base.family.hybrid or others:
        raise UnsupportedModelError(
            f"layers of this {base.name} keep something else of the past than keys and values of single tokens, which "
            "cannot be cut down to the last tokens"
        )


def _segments(
    logits_of: Any, documents: Sequence[Tensor], segment: int, memory: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read documents (longest first) side by side; yield losses and what counts, (B, up to T) float64 on the CPU.

    What is shorter than the others is padded behind its end, where no token of it looks.
    """
    read = [(document[:-1].split(segment), document[1:].split(segment)) for document in documents]
    cache, rows = memory_cache(memory) if memory else None, len(documents)
    for number in range(len(read[0][0])):
        parts = [(given[number], asked[number]) for given, asked in read if number < len(given)]
        if cache is not None and len(parts) < rows:
            cache.batch_select_indices(torch.arange(len(parts)))
        rows = len(parts)
        tokens = pad_sequence([given for given, _ in parts], batch_first=True).to(device)
        targets = pad_sequence([asked for _, asked in parts], batch_first=True, padding_value=IGNORED).to(device)
        found, done, flat = [], 0, targets.flatten()
        for logits in logits_of(tokens, slice(0, tokens.shape[1]), cache):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            found.append(F.cross_entropy(wide, flat[done : done + len(wide)], reduction="none", ignore_index=IGNORED))
            done += len(wide)
        if cache is not None and not number and cache.get_seq_length() != tokens.shape[1]:
            raise UnsupportedModelError(
                "the model does not keep its keys and values in the cache that it is called with"
            )
        yield torch.cat(found).view_as(targets).double().cpu(), (targets != IGNORED).double().cpu()
