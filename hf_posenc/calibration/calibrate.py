"""calibrate(model, tokens): closed forms first, then attention matched layer by layer, on the base's own inputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..checkpoints.entry import CALIBRATION
from ..errors import CheckpointError
from ..live.eval_mode import evaluation
from ..live.state import adapted_parts, alone, without_adapter
from ..live.wrappers import check_unwrapped
from ..spelling import did_you_mean
from .candidates import NOISE, hold_tails, try_closed_forms
from .checks import check_adapter, check_base, check_model, check_tokens
from .matching import LOSSES, Matching, Movable, check_counts, check_one_of, match, movable
from .pair import Pair, put
from .report import NOTHING, Calibration, HeldOutLoss, LayerFit
from .state import FirstStage, StateFile, digest_of, digest_of_tokens

JUDGES = ("loss", "attention")


def calibrate(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    base: PreTrainedModel | None = None,
    held_out: int = 8,
    closed_windows: int = 24,
    matching: Matching | None = Matching(),  # noqa: B008 - it is frozen
    judge: str = "loss",
    progress: bool = False,
    **unknown: Any,
) -> Calibration:
    """Fit a scheme, and the projections of queries and keys, to what the base's positions did.

    Closed forms come first: for each layer and head several are tried on held-out windows, and the one whose attention
    is closest to the base's is kept. Gradient steps then match the attention of each layer to the base's (`matching`).
    They take place on the base's own hidden states, so no layer waits for those below. No language-model loss is
    trained.

    The held-out language-model loss is measured before and after each stage, and decides: what predicts worse is put
    back, and the report says so. Memory grows with the number of distances, not with its square.

    Args:
        model: patched, whole, on one device. Under an adapter of PEFT, only what the adapter holds moves.
        tokens: (N, T) int64 or int32: windows of text without padding, as long as the base was made for; at least
            `held_out + 1`.
        base: the model to follow: another one of the same type, sizes, vocabulary and dtype. None means what the model
            was before it was patched, which is kept for undoing that.
        held_out: number of windows, the last ones, that only decide and measure.
        closed_windows: number of windows that the closed forms average over, at most.
        matching: the second stage; None means closed forms alone.
        judge: what decides on the held-out windows. `loss`: the language-model loss. What raises it by more than 0.01
            nats is put back; where heads chosen by their attention predict worse, all get the one form that predicts
            best. `attention`: how close attention comes to the base's, whatever is predicted.
        progress: show progress bars: of the windows that the closed forms read, of the layers that are fitted, and of
            the second stage's steps.
        **unknown: none; a keyword that is a field of `Matching` is refused with a message that says so.

    Returns:
        What was kept, with the divergences of each layer and head, and the held-out losses.

    Raises:
        TypeError: for a keyword that does not exist.
        NotPatchedError: if the model is not patched, or no `base` is given and the model was loaded patched.
        UnsupportedModelError: if it is wrapped, sharded, offloaded or quantised, or predicts no tokens.
        ValueError: for choices that do not exist, numbers out of range; tokens that are no integers of the vocabulary,
            too few windows, or windows longer than the base was made for; a base that is the model itself or another
            kind of model; none given, where the model's own weights have moved since it was patched; under an adapter,
            what it would not hold; under `torch.inference_mode`; a second stage that has nothing to move; attention
            that is NaN or infinite. Nothing has changed then, as after any error of the first stage.
        CheckpointError: if `state_file` is not the state of a calibration with the same arguments, tokens and model,
            patched in the same way. Nothing has changed then.
        OSError: if the state cannot be read or written.
    """
    for name in unknown:
        raise TypeError(_unknown(name))
    if matching is not None and not isinstance(matching, Matching):
        raise ValueError(f"matching must be a Matching, or None for closed forms alone, not {matching!r}")
    check_counts(closed_windows=closed_windows, held_out=held_out)
    check_one_of("judge", judge, JUDGES)
    check_unwrapped(model, "calibrate the model")
    inner = without_adapter(model)
    patch = check_model(inner)
    adapted = inner is not model or bool(adapted_parts(inner))
    if adapted:
        check_adapter(inner, moves_weights=matching is not None and matching.weights == "query_key")
    check_tokens(tokens, inner, held_out)
    if matching is not None:
        matching.check_length(tokens.shape[1])
        matching = replace(matching, weights=matching.weights or ("adapter" if adapted else "query_key"))
    check_base(inner, patch, base)
    exact = torch.autocast(next(inner.parameters()).device.type, enabled=False)
    with alone(inner, "calibrate the model"), evaluation(inner), torch.enable_grad(), exact:
        pair = Pair(inner, patch, base, tokens, held_out, own_weights=not adapted)
        return _calibrate(pair, matching, closed_windows, judge, progress)


def _unknown(name: str) -> str:
    """Return the message for a keyword that `calibrate` does not take."""
    if name == "stage":
        return "calibrate() takes no stage: matching=None leaves the second stage out"
    own = {field.name: field.name for field in fields(Matching)} | {"learning_rate": "rate"}
    if name in own:
        return f"calibrate() takes no {name}: {own[name]} is a field of Matching: matching=Matching({own[name]}=...)"
    known = [*(calibrate.__kwdefaults__ or {}), *own]
    return f"calibrate() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"


def _calibrate(pair: Pair, matching: Matching | None, windows: int, judge: str, progress: bool) -> Calibration:
    """Run the first stage, and the second if there is one; write into the config what was kept, and report it."""
    moved: Movable = ([], []) if matching is None else movable(pair, matching.weights)
    if matching is not None and not any(moved):
        raise ValueError(
            f"weights={matching.weights!r} leaves nothing to move: {pair.patch.name} has no parameters of its own"
        )
    state = None if matching is None else _state(pair, matching, moved, windows, judge)
    first = None if state is None else state.first_stage
    if first is None:
        try:
            first = _first_stage(pair, moved, windows, judge, progress)
        except BaseException:
            pair.restore()
            raise
    entry = pair.model.config.position_encoding
    count = _tokens_read(pair, matching, windows)
    kept = Kept("closed_form", first.closed, first.losses["closed_form"], first.put_back)
    if matching is not None:
        record_calibration(pair.model, "attention", count)  # holds from the first step on
        kept = _second_stage(pair, moved, first, matching, state, windows, judge, progress)
    losses = HeldOutLoss(**first.losses, calibrated=kept.loss)
    stage = kept.stage
    if stage == "closed_form" and not pair.has_moved():
        stage = NOTHING
        pair.model.config.position_encoding = entry
    else:
        record_calibration(pair.model, "closed_form" if stage == "closed_form" else "attention", count, losses)
    layers = []
    for index in pair.layers:
        curve, multiplies = pair.curve(index)
        layers.append(
            LayerFit(
                index=index,
                before=first.before[index],
                closed=first.closed[index],
                after=kept.divergence[index],
                chosen=first.chosen[index],
                base_curve=first.base_curve[index],
                scheme_curve=curve,
                multiplies=multiplies,
            )
        )
    return Calibration(pair.patch.name, tuple(layers), count, losses, stage, judge, kept.put_back, first.apart)


def _first_stage(pair: Pair, moved: Movable, windows: int, judge: str, progress: bool) -> FirstStage:
    """Put the closed forms in, unless the plain swap predicts better."""
    losses = {"base": pair.loss_of_base(), "swapped": pair.loss()}
    pair.keep_mean()
    reads = 2 * (len(pair.train[:windows]) + len(pair.held))
    with tqdm(total=reads, desc="closed forms", unit="window", disable=not progress, leave=False) as pair.bar:
        closed = try_closed_forms(pair, windows, judge)
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


@dataclass(frozen=True)
class Kept:
    """The weights that the judge accepted.

    Attributes:
        stage: where they are from: `closed_form`, or the loss of the second stage that led to them.
        divergence: their divergence by layer, (H,) each.
        loss: their held-out loss, in nats.
        put_back: held-out losses of what was not accepted, by name.
    """

    stage: str
    divergence: dict[int, Tensor]
    loss: float
    put_back: dict[str, float]


def _second_stage(
    pair: Pair,
    moved: Movable,
    first: FirstStage,
    matching: Matching,
    state: StateFile | None,
    windows: int,
    judge: str,
    progress: bool,
) -> Kept:
    """Match attention, and keep the first trial that the judge accepts, or else what the first stage left."""
    put_back = dict(first.put_back)
    if state is not None:
        state.first_stage = first
        put_back |= state.put_back
    best = min(first.losses["swapped"], first.losses["closed_form"])
    for trial in matching.trials(judge):
        if trial in put_back:  # before the state was written
            continue
        if state is not None:
            state.begin(trial, {name: loss for name, loss in put_back.items() if name in LOSSES})
        _take_steps(pair, moved, matching, trial, state, progress)
        hold_tails(pair, windows)
        loss = pair.loss()
        try:
            after = pair.divergence()
        except ValueError:  # the steps have run off to infinity
            loss = math.inf
        else:
            if _accepted(trial, judge, loss, best, after, first.closed):
                return Kept(trial, after, loss, put_back)
        put_back[trial] = loss
        put(zip((p for part in moved for p in part), first.parameters, strict=True))
        if loss <= best + NOISE:  # nothing was lost that another trial could win
            break
    return Kept("closed_form", first.closed, first.losses["closed_form"], put_back)


def _take_steps(
    pair: Pair, moved: Movable, matching: Matching, trial: str, state: StateFile | None, progress: bool
) -> None:
    """Make the steps of a trial that are left, with a progress bar."""
    done = 0 if state is None else state.step
    with tqdm(total=matching.steps, initial=done, desc="calibrating", unit="step", disable=not progress) as bar:

        def on_step(step: int, value: float) -> None:
            bar.set_postfix(**{trial: f"{value:.3f}"}, refresh=False)
            bar.update()
            if matching.on_step is not None:
                matching.on_step(step, value)

        match(pair, moved, matching, trial, state, on_step)


def _accepted(
    trial: str, judge: str, loss: float, best: float, after: dict[int, Tensor], closed: dict[int, Tensor]
) -> bool:
    """Return whether the judge keeps what the steps of a trial came to.

    Args:
        trial: what was matched, a name in `LOSSES`.
        judge: as in `calibrate`.
        loss: held-out loss after the steps.
        best: lowest held-out loss so far.
        after: divergences by layer after the steps.
        closed: divergences before them.
    """
    ended, began = (sum(each.sum() for each in part.values()) for part in (after, closed))
    closer = loss <= best if trial == "outputs" else bool(ended <= began)
    if judge == "attention":
        return closer if trial == "attention" else math.isfinite(loss)
    return loss < best - NOISE or (loss <= best + NOISE and closer)


def record_calibration(
    model: PreTrainedModel, stage: str, tokens: int, held_out_loss: HeldOutLoss | None = None
) -> None:
    """Write into a patched model's config that it was calibrated: its checkpoints and their cards say so from then on.

    Args:
        model: patched, also below an adapter.
        stage: stage whose weights it holds: `closed_form`, or `attention` for those of the second.
        tokens: number of tokens that were read.
        held_out_loss: losses along the way; None where the calibration has not come to its end.
    """
    config = without_adapter(model).config
    entry: dict[str, Any] = {"stage": stage, "tokens": tokens}
    if held_out_loss is not None:
        losses = {name: round(loss, 6) for name, loss in asdict(held_out_loss).items()}
        entry["held_out_loss"] = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    config.position_encoding = {**config.position_encoding, CALIBRATION: entry}


def _tokens_read(pair: Pair, matching: Matching | None, windows: int) -> int:
    """Return the number of different tokens that the stages read, held-out ones included."""
    read = set(range(len(pair.train[:windows])))
    if matching is not None:
        read |= matching.read(len(pair.train), _processes())
    return (len(read) + len(pair.held)) * pair.held.shape[1]


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _state(pair: Pair, matching: Matching, moved: Movable, windows: int, judge: str) -> StateFile | None:
    """Return the state of this calibration, or None without a file; all processes read the same file."""
    if matching.state_file is None:
        return None
    processes = _processes()
    identity = matching.identity() | {
        "scheme": " + ".join(map(str, pair.patch.schemes)),
        "digest of the model": digest_of(pair.model),
        "digest of the base": "that of the model" if pair.given_base is None else digest_of(pair.given_base),
        "tokens": digest_of_tokens(torch.cat([pair.train, pair.held])),
        "held_out": len(pair.held),
        "closed_windows": windows,
        "judge": judge,
        "number of parameters that move": sum(map(len, moved)),
        "number of processes": processes,
    }
    movables = moved if matching.weights == "query_key" else movable(pair, "query_key")  # closed forms move weights too
    reached = {id(p) for part in movables for p in part} | {id(pair.tokens)}
    names = {name: p for name, p in pair.model.named_parameters() if id(p) in reached}
    state = StateFile(matching.state_file, identity, names, [p for part in moved for p in part])
    if processes > 1:
        steps: list[Any] = [None] * processes
        dist.all_gather_object(steps, (state.step, state.first_stage is None))
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the processes do not all see the same {matching.state_file}: give them a shared folder"
            )
    return state
