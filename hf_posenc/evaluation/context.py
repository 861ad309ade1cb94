"""Measure both perplexities, loss by position and bits per byte of a text, in one pass for each context length."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..measurement import Result
from .batches import Reader, progress_bar, reading
from .perplexity import Perplexity


@dataclass(frozen=True, kw_only=True)
class PositionLoss(Result):
    """Mean loss in one bin of positions in a fresh window, or in a segment.

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

    Windows never cross documents. In a document of `N` tokens the sliding perplexity scores `N - 1` tokens (see
    `sliding_window_perplexity`), and the non-overlapping perplexity `N - ceil(N / length)`. A document of at most
    `length` tokens is one window for both.

    Args:
        model: a causal language model, patched or not; set to eval mode and back. Under FSDP pass the wrapped model
            and `distributed=True`, because all processes take part in every forward pass.
        documents: sequences `(N,)` int64; at least one has 2 tokens.
        lengths: context lengths, in tokens per window, all at least 2.
        stride: tokens from one sliding window to the next. It must divide all lengths and be smaller. None means a
            quarter of the length, or half of it if a quarter is no integer.
        byte_counts: number of bytes of each document's text, for bits per byte.
        batch_size: windows per forward pass. None means about 8192 tokens, 1024 on a CPU.
        distributed: divide the windows among the processes of `torch.distributed`. All processes get the same result,
            whatever their number.
        progress: show a progress bar, in windows.

    Returns:
        One measurement per length, in the order of `lengths`.

    Raises:
        ValueError: for a length, stride or number out of range, or if all documents are too short to predict a token.
        RuntimeError: for `distributed` without an initialised process group.
    """
    check_documents(documents, byte_counts)
    strides = [stride_of(length, stride) for length in lengths]
    measured = []
    trial = next(document for document in documents if len(document) > 1)
    with reading(model, trial, distributed=distributed) as reader:
        for length, step in zip(lengths, strides, strict=True):
            windows, edges = _windows(documents, length, step), position_edges(length)
            order = sorted(range(len(windows)), key=lambda index: windows[index].shape)
            groups = reader.batches([windows[index].shape for index in order], lambda shape: shape[0], batch_size)
            batches = [[order[place] for place in group] for group in groups]
            score = partial(_score_batch, reader, documents, windows, edges)
            with progress_bar(len(windows), f"context {length}", "window", progress) as bar:
                scores = reader.scores(batches, score, (2, len(edges)), bar)
            measured.append(_measurement(length, step, windows, edges, scores, byte_counts))
    return measured


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


def effective_length(
    values: Mapping[int, float], *, at_most: float | None = None, at_least: float | None = None
) -> int | None:
    """Return the longest length up to which a measured value stays within a limit.

    Lengths are read from the shortest to the longest. The result is the last one that passes before the first that
    fails; lengths that fail before any passes, for want of context, do not count. Where a value only gets worse with
    length this is RULER's rule, the longest length that passes (Hsieh et al. 2024, arXiv:2404.06654, section 4). RULER
    has one limit of accuracy for all models, 85.6 %. NoLiMa takes 85 % of a model's own accuracy at short lengths. For
    a loss, take that of the unpatched base at its trained length and add a margin, for instance 0.05 nats.

    Args:
        values: length in tokens -> loss or accuracy.
        at_most: largest value that passes, for losses.
        at_least: least value that passes, for accuracies.

    Returns:
        A length of `values`; None if no length passes. NaN does not pass.

    Raises:
        ValueError: unless one of `at_most` and `at_least` is given.
    """
    if (at_most is None) == (at_least is None):
        raise ValueError("give one limit: at_most for losses, at_least for accuracies")
    found = None
    for length in sorted(values):
        passes = values[length] <= at_most if at_most is not None else values[length] >= (at_least or 0)
        if found is not None and not passes:
            break
        found = length if passes else found
    return found


def check_documents(documents: Sequence[Tensor], byte_counts: Sequence[int] | None) -> None:
    """Raise ValueError for documents or byte counts that cannot be measured."""
    if byte_counts is not None and len(byte_counts) != len(documents):
        raise ValueError(f"there are {len(documents)} documents and {len(byte_counts)} byte counts")
    if any(document.dim() != 1 for document in documents):
        raise ValueError("documents must be sequences of shape (N,)")
    if not any(len(document) > 1 for document in documents):
        raise ValueError("no document has two tokens: there is nothing to predict")


def position_edges(length: int) -> list[int]:
    """Return the edges of the bins of positions: `[1, 2, 4, ..., length]`."""
    return [1 << power for power in range(max(1, math.ceil(math.log2(length))))] + [length]


def losses_by_position(edges: list[int], nll: Sequence[float], tokens: Sequence[float]) -> tuple[PositionLoss, ...]:
    """Return the mean losses of the bins, without empty bins.

    Args:
        edges: edges of the bins.
        nll: sum of the losses in each bin.
        tokens: number of tokens in each bin.
    """
    return tuple(
        PositionLoss(first=first, last=last, tokens=int(count), loss=total / count)
        for (first, last), total, count in zip(pairwise(edges), nll, tokens, strict=True)
        if count
    )


def stride_of(length: int, stride: int | None) -> int:
    """Return the stride at a length, by default a quarter of it; ValueError if the stride does not fit."""
    if length < 2:
        raise ValueError(f"length must be at least 2, not {length}: a window of one token predicts nothing")
    if stride is None:
        stride = next(length // parts for parts in (4, 2, length) if length % parts == 0)
    if not 1 <= stride < length or length % stride:
        raise ValueError(f"stride must divide the length {length} and be less, not {stride}")
    return stride


def _windows(documents: Sequence[Tensor], length: int, stride: int) -> list[_Window]:
    """Return the sliding and the fresh windows of all documents. A window can be both."""
    found = []
    for index, document in enumerate(documents):
        total = len(document)
        if total < 2:
            continue
        if total <= length:
            found.append(_Window(index, 0, total, 1, True))
            continue
        for start in range(0, total - length + 1, stride):
            end = start + length
            found.append(_Window(index, start, end, end - stride if start else 1, start % length == 0))
        if end < total:  # the last sliding window reaches back a full length
            found.append(_Window(index, total - length, total, end, False))
        if total % length > 1:  # the last fresh window is short; it scores nothing for the sliding perplexity
            found.append(_Window(index, total - total % length, total, total, True))
    return found


def _score_batch(
    reader: Reader, documents: Sequence[Tensor], windows: list[_Window], edges: list[int], batch: list[int]
) -> Tensor:
    """Return sums and numbers of losses in the windows of a batch, (B, 2, 1 + bins) float64 on the CPU.

    The first column is for the sliding perplexity, the others for the bins of positions. The bins are zero unless the
    window is fresh.
    """
    chosen = [windows[index] for index in batch]
    _, predicted = chosen[0].shape
    tokens = torch.stack([documents[window.document][window.start : window.end] for window in chosen])
    losses = torch.cat(list(reader.losses(tokens, predicted)))
    scores = torch.zeros(len(batch), 2, len(edges), dtype=torch.float64)
    for (sums, counts), window, row in zip(scores, chosen, losses.view(len(batch), -1).double().cpu(), strict=True):
        scored = window.end - window.scored
        sums[0], counts[0] = row[len(row) - scored :].sum(), scored
        if window.fresh:
            for number, (first, last) in enumerate(pairwise(edges), start=1):
                part = row[first - 1 : last - 1]  # the first loss is that of position 1
                sums[number], counts[number] = part.sum(), len(part)
    return scores


def _measurement(
    length: int,
    stride: int,
    windows: list[_Window],
    edges: list[int],
    scores: Tensor,
    byte_counts: Sequence[int] | None,
) -> ContextMeasurement:
    """Return the measurement from the scores (windows, 2, 1 + bins)."""
    sums, counts = scores.unbind(1)
    nll, tokens = sums.contiguous().sum(0).tolist(), [int(count) for count in counts.sum(0).tolist()]

    def perplexity(method: str, step: int, count: int, part: slice) -> Perplexity:
        sizes = {"length": length, "stride": step, "windows": count, "tokens": sum(tokens[part])}
        return Perplexity(method=method, nll=sum(nll[part]), **sizes)

    sliding = perplexity("sliding", stride, sum(window.scored < window.end for window in windows), slice(1))
    fresh = perplexity("non_overlapping", length, sum(window.fresh for window in windows), slice(1, None))
    return ContextMeasurement(
        length=length,
        sliding=sliding,
        non_overlapping=fresh,
        by_position=losses_by_position(edges, nll[1:], tokens[1:]),
        bits_per_byte=sliding.bits_per_byte(byte_counts),
    )
