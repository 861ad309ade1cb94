"""Calibration before fine-tuning: choose windows of the training text, calibrate, and report it."""

import signal
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import peft
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import Calibration, Matching

from ..calibration.calibrate import record_calibration
from ..calibration.report import NOTHING, HeldOutLoss
from .corpus import Document, Text, Windows, order
from .measurements import held_out_loss
from .options import Count, Length, Limit, Options, UsageError, refuse
from .results import Results, stopwatch
from .training import StopRequest

METHODS = ("attention", "closed_form", "none")
LONGEST = 256
"""Tokens of a window, at most, by default: short windows cost less, and what holds in them holds in longer ones where a
model looks no further back."""
HELD_OUT = 8
"""Windows that only decide and measure."""
CALIBRATED_RATE, PLAIN_RATE = 3e-4, 1e-3
"""Default peak learning rates of fine-tuning. The one that a plain swap needs undoes a calibration within a few
steps."""
UNCHANGED = 1e-5
"""Nats of held-out loss: a swap that costs less has only changed the order of some sums."""


@dataclass
class CalibrationArguments(Options):
    """Calibration, between the swap and the fine-tuning.

    Args:
        calibrate: before fine-tuning, put into the scheme and into queries and keys what the base's positions did, by
            closed forms and then by matching attention; none is the plain swap.
        calibrate_steps: steps that match attention, of 4 windows each.
        calibrate_windows: windows of the training text to calibrate with, 8 of which only decide and measure.
        calibrate_length: tokens of each of these windows: the distances at which attention is matched; beyond them
            transformer_xl starts with little weight (default: the length the base was trained at, 256 at most).
    """

    calibrate: Annotated[str, METHODS] = "attention"
    calibrate_steps: Count = 50
    calibrate_windows: Annotated[int, Limit(HELD_OUT + 1)] = 400
    calibrate_length: Length | None = None


def check(arguments: CalibrationArguments) -> None:
    """Raise UsageError for options of a calibration that is not made."""
    if arguments.calibrate == "none":
        for name in ("calibrate_windows", "calibrate_length"):
            refuse(arguments, name, "is of a calibration, and --calibrate none makes none")
    if arguments.calibrate != "attention":
        refuse(arguments, "calibrate_steps", f"is of --calibrate attention, not of {arguments.calibrate}")


def windows(train: list[Document], trained_length: int, arguments: CalibrationArguments, seed: int) -> Tensor:
    """Return windows of the training text, (N, T), drawn at random, none of them twice.

    Raises:
        UsageError: if there are too few, or they would be longer than the base was trained at.
    """
    length = arguments.calibrate_length or min(trained_length, LONGEST)
    if length > trained_length:
        raise UsageError(
            f"--calibrate-length {length}: the base was trained at {trained_length} tokens, and is followed there"
        )
    found = Windows(train, length, "concatenate")
    if len(found) <= HELD_OUT:
        raise UsageError(
            f"--calibrate {arguments.calibrate}: the training text has {found.total:,} tokens, and {HELD_OUT + 1} "
            f"windows of {length} are the least: give more text, or --calibrate none"
        )
    return found.tokens[order(seed, len(found), 0, min(arguments.calibrate_windows, len(found)))]


def skipped(why: str) -> Results:
    """Return the entry of the results where nothing was calibrated."""
    return {"method": "none", "why": why}


def loss_at(text: Text, length: int) -> Callable[[nn.Module], float]:
    """Return a function that measures held-out loss in windows of this length, or of all the text if it is shorter."""
    return held_out_loss(text, min(length, sum(len(document.tokens) for document in text.held_out)))


def follow_base(
    accelerator: Accelerator,
    model: nn.Module,
    tokens: Tensor,
    *,
    held_out: int,
    matching: Matching | None,
    judge: str = "loss",
) -> Calibration:
    """Calibrate in place; Ctrl-C waits for the end of a step. The arguments are those of `hf_posenc.calibrate`."""
    with Steps(matching.steps if matching else 0, accelerator) as steps:
        return hf_posenc.calibrate(
            model,
            tokens,
            held_out=held_out,
            matching=matching and replace(matching, on_step=steps.made),
            judge=judge,
            progress=accelerator.is_main_process,
        )


