"""`fit_temperature`: find the strengths of a temperature that predict text best at given lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..errors import NotPatchedError
from ..live.eval_mode import evaluation
from ..live.obstacles import check_in_place, check_unwrapped
from ..live.patch_record import alone, patch_of
from ..modules import QueryModule
from .checks import check_head, check_tokens
from .matching import check_counts


@dataclass(frozen=True)
class TemperatureFit:
    """The findings of `fit_temperature`. It prints as a table.

    Attributes:
        lengths: the lengths, in tokens.
        before: held-out loss at each length before the fit, in nats per token.
        after: held-out loss at each length after the fit.
        strengths: name of each parameter -> its fitted values.
        steps: number of steps after which the held-out loss was lowest; 0 means that the fit changed nothing.
    """

    lengths: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    strengths: dict[str, list[float]]
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a row for each length, and the range of the strengths."""
        values = [value for numbers in self.strengths.values() for value in numbers]
        lines = ["length    before     after"]
        lines += [
            f"{length:>6}  {before:>8.4f}  {after:>8.4f}"
            for length, before, after in zip(self.lengths, self.before, self.after, strict=True)
        ]
        return "\n".join(
            [*lines, f"{len(values)} strengths from {min(values):.3f} to {max(values):.3f}, after {self.steps} steps"]
        )


def fit_temperature(
    model: PreTrainedModel,
    tokens: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    held_out: int = 2,
    steps: int = 40,
    learning_rate: float = 0.03,
    progress: bool = False,
) -> TemperatureFit:
    """Fit the strengths of a `temperature` to text, and leave every other weight alone.

    Adam lowers the mean loss over the lengths. Each step reads one window, cut to each length. The strengths with the
    lowest loss on the held-out windows stay; those from before the fit are among the candidates.

    Args:
        model: a patched model with a head and a `temperature(trainable=True)`. With `share_heads=True` and
            `share_layers=True` it has one strength, otherwise one for each head, layer, or both.
        tokens: (N, T) int64 or int32: windows of text without padding, at least `held_out + 1`.
        lengths: lengths in tokens, at most T; None means T. A length that the base was not trained at is the purpose.
        held_out: number of windows, from the end, that only judge.
        steps: number of steps of Adam.
        learning_rate: learning rate of Adam.
        progress: show a progress bar of steps.

    Returns:
        The losses before and after, and the strengths.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if the model predicts no tokens, is wrapped, sharded or offloaded, or another call is
            changing it.
        ValueError: if the model has no trainable temperature, or for an argument out of range.
    """
    check_unwrapped(model, "fit its temperature")
    check_head(model)
    if patch_of(model) is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: patch it with a temperature first")
    check_in_place(model, "fit its temperature")
    check_counts(held_out=held_out, steps=steps)
    if not 0 < learning_rate < float("inf"):
        raise ValueError(f"learning_rate must be positive and finite, not {learning_rate!r}")
    check_tokens(tokens, model, held_out)
    lengths = (tokens.shape[1],) if lengths is None else tuple(lengths)
    if not lengths or not all(type(length) is int and 2 <= length <= tokens.shape[1] for length in lengths):
        raise ValueError(f"lengths must be integers from 2 to {tokens.shape[1]}, the size of the windows: {lengths!r}")
    strengths = trained_strengths(model)
    if not strengths:
        raise ValueError(
            "this model has no temperature to fit: patch it with Temperature(..., trainable=True) among its schemes"
        )
    tokens = tokens.to(next(model.parameters()).device).long()
    read, held = tokens[:-held_out], tokens[-held_out:]
    with alone(model, "fit its temperature"), evaluation(model):
        return _fit(model, read, held, lengths, strengths, steps, learning_rate, progress)


def trained_strengths(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter of each temperature, which `fit_temperature` fits."""
    return {
        f"{name}.{key}": parameter
        for name, module in model.named_modules()
        if isinstance(module, QueryModule) and module.is_temperature
        for key, parameter in module.named_parameters(recurse=False)
    }


def _fit(
    model: PreTrainedModel,
    read: Tensor,
    held: Tensor,
    lengths: Sequence[int],
    strengths: dict[str, nn.Parameter],
    steps: int,
    learning_rate: float,
    progress: bool,
) -> TemperatureFit:
    """Return the fit, see `fit_temperature`. Every exit leaves the best strengths so far in the model."""
    parameters = list(strengths.values())
    # Adam's steps are smaller than the digits of bfloat16, so the copies that it moves are in float32.
    masters = [p.detach().float().clone().requires_grad_() for p in parameters]
    before = best = _held_out(model, held, lengths)
    best_values, best_step = [p.detach().clone() for p in parameters], 0
    optimizer = torch.optim.Adam(masters, learning_rate)
    try:
        for step in tqdm(range(1, steps + 1), desc="temperature", unit="step", disable=not progress):
            window = read[(step - 1) % len(read)]
            loss = sum(_loss(model, window[:length]) for length in lengths)
            gradients = torch.autograd.grad(loss, parameters)  # type: ignore[arg-type]
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float()
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(parameters, masters, strict=True):
                    master.clamp_(min=0)
                    parameter.copy_(master)
            losses = _held_out(model, held, lengths)
            if sum(losses) < sum(best):
                best, best_values, best_step = losses, [p.detach().clone() for p in parameters], step
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, best_values, strict=True):
                parameter.copy_(value)
    values = {name: p.detach().float().tolist() for name, p in strengths.items()}
    return TemperatureFit(tuple(lengths), before, best, values, best_step)


def _loss(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Return the mean loss of the next token of a window (T,), in nats."""
    logits = model(window[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), window[1:])


@torch.no_grad()
def _held_out(model: PreTrainedModel, windows: Tensor, lengths: Sequence[int]) -> tuple[float, ...]:
    """Return the mean loss at each length, over windows (N, T) cut to it."""
    return tuple(sum(_loss(model, row[:length]).item() for row in windows) / len(windows) for length in lengths)
