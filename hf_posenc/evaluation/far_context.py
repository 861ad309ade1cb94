"""Does a model use text far back? Repeat gain, and LongPPL: perplexity of the tokens that need a long context."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..measurement import Result
from .batches import Reader, progress_bar, reading

BLIND_SHARE = 0.01
"""Least share of key tokens. With a smaller share, LongPPL says little about a model."""


@dataclass(frozen=True, kw_only=True)
class RepeatGain(Result):
    """Losses of passages that occur twice in a text, in nats per token, means over the trials.

    Attributes:
        distance: tokens from the start of the first copy to the start of the second one.
        passage: tokens in a passage. The first one is not scored, because the token before it differs.
        trials: number of passages.
        first: loss of the first copy.
        second: loss of the second copy.
        unseen: loss at the second copy's place if the text has other words in place of the first copy.
        gain_error: standard error of `gain`.
        gain_in_place_error: standard error of `gain_in_place`.
    """

    derived = ("gain", "gain_in_place")

    distance: int
    passage: int
    trials: int
    first: float
    second: float
    unseen: float
    gain_error: float
    gain_in_place_error: float

    @property
    def gain(self) -> float:
        """The loss of the first copy minus that of the second, in nats per token.

        The second copy has more context, and may stand at positions beyond the trained length. Both count.
        """
        return self.first - self.second

    @property
    def gain_in_place(self) -> float:
        """The loss at the second place without a first copy minus that with one, in nats per token.

        Place and length are the same, so this is what the model recovers from the first copy alone.
        """
        return self.unseen - self.second


def repeat_gain(
    model: nn.Module,
    tokens: Tensor,
    *,
    distances: Sequence[int],
    passage: int = 64,
    lead: int = 64,
    trials: int = 32,
    seed: int = 0,
    batch_size: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> list[RepeatGain]:
    """Put passages of a held-out text twice, at several distances, and compare the losses of both copies.

    A context is `lead + distance` tokens of the text as it stands, and then the passage that begins after `lead` tokens
    again. It needs no task and no training: a model that copies words, but not random tokens, shows a gain. A model
    that ignores its context has a gain of 0. The same passages are used at all distances.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokens: `(N,)` int64, text that the model was not trained on.
        distances: tokens from the start of the first copy to that of the second, at least `passage`.
        passage: tokens in a passage, at least 2.
        lead: tokens of text before the first copy, at least 0. Without them the first copy has a larger loss for want
            of context.
        trials: number of passages, at least 2.
        seed: seed of the places of the passages.
        batch_size: trials per forward pass, of two contexts each. None means about 8192 tokens, 1024 on a CPU.
        distributed: divide the trials among the processes of `torch.distributed`. All processes get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One measurement per distance, in the order of `distances`.

    Raises:
        ValueError: for a number out of range, or a text too short for the trials at the longest distance.
        RuntimeError: for `distributed` without an initialised process group.
    """
    for name, value, least in (("passage", passage, 2), ("lead", lead, 0), ("trials", trials, 2)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if not distances or min(distances) < passage:
        raise ValueError(f"distances must be at least the passage, {passage} tokens, not {list(distances)}")
    needed = lead + max(distances) + passage + trials - 1
    if tokens.dim() != 1 or len(tokens) < needed:
        raise ValueError(f"tokens must be a text of at least {needed} tokens for these trials, not {[*tokens.shape]}")
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(tokens) - needed + trials, generator=generator)[:trials] + lead
    jobs = [(distance, place) for distance in distances for place in places.tolist()]

    def score(batch: list[int]) -> Tensor:
        return _passage_losses(reader, tokens, [jobs[index] for index in batch], passage, lead)

    bar = progress_bar(len(jobs), "repeat gain", "trial", progress)
    with reading(model, tokens, distributed=distributed) as reader, bar:
        batches = reader.batches([job[0] for job in jobs], lambda distance: 2 * (lead + distance + passage), batch_size)
        parts = reader.scores(batches, score, (3,), bar).split(trials)
    return [_gain(distance, passage, losses) for distance, losses in zip(distances, parts, strict=True)]


def _passage_losses(reader: Reader, tokens: Tensor, jobs: list[tuple[int, int]], passage: int, lead: int) -> Tensor:
    """Return the mean losses of the first copy, the second, and without a first one, (B, 3) float64 on the CPU."""
    distance = jobs[0][0]  # the same in a batch
    contexts = torch.stack(
        [torch.cat([tokens[place - lead : place + distance], tokens[place : place + passage]]) for _, place in jobs]
    )
    without = contexts.clone()
    after = [tokens[place + distance : place + distance + passage] for _, place in jobs]
    without[:, lead : lead + passage] = torch.stack(after)
    scored = distance + passage - 1  # all but the first token of the first copy
    twice, once = _losses(reader, torch.cat([contexts, without]), scored).view(2, len(jobs), scored)
    columns = (twice[:, : passage - 1], twice[:, distance:], once[:, distance:])
    return torch.stack([column.mean(1) for column in columns], dim=1)


def _gain(distance: int, passage: int, losses: Tensor) -> RepeatGain:
    """Return the measurement at a distance from the losses (trials, 3)."""
    first, second, unseen = losses.unbind(1)
    root = math.sqrt(len(losses))
    return RepeatGain(
        distance=distance,
        passage=passage,
        trials=len(losses),
        first=first.mean().item(),
        second=second.mean().item(),
        unseen=unseen.mean().item(),
        gain_error=(first - second).std().item() / root,
        gain_in_place_error=(unseen - second).std().item() / root,
    )


@dataclass(frozen=True, kw_only=True)
class LongPerplexity(Result):
    """Perplexity of the tokens that need a long context, and how many these are.

    Attributes:
        length: tokens in a window of the model.
        tokens: number of tokens that were judged.
        key_tokens: number of key tokens among them.
        nll: sum of the negative log-likelihoods of all judged tokens, in nats.
        key_nll: the same sum over the key tokens.
    """

    derived = ("key_share", "blind", "loss", "key_loss", "perplexity")

    length: int
    tokens: int
    key_tokens: int
    nll: float
    key_nll: float

    @property
    def key_share(self) -> float:
        """Share of key tokens among the judged tokens."""
        return self.key_tokens / self.tokens

    @property
    def blind(self) -> bool:
        """Whether key tokens are less than 1 % of the judged ones, so that the number says little about the model."""
        return self.key_share < BLIND_SHARE

    @property
    def loss(self) -> float:
        """Mean loss of all judged tokens, in nats."""
        return self.nll / self.tokens

    @property
    def key_loss(self) -> float | None:
        """Mean loss of the key tokens, in nats; None if there are none."""
        return self.key_nll / self.key_tokens if self.key_tokens else None

    @property
    def perplexity(self) -> float | None:
        """LongPPL, `exp(key_loss)`; None without key tokens, and infinite if it overflows a float."""
        loss = self.key_loss
        return loss if loss is None else math.inf if loss >= 709 else math.exp(loss)


def long_perplexity(
    model: nn.Module,
    judge: nn.Module,
    tokens: Tensor,
    *,
    judge_length: int,
    lengths: Sequence[int] | None = None,
    short: int | None = None,
    alpha: float = 2.0,
    beta: float = -2.0,
    batch_size: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> list[LongPerplexity]:
    """Measure LongPPL: the perplexity of key tokens, those that a judge predicts only with a long context.

    A token is a key token if `log P(token | long) - log P(token | short) > alpha` and `log P(token | long) > beta`. The
    judge reads the text in windows of `judge_length` tokens (long), and in truncated contexts of `short` tokens and a
    few more, as in the authors' code (see `truncated_contexts`). A window judges the tokens for which something is cut
    off, and the next window goes on where they end. The text's last tokens are left out if they fill no window.
    The model then predicts the judged tokens. Its windows end where the judge's end and can begin earlier.
    Source: Fang et al. 2024, arXiv:2410.23771, section 3; there the whole text is the window, and `short` is 4096.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        judge: model that chooses the key tokens, with the same tokenizer: the unpatched base, or the model itself.
        tokens: `(N,)` int64.
        judge_length: tokens in a window of the judge. Take its trained length.
        lengths: tokens in a window of the model, at least `judge_length`. None means `judge_length`. The same tokens
            are scored at all lengths.
        short: least number of tokens in a truncated context. None means an eighth of `judge_length`.
        alpha: least gain from the long context, in nats, exclusive.
        beta: least log-probability with the long context, in nats, exclusive.
        batch_size: windows per forward pass. None means about 8192 tokens, 1024 on a CPU.
        distributed: divide the windows among the processes of `torch.distributed`. All processes get the same result.
        progress: show a progress bar, in windows.

    Returns:
        One measurement per length, in the order of `lengths`. Read `key_share` with each: if it is `blind`, the text or
        the judge has too few tokens that need a long context.

    Raises:
        ValueError: for a length out of range, or a text shorter than the longest window.
        RuntimeError: for `distributed` without an initialised process group.
    """
    lengths = [judge_length] if lengths is None else lengths
    short = max(1, judge_length // 8) if short is None else short
    first = short + truncation_stride(short)
    if short < 1 or judge_length <= first:
        raise ValueError(f"short must be at least 1, and leave tokens of judge_length {judge_length}, not {short}")
    if not lengths or min(lengths) < judge_length:
        raise ValueError(f"lengths must be at least judge_length, {judge_length}, not {list(lengths)}")
    if tokens.dim() != 1 or len(tokens) < max(lengths):
        raise ValueError(f"tokens must be a text of at least {max(lengths)} tokens, not {[*tokens.shape]}")
    judged = judge_length - first
    text = _Windows(tokens, range(max(lengths), len(tokens) + 1, judged), judged, batch_size, progress)
    with reading(judge, tokens, distributed=distributed) as reader:
        keys = text.read(reader, judge_length, lambda windows: _key_tokens(reader, windows, short, alpha, beta))
    measured = []
    with reading(model, tokens, distributed=distributed) as reader:
        for length in lengths:
            losses = text.read(reader, length, lambda windows: _losses(reader, windows, judged))
            sums = {"nll": losses.sum().item(), "key_nll": (losses * keys).sum().item()}
            measured.append(LongPerplexity(length=length, tokens=keys.numel(), key_tokens=int(keys.sum()), **sums))
    return measured


@dataclass(frozen=True)
class _Windows:
    """Windows of a text, whose last tokens are judged.

    Attributes:
        tokens: the text, (N,).
        ends: where a window ends.
        judged: number of judged tokens at the end of each window.
        batch_size: windows per forward pass.
        progress: show a progress bar.
    """

    tokens: Tensor
    ends: range
    judged: int
    batch_size: int | None
    progress: bool

    def read(self, reader: Reader, length: int, score: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the scores of the judged tokens of windows of `length` tokens, (windows, judged) float64 on the CPU.

        Args:
            reader: the model that is read.
            length: tokens in a window.
            score: windows (B, length) -> scores (B, judged).
        """
        batches = reader.batches([length] * len(self.ends), lambda size: size, self.batch_size)

        def score_batch(batch: list[int]) -> Tensor:
            return score(torch.stack([self.tokens[self.ends[index] - length : self.ends[index]] for index in batch]))

        with progress_bar(len(self.ends), f"key tokens {length}", "window", self.progress) as bar:
            return reader.scores(batches, score_batch, (self.judged,), bar)


