"""The first stage: every head keeps its closest closed form, or all heads keep the one that predicts best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.modules import ScoreModule
from ..model.base_model import BaseModel
from ..transformers_glue.rotary import by_pair
from .checks import NOISE, TOKENS_AT_ONCE
from .closed_forms import DistanceSums, MeanRotation, Target, coefficients, takes_queries, target_of
from .fitting import fit
from .pair import Pair, Values, copied, parameters_of, put

CANDIDATES = ("as it was", "fitted", "turned", "turned, fitted")
"""Names of the closed forms. `fitted`: the scheme's curve or vectors are fitted to what the base's positions add.
`turned`: the queries are rotated by the mean rotation."""


@dataclass(frozen=True)
class FirstStage:
    """The results of the first stage.

    Attributes:
        before: layer index -> `LayerFit.before`.
        closed: layer index -> `LayerFit.closed`.
        chosen: layer index -> `LayerFit.chosen`.
        losses: field of `HeldOutLoss` (`base`, `swapped`, `closed_form`) -> held-out loss.
        put_back: name of a first-stage result that the judge rejected -> its held-out loss, see `Calibration.put_back`.
    """

    before: dict[int, Tensor]
    closed: dict[int, Tensor]
    chosen: dict[int, tuple[str, ...]]
    losses: dict[str, float]
    put_back: dict[str, float] = field(default_factory=dict)

    def uniformly(self, form: str, closed: dict[int, Tensor], loss: float, rejected: dict[str, float]) -> FirstStage:
        """Return the results with one form for all heads, after a rejected result.

        Args:
            form: name of the form.
            closed: its divergences.
            loss: its held-out loss.
            rejected: name of the result that the judge rejected -> its held-out loss.
        """
        chosen = {index: (form,) * len(names) for index, names in self.chosen.items()}
        losses, put_back = self.losses | {"closed_form": loss}, self.put_back | rejected
        return replace(self, closed=closed, chosen=chosen, losses=losses, put_back=put_back)


def first_stage(pair: Pair, base: float, windows: int, judge: str) -> FirstStage:
    """Try the closed forms, and keep for each head the one whose attention is closest to the base's.

    If the judge is `loss` and one form for all heads predicts better, all heads keep that form; and if the plain swap
    predicts better than the result, everything is restored.

    Args:
        pair: a model and its base.
        base: the base's held-out loss.
        windows: largest number of windows that the forms average over.
        judge: `loss` or `attention`, as in `calibrate`.

    Raises:
        ValueError: if attention, or the base's loss, is NaN or infinite.
    """
    losses = {"base": base, "swapped": pair.loss()}
    pair.add_mean_position()
    measured = {} if pair.has_changed() else {"as it was": losses["swapped"]}
    averages = pair.averages(windows)
    rotations, modules = mean_rotations(pair, averages), pair.modules()
    unfitted = {index: _present(pair, index) for index in modules}
    candidates, targets = _make_candidates(pair, rotations, averages, windows)
    divergences = pair.divergences(candidates)
    names = [name for name in CANDIDATES if name in divergences]
    best = {index: torch.stack([divergences[name][index] for name in names]).argmin(0) for index in pair.layers}
    chosen = {index: tuple(names[number] for number in best[index].tolist()) for index in pair.layers}
    for index, rotation in rotations.items():
        rotation.apply(torch.tensor([name.startswith("turned") for name in chosen[index]]))
    if modules:
        by_name = {index: {name: each[index] for name, each in targets.items()} for index in modules}
        _fit_all(pair, modules, {i: _target_by_head(chosen[i], by_name[i], unfitted[i]) for i in modules})
    del averages, targets, unfitted  # before the losses, whose logits take memory as well
    after = pair.divergence()
    loss = losses["closed_form"] = pair.loss()
    if not math.isfinite(losses["base"]):
        raise ValueError("the base's loss on the held-out windows is not finite: look for weights that are not finite")
    result = FirstStage(divergences["as it was"], after, chosen, losses)
    if judge == "attention":
        if mean_divergence(after) > mean_divergence(result.before):
            put(candidates["as it was"])  # heads that share parameters cannot all have their best form
            result = result.uniformly("as it was", result.before, pair.loss(), {"heads": loss})
        return result
    measured |= {name: pair.loss(values) for name, values in candidates.items() if name not in measured}
    form = min(measured, key=measured.__getitem__)
    if loss > measured[form] + NOISE:
        put(candidates[form])
        result = result.uniformly(form, divergences[form], measured[form], {"heads": loss})
    loss = result.losses["closed_form"]
    if loss > losses["swapped"] + NOISE:
        pair.restore()
        result = result.uniformly("as it was", pair.divergence(), losses["swapped"], {"closed_form": loss})
    return result


def _make_candidates(
    pair: Pair, rotations: dict[int, MeanRotation], averages: dict[int, DistanceSums], windows: int
) -> tuple[dict[str, Values], dict[str, dict[int, Target]]]:
    """Return candidate's name -> its parameter values, and name of a fitted candidate -> its targets by layer.

    Afterwards the projections have their initial values, and the modules those of `fitted`.

    Args:
        pair: a model and its base.
        rotations: layer index -> mean rotation.
        averages: layer index -> sums by distance, with the initial values.
        windows: largest number of windows to average over again, once queries are rotated.
    """
    modules = pair.modules()
    projections = parameters_of(rotation.projection for rotation in rotations.values())
    scheme_parameters = parameters_of(modules.values())
    unfitted = copied(scheme_parameters)
    candidates: dict[str, Values] = {}
    targets = {}
    for turns in (True, False) if rotations else (False,):
        for index, rotation in rotations.items():
            pair.restore([rotation.projection])
            rotation.apply(torch.full((pair.base_model.sizes[index].num_heads,), turns))
        turned = copied(projections)
        candidates["turned" if turns else "as it was"] = [*turned, *unfitted]
        if modules:
            name = "turned, fitted" if turns else "fitted"
            targets[name] = _targets(pair, modules, pair.averages(windows, mass=False) if turns else averages)
            _fit_all(pair, modules, targets[name])
            candidates[name] = [*turned, *copied(scheme_parameters)]
    return candidates, targets


def mean_divergence(divergences: Mapping[int, Tensor]) -> float:
    """Return the mean divergence over layers and heads."""
    return torch.cat(list(divergences.values())).mean().item()


def _targets(pair: Pair, modules: dict[int, ScoreModule], averages: dict[int, DistanceSums]) -> dict[int, Target]:
    """Return layer index -> the best coefficients for the layer, see `target_of`."""
    return {index: target_of(module, pair.like(index), averages[index]) for index, module in modules.items()}


def _present(pair: Pair, index: int) -> Tensor:
    """Return the coefficients of a layer's form at the distances of the windows with the present parameters."""
    like, heads = pair.like(index), pair.base_model.sizes[index].num_heads
    distances = torch.arange(pair.held.shape[1], device=like.device)
    return coefficients(pair.owners[index], like, distances, heads).detach().double()


