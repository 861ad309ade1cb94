"""Closed forms tried on a model: for each head the closest is kept, or for all heads the one that predicts best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..live.base_model import BaseModel
from ..modules import ScoreModule
from .closed_forms import Averages, MeanRotation, Target, coefficients, fit, mean_rotation_of, takes_queries, target_of
from .pair import Pair, Values, copied, parameters_of, put
from .state import FirstStage

CANDIDATES = ("as it was", "fitted", "turned", "turned, fitted")
"""The closed forms: the scheme as it was; its curve, or vectors, fitted to what the base's positions add; queries
turned by the mean rotation; both."""

NOISE = 0.01
"""Nats of held-out loss: on a few windows a smaller difference says nothing."""


def try_closed_forms(pair: Pair, windows: int, judge: str) -> FirstStage:
    """Try the closed forms, and keep for each head the one whose attention is closest to the base's.

    Where these forms predict worse than one form for all heads, and the judge is `loss`, that one form is kept.

    Args:
        pair: a model and its base.
        windows: number of windows that the forms average over, at most.
        judge: as in `calibrate`.

    Returns:
        The results, with no other held-out loss than that of what was kept.
    """
    averages = pair.averages(windows)
    rotations = _mean_rotations(pair, averages)
    modules = pair.modules()
    if pair.bar.total and not (rotations and modules):  # with both, there are averages of the turned queries too
        pair.bar.total -= len(pair.train[:windows])
    if pair.bar.total and _shared(modules):
        pair.bar.total += len(pair.held)
    as_it_was = {index: _coefficients(pair, index, averages[index]) for index in modules}
    candidates, targets = _candidates(pair, modules, rotations, averages, windows)
    found = pair.divergences(candidates)
    names = [name for name in CANDIDATES if name in found]
    best = {index: torch.stack([found[name][index] for name in names]).argmin(0) for index in pair.layers}
    chosen = {index: tuple(names[number] for number in best[index].tolist()) for index in pair.layers}
    for index, rotation in rotations.items():
        rotation.apply(torch.tensor([name.startswith("turned") for name in chosen[index]]))
    if modules:
        picked = {}
        for index in modules:
            by_name = {name: target[index] for name, target in targets.items()}
            picked[index] = _picked(chosen[index], by_name, as_it_was[index])
        _fit_all(pair, modules, picked)
    after, loss = pair.divergence(), pair.loss()
    result = FirstStage(
        found["as it was"],
        after,
        {index: each.mean_difference.float().cpu() for index, each in averages.items()},
        chosen,
        {"closed_form": loss},
        apart=_apart(pair, modules, targets, candidates, found, _mean(after)),
    )
    if judge == "attention":
        if _mean(after) <= _mean(result.before):
            return result
        uniform = "as it was"  # heads that share parameters cannot each have what is best for them
    else:
        losses = {name: pair.loss(values) for name, values in candidates.items()}
        uniform = min(losses, key=losses.__getitem__)
        if loss <= losses[uniform] + NOISE:
            return result
    put(candidates[uniform])
    return replace(
        result,
        closed=found[uniform],
        chosen={index: (uniform,) * len(names) for index, names in chosen.items()},
        losses={"closed_form": pair.loss()},
        put_back={"heads": loss},
    )


def _candidates(
    pair: Pair,
    modules: dict[int, ScoreModule],
    rotations: dict[int, MeanRotation],
    averages: dict[int, Averages],
    windows: int,
) -> tuple[dict[str, Values], dict[str, dict[int, Target]]]:
    """Return the parameters of each candidate, and the targets of those that are fitted.

    The projections end as they were, the modules as in `fitted`.

    Args:
        pair: a model and its base.
        modules: modules of the layers.
        rotations: mean rotations of the layers.
        averages: sums by distance, with the model as it was.
        windows: number of windows to average over, at most, once queries are turned.
    """
    projections = parameters_of(rotation.projection for rotation in rotations.values())
    placed = parameters_of(modules.values())
    unturned = [(p, pair.began[id(p)][1]) for p in projections]
    unfitted = [(p, pair.began[id(p)][1]) for p in placed]
    candidates: dict[str, Values] = {"as it was": [*unturned, *unfitted]}
    targets = {}
    if rotations:
        for index, rotation in rotations.items():
            rotation.apply(torch.ones(pair.base_model.sizes[index].num_heads, dtype=torch.bool))
        turned = copied(projections)
        candidates["turned"] = [*turned, *unfitted]
        if modules:
            targets["turned, fitted"] = _targets(pair, modules, pair.averages(windows))
            _fit_all(pair, modules, targets["turned, fitted"])
            candidates["turned, fitted"] = [*turned, *copied(placed)]
        pair.restore(rotation.projection for rotation in rotations.values())
    if modules:
        targets["fitted"] = _targets(pair, modules, averages)
        _fit_all(pair, modules, targets["fitted"])
        candidates["fitted"] = [*unturned, *copied(placed)]
    return candidates, targets


def _shared(modules: dict[int, ScoreModule]) -> bool:
    """Return whether one module serves several layers."""
    return len({id(module) for module in modules.values()}) < len(modules)


def _mean(divergences: Mapping[int, Tensor]) -> float:
    """Return the mean over layers and heads."""
    return torch.cat(list(divergences.values())).mean().item()


def _apart(
    pair: Pair,
    modules: dict[int, ScoreModule],
    targets: dict[str, dict[int, Target]],
    candidates: dict[str, Values],
    found: dict[str, dict[int, Tensor]],
    closed: float,
) -> tuple[float, float] | None:
    """Return the mean divergence of the closed forms, and of those with a module for each layer; None if each has one.

    Args:
        pair: a model and its base.
        modules: modules of the layers.
        targets: targets of each layer, by the name of a candidate that is fitted.
        candidates: values of all parameters, by name.
        found: divergences of the candidates.
        closed: mean divergence of what was chosen.
    """
    if not _shared(modules):
        return None
    kept = copied(parameters_of(modules.values()))
    alone, only = {}, {}
    for name, by_layer in targets.items():
        beside = [(p, value) for p, value in candidates[name] if all(p is not own for own, _ in kept)]
        for index, module in modules.items():
            pair.restore([module])
            fit(module, pair.like(index), [by_layer[index]])
            only[f"{name} {index}"] = index
            alone[f"{name} {index}"] = [*beside, *copied(module.parameters())]
    put(kept)
    measured = pair.divergences(alone, only)
    best = {}
    for index in pair.layers:
        tried = [each[index] for each in (*found.values(), *measured.values()) if index in each]
        best[index] = torch.stack(tried).amin(0)
    return closed, _mean(best)


def _targets(pair: Pair, modules: dict[int, ScoreModule], averages: dict[int, Averages]) -> dict[int, Target]:
    """Return the coefficients that would serve each layer best."""
    return {index: target_of(module, pair.like(index), averages[index]) for index, module in modules.items()}


def _coefficients(pair: Pair, index: int, averages: Averages) -> Tensor:
    """Return the coefficients of a layer's form."""
    heads, count = averages.difference.shape
    like = pair.like(index)
    module = pair.module(index)
    assert module is not None
    found = coefficients(module, like, torch.arange(count, device=like.device), heads)
    assert found is not None
    return found.detach().double()


