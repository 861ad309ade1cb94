"""What one pass over a text says about a context length: both perplexities, loss by position, bits per byte."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..live.eval_mode import evaluation
from .perplexity import Perplexity, default_batch_size, logits_function


@dataclass(frozen=True, kw_only=True)
class PositionLoss:
    """Loss of the tokens at some places of a fresh window, or of a segment.

    Attributes:
        first: place of the first of them, counted from 0; place 0 of a fresh window is never predicted.
        last: place of the last one plus one.
        tokens: how many there were in all windows.
        loss: their mean negative log-likelihood in nats.
    """

    first: int
    last: int
    tokens: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class ContextMeasurement:
    """What was measured at one context length.

    Attributes:
        length: tokens in a window.
        sliding: every token scored with nearly the full context.
        non_overlapping: windows cut fresh.
        by_position: loss by the token's place in a fresh window, in bins `[1, 2), [2, 4), [4, 8), ...`.
        bits_per_byte: of the text, from the sliding windows, `log2` likelihood over bytes of all documents; it compares
            models with different tokenizers. The first token of a document is not predicted, its bytes are counted:
            with long documents that is nothing. None if the bytes are not known.
    """

    length: int
    sliding: Perplexity
    non_overlapping: Perplexity
    by_position: tuple[PositionLoss, ...]
    bits_per_byte: float | None

    @property
    def early_token_gap(self) -> float:
        """Nats per token by which fresh windows are worse than sliding ones.

        This is the early-token curse (Press et al. 2021, appendix B): as a window grows, a gain in non-overlapping
        perplexity that only comes from a smaller gap says nothing about the use of a longer context.
        """
        return self.non_overlapping.loss - self.sliding.loss

    def to_dict(self) -> dict[str, Any]:
        """All numbers, the derived ones included, ready for JSON."""
        return {
            "length": self.length,
            "sliding": self.sliding.to_dict(),
            "non_overlapping": self.non_overlapping.to_dict(),
            "early_token_gap": self.early_token_gap,
            "by_position": [asdict(part) for part in self.by_position],
            "bits_per_byte": self.bits_per_byte,
        }


@dataclass(frozen=True)
class _Window:
    """Tokens `start .. end - 1` of a document; tokens `scored .. end - 1` count for the sliding perplexity."""

    document: int
    start: int
    end: int
    scored: int
    fresh: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Windows of one shape go into one batch: their length, and the number of predictions that are looked at."""
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
    """Measures a model on whole documents at several context lengths, in one pass for each.

    Windows never cross documents. Of a document of `N` tokens, `N - 1` count for the sliding perplexity (see
    `sliding_window_perplexity`) and `N - ceil(N / length)` for the non-overlapping one. A document that is no longer
    than `length` is one window, which counts for both.

    Args:
        model: a causal language model, patched or not; set to eval mode and back. Under FSDP the wrapped one, with
            `distributed`: every process takes part in every forward.
        documents: `(N,)` int64 each, at least 2 tokens in one of them.
        lengths: tokens in a window, at least 2 each.
        stride: tokens from one sliding window to the next; it must divide every length and be less. By default a
            quarter of each length, half of it where that is no whole number.
        byte_counts: bytes of each document's text, for bits per byte.
        batch_size: windows per forward; by default as many as make about 8192 tokens, 1024 on a CPU.
        distributed: spread the windows over the processes of `torch.distributed`. All of them get the same result, and
            it does not depend on their number.
        progress: show a progress bar, in windows.

    Returns:
        One measurement per length, in the order given.

    Raises:
        ValueError: a length, stride or number out of range, no document long enough to predict anything.
        RuntimeError: `distributed` without an initialised process group.
    """
    check_documents(documents, byte_counts, batch_size)
    if distributed and not dist.is_initialized():
        raise RuntimeError("distributed=True needs torch.distributed.init_process_group first")
    strides = [stride_of(length, stride) for length in lengths]
    total_bytes = sum(byte_counts) if byte_counts is not None else None
    with evaluation(model), torch.no_grad():
        trial = next(document for document in documents if len(document) > 1)
        return [
            _measure(model, documents, length, step, total_bytes, batch_size, distributed, progress, trial)
            for length, step in zip(lengths, strides, strict=True)
        ]


def short_context_regression(
    before: Sequence[ContextMeasurement], after: Sequence[ContextMeasurement], *, trained_length: int
) -> dict[int, float]:
    """Compares a model with its base at the lengths that the base was trained for.

    Args:
        before: measurements of the base.
        after: of the model made from it, on the same text.
        trained_length: tokens the base was trained at.

    Returns:
        By length, up to `trained_length`: nats per token of sliding-window loss that were lost (negative: won).
    """
    reference = {row.length: row.sliding.loss for row in before if row.length <= trained_length}
    return {row.length: row.sliding.loss - reference[row.length] for row in after if row.length in reference}


def check_documents(documents: Sequence[Tensor], byte_counts: Sequence[int] | None, batch_size: int | None) -> None:
    """Refuse what cannot be measured; ValueError."""
    if byte_counts is not None and len(byte_counts) != len(documents):
        raise ValueError(f"there are {len(documents)} documents and {len(byte_counts)} byte counts")
    if any(document.dim() != 1 for document in documents):
        raise ValueError("documents must be sequences of shape (N,)")
    if not any(len(document) > 1 for document in documents):
        raise ValueError("no document has two tokens: there is nothing to predict")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")


