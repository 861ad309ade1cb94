"""Rows of tests, and which tier runs a row: the default one or the slow one.

The default tier has every value of every argument of a test at least once, so that a fault which needs one value (a
scheme, a family, a way to load) is found there. The slow tier, which continuous integration runs as well, has the other
rows. A test whose rows take long, or of which few have a reason of their own, says how many it shall have:

    @pytest.mark.rows(default=2, slow=12)

Then the default tier runs 2 rows, both tiers together run 12, and there are no others. Rows are chosen so that they have
as many values as possible.
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


def sort_into_tiers(items: list[pytest.Item]) -> None:
    """Mark the rows that the default tier leaves out as slow, and take out those that no tier has, in place."""
    tests: dict[Hashable, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.path, item.cls, item.originalname].append(item)
    dropped: set[pytest.Item] = set()
    for rows in tests.values():
        values = [[_hashable(value) for value in row.callspec.params.values()] for row in rows]
        mark, seed = rows[0].get_closest_marker("rows"), rows[0].originalname
        numbers = {"default": None, "slow": len(rows)} | ({} if mark is None else mark.kwargs)
        early = [n for n, row in enumerate(rows) if not row.get_closest_marker("slow")]
        default = {early[n] for n in chosen_rows([values[n] for n in early], numbers["default"], seed)}
        later = [n for n in range(len(rows)) if n not in default]
        kept = chosen_rows([values[n] for n in later], max(0, numbers["slow"] - len(default)), seed)
        for n in set(later) - {later[n] for n in kept}:
            dropped.add(rows[n])
        for n in later:
            rows[n].add_marker("slow")
    items[:] = [item for item in items if item not in dropped]


def _hashable(value: Any) -> Hashable:
    """Return what stands for a value of an argument in a set."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
