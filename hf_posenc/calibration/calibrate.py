"""`calibrate`: closed forms first, then gradient steps that match the outputs and logits of the base."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..checkpoints.scheme_entry import CALIBRATION
from ..core.errors import CheckpointError
from ..model.eval_mode import evaluation
from ..model.obstacles import check_unquantized
from ..model.patch_record import adapted_parts, alone, without_adapter
from . import checks
from .candidates import FirstStage, first_stage, hold_tails, mean_divergence
from .checks import NOISE
from .matching import PASSES, Matching, Movable, match, movable, process_count
from .pair import Pair, put
from .report import NOTHING, Calibration, HeldOutLoss, LayerFit
from .state import StateFile, digest_of, digest_of_tokens

JUDGES = ("loss", "attention")

LEAST = 1e-3
"""What a trial must win, in nats. Where there is nothing to win, gradients are rounding errors, of which Adam makes
steps of full size."""

HELD_OUT_PASSES, FITTED_PASSES = 10, 4
"""Time that the first stage takes for a held-out window, and for one that it averages over, in passes of the base."""


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
) -> Calibration:
    """Fit a scheme, and the weights of the attention, so that they imitate the base's positions.

    Closed forms come first. Several are tried, and every head keeps the one whose attention is closest to the base's on
    held-out windows. Gradient steps (`matching`) then match what the heads of each layer read, and then the logits, to
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
        judge: the measure on the held-out windows that decides. `loss`: the language-model loss. Closed forms
            that raise it by more than 0.01 nats are taken back, and so are steps that do not lower it. If the heads'
            own forms predict worse than one form for all heads, all heads get that form. `attention`: the distance of
            the attention from the base's, whatever the loss.
        progress: say how long it may take, and show progress bars of windows and steps.

    Returns:
        The report: the stage whose weights were kept, the divergences of each layer and head, and the held-out losses.

    Raises:
        NotPatchedError: if the model is not patched, or if it was loaded patched and `base` is None.
        UnsupportedModelError: if the model is wrapped, sharded, offloaded or quantised, or predicts no tokens.
        ValueError: for an argument out of range, or for tokens, a base or an adapter that do not fit the model; if the
            second stage has nothing to train; if `base` is None and the model's weights have changed since its patch;
            or if attention is NaN or infinite. The model is unchanged then, as after any error of the first stage.
        CheckpointError: if `state_file` is not the state of a calibration with the same arguments, tokens, model and
            patch. The model is unchanged then.
        OSError: if the state cannot be read or written.
    """
    if matching is not None and not isinstance(matching, Matching):
        raise ValueError(f"matching must be a Matching, or None for closed forms alone, not {matching!r}")
    checks.check_positive("integer", closed_windows=closed_windows, held_out=held_out)
    checks.check_one_of("judge", judge, JUDGES)
    patch = checks.check_patched(model, "calibrate the model")
    inner = without_adapter(model)
    check_unquantized(inner, "calibrate the model")
    adapted = inner is not model or bool(adapted_parts(inner))
    if adapted:
        checks.check_adapter(inner, None if matching is None else matching.weights)
    _, held = checks.split_tokens(tokens, inner, held_out)
    checks.check_labels(labels, tokens, len(held))
    closed_windows = checks.number_of_windows(closed_windows, checks.CLOSED_WINDOWS, tokens.shape[1])
    if matching is not None:
        matching = replace(matching, weights=matching.weights or ("adapter" if adapted else "attention"))
    checks.check_base(inner, patch, base)
    full = torch.autocast(next(inner.parameters()).device.type, enabled=False)
    with alone(inner, "calibrate the model"), evaluation(inner), torch.inference_mode(False), torch.enable_grad(), full:
        whole = matching is not None and matching.weights == "attention"
        given = {"own_weights": not adapted, "whole_attention": whole, "progress": progress}
        pair = Pair(inner, patch, base, tokens, len(held), labels=labels, **given)
        trained: Movable = ((), ()) if matching is None else movable(pair, matching.weights)
        return _Run(pair, matching, closed_windows, judge, trained).calibrate()


@dataclass(frozen=True)
class Kept:
    """The best result so far.

    Attributes:
        stage: stage or trial that it comes from, as in `Calibration.kept`.
        after: layer index -> its divergence, (H,).
        loss: its held-out loss.
        put_back: name of what the judge has refused -> its held-out loss.
        values: its values of the parameters that the second stage trains.
        tried: names of the trials that have ended.
    """

    stage: str
    after: dict[int, Tensor]
    loss: float
    put_back: Mapping[str, float]
    values: Sequence[Tensor] = ()
    tried: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Run:
    """One calibration: a model, its base and the arguments of `calibrate`.

    Attributes:
        pair: the model and its base.
        matching: settings of the second stage, or None.
        windows: largest number of windows that the closed forms average over.
        judge: `loss` or `attention`.
        trained: the parameters that the second stage trains.
    """

    pair: Pair
    matching: Matching | None
    windows: int
    judge: str
    trained: Movable

    def calibrate(self) -> Calibration:
        """Run the stages, record the result in the model's config, and return the report."""
        pair, entry = self.pair, self.pair.model.config.position_encoding
        file = self._open_state()
        first = self._first_stage() if file.content is None else FirstStage(**file.content["first"])
        kept = Kept("closed_form", first.closed, first.losses["closed_form"], first.put_back)
        if self.matching is not None:
            self._record("matching")  # true from the first step on, also if it is interrupted
            kept = self._second_stage(self.matching, first, kept, file)
        stage, losses = kept.stage, HeldOutLoss(**first.losses, calibrated=kept.loss)
        if stage == "closed_form" and not pair.has_changed():
            stage = NOTHING
            pair.model.config.position_encoding = entry
        else:
            self._record("closed_form" if stage == "closed_form" else "matching", losses)
        layers = tuple(
            LayerFit(i, first.before[i], first.closed[i], kept.after[i], first.chosen[i]) for i in pair.layers
        )
        fixed = tuple(each.name for each in pair.patch.schemes if each.hyperparameters().get("trainable") is False)
        scheme, count = pair.patch.name, self._count_tokens()
        return Calibration(scheme, layers, count, losses, stage, self.judge, kept.put_back, fixed)

    def _record(self, stage: str, losses: HeldOutLoss | None = None) -> None:
        """Record in the model's config that it was calibrated. Its checkpoints and their cards then say so.

        Args:
            stage: stage that the model's weights come from: `closed_form`, or `matching`, the second stage.
            losses: held-out losses after each stage; None while the calibration is unfinished.
        """
        config = self.pair.model.config
        entry: dict[str, object] = {"stage": stage, "tokens": self._count_tokens()}
        if losses is not None:
            finite = {name: round(loss, 6) for name, loss in vars(losses).items() if math.isfinite(loss)}
            entry["held_out_loss"] = finite
        config.position_encoding = {**config.position_encoding, CALIBRATION: entry}

    def _first_stage(self) -> FirstStage:
        """Run the first stage. After an error the model is what it was."""
        try:
            began = time.perf_counter()
            base = self.pair.loss_of_base()
            if self.pair.progress:
                self._announce(time.perf_counter() - began)
            return first_stage(self.pair, base, self.windows, self.judge)
        except BaseException:
            self.pair.restore()
            raise

    def _announce(self, seconds: float) -> None:
        """Say how long the calibration may take, after `seconds` in which the base has read the held-out windows."""
        pair, matching = self.pair, self.matching
        passes = HELD_OUT_PASSES * len(pair.held) + FITTED_PASSES * min(self.windows, len(pair.train))
        if matching is not None:
            passes += matching.steps * matching.batch_size * sum(PASSES[each] for each in matching.trials(self.judge))
        minutes = seconds * passes / len(pair.held) / 60
        tqdm.write(f"calibration: about {minutes:.2g} minutes", file=sys.stderr)

    def _second_stage(self, matching: Matching, first: FirstStage, kept: Kept, file: StateFile) -> Kept:
        """Run the trials. Each starts from the weights that were kept, which return if the judge refuses its result.

        Returns:
            What was kept in the end.
        """
        pair, parameters = self.pair, [p for part in self.trained for p in part]
        kept = replace(kept, values=[p.detach().clone() for p in parameters])
        if file.content is not None:
            kept = Kept(**file.content["kept"])
        for trial in matching.trials(self.judge):
            if trial in kept.tried:  # before the state was written
                continue
            match(pair, self.trained, matching, trial, file, {"first": vars(first), "kept": vars(kept)})
            hold_tails(pair)
            loss = pair.loss()
            try:
                after = pair.divergence()
            except ValueError:  # the steps diverged
                loss, after = math.inf, kept.after
            closer = mean_divergence(after) <= mean_divergence(kept.after)
            if self._accepts(trial, loss, kept.loss, closer):
                kept = replace(
                    kept, stage=trial, after=after, loss=loss, values=[p.detach().clone() for p in parameters]
                )
            else:
                put(zip(parameters, kept.values, strict=True))
                kept = replace(kept, put_back={**kept.put_back, trial: loss})
            kept = replace(kept, tried=(*kept.tried, trial))
        return kept

    def _accepts(self, trial: str, loss: float, best: float, closer: bool) -> bool:
        """Return whether the judge accepts the result of a trial.

        Args:
            trial: name in `LOSSES` of the loss that was lowered.
            loss: held-out loss after the steps.
            best: lowest held-out loss so far.
            closer: whether attention came no further from the base's.
        """
        if self.judge == "attention" or not math.isfinite(loss):
            return math.isfinite(loss) and (closer or trial != "attention")
        return loss < best - LEAST or (trial == "attention" and loss <= best + NOISE and closer)

    def _count_tokens(self) -> int:
        """Return the number of different tokens that the stages read, with the held-out tokens."""
        pair, matching = self.pair, self.matching
        read = set(range(len(pair.train[: self.windows])))
        if matching is not None:
            for generator in map(matching.generator, matching.trials(self.judge)):
                for _ in range(matching.steps):
                    read.update(matching.drawn(len(pair.train), generator).flatten().tolist())
        return (len(read) + len(pair.held)) * pair.held.shape[1]

    def _open_state(self) -> StateFile:
        """Return the state of this calibration, read from the state file if it exists.

        Raises:
            CheckpointError: if the file is another calibration's, or if processes read different files.
        """
        pair, matching = self.pair, self.matching
        if matching is None or matching.state_file is None:
            return StateFile(None, {})
        identity = matching.identity() | {
            "scheme": " + ".join(map(str, pair.patch.schemes)),
            "digest of the model": digest_of(pair.model),
            "digest of the base": None if pair.other_base is None else digest_of(pair.other_base),
            "tokens": digest_of_tokens(torch.cat([pair.train, pair.held])),
            "labels": digest_of_tokens(pair.labels),
            "closed_windows": self.windows,
            "held_out": len(pair.held),
            "judge": self.judge,
            "number of parameters that move": sum(map(len, self.trained)),
            "number of processes": process_count(),
        }
        file = StateFile(matching.state_file, identity)
        if dist.is_initialized():
            steps: list[int | None] = [None] * process_count()
            dist.all_gather_object(steps, (file.content or {"step": -1})["step"])
            if len(set(steps)) > 1:
                raise CheckpointError(f"the processes do not all see the same {matching.state_file}: share its folder")
        return file