def _losses(reader: Reader, windows: Tensor, scored: int) -> Tensor:
    """Return the losses of the last `scored` tokens of windows (B, T), (B, scored) float64 on the CPU."""
    return torch.cat(list(reader.losses(windows, scored))).double().cpu().view(len(windows), scored)


def _key_tokens(reader: Reader, windows: Tensor, short: int, alpha: float, beta: float) -> Tensor:
    """Return 1 for key tokens and 0 for others, of the judged tokens of windows (B, T): (B, judged) float64, CPU."""
    length = windows.shape[1]
    whole = _losses(reader, windows, length - short - truncation_stride(short))
    parts = [
        _losses(reader, windows[:, start:end], end - start - short) for start, end in truncated_contexts(length, short)
    ]
    return ((torch.cat(parts, dim=1) - whole > alpha) & (-whole > beta)).double()


def truncation_stride(context: int) -> int:
    """Return the number of tokens between the beginnings of two truncated contexts of at least `context` tokens."""
    return max(1, context // 4)


def truncated_contexts(length: int, context: int) -> list[tuple[int, int]]:
    """Return `(start, end)` of each truncated context in a window of `length` tokens.

    A truncated context begins every `context / 4` tokens, but not at 0, where nothing is cut off. It predicts the
    tokens `start + context .. end - 1`, which follow those of the one before it, up to the end of the window.
    Source: the code of Fang et al. 2024, arXiv:2410.23771; there `context` is 4096, and a new one begins every 1024.

    Args:
        length: tokens in a window.
        context: least number of tokens before a predicted one, at least 1.
    """
    stride = truncation_stride(context)
    return [(start, min(start + context + stride, length)) for start in range(stride, length - context, stride)]
