"""Does a model use text far back? Losses of passages that occur twice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.measurement import Result
from .batches import reading


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
        ValueError: for a number out of range, a text too short for the trials at the longest distance, or `distributed`
            without a process group.
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
        """Return the mean losses of the first copy, of the second, and without a first one, (B, 3)."""
        distance = jobs[batch[0]][0]  # the same in a batch
        starts = [jobs[index][1] for index in batch]
        contexts = torch.stack(
            [torch.cat([tokens[start - lead : start + distance], tokens[start : start + passage]]) for start in starts]
        )
        without = contexts.clone()
        after = [tokens[start + distance : start + distance + passage] for start in starts]
        without[:, lead : lead + passage] = torch.stack(after)
        scored = distance + passage - 1  # all but the first token of the first copy
        twice, once = reader.losses(torch.cat([contexts, without]), scored).view(2, len(batch), scored)
        columns = (twice[:, : passage - 1], twice[:, distance:], once[:, distance:])
        return torch.stack([column.mean(1) for column in columns], dim=1)

    with reading(model, tokens, distributed=distributed, progress=progress) as reader:
        sizes = [(2 * (lead + distance + passage),) for distance, _ in jobs]
        parts = reader.scores(sizes, score, (3,), "trial", batch_size).split(trials)
    measured = []
    for distance, losses in zip(distances, parts, strict=True):
        first, second, unseen = losses.unbind(1)
        means = {"first": first.mean().item(), "second": second.mean().item(), "unseen": unseen.mean().item()}
        errors = [differences.std().item() / math.sqrt(trials) for differences in (first - second, unseen - second)]
        setting = {"distance": distance, "passage": passage, "trials": trials}
        measured.append(RepeatGain(**setting, **means, gain_error=errors[0], gain_in_place_error=errors[1]))
    return measured
