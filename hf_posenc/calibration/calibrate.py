"""`calibrate`: closed forms first, then gradient steps that match each layer to the base's."""

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
from .candidates import hold_tails, try_closed_forms
from .checks import (
    CLOSED_WINDOWS,
    check_adapter,
    check_base,
    check_labels,
    check_model,
    check_tokens,
    number_of_windows,
)
from .held_out import NOISE
from .matching import LOSSES, Matching, Movable, check_given_counts, check_one_of, match, movable
from .pair import Pair, put
from .report import NOTHING, Calibration, HeldOutLoss, LayerFit
from .state import FirstStage, StateFile, digest_of, digest_of_tokens

JUDGES = ("loss", "attention")


def calibrate(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    labels: Tensor | None = None,
    base: PreTrainedModel | None = None,
    held_out: int | None = None,
    closed_windows: int | None = None,
    matching: Matching | None = Matching(),  # noqa: B008 - it is frozen
    judge: str = "loss",
    progress: bool = False,
    **unknown: object,
) -> Calibration:
    """Fit a scheme, and the projections of queries and keys, so that they imitate the base's positions.

    Closed forms come first. Several are tried, and every head keeps the one whose attention is closest to the base's on
    held-out windows. Gradient steps (`matching`) then match what the heads of each layer read, or their attention, to
    the base's. The language-model loss is not trained; it only judges the results (`judge`). Memory grows with the
    length of the windows, not with its square.

    Args:
        model: a patched model, whole and on one device. Under an adapter of PEFT, only the adapter's parameters change.
        tokens: (N, T) int64 or int32: at least `held_out + 1` windows of text without padding, up to the length that
            the base was trained at.
        labels: (N, T) `tokens`, with -100 for those that the held-out loss leaves out, as in transformers. Leave out
            what the base was not trained to predict, such as a user's turns: its loss there says nothing. None means
            that all tokens count.
        base: the model to imitate: another model of the same type, sizes, vocabulary and dtype. None means the same
            model before its patch.
        held_out: number of windows, from the end, that are only measured on. None means 8 windows, or fewer that hold
            2,048 tokens, but at least 2.
        closed_windows: largest number of windows that the closed forms average over. None means 24 windows, or fewer
            that hold 3,072 tokens.
        matching: settings of the second stage; None leaves it out.
        judge: the measure on the held-out windows that decides. `loss`: the language-model loss. A stage that raises it
            by more than 0.01 nats is taken back, and so are matched outputs that raise it at all. If the heads' own
            forms predict worse than one form for all heads, all heads get that form. `attention`: the distance of the
            attention from the base's, whatever the loss.
        progress: show progress bars of windows, layers and steps.
        **unknown: refused. For a field of `Matching` the message says so.

    Returns:
        The report: the stage whose weights were kept, the divergences of each layer and head, and the held-out losses.

    Raises:
        TypeError: for an unknown keyword.
        NotPatchedError: if the model is not patched, or if it was loaded patched and `base` is None.
        UnsupportedModelError: if the model is wrapped, sharded, offloaded or quantised, or predicts no tokens.
        ValueError: for an argument out of range, or for tokens, a base or an adapter that do not fit the model; under
            `torch.inference_mode`; if the second stage has nothing to train; if `base` is None and the model's weights
            have changed since its patch; or if attention is NaN or infinite. The model is unchanged then, as after any
            error of the first stage.
        CheckpointError: if `state_file` is not the state of a calibration with the same arguments, tokens, model and
            patch. The model is unchanged then.
        OSError: if the state cannot be read or written.
    """
    for name in unknown:
        raise TypeError(_unknown_keyword_message(name))
    if matching is not None and not isinstance(matching, Matching):
        raise ValueError(f"matching must be a Matching, or None for closed forms alone, not {matching!r}")
    check_given_counts(closed_windows=closed_windows, held_out=held_out)
    check_one_of("judge", judge, JUDGES)
    check_unwrapped(model, "calibrate the model")
    inner = without_adapter(model)
    patch = check_model(inner)
    adapted = inner is not model or bool(adapted_parts(inner))
    if adapted:
        check_adapter(inner, moves_weights=matching is not None and matching.weights == "query_key")
    held_out = check_tokens(tokens, inner, held_out)
    check_labels(labels, tokens, held_out)
    closed_windows = number_of_windows(closed_windows, CLOSED_WINDOWS, tokens.shape[1])
    if matching is not None:
        matching.check_length(tokens.shape[1])
        matching = replace(matching, weights=matching.weights or ("adapter" if adapted else "query_key"))
    check_base(inner, patch, base)
    exact = torch.autocast(next(inner.parameters()).device.type, enabled=False)
    with alone(inner, "calibrate the model"), evaluation(inner), torch.enable_grad(), exact:
        pair = Pair(inner, patch, base, tokens, held_out, labels=labels, own_weights=not adapted)
        trained: Movable = ((), ()) if matching is None else movable(pair, matching.weights)
        return _Run(pair, matching, closed_windows, judge, progress, trained).calibrate()


