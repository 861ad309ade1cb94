"""Searches for the factors that divide RoPE's frequencies: LongRoPE's evolution, and DCIS's divide and conquer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .matching import check_counts, check_integers, check_positive

Factors = tuple[float, ...]
"""For each rotated pair, the number that its frequency is divided by, (F,)."""

Loss = Callable[[Factors], float]
"""Factors -> mean loss of the next token, in nats."""

MOST = 1.25
"""Largest factor of an evolution, relative to the scale: LongRoPE, table 4."""

LEAST = 1e-4
"""Smallest factor of a divide and conquer, as in the authors' code."""

ATTEMPTS = 20
"""How often a mutation or crossover is drawn, at most, until it makes factors that were not tried."""

KEPT = 3
"""Number of best increments. The next halves search their span, widened by a step on each side."""


def start_factors(frequencies: Sequence[float], length: int, scale: float) -> dict[str, Factors]:
    """Return the factors of named methods that extend a context.

    `pi`: position interpolation, Chen et al. 2023, arXiv:2306.15595. `ntk` and `yarn`: Peng et al. 2023,
    arXiv:2309.00071, sections 3.1 and 3.2, with YaRN's ramp between 32 turns and 1 turn of the trained length. These
    two are given for the scale and for its halves above 1, as in `yarn 4`, because small models do best with less.

    Args:
        frequencies: frequencies of the base without scaling, a falling geometric series, in radians per token, (F,).
        length: length in tokens at which the base was trained.
        scale: the wanted length relative to this length, above 1.
    """
    found = {"pi": (scale,) * len(frequencies)}
    while scale > 1:
        found[f"ntk {scale:g}"] = _ntk(len(frequencies), scale)
        found[f"yarn {scale:g}"] = _yarn(frequencies, length, scale)
        scale /= 2
    return found


def _ntk(count: int, scale: float) -> Factors:
    """Return the factors of NTK-aware scaling."""
    return tuple(scale ** (u / (count - 1)) for u in range(count)) if count > 1 else (scale,)


def _yarn(frequencies: Sequence[float], length: int, scale: float) -> Factors:
    """Return the factors of YaRN."""
    if len(frequencies) == 1:
        return (scale,)
    ratio = math.log(frequencies[0] / frequencies[1])

    def pair_with(turns: float) -> float:
        """Return the index, between pairs, of a frequency that completes these turns within the length."""
        return math.log(frequencies[0] * length / (2 * math.pi * turns)) / ratio

    # transformers and the authors also cap `high` at the head size minus 1. No usual theta and length reach this cap.
    low, high = max(math.floor(pair_with(32)), 0), math.ceil(pair_with(1))
    ramp = [min(1.0, max(0.0, (u - low) / ((high - low) or 1e-3))) for u in range(len(frequencies))]
    return tuple(1 / (r / scale + 1 - r) for r in ramp)


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """LongRoPE's evolutionary search over factors that do not fall from pair to pair.

    The first population has the tables of the base, PI, NTK and YaRN, and mutations of them. In each iteration the best
    tables become parents. A mutation draws some factors anew, between those of the neighbouring pairs. A crossover
    takes some factors from a second parent. Drawn factors are from 1 to 1.25 times the extension of the context.
    Deviations: LongRoPE also leaves the first tokens unscaled; this search does not. Children that were tried before
    are drawn again. NTK and YaRN are also tried for half of the extension, a quarter, and so on.
    Source: Ding et al. 2024, LongRoPE, arXiv:2402.13753, section 3.2, and the authors' code.

    Args:
        population: number of tables of factors in the first population.
        iterations: number of iterations.
        parents: number of parents.
        mutations: number of mutations in an iteration.
        crossovers: number of crossovers in an iteration.
        probability: probability with which a factor is drawn anew, or taken from the second parent.
        step: distance between neighbouring values of a factor.
        seed: seed of the random numbers.
    """

    population: int = 64
    iterations: int = 40
    parents: int = 32
    mutations: int = 16
    crossovers: int = 16
    probability: float = 0.3
    step: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_counts(population=self.population, iterations=self.iterations, parents=self.parents)
        check_integers(mutations=self.mutations, crossovers=self.crossovers, seed=self.seed)
        check_positive(probability=self.probability, step=self.step)
        if self.probability > 1:
            raise ValueError(f"probability must be at most 1, not {self.probability}")
        if min(self.mutations, self.crossovers) < 0 or self.mutations + self.crossovers == 0:
            raise ValueError(
                f"mutations and crossovers must be at least 0 and not both 0, not {self.mutations} and "
                f"{self.crossovers}"
            )

    def trials(self, pairs: int, starts: int) -> int:
        """Return an upper bound of the number of tables that a search tries, for numbers of pairs and of `starts`."""
        return max(starts, self.population) + self.iterations * (self.mutations + self.crossovers)

    def search(self, starts: Sequence[Factors], scale: float, least: Factors, loss: Loss) -> None:
        """Call `loss` with factors, in the order of the search.

        Args:
            starts: factors to begin with.
            scale: the wanted length relative to the trained length.
            least: smallest possible factor of each pair; those of an evolution are larger.
            loss: function that computes the loss of factors.
        """
        draw, losses = random.Random(self.seed), {each: loss(each) for each in starts}

        def try_child(child: Factors | None) -> None:
            if child is not None:
                losses[child] = loss(child)

        start = [each for each in losses if _rises(each)]
        for _ in range(self.population - len(losses)):
            try_child(self._mutate(draw.choice(start), MOST * scale, draw, losses))
        for _ in range(self.iterations):
            parents = sorted(filter(_rises, losses), key=losses.__getitem__)[: self.parents]
            for _ in range(self.mutations):
                try_child(self._mutate(draw.choice(parents), MOST * scale, draw, losses))
            for _ in range(self.crossovers):
                first, second = draw.choice(parents), draw.choice(parents)
                child = self._cross(first, second, draw, losses)
                try_child(child or self._mutate(first, MOST * scale, draw, losses))

    def _mutate(self, parent: Factors, most: float, draw: random.Random, tried: Container[Factors]) -> Factors | None:
        """Return factors that were not tried, some of them drawn between their neighbours; None if there are none."""
        for _ in range(ATTEMPTS):
            child = list(parent)
            for u in range(len(child)):
                if draw.random() < self.probability:
                    low, high = child[u - 1] if u else 1.0, child[u + 1] if u + 1 < len(child) else most
                    steps = max(0, math.floor((high - low) / self.step + 1e-9))
                    child[u] = min(high, low + self.step * draw.randint(0, steps))
            if (made := tuple(child)) not in tried and _rises(made):
                return made
        return None

    def _cross(self, first: Factors, second: Factors, draw: random.Random, tried: Container[Factors]) -> Factors | None:
        """Return factors that were not tried, some of them from the second parent; None if there are none."""
        for _ in range(ATTEMPTS):
            pairs = zip(first, second, strict=True)
            made = tuple(b if draw.random() < self.probability else a for a, b in pairs)
            if made not in tried and _rises(made):
                return made
        return None


