"""The rotation of each layer as computed, compared with what the config says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from .fingerprint import LayerTurning, Turning
from .promises import Promise
from .report import Outcome

EXACT = 2e-3
"""Relative difference up to which two frequencies are the same."""


def describe_turning(turning: Turning) -> str:
    """Return a rotation in words: how many pairs turn, their layout, base and frequencies."""
    if turning.odd:
        return f"{len(turning.odd)} of {turning.size} dimensions of each head change with the position, but do not turn"
    if not turning.pairs:
        return "queries and keys do not turn"
    frequencies = turning.frequencies.abs().amax(0)
    share = 200 * len(turning.pairs) / turning.size
    layout = "" if turning.layout is None else f", layout {turning.layout}"
    theta = base_of(frequencies)
    base = "" if theta is None or turning.zero else f", base {_rounded(theta)}"
    zero = f" ({len(turning.zero) // 2} are zero in all heads)" if turning.zero else ""
    return (
        f"{len(turning.pairs)} of {turning.size // 2} pairs of each head turn ({share:.0f} %){zero}{layout}{base}, by "
        f"{frequencies.max():.3g} to {frequencies.min():.3g} radians per token"
    )


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


def close(measured: Tensor, wanted: Tensor, precision: float) -> Tensor:
    """Return for each frequency whether it is as wanted, up to what a fingerprint can tell."""
    return (measured - wanted).abs() <= EXACT * wanted.abs() + precision


def same(measured: Tensor, wanted: Tensor, precision: float) -> bool:
    """Return whether all frequencies are as wanted, up to what a fingerprint can tell."""
    return measured.shape == wanted.shape and bool(close(measured, wanted, precision).all())


def rotation_outcomes(
    turnings: Mapping[int, LayerTurning], promised: Callable[[int], Promise | None] | None, *, by_family: bool
) -> Iterator[Outcome]:
    """Yield the rotation of the layers, and every difference from the config.

    Args:
        turnings: layer index -> how it turns, within the trained length.
        promised: layer index -> the rotation that the config asks for; None if nothing is asked of the layers.
        by_family: whether a family says which layers turn. Otherwise an unrotated layer may be intended.
    """
    problems: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    agreeing: dict[str, list[int]] = {}
    unseen = []
    turns = any(turning.keys.pairs for turning in turnings.values())
    for layer, turning in turnings.items():
        promise = None if promised is None else promised(layer)
        asked = by_family or (promise is not None and (bool(turning.keys.pairs) or not turns))
        found = [] if promised is None or not asked else list(_problems(turning, promise))
        for about, words, number, advice in found:
            problems.setdefault((about, words, advice), []).append((layer, number))
        if not found:
            agrees = ", as the config says" if promised is not None and asked else ""
            agreeing.setdefault(describe_turning(turning.queries) + agrees, []).append(layer)
        if by_family and promise is not None and promise.layout is None:
            unseen.append(layer)
    for (about, words, advice), cases in problems.items():
        layers = [layer for layer, _ in cases]
        yield Outcome(about, False, f"{layers_in_words(layers)}: {words}", max(number for _, number in cases), advice)
    for words, layers in agreeing.items():
        pairs = float(len(turnings[layers[0]].queries.pairs))
        yield Outcome("rotation", True, f"{layers_in_words(layers)}: {words}", pairs)
    if unseen:
        reason = "which dimensions of the projections are a pair: queries and keys of this model type do not show it"
        yield Outcome("layout", None, f"{layers_in_words(unseen)}: {reason}")


def layers_in_words(layers: list[int]) -> str:
    """Return `layer 3`, `layers 0 to 7` or `layers 0, 2, 5`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


_Problem = tuple[str, str, float, str]
"""About, what was found, number, advice."""


def _problems(turning: LayerTurning, promise: Promise | None) -> Iterator[_Problem]:
    """Yield the first difference between a layer's rotation and what the config asks for."""
    queries, keys = turning.queries, turning.keys
    for name, side in (("queries", queries), ("keys", keys)):
        if side.odd:
            yield (
                "rotation",
                f"{len(side.odd)} of {side.size} dimensions of the {name} change with the position, but not as pairs "
                "that turn",
                float(len(side.odd)),
                "compare the class's rotation with that of the stock class, line by line",
            )
            return
    if not _turn_alike(queries, keys):
        yield (
            "rotation",
            f"queries and keys turn differently. Queries: {describe_turning(queries)}. Keys: {describe_turning(keys)}",
            float(len(set(queries.pairs) ^ set(keys.pairs))),
            "give queries and keys the same cosines and sines: otherwise scores depend on the absolute position",
        )
    elif queries.heads_differ or keys.heads_differ:
        advice = "give all heads the same cosines and sines"
        yield "rotation", "the heads of a layer turn by different frequencies", float(len(keys.pairs)), advice
    else:
        yield from _against(keys, promise)


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


