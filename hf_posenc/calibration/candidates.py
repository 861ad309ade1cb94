"""Try closed forms on a model. Every head keeps the closest one, or all heads keep the one that predicts best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..live.base_model import BaseModel
from ..modules import ScoreModule
from .closed_forms import (
    DistanceSums,
    MeanRotation,
    Target,
    coefficients,
    mean_rotation_of,
    takes_queries,
    target_of,
)
from .fitting import fit
from .held_out import NOISE
from .pair import Pair, Values, copied, parameters_of, put
from .state import FirstStage

CANDIDATES = ("as it was", "fitted", "turned", "turned, fitted")
"""Names of the closed forms. `fitted`: the scheme's curve or vectors are fitted to what the base's positions add.
`turned`: the queries are rotated by the mean rotation."""


def try_closed_forms(pair: Pair, windows: int, judge: str, as_it_was: float | None) -> FirstStage:
    """Try the closed forms, and keep for each head the one whose attention is closest to the base's.

    If the judge is `loss` and one form for all heads predicts better, all heads keep that form.

    Args:
        pair: a model and its base.
        windows: largest number of windows that the forms average over.
        judge: `loss` or `attention`, as in `calibrate`.
        as_it_was: held-out loss with the present parameters; None if it is not known.

    Returns:
        The results. Of the held-out losses only `closed_form` is set.
    """
    averages = pair.averages(windows)
    rotations = _mean_rotations(pair, averages)
    modules = pair.modules()
    if pair.bar.total and not (rotations and modules):  # only with both are averages computed a second time
        pair.bar.total -= len(pair.train[:windows])
    if pair.bar.total and _are_shared(modules):
        pair.bar.total += len(pair.held)
    unfitted = {index: _current_coefficients(pair, index, averages[index]) for index in modules}
    candidates, targets = _make_candidates(pair, modules, rotations, averages, windows)
    divergences = pair.divergences(candidates)
    names = [name for name in CANDIDATES if name in divergences]
    best = {index: torch.stack([divergences[name][index] for name in names]).argmin(0) for index in pair.layers}
    chosen = {index: tuple(names[number] for number in best[index].tolist()) for index in pair.layers}
    for index, rotation in rotations.items():
        rotation.apply(torch.tensor([name.startswith("turned") for name in chosen[index]]))
    by_head = {}
    for index in modules:
        by_name = {name: by_layer[index] for name, by_layer in targets.items()}
        by_head[index] = _target_by_head(chosen[index], by_name, unfitted[index])
    if modules:
        _fit_all(pair, modules, by_head)
    after = pair.divergence()
    apart = _divergence_apart(pair, modules, targets, candidates, divergences, _mean_divergence(after))
    curves = {index: each.mean_difference.float().cpu() for index, each in averages.items()}
    del averages, targets, by_head, unfitted  # before the losses, whose logits take memory as well
    token_losses = pair.token_losses()
    loss = pair.mean_loss(token_losses)
    result = FirstStage(divergences["as it was"], after, curves, chosen, {"closed_form": loss}, apart=apart)
    if judge == "attention":
        if _mean_divergence(after) <= _mean_divergence(result.before):
            return result
        uniform = "as it was"  # heads that share parameters cannot all have their best form
        losses = {}
    else:
        losses = {} if as_it_was is None else {"as it was": as_it_was}
        for name, values in candidates.items():
            if name not in losses:
                losses[name] = pair.loss(values, rival=token_losses)
        uniform = min(losses, key=losses.__getitem__)
        if loss <= losses[uniform] + NOISE:
            return result
    put(candidates[uniform])
    return replace(
        result,
        closed=divergences[uniform],
        chosen={index: (uniform,) * len(names) for index, names in chosen.items()},
        losses={"closed_form": losses[uniform] if uniform in losses else pair.loss()},
        put_back={"heads": loss},
    )


def _make_candidates(
    pair: Pair,
    modules: dict[int, ScoreModule],
    rotations: dict[int, MeanRotation],
    averages: dict[int, DistanceSums],
    windows: int,
) -> tuple[dict[str, Values], dict[str, dict[int, Target]]]:
    """Return candidate's name -> its parameter values, and name of a fitted candidate -> its targets by layer.

    Afterwards the projections have their initial values, and the modules those of `fitted`.

    Args:
        pair: a model and its base.
        modules: layer index -> the scheme's module.
        rotations: layer index -> mean rotation.
        averages: layer index -> sums by distance, with the initial values.
        windows: largest number of windows to average over again, once queries are rotated.
    """
    projections = parameters_of(rotation.projection for rotation in rotations.values())
    scheme_parameters = parameters_of(modules.values())
    unturned = [(p, pair.initial_values[id(p)][1]) for p in projections]
    unfitted = [(p, pair.initial_values[id(p)][1]) for p in scheme_parameters]
    candidates: dict[str, Values] = {"as it was": [*unturned, *unfitted]}
    targets = {}
    if rotations:
        for index, rotation in rotations.items():
            rotation.apply(torch.ones(pair.base_model.sizes[index].num_heads, dtype=torch.bool))
        turned = copied(projections)
        candidates["turned"] = [*turned, *unfitted]
        if modules:
            targets["turned, fitted"] = _targets(pair, modules, pair.averages(windows, mass=False))
            _fit_all(pair, modules, targets["turned, fitted"])
            candidates["turned, fitted"] = [*turned, *copied(scheme_parameters)]
        pair.restore(rotation.projection for rotation in rotations.values())
    if modules:
        targets["fitted"] = _targets(pair, modules, averages)
        _fit_all(pair, modules, targets["fitted"])
        candidates["fitted"] = [*unturned, *copied(scheme_parameters)]
    return candidates, targets


def _are_shared(modules: dict[int, ScoreModule]) -> bool:
    """Return whether one module serves several layers."""
    return len({id(module) for module in modules.values()}) < len(modules)


def _mean_divergence(divergences: Mapping[int, Tensor]) -> float:
    """Return the mean divergence over layers and heads."""
    return torch.cat(list(divergences.values())).mean().item()


def _divergence_apart(
    pair: Pair,
    modules: dict[int, ScoreModule],
    targets: dict[str, dict[int, Target]],
    candidates: dict[str, Values],
    divergences: dict[str, dict[int, Tensor]],
    closed: float,
) -> tuple[float, float] | None:
    """Return the mean divergence with shared modules, and with one module for each layer. None if none is shared.

    Args:
        pair: a model and its base.
        modules: layer index -> the scheme's module.
        targets: name of a fitted candidate -> its targets by layer.
        candidates: candidate's name -> its parameter values.
        divergences: candidate's name -> its divergences by layer.
        closed: mean divergence of the chosen forms, with shared modules.
    """
    if not _are_shared(modules):
        return None
    shared_values = copied(parameters_of(modules.values()))
    shared = {id(p) for p, _ in shared_values}
    alone, only = {}, {}
    for name, by_layer in targets.items():
        other_values = [(p, value) for p, value in candidates[name] if id(p) not in shared]
        for index, module in modules.items():
            pair.restore([module])
            fit(module, pair.like(index), [by_layer[index]])
            only[f"{name} {index}"] = index
            alone[f"{name} {index}"] = [*other_values, *copied(module.parameters())]
    put(shared_values)
    divergences_alone = pair.divergences(alone, only)
    best = {}
    for index in pair.layers:
        tried = [each[index] for each in (*divergences.values(), *divergences_alone.values()) if index in each]
        best[index] = torch.stack(tried).amin(0)
    return closed, _mean_divergence(best)


def _targets(pair: Pair, modules: dict[int, ScoreModule], averages: dict[int, DistanceSums]) -> dict[int, Target]:
    """Return layer index -> the best coefficients for the layer, see `target_of`."""
    return {index: target_of(module, pair.like(index), averages[index]) for index, module in modules.items()}


def _current_coefficients(pair: Pair, index: int, averages: DistanceSums) -> Tensor:
    """Return the coefficients of a layer's form with the present parameters."""
    heads, count = averages.difference.shape
    like = pair.like(index)
    module = pair.module(index)
    assert module is not None
    values = coefficients(module, like, torch.arange(count, device=like.device), heads)
    assert values is not None
    return values.detach().double()


