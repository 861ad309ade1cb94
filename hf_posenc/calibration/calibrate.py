"""calibrate(model, tokens): closed forms first, then attention matched layer by layer, on the base's own inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..errors import CheckpointError, NotPatchedError
from ..hub import CALIBRATION
from ..modes import evaluation
from ..patching.state import alone, patch_of, without_adapter
from ..patching.wrappers import check_in_place, check_unquantized, check_unwrapped
from .choose import CANDIDATES, close, settle
from .match import LOSSES, Matching, match, movable
from .pair import Pair
from .state import FirstStage, StateFile, digest_of, digest_of_tokens

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
    closed_windows: int = 24,
    held_out: int = 8,
    weights: str | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    rate: float | None = None,
    weight_rate: float | None = None,
    loss: str | None = None,
    lengths: Sequence[int] | None = None,
    seed: int | None = None,
    state_file: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
    progress: bool = False,
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
        closed_windows: windows that the closed forms average over, at most.
        held_out: windows, the last ones, that only decide and measure.
        weights: what the second stage moves: `scheme`, its parameters alone; `query_key` (None), with all weights of
            the attention that make queries and keys; `adapter`, with those of them alone that are trained: of LoRA.
        steps: of the second stage; None means 100.
        batch_size: windows in each step; None means 4.
        rate: learning rate of the scheme's parameters in the second stage; it falls to 0 as a cosine. None means 2e-2.
        weight_rate: of weights; None means 1e-3.
        loss: what the second stage lowers: `attention` (None), the KL divergence from the base's attention; `outputs`,
            the squared error of what heads read, relative to the mean square of the base's values.
        lengths: of the windows that the second stage reads, as many steps of each; they divide T, and
            windows are cut, so that every step reads the same number of tokens. By default all are of T tokens.
        seed: of the order of windows in the second stage; None means 0.
        state_file: where the second stage writes its state, whole or not at all. If the file is there already, it goes
            on from there, and ends with the same numbers as one that was never interrupted; the first stage is not run
            again. By default nothing is written.
        save_every: steps from one state to the next, beside those before the first step, after the last, and after one
            whose `on_step` raises an error; None means 25.
        on_step: called after each step of the second stage with its number, from 1, and the mean loss.
        progress: show a progress bar of the windows that the closed forms read, and one of the second stage's steps.

    Returns:
        What was found, by layer and head.

    Raises:
        NotPatchedError: if the model is not patched; or no `base` is given, and the model was loaded patched, or a
            calibration has moved its own weights.
        UnsupportedModelError: if it is wrapped, sharded, offloaded or quantised, or nobody sees the base's scores.
        ValueError: for choices that do not exist, numbers out of range, arguments of a stage that is left out, too few
            windows, windows longer than the base was made for, a second stage that has nothing to move, and attention
            that is no number. Nothing has changed then, as after any error of the first stage.
        CheckpointError: if what is in `state_file` is not the state of a calibration with the same arguments, tokens
            and model, patched in the same way.
        OSError: if the state cannot be read or written.
    """
    given = {
        "weights": weights,
        "steps": steps,
        "batch_size": batch_size,
        "rate": rate,
        "weight_rate": weight_rate,
        "loss": loss,
        "lengths": None if lengths is None else tuple(lengths),
        "seed": seed,
        "state_file": None if state_file is None else Path(state_file),
        "save_every": save_every,
    }
    how = second_stage(stage, **{name: value for name, value in given.items() if value is not None})
    check_positive(closed_windows=closed_windows, held_out=held_out)
    check_unwrapped(model, "calibrate the model")
    inner = without_adapter(model)
    patch = patch_of(inner)
    if patch is None:
        raise NotPatchedError(f"this {type(inner).__name__} is not patched: there is nothing to calibrate")
    check_in_place(inner, "calibrate the model")
    check_unquantized(inner, "calibrate the model")
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.shape[1] < 2:
        raise ValueError(f"tokens must be integers (windows, length), not {tuple(tokens.shape)} of {tokens.dtype}")
    if how is not None:
        check_lengths(how.lengths, tokens.shape[1])
    if len(tokens) <= held_out:
        raise ValueError(
            f"{len(tokens)} windows are too few: {held_out} are held out, and at least one is needed beside"
        )
    if base is None and patch.undo is None:
        raise NotPatchedError("this model was loaded patched, which does not hold the stock positions: give the base")
    if base is None and patch.moved:
        raise NotPatchedError(
            "a calibration has moved this model's own weights, so that it is no longer the base it was: give the base"
        )
    with alone(inner, "calibrate the model"), evaluation(inner):
        pair = Pair(inner, patch, base, tokens, held_out, keeps_mean=inner is model)
        try:
            found = _run(pair, how, tokens, closed_windows, on_step, progress)
            write_down(inner, stage, found.tokens)
            return found
        finally:
            moved = base is not None or any(not weight.equal(before) for weight, before in pair.originals)
            patch.moved = patch.moved or moved


def write_down(model: PreTrainedModel, stage: str, tokens: int) -> None:
    """Say in a patched model's config that it was calibrated: its checkpoints and their cards say so from then on."""
    config = without_adapter(model).config
    config.position_encoding = {**config.position_encoding, CALIBRATION: {"stage": stage, "tokens": tokens}}