def calibrate(
    accelerator: Accelerator,
    model: nn.Module,
    tokens: Tensor,
    arguments: CalibrationArguments,
    *,
    seed: int,
    loss: Callable[[nn.Module], float],
    base_loss: float,
    state_file: Path,
) -> Results:
    """Calibrate in place; every process calls it with the same windows.

    Args:
        accelerator: accelerator of the processes.
        model: patched, whole, on the device; PEFT may have wrapped it, and then only what it trains is moved.
        tokens: from `windows`.
        arguments: options of the calibration.
        seed: of the steps.
        loss: from `loss_at`.
        base_loss: what it gives for the base.
        state_file: state of the steps that match attention, from which they go on if it is there.

    Returns:
        The entry of the results: divergences by layer, held-out losses, tokens, seconds.

    Raises:
        UsageError: where this model cannot be calibrated.
    """
    losses = {"length": tokens.shape[1], "base": base_loss, "swapped": loss(model)}
    if abs(losses["swapped"] - base_loss) < UNCHANGED:
        return skipped("the model predicts what the base predicts") | {"held_out_loss": losses}
    steps, matching = 0, None
    if arguments.calibrate == "attention":
        steps, batch_size = arguments.calibrate_steps, max(1, Matching.batch_size // accelerator.num_processes)
        matching = Matching(steps=steps, batch_size=batch_size, seed=seed, state_file=state_file)
    seconds: dict[str, float] = {}
    try:
        with stopwatch(seconds, "seconds"):
            report = follow_base(accelerator, model, tokens, held_out=HELD_OUT, matching=matching)
    except (ValueError, hf_posenc.HfPosencError) as error:
        raise UsageError(f"--calibrate {arguments.calibrate}: {error}; --calibrate none swaps plainly") from None
    adapted = isinstance(model, peft.PeftModel)
    return {
        "method": arguments.calibrate,
        "moved": "the scheme and what the adapter trains" if adapted else "the scheme, queries and keys",
        "windows": len(tokens),
        "tokens": report.tokens,
        "steps": steps,
        **seconds,
        **by_layer(report),
        "held_out_loss": losses | {"calibrated": loss(model)},
        "kept": report.kept,
        "windows_loss": asdict(report.held_out_loss),
        "remarks": report.remarks(),
    }


def by_layer(report: Calibration) -> Results:
    """Return each layer's divergences, averaged over heads, and its closed forms; and the means over layers."""
    stages = ("before", "closed", "after")
    layers = []
    for layer in report.layers:
        means = {name: getattr(layer, name).mean().item() for name in stages}
        layers.append({"index": layer.index, **means, "chosen": dict(Counter(layer.chosen))})
    return {
        "divergence": {name: statistics.fmean(layer[name] for layer in layers) for name in stages},
        "layers": layers,
    }


def write_down(model: PreTrainedModel, found: Results) -> None:
    """Write into the config of a model that was calibrated earlier what its results say.

    Args:
        model: patched, with the calibrated weights.
        found: what `calibrate` returned.
    """
    if found["method"] == "none" or found.get("kept") == NOTHING:
        return
    stage = "closed_form" if found.get("kept") == "closed_form" else found["method"]
    losses = HeldOutLoss(**found["windows_loss"]) if "windows_loss" in found else None
    record_calibration(model, stage, found["tokens"], losses)


class Steps(StopRequest):
    """Context manager in which Ctrl-C waits for the end of a calibration step, and for its whole state.

    It stops at once, as usual, before the first step, after the last, and the second time; and always among several
    processes, because they may be in different steps.

    Args:
        steps: number of steps.
        accelerator: accelerator of the processes.
    """

    signals = (signal.SIGINT,)

    def __init__(self, steps: int, accelerator: Accelerator) -> None:
        """Stop at once before the first step."""
        self.steps, self.waits = steps, False
        self.alone = accelerator.num_processes == 1

    def listen(self) -> None:
        """Wait with Ctrl-C only between the first step and the last."""
        if self.waits:
            super().listen()

    def made(self, step: int, loss: float) -> None:
        """Raise the KeyboardInterrupt that waits, if there is one; called after each step."""
        if self.received:
            raise KeyboardInterrupt
        self.restore()
        self.waits = self.alone and step < self.steps
        self.listen()
