"""calibrate(model, tokens): closed forms first, then attention matched layer by layer, on the base's own inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import NotPatchedError
from ..modes import evaluation
from ..patching.state import patch_of, without_adapter
from ..patching.wrappers import check_in_place, check_unwrapped
from .choose import CANDIDATES, close
from .match import match, movable
from .pair import Pair

STAGES = ("closed_form", "attention")
WEIGHTS = ("scheme", "query_key", "adapter")


@dataclass(frozen=True)
class LayerFit:
    """What calibration did to one layer; all numbers on held-out windows.

    Attributes:
        index: of the layer.
        before: (H,) mean KL divergence of the scheme's attention from the base's, in nats per query, before.
        closed: (H,) after the closed forms.
        after: (H,) at the end.
        chosen: for each head the closed form that was taken, see `CANDIDATES`.
        base_curve: (H, T) what the base's positions add to a score, the mean by distance, beside queries and keys as
            they were before the closed forms.
        scheme_curve: (H, T) the scheme's bias or factor by distance at the end, or None if it has none.
        multiplies: whether that is a factor of the score, and no bias.
    """

    index: int
    before: Tensor
    closed: Tensor
    after: Tensor
    chosen: tuple[str, ...]
    base_curve: Tensor
    scheme_curve: Tensor | None
    multiplies: bool

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "index": self.index,
            "before": self.before.tolist(),
            "closed": self.closed.tolist(),
            "after": self.after.tolist(),
            "chosen": list(self.chosen),
            "base_curve": self.base_curve.tolist(),
            "scheme_curve": None if self.scheme_curve is None else self.scheme_curve.tolist(),
            "multiplies": self.multiplies,
        }


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` did. Prints as a table.

    Attributes:
        scheme: names of the schemes.
        layers: one report for each layer that was calibrated.
        tokens: number of tokens that were used, held-out ones included.
    """

    scheme: str
    layers: tuple[LayerFit, ...]
    tokens: int

    def unexpressed(self, least: float = 0.1) -> tuple[int, ...]:
        """Return the layers that still differ from the base by this much, in nats per query and head on average.

        What the scheme cannot do there the base can: leave those layers out of the patch (`layers=`).
        """
        return tuple(each.index for each in self.layers if each.after.mean().item() >= least)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"scheme": self.scheme, "tokens": self.tokens, "layers": [each.to_dict() for each in self.layers]}

    def __str__(self) -> str:
        """Return a table: KL divergence from the base's attention, the mean over heads."""
        lines = [
            f"{self.scheme}: calibrated with {self.tokens:,} tokens",
            "  layer     before  closed form      after  heads by closed form",
        ]
        for each in self.layers:
            said = ", ".join(f"{each.chosen.count(name)} {name}" for name in CANDIDATES if name in each.chosen)
            numbers = "  ".join(f"{part.mean().item():>9.4f}" for part in (each.before, each.closed, each.after))
            lines.append(f"  {each.index:>5}  {numbers}  {said}")
        return "\n".join(lines)


