"""The rotation of each layer as computed, compared with what the config says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from .fingerprint import EXACT, LayerTurning, Turning, close
from .report import Outcome, in_words, joined
from .subject import Promise, Subject

TIGHT = 1e-4
"""The same where frequencies are compared that roundings changed."""

FAST = 1e-3
"""Radians per token from which a pair shows that it is a token ahead."""

_Problem = tuple[str, str, float]
"""Question, what was found, number."""


def describe_turning(turning: Turning, of: str = " of each head") -> str:
    """Return a rotation in words: how many pairs turn, their layout, base and frequencies."""
    if turning.odd:
        return f"{len(turning.odd)} of {turning.size} dimensions{of} change with the position, but do not turn"
    if not turning.pairs:
        return "no pair turns"
    direction = ", backwards" if bool((turning.frequencies.sum(0) < 0).all()) else ""
    frequencies = turning.frequencies.abs().amax(0)
    share = 200 * len(turning.pairs) / turning.size
    layout = "" if turning.layout is None else f", layout {turning.layout}"
    theta = base_of(frequencies)
    base = "" if theta is None or turning.zero else f", base {_rounded(theta)}"
    zero = f" ({len(turning.zero) // 2} are zero in all heads)" if turning.zero else ""
    return (
        f"{len(turning.pairs)} of {turning.size // 2} pairs{of} turn ({share:.0f} %){zero}{layout}{direction}"
        f"{base}, by {frequencies.max():.3g} to {frequencies.min():.3g} radians per token"
    )


def _head_by_head(turning: Turning) -> str:
    """Return in words how heads turn that differ."""
    heads: dict[str, list[int]] = {}
    for head, each in enumerate(turning.heads):
        heads.setdefault(describe_turning(each, ""), []).append(head)
    return "; ".join(f"{in_words(numbers, 'head')}: {words}" for words, numbers in heads.items())


def _rounded(theta: float) -> str:
    """Return a base with three digits."""
    return f"{float(f'{theta:.3g}'):,.10g}"


def base_of(frequencies: Tensor) -> float | None:
    """Return the base of frequencies `c base^(-i / F)`; None if they are not of this form, or fewer than two."""
    count = len(frequencies)
    if count < 2 or frequencies.min() <= 0:
        return None
    base = (frequencies[0] / frequencies[-1]) ** (count / (count - 1))
    formula = frequencies[0] * base ** -(torch.arange(count, dtype=torch.float64) / count)
    return base.item() if torch.allclose(formula, frequencies, rtol=1e-2, atol=0) else None


def same(measured: Tensor, wanted: Tensor, precision: float, exact: float = EXACT) -> bool:
    """Return whether all frequencies are as wanted, up to what a fingerprint can tell."""
    return measured.shape == wanted.shape and bool(close(measured, wanted, precision, exact).all())


def rotation_outcomes(subject: Subject, turnings: Mapping[int, LayerTurning]) -> Iterator[Outcome]:
    """Yield the rotation of the layers, and every difference of a stock model from its config.

    Args:
        subject: the model.
        turnings: layer index -> how it turns, within the trained length.
    """
    by_family = subject.base is not None  # otherwise an unrotated layer may be intended
    outcomes, unseen = [], []
    turns = any(turning.keys.pairs for turning in turnings.values())
    for layer, turning in turnings.items():
        promise = None if subject.patch else subject.promised(layer, turning.keys.size)
        asked = not subject.patch and (by_family or (promise is not None and bool(turning.keys.pairs or not turns)))
        if asked and (problem := _problem(turning, promise)) is not None:
            about, found, number = problem
            outcomes.append((layer, Outcome(about, False, found, number)))
        else:
            found = describe_turning(turning.queries) + (", as the config says" if asked else "")
            outcomes.append((layer, Outcome("rotation", True, found, float(len(turning.queries.pairs)))))
        if by_family and promise is not None and promise.layout is None:
            reason = "which dimensions of the projections are a pair: queries and keys do not show it here"
            unseen.append((layer, Outcome("layout", None, reason)))
    reason = (
        f"queries and keys could not be seen under {subject.config._attn_implementation or 'eager'}: load the model "
        "with attn_implementation='sdpa' or 'eager' (or the layer has no attention of queries and keys)"
    )
    layers = range(len(subject.layers)) if subject.base is None else subject.base.sizes
    hidden = [(layer, Outcome("rotation", None, reason)) for layer in layers if layer not in turnings]
    yield from joined([*outcomes, *unseen, *hidden])


def _is_rounded(turning: Turning, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Return whether frequencies are those wanted in half precision, which is coarser than `EXACT`."""
    measured, rounded = turning.frequencies.abs().amax(0), wanted.to(dtype).double()
    tight = partial(same, measured, precision=turning.precision, exact=TIGHT)
    return not tight(_seen(wanted, turning)) and tight(_seen(rounded[rounded > 0], turning))


