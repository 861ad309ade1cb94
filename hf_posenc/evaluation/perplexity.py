"""Perplexity in two kinds of windows, loss by position and bits per byte of a text, at several context lengths.

If a text is cut into fresh windows, the first tokens of every window have almost no context. Longer windows have fewer
such tokens, so perplexity falls even if the model does not use the longer context. This is the *early token curse*
(Press, Smith and Lewis 2021, "Train Short, Test Long", appendix B). A sliding window scores every token with nearly the
full context and has no such gain. Always read both, at the same lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..core.measurement import Result
from .batches import Reader, reading


@dataclass(frozen=True, kw_only=True)
class Perplexity(Result):
    """Perplexity of a text, and the numbers it was computed from.

    Attributes:
        method: `"sliding"` or `"non_overlapping"`.
        length: tokens in a window.
        stride: tokens from one window to the next; equal to `length` for non-overlapping windows.
        windows: number of windows scored.
        tokens: number of scored tokens, without repetitions.
        nll: sum of the negative log-likelihoods of these tokens, in nats.
    """

    derived = ("loss", "perplexity")

    method: str
    length: int
    stride: int
    windows: int
    tokens: int
    nll: float

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(loss)`; infinite if that overflows a float."""
        return math.inf if self.loss >= 709 else math.exp(self.loss)


@dataclass(frozen=True, kw_only=True)
class PositionLoss(Result):
    """Mean loss in one bin of positions in a fresh window.

    Attributes:
        first: first position of the bin, from 0. The token at position 0 of a fresh window is never predicted.
        last: last position of the bin, plus one.
        tokens: number of scored tokens in the bin, over all windows.
        loss: mean negative log-likelihood of these tokens, in nats.
    """

    first: int
    last: int
    tokens: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class ContextMeasurement(Result):
    """Measurement at one context length.

    Attributes:
        length: tokens in a window.
        sliding: perplexity from sliding windows, in which every token has nearly the full context.
        non_overlapping: perplexity from fresh windows, which do not overlap.
        by_position: loss by the token's position in a fresh window, in bins `[1, 2), [2, 4), [4, 8), ...`.
        bits_per_byte: negative `log2` likelihood of the text from the sliding windows, divided by its bytes. Use it to
            compare models with different tokenizers. The first token of a document is not predicted but its bytes
            count, which matters only for short documents. None without byte counts.
    """

    derived = ("early_token_gap",)

    length: int
    sliding: Perplexity
    non_overlapping: Perplexity
    by_position: tuple[PositionLoss, ...]
    bits_per_byte: float | None

    @property
    def early_token_gap(self) -> float:
        """The loss in fresh windows minus the loss in sliding windows, in nats per token.

        This is the early-token curse (Press et al. 2021, appendix B). The gap shrinks as windows grow, so
        non-overlapping perplexity can fall even if the model does not use the longer context.
        """
        return self.non_overlapping.loss - self.sliding.loss