def _against(turning: Turning, promise: Promise | None) -> Iterator[_Problem]:
    """Yield the first difference between a rotation and what the config asks for."""
    words, count = describe_turning(turning), float(len(turning.pairs))
    if promise is None:
        if turning.pairs:
            yield (
                "unrotated layer",
                f"the config says that this layer is not rotated, but {words}",
                count,
                "skip the rotation where the config says so, as the stock class does; or correct the config if the "
                "model was trained this way",
            )
        return
    wanted = promise.frequencies(promise.original_length)
    if not turning.pairs:
        yield (
            "rotation",
            f"the config asks for {len(wanted)} turning pairs, but {words}",
            count,
            "apply the rotary embedding to queries and keys, or pass position_ids on to the layers",
        )
        return
    signs = turning.frequencies.sign()
    measured = turning.frequencies.abs().amax(0)
    wanted = _seen(wanted, turning)
    if len(measured) != len(wanted):
        yield (
            "share",
            f"{len(measured)} pairs of each head turn, the config asks for {len(wanted)}",
            count,
            "turn the share of each head that partial_rotary_factor (or rotary_dim) of the config says",
        )
        return
    if None not in (turning.layout, promise.layout) and turning.layout != promise.layout:
        yield (
            "layout",
            f"the pairs that turn are {turning.layout}, the model type's are {promise.layout}",
            count,
            "rotate by the model type's layout, or reorder the rows of the query and key projections when converting "
            "weights",
        )
        return
    if promise.backwards is not None and bool((signs == (1 if promise.backwards else -1)).any()):
        yield (
            "direction",
            "pairs turn in the other direction than those of the model type",
            count,
            "give the sines the sign of the stock class, or swap the dimensions of each pair when converting weights",
        )
        return
    if not same(measured, wanted, turning.precision):
        yield _other_frequencies(measured, wanted, promise, turning)


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


def _other_frequencies(measured: Tensor, wanted: Tensor, promise: Promise, turning: Turning) -> _Problem:
    off = ((measured - wanted).abs() / wanted).max().item()
    scaling, theta = promise.scaling, base_of(measured)
    if scaling != "default" and same(measured, _seen(promise.unscaled(), turning), turning.precision):
        return (
            "scaling",
            f"the scaling of the config, {scaling}, has no effect: pairs turn as without it, by the base "
            f"{_rounded(promise.theta)}; one frequency is off by {off:.3g} times its value",
            off,
            "make the rotary embedding from config.rope_parameters, and check that your release reads them under this "
            "name (older ones read rope_scaling)",
        )
    if theta is not None and scaling == "default" and abs(measured[0] - 1) < EXACT:
        return (
            "base",
            f"the frequencies have the base {_rounded(theta)}, the config says rope_theta {_rounded(promise.theta)}",
            theta,
            "use the rope_theta that the weights were trained with, in the code and in the config",
        )
    return (
        "frequencies",
        f"the frequencies are not those of the config ({scaling}, base {_rounded(promise.theta)}): one is off by "
        f"{off:.3g} times its value",
        off,
        "compute them as transformers' ROPE_INIT_FUNCTIONS do, or correct rope_parameters in the config",
    )


def beyond_outcomes(
    turnings: Mapping[int, LayerTurning], promised: Callable[[int], Promise | None], length: int
) -> Iterator[Outcome]:
    """Yield whether a scaling that depends on the length takes effect beyond the original length.

    Args:
        turnings: layer index -> how it turns in a sequence of `length` tokens.
        promised: layer index -> the rotation that the config asks for.
        length: number of tokens, as positions count them.
    """
    problems: dict[tuple[str, str], list[tuple[int, float]]] = {}
    compared = False
    for layer, turning in turnings.items():
        promise = promised(layer)
        if promise is None or not promise.depends_on_length or turning.keys.odd:
            continue
        compared = True
        measured = turning.keys.frequencies.abs().amax(0)
        wanted = _seen(promise.frequencies(length), turning.keys)
        precision = turning.keys.precision
        if same(measured, wanted, precision):
            continue
        unchanged = same(measured, _seen(promise.frequencies(promise.original_length), turning.keys), precision)
        off = ((measured - wanted).abs() / wanted).max().item() if len(measured) == len(wanted) else float("nan")
        words = "has no effect there" if unchanged else "gives other frequencies there than transformers' function"
        problems.setdefault((promise.scaling, words), []).append((layer, off))
    for (scaling, words), cases in problems.items():
        yield Outcome(
            "scaling",
            False,
            f"{layers_in_words([layer for layer, _ in cases])}: at {length} tokens, beyond the original length, the "
            f"scaling of the config, {scaling}, {words}",
            max(off for _, off in cases),
            "compute the frequencies anew when a sequence grows, as transformers' dynamic_rope_update does",
        )
    if compared and not problems:
        yield Outcome("scaling", True, f"the scaling takes effect beyond the original length: seen at {length} tokens")
