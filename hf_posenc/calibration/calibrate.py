"""calibrate(model, tokens): closed forms first, then attention matched layer by layer, on the base's own inputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..checkpoints.scheme_entry import CALIBRATION
from ..did_you_mean import did_you_mean
from ..errors import CheckpointError
from ..live.eval_mode import evaluation
from ..live.obstacles import check_unwrapped
from ..live.patch_record import adapted_parts, alone, without_adapter
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
    **unknown: object,
) -> Calibration:
    """Fit a scheme, and the projections of queries and keys, to what the base's positions did.

    Closed forms come first. Several are tried for each layer and head, and the one whose attention is closest to the
    base's on held-out windows is kept. Gradient steps then match the attention of each layer to the base's, on the
    base's own hidden states (`matching`). No language-model loss is trained, but it decides what is kept (`judge`).
    Memory grows with the number of distances, not with its square.

    Args:
        model: patched, whole, on one device. Under an adapter of PEFT, only what the adapter holds moves.
        tokens: (N, T) int64 or int32: windows of text without padding, as long as the base was made for; at least
            `held_out + 1`.
        base: the model to follow, another one of the same type, sizes, vocabulary and dtype. None means the model as
            it was before it was patched.
        held_out: number of windows, the last ones, that only decide and measure.
        closed_windows: number of windows that the closed forms average over, at most.
        matching: the second stage; None means closed forms alone.
        judge: what decides on the held-out windows. `loss`: the language-model loss. A stage that raises it by more
            than 0.01 nats is put back. Where heads chosen by their attention predict worse, all get the one form that
            predicts best. `attention`: how close attention comes to the base's, whatever is predicted.
        progress: show progress bars of windows, layers and steps.
        **unknown: refused; for a field of `Matching` the message says so.

    Returns:
        The report: what was kept, the divergences of each layer and head, and the held-out losses.

    Raises:
        TypeError: for a keyword that does not exist.
        NotPatchedError: if the model is not patched, or no `base` is given and the model was loaded patched.
        UnsupportedModelError: if it is wrapped, sharded, offloaded or quantised, or predicts no tokens.
        ValueError: for an argument out of range, and for tokens, a base or an adapter that do not fit the model. Also
            under `torch.inference_mode`, where the second stage has nothing to move, where no base is given and the
            model's own weights have moved since it was patched, and for attention that is NaN or infinite. Nothing has
            changed then, as after any error of the first stage.
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
        moved: Movable = ((), ()) if matching is None else movable(pair, matching.weights)
        return _Run(pair, matching, closed_windows, judge, progress, moved).calibrate()


def _unknown(name: str) -> str:
    """Return the message for a keyword that `calibrate` does not take."""
    if name == "stage":
        return "calibrate() takes no stage: matching=None leaves the second stage out"
    own = {field.name: field.name for field in fields(Matching)} | {"learning_rate": "rate"}
    if name in own:
        return f"calibrate() takes no {name}: {own[name]} is a field of Matching: matching=Matching({own[name]}=...)"
    known = [*(calibrate.__kwdefaults__ or {}), *own]
    return f"calibrate() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"


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