@torch.no_grad()
def hold_tails(pair: Pair, windows: int) -> None:
    """Fit vectors by distance once more, to themselves and to a tail at greater distances.

    The second stage does not constrain the vectors at distances that its windows do not reach.

    Args:
        pair: a model after the second stage, and its base.
        windows: largest number of windows for the mean square of the queries.
    """
    modules = {index: each for index, each in pair.modules().items() if takes_queries(each.form(pair.like(index)))}
    if not modules:
        return
    averages = pair.averages(windows, mass=False)
    targets = {}
    for index, target in _targets(pair, modules, averages).items():
        targets[index] = replace(target, values=_current_coefficients(pair, index, averages[index]))
    with torch.enable_grad():
        _fit_all(pair, modules, targets)


def _fit_all(pair: Pair, modules: dict[int, ScoreModule], targets: dict[int, Target]) -> None:
    """Fit every module to the targets of the layers that it serves.

    A search for vectors starts from the present values: it has one minimum, and many parameters. A search for a curve
    can have several minima, so it starts from the initial values.
    """
    owners: dict[int, tuple[ScoreModule, Tensor, list[Target]]] = {}
    for index, module in modules.items():
        owners.setdefault(id(module), (module, pair.like(index), []))[2].append(targets[index])
    with tqdm(total=len(owners), desc="fitting", unit="layer", disable=pair.bar.disable, leave=False) as bar:
        for module, like, wanted in owners.values():
            if not takes_queries(module.form(like)):
                pair.restore([module])
            fit(module, like, wanted)
            bar.update()


