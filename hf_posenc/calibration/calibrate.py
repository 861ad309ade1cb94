"""calibrate(model, tokens): closed forms first, then attention matched layer by layer, on the base's own inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..checkpoints.entry import CALIBRATION, STAGES
from ..errors import CheckpointError, NotPatchedError
from ..live.eval_mode import evaluation
from ..live.state import adapted_parts, alone, patch_of, without_adapter
from ..live.wrappers import check_in_place, check_unquantized, check_unwrapped
from ..modules import PositionModule
from ..spelling import did_you_mean
from .choose import NOISE, close, settle
from .match import LOSSES, Matching, match, movable
from .pair import Pair
from .report import NOTHING, Calibration, HeldOutLoss, LayerFit
from .state import FirstStage, StateFile, digest_of, digest_of_tokens
from .teacher import check_base, check_head, check_tokens

WEIGHTS = ("scheme", "query_key", "adapter")
JUDGES = ("loss", "attention")


def calibrate(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    stage: str = "attention",
    base: PreTrainedModel | None = None,
    closed_windows: int = 24,
    held_out: int = 8,
    judge: str = "loss",
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

    Closed forms come first: for each layer and head several are tried on held-out windows, and the one whose attention
    is closest to the base's is kept. With `stage="attention"` gradient steps then match the attention of each layer to
    the base's, on the base's own hidden states: no layer waits for those below, and no language-model loss is trained.

    The held-out language-model loss is measured before and after each stage, and decides: what predicts worse is put
    back, and the report says so. Memory grows with the number of distances, not with its square.

    Args:
        model: patched, whole, on one device; also with an adapter of PEFT, and then only what the adapter holds moves.
        tokens: (N, T) int64 or int32: windows of text without padding, as long as the base was made for; at least
            `held_out + 1`.
        stage: `closed_form`, or `attention` for both stages.
        base: what to follow: another model of the same type, sizes, vocabulary and dtype. None means what the model was
            before it was patched, which is kept for undoing that.
        closed_windows: windows that the closed forms average over, at most.
        held_out: windows, the last ones, that only decide and measure.
        judge: what decides on those windows. `loss`: the language-model loss. What raises it by more than 0.01 nats is
            put back; where heads chosen by their attention predict worse, all get the one form that predicts best.
            `attention`: how close attention comes to the base's, whatever is predicted.
        weights: what the second stage moves. `scheme`: the scheme's parameters alone. `query_key` (None): also all
            weights of the attention that make queries and keys. `adapter` (None under an adapter): also those of them
            that are trained, such as LoRA's.
        steps: of the second stage; None means 100.
        batch_size: windows in each step; None means 4.
        rate: learning rate of the scheme's parameters in the second stage; it falls to 0 as a cosine. None means 2e-2.
        weight_rate: of weights; None means 1e-3.
        loss: what the second stage lowers. `attention`: the KL divergence from the base's attention. `outputs`: the
            squared error of what heads read, relative to the mean square of the base's values. None means the first,
            and then the second if the first predicts worse.
        lengths: of the windows that the second stage reads, as many steps of each; they divide T, and
            windows are cut, so that every step reads the same number of tokens. By default all are of T tokens.
        seed: of the order of windows in the second stage; None means 0.
        state_file: where the second stage writes its state, whole or not at all. If the file is there already, it goes
            on from there, and ends with the same numbers as one that was never interrupted; the first stage is not run
            again. By default nothing is written.
        save_every: steps from one state to the next, beside those before the first step, after the last, and after one
            whose `on_step` raises an error; None means 25.
        on_step: called after each step of the second stage with its number, from 1, and the mean loss.
        progress: show progress bars: of the windows that the closed forms read, of the layers that are fitted, and of
            the second stage's steps.

    Returns:
        What was found, by layer and head.

    Raises:
        NotPatchedError: if the model is not patched, or no `base` is given and the model was loaded patched.
        UnsupportedModelError: if it is wrapped, sharded, offloaded or quantised, or nobody sees the base's scores.
        ValueError: for choices that do not exist, numbers out of range, arguments of a stage that is left out; tokens
            that are no integers of the vocabulary, too few windows, or windows longer than the base was made for; a
            base that is the model itself or another kind of model; none given, where the model's own weights have moved
            since it was patched; under an adapter, what it would not hold; under `torch.inference_mode`; a second stage
            that has nothing to move; attention that is no number. Nothing has changed then, as after any error of the
            first stage.
        CheckpointError: if what is in `state_file` is not the state of a calibration with the same arguments, tokens
            and model, patched in the same way. Nothing has changed then.
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
    check_counts(closed_windows=closed_windows, held_out=held_out)
    _check_one_of("judge", judge, JUDGES)
    check_unwrapped(model, "calibrate the model")
    inner = without_adapter(model)
    patch, adapted = patch_of(inner), inner is not model or bool(adapted_parts(inner))
    if patch is None:
        raise NotPatchedError(f"this {type(inner).__name__} is not patched: there is nothing to calibrate")
    if torch.is_inference_mode_enabled():
        raise ValueError("calibrate takes gradients, which torch.inference_mode() forbids: call it outside")
    if adapted:
        how = _for_adapter(inner, how, weights)
    check_in_place(inner, "calibrate the model")
    check_unquantized(inner, "calibrate the model")
    check_head(inner)
    if any(p.is_inference() for p in inner.parameters()):
        raise ValueError(
            "weights of this model were made under torch.inference_mode(), and take no gradients: make it outside"
        )
    check_tokens(tokens, inner, held_out)
    if how is not None:
        check_lengths(how.lengths, tokens.shape[1])
    check_base(inner, patch, base)
    exact = torch.autocast(next(inner.parameters()).device.type, enabled=False)
    with alone(inner, "calibrate the model"), evaluation(inner), torch.enable_grad(), exact:
        pair = Pair(inner, patch, base, tokens, held_out, own_weights=not adapted)
        return _run(pair, stage, how, closed_windows, judge, on_step, progress)


def write_down(model: PreTrainedModel, stage: str, tokens: int, held_out_loss: HeldOutLoss | None = None) -> None:
    """Say in a patched model's config that it was calibrated: its checkpoints and their cards say so from then on.

    Args:
        model: patched, also below an adapter.
        stage: whose weights it holds, as in `calibrate`.
        tokens: that were read.
        held_out_loss: along the way; None where the calibration has not come to its end.
    """
    config = without_adapter(model).config
    entry: dict[str, Any] = {"stage": stage, "tokens": tokens}
    if held_out_loss is not None:
        losses = {name: round(loss, 6) for name, loss in asdict(held_out_loss).items()}
        entry["held_out_loss"] = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    config.position_encoding = {**config.position_encoding, CALIBRATION: entry}


def _for_adapter(inner: PreTrainedModel, how: Matching | None, weights: str | None) -> Matching | None:
    """Return how the second stage goes under an adapter, which must hold all that moves.

    Raises:
        ValueError: if it does not.
    """
    if weights == "query_key":
        raise ValueError(
            "weights='query_key' moves weights that no adapter holds: leave it out (weights='adapter'), or calibrate "
            "the model before the adapter is added"
        )
    placed = [module for module in inner.modules() if isinstance(module, PositionModule)]
    numbers = [p for module in placed for p in module.parameters()]
    if numbers and not any(p.requires_grad for p in numbers):
        raise ValueError(
            "the adapter neither trains nor saves the scheme's parameters, so that it would lose what calibration puts "
            "into them: make it with hf_posenc.lora_config(model), or calibrate the model before the adapter is added"
        )
    return how if how is None or weights is not None else replace(how, weights="adapter")


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
    if how.loss is not None:
        _check_one_of("loss", how.loss, tuple(LOSSES))
    check_counts(steps=how.steps, batch_size=how.batch_size, save_every=how.save_every)
    check_positive(rate=how.rate, weight_rate=how.weight_rate)
    check_integers(seed=how.seed)
    if how.lengths is not None and not 0 < len(how.lengths) <= how.steps:
        raise ValueError(f"{how.steps} steps cannot be divided among the {len(how.lengths)} lengths {how.lengths}")
    return how


def check_lengths(lengths: tuple[int, ...] | None, whole: int) -> None:
    """Check that windows of `whole` tokens can be cut into windows of each length; a ValueError says which cannot."""
    for length in lengths or ():
        check_integers(lengths=length)
        if length < 2 or whole % length:
            raise ValueError(
                f"windows of {whole} tokens cannot be cut into windows of {length}: lengths must divide {whole}"
            )


def ignored(stage: str, weights: str) -> tuple[str, ...]:
    """Return the arguments of `calibrate` that change nothing beside these two."""
    if stage == "closed_form":
        return tuple(field.name for field in fields(Matching))
    return ("weight_rate",) if weights == "scheme" else ()


def check_integers(**numbers: Any) -> None:
    """Check that numbers, by name, are integers; a ValueError says which is not."""
    for name, number in numbers.items():
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise ValueError(f"{name} must be an integer, not {number!r}")


def check_counts(**numbers: Any) -> None:
    """Check that numbers, by name, are positive integers; a ValueError says which is not."""
    check_integers(**numbers)
    check_positive(**numbers)


def check_positive(**numbers: Any) -> None:
    """Check that numbers, by name, are positive and finite; a ValueError says which is not."""
    for name, number in numbers.items():
        if not isinstance(number, Real):
            raise ValueError(f"{name} must be a number, not {number!r}")
        if not 0 < float(number) < math.inf:
            raise ValueError(f"{name} must be positive, not {number}")


def _check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}")


def _run(
    pair: Pair,
    stage: str,
    how: Matching | None,
    windows: int,
    judge: str,
    on_step: Callable[[int, float], None] | None,
    progress: bool,
) -> Calibration:
    moved = ([], []) if how is None else movable(pair, how.weights)
    if how is not None and not any(moved):
        raise ValueError(
            f"weights={how.weights!r} leaves nothing to move: {pair.patch.name} has no parameters of its own"
        )
    state = None if how is None or how.state_file is None else _state(pair, how, moved, windows, judge)
    found = None if state is None else state.first_stage
    if found is None:
        try:
            found = _first_stage(pair, moved, windows, judge, progress)
        except BaseException:
            pair.restore()
            raise
    said_before = pair.model.config.position_encoding
    read = set(range(len(pair.train[:windows])))
    if how is not None:
        read |= how.read(len(pair.train), _processes())
    count = (len(read) + len(pair.held)) * pair.held.shape[1]
    write_down(pair.model, stage, count)
    kept, after, losses, put_back = "closed_form", found.closed, found.losses, dict(found.put_back)
    if how is not None:
        if state is not None:
            state.first_stage = found
        kept, after, loss = _second_stage(pair, moved, found, how, state, windows, judge, put_back, on_step, progress)
        losses = losses | {"calibrated": loss}
    held_out_loss = HeldOutLoss(**({"calibrated": losses["closed_form"]} | losses))
    if kept == "closed_form" and not pair.has_moved():
        kept = NOTHING
    if kept == NOTHING:
        pair.model.config.position_encoding = said_before
    else:
        write_down(pair.model, "closed_form" if kept == "closed_form" else "attention", count, held_out_loss)
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
    return Calibration(pair.patch.name, tuple(fits), count, held_out_loss, kept, judge, put_back, found.apart)


def _first_stage(
    pair: Pair, moved: tuple[list[nn.Parameter], list[nn.Parameter]], windows: int, judge: str, progress: bool
) -> FirstStage:
    """Put the closed forms in, unless the plain swap predicts better."""
    losses = {"base": pair.loss_of_base(), "swapped": pair.loss()}
    pair.keep_mean()
    reads = 2 * (len(pair.train[:windows]) + len(pair.held))
    with tqdm(total=reads, desc="closed forms", unit="window", disable=not progress, leave=False) as pair.bar:
        closed = close(pair, windows, judge)
        if not math.isfinite(losses["base"]):
            raise ValueError(
                "the base's loss on the held-out windows is no number: look for weights that are not finite"
            )
        after, chosen, losses["closed_form"], put_back = closed.after, closed.chosen, closed.loss, closed.put_back
        if judge == "loss" and closed.loss > losses["swapped"] + NOISE:
            put_back = put_back | {"closed_form": closed.loss}
            pair.restore()
            pair.bar.total += len(pair.held)
            after, losses["closed_form"] = pair.divergence(), losses["swapped"]
            chosen = {index: ("as it was",) * len(names) for index, names in chosen.items()}
    curves = {index: each.mean_difference.float().cpu() for index, each in closed.averages.items()}
    parameters = [p.detach().clone() for part in moved for p in part]
    return FirstStage(closed.before, after, chosen, curves, parameters, losses, put_back, closed.apart)


def _second_stage(
    pair: Pair,
    moved: tuple[list[nn.Parameter], list[nn.Parameter]],
    found: FirstStage,
    how: Matching,
    state: StateFile | None,
    windows: int,
    judge: str,
    put_back: dict[str, float],
    on_step: Callable[[int, float], None] | None,
    progress: bool,
) -> tuple[str, dict[int, Tensor], float]:
    """Match, and keep the first trial that the judge accepts; what it does not goes into `put_back`, with its loss.

    Returns:
        What is kept, the divergences then, and the held-out loss.
    """
    if state is not None:
        put_back |= state.put_back
    for trial in how.trials(judge):
        if trial in put_back:  # before the state was written
            continue
        if state is not None:
            state.begin(trial, {name: loss for name, loss in put_back.items() if name in LOSSES})
        done = 0 if state is None else state.step
        with tqdm(total=how.steps, initial=done, desc="calibrating", unit="step", disable=not progress) as bar:

            def stepped(step: int, value: float, trial: str = trial, bar: Any = bar) -> None:
                bar.set_postfix(**{trial: f"{value:.3f}"}, refresh=False)
                bar.update()
                if on_step is not None:
                    on_step(step, value)

            match(pair, moved, how, trial, state, stepped)
        settle(pair, windows)
        loss = pair.loss()
        best = min(found.losses["swapped"], found.losses["closed_form"])
        try:
            after = pair.divergence()
            ended, began = (sum(each.sum() for each in part.values()) for part in (after, found.closed))
            closer = loss <= best if trial == "outputs" else bool(ended <= began)
        except ValueError:  # the steps have run off to infinity
            loss, closer = math.inf, False
        if judge == "attention":
            keep = closer if trial == "attention" else math.isfinite(loss)
        else:
            keep = loss < best - NOISE or (loss <= best + NOISE and closer)
        if keep:
            return trial, after, loss
        put_back[trial] = loss
        with torch.no_grad():
            for p, value in zip((p for part in moved for p in part), found.parameters, strict=True):
                p.copy_(value)
        if loss <= best + NOISE:  # nothing was lost that another trial could win
            break
    return "closed_form", found.closed, found.losses["closed_form"]


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _state(
    pair: Pair, how: Matching, moved: tuple[list[nn.Parameter], list[nn.Parameter]], windows: int, judge: str
) -> StateFile:
    """Return the state of this calibration, read if there is one; all processes have the same."""
    assert how.state_file is not None
    processes = _processes()
    choices = {name: value for name, value in asdict(how).items() if name not in ("state_file", "save_every")}
    of = choices | {
        "scheme": " + ".join(map(str, pair.patch.schemes)),
        "digest of the model": digest_of(pair.model),
        "digest of the base": "that of the model" if pair.other is None else digest_of(pair.other),
        "tokens": digest_of_tokens(torch.cat([pair.train, pair.held])),
        "held_out": len(pair.held),
        "closed_windows": windows,
        "judge": judge,
        "number of parameters that move": sum(map(len, moved)),
        "number of processes": processes,
    }
    movables = moved if how.weights == "query_key" else movable(pair, "query_key")  # closed forms move weights too
    reached = {id(p) for part in movables for p in part} | {id(pair.tokens)}
    names = {name: p for name, p in pair.model.named_parameters() if id(p) in reached}
    state = StateFile(how.state_file, of, names, [p for part in moved for p in part])
    if processes > 1:
        steps: list[Any] = [None] * processes
        dist.all_gather_object(steps, (state.step, state.first_stage is None))
        if len(set(steps)) > 1:
            raise CheckpointError(f"the processes do not all see the same {how.state_file}: give them a shared folder")
    return state
