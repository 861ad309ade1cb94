"""Edits of RoPE's frequencies that papers name, for `rope(frequencies={"name": ...})`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .did_you_mean import did_you_mean

Frequencies = tuple[float, ...]
"""One angle per token for each rotated pair, in radians, (F,)."""


@dataclass(frozen=True)
class Edit:
    """An edit of frequencies.

    Attributes:
        takes: name of the number that it takes.
        least: smallest value of this number.
        apply: (frequencies, number) -> frequencies, for an edit of single frequencies.
        stretch: (number, F) -> factor on `rope_theta`, for an edit that changes nothing else; F is at least 2. Its
            number has no default.
    """

    takes: str
    least: float
    apply: Callable[[Frequencies, float], Frequencies] | None = None
    stretch: Callable[[float, int], float] | None = None


def soft_clip(frequencies: Frequencies, pairs: float) -> Frequencies:
    """Multiply the last n frequencies by `(1 + cos(pi k / (n - 1))) / 2`, k = 0 .. n - 1; the last becomes 0.

    Source: Li et al. 2026, Clipped RoPE (CoPE), arXiv:2602.05258, in the authors' code.
    """
    n = int(pairs)
    if n > len(frequencies):
        raise ValueError(f"rope: soft_clip: pairs={n}, but {len(frequencies)} pairs are rotated")
    first = len(frequencies) - n
    clipped = (w * (1 + math.cos(math.pi * k / (n - 1))) / 2 for k, w in enumerate(frequencies[first:]))
    return (*frequencies[:first], *clipped)


def hope(frequencies: Frequencies, length: float) -> Frequencies:
    """Replace frequencies that complete no turn within `length` tokens, `w < 2 pi / length`, by 0.

    Source: Chen et al. 2024, HoPE, arXiv:2410.21216.
    """
    return tuple(0.0 if w < 2 * math.pi / length else w for w in frequencies)


EDITS: Mapping[str, Edit] = {
    "soft_clip": Edit("pairs", 2, apply=soft_clip),
    "hope": Edit("length", 1, apply=hope),
    # Xiong et al. 2023, adjusted base frequency, arXiv:2309.16039, section 4.1
    "abf": Edit("factor", 1, stretch=lambda factor, pairs: factor),
    # bloc97 2023, NTK-aware scaling: the lowest frequency is divided by `factor`, as in arXiv:2309.00071, section 3.1
    "ntk": Edit("factor", 1, stretch=lambda factor, pairs: float(factor ** (pairs / (pairs - 1)))),
}
"""Name -> edit."""


def check_edit(edit: Mapping[str, Any]) -> None:
    """Raise ValueError unless a mapping names an edit, with numbers that it takes."""
    name = edit["name"]
    if name not in EDITS:
        raise ValueError(
            f"rope: frequencies['name'] must be one of {', '.join(EDITS)}, not {name!r}{did_you_mean(name, [*EDITS])}"
        )
    found = EDITS[name]
    value, whole = edit.get(found.takes), found.takes == "pairs"
    if edit.keys() == {"name"} and found.stretch is None:
        return
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if edit.keys() != {"name", found.takes} or not is_number or not found.least <= edit[found.takes] < math.inf:
        raise ValueError(
            f"rope: frequencies {name} takes {found.takes}, a {'whole ' * whole}number, finite and at least "
            f"{found.least:g}, not {dict(edit)!r}"
        )


def apply_edit(
    edit: Mapping[str, Any], frequencies: Frequencies, length: int | None, layer_type: str | None
) -> Frequencies:
    """Return the frequencies after an edit that has `apply`.

    Args:
        edit: a mapping that `check_edit` accepts.
        frequencies: in descending order.
        length: length in tokens at which the base was trained, the default of `hope`.
        layer_type: type of the layers with these frequencies, or None, for messages.

    Raises:
        ValueError: if there is no length, or the edit would change nothing.
    """
    # Clipped RoPE clips 20 of 64 pairs.
    found, defaults = EDITS[edit["name"]], {"pairs": max(2, round(20 / 64 * len(frequencies))), "length": length}
    number = edit.get(found.takes) or defaults[found.takes]
    if number is None:
        raise ValueError(f"rope: frequencies {edit['name']}: the config does not say the trained length: give length")
    assert found.apply is not None
    edited = found.apply(frequencies, number)
    if edited == frequencies:
        where = f" in layers of the type {layer_type}: name the other layer types only" if layer_type else ""
        raise ValueError(f"rope: frequencies {edit['name']} would change nothing with {found.takes}={number}{where}")
    return edited
