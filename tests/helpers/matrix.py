"""Rows of tests, and which tier runs a row: the default one, the slow one or the exhaustive one.

The default tier has every value of every argument of a test at least once. The slow tier, which continuous integration
runs as well, has all other rows. A test whose rows take long says how many of them each tier shall have:

    @pytest.mark.rows(default=2, slow=12)

Then the default tier runs 2 rows, default and slow tiers together run 12, and the others are `exhaustive`. Rows are
chosen so that they have as many values as possible. A fault that needs one value (a scheme, a family, a way to load) is
found by the default tier, one that needs two at once by the slow one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def matrix(
    rows: Iterable[Row] | None = None, /, *, indirect: Sequence[str] = (), **axes: Iterable[Any] | None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test by a product, or by `rows`.

    Args:
        rows: the rows themselves; then the axes name their columns only. None: the product of the axes.
        indirect: axes whose values go to the fixture of that name.
        axes: values by the name of the test's argument.
    """
    found = rows if rows is not None else itertools.product(*(values or () for values in axes.values()))
    values = [pytest.param(*row, id="-".join(map(shown, row))) for row in found]
    return pytest.mark.parametrize(list(axes), values, indirect=list(indirect))


def shown(value: Any) -> str:
    """Return a value as a part of a test's name."""
    if isinstance(value, tuple):
        return "-".join(map(shown, value))
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def chosen_rows(rows: Sequence[Sequence[Hashable]], number: int | None = None, seed: str = "") -> list[int]:
    """Return numbers of rows that have every value of every axis, or of `number` rows that have as many as possible.

    The same arguments give the same rows on every machine.

    Args:
        rows: one value of each axis in each; any selection of a product.
        number: how many rows, at most. After every value was taken once, they are taken a second time, and so on. None
            means as many as it takes to have every value once.
        seed: decides among rows that do equally well.
    """
    left = list(range(len(rows)))
    random.Random(seed).shuffle(left)
    seen: Counter[tuple[int, Hashable]] = Counter()
    taken: list[int] = []
    times = 1
    while left and (number is None or len(taken) < number):
        gains = [sum(seen[value] < times for value in enumerate(rows[n])) for n in left]
        best = max(gains)
        if best:
            taken.append(left.pop(gains.index(best)))
            seen.update(enumerate(rows[taken[-1]]))
        elif number is None:
            break
        else:
            times += 1
    return taken


def sort_into_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark the rows of tests that the default tier leaves out, see above. Rows marked `slow` are none for the default."""
    tests: dict[Hashable, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.path, item.cls, item.originalname].append(item)
    for rows in tests.values():
        values = [[_hashable(value) for value in row.callspec.params.values()] for row in rows]
        numbers = {"default": None, "slow": len(rows)}
        if (mark := rows[0].get_closest_marker("rows")) is not None:
            numbers |= mark.kwargs
        tiers = [next((t for t in ("exhaustive", "slow") if row.get_closest_marker(t)), "default") for row in rows]
        seed = rows[0].originalname
        early = [n for n, tier in enumerate(tiers) if tier == "default"]
        default = {early[n] for n in chosen_rows([values[n] for n in early], numbers["default"], seed)}
        later = [n for n, tier in enumerate(tiers) if tier != "exhaustive" and n not in default]
        places = max(0, numbers["slow"] - len(default))
        slow = (
            {later[n] for n in chosen_rows([values[n] for n in later], places, seed)} if places < len(later) else later
        )
        for n in later:
            if n not in slow:
                rows[n].own_markers[:] = [mark for mark in rows[n].own_markers if mark.name != "slow"]
                rows[n].add_marker("exhaustive")
            elif tiers[n] == "default":
                rows[n].add_marker("slow")


def _hashable(value: Any) -> Hashable:
    """Return what stands for a value of an argument in a set."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
