"""Calibration before fine-tuning: choose windows of the training text, calibrate, and report it."""

import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peft
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import Calibration, Matching

from ..calibration.calibrate import record_calibration
from ..calibration.report import NOTHING, HeldOutLoss
from .corpus import Document, Text, Windows, order
from .measuring import held_out_loss
from .options import UsageError, at_least, one_of, refuse

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
class CalibrationArguments:
    """Calibration, between the swap and the fine-tuning."""

    calibrate: str = field(
        default="attention",
        metadata={
            "help": f"{' | '.join(METHODS)}: before fine-tuning, put into the scheme and into queries and keys what "
            "the base's positions did, by closed forms and then by matching attention; none is the plain swap"
        },
    )
    calibrate_steps: int = field(
        default=50, metadata={"help": f"steps that match attention, of {Matching.batch_size} windows each"}
    )
    calibrate_windows: int = field(
        default=400,
        metadata={
            "help": f"windows of the training text to calibrate with, {HELD_OUT} of which only decide and measure"
        },
    )
    calibrate_length: int | None = field(
        default=None,
        metadata={
            "help": "tokens of each of these windows: the distances at which attention is matched; beyond them "
            "transformer_xl starts with little weight (default: the length the base was trained at, "
            f"{LONGEST} at most)",
            "metavar": "N",
        },
    )


def check(arguments: Any) -> None:
    """Check what can be known without text and model; the learning rate gets its default, if none is given."""
    one_of(arguments, "calibrate", METHODS)
    at_least(arguments, 1, "calibrate_steps")
    at_least(arguments, HELD_OUT + 1, "calibrate_windows")
    if arguments.calibrate == "none":
        for name in ("calibrate_windows", "calibrate_length"):
            refuse(arguments, name, "is of a calibration, and --calibrate none makes none")
    if arguments.calibrate_length is not None:
        at_least(arguments, 2, "calibrate_length")
    if arguments.calibrate != "attention":
        refuse(arguments, "calibrate_steps", f"is of --calibrate attention, not of {arguments.calibrate}")
    if arguments.learning_rate is None:
        arguments.learning_rate = PLAIN_RATE if arguments.calibrate == "none" else CALIBRATED_RATE


def windows(train: list[Document], trained_length: int, arguments: Any) -> Tensor:
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
    count = min(arguments.calibrate_windows, len(found))
    return found.tokens[order(arguments.seed, len(found), 0, count)]


def skipped(why: str) -> dict[str, Any]:
    """Return the entry of the results where nothing was calibrated."""
    return {"method": "none", "why": why}


def loss_at(text: Text, length: int) -> Callable[[PreTrainedModel], float]:
    """Return a function that measures held-out loss in windows of this length, or of all the text if it is shorter."""
    return held_out_loss(text, min(length, sum(len(document.tokens) for document in text.held_out)))


def calibrate(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokens: Tensor,
    arguments: Any,
    *,
    loss: Callable[[PreTrainedModel], float],
    base_loss: float,
    state_file: Path,
) -> dict[str, Any]:
    """Calibrate in place; every process calls it with the same windows.

    Args:
        accelerator: accelerator of the processes.
        model: patched, whole, on the device; PEFT may have wrapped it, and then only what it trains is moved.
        tokens: from `windows`.
        arguments: options of the calibration, and the seed.
        loss: from `loss_at`.
        base_loss: what it gives for the base.
        state_file: state of the steps that match attention, from which they go on if it is there.

    Returns:
        The entry of the results: divergences by layer, held-out losses, tokens, seconds.

    Raises:
        UsageError: where this model cannot be calibrated.
    """
    swapped = loss(model)
    losses = {"length": tokens.shape[1], "base": base_loss, "swapped": swapped}
    if abs(swapped - base_loss) < UNCHANGED:
        return skipped("the model predicts what the base predicts") | {"held_out_loss": losses}
    steps = arguments.calibrate_steps if arguments.calibrate == "attention" else 0
    start = time.perf_counter()
    waiting = Steps(steps, accelerator)
    matching = None
    if steps:
        matching = Matching(
            steps=steps,
            batch_size=max(1, Matching.batch_size // accelerator.num_processes),
            seed=arguments.seed,
            state_file=state_file,
            on_step=waiting.made,
        )
    try:
        with waiting:
            report = hf_posenc.calibrate(
                model, tokens, held_out=HELD_OUT, matching=matching, progress=accelerator.is_main_process
            )
    except (ValueError, hf_posenc.HfPosencError) as error:
        raise UsageError(f"--calibrate {arguments.calibrate}: {error}; --calibrate none swaps plainly") from None
    adapted = isinstance(model, peft.PeftModel)
    return {
        "method": arguments.calibrate,
        "moved": "the scheme and what the adapter trains" if adapted else "the scheme, queries and keys",
        "windows": len(tokens),
        "tokens": report.tokens,
        "steps": steps,
        "seconds": round(time.perf_counter() - start, 1),
        **by_layer(report),
        "held_out_loss": losses | {"calibrated": loss(model)},
        "kept": report.kept,
        "windows_loss": asdict(report.held_out_loss),
        "remarks": report.remarks(),
    }


def by_layer(report: Calibration) -> dict[str, Any]:
    """Return each layer's divergences, averaged over heads, and its closed forms; and the means over layers."""
    stages = ("before", "closed", "after")
    layers = [
        {
            "index": each.index,
            **{name: getattr(each, name).mean().item() for name in stages},
            "chosen": dict(Counter(each.chosen)),
        }
        for each in report.layers
    ]
    return {
        "divergence": {name: statistics.fmean(layer[name] for layer in layers) for name in stages},
        "layers": layers,
    }


def write_down(model: PreTrainedModel, found: dict[str, Any]) -> None:
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


class Steps:
    """Context manager in which Ctrl-C waits for the end of a calibration step, and for its whole state.

    It stops at once, as usual, before the first step, after the last, and the second time; and always among several
    processes, because they may be in different steps.

    Args:
        steps: number of steps.
        accelerator: accelerator of the processes.
    """

    def __init__(self, steps: int, accelerator: Accelerator) -> None:
        """Stop at once before the first step."""
        self.steps, self.waits = steps, accelerator.num_processes == 1
        self.stopping = False

    def __enter__(self) -> "Steps":
        self.before = signal.getsignal(signal.SIGINT)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def made(self, step: int, loss: float) -> None:
        """Raise the KeyboardInterrupt that waits, if there is one; called after each step."""
        if self.stopping:
            raise KeyboardInterrupt
        if self.waits:
            signal.signal(signal.SIGINT, self.before if step == self.steps else self._wait)

    def _wait(self, *_: object) -> None:
        self.stopping = True
        signal.signal(signal.SIGINT, self.before)
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)
