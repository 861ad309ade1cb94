"""Fine-tuning with the unpatched base as the teacher, to win back the loss that a swap of positions costs."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import IGNORED


def teacher_of(model: nn.Module, *, share_weights: bool) -> nn.Module:
    """Return a frozen copy of the stock model, in eval mode. Call this before the model is patched.

    Args:
        model: stock model.
        share_weights: share the weights with the model instead of copying them. LoRA does not train them.
    """
    memo = {id(weight): weight for weight in model.parameters()} if share_weights else {}
    teacher = copy.deepcopy(model, memo).eval()
    return teacher if share_weights else teacher.requires_grad_(False)


@dataclass(frozen=True)
class Distillation:
    """The loss of a model that learns from its text and from a teacher's predictions.

    Attributes:
        teacher: from `teacher_of`.
        weight: weight of the divergence from the teacher's predictions.
        trained_length: context length that the teacher was trained at. It reads only so many tokens of a sequence.
    """

    teacher: nn.Module
    weight: float
    trained_length: int

    def loss(self, wrapped: nn.Module, batch: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss to train on and the loss on the text alone, both summed over the targets, in nats.

        Args:
            wrapped: the model as accelerate wrapped it.
            batch: `input_ids` `(B, T)` and, for packed documents, `position_ids`.
            targets: `(B, T)`, IGNORED where nothing is predicted.
        """
        teacher_batch = {name: tensor[:, : self.trained_length] for name, tensor in batch.items()}
        logits = wrapped(**batch, use_cache=False).logits
        text_loss = token_loss(logits, targets)
        with torch.no_grad():
            target = self.teacher(**teacher_batch, use_cache=False).logits.float().log_softmax(-1)
        predicted = logits[:, : self.trained_length].float().log_softmax(-1)
        divergence = F.kl_div(predicted, target, log_target=True, reduction="none").sum(-1)
        counted = targets[:, : self.trained_length] != IGNORED
        return text_loss + self.weight * divergence[counted].sum(), text_loss


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the negative log-likelihoods of all targets, in nats, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