@dataclass(frozen=True)
class _Run:
    """A calibration: a model beside its base, and what was asked for, see `calibrate`.

    Attributes:
        pair: the model and its base.
        matching: the second stage, or None.
        windows: number of windows that the closed forms average over, at most.
        judge: what decides.
        progress: whether to show progress bars.
        moved: what the second stage moves.
    """

    pair: Pair
    matching: Matching | None
    windows: int
    judge: str
    progress: bool
    moved: Movable

    def calibrate(self) -> Calibration:
        """Run the first stage, and the second if there is one; write into the config what was kept, and report it."""
        pair, matching, state = self.pair, self.matching, self._state()
        first = state.first_stage
        if first is None:
            try:
                first = self._first_stage()
            except BaseException:
                pair.restore()
                raise
        entry = pair.model.config.position_encoding
        count = self._tokens_read()
        kept = Kept("closed_form", first.closed, first.losses["closed_form"], first.put_back)
        if matching is not None:
            record_calibration(pair.model, "attention", count)  # holds from the first step on
            kept = self._second_stage(matching, first, state)
        losses = HeldOutLoss(**first.losses, calibrated=kept.loss)
        stage = kept.stage
        if stage == "closed_form" and not pair.has_moved():
            stage = NOTHING
            pair.model.config.position_encoding = entry
        else:
            record_calibration(pair.model, "closed_form" if stage == "closed_form" else "attention", count, losses)
        layers = []
        for index in pair.layers:
            divergences = first.before[index], first.closed[index], kept.divergence[index]
            layers.append(
                LayerFit(index, *divergences, first.chosen[index], first.base_curve[index], *pair.curve(index))
            )
        return Calibration(pair.patch.name, tuple(layers), count, losses, stage, self.judge, kept.put_back, first.apart)

    def _first_stage(self) -> FirstStage:
        """Put the closed forms in, unless the plain swap predicts better."""
        pair, losses = self.pair, {"base": self.pair.loss_of_base(), "swapped": self.pair.loss()}
        pair.keep_mean()
        reads = 2 * (len(pair.train[: self.windows]) + len(pair.held))
        with tqdm(total=reads, desc="closed forms", unit="window", disable=not self.progress, leave=False) as pair.bar:
            found = try_closed_forms(pair, self.windows, self.judge)
            if not math.isfinite(losses["base"]):
                raise ValueError(
                    "the base's loss on the held-out windows is no number: look for weights that are not finite"
                )
            loss = losses["closed_form"] = found.losses["closed_form"]
            if self.judge == "loss" and loss > losses["swapped"] + NOISE:
                pair.restore()
                pair.bar.total += len(pair.held)
                losses["closed_form"] = losses["swapped"]
                found = replace(
                    found,
                    closed=pair.divergence(),
                    chosen={index: ("as it was",) * len(names) for index, names in found.chosen.items()},
                    put_back=found.put_back | {"closed_form": loss},
                )
        return replace(found, losses=losses, parameters=[p.detach().clone() for part in self.moved for p in part])

    def _second_stage(self, matching: Matching, first: FirstStage, state: StateFile) -> Kept:
        """Match attention, and keep the first trial that the judge accepts, or else what the first stage left."""
        pair, put_back = self.pair, first.put_back | state.put_back
        state.first_stage = first
        best = min(first.losses["swapped"], first.losses["closed_form"])
        for trial in matching.trials(self.judge):
            if trial in put_back:  # before the state was written
                continue
            state.begin(trial, {name: loss for name, loss in put_back.items() if name in LOSSES})
            self._take_steps(matching, trial, state)
            hold_tails(pair, self.windows)
            loss = pair.loss()
            try:
                after = pair.divergence()
            except ValueError:  # the steps have run off to infinity
                loss = math.inf
            else:
                if self._accepts(trial, loss, best, after, first.closed):
                    return Kept(trial, after, loss, put_back)
            put_back[trial] = loss
            put(zip((p for part in self.moved for p in part), first.parameters, strict=True))
            if loss <= best + NOISE:  # nothing was lost that another trial could win
                break
        return Kept("closed_form", first.closed, first.losses["closed_form"], put_back)

    def _take_steps(self, matching: Matching, trial: str, state: StateFile) -> None:
        """Make the steps of a trial that are left, with a progress bar."""
        steps, hidden = matching.steps, not self.progress
        with tqdm(total=steps, initial=state.step, desc="calibrating", unit="step", disable=hidden) as bar:

            def on_step(step: int, value: float) -> None:
                bar.set_postfix(**{trial: f"{value:.3f}"}, refresh=False)
                bar.update()
                if matching.on_step is not None:
                    matching.on_step(step, value)

            match(self.pair, self.moved, matching, trial, state, on_step)

    def _accepts(
        self, trial: str, loss: float, best: float, after: dict[int, Tensor], closed: dict[int, Tensor]
    ) -> bool:
        """Return whether the judge keeps what the steps of a trial came to.

        Args:
            trial: what was matched, a name in `LOSSES`.
            loss: held-out loss after the steps.
            best: lowest held-out loss so far.
            after: divergences by layer after the steps.
            closed: divergences before them.
        """
        ended, began = (sum(each.sum() for each in part.values()) for part in (after, closed))
        closer = loss <= best if trial == "outputs" else bool(ended <= began)
        if self.judge == "attention":
            return closer if trial == "attention" else math.isfinite(loss)
        return loss < best - NOISE or (loss <= best + NOISE and closer)

    def _tokens_read(self) -> int:
        """Return the number of different tokens that the stages read, held-out ones included."""
        pair = self.pair
        read = set(range(len(pair.train[: self.windows])))
        if self.matching is not None:
            read |= self.matching.read(len(pair.train), _processes())
        return (len(read) + len(pair.held)) * pair.held.shape[1]

    def _state(self) -> StateFile:
        """Return the state of this calibration; all processes read the same file."""
        pair, matching = self.pair, self.matching
        if matching is None or matching.state_file is None:
            return StateFile()
        identity = matching.identity() | {
            "scheme": " + ".join(map(str, pair.patch.schemes)),
            "digest of the model": digest_of(pair.model),
            "digest of the base": "that of the model" if pair.given_base is None else digest_of(pair.given_base),
            "tokens": digest_of_tokens(torch.cat([pair.train, pair.held])),
            "held_out": len(pair.held),
            "closed_windows": self.windows,
            "judge": self.judge,
            "number of parameters that move": sum(map(len, self.moved)),
            "number of processes": _processes(),
        }
        # Closed forms move weights too.
        movables = self.moved if matching.weights == "query_key" else movable(pair, "query_key")
        reached = {id(p) for part in movables for p in part} | {id(pair.tokens)}
        names = {name: p for name, p in pair.model.named_parameters() if id(p) in reached}
        state = StateFile(matching.state_file, identity, names, [p for part in self.moved for p in part])
        if _processes() > 1:
            steps: list[tuple[int, bool] | None] = [None] * _processes()
            dist.all_gather_object(steps, (state.step, state.first_stage is None))
            if len(set(steps)) > 1:
                raise CheckpointError(
                    f"the processes do not all see the same {matching.state_file}: give them a shared folder"
                )
        return state


def _processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


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
    entry: dict[str, object] = {"stage": stage, "tokens": tokens}
    if held_out_loss is not None:
        losses = {name: round(loss, 6) for name, loss in asdict(held_out_loss).items()}
        entry["held_out_loss"] = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    config.position_encoding = {**config.position_encoding, CALIBRATION: entry}