def position_edges(length: int) -> list[int]:
    """Return where bins of places begin and end: `[1, 2, 4, ..., length]`."""
    return [1 << power for power in range(max(1, math.ceil(math.log2(length))))] + [length]


def stride_of(length: int, stride: int | None) -> int:
    """Return the stride at a length, chosen if None; ValueError if it does not fit."""
    if length < 2:
        raise ValueError(f"length must be at least 2, not {length}: a window of one token predicts nothing")
    if stride is None:
        stride = next(length // parts for parts in (4, 2, length) if length % parts == 0)
    if not 1 <= stride < length or length % stride:
        raise ValueError(f"stride must divide the length {length} and be less, not {stride}")
    return stride


def _windows(documents: Sequence[Tensor], length: int, stride: int) -> list[_Window]:
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


def _measure(
    model: nn.Module,
    documents: Sequence[Tensor],
    length: int,
    stride: int,
    total_bytes: int | None,
    batch_size: int | None,
    distributed: bool,
    progress: bool,
    trial: Tensor,
) -> ContextMeasurement:
    device = next(model.parameters()).device
    windows = _windows(documents, length, stride)
    batches: list[list[int]] = []
    for index in sorted(range(len(windows)), key=lambda index: windows[index].shape):  # stable
        size = batch_size or default_batch_size(device, windows[index].shape[0])
        if batches and len(batches[-1]) < size and windows[batches[-1][0]].shape == windows[index].shape:
            batches[-1].append(index)
        else:
            batches.append([index])
    edges = position_edges(length)
    # Of each window: sums over what counts for the sliding perplexity, and over each bin of places if it is fresh.
    sums = torch.zeros(len(windows), len(edges), dtype=torch.float64)
    counts = torch.zeros(len(windows), len(edges), dtype=torch.float64)
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    logits_of = logits_function(model, trial)
    with tqdm(total=len(windows), desc=f"context {length}", unit="window", leave=False, disable=not progress) as bar:
        # Every process makes as many forwards as the others, also where it has nothing left: FSDP needs all of them.
        for number in range(math.ceil(len(batches) / world)):
            mine = number * world + rank
            batch = batches[mine] if mine < len(batches) else batches[0]
            losses = _losses(logits_of, [windows[index] for index in batch], documents, device)
            if mine < len(batches):
                for index, row in zip(batch, losses, strict=True):
                    _count(windows[index], row, edges, sums[index], counts[index])
            bar.update(len(batch) * world)
    if distributed:
        # Each window was counted by one process and is zero elsewhere: the sum is exact, in whatever order.
        for part in (sums, counts):
            moved = part.to(device)
            dist.all_reduce(moved)
            part.copy_(moved)
    nll, tokens = sums.sum(0).tolist(), [int(value) for value in counts.sum(0).tolist()]
    sliding = Perplexity(
        method="sliding",
        length=length,
        stride=stride,
        windows=sum(window.scored < window.end for window in windows),
        tokens=tokens[0],
        nll=nll[0],
    )
    fresh = Perplexity(
        method="non_overlapping",
        length=length,
        stride=length,
        windows=sum(window.fresh for window in windows),
        tokens=sum(tokens[1:]),
        nll=sum(nll[1:]),
    )
    return ContextMeasurement(
        length=length,
        sliding=sliding,
        non_overlapping=fresh,
        by_position=tuple(
            PositionLoss(first=first, last=last, tokens=number, loss=total / number)
            for (first, last), number, total in zip(pairwise(edges), tokens[1:], nll[1:], strict=True)
            if number
        ),
        bits_per_byte=sliding.nll / math.log(2) / total_bytes if total_bytes else None,
    )


def _losses(logits_of: Any, batch: list[_Window], documents: Sequence[Tensor], device: torch.device) -> Tensor:
    """Losses `(B, R)` of the last `R` tokens of each window, in float64 on the CPU."""
    size, looked_at = batch[0].shape
    tokens = torch.stack([documents[window.document][window.start : window.end] for window in batch]).to(device)
    targets = tokens[:, size - looked_at :].reshape(-1)
    parts, done = [], 0
    # Token t is predicted by the output at t - 1.
    for logits in logits_of(tokens, slice(size - looked_at - 1, size - 1)):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts.append(F.cross_entropy(wide, targets[done : done + len(wide)], reduction="none"))
        done += len(wide)
    return torch.cat(parts).view(len(batch), looked_at).double().cpu()


def _count(window: _Window, losses: Tensor, edges: list[int], sums: Tensor, counts: Tensor) -> None:
    """Adds one window's losses up: first what counts for the sliding perplexity, then bin by bin."""
    scored = window.end - window.scored
    sums[0], counts[0] = losses[len(losses) - scored :].sum(), scored
    if window.fresh:
        for number, (first, last) in enumerate(pairwise(edges), start=1):
            part = losses[first - 1 : last - 1]  # the loss of place 1 is the first
            sums[number], counts[number] = part.sum(), len(part)