@dataclass(frozen=True, kw_only=True)
class DivideAndConquer:
    """DCIS's search: factors of a segment of pairs move together, and the best segment is halved.

    It starts from the best of base, PI, NTK and YaRN, see `Evolution`. The pairs are divided into two segments, and the
    one with the lowest frequencies is searched first. A search adds evenly spaced increments to all factors of a
    segment and keeps the best. Each half of the segment is then searched around the best increments, until segments are
    single pairs. Factors can fall from pair to pair.
    Deviations: an increment stays only if it lowers the loss. `reach` is relative to the extension of the context; the
    authors add at most 5, at extensions of 8 and of 16. No frequency exceeds pi.
    Source: Yang et al. 2024, DCIS, arXiv:2412.18811, and the authors' code.

    Args:
        increments: number of increments that each segment tries, at least 2.
        reach: largest increment of the first two segments, up or down, relative to the extension of the context.
        refinements: number of times that all single pairs are searched once more; 0 in the paper.
    """

    increments: int = 10
    reach: float = 0.5
    refinements: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_counts(increments=self.increments)
        check_integers(refinements=self.refinements)
        check_positive(reach=self.reach)
        if self.increments < 2 or self.refinements < 0:
            raise ValueError(
                f"increments must be at least 2 and refinements at least 0, not {self.increments} and "
                f"{self.refinements}"
            )

    def trials(self, pairs: int, starts: int) -> int:
        """Return an upper bound of the number of tables that a search tries, see `Evolution`."""
        return starts + self.increments * (max(1, 2 * pairs - 2) + self.refinements * pairs)

    def search(self, starts: Sequence[Factors], scale: float, least: Factors, loss: Loss) -> None:
        """Call `loss` with factors, in the order of the search, see `Evolution.search`."""
        best = min(starts, key=loss)
        limits = tuple(max(LEAST, each) for each in least)
        reach = self.reach * scale
        around: dict[int, tuple[float, float]] = {}  # pair -> bounds of the increments around its best one
        segments = [(each, (-reach, reach)) for each in _halves(range(len(best))) or [range(len(best))]]
        while segments:
            halves: list[tuple[range, tuple[float, float]]] = []
            for segment, bounds in reversed(segments):
                best, found = self._move(best, segment, bounds, limits, loss)
                around |= dict.fromkeys(segment, found)
                halves[:0] = [(half, found) for half in _halves(segment)]
            segments = halves
        for _ in range(self.refinements):
            for u in reversed(range(len(best))):
                best, around[u] = self._move(best, range(u, u + 1), around[u], limits, loss)

    def _move(
        self, factors: Factors, segment: range, bounds: tuple[float, float], limits: Factors, loss: Loss
    ) -> tuple[Factors, tuple[float, float]]:
        """Return the factors with the best increment, and the bounds of the increments around it."""
        step = (bounds[1] - bounds[0]) / (self.increments - 1)
        moved = {
            increment: tuple(
                max(limit, each + increment) if u in segment else each
                for u, (each, limit) in enumerate(zip(factors, limits, strict=True))
            )
            for increment in (bounds[0] + step * i for i in range(self.increments))
        }
        losses = {0.0: loss(factors)} | {increment: loss(each) for increment, each in moved.items()}
        # 0.0 comes first, so that of equal losses the factors stay.
        near = sorted((each for each in losses if math.isfinite(losses[each])), key=losses.__getitem__)[:KEPT]
        best = near[0]
        return {0.0: factors, **moved}[best], (min(near) - step - best, max(near) + step - best)


Strategy = Evolution | DivideAndConquer
"""A search for factors."""


def _rises(factors: Factors) -> bool:
    """Return whether no factor is smaller than the one before."""
    return all(a <= b for a, b in pairwise(factors))


def _halves(segment: range) -> list[range]:
    """Return the two halves of a segment of pairs; none for a single pair."""
    middle = len(segment) // 2
    return [segment[:middle], segment[middle:]] if middle else []
