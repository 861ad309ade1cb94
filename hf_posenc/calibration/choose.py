"""Closed forms tried on a model: for each head the closest, or for all heads the one that predicts best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..live.base_model import BaseModel
from .closed import Averages, Target, Turn, coefficients, fit, takes_queries, target_of, turn_of
from .pair import Pair, Values

CANDIDATES = ("as it was", "fitted", "turned", "turned, fitted")
"""What is tried: the scheme as it was; its curve, or vectors, fitted to what the base's positions add; queries turned
by the mean rotation; both."""

NOISE = 0.01
"""Nats of held-out loss: on a few windows a smaller difference says nothing."""


@dataclass(frozen=True)
class Closed:
    """What the closed forms came to.

    Attributes:
        averages: sums by distance of each layer, with the model as it was.
        before: divergence of each layer's heads, (H,), before anything was put in.
        after: the same with the chosen forms.
        chosen: name of the form of each head, by layer.
        loss: held-out loss with the chosen forms, in nats.
        put_back: held-out loss of what attention would have chosen, if it predicts worse: `heads`.
        apart: see `Calibration`.
    """

    averages: dict[int, Averages]
    before: dict[int, Tensor]
    after: dict[int, Tensor]
    chosen: dict[int, tuple[str, ...]]
    loss: float
    put_back: dict[str, float] = field(default_factory=dict)
    apart: tuple[float, float] | None = None


def close(pair: Pair, windows: int, judge: str) -> Closed:
    """Try the closed forms, and keep for each head the one whose attention is closest to the base's.

    Where that predicts worse than one form for all heads, judged by `loss`, that form is kept.

    Args:
        pair: a model and its base.
        windows: how many the forms average over, at most.
        judge: as in `calibrate`.
    """
    plain = pair.averages(windows)
    turns = _turns(pair, plain)
    modules = {index: module for index in pair.layers if (module := pair.module(index)) is not None}
    if pair.bar.total and not (turns and modules):  # else what is turned is averaged again
        pair.bar.total -= len(pair.train[:windows])
    if pair.bar.total and _shared(modules):
        pair.bar.total += len(pair.held)
    as_it_was = {index: _coefficients(pair, index, plain[index]) for index in modules}
    projections = {id(p): p for turn in turns.values() for p in turn.projection.parameters()}.values()
    placed = {id(p): p for module in modules.values() for p in module.parameters()}.values()
    unturned = [(p, pair.began[id(p)][1]) for p in projections]
    unfitted = [(p, pair.began[id(p)][1]) for p in placed]
    candidates: dict[str, Values] = {"as it was": [*unturned, *unfitted]}
    targets = {}
    if turns:
        for index, turn in turns.items():
            turn.apply(torch.ones(pair.plan.sizes[index].num_heads, dtype=torch.bool))
        turned = [(p, p.detach().clone()) for p in projections]
        candidates["turned"] = [*turned, *unfitted]
        if modules:
            targets["turned, fitted"] = _targets(pair, modules, pair.averages(windows))
            _fit_all(pair, modules, targets["turned, fitted"])
            candidates["turned, fitted"] = [*turned, *((p, p.detach().clone()) for p in placed)]
        pair.restore(turn.projection for turn in turns.values())
    if modules:
        targets["fitted"] = _targets(pair, modules, plain)
        _fit_all(pair, modules, targets["fitted"])
        candidates["fitted"] = [*unturned, *((p, p.detach().clone()) for p in placed)]
    found = pair.divergences(candidates)
    before = found["as it was"]
    names = [name for name in CANDIDATES if name in found]
    best = {index: torch.stack([found[name][index] for name in names]).argmin(0) for index in pair.layers}
    chosen = {index: tuple(names[number] for number in best[index].tolist()) for index in pair.layers}
    for index, turn in turns.items():
        turn.apply(torch.tensor([name.startswith("turned") for name in chosen[index]]))
    if modules:
        picked = {}
        for index in modules:
            by_name = {name: target[index] for name, target in targets.items()}
            picked[index] = _picked(chosen[index], by_name, as_it_was[index])
        _fit_all(pair, modules, picked)
    closed, loss = pair.divergence(), pair.loss()
    apart = _apart(pair, modules, targets, candidates, found, _mean(closed))
    if judge == "attention":
        if _mean(closed) <= _mean(before):
            return Closed(plain, before, closed, chosen, loss, apart=apart)
        uniform = "as it was"  # heads that share parameters cannot each have what is best for them
    else:
        losses = {name: pair.loss(values) for name, values in candidates.items()}
        uniform = min(losses, key=losses.__getitem__)
        if loss <= losses[uniform] + NOISE:
            return Closed(plain, before, closed, chosen, loss, apart=apart)
    with torch.no_grad():
        for p, value in candidates[uniform]:
            p.copy_(value)
    every = {index: (uniform,) * len(names) for index, names in chosen.items()}
    return Closed(plain, before, found[uniform], every, pair.loss(), {"heads": loss}, apart)


def _shared(modules: dict[int, Any]) -> bool:
    """Return whether one module serves several layers."""
    return len({id(module) for module in modules.values()}) < len(modules)


def _mean(divergences: Mapping[int, Tensor]) -> float:
    """Return the mean over layers and heads."""
    return torch.cat(list(divergences.values())).mean().item()


def _apart(
    pair: Pair,
    modules: dict[int, Any],
    targets: dict[str, dict[int, Target]],
    candidates: dict[str, Values],
    found: dict[str, dict[int, Tensor]],
    closed: float,
) -> tuple[float, float] | None:
    """Return the mean divergence of the closed forms, and of those with a module for each layer; None if each has one.

    Args:
        pair: a model and its base.
        modules: of the layers.
        targets: by the name of a candidate that is fitted, what each layer should have.
        candidates: values of all parameters.
        found: their divergences.
        closed: mean divergence of what was chosen.
    """
    if not _shared(modules):
        return None
    kept = [(p, p.detach().clone()) for p in {id(p): p for m in modules.values() for p in m.parameters()}.values()]
    alone, only = {}, {}
    for name, by_layer in targets.items():
        beside = [(p, value) for p, value in candidates[name] if all(p is not own for own, _ in kept)]
        for index, module in modules.items():
            pair.restore([module])
            fit(module, pair.like(index), [by_layer[index]])
            only[f"{name} {index}"] = index
            alone[f"{name} {index}"] = [*beside, *((p, p.detach().clone()) for p in module.parameters())]
    with torch.no_grad():
        for p, value in kept:
            p.copy_(value)
    measured = pair.divergences(alone, only)
    best = {}
    for index in pair.layers:
        tried = [each[index] for each in (*found.values(), *measured.values()) if index in each]
        best[index] = torch.stack(tried).amin(0)
    return closed, _mean(best)


def _targets(pair: Pair, modules: dict[int, Any], averages: dict[int, Averages]) -> dict[int, Target]:
    """Return what each layer's form should have."""
    return {index: target_of(module, pair.like(index), averages[index]) for index, module in modules.items()}