def _problem(turning: LayerTurning, promise: Promise | None) -> _Problem | None:
    """Return the first difference between a layer's rotation and what the config asks for."""
    sides = {"queries": turning.queries, "keys": turning.keys}
    for name, side in sides.items():
        if side.odd:
            of = f"{len(side.odd)} of {side.size} dimensions of the {name}"
            return "rotation", f"{of} change with the position, but not as pairs that turn", float(len(side.odd))
    for name, side in sides.items():
        if side.heads:
            words = f"the heads of the {name} turn differently. {_head_by_head(side).capitalize()}"
            return "rotation", words, float(len(side.heads))
    if not _turn_alike(turning.queries, turning.keys):
        words = ". ".join(f"{name.capitalize()}: {describe_turning(side)}" for name, side in sides.items())
        count = len(set(turning.queries.pairs) ^ set(turning.keys.pairs))
        return "rotation", f"queries and keys turn differently. {words}", float(count)
    problem = _against(turning.keys, promise)
    return _at_start(turning, promise) if promise is not None and problem is None else problem


def _at_start(turning: LayerTurning, promise: Promise) -> _Problem | None:
    """Return what is wrong with queries and keys that turn by the right frequencies, as a token at position 0 shows."""
    bent = [name for name, side in (("queries", turning.queries), ("keys", turning.keys)) if side.rescaled]
    if promise.rescaled is False and bent:
        words = f"weights multiply the dimensions of the {' and '.join(bent)} after they turn, other ones within a pair"
        return "norm", words, float(len(bent))
    if turning.first is None:
        return None
    queries = _beginning(turning, turning.first[0], turning.queries, promise.factor)
    keys = _beginning(turning, turning.first[1], turning.keys, promise.factor)
    if queries is None or keys is None:
        return None
    if (ahead := queries[0] - keys[0]) != 0:
        where = f"{abs(ahead)} token{'s' if abs(ahead) > 1 else ''} {'ahead of' if ahead > 0 else 'behind'}"
        return "offset", f"queries turn as if they were {where} the keys of the same position", float(ahead)
    if (missing := promise.factor**2 / (queries[1] * keys[1])) != 1:
        effect = f"has no effect: scores should be {missing:.3g} times as large"
        return "scaling", f"the attention factor of the config's scaling, {promise.scaling}, {effect}", missing
    return None


def _beginning(layer: LayerTurning, states: Tensor, turning: Turning, factor: float) -> tuple[int, float] | None:
    """Return by how many tokens and by which factor the states at position 0 differ from what was not turned yet.

    The factor is the given one or 1. None means that it cannot be told, for example because a norm follows.
    """
    fast = (turning.frequencies.abs().amin(0) >= FAST).nonzero().flatten().tolist()
    first, second = (states[:, [turning.pairs[number][side] for number in fast]] for side in (0, 1))
    for tokens in (0, 1, -1, 2, -2):
        angles = -tokens * turning.frequencies[:, fast]
        turned = [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()]
        for each in (factor, 1.0):
            if layer.holds(torch.stack(turned) / each):
                return tokens, each
    return None


def _turn_alike(queries: Turning, keys: Turning) -> bool:
    """Return whether queries and keys turn by the same pairs and frequencies, as far as both can be seen."""
    sides = [dict(zip(side.pairs, side.frequencies.amax(0).tolist(), strict=True)) for side in (queries, keys)]
    precision = max(queries.precision, keys.precision)
    unseen = {*queries.zero, *keys.zero}
    for pair in sides[0].keys() | sides[1].keys():
        one, other = (side.get(pair, 0.0) for side in sides)
        if unseen.isdisjoint(pair) and abs(one - other) > EXACT * abs(one) + precision:
            return False
    return True