def second_stage(stage: str, **given: Any) -> Matching | None:
    """Return how the second stage goes, or None if it is left out.

    Args:
        stage: as in `calibrate`.
        **given: those arguments of `calibrate` that are given and that only the second stage reads.

    Raises:
        ValueError: for a choice that does not exist, a number out of range, and what is given and changes nothing.
    """
    _check_one_of("stage", stage, STAGES)
    for name in ignored(stage, given.get("weights", Matching.weights)):
        if name in given:
            reason = f"stage={stage!r}" if stage == "closed_form" else f"weights={given['weights']!r}"
            raise ValueError(f"{name} changes nothing with {reason}: leave it out")
    if "save_every" in given and "state_file" not in given:
        raise ValueError("save_every changes nothing without a state_file: leave it out")
    if stage == "closed_form":
        return None
    how = Matching(**given)
    _check_one_of("weights", how.weights, WEIGHTS)
    _check_one_of("loss", how.loss, tuple(LOSSES))
    counts = {"steps": how.steps, "batch_size": how.batch_size, "save_every": how.save_every}
    check_positive(**counts, rate=how.rate, weight_rate=how.weight_rate)
    if how.lengths is not None and not 0 < len(how.lengths) <= how.steps:
        raise ValueError(f"{how.steps} steps cannot be divided among the {len(how.lengths)} lengths {how.lengths}")
    return how


def check_lengths(lengths: tuple[int, ...] | None, whole: int) -> None:
    """Check that windows of `whole` tokens can be cut into windows of each length; a ValueError says which cannot."""
    for length in lengths or ():
        if length < 2 or whole % length:
            raise ValueError(
                f"windows of {whole} tokens cannot be cut into windows of {length}: lengths must divide {whole}"
            )


def ignored(stage: str, weights: str) -> tuple[str, ...]:
    """Return the arguments of `calibrate` that change nothing beside these two."""
    if stage == "closed_form":
        return tuple(field.name for field in fields(Matching))
    return ("weight_rate",) if weights == "scheme" else ()


def check_positive(**numbers: float) -> None:
    """Check that numbers, by name, are positive and finite; a ValueError says which is not."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive, not {number}")


def _check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _run(
    pair: Pair,
    how: Matching | None,
    tokens: Tensor,
    windows: int,
    on_step: Callable[[int, float], None] | None,
    progress: bool,
) -> Calibration:
    moved = ([], []) if how is None else movable(pair, how.weights)
    if how is not None and not any(moved):
        raise ValueError(
            f"weights={how.weights!r} leaves nothing to move: {pair.patch.name} has no parameters of its own"
        )
    state = None if how is None or how.state_file is None else _state(pair, how, moved, tokens, windows)
    found = None if state is None else state.first_stage
    if found is None:
        try:
            pair.keep_mean()
            reads = 2 * (len(pair.train[:windows]) + len(pair.held))
            with tqdm(total=reads, desc="closed forms", unit="window", disable=not progress, leave=False) as pair.bar:
                closed = close(pair, windows)
        except BaseException:
            pair.restore()
            raise
        curves = {index: each.mean_difference.float().cpu() for index, each in closed.averages.items()}
        parameters = [p.detach().clone() for part in moved for p in part]
        found = FirstStage(closed.before, closed.after, closed.chosen, curves, parameters)
    after = found.closed
    if how is not None:
        if state is not None:
            state.first_stage = found
        done = 0 if state is None else state.step
        with tqdm(total=how.steps, initial=done, desc="calibrating", unit="step", disable=not progress) as bar:

            def stepped(step: int, divergence: float) -> None:
                bar.set_postfix(**{how.loss: f"{divergence:.3f}"}, refresh=False)
                bar.update()
                if on_step is not None:
                    on_step(step, divergence)

            match(pair, moved, how, state, stepped)
        settle(pair, windows)
        try:
            after = pair.divergence()
            ended, began = (sum(each.sum() for each in part.values()) for part in (after, found.closed))
            worse = how.loss == "attention" and ended > began
        except ValueError:  # the steps have run off to infinity
            worse = True
        if worse:  # a base that was met already, or rates that are too high
            after = found.closed
            with torch.no_grad():
                for p, value in zip((p for part in moved for p in part), found.parameters, strict=True):
                    p.copy_(value)
    fits = []
    for index in pair.layers:
        shown, multiplies = pair.curve(index)
        fits.append(
            LayerFit(
                index,
                found.before[index],
                found.closed[index],
                after[index],
                found.chosen[index],
                found.base_curve[index],
                shown,
                multiplies,
            )
        )
    return Calibration(pair.patch.name, tuple(fits), tokens.numel())


def _state(
    pair: Pair, how: Matching, moved: tuple[list[nn.Parameter], list[nn.Parameter]], tokens: Tensor, windows: int
) -> StateFile:
    """Return the state of this calibration, read if there is one; all processes have the same."""
    assert how.state_file is not None
    processes = dist.get_world_size() if dist.is_initialized() else 1
    choices = {name: value for name, value in asdict(how).items() if name not in ("state_file", "save_every")}
    of = choices | {
        "scheme": " + ".join(map(str, pair.patch.schemes)),
        "digest of the model": digest_of(pair.model),
        "digest of the base": "that of the model" if pair.other is None else digest_of(pair.other),
        "tokens": digest_of_tokens(tokens),
        "held_out": len(pair.held),
        "closed_windows": windows,
        "number of parameters that move": sum(map(len, moved)),
        "number of processes": processes,
    }
    movables = moved if how.weights == "query_key" else movable(pair, "query_key")  # closed forms move weights too
    reached = {id(p) for part in movables for p in part} | {id(pair.tokens)}
    names = {name: p for name, p in pair.model.named_parameters() if id(p) in reached}
    state = StateFile(how.state_file, of, names)
    if processes > 1:
        steps: list[Any] = [None] * processes
        dist.all_gather_object(steps, (state.step, state.first_stage is None))
        if len(set(steps)) > 1:
            raise CheckpointError(f"the processes do not all see the same {how.state_file}: give them a shared folder")
    return state