def measure_context(
    model: nn.Module,
    documents: Sequence[Tensor],
    *,
    lengths: Sequence[int],
    stride: int | None = None,
    byte_counts: Sequence[int] | None = None,
    batch_size: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> list[ContextMeasurement]:
    """Measure a model on whole documents, in one pass for each context length.

    Windows never cross documents. In a document of `N` tokens the sliding perplexity scores `N - 1` tokens, and the
    non-overlapping perplexity `N - ceil(N / length)`. A document of at most `length` tokens is one window for both.

    The first sliding window scores all of its tokens but the first, which nothing predicts. Each further window but the
    last starts `stride` tokens later and scores its last `stride` tokens, so these have a context of at least
    `length - stride` tokens. The last one has `length` tokens, ends with the document and scores the rest. Fresh
    windows score all tokens but the first of each.

    Args:
        model: a causal language model, patched or not; set to eval mode and back. Under FSDP pass the wrapped model
            and `distributed=True`, because all processes take part in every forward pass.
        documents: sequences `(N,)` int64; at least one has 2 tokens.
        lengths: context lengths, in tokens per window, all at least 2.
        stride: tokens from one sliding window to the next, less than all lengths. None means a quarter of the length,
            or half of it if a quarter is no integer. A stride that divides a length is faster, because windows are
            then sliding and fresh at once.
        byte_counts: number of bytes of each document's text, for bits per byte.
        batch_size: windows per forward pass. None means about 8192 tokens, 1024 on a CPU.
        distributed: divide the windows among the processes of `torch.distributed`. All processes get the same result,
            whatever their number.
        progress: show a progress bar, in windows.

    Returns:
        One measurement per length, in the order of `lengths`.

    Raises:
        ValueError: for a length, stride or number out of range, if all documents are too short to predict a token, or
            for `distributed` without a process group.
    """
    check_documents(documents)
    if byte_counts is not None and len(byte_counts) != len(documents):
        raise ValueError(f"there are {len(documents)} documents and {len(byte_counts)} byte counts")
    strides = [stride_of(length, stride) for length in lengths]
    measured = []
    with reading(model, max(documents, key=len), distributed=distributed, progress=progress) as reader:
        for length, step in zip(lengths, strides, strict=True):
            sliding, fresh, by_position = _measure(reader, documents, length, step, batch_size)
            bits = None if byte_counts is None else sliding.nll / math.log(2) / sum(byte_counts)
            perplexities = {"sliding": sliding, "non_overlapping": fresh}
            row = ContextMeasurement(length=length, **perplexities, by_position=by_position, bits_per_byte=bits)
            measured.append(row)
    return measured


def non_overlapping_perplexity(
    model: nn.Module, tokens: Tensor, *, length: int, batch_size: int | None = None, progress: bool = False
) -> Perplexity:
    """Return the non-overlapping perplexity of one text `(N,)` of at least `length` tokens, see `measure_context`."""
    stride_of(length, None)
    check_documents([tokens], length)
    with reading(model, tokens, progress=progress) as reader:
        return _measure(reader, [tokens], length, None, batch_size)[1]


def short_context_regression(
    before: Sequence[ContextMeasurement], after: Sequence[ContextMeasurement], *, trained_length: int
) -> dict[int, float]:
    """Compare a model with its base at lengths up to the base's trained length.

    Args:
        before: measurements of the base.
        after: measurements of the swapped model, on the same text.
        trained_length: length that the base was trained at, in tokens.

    Returns:
        Length up to `trained_length` -> change of the sliding-window loss, in nats per token. Positive means worse.
    """
    reference = {row.length: row.sliding.loss for row in before if row.length <= trained_length}
    return {row.length: row.sliding.loss - reference[row.length] for row in after if row.length in reference}


def check_documents(documents: Sequence[Tensor], least: int = 2) -> None:
    """Raise ValueError unless these are texts, and one of them has so many tokens."""
    if any(document.dim() != 1 for document in documents):
        raise ValueError(f"a text must have the shape (N,), not {[tuple(document.shape) for document in documents]}")
    if (longest := max(map(len, documents), default=0)) < least:
        raise ValueError(f"the longest text has {longest} tokens, fewer than {least}: there is nothing to predict")


def stride_of(length: int, stride: int | None) -> int:
    """Return the stride at a length, by default a quarter of it; ValueError if either is out of range."""
    if length < 2:
        raise ValueError(f"length must be at least 2, not {length}: a window of one token predicts nothing")
    if stride is None:
        stride = next(length // parts for parts in (4, 2, length) if length % parts == 0)
    if not 1 <= stride < length:
        raise ValueError(f"stride must lie between 1 and length - 1 = {length - 1}, not {stride}")
    return stride


@dataclass(frozen=True)
class _Window:
    """Tokens `start .. end - 1` of a document. The sliding perplexity scores the tokens `scored .. end - 1`.

    If `fresh`, the non-overlapping perplexity scores all tokens but the first.
    """

    document: int
    start: int
    end: int
    scored: int
    fresh: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Length of the window and number of scored predictions. A batch has windows of one shape."""
        first = self.start + 1 if self.fresh else self.scored
        return self.end - self.start, self.end - first


def _windows(documents: Sequence[Tensor], length: int, stride: int | None) -> list[_Window]:
    """Return the sliding windows (unless `stride` is None) and the fresh windows of all documents."""
    found = []
    for index, document in enumerate(documents):
        total = len(document)
        scored_from: dict[tuple[int, int], int] = {}  # sliding window -> its first scored token
        if stride is not None and total > 1:
            end = min(length, total)
            scored_from[0, end] = 1
            while end < total:
                scored, end = end, min(end + stride, total)
                scored_from[end - length, end] = scored
        new = {(start, min(start + length, total)): None for start in range(0, total - 1, length)}
        found += [_Window(index, *span, scored_from.get(span, span[1]), span in new) for span in scored_from | new]
    return found


def _measure(
    reader: Reader, documents: Sequence[Tensor], length: int, stride: int | None, batch_size: int | None
) -> tuple[Perplexity, Perplexity, tuple[PositionLoss, ...]]:
    """Return both perplexities at one length, and the losses by position in fresh windows."""
    windows = _windows(documents, length, stride)
    bins = list(pairwise([*(1 << power for power in range(max(1, math.ceil(math.log2(length))))), length]))
    row = (2, 1 + len(bins))

    def score(batch: list[int]) -> Tensor:
        """Return sums and numbers of losses, (B, 2, 1 + bins): of the sliding perplexity, then of fresh windows."""
        chosen = [windows[index] for index in batch]
        tokens = torch.stack([documents[window.document][window.start : window.end] for window in chosen])
        scores = torch.zeros(len(batch), *row, dtype=torch.float64)
        for (sums, counts), window, losses in zip(
            scores, chosen, reader.losses(tokens, chosen[0].shape[1]), strict=True
        ):
            parts = [losses[len(losses) - (window.end - window.scored) :]]
            parts += [
                losses[first - 1 : last - 1] for first, last in bins if window.fresh
            ]  # the first is of position 1
            for number, part in enumerate(parts):
                sums[number], counts[number] = part.sum(), len(part)
        return scores

    shapes = [window.shape for window in windows]
    sums, counts = reader.scores(shapes, score, row, "window", batch_size).unbind(1)
    nll, tokens = sums.contiguous().sum(0).tolist(), [int(count) for count in counts.sum(0).tolist()]

    def perplexity(method: str, step: int, number: int, part: slice) -> Perplexity:
        sizes = {"length": length, "stride": step, "windows": number, "tokens": sum(tokens[part])}
        return Perplexity(method=method, nll=sum(nll[part]), **sizes)

    by_position = tuple(
        PositionLoss(first=first, last=last, tokens=count, loss=total / count)
        for (first, last), total, count in zip(bins, nll[1:], tokens[1:], strict=True)
        if count
    )
    sliding = sum(window.scored < window.end for window in windows)
    return (
        perplexity("sliding", stride or length, sliding, slice(1)),
        perplexity("non_overlapping", length, sum(window.fresh for window in windows), slice(1, None)),
        by_position,
    )