def _coefficients(pair: Pair, index: int, averages: Averages) -> Tensor:
    """Return what a layer's form has."""
    heads, count = averages.difference.shape
    like = pair.like(index)
    found = coefficients(pair.module(index), like, torch.arange(count, device=like.device), heads)
    assert found is not None
    return found.detach().double()


@torch.no_grad()
def settle(pair: Pair, windows: int) -> None:
    """Fit vectors by distance to themselves, with a tail: the second stage has no eye on what its windows do not reach.

    Args:
        pair: a model after the second stage, and its base.
        windows: how many the mean square of queries is taken of.
    """
    modules = {index: module for index in pair.layers if (module := pair.module(index)) is not None}
    modules = {index: each for index, each in modules.items() if takes_queries(each.form(pair.like(index)))}
    if not modules:
        return
    averages = pair.averages(windows)
    targets = {}
    for index, target in _targets(pair, modules, averages).items():
        targets[index] = replace(target, values=_coefficients(pair, index, averages[index]))
    with torch.enable_grad():
        _fit_all(pair, modules, targets)


def _fit_all(pair: Pair, modules: dict[int, Any], targets: dict[int, Target]) -> None:
    """Fit every module to what the layers that it serves should have.

    The search for vectors goes on where the last one ended: it has one minimum, and many numbers. That for a curve can
    have several, and begins where the module began.
    """
    owners: dict[int, tuple[Any, Tensor, list[Target]]] = {}
    for index, module in modules.items():
        owners.setdefault(id(module), (module, pair.like(index), []))[2].append(targets[index])
    with tqdm(total=len(owners), desc="fitting", unit="layer", disable=pair.bar.disable, leave=False) as bar:
        for module, like, wanted in owners.values():
            if not takes_queries(module.form(like)):
                pair.restore([module])
            fit(module, like, wanted)
            bar.update()


def _picked(names: tuple[str, ...], by_name: dict[str, Target], as_it_was: Tensor) -> Target:
    """Return for each head the target of what it was given, and for the others what the module had."""
    fitted = by_name["fitted"]
    kept = Target(as_it_was, fitted.weights, fitted.metric, fitted.unit)
    picked = [by_name.get(name, kept) for name in names]
    return Target(
        torch.stack([each.values[head] for head, each in enumerate(picked)]),
        torch.stack([each.weights[head] for head, each in enumerate(picked)]),
        torch.stack([each.metric[head] for head, each in enumerate(picked)]),
        fitted.unit,
    )


def _turns(pair: Pair, averages: dict[int, Averages]) -> dict[int, Turn]:
    """Return the mean rotation of each layer's heads, where the base rotates and its queries can take it."""
    found: dict[int, Turn] = {}
    if not pair.own_weights:
        return found
    with pair.as_base() as model:
        base = BaseModel.of(model)
        rotary = base.found.rotary
        types: Any = getattr(base.config, "layer_types", None) if getattr(rotary, "layer_types", None) else None
        turned_by_scheme = {
            layer
            for scheme in pair.patch.schemes
            if scheme.acts_on.rotations(scheme)
            for layer in pair.plan.layers_of(scheme)
        }
        for index in pair.layers:
            if rotary is None or not base.found.rotated[index]:
                continue
            if index in turned_by_scheme:
                continue
            turn = turn_of(pair.plan, index, rotary, averages[index].mass, types[index] if types else None)
            if turn is not None:
                found[index] = turn
    return found
