"""The figures of a sweep: panels of a few lines each, and in every panel the base that all are measured against."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..analysis import pen
from .schemes import UNPATCHED

LINES = 6
"""At most so many in a panel, those of the base among them."""

BASE = "base, untouched"
_REFERENCES: dict[str, dict[str, Any]] = {
    BASE: {"color": "#000000", "marker": "X", "linestyle": (0, (5, 2)), "linewidth": 1.3, "label": BASE},
    UNPATCHED: {
        "color": pen.GREY,
        "marker": "P",
        "linestyle": (0, (1, 1.2)),
        "label": f"{UNPATCHED}: the base, fine-tuned",
    },
}
"""What stands in every panel, where it was measured, and looks the same in each."""


@dataclass(frozen=True)
class Curve:
    """Means over seeds at places on the x axis, and their standard deviations: 0 where they are not known."""

    places: Sequence[float]
    means: Sequence[float]
    deviations: Sequence[float]

    def band(self) -> list[tuple[float, float]]:
        """One standard deviation below and above each mean, but not below half of it: no zero on a logarithmic axis."""
        pairs = zip(self.means, self.deviations, strict=True)
        return [(max(mean - deviation, mean / 2), mean + deviation) for mean, deviation in pairs]


def curve(values: Mapping[float, Mapping[str, float]]) -> Curve:
    """What a summary holds, `mean` and perhaps `std` by place, as a curve."""
    spreads = [values[place] for place in sorted(values)]
    return Curve(sorted(values), [each["mean"] for each in spreads], [each.get("std", 0.0) for each in spreads])


def panels(names: Iterable[str]) -> list[list[str]]:
    """Names by panel, in as few panels as there can be, evenly filled; variants of one scheme stand together.

    Args:
        names: of all curves; those of the base are in each panel, first.
    """
    names = list(names)
    always = [name for name in _REFERENCES if name in names]
    by_scheme: dict[str, list[str]] = {}
    for name in names:
        if name not in always:
            by_scheme.setdefault(name.partition("+")[0].partition("-")[0], []).append(name)
    count = sum(map(len, by_scheme.values()))
    room = math.ceil(count / max(1, math.ceil(count / (LINES - len(always)))))
    parts = [group[start : start + room] for group in by_scheme.values() for start in range(0, len(group), room)]
    filled: list[list[str]] = []
    for part in sorted(parts, key=len, reverse=True):
        into = next((panel for panel in filled if len(panel) + len(part) <= room), None)
        if into is None:
            filled.append(into := [])
        into += part
    return [always + panel for panel in filled] or [always] * bool(always)


def by_length(curves: Mapping[str, Curve], marks: Mapping[str, int], title: str) -> Any:
    """Perplexity against the length of the context, as a matplotlib figure; marks: name of a length -> tokens."""

    def finish(axes: Any, drawn: Iterable[Curve]) -> None:
        drawn = list(drawn)
        pen.token_axis(axes, {place for each in drawn for place in each.places})
        pen.perplexity_axis(axes, [edge for each in drawn for edges in each.band() for edge in edges])

    return _figure(curves, finish, title, xlabel="context length (tokens)", ylabel=pen.PERPLEXITY, marks=marks)


def by_position(
    bins: Mapping[str, Mapping[tuple[int, int], Mapping[str, float]]], marks: Mapping[str, int], title: str
) -> Any:
    """Loss against the position in the window, as steps: name -> (first, last position + 1) -> mean and deviation."""
    logarithmic = pen.are_uneven([edges for found in bins.values() for edges in found])
    curves = {}
    for name, found in bins.items():
        places, means = pen.steps([(*edges, value["mean"]) for edges, value in found.items()], logarithmic)
        _, deviations = pen.steps([(*edges, value.get("std", 0.0)) for edges, value in found.items()], logarithmic)
        curves[name] = Curve(places, means, deviations)

    def finish(axes: Any, drawn: Iterable[Curve]) -> None:
        if logarithmic:
            pen.token_axis(axes, {max(1, edge) for found in bins.values() for edges in found for edge in edges})
        else:
            pen.thousands(axes.xaxis)

    return _figure(
        curves,
        finish,
        title,
        xlabel="position in the window (tokens)",
        ylabel="mean loss (nats per token)",
        marks=marks,
        markers=False,
    )


def by_tokens(curves: Mapping[str, Curve], title: str) -> Any:
    """Held-out loss against the tokens that were read."""

    def finish(axes: Any, drawn: Iterable[Curve]) -> None:
        pen.thousands(axes.xaxis)

    return _figure(curves, finish, title, xlabel="tokens", ylabel="loss (nats per token)", marks={})


def _figure(
    curves: Mapping[str, Curve],
    finish: Callable[[Any, Iterable[Curve]], None],
    title: str,
    *,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, int],
    markers: bool = True,
) -> Any:
    """Panels on the same axes, as many as `panels` says; `finish` scales the axes that all of them share."""
    shown = panels(curves)
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    with pen.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2 * columns, 0.5 + 3.9 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, names in zip(grid.flat, shown, strict=False):
            for name, style in _styles(names, markers).items():
                _draw(axes, curves[name], style)
            for name, tokens in marks.items():
                # Of two the words stand on the outer sides.
                side: Any = "center" if len(marks) == 1 else "right" if tokens == min(marks.values()) else "left"
                pen.mark_length(axes, f"{name} {tokens:,}", tokens, side)
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set_xlabel(xlabel)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=9)
        for row in grid:
            row[0].set_ylabel(ylabel)
        finish(grid[0][0], curves.values())
        # Of a path: what no font has, and two dollar signs, which would be read as a formula.
        title = title.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _styles(names: Sequence[str], markers: bool) -> dict[str, dict[str, Any]]:
    """The look of each line of a panel: no two have the same colour, nor the same marker."""
    others = [name for name in names if name not in _REFERENCES]
    found = {name: _REFERENCES[name] for name in names if name in _REFERENCES}
    for rank, name in enumerate(others):
        # A line that lies on another one leaves an edge of it to be seen.
        width, size = 3.2 - 0.4 * rank, 7.5 - 0.8 * rank
        found[name] = {
            "color": pen.COLOURS[rank],
            "marker": pen.MARKERS[rank],
            "linewidth": width,
            "markersize": size,
            "label": name,
        }
    return found if markers else {name: {**style, "marker": ""} for name, style in found.items()}


def _draw(axes: Any, curve: Curve, style: dict[str, Any]) -> None:
    """The line of the means, and a band of one standard deviation on both sides."""
    pen.line(axes, curve.places, curve.means, **style)
    if any(curve.deviations):
        low, high = pen.columns(curve.band())
        known = [math.isfinite(each) for each in high]
        axes.fill_between(curve.places, low, high, where=known, color=style["color"], alpha=0.25, linewidth=0)
