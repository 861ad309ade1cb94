"""Closed forms tried on a model: for each head the one that leaves its attention closest to the base's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..patching.plan import BaseModel
from .closed import Averages, Target, Turn, coefficients, fit, takes_queries, target_of, turn_of
from .pair import Pair, Values

CANDIDATES = ("as it was", "fitted", "turned", "turned, fitted")
"""What is tried: the scheme as it was; its curve, or vectors, fitted to what the base's positions add; queries turned
by the mean rotation; both."""


@dataclass(frozen=True)
class Closed:
    """What the closed forms came to.

    Attributes:
        averages: sums by distance of each layer, with the model as it was.
        before: divergence of each layer's heads, (H,), before anything was put in.
        after: the same with the chosen forms.
        chosen: name of the form of each head, by layer.
    """

    averages: dict[int, Averages]
    before: dict[int, Tensor]
    after: dict[int, Tensor]
    chosen: dict[int, tuple[str, ...]]


def close(pair: Pair, windows: int) -> Closed:
    """Try the closed forms, and keep the best of each head."""
    plain = pair.averages(windows)
    turns = _turns(pair, plain)
    modules = {index: module for index in pair.layers if (module := pair.module(index)) is not None}
    if pair.bar.total and not (turns and modules):  # else what is turned is averaged again
        pair.bar.total -= len(pair.train[:windows])
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
    closed = pair.divergence()
    if sum(each.sum() for each in closed.values()) > sum(each.sum() for each in before.values()):
        # Heads that share parameters cannot each have what is best for them.
        pair.restore([*(turn.projection for turn in turns.values()), *modules.values()])
        return Closed(plain, before, before, {i: ("as it was",) * len(each) for i, each in chosen.items()})
    return Closed(plain, before, closed, chosen)


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
    for module, like, wanted in owners.values():
        if not takes_queries(module.form(like)):
            pair.restore([module])
        fit(module, like, wanted)


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
    found = {}
    with pair.as_base() as model:
        base = BaseModel.of(model)
        rotary = base.found.rotary
        types: Any = getattr(base.config, "layer_types", None) if getattr(rotary, "layer_types", None) else None
        for index in pair.layers:
            if rotary is None or not base.found.rotated[index]:
                continue
            if any(scheme.acts_on.rotates and index in pair.plan.layers_of(scheme) for scheme in pair.patch.schemes):
                continue
            turn = turn_of(pair.plan, index, rotary, averages[index].mass, types[index] if types else None)
            if turn is not None:
                found[index] = turn
    return found
