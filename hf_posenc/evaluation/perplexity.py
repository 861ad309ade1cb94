"""Perplexity of a causal language model at one context length, measured in two ways.

If a text is cut into fresh windows, the first tokens of every window have almost no context. Longer windows have fewer
such tokens, so perplexity falls even if the model does not use the longer context. This is the *early token curse*
(Press, Smith and Lewis 2021, "Train Short, Test Long", appendix B). A sliding window scores every token with nearly the
full context and has no such gain. Always read both, at the same lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..measurement import Result
from .batches import progress_bar, reading


@dataclass(frozen=True, kw_only=True)
class Perplexity(Result):
    """Perplexity of a text, and the numbers it was computed from.

    Attributes:
        method: `"sliding"`, `"non_overlapping"` or `"segment_recurrence"`.
        length: tokens in a window. With segment recurrence, the largest number of tokens that a token sees in one
            layer, itself included.
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

    def bits_per_byte(self, byte_counts: Sequence[int] | None) -> float | None:
        """Return bits per byte, given the number of bytes of each text; None if it is not given."""
        return self.nll / math.log(2) / sum(byte_counts) if byte_counts is not None else None

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(loss)`; infinite if that overflows a float."""
        return math.inf if self.loss >= 709 else math.exp(self.loss)


def sliding_window_perplexity(
    model: nn.Module, tokens: Tensor, *, length: int, stride: int, batch_size: int | None = None, progress: bool = False
) -> Perplexity:
    """Score all tokens except the first once, with nearly the full context.

    After the first window, every token has a context of at least `length - stride` tokens. The first window covers the
    tokens `0 .. length - 1` and scores all of them except token 0, which nothing predicts. Each further window but the
    last starts `stride` tokens later and scores its last `stride` tokens. The last one has `length` tokens, ends with
    the text and scores the rest. So `N - 1` tokens are scored whatever the length and stride.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokens: `(N,)` int64, `N >= length`, on any device.
        length: tokens in a window, at least 2.
        stride: tokens from one window to the next, `1 .. length - 1`. A smaller stride gives more context but takes
            longer: the model computes the text about `length / stride` times.
        batch_size: windows per forward pass. None means about 8192 tokens, 1024 on a CPU.
        progress: show a progress bar, in scored tokens.

    Raises:
        ValueError: for a length or stride out of range, or a text shorter than `length`.
    """
    total = _check_tokens(tokens, length)
    if not 1 <= stride < length:
        raise ValueError(f"stride must lie between 1 and length - 1 = {length - 1}, not {stride}")
    spans = [(0, 1, length)]  # see `_score`
    while (scored := spans[-1][2]) < total:
        end = min(scored + stride, total)
        spans.append((end - length, scored, end))
    return _score(model, tokens, spans, length, stride, "sliding", batch_size, progress)


def non_overlapping_perplexity(
    model: nn.Module, tokens: Tensor, *, length: int, batch_size: int | None = None, progress: bool = False
) -> Perplexity:
    """Cut the text into fresh windows of `length` tokens, and score all tokens except the first of each window.

    The last window can be shorter, and is left out if it has a single token. `N - ceil(N / length)` tokens are scored.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokens: `(N,)` int64, `N >= length`, on any device.
        length: tokens in a window, at least 2.
        batch_size: windows per forward pass. None means about 8192 tokens, 1024 on a CPU.
        progress: show a progress bar, in scored tokens.

    Raises:
        ValueError: for a length out of range, or a text shorter than `length`.
    """
    total = _check_tokens(tokens, length)
    spans = [(start, start + 1, min(start + length, total)) for start in range(0, total - 1, length)]
    return _score(model, tokens, spans, length, length, "non_overlapping", batch_size, progress)


def _check_tokens(tokens: Tensor, length: int) -> int:
    """Return the number of tokens; ValueError for a wrong shape, a length under 2, or fewer than `length` tokens."""
    if tokens.dim() != 1:
        raise ValueError(f"tokens must be one sequence of shape (N,), not {tuple(tokens.shape)}")
    if length < 2:
        raise ValueError(f"length must be at least 2, not {length}: a window of one token predicts nothing")
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than the {length} of one window")
    return len(tokens)


def _score(
    model: nn.Module,
    tokens: Tensor,
    spans: list[tuple[int, int, int]],
    length: int,
    stride: int,
    method: str,
    batch_size: int | None,
    progress: bool,
) -> Perplexity:
    """Return the perplexity of windows. A span is the window's start, its first scored token, and its end."""
    nll, total = 0.0, sum(end - first for _, first, end in spans)
    shapes = [(first - start, end - start) for start, first, end in spans]
    bar = progress_bar(total, f"{method.replace('_', '-')} {length}", "tok", progress)
    with reading(model, tokens) as reader, bar:
        for batch in reader.batches(shapes, lambda _: length, batch_size):
            # All windows of a batch have the same length and score the same number of tokens.
            _, first, end = spans[batch[0]]
            windows = torch.stack([tokens[start:end] for start, _, end in (spans[index] for index in batch)])
            for losses in reader.losses(windows, end - first):
                nll += losses.sum(dtype=torch.float64).item()
            bar.update(len(batch) * (end - first))
    return Perplexity(method=method, length=length, stride=stride, windows=len(spans), tokens=total, nll=nll)
