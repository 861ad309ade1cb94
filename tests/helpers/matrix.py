"""Tests over several axes. The default tier covers all values or pairs, later tiers run the rest of the product.

A fault that needs one value (a scheme, a family, a way to load) or two of them at once is found by the default tier; one
that needs three at once waits for the slow one, which continuous integration runs as well. Where a row takes seconds,
the slow tier has a few more rows only, and the rest of the product waits for a release: `-m exhaustive`.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Row = tuple[Any, ...]


def combinations(row: Sequence[int], strength: int) -> list[tuple[tuple[int, int], ...]]:
    """Return what one row brings together: (axis, number of the value) of every `strength` axes."""
    return list(itertools.combinations(enumerate(row), strength))


def covering(
    rows: Sequence[Row], *, strength: int, times: int = 1, chosen: Iterable[int] = (), seed: str = ""
) -> set[int]:
    """Return numbers of rows that have every combination of `strength` values that occurs, at least `times` times.

    Fewer times where it does not occur as often. The same arguments give the same rows on every machine.

    Args:
        rows: one value of each axis in each; any selection of a product.
        strength: 1 for every value, 2 for every pair of values.
        times: how often.
        chosen: numbers of rows that are taken anyway.
        seed: decides among rows that do equally well.
    """
    numbers = [{value: number for number, value in enumerate(dict.fromkeys(axis))} for axis in zip(*rows, strict=True)]
    brought = [combinations([axis[v] for axis, v in zip(numbers, row, strict=True)], strength) for row in rows]
    missing = Counter({key: min(times, n) for key, n in Counter(itertools.chain(*brought)).items()})
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    taken: set[int] = set()

    def take(number: int) -> None:
        taken.add(number)
        order.remove(number)
        missing.subtract(brought[number])

    for number in sorted(set(chosen)):
        take(number)
    # A row's gain never rises, so its last gain is an upper bound. Look again only at rows whose bound exceeds the best.
    bound = {number: len(brought[number]) for number in order}
    while any(n > 0 for n in missing.values()):
        best, most = -1, 0
        for number in sorted(order, key=bound.__getitem__, reverse=True):
            if bound[number] <= most:
                break
            bound[number] = sum(missing[key] > 0 for key in brought[number])
            if bound[number] > most:
                best, most = number, bound[number]
        take(best)
    return taken


def matrix(
    rows: Iterable[Row] | None = None,
    /,
    *,
    strength: int = 2,
    times: int = 1,
    slow: int | None = None,
    always: Callable[..., bool] = lambda **_: False,
    indirect: Sequence[str] = (),
    **axes: Iterable[Any] | None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test by a product, or by `rows`. Rows outside a covering selection go to later tiers.

    Args:
        rows: the rows themselves; then the axes name their columns only. None: the product of the axes.
        strength: 2 keeps every pair of values of two axes in the default tier, 1 every value.
        times: how often the default tier has each of them, at least. With 0 it has only the rows of `always`.
        slow: how often the default and slow tiers together have each of them, at least. The remaining rows are
            `exhaustive`. None leaves no remaining rows.
        always: function of a row's values, by keyword; True puts the row into the default tier.
        indirect: axes whose values go to the fixture of that name.
        axes: values by the name of the test's argument.
    """
    names = list(axes)
    found = [tuple(row) for row in rows] if rows is not None else list(itertools.product(*axes.values()))

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        kept = [n for n, row in enumerate(found) if always(**dict(zip(names, row, strict=True)))]
        # Selections depend on the test's name: a row that one test leaves out is likely in another.
        default = covering(found, strength=strength, times=times, chosen=kept, seed=test.__name__)
        in_ci = set(range(len(found)))
        if slow is not None:
            in_ci = covering(found, strength=strength, times=slow, chosen=default, seed=test.__name__)
        values = [
            pytest.param(
                *row,
                marks=[] if n in default else [pytest.mark.slow] if n in in_ci else [pytest.mark.exhaustive],
                id="-".join(map(shown, row)),
            )
            for n, row in enumerate(found)
        ]
        return pytest.mark.parametrize(names, values, indirect=list(indirect))(test)

    return mark


def shown(value: Any) -> str:
    """Return a value as a part of a test's name."""
    if isinstance(value, tuple):
        return "-".join(map(shown, value))
    return str(getattr(value, "__name__", value)).removeprefix("torch.")