@torch.no_grad()
def hold_tails(pair: Pair) -> None:
    """Fit vectors by distance once more, to themselves and to a tail at greater distances.

    The second stage does not constrain the vectors at distances that its windows do not reach.

    Args:
        pair: a model after the second stage, and its base.
    """
    modules = {index: each for index, each in pair.modules().items() if takes_queries(each.form(pair.like(index)))}
    if not modules:
        return
    few = max(1, TOKENS_AT_ONCE // pair.train.shape[1])  # enough for the mean square of the queries
    targets = _targets(pair, modules, pair.averages(few, mass=False))
    with torch.enable_grad():
        _fit_all(pair, modules, {i: replace(each, values=_present(pair, i)) for i, each in targets.items()})


def _fit_all(pair: Pair, modules: dict[int, ScoreModule], targets: dict[int, Target]) -> None:
    """Fit every module to the targets of the layers that it serves.

    A search for vectors starts from the present values: it has one minimum, and many parameters. A search for a curve
    can have several minima, so it starts from the initial values.
    """
    for module in dict.fromkeys(modules.values()):
        served = [index for index, each in modules.items() if each is module]
        like = pair.like(served[0])
        if not takes_queries(module.form(like)):
            pair.restore([module])
        fit(module, like, [targets[index] for index in served])


def _target_by_head(names: tuple[str, ...], by_name: dict[str, Target], as_it_was: Tensor) -> Target:
    """Return one target from the chosen forms of a layer's heads.

    Args:
        names: names of the chosen forms, one for each head.
        by_name: name of a fitted form -> its target.
        as_it_was: initial coefficients, for heads whose form is not fitted.
    """
    fitted = by_name["fitted"]
    targets = [by_name.get(name, replace(fitted, values=as_it_was)) for name in names]
    parts = ("values", "weights", "metric")
    by_head = {part: torch.stack([getattr(each, part)[head] for head, each in enumerate(targets)]) for part in parts}
    return replace(fitted, **by_head)


def mean_rotations(pair: Pair, averages: dict[int, DistanceSums]) -> dict[int, MeanRotation]:
    """Return layer index -> mean rotation, for layers that the base rotates and whose queries one projection makes.

    Latent attention (MLA) is left out, because it rotates only a part of each head. A pair of dimensions that turns by
    the angle `w` per token has the factor `sum_d m(d) e^(i w d)`, of magnitude 1 or less, where `m(d)` is the share of
    the base's attention at distance `d`. On average, the base's rotation multiplies the product of a query's and a
    key's pair by this factor.
    """
    rotations: dict[int, MeanRotation] = {}
    patched = pair.base_model
    if not pair.own_weights or patched.family.rotation.attention_part is not None:
        return rotations
    rotated = {index for scheme in pair.patch.schemes if scheme.rotations() for index in patched.layers_of(scheme)}
    kept = {index: owner.rotates(len(averages[index].mass)) for index, owner in pair.owners.items()}
    with pair.as_base() as model:
        base = BaseModel.of(model)
        rotary = base.modules.rotary
        layer_types: Any = getattr(base.config, "layer_types", None) if getattr(rotary, "layer_types", None) else None
        for index in pair.layers:
            projection, mass = pair.projections[index], averages[index].mass
            if rotary is None or projection is None or not base.modules.rotated[index] or index in rotated:
                continue
            distances = torch.arange(mass.shape[1], device=mass.device)
            arguments = [layer_types[index]] if layer_types else []
            angles = rotary(projection.weight.new_empty(0, dtype=torch.float32), distances[None], *arguments)
            cos, sin = (each[0].double() for each in by_pair(angles, patched.family.rotation.angles))
            # cos and sin may carry a factor (YaRN's). Queries and keys are both multiplied by it, so it counts twice.
            factor = torch.hypot(cos[0], sin[0])
            share = mass / mass.sum(-1, keepdim=True).clamp(min=1e-12)
            factors = torch.complex(share @ cos, share @ sin)
            if (own := kept.get(index)) is None:
                factors = factors * factor
            else:  # such a scheme rotates some pairs as the base does, and leaves the factor on all
                factors = torch.where(own.to(factors.device), 1, factors / factor)
            if not torch.allclose(factors, torch.ones_like(factors)):  # in a patched base, it can rotate nothing
                interleaved = patched.rotation.pairs == "interleaved"
                rotations[index] = MeanRotation(projection, factors, patched.sizes[index].head_dim, interleaved)
    return rotations
