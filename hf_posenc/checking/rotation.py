"""The rotation of each layer as computed, compared with what the config says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .fingerprint import LayerTurning, Turning
from .promises import Promise
from .report import Outcome

EXACT = 2e-3
"""Relative difference up to which two frequencies are the same."""


def describe_turning(turning: Turning) -> str:
    """Return a rotation in words: how many pairs turn, their layout, base and frequencies."""
    if not turning.pairs:
        return "queries and keys do not turn"
    frequencies = turning.frequencies.abs().amax(0)
    share = 200 * len(turning.pairs) / turning.size
    layout = "" if turning.layout is None else f", layout {turning.layout}"
    theta = base_of(frequencies)
    base = "" if theta is None else f", base {_rounded(theta)}"
    return (
        f"{len(turning.pairs)} of {turning.size // 2} pairs of each head turn ({share:.0f} %){layout}{base}, by "
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


def same(measured: Tensor, wanted: Tensor, precision: float) -> bool:
    """Return whether frequencies agree up to what a fingerprint can tell."""
    return measured.shape == wanted.shape and bool(((measured - wanted).abs() <= EXACT * wanted.abs() + precision).all())


def rotation_outcomes(
    turnings: Mapping[int, LayerTurning], promised: Callable[[int], Promise | None] | None
) -> Iterator[Outcome]:
    """Yield the rotation of the layers, and every difference from the config.

    Args:
        turnings: layer index -> how it turns, within the trained length.
        promised: layer index -> the rotation that the config asks for; None if nothing is asked of the layers.
    """
    problems: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for layer, turning in turnings.items():
        for about, found, number, advice in _problems(turning, promised, layer):
            problems.setdefault((about, found, advice), []).append((layer, number))
    for (about, found, advice), cases in problems.items():
        layers = [layer for layer, _ in cases]
        yield Outcome(about, False, f"{layers_in_words(layers)}: {found}", max(n for _, n in cases), advice)
    unseen = [
        layer
        for layer in turnings
        if promised is not None and (promise := promised(layer)) is not None and promise.layout is None
    ]
    if unseen:
        reason = "which dimensions of the projections are a pair does not show in queries and keys of this model type"
        yield Outcome("layout", None, f"{layers_in_words(unseen)}: {reason}")
    wrong = {layer for cases in problems.values() for layer, _ in cases}
    kinds: dict[str, list[int]] = {}
    for layer in turnings:
        if layer not in wrong:
            kinds.setdefault(describe_turning(turnings[layer].queries), []).append(layer)
    for words, layers in kinds.items():
        agrees = "" if promised is None else ", as the config says"
        pairs = float(len(turnings[layers[0]].queries.pairs))
        yield Outcome("rotation", True, f"{layers_in_words(layers)}: {words}{agrees}", pairs)


def layers_in_words(layers: list[int]) -> str:
    """Return `layer 3`, `layers 0 to 7` or `layers 0, 2, 5`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]} to {layers[-1]}"
    return f"layers {', '.join(map(str, layers))}"


_Problem = tuple[str, str, float, str]
"""About, what was found, number, advice."""


def _problems(turning: LayerTurning, promised: Any, layer: int) -> Iterator[_Problem]:
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
    if queries.odd or keys.odd:
        return
    if queries.pairs != keys.pairs or not same(
        queries.frequencies.amax(0), keys.frequencies.amax(0), queries.precision
    ):
        yield (
            "rotation",
            f"queries and keys turn differently: {describe_turning(queries)}; of the keys {describe_turning(keys)}",
            float(len(set(queries.pairs) ^ set(keys.pairs))),
            "give queries and keys the same cosines and sines: otherwise scores depend on the absolute position",
        )
        return
    if promised is not None:
        yield from _against(keys, promised(layer))


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
            "give the sines the sign of the stock class, or swap the two dimensions of each pair when converting weights",
        )
        return
    if turning.heads_differ:
        yield "rotation", "heads turn by different frequencies", count, "give all heads the same cosines and sines"
        return
    yield from _against_frequencies(measured, promise, promise.original_length, turning.precision)


def _against_frequencies(measured: Tensor, promise: Promise, length: int, precision: float) -> Iterator[_Problem]:
    wanted = promise.frequencies(length)
    if same(measured, wanted, precision):
        return
    off = ((measured - wanted).abs() / wanted).max().item()
    scaling, theta = promise.scaling, base_of(measured)
    if scaling != "default" and same(measured, promise.unscaled(), precision):
        yield (
            "scaling",
            f"the scaling of the config, {scaling}, has no effect: pairs turn by the frequencies of base "
            f"{promise.theta:g} without it, up to {off:.3g} times their frequency off",
            off,
            "make the rotary embedding from config.rope_parameters, or check that the runtime reads them: old names "
            "(rope_scaling) and new ones are read by different releases",
        )
    elif theta is not None and scaling == "default" and abs(measured[0] - 1) < EXACT:
        yield (
            "base",
            f"the frequencies have the base {_rounded(theta)}, the config says rope_theta {_rounded(promise.theta)}",
            theta,
            "use the rope_theta that the weights were trained with, in the code and in the config",
        )
    else:
        yield (
            "frequencies",
            f"the frequencies are not those of the config ({scaling}, base {promise.theta:g}): one is off by {off:.3g} "
            "times its value",
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
    promise = None
    for layer, turning in turnings.items():
        promise = promised(layer)
        if promise is None or not promise.depends_on_length or turning.keys.odd:
            continue
        measured = turning.keys.frequencies.abs().amax(0)
        wanted = promise.frequencies(length)
        precision = turning.keys.precision
        if same(measured, wanted, precision):
            continue
        unchanged = same(measured, promise.frequencies(promise.original_length), precision)
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
    if not problems and promise is not None:
        yield Outcome("scaling", True, f"the scaling takes effect beyond the original length: seen at {length} tokens")
