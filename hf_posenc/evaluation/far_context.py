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
    """Losses of passages that occur for the second time in a text, in nats per token, means over the trials.

    Attributes:
        distance: tokens from the start of the first copy to the start of the second one.
        passage: tokens in a passage. The first one is not scored, because the token before it differs.
        trials: number of passages.
        second: loss of the second copy.
        unseen: loss at the second copy's place if the text has other words in place of the first copy.
        error: standard error of `gain`.
    """

    derived = ("gain",)

    distance: int
    passage: int
    trials: int
    second: float
    unseen: float
    error: float

    @property
    def gain(self) -> float:
        """The loss without a first copy minus that with one, in nats per token.

        Place and length are the same, so this is what the model recovers from the first copy alone.
        """
        return self.unseen - self.second


def repeat_gain(
    model: nn.Module,
    tokens: Tensor,
    *,
    distances: Sequence[int],
    passage: int = 64,
    trials: int = 32,
    seed: int = 0,
    batch_size: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> list[RepeatGain]:
    """Put passages of a held-out text twice, at several distances, and measure what the first copy is worth.

    A context is `distance` tokens of the text as it stands, and then the passage that it begins with again. It needs no
    task and no training: a model that copies words, but not random tokens, shows a gain. A model that ignores its
    context has a gain of 0. The same passages are used at all distances.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokens: `(N,)` int64, text that the model was not trained on.
        distances: tokens from the start of the first copy to that of the second, at least `passage`.
        passage: tokens in a passage, at least 2.
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
    if min(passage, trials) < 2:
        raise ValueError(f"passage and trials must be at least 2, not {passage} and {trials}")
    if not distances or min(distances) < passage:
        raise ValueError(f"distances must be at least the passage, {passage} tokens, not {list(distances)}")
    needed = max(distances) + passage + trials - 1
    if tokens.dim() != 1 or len(tokens) < needed:
        raise ValueError(f"tokens must be a text of at least {needed} tokens for these trials, not {[*tokens.shape]}")
    places = torch.randperm(len(tokens) - needed + trials, generator=torch.Generator().manual_seed(seed))[:trials]
    jobs = [(distance, place) for distance in distances for place in places.tolist()]

    def score(batch: list[int]) -> Tensor:
        """Return the mean losses of the second copy, with a first one and without, (B, 2)."""
        distance = jobs[batch[0]][0]  # the same in a batch
        whole = torch.stack([tokens[jobs[index][1] :][: distance + passage] for index in batch])
        copy, following = whole[:, :passage], whole[:, distance:]
        twice = torch.cat([whole[:, :distance], copy], 1)
        once = torch.cat([following, whole[:, passage:distance], copy], 1)
        return reader.losses(torch.cat([twice, once]), passage - 1).mean(1).view(2, -1).T

    with reading(model, tokens, distributed=distributed, progress=progress) as reader:
        sizes = [(2 * (distance + passage),) for distance, _ in jobs]
        parts = reader.scores(sizes, score, (2,), "trial", batch_size).split(trials)
    measured = []
    for distance, losses in zip(distances, parts, strict=True):
        second, unseen = losses.mean(0).tolist()
        error = losses.diff(dim=1).std().item() / math.sqrt(trials)
        setting = {"distance": distance, "passage": passage, "trials": trials}
        measured.append(RepeatGain(**setting, second=second, unseen=unseen, error=error))
    return measured