def calibrate(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    stage: str = "attention",
    base: PreTrainedModel | None = None,
    weights: str = "query_key",
    steps: int = 100,
    batch_size: int = 4,
    rate: float = 2e-2,
    weight_rate: float = 1e-3,
    closed_windows: int = 24,
    held_out: int = 8,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
) -> Calibration:
    """Put into a scheme, and into the projections of queries and keys, what the base's positions did.

    Closed forms first: for each layer and head several are tried, and what leaves the attention closest to the base's
    on held-out windows is kept. Then, with `stage="attention"`, the attention of each layer is matched to the base's
    by gradient steps on the base's own hidden states, so that no layer waits for those below, and no language-model
    loss is seen. Memory grows with the number of distances, not with its square.

    Args:
        model: patched, whole, on one device.
        tokens: (N, T) integers: windows of text without padding, as long as the base was made for; at least
            `held_out + 1`.
        stage: `closed_form`, or `attention` for both stages.
        base: what to follow; None means what the model was before it was patched, which is kept for undoing that.
        weights: what the second stage moves: `scheme`, its parameters alone; `query_key`, with all weights of the
            attention that make queries and keys; `adapter`, with those of them alone that are trained: of LoRA.
        steps: of the second stage.
        batch_size: windows in each step.
        rate: learning rate of the scheme's parameters in the second stage; it falls to 0 as a cosine.
        weight_rate: of weights.
        closed_windows: windows that the closed forms average over, at most.
        held_out: windows, the last ones, that only decide and measure.
        seed: of the order of windows.
        on_step: called after each step with its number, from 1, and the mean KL divergence.

    Returns:
        What was found, by layer and head.

    Raises:
        NotPatchedError: if the model is not patched; or was loaded patched, and no `base` is given.
        UnsupportedModelError: if it is wrapped, sharded or offloaded, or nobody sees the base's scores.
        ValueError: for choices that do not exist, numbers out of range, too few windows, windows longer than the base
            was made for, and a second stage that has nothing to move.
    """
    check_choices(
        stage=stage,
        weights=weights,
        steps=steps,
        batch_size=batch_size,
        rate=rate,
        weight_rate=weight_rate,
        closed_windows=closed_windows,
        held_out=held_out,
    )
    check_unwrapped(model, "calibrate the model")
    inner = without_adapter(model)
    patch = patch_of(inner)
    if patch is None:
        raise NotPatchedError(f"this {type(inner).__name__} is not patched: there is nothing to calibrate")
    check_in_place(inner, "calibrate the model")
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.shape[1] < 2:
        raise ValueError(f"tokens must be integers (windows, length), not {tuple(tokens.shape)} of {tokens.dtype}")
    if len(tokens) <= held_out:
        raise ValueError(
            f"{len(tokens)} windows are too few: {held_out} are held out, and at least one is needed beside"
        )
    if base is None and patch.undo is None:
        raise NotPatchedError("this model was loaded patched, which does not hold the stock positions: give the base")
    with evaluation(inner):
        pair = Pair(inner, patch, base, tokens, held_out)
        return _run(pair, stage, weights, steps, batch_size, (rate, weight_rate), closed_windows, seed, on_step)


def check_choices(*, stage: str = STAGES[0], weights: str = WEIGHTS[0], **numbers: float) -> None:
    """Check what can be checked of the arguments of `calibrate` without a model.

    Args:
        stage: as in `calibrate`.
        weights: as in `calibrate`.
        **numbers: those of its arguments that count something or are a rate, by name.

    Raises:
        ValueError: for a choice that does not exist, and a number out of range.
    """
    for name, value, choices in (("stage", stage, STAGES), ("weights", weights, WEIGHTS)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive, not {number}")


def _run(
    pair: Pair,
    stage: str,
    weights: str,
    steps: int,
    batch_size: int,
    rates: tuple[float, float],
    windows: int,
    seed: int,
    on_step: Callable[[int, float], None] | None,
) -> Calibration:
    moved = movable(pair, weights) if stage == "attention" else ([], [])
    if stage == "attention" and not any(moved):
        raise ValueError(f"weights={weights!r} leaves nothing to move: {pair.patch.name} has no parameters of its own")
    before = pair.divergence()
    averages, chosen, closed = close(pair, windows, before)
    after = closed
    if stage == "attention":
        kept = [(p, p.detach().clone()) for part in moved for p in part]
        match(pair, moved, steps, batch_size, rates, seed, on_step)
        after = pair.divergence()
        if sum(each.sum() for each in after.values()) > sum(each.sum() for each in closed.values()):
            after = closed  # a base that was met already, or rates that are too high
            with torch.no_grad():
                for p, value in kept:
                    p.copy_(value)
    fits = []
    for index in pair.layers:
        shown, multiplies = pair.curve(index)
        fits.append(
            LayerFit(
                index,
                before[index],
                closed[index],
                after[index],
                chosen[index],
                averages[index].mean_difference.float().cpu(),
                shown,
                multiplies,
            )
        )
    return Calibration(pair.patch.name, tuple(fits), len(pair.train[0]) * (len(pair.train) + len(pair.held)))
