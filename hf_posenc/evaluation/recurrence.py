"""Segment recurrence: read a text in segments, each with a memory of the tokens before it (Dai et al. 2019).

Transformer-XL (arXiv:1901.02860, section 3.2) stores the hidden states of the last `M` tokens in every layer. In the
next segment of `T` tokens, queries see these and their own segment. If positions act by distance alone, keys and values
depend only on a token's hidden state, so they can be stored instead. The memory is then a key-value cache of the last
`M` tokens, without gradients. transformers has such a cache layer for sliding windows. This file uses it for models
without a window in their mask, so that every token of a segment sees the whole memory.

The result equals one long forward pass in which, in every layer, a token sees its segment and `M` tokens before that.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..api import schemes_of
from ..core.errors import UnsupportedModelError
from ..core.modules import PositionEmbedding
from ..families.base import language_config
from ..model.base_model import BaseModel
from ..model.logits import IGNORED, token_losses
from ..model.patch_record import without_adapter
from ..patching.changes import NoEmbedding
from ..schemes.base import by_layer_type, depends_on_length
from ..transformers_glue.rotary import IdentityRotary
from .batches import Reader, reading
from .perplexity import Perplexity, check_documents

KEY_VALUE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers of transformers that store only keys and values of single tokens."""


def measure_recurrence(
    model: PreTrainedModel,
    documents: Sequence[Tensor],
    *,
    segment: int,
    memory: int,
    batch_size: int | None = None,
    progress: bool = False,
) -> Perplexity:
    """Read documents segment by segment with memory, and score all tokens except the first of each document.

    With `L` layers the context of a token reaches `L * memory` tokens before its segment, because the tokens in memory
    have themselves read a memory. Every token is computed once, and attends to at most `memory + segment` tokens. For
    comparison, `memory=0` scores the same tokens from independent segments. In sliding windows of `memory + segment`
    tokens with the stride `segment`, the context ends after the same span in every layer, and the text is computed
    `(memory + segment) / segment` times.

    Position ids count through a whole document. Schemes on scores read their differences, which are exact. Rotary
    angles are float32 in transformers: at position `p` their error is up to `p * 6e-8` radians.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        documents: sequences `(N,)` int64; at least one has 2 tokens. Memory never crosses documents.
        segment: tokens in a segment, at least 1.
        memory: tokens of memory, at least 0.
        batch_size: documents per forward pass. None means about 8192 tokens, 1024 on a CPU. Segments of one document
            are never in one batch, because each needs the memory of the one before.
        progress: show a progress bar, in tokens.

    Returns:
        The perplexity. Its `length` is `memory + segment`, and its `windows` are the segments.

    Raises:
        ValueError: for a number out of range, or if all documents are too short to predict a token.
        UnsupportedModelError: with memory, if positions act by more than distances (position vectors, rotary
            frequencies that depend on the length, factors that grow with the position), or if the model stores more
            of the past than keys and values.
    """
    check_documents(documents)
    for name, value, least in (("segment", segment, 1), ("memory", memory, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if memory:
        check_memory(model)
    longest_first = sorted((document for document in documents if len(document) > 1), key=len, reverse=True)
    total, nll = sum(len(document) - 1 for document in longest_first), 0.0
    with reading(model, longest_first[0], progress=progress) as reader, reader.bar(total, "tok") as bar:
        for batch in reader.batches([(segment,)] * len(longest_first), batch_size):
            for losses in _read_segments(reader, [longest_first[index] for index in batch], segment, memory):
                nll += losses.sum().item()
                bar.update(len(losses))
    windows = sum(math.ceil((len(document) - 1) / segment) for document in longest_first)
    span = {"length": memory + segment, "stride": segment, "windows": windows, "tokens": total}
    return Perplexity(method="segment_recurrence", nll=nll, **span)


def memory_cache(memory: int) -> Cache:
    """Return a cache for reading segments, in which every layer stores the last `memory` tokens.

    Pass it as `past_key_values` to successive forward passes. Sliding windows in the model's mask still apply.

    Args:
        memory: M, at least 1.
    """
    return Cache(layer_class_to_replicate=partial(DynamicSlidingWindowLayer, memory + 1))


def check_memory(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for a model that cannot be read with memory, see `measure_recurrence`."""
    model = without_adapter(model)
    base, schemes = BaseModel.of(model), schemes_of(model)
    table, rotary = base.modules.position_table, base.modules.rotary
    if base.hides_attention:
        raise UnsupportedModelError(
            f"the attention of this {base.name} does not go through transformers' attention interface, and its own "
            "tables or masks do not include memory: patch it first"
        )
    adding = [module for module in model.modules() if isinstance(module, PositionEmbedding)]
    if isinstance(table, torch.nn.Embedding) or not all(isinstance(module, NoEmbedding) for module in adding):
        raise UnsupportedModelError(
            f"this {base.name} adds position vectors, so positions act by more than distances: in segments they would "
            "grow past every length that the model has seen. Memory needs a scheme of distances, or nope: measure "
            "sliding windows instead"
        )
    rotations = [parameters or {} for scheme in schemes for parameters in scheme.rotations()]
    if not isinstance(rotary, IdentityRotary | None):
        rotations.append(base.rotation.own())
    every = [each for rotation in rotations for each in by_layer_type(rotation).values()]
    if by_length := sorted(str(each["rope_type"]) for each in every if depends_on_length(each)):
        raise UnsupportedModelError(
            f"the rotary frequencies of this {base.name} depend on the length that has been read (rope_type "
            f"{by_length[0]}), and the keys in memory were rotated with other frequencies"
        )
    switches = base.family.rotation.attention_temperature.items()
    if base.has_temperature or any(
        getattr(each, name) != off for each in base.modules.attentions for name, off in switches
    ):
        raise UnsupportedModelError(
            f"this {base.name} multiplies its queries by a factor that grows with the position, so scores with tokens "
            "in memory depend on more than the distance"
        )
    if base.family.names.attention_layer_index is None:
        raise UnsupportedModelError(f"this {base.name} has no cache, so no keys and values of earlier segments")
    layers = DynamicCache(config=language_config(model.config)).layers
    # Layers that borrow keys and values store none.
    kinds_of_layers = {type(layer) for index, layer in enumerate(layers) if index not in base.lenders}
    if base.family.hybrid or kinds_of_layers - set(KEY_VALUE_LAYERS):
        raise UnsupportedModelError(
            f"layers of this {base.name} store something else than keys and values of single tokens, which cannot be "
            "cut to the last tokens"
        )


def _read_segments(reader: Reader, documents: Sequence[Tensor], segment: int, memory: int) -> Iterator[Tensor]:
    """Read a batch of documents, longest first. Yield for each segment the losses of its tokens, (N,) float64.

    Documents are padded at their end, where the causal mask hides the padding.
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
        yield losses[targets.flatten() != IGNORED].double()