def _against(turning: Turning, promise: Promise | None) -> _Problem | None:
    """Return the first difference between a rotation and what the config asks for."""
    words, count = describe_turning(turning), float(len(turning.pairs))
    if promise is None:
        found = f"the config says that this layer is not rotated, but {words}"
        return ("unrotated layer", found, count) if turning.pairs else None
    wanted = promised = promise.frequencies()
    if not turning.pairs:
        return "rotation", f"the config asks for {len(wanted)} turning pairs, but {words}", count
    measured = turning.frequencies.abs().amax(0)
    rounded = _is_rounded(turning, promised, promise.dtype)
    if len(measured) != len(wanted):
        wanted = _seen(wanted, turning)
    if len(measured) != len(wanted) and not rounded:
        return "share", f"{len(measured)} pairs of each head turn, the config asks for {len(wanted)}", count
    if None not in (turning.layout, promise.layout) and turning.layout != promise.layout:
        return "layout", f"the pairs that turn are {turning.layout}, the model type's are {promise.layout}", count
    first = promise.first_pair
    if promise.layout is not None and turning.pairs[0] != first and {*turning.zero}.isdisjoint(first):
        where = f"of the dimensions {turning.pairs[0]}, the model type's of {first}"
        return "share", f"the first pair that turns is {where}", count
    signs = turning.frequencies.sign()
    if promise.backwards is not None and bool((signs == (1 if promise.backwards else -1)).any()):
        way = "forwards" if promise.backwards else "backwards"
        return "direction", f"pairs turn {way}, those of the model type the other way", count
    if rounded or same(measured, wanted, turning.precision):
        return None
    return _other_frequencies(measured, wanted, promise, turning)


def _seen(wanted: Tensor, turning: Turning) -> Tensor:
    """Leave out frequencies that are too slow to be seen, and those of pairs that are zero throughout."""
    measured = turning.frequencies.abs().amax(0)
    seen = close(measured, wanted[:, None], turning.precision).any(1)
    possible = seen | (wanted > turning.precision)
    wanted, seen = wanted[possible], seen[possible]
    lost = len(wanted) - len(measured)
    slowest = wanted.argsort()[: max(lost, 0)]
    if lost > 0 and wanted[slowest].max() <= turning.precision:  # near a measured one, and yet too slow to be seen
        kept = torch.ones_like(seen).index_fill(0, slowest, False)
        wanted, seen, lost = wanted[kept], seen[kept], 0
    return wanted[seen] if 0 < lost <= len(turning.zero) // 2 and int(seen.sum()) == len(measured) else wanted


def _off(measured: Tensor, wanted: Tensor) -> float:
    """Return the largest relative difference of two lists of frequencies; NaN if they have not the same length."""
    return ((measured - wanted).abs() / wanted).max().item() if len(measured) == len(wanted) else float("nan")


def _other_frequencies(measured: Tensor, wanted: Tensor, promise: Promise, turning: Turning) -> _Problem:
    """Say how frequencies differ from those of the config."""
    off, scaling, theta = _off(measured, wanted), promise.scaling, base_of(measured)
    one_is_off = f"one frequency is off by {off:.3g} times its value"
    if scaling != "default" and same(measured, _seen(promise.unscaled(), turning), turning.precision):
        effect = f"has no effect: pairs turn as without it, by the base {_rounded(promise.theta)}"
        return "scaling", f"the scaling of the config, {scaling}, {effect}; {one_is_off}", off
    if _is_rounded(turning, wanted, torch.bfloat16):
        return "frequencies", f"the frequencies of the config, rounded to bfloat16: {one_is_off}", off
    if theta is not None and scaling == "default" and abs(measured[0] - 1) < EXACT:
        found = f"the frequencies have the base {_rounded(theta)}, the config says rope_theta {_rounded(promise.theta)}"
        return "base", found, theta
    asked = f"those of the config ({scaling}, base {_rounded(promise.theta)})"
    return "frequencies", f"the frequencies are not {asked}: {one_is_off}", off


def beyond_outcomes(subject: Subject, turnings: Mapping[int, LayerTurning], length: int) -> Iterator[Outcome]:
    """Yield whether a scaling that depends on the length takes effect beyond the original length.

    Args:
        subject: the model.
        turnings: layer index -> how it turns in a sequence of `length` tokens.
        length: number of tokens, as positions count them.
    """
    problems, compared = [], False
    for layer, turning in turnings.items():
        keys, promise = turning.keys, subject.promised(layer, turning.keys.size)
        if promise is None or not promise.depends_on_length or keys.odd:
            continue
        compared = True
        measured, wanted = keys.frequencies.abs().amax(0), _seen(promise.frequencies(length), keys)
        if not same(measured, wanted, keys.precision):
            unchanged = same(measured, _seen(promise.frequencies(), keys), keys.precision)
            effect = "has no effect there" if unchanged else "gives other frequencies there than transformers' function"
            where = f"at {length} tokens, beyond the original length"
            found = f"{where}, the scaling of the config, {promise.scaling}, {effect}"
            problems.append((layer, Outcome("scaling", False, found, _off(measured, wanted))))
    yield from joined(problems)
    if compared and not problems:
        yield Outcome("scaling", True, f"the scaling takes effect beyond the original length: seen at {length} tokens")
