"""Perplexity of a causal language model at a given context length, counted two ways.

Cutting a text into fresh windows makes every window start with tokens that have next to no context. A longer window has
fewer of them, so its perplexity falls even when the model uses nothing of the longer context: the *early token curse*
(Press, Smith and Lewis 2021, "Train Short, Test Long", appendix B). A sliding window scores every token with nearly the
full context and has no such gain. Always look at both, at the same lengths.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import Cache

from ..live.eval_mode import evaluation

# Windows are scored in batches of about this many tokens. A CPU gains nothing from more, and its caches lose.
TOKENS_PER_BATCH = 8192
TOKENS_PER_CPU_BATCH = 1024
# Logits exist for this many tokens at a time: with a vocabulary of 128k, half a gigabyte in float32.
LOGIT_ROWS = 1024
# Tokens of the trial that decides whether the language-model head may be applied on its own.
TRIAL_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """What one measurement counted.

    Attributes:
        method: `"sliding"`, `"non_overlapping"` or `"segment_recurrence"`.
        length: tokens in a window, the most context a token can have plus one; with segment recurrence, the most that a
            token sees in one layer, itself included.
        stride: tokens from one window to the next; equal to `length` for non-overlapping windows.
        windows: number of windows scored.
        tokens: number of tokens scored, each exactly once.
        nll: sum of their negative log-likelihoods, in nats.
    """

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
        """`exp(loss)`; infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """All numbers, the derived ones included, ready for JSON."""
        return {**asdict(self), "loss": self.loss, "perplexity": self.perplexity}


def sliding_window_perplexity(
    model: nn.Module,
    tokens: Tensor,
    *,
    length: int,
    stride: int,
    batch_size: int | None = None,
    progress: bool = False,
) -> Perplexity:
    """Scores every token but the first, each once and with nearly the full context.

    That is at least `length - stride` tokens, where the text has as many before it. The first window covers tokens `0
    .. length - 1` and scores all of them but token 0, which nothing predicts. Each further window starts `stride`
    tokens later and scores its last `stride` tokens. The last one ends with the text and reaches back a full `length`,
    scoring only what is left. So `tokens - 1` tokens are scored whatever the length and stride.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokens: `(N,)` int64, `N >= length`, on any device.
        length: tokens in a window, at least 2.
        stride: tokens from one window to the next, `1 .. length - 1`: a stride of `length` would score the first token
            of a window from nothing. Smaller strides give more context and cost `length / stride` times the text.
        batch_size: windows per forward; by default as many as make about 8192 tokens, 1024 on a CPU.
        progress: show a progress bar, in tokens scored.

    Raises:
        ValueError: a length or stride out of range, or a text shorter than `length`.
    """
    total = _check(tokens, length)
    if not 1 <= stride < length:
        raise ValueError(f"stride must lie between 1 and length - 1 = {length - 1}, not {stride}")
    spans = [(0, 1, length)]  # (start of the window, first and last + 1 scored token, counted from the text's start)
    while (scored := spans[-1][2]) < total:
        end = min(scored + stride, total)
        spans.append((end - length, scored, end))
    return _score(model, tokens, spans, length, stride, "sliding", batch_size, progress)


def non_overlapping_perplexity(
    model: nn.Module,
    tokens: Tensor,
    *,
    length: int,
    batch_size: int | None = None,
    progress: bool = False,
) -> Perplexity:
    """Cuts the text into fresh windows of `length` tokens and scores all but the first token of each.

    The last window may be shorter; one of a single token scores nothing and is left out. So `N - ceil(N / length)`
    tokens are scored.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokens: `(N,)` int64, `N >= length`, on any device.
        length: tokens in a window, at least 2.
        batch_size: windows per forward; by default as many as make about 8192 tokens, 1024 on a CPU.
        progress: show a progress bar, in tokens scored.

    Raises:
        ValueError: a length out of range, or a text shorter than `length`.
    """
    total = _check(tokens, length)
    spans = [(start, start + 1, min(start + length, total)) for start in range(0, total - 1, length)]
    return _score(model, tokens, spans, length, length, "non_overlapping", batch_size, progress)