@torch.no_grad()
def hold_tails(pair: Pair, windows: int) -> None:
    """Fit vectors by distance to themselves, with a tail: the second stage does not see what its windows do not reach.

    Args:
        pair: a model after the second stage, and its base.
        windows: number of windows for the mean square of the queries, at most.
    """
    modules = {index: each for index, each in pair.modules().items() if takes_queries(each.form(pair.like(index)))}
    if not modules:
        return
    averages = pair.averages(windows)
    targets = {}
    for index, target in _targets(pair, modules, averages).items():
        targets[index] = replace(target, values=_coefficients(pair, index, averages[index]))
    with torch.enable_grad():
        _fit_all(pair, modules, targets)


def _fit_all(pair: Pair, modules: dict[int, ScoreModule], targets: dict[int, Target]) -> None:
    """Fit every module to the targets of the layers that it serves.

    A search for vectors goes on where the last one ended: it has one minimum, and many numbers. A search for a curve
    can have several minima, and begins where the module began.
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


def _picked(names: tuple[str, ...], by_name: dict[str, Target], as_it_was: Tensor) -> Target:
    """Return for each head the target of its chosen form, or what the module had where that form is not fitted."""
    fitted = by_name["fitted"]
    kept = Target(as_it_was, fitted.weights, fitted.metric, fitted.unit)
    picked = [by_name.get(name, kept) for name in names]
    return Target(
        torch.stack([each.values[head] for head, each in enumerate(picked)]),
        torch.stack([each.weights[head] for head, each in enumerate(picked)]),
        torch.stack([each.metric[head] for head, each in enumerate(picked)]),
        fitted.unit,
    )


def _mean_rotations(pair: Pair, averages: dict[int, Averages]) -> dict[int, MeanRotation]:
    """Return the mean rotation of each layer's heads, where the base rotates and one projection makes the queries.

    Latent attention (MLA) is left out, because there only a part of each head is rotated.
    """
    rotations: dict[int, MeanRotation] = {}
    if not pair.own_weights or pair.base_model.family.rotation.attention_part is not None:
        return rotations
    with pair.as_base() as model:
        base = BaseModel.of(model)
        rotary = base.found.rotary
        types: Any = getattr(base.config, "layer_types", None) if getattr(rotary, "layer_types", None) else None
        patched = pair.base_model
        rotated = {
            i for scheme in pair.patch.schemes if scheme.acts_on.rotations(scheme) for i in patched.layers_of(scheme)
        }
        for index in pair.layers:
            projection = pair.projections[index]
            if rotary is None or projection is None or not base.found.rotated[index] or index in rotated:
                continue
            kind = types[index] if types else None
            rotation = mean_rotation_of(patched, index, projection, rotary, averages[index].mass, kind)
            if rotation is not None:
                rotations[index] = rotation
    return rotations
