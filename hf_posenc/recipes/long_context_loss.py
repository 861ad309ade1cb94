"""LongCE: a loss in which a token counts more if the long context helps to predict it."""

from dataclasses import dataclass
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..evaluation.far_context import truncated_contexts, truncation_stride
from .corpus import IGNORED
from .options import Count, Options, Positive, UsageError, refuse

OBJECTIVES = ("cross_entropy", "longce")
"""Values of `--objective`."""


@dataclass
class ObjectiveArguments(Options):
    """Loss.

    Args:
        objective: longce gives a token more weight if its whole context predicts it better than a truncated one.
        longce_context: least number of tokens in a truncated context (default: an eighth of --train-length).
        longce_limit: largest weight of a token.
    """

    objective: Annotated[str, OBJECTIVES] = "cross_entropy"
    longce_context: Count | None = None
    longce_limit: Positive = 5.0


def check(arguments: ObjectiveArguments, train_length: int, context_parallel: int) -> None:
    """Raise UsageError for options that have no effect, or that contradict each other."""
    if arguments.objective != "longce":
        for name in ("longce_context", "longce_limit"):
            refuse(arguments, name, "has no effect without --objective longce")
        return
    if context_parallel > 1:
        raise UsageError("--context-parallel cannot be combined with --objective longce, which cuts whole windows")
    loss = LongCE.of(arguments, train_length)
    assert loss is not None
    if train_length <= loss.first_weighted + 1:
        raise UsageError(
            f"--longce-context {loss.context} leaves no token of --train-length {train_length} to weight: give less"
        )


@dataclass(frozen=True)
class LongCE:
    """The cross-entropy with weights `min(P(token | whole context) / P(token | truncated context), limit)`.

    Weights come from the model itself, at the same step, and have no gradient. Truncated contexts are those of LongPPL
    (`truncated_contexts`). Tokens before the first one that they predict weigh 1: for them nothing is cut off. The sum
    is divided by the number of targets, and not by the weights. A truncated context counts its positions from 0; chosen
    position ids are cut with it.
    Source: Fang et al. 2024, arXiv:2410.23771, equation of I_soft; there `context` is 4096 of 32768, and `limit` is 5.

    Attributes:
        context: least number of tokens in a truncated context.
        limit: largest weight of a token.
    """

    context: int
    limit: float

    @classmethod
    def of(cls, arguments: ObjectiveArguments, train_length: int) -> Self | None:
        """Return the loss that checked options ask for; None for the cross-entropy."""
        if arguments.objective != "longce":
            return None
        return cls(arguments.longce_context or max(1, train_length // 8), arguments.longce_limit)

    @property
    def stride(self) -> int:
        """Number of tokens between the beginnings of two truncated contexts."""
        return truncation_stride(self.context)

    @property
    def first_weighted(self) -> int:
        """Index of the first slot whose target can have another weight than 1."""
        return self.stride + self.context - 1

    def loss(self, wrapped: nn.Module, batch: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted loss and the cross-entropy, both summed over the targets, in nats.

        Args:
            wrapped: the model as accelerate wrapped it.
            batch: `input_ids` `(B, T)` and, if positions are chosen, `position_ids` and `attention_mask`.
            targets: `(B, T)`, IGNORED where nothing is predicted.
        """
        truncated = self.truncated_losses(wrapped, batch, targets)
        losses = losses_by_token(wrapped(**batch, use_cache=False).logits, targets)
        weights = (truncated - losses.detach()).exp().clamp(max=self.limit)
        weights[:, : self.first_weighted] = 1
        return (weights * losses).sum(), losses.sum()

    @torch.no_grad()
    def truncated_losses(self, wrapped: nn.Module, batch: dict[str, Tensor], targets: Tensor) -> Tensor:
        """Return the loss of each target `(B, T)` with a truncated context; 0 before `first_weighted`."""
        losses = torch.zeros(targets.shape, device=targets.device)
        for start, end in truncated_contexts(targets.shape[1], self.context):
            part, served = slice(start, end - 1), slice(start + self.context - 1, end - 1)
            logits = wrapped(**{name: each[:, part] for name, each in batch.items()}, use_cache=False).logits
            losses[:, served] = losses_by_token(logits[:, self.context - 1 :], targets[:, served])
        return losses


def losses_by_token(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of each target `(B, T)`, in nats, in float32; 0 where it is IGNORED."""
    flat = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return flat.view_as(targets)