def _check(tokens: Tensor, length: int) -> int:
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
    device = next(model.parameters()).device
    if batch_size is None:
        batch_size = default_batch_size(device, length)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    nll, count = 0.0, 0
    with (
        evaluation(model),
        torch.no_grad(),
        tqdm(
            total=sum(end - first for _, first, end in spans),
            desc=f"{method.replace('_', '-')} {length}",
            unit="tok",
            unit_scale=True,
            leave=False,
            disable=not progress,
        ) as bar,
    ):
        logits_of = logits_function(model, tokens)
        for batch in _batches(spans, batch_size):
            scored = batch[0][2] - batch[0][1]
            windows = torch.stack([tokens[start:end] for start, _, end in batch]).to(device)
            # Token t is predicted by the output at t - 1.
            rows = logits_of(windows, slice(windows.shape[1] - scored - 1, windows.shape[1] - 1))
            targets = windows[:, -scored:].reshape(-1)
            done = 0
            for logits in rows:
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                losses = F.cross_entropy(wide, targets[done : done + len(wide)], reduction="none")
                nll += losses.sum(dtype=torch.float64).item()
                done += len(wide)
            count += done
            bar.update(done)
    return Perplexity(method=method, length=length, stride=stride, windows=len(spans), tokens=count, nll=nll)


def _batches(spans: list[tuple[int, int, int]], batch_size: int) -> Iterator[list[tuple[int, int, int]]]:
    """Neighbouring windows of one shape: the first and the last may be shorter or score another number of tokens."""
    batch: list[tuple[int, int, int]] = []
    for span in spans:
        same = batch and all(span[i] - batch[0][i] == span[0] - batch[0][0] for i in (1, 2))
        if batch and (not same or len(batch) == batch_size):
            yield batch
            batch = []
        batch.append(span)
    yield batch


def default_batch_size(device: torch.device, length: int) -> int:
    """Windows of a length per forward, where nobody says."""
    return max(1, (TOKENS_PER_CPU_BATCH if device.type == "cpu" else TOKENS_PER_BATCH) // length)


def logits_function(model: nn.Module, tokens: Tensor) -> Callable[..., Iterator[Tensor]]:
    """A function from windows `(B, T)`, a slice of positions and perhaps a cache to their logits, as rows, in pieces.

    The rows are `(R, V)`, the windows' positions one after the other. A long window's logits are far larger than
    anything else in the forward. Where the head is a plain module behind the base model it is applied to `LOGIT_ROWS`
    positions at a time. Some families scale or cap the logits after the head, so a short trial decides. Where FSDP
    or ZeRO-3 has sharded a model, its parts cannot be called on their own, or only as often as in every other process,
    whose windows may be of another length: there the logits are whole, and only what is made of them is in pieces.

    Args:
        model: in eval mode.
        tokens: `(N,)`, of which the first few are the trial.
    """

    def keeping(cache: Cache | None) -> dict[str, Any]:
        return {"use_cache": False} if cache is None else {"use_cache": True, "past_key_values": cache}

    def whole(windows: Tensor, positions: slice, cache: Cache | None = None) -> Iterator[Tensor]:
        logits = model(input_ids=windows, **keeping(cache)).logits
        yield from logits[:, positions].flatten(0, 1).split(LOGIT_ROWS)

    base, head = getattr(model, "base_model", None), getattr(model, "get_output_embeddings", lambda: None)()
    sharded = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())
    if base is None or base is model or head is None or sharded:
        return whole
    trial = tokens[:TRIAL_TOKENS].to(next(model.parameters()).device)[None]

    def hidden_states(windows: Tensor, cache: Cache | None = None) -> Tensor | None:
        return getattr(base(input_ids=windows, **keeping(cache)), "last_hidden_state", None)

    def in_pieces(windows: Tensor, positions: slice, cache: Cache | None = None) -> Iterator[Tensor]:
        hidden = hidden_states(windows, cache)
        assert hidden is not None  # the trial saw it
        yield from (head(rows) for rows in hidden[:, positions].flatten(0, 1).split(LOGIT_ROWS))

    hidden = hidden_states(trial)
    if hidden is None:
        return whole
    expected = model(input_ids=trial, use_cache=False).logits
    return in_pieces if torch.allclose(head(hidden), expected, rtol=1e-5, atol=1e-5) else whole
