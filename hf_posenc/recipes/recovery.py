"""Winning back the loss that a swap of positions costs, with the unpatched base as the teacher."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hf_posenc

from ..families.base import base_model_type, resolve
from ..live.state import without_adapter
from ..modules import PositionEmbedding
from ..patching.place import NoEmbedding
from ..registry import family_for
from .corpus import IGNORED
from .options import UsageError


def teacher_of(model: nn.Module, *, share_weights: bool) -> nn.Module:
    """A frozen copy of the stock model, in eval mode; make it before the model is patched.

    Args:
        model: stock.
        share_weights: keep the model's own tensors. For LoRA, which trains none of them: the copy then costs nothing.
    """
    memo = {id(weight): weight for weight in model.parameters()} if share_weights else {}
    teacher = copy.deepcopy(model, memo).eval()
    return teacher if share_weights else teacher.requires_grad_(False)


class Recovery:
    """The losses of a model in training that has a teacher.

    Args:
        model: patched, not wrapped by accelerate; PEFT may have wrapped it.
        teacher: from `teacher_of`.
        arguments: `distill` and `transfer_steps`.
        window: tokens the teacher was trained at: beyond them it is not asked.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, arguments: Any, window: int):
        """Find the attentions of both models."""
        self.teacher, self.window = teacher, window
        self.weight, self.transfer_steps = arguments.distill, arguments.transfer_steps
        patched = without_adapter(model)
        family = family_for(base_model_type(patched.config))
        self.attentions = resolve(family, patched).attentions
        self.examples = resolve(family, teacher).attentions

    def loss(self, wrapped: nn.Module, batch: dict[str, Tensor], targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss to train on and the text's own, both summed over the targets.

        Args:
            wrapped: the model as accelerate wrapped it.
            batch: `input_ids` `(B, T)` and, for packed documents, `position_ids`.
            targets: `(B, T)`, IGNORED where nothing is predicted.
            step: of the run, counted from 0.
        """
        inside = {name: tensor[:, : self.window] for name, tensor in batch.items()}
        if step < self.transfer_steps:
            return self.transfer(wrapped, inside, targets[:, : self.window])
        logits = wrapped(**batch, use_cache=False).logits
        own = token_loss(logits, targets)
        if not self.weight:
            return own, own
        with torch.no_grad():
            wanted = self.teacher(**inside, use_cache=False).logits.float().log_softmax(-1)
        got = logits[:, : self.window].float().log_softmax(-1)
        divergence = F.kl_div(got, wanted, log_target=True, reduction="none").sum(-1)
        counted = targets[:, : self.window] != IGNORED
        return own + self.weight * divergence[counted].sum(), own

    def transfer(self, wrapped: nn.Module, batch: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Squared error of every layer's attention output on the teacher's own inputs to that layer.

        Relative to the mean square of what the teacher gives, added over the layers, per target. No layer then has to
        wait until the ones below it work again.
        """
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.no_grad(), watching(self.examples, inputs, outputs):
            self.teacher(**batch, use_cache=False)
        own_outputs: list[Tensor] = []
        with fed(self.attentions, inputs), watching(self.attentions, [], own_outputs):
            logits = wrapped(**batch, use_cache=False).logits
        error = sum(
            (own.float() - wanted.float()).square().mean() / wanted.float().square().mean()
            for own, wanted in zip(own_outputs, outputs, strict=True)
        )
        own = token_loss(logits, targets)
        # The zero keeps what comes after the last attention in the graph (see `fed`).
        return error * (targets != IGNORED).sum() + 0.0 * own, own


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods of all targets, in nats, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@contextmanager
def watching(attentions: list[nn.Module], inputs: list[Tensor], outputs: list[Tensor]) -> Iterator[None]:
    """Inside, each attention's hidden states and its output are appended, layer by layer."""

    def note(_: nn.Module, arguments: tuple, keywords: dict[str, Any], output: Any) -> None:
        inputs.append(arguments[0] if arguments else keywords["hidden_states"])
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for attention in attentions:
            hooks.enter_context(attention.register_forward_hook(note, with_kwargs=True))
        yield


@contextmanager
def fed(attentions: list[nn.Module], inputs: list[Tensor]) -> Iterator[None]:
    """Inside, each attention gets these hidden states instead of its own.

    Its own stay in the graph, times zero: data-parallel training waits for the gradients of all weights.
    """

    def feed(given: Tensor) -> Any:
        def replace(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if arguments:
                return (given + 0.0 * arguments[0], *arguments[1:]), keywords
            return arguments, {**keywords, "hidden_states": given + 0.0 * keywords["hidden_states"]}

        return replace

    with ExitStack() as hooks:
        for attention, given in zip(attentions, inputs, strict=True):
            hooks.enter_context(attention.register_forward_pre_hook(feed(given), with_kwargs=True))
        yield


def check_transfer(model: nn.Module) -> None:
    """UsageError where attention outputs cannot be matched: the positions are in the hidden states."""
    adding = [scheme.name for scheme in hf_posenc.schemes_of(model)]
    if any(isinstance(module, PositionEmbedding) and not isinstance(module, NoEmbedding) for module in model.modules()):
        raise UsageError(
            f"--transfer-steps: {' and '.join(adding)} adds positions to the hidden states, which the transfer takes "
            "from the base: its attention would see none"
        )
