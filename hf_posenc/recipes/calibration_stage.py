"""Calibration before fine-tuning: choose windows of the training text, calibrate, report the result."""

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from accelerate import Accelerator
from torch import Tensor, nn

import hf_posenc
from hf_posenc import Matching

from ..checkpoints.scheme_entry import CALIBRATION
from ..model.patch_record import without_adapter
from .corpus import Document, Windows, order
from .options import Count, Length, UsageError, as_usage_error

MAX_DEFAULT_LENGTH = 256
"""Upper limit of the default window length, in tokens. Short windows cost less, and suffice for a model that looks no
further back."""
UNCHANGED = 1e-5
"""Increase of the held-out loss, in nats, below which a swap has changed nothing but rounding errors."""


@dataclass(kw_only=True)
class CalibrationArguments:
    """Calibration, between the swap and the fine-tuning.

    Args:
        calibrate: fit the scheme, and the weights of the attention, to the base before fine-tuning. closed_form:
            solve equations; matching: then also match outputs of layers, and logits, in steps; none: a plain swap.
        calibrate_steps: optimizer steps that match outputs, and as many that match logits, on batches of 4 windows.
        calibrate_windows: windows of the training text to calibrate with, up to 8 held-out windows included.
        calibrate_length: tokens in a window. Attention is matched at shorter distances; at longer ones transformer_xl
            starts with little weight (default: the length the base was trained at, 256 at most).
    """

    calibrate: Literal["matching", "closed_form", "none"] = "matching"
    calibrate_steps: Count = Matching.steps
    calibrate_windows: Count = 400
    calibrate_length: Length | None = None


def windows(train: list[Document], trained_length: int, length: int | None, count: int, seed: int) -> Tensor:
    """Return different windows of the training text, (N, T), drawn at random.

    Args:
        train: training text.
        trained_length: length that the base was trained at.
        length: tokens in a window; None takes the default.
        count: most windows.
        seed: seed of the draw.

    Raises:
        UsageError: if the text is too short, or the windows would be longer than the base was trained at.
    """
    length = length or min(trained_length, MAX_DEFAULT_LENGTH)
    if length > trained_length:
        raise UsageError(
            f"--calibrate-length {length}: the base was trained at {trained_length} tokens, "
            f"and can be imitated up to that length: give {trained_length} or less"
        )
    found = Windows(train, length)
    count = min(count, len(found))
    if count < 9:  # of which up to 8 are held out
        raise UsageError(
            f"--calibrate: the training text has {found.total:,} tokens, but 9 windows of {length} are needed: give "
            "more text, shorter or more windows, or --calibrate none"
        )
    return found.tokens[order(seed, len(found), 0, count)]


def calibrate(
    accelerator: Accelerator,
    model: nn.Module,
    tokens: Tensor,
    matching: Matching | None,
    *,
    loss: Callable[[nn.Module], float],
    base_loss: float,
) -> dict[str, Any]:
    """Calibrate in place. Every process must call this, with the same windows.

    Args:
        accelerator: accelerator of the processes.
        model: patched model, on the device, not sharded. If PEFT has wrapped it, only weights that it trains change.
        tokens: windows from `windows`.
        matching: the steps of the second stage; None for closed forms alone.
        loss: function that returns the held-out loss.
        base_loss: `loss` of the base.

    Returns:
        The entry of results.json: divergences by layer, held-out losses, tokens.

    Raises:
        UsageError: if this model cannot be calibrated.
    """
    losses = {"length": tokens.shape[1], "base": base_loss, "swapped": loss(model)}
    if abs(losses["swapped"] - base_loss) < UNCHANGED:
        return {"method": "none", "why": "the model predicts what the base predicts", "held_out_loss": losses}
    with as_usage_error("--calibrate none leaves the calibration out: ", ValueError, hf_posenc.HfPosencError):
        report = hf_posenc.calibrate(model, tokens, matching=matching, progress=accelerator.is_main_process)
    stages = ("before", "closed", "after")
    layers: list[dict[str, Any]] = [
        {"index": layer.index, "chosen": dict(Counter(layer.chosen))}
        | {name: getattr(layer, name).mean().item() for name in stages}
        for layer in report.layers
    ]
    return {
        "method": "closed_form" if matching is None else "matching",
        "tokens": report.tokens,
        "steps": 0 if matching is None else matching.steps * len(matching.trials("loss")),
        "divergence": {name: statistics.fmean(layer[name] for layer in layers) for name in stages},
        "layers": layers,
        "held_out_loss": losses | {"calibrated": loss(model)},
        "kept": report.kept,
        "windows_loss": asdict(report.held_out_loss),
        "advice": report.advice(),
        "remarks": report.remarks(),
        "record": without_adapter(model).config.position_encoding.get(CALIBRATION),
    }


def record_again(model: nn.Module, results: dict[str, Any]) -> None:
    """Record an earlier calibration, the entry that `calibrate` returned, in the config of a model with its weights."""
    if record := results["record"]:
        config = without_adapter(model).config
        config.position_encoding = {**config.position_encoding, CALIBRATION: record}