def _target_by_head(names: tuple[str, ...], by_name: dict[str, Target], as_it_was: Tensor) -> Target:
    """Return one target from the chosen forms of a layer's heads.

    Args:
        names: names of the chosen forms, one for each head.
        by_name: name of a fitted form -> its target.
        as_it_was: initial coefficients, for heads whose form is not fitted.
    """
    fitted = by_name["fitted"]
    unfitted = Target(as_it_was, fitted.weights, fitted.metric, fitted.last_factor)
    targets = [by_name.get(name, unfitted) for name in names]
    return Target(
        torch.stack([target.values[head] for head, target in enumerate(targets)]),
        torch.stack([target.weights[head] for head, target in enumerate(targets)]),
        torch.stack([target.metric[head] for head, target in enumerate(targets)]),
        fitted.last_factor,
    )


def _mean_rotations(pair: Pair, averages: dict[int, DistanceSums]) -> dict[int, MeanRotation]:
    """Return layer index -> mean rotation, for layers that the base rotates and whose queries one projection makes.

    Latent attention (MLA) is left out, because it rotates only a part of each head.
    """
    rotations: dict[int, MeanRotation] = {}
    if not pair.own_weights or pair.base_model.family.rotation.attention_part is not None:
        return rotations
    owners = {index: pair.owner(index) for index in pair.layers}
    kept = {index: owner.rotates(len(averages[index].mass)) for index, owner in owners.items() if owner is not None}
    with pair.as_base() as model:
        base = BaseModel.of(model)
        rotary = base.modules.rotary
        layer_types: Any = getattr(base.config, "layer_types", None) if getattr(rotary, "layer_types", None) else None
        patched = pair.base_model
        rotated = {
            i for scheme in pair.patch.schemes if scheme.acts_on.rotations(scheme) for i in patched.layers_of(scheme)
        }
        for index in pair.layers:
            projection = pair.projections[index]
            if rotary is None or projection is None or not base.modules.rotated[index] or index in rotated:
                continue
            layer_type = layer_types[index] if layer_types else None
            mass = averages[index].mass
            rotation = mean_rotation_of(patched, index, projection, rotary, mass, layer_type, kept.get(index))
            if rotation is not None:
                rotations[index] = rotation
    return rotations
