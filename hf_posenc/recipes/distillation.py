"""Fine-tuning with the unpatched base as the teacher, to win back the loss that a swap of positions costs."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import IGNORED


def teacher_of(model: nn.Module, *, share_weights: bool) -> nn.Module:
    """Return a frozen copy of the stock model, in eval mode. Call it before the model is patched.

    Args:
        model: stock.
        share_weights: keep the model's own tensors. LoRA trains none of them, so the copy then costs no memory.
    """
    memo = {id(weight): weight for weight in model.parameters()} if share_weights else {}
    teacher = copy.deepcopy(model, memo).eval()
    return teacher if share_weights else teacher.requires_grad_(False)


@dataclass(frozen=True)
class Distillation:
    """The loss of a model that learns from its text and from a teacher's predictions.

    Attributes:
        teacher: from `teacher_of`.
        weight: of the divergence from the teacher's predictions.
        window: tokens that the teacher was trained at. It is not asked beyond them.
    """

    teacher: nn.Module
    weight: float
    window: int

    def loss(self, wrapped: nn.Module, batch: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss to train on and the text's own loss, both summed over the targets, in nats.

        Args:
            wrapped: the model as accelerate wrapped it.
            batch: `input_ids` `(B, T)` and, for packed documents, `position_ids`.
            targets: `(B, T)`, IGNORED where nothing is predicted.
        """
        inside = {name: tensor[:, : self.window] for name, tensor in batch.items()}
        logits = wrapped(**batch, use_cache=False).logits
        own = token_loss(logits, targets)
        with torch.no_grad():
            wanted = self.teacher(**inside, use_cache=False).logits.float().log_softmax(-1)
        predicted = logits[:, : self.window].float().log_softmax(-1)
        divergence = F.kl_div(predicted, wanted, log_target=True, reduction="none").sum(-1)
        counted = targets[:, : self.window] != IGNORED
        return own + self.weight * divergence[counted].sum(), own


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the negative log-likelihoods of all targets, in nats, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
