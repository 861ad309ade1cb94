"""Calibration before fine-tuning: choose windows of the training text, calibrate, report the result."""

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
from ..calibration.checks import HELD_OUT, number_of_windows
from ..calibration.report import NOTHING, HeldOutLoss
from .corpus import Document, Text, Windows, order
from .measurements import held_out_loss
from .options import Count, Length, Limit, Options, UsageError, refuse
from .results import Results, stopwatch
from .training import StopRequest

METHODS = ("attention", "closed_form", "none")
MAX_DEFAULT_LENGTH = 256
"""Upper limit of the default window length, in tokens. Short windows cost less, and suffice for a model that looks no
further back."""
CALIBRATED_RATE, PLAIN_RATE = 3e-4, 1e-3
"""Default peak learning rates of fine-tuning. At the rate that a plain swap needs, calibrated models predict worse than
at lower rates."""
UNCHANGED = 1e-5
"""Increase of the held-out loss, in nats, below which a swap has changed nothing but rounding errors."""


@dataclass
class CalibrationArguments(Options):
    """Calibration, between the swap and the fine-tuning.

    Args:
        calibrate: fit the scheme, and the projections of queries and keys, to the base's attention before fine-tuning.
            closed_form: solve equations; attention: then also match each layer in steps; none: a plain swap.
        calibrate_steps: optimizer steps that match each layer, on batches of 4 windows.
        calibrate_windows: windows of the training text to calibrate with, up to 8 held-out windows included.
        calibrate_length: tokens in a window. Attention is matched at shorter distances; at longer ones transformer_xl
            starts with little weight (default: the length the base was trained at, 256 at most).
    """

    calibrate: Annotated[str, METHODS] = "attention"
    calibrate_steps: Count = 50
    calibrate_windows: Annotated[int, Limit(HELD_OUT[0] + 1)] = 400
    calibrate_length: Length | None = None


def check(arguments: CalibrationArguments) -> None:
    """Raise UsageError for options that have no effect with this `--calibrate`."""
    if arguments.calibrate == "none":
        for name in ("calibrate_windows", "calibrate_length"):
            refuse(arguments, name, "has no effect with --calibrate none")
    if arguments.calibrate != "attention":
        refuse(arguments, "calibrate_steps", f"has no effect with --calibrate {arguments.calibrate}")


def windows(train: list[Document], trained_length: int, arguments: CalibrationArguments, seed: int) -> Tensor:
    """Return different windows of the training text, (N, T), drawn at random.

    Raises:
        UsageError: if the text is too short, or the windows would be longer than the base was trained at.
    """
    length = arguments.calibrate_length or min(trained_length, MAX_DEFAULT_LENGTH)
    if length > trained_length:
        raise UsageError(
            f"--calibrate-length {length}: the base was trained at {trained_length} tokens, "
            f"and can be imitated up to that length: give {trained_length} or less"
        )
    all_windows = Windows(train, length, "concatenate")
    held_out = number_of_windows(None, HELD_OUT, length)
    if len(all_windows) <= held_out:
        raise UsageError(
            f"--calibrate {arguments.calibrate}: the training text has {all_windows.total:,} tokens, but "
            f"{held_out + 1} windows of {length} are needed: give more text, or --calibrate none"
        )
    return all_windows.tokens[order(seed, len(all_windows), 0, min(arguments.calibrate_windows, len(all_windows)))]


def skipped(reason: str) -> Results:
    """Return the entry of results.json for a run without calibration."""
    return {"method": "none", "why": reason}


def loss_at(text: Text, length: int) -> Callable[[nn.Module], float]:
    """Return a function that measures held-out loss in windows of this length, or in the text if it is shorter."""
    return held_out_loss(text, min(length, sum(len(document.tokens) for document in text.held_out)))


def calibrate_interruptibly(
    accelerator: Accelerator,
    model: nn.Module,
    tokens: Tensor,
    *,
    held_out: int | None = None,
    matching: Matching | None,
    judge: str = "loss",
) -> Calibration:
    """Calibrate in place as `hf_posenc.calibrate` does, so that Ctrl-C waits for the end of a step."""
    with InterruptibleSteps(matching.steps if matching else 0, accelerator) as steps:
        return hf_posenc.calibrate(
            model,
            tokens,
            held_out=held_out,
            matching=matching and replace(matching, on_step=steps.step_done),
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
    """Calibrate in place. Every process must call this, with the same windows.

    Args:
        accelerator: accelerator of the processes.
        model: patched model, on the device, not sharded. If PEFT has wrapped it, only weights that it trains change.
        tokens: windows from `windows`.
        arguments: options of the calibration.
        seed: seed of the steps.
        loss: function from `loss_at`.
        base_loss: `loss` of the base.
        state_file: file for the state of the steps that match each layer. If it exists, they go on from it.

    Returns:
        The entry of results.json: divergences by layer, held-out losses, tokens, seconds.

    Raises:
        UsageError: if this model cannot be calibrated.
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
            report = calibrate_interruptibly(accelerator, model, tokens, matching=matching)
    except (ValueError, hf_posenc.HfPosencError) as error:
        raise UsageError(
            f"--calibrate {arguments.calibrate}: {error}; --calibrate none leaves the calibration out"
        ) from None
    moved = "the scheme, queries and keys, and values if the base adds positions to its inputs"
    if isinstance(model, peft.PeftModel):
        moved = "the scheme and what the adapter trains"
    return {
        "method": arguments.calibrate,
        "moved": moved,
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
    """Return every layer's closed forms and its divergences, averaged over heads, and their means over layers."""
    stages = ("before", "closed", "after")
    layers = []
    for layer in report.layers:
        means = {name: getattr(layer, name).mean().item() for name in stages}
        layers.append({"index": layer.index, **means, "chosen": dict(Counter(layer.chosen))})
    return {
        "divergence": {name: statistics.fmean(layer[name] for layer in layers) for name in stages},
        "layers": layers,
    }


def record_in_config(model: PreTrainedModel, results: Results) -> None:
    """Record an earlier calibration in the config of a model.

    Args:
        model: patched model with the calibrated weights.
        results: entry that `calibrate` returned.
    """
    if results["method"] == "none" or results.get("kept") == NOTHING:
        return
    stage = "closed_form" if results.get("kept") == "closed_form" else results["method"]
    losses = HeldOutLoss(**results["windows_loss"]) if "windows_loss" in results else None
    record_calibration(model, stage, results["tokens"], losses)


class InterruptibleSteps(StopRequest):
    """Context manager in which Ctrl-C waits until a calibration step has ended and its state is saved.

    Ctrl-C stops at once before the first step, after the last step, and the second time. Among several processes it
    always does, because they may be in different steps.

    Args:
        steps: number of steps.
        accelerator: accelerator of the processes.
    """

    signals = (signal.SIGINT,)

    def __init__(self, steps: int, accelerator: Accelerator) -> None:
        """Stop at once before the first step."""
        self.steps, self.between_steps = steps, False
        self.single_process = accelerator.num_processes == 1

    def listen(self) -> None:
        """Install the handler between the first step and the last; elsewhere Ctrl-C stops at once."""
        if self.between_steps:
            super().listen()

    def step_done(self, step: int, loss: float) -> None:
        """Raise KeyboardInterrupt if Ctrl-C came during the step; `Matching` calls this after every step."""
        if self.received:
            raise KeyboardInterrupt
        self.restore()
        self.between_steps = self.single_process and step < self.steps
        self.listen()