def _unknown_keyword_message(name: str) -> str:
    """Return the error message for a keyword that `calibrate` does not take."""
    if name == "stage":
        return "calibrate() takes no stage: matching=None leaves the second stage out"
    matching = {field.name: field.name for field in fields(Matching)} | {"learning_rate": "rate"}
    if name in matching:
        field = matching[name]
        return f"calibrate() takes no {name}: {field} is a field of Matching: matching=Matching({field}=...)"
    keywords = [*(calibrate.__kwdefaults__ or {}), *matching]
    return f"calibrate() got an unexpected keyword argument {name!r}{did_you_mean(name, keywords)}"


@dataclass(frozen=True)
class Accepted:
    """The weights that the judge accepted.

    Attributes:
        stage: `closed_form`, or the name of the loss that the second stage lowered.
        divergence: layer index -> divergence of its heads with these weights, (H,).
        loss: held-out loss with these weights, in nats.
        put_back: name of a stage or trial that was not accepted -> its held-out loss.
    """

    stage: str
    divergence: dict[int, Tensor]
    loss: float
    put_back: dict[str, float]


@dataclass(frozen=True)
class _Run:
    """One calibration: a model, its base and the arguments of `calibrate`.

    Attributes:
        pair: the model and its base.
        matching: settings of the second stage, or None.
        windows: largest number of windows that the closed forms average over.
        judge: `loss` or `attention`.
        progress: whether to show progress bars.
        trained: the parameters that the second stage trains.
    """

    pair: Pair
    matching: Matching | None
    windows: int
    judge: str
    progress: bool
    trained: Movable

    def calibrate(self) -> Calibration:
        """Run the stages, record the result in the model's config, and return the report."""
        pair, matching, state = self.pair, self.matching, self._open_state()
        first = state.first_stage
        if first is None:
            try:
                first = self._first_stage()
            except BaseException:
                pair.restore()
                raise
        entry = pair.model.config.position_encoding
        count = self._count_tokens()
        accepted = Accepted("closed_form", first.closed, first.losses["closed_form"], first.put_back)
        if matching is not None:
            record_calibration(pair.model, "attention", count)  # true from the first step on, also if it is interrupted
            accepted = self._second_stage(matching, first, state)
        losses = HeldOutLoss(**first.losses, calibrated=accepted.loss)
        stage = accepted.stage
        if stage == "closed_form" and not pair.has_changed():
            stage = NOTHING
            pair.model.config.position_encoding = entry
        else:
            record_calibration(pair.model, "closed_form" if stage == "closed_form" else "attention", count, losses)
        layers = []
        for index in pair.layers:
            divergences = first.before[index], first.closed[index], accepted.divergence[index]
            layers.append(
                LayerFit(index, *divergences, first.chosen[index], first.base_curve[index], *pair.curve(index))
            )
        put_back = accepted.put_back
        return Calibration(pair.patch.name, tuple(layers), count, losses, stage, self.judge, put_back, first.apart)

    def _first_stage(self) -> FirstStage:
        """Apply the closed forms. Take them back if the judge is `loss` and the plain swap predicts better."""
        pair, losses = self.pair, {"base": self.pair.loss_of_base(), "swapped": self.pair.loss()}
        pair.add_mean_position()
        as_it_was = None if pair.has_changed() else losses["swapped"]
        reads = 2 * (len(pair.train[: self.windows]) + len(pair.held))
        with tqdm(total=reads, desc="closed forms", unit="window", disable=not self.progress, leave=False) as pair.bar:
            first = try_closed_forms(pair, self.windows, self.judge, as_it_was)
            if not math.isfinite(losses["base"]):
                raise ValueError(
                    "the base's loss on the held-out windows is not finite: look for weights that are not finite"
                )
            loss = losses["closed_form"] = first.losses["closed_form"]
            if self.judge == "loss" and loss > losses["swapped"] + NOISE:
                pair.restore()
                pair.bar.total += len(pair.held)
                losses["closed_form"] = losses["swapped"]
                first = replace(
                    first,
                    closed=pair.divergence(),
                    chosen={index: ("as it was",) * len(names) for index, names in first.chosen.items()},
                    put_back=first.put_back | {"closed_form": loss},
                )
        return replace(first, losses=losses, parameters=[p.detach().clone() for part in self.trained for p in part])

    def _second_stage(self, matching: Matching, first: FirstStage, state: StateFile) -> Accepted:
        """Run trials until the judge accepts one. Otherwise restore the first stage's weights."""
        pair, put_back = self.pair, first.put_back | state.put_back
        state.first_stage = first
        best = min(first.losses["swapped"], first.losses["closed_form"])
        for trial in matching.trials(self.judge):
            if trial in put_back:  # the state file says that the judge has refused this trial
                continue
            state.begin(trial, {name: loss for name, loss in put_back.items() if name in LOSSES})
            self._take_steps(matching, trial, state)
            hold_tails(pair, self.windows)
            loss = pair.loss()
            try:
                after = pair.divergence()
            except ValueError:  # the steps diverged
                loss = math.inf
            else:
                if self._accepts(trial, loss, best, after, first.closed):
                    return Accepted(trial, after, loss, put_back)
            put_back[trial] = loss
            put(zip((p for part in self.trained for p in part), first.parameters, strict=True))
            if loss <= best + NOISE:  # the next trial is only for a model that predicts worse after this one
                break
        return Accepted("closed_form", first.closed, first.losses["closed_form"], put_back)

    def _take_steps(self, matching: Matching, trial: str, state: StateFile) -> None:
        """Run the remaining steps of a trial, with a progress bar."""
        steps, hidden = matching.steps, not self.progress
        with tqdm(total=steps, initial=state.step, desc="calibrating", unit="step", disable=hidden) as bar:

            def on_step(step: int, value: float) -> None:
                bar.set_postfix(**{trial: f"{value:.3f}"}, refresh=False)
                bar.update()
                if matching.on_step is not None:
                    matching.on_step(step, value)

            match(self.pair, self.trained, matching, trial, state, on_step)

    def _accepts(
        self, trial: str, loss: float, best: float, after: dict[int, Tensor], closed: dict[int, Tensor]
    ) -> bool:
        """Return whether the judge accepts the result of a trial.

        Args:
            trial: name in `LOSSES` of the loss that was lowered.
            loss: held-out loss after the steps.
            best: lowest held-out loss so far.
            after: layer index -> divergences after the steps.
            closed: layer index -> divergences before the steps.
        """
        total_after, total_before = (sum(each.sum() for each in by_layer.values()) for by_layer in (after, closed))
        closer = loss <= best if trial == "outputs" else bool(total_after <= total_before)
        if self.judge == "attention":
            return closer if trial == "attention" else math.isfinite(loss)
        return loss < best - NOISE or (loss <= best + NOISE and closer)

    def _count_tokens(self) -> int:
        """Return the number of different tokens that the stages read, with the held-out tokens."""
        pair = self.pair
        read = set(range(len(pair.train[: self.windows])))
        if self.matching is not None:
            read |= self.matching.read(len(pair.train), _process_count())
        return (len(read) + len(pair.held)) * pair.held.shape[1]

    def _open_state(self) -> StateFile:
        """Return the state of this calibration, read from the state file if it exists.

        Raises:
            CheckpointError: if the file is another calibration's, or if processes read different files.
        """
        pair, matching = self.pair, self.matching
        if matching is None or matching.state_file is None:
            return StateFile()
        identity = matching.identity() | {
            "scheme": " + ".join(map(str, pair.patch.schemes)),
            "digest of the model": digest_of(pair.model),
            "digest of the base": "that of the model" if pair.other_base is None else digest_of(pair.other_base),
            "tokens": digest_of_tokens(torch.cat([pair.train, pair.held])),
            "labels": "the tokens" if pair.labels.equal(pair.held) else digest_of_tokens(pair.labels),
            "held_out": len(pair.held),
            "closed_windows": self.windows,
            "judge": self.judge,
            "number of parameters that move": sum(map(len, self.trained)),
            "number of processes": _process_count(),
        }
        # Closed forms change weights even if the second stage trains only the scheme's parameters.
        changeable = self.trained if matching.weights == "query_key" else movable(pair, "query_key")
        ids = {id(p) for part in changeable for p in part} | {id(pair.token_embedding)}
        parameters = {name: p for name, p in pair.model.named_parameters() if id(p) in ids}
        state = StateFile(matching.state_file, identity, parameters, [p for part in self.trained for p in part])
        if _process_count() > 1:
            steps: list[tuple[int, bool] | None] = [None] * _process_count()
            dist.all_gather_object(steps, (state.step, state.first_stage is None))
            if len(set(steps)) > 1:
                raise CheckpointError(
                    f"the processes do not all see the same {matching.state_file}: give them a shared folder"
                )
        return state


def _process_count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def record_calibration(
    model: PreTrainedModel, stage: str, tokens: int, held_out_loss: HeldOutLoss | None = None
) -> None:
    """Record in a patched model's config that it was calibrated. Its checkpoints and their cards then say so.

    Args:
        model: a patched model, or an adapter around one.
        stage: stage that the model's weights come from: `closed_form`, or `attention` for the second stage.
        tokens: number of tokens that were read.
        held_out_loss: held-out losses after each stage; None while the calibration is unfinished.
    """
    config = without_adapter(model).config
    entry: dict[str, object] = {"stage": stage, "tokens": tokens}
    if held_out_loss is not None:
        losses = {name: round(loss, 6) for name, loss in asdict(held_out_loss).items()}
        entry["held_out_loss"] = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    config.position_encoding = {**config.position_encoding, CALIBRATION: entry}
