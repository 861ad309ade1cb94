"""Resolve `layers`, `window` and `sinks` of schemes to layer indices and numbers of tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import SupportsIndex

from ..dims import REST, Layers
from ..errors import UnsupportedModelError
from ..live.base_model import BaseModel
from ..positions import NO_WINDOW
from ..schemes.base import Scheme


def choose_layers(schemes: Sequence[Scheme], base: BaseModel) -> tuple[Scheme, ...]:
    """Return the schemes with `layers` as indices, `window` and `sinks` as ints, after checking them.

    Raises:
        UnsupportedModelError: if a scheme cannot act in a layer.
        TypeError: if `layers`, `window` or `sinks` is of a wrong type.
        ValueError: if a layer does not exist, two schemes name one layer, a window changes nothing, or sinks have none.
    """
    layer_types = getattr(base.config, "layer_types", None)
    selected = [
        REST if _is_rest(scheme.layers) else _select_layers(scheme.name, scheme.layers, base.num_layers, layer_types)
        for scheme in schemes
    ]
    rest = _find_rest(schemes, selected, base)
    chosen = tuple(
        replace(
            scheme,
            layers=rest if _is_rest(layers) else layers,
            window=_parse_tokens(scheme, "window", "the token itself, "),
            sinks=_parse_tokens(scheme, "sinks"),
        )
        for scheme, layers in zip(schemes, selected, strict=True)
    )
    _check_layers(chosen, base)
    for scheme in chosen:
        _check_window(scheme, base)
    windowed = [layer for scheme in chosen if scheme.window is not None for layer in base.layers_of(scheme)]
    if twice := sorted({layer for layer in windowed if windowed.count(layer) > 1}):
        raise ValueError(f"layer {twice[0]} gets a window from two schemes: give it to one of them")
    return chosen


def _is_rest(layers: object) -> bool:
    """Return whether `layers` is `rest`; arrays do not compare with text."""
    return isinstance(layers, str) and layers == REST


def _find_rest(schemes: Sequence[Scheme], selected: Sequence[Layers], base: BaseModel) -> tuple[int, ...] | None:
    """Return the layers that no scheme names: the layers of schemes with `layers="rest"`. None means all layers.

    Args:
        schemes: the schemes.
        selected: the layers of each scheme: indices, None for all, or `rest`.
        base: the model.

    Raises:
        ValueError: if a scheme asks for the rest, and there is none.
    """
    asking = [scheme for scheme, layers in zip(schemes, selected, strict=True) if _is_rest(layers)]
    if not asking:
        return None
    taken: set[int] = set()
    for scheme, layers in zip(schemes, selected, strict=True):
        if not scheme.acts_on.joins() and not _is_rest(layers):
            taken.update(range(base.num_layers) if layers is None else map(int, layers))
    possible = asking[0].acts_on.possible_layers(base)
    rest = tuple(layer for layer in possible if layer not in taken)
    if not rest:
        raise ValueError(f"{asking[0].name}: layers='rest' selects no layer: other schemes name them all")
    return None if len(rest) == len(possible) else rest


def _check_layers(schemes: Sequence[Scheme], base: BaseModel) -> None:
    """Check that each scheme can act in its layers.

    Raises:
        UnsupportedModelError: if a scheme cannot act in a layer.
        ValueError: if two schemes replace the positions of one layer, or a layer gets one addition twice.
    """
    scheme_in: dict[tuple[int, str | None], Scheme] = {}
    for scheme in schemes:
        possible = scheme.acts_on.possible_layers(base)
        for layer in base.layers_of(scheme):
            if layer not in possible:
                raise UnsupportedModelError(
                    f"{scheme.name}: layer {layer} of {base.name} has no attention, so it has no positions: "
                    f"name layers among {', '.join(map(str, possible))}"
                )
            place = (layer, scheme.name if scheme.acts_on.joins() else None)
            if (other := scheme_in.setdefault(place, scheme)) is not scheme:
                raise ValueError(
                    f"{other.name} and {scheme.name} both name layer {layer}: give each of them layers of its own, as "
                    "in [Alibi(layers='0::2'), Nope(layers='rest')]"
                )


def _check_window(scheme: Scheme, base: BaseModel) -> None:
    """Check that a scheme's window and sinks act in each of its layers.

    Raises:
        UnsupportedModelError: if the base's own caches would drop the sinks.
        ValueError: if a window would change nothing, or there are sinks without a window.
    """
    window, windows = scheme.window, base.windows
    if window is None:
        if scheme.sinks is not None:
            raise ValueError(f"{scheme.name}: sinks={scheme.sinks} are first tokens that a window passes: give window=")
        return
    for layer in base.layers_of(scheme):
        if scheme.layers is not None and layer not in base.sizes:
            raise ValueError(f"{scheme.name}: window={window} cannot act in layer {layer}, which has no attention")
        if (base_window := windows.get(layer)) is not None and base_window <= window:
            raise ValueError(
                f"{scheme.name}: window={window} would change nothing in layer {layer}, which has a sliding window of "
                f"{base_window} tokens: give a smaller one, or name other layers"
            )
        if scheme.sinks is not None and layer in base.layers_that_forget:
            raise UnsupportedModelError(
                f"{scheme.name}: sinks={scheme.sinks} cannot act in layer {layer} of {base.name}, which has a sliding "
                "window or chunks of its own: its caches drop the first tokens. Name other layers"
            )


def _parse_tokens(scheme: Scheme, field: str, least: str = "") -> int | None:
    """Return a field as an int. Raise TypeError or ValueError if it is no number of tokens.

    Args:
        scheme: the scheme.
        field: `window` or `sinks`.
        least: explains in the message why the smallest number is 1.
    """
    value = getattr(scheme, field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{scheme.name}: {field} must be a number of tokens or None, not {value!r}")
    number = operator.index(value)
    if not 1 <= number < NO_WINDOW:
        raise ValueError(f"{scheme.name}: {field} must be at least 1, {least}and below {NO_WINDOW}, not {number}")
    return number


def _select_layers(
    name: str, layers: Iterable[SupportsIndex] | str | None, count: int, layer_types: Sequence[str] | None
) -> tuple[int, ...] | None:
    """Return the indices of the layers that a scheme is for.

    Args:
        name: the scheme's name, for messages.
        layers: indices, text or None, see `Layers`. Negative indices count from the last layer.
        count: number of layers of the model.
        layer_types: type of each layer according to the config, or None.

    Returns:
        Indices in ascending order, or None for every layer.

    Raises:
        TypeError: if `layers` is neither indices nor text nor None.
        ValueError: if a layer does not exist or is named twice, or no layer is selected.
    """
    if layers is None:
        return None
    if isinstance(layers, str):
        chosen = _parse_text(name, layers, count, layer_types or ())
    else:
        indices = _parse_indices(name, layers)
        if wrong := [index for index in indices if not -count <= index < count]:
            raise ValueError(
                f"{name}: there is no layer {', '.join(map(str, wrong))}: the model has {count}, counted from 0"
            )
        chosen = sorted(index % count for index in indices)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{name}: layers={indices} names a layer twice")
    if not chosen:
        raise ValueError(f"{name}: layers={layers!r} selects none of the {count} layers")
    return None if len(chosen) == count else tuple(chosen)


def _parse_text(name: str, layers: str, count: int, layer_types: Sequence[str]) -> list[int]:
    """Return the indices that a layer type or a slice such as `3::4` selects."""
    types = sorted(set(layer_types))
    if layers in types:
        return [index for index, layer_type in enumerate(layer_types) if layer_type == layers]
    try:
        bounds = [int(part) if part.strip() else None for part in layers.split(":")]
        if 2 <= len(bounds) <= 3:
            return list(range(count))[slice(*bounds)]
    except ValueError:  # not a number, or a step of 0
        pass
    choices = f"{', '.join(types)}, or " if types else ""
    raise ValueError(
        f"{name}: layers={layers!r} is neither a layer type of this model nor a slice: give {choices}a "
        "slice like '3::4', 'rest' for the layers that no other scheme names, or a list of indices"
    )


def _parse_indices(name: str, layers: Iterable[SupportsIndex]) -> list[int]:
    """Return layer indices as ints. Raise TypeError if one is no integer."""
    try:
        indices = list(layers)
        if not any(isinstance(index, bool) for index in indices):
            return [operator.index(index) for index in indices]
    except TypeError:
        pass
    raise TypeError(f"{name}: layers must be a list of indices, a slice as text, a layer type or None: {layers!r}")


def names_of(schemes: Sequence[Scheme]) -> str:
    """Return the names of schemes, for messages."""
    return " and ".join(scheme.name for scheme in schemes)
