"""Drawing for all figures: their look, their axes, and how they are written to a file.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Lines differ in marker and dashes as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoints.files import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

MISSING = "plots need matplotlib, which is not installed: pip install matplotlib. The numbers need no plots"

FORMATS = ("png", "svg", "pdf")
"""Formats that `save` can write."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
"""Okabe and Ito 2008, without the yellow (too faint on white), with a grey."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
METHODS = {"non-overlapping": 1, "sliding window": 0, "sliding": 0}
"""Words in a label that say how perplexity was counted -> index of their dashes; the rest decides the colour."""

GREY = "#595959"
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.8,
    "image.cmap": "viridis",
    "svg.hashsalt": "hf_posenc",  # ids of an SVG are random otherwise
    "svg.fonttype": "path",
}


def kind_of(path: str | Path) -> str:
    """Return the format of a picture, one of `FORMATS`, by the suffix of its name; ValueError for another one."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"a figure is saved as {', '.join(FORMATS)}, not as {path.name!r}")
    return kind


def check_installed() -> None:
    """Raise ImportError if matplotlib is missing. Call it before a computation whose result is to be drawn."""
    style()


def save(figure: Figure, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure, atomically; the same figure gives the same bytes (no date, no random ids).

    Args:
        figure: any figure, of `plots` or not.
        path: file to write, replaced if it exists. Its suffix decides the format, one of `FORMATS`.
        dpi: pixels per inch of a PNG.

    Returns:
        The path.

    Raises:
        ValueError: for another suffix.
        OSError: if the file cannot be written.
    """
    path, kind = Path(path), kind_of(path)
    # Metadata that each format would write about its making.
    unwanted = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}[kind]
    with style(), replaced(path) as partial:
        figure.savefig(partial, format=kind, dpi=dpi, bbox_inches="tight", metadata=dict.fromkeys(unwanted))
    return path


def style() -> AbstractContextManager[None]:
    """Use the look of our figures within a `with` block; ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(MISSING) from error
    return matplotlib.rc_context(_STYLE)


def new_axes(title: str, *, width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """Return a figure of a width and height in inches, and its only axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    if title:
        axes.set_title(title, loc="left", pad=16)  # leaves a line for what is marked
    return figure, axes


def new_panels(
    title: str, rows: int, columns: int, *, width: float, height: float, **options: Any
) -> tuple[Figure, Any]:
    """Return a figure of a width and height in inches, and its axes as `Figure.subplots` returns them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, figure.subplots(rows, columns, **options)


def require(points: Sequence[Any], what: str) -> None:
    """Raise ValueError if there is nothing to draw."""
    if not points:
        raise ValueError(f"{what}: there is nothing to draw")


def width(curves: Mapping[str, Any]) -> float:
    """Return the width of a figure in inches, with room beside the axes for the legend of many curves."""
    return 6.4 if len(curves) <= 4 else 6.4 + 0.075 * max(map(len, curves)) + 0.5


def legend(axes: Axes, curves: Mapping[str, Any]) -> None:
    """Add a legend, beside the axes if there are many curves."""
    if len(curves) > 4:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    elif len(curves) > 1 or any(curves):
        axes.legend(loc="best")


def styles(labels: Iterable[str]) -> list[dict[str, Any]]:
    """Return the look of each line: one colour and marker per name, dashes by method or by the round of colours."""
    names: dict[str, int] = {}
    styles = []
    for label in labels:
        method = next((word for word in METHODS if word in label.lower()), None)
        name = label.lower().replace(method, "").strip(" ,:;()[]-") if method else label
        rank = names.setdefault(name, len(names))
        dash = METHODS[method] if method else 0
        turn = rank // len(COLOURS)
        styles.append(
            {
                "color": COLOURS[rank % len(COLOURS)],
                "marker": MARKERS[(rank + turn) % len(MARKERS)],
                "linestyle": DASHES[(dash + 2 * turn) % len(DASHES)],
                "markerfacecolor": "white" if dash else COLOURS[rank % len(COLOURS)],
            }
        )
    return styles


def columns(points: Iterable[Sequence[float]]) -> list[list[float]]:
    """Return the x and the y coordinates of points."""
    return [list(column) for column in zip(*points, strict=True)] or [[], []]


def line(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """Draw a line; values that are not finite become arrows at the upper edge."""
    axes.plot(x, [value if math.isfinite(value) else math.nan for value in y], **style)
    beyond = [place for place, value in zip(x, y, strict=True) if not math.isfinite(value)]
    if beyond:
        arrow = {"color": style["color"], "marker": "$\\uparrow$", "markersize": 11, "linestyle": "none"}
        axes.plot(beyond, [0.97] * len(beyond), transform=axes.get_xaxis_transform(), clip_on=False, **arrow)


def token_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the x axis logarithmic to base 2, with ticks at what was measured or at powers of two, in full."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    ticks = sorted(values)
    low, high = ticks[0], ticks[-1]
    if len(ticks) > 9 or any(b / a < 1.25 for a, b in pairwise(ticks)):
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
        step = max(1, math.ceil((last - first + 1) / 9))
        ticks = [2.0**power for power in range(first, last + 1, step)] or ticks[:1]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def positive_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the y axis logarithmic where the values span more than a factor of 4, with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) / min(finite) <= 4:
        return
    axes.set_yscale("log")
    narrow = max(finite) / min(finite) < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


PERPLEXITY = "perplexity per token (log scale)"
"""Label of an axis that `perplexity_axis` made."""


def perplexity_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the y axis logarithmic, over a factor of 2 or more, so that a small difference looks small.

    ValueError for a perplexity that is not more than 0.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    finite = [value for value in values if math.isfinite(value)]
    if any(value <= 0 for value in finite):
        raise ValueError("a perplexity is more than 0")
    axes.set_yscale("log")
    if not finite:
        return
    low, high = min(finite), max(finite)
    room = max(1.0, math.sqrt(2 * low / high)) * (high / low) ** 0.05
    axes.set_ylim(low / room, high * room)
    subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low < 8 else (1, 2, 5) if high / low < 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def are_uneven(bins: Sequence[tuple[int, int]]) -> bool:
    """Return whether bins (first, last + 1) grow so much that they need a logarithmic axis."""
    widths = [last - first for first, last in bins]
    return max(widths) > 2 * min(widths)


def steps(bins: Iterable[tuple[int, int, float]], logarithmic: bool) -> list[list[float]]:
    """Return the coordinates of steps, x and y, with a gap where bins (first, last + 1, value) are missing."""
    x: list[float] = []
    y: list[float] = []
    for first, last, value in sorted(bins):
        start = max(first, 0.5) if logarithmic else first  # position 0 has no place on a logarithmic axis
        if x and x[-1] != start:
            x.append(x[-1])
            y.append(math.nan)
        x += [start, last]
        y += [value, value]
    return [x, y]


def thousands(axis: Any) -> None:
    """Write 1k for 1000."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def mark_trained(axes: Axes, trained_length: int | None) -> None:
    """Mark a length on the x axis, if there is one; the axes have their scale and their lines already."""
    if trained_length is None:
        return
    place, _ = axes.transAxes.inverted().transform(axes.transData.transform((trained_length, axes.get_ylim()[1])))
    # Within the axes: beside them are the ticks.
    side: Literal["left", "center", "right"] = "left" if place < 0.2 else "right" if place > 0.8 else "center"
    mark_length(axes, f"trained length {trained_length:,}", trained_length, side)


def mark_length(axes: Axes, text: str, tokens: int, side: Literal["left", "center", "right"]) -> None:
    """Draw a thin vertical line with words above it, aligned to the line by this side."""
    axes.axvline(tokens, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        text,
        (tokens, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        ha=side,
        color=GREY,
        fontsize=8.5,
    )


def colour_bar(figure: Figure, image: Any, axes: Any, label: str, *, percent: bool = False) -> None:
    """Add a bar beside the axes that says what the colours of an image mean."""
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if percent:
        bar.set_ticks([0, 0.25, 0.5, 0.75, 1.0], labels=["0", "25", "50", "75", "100"])


def limit(values: Tensor) -> float:
    """Return the largest magnitude of values, 1 if all are 0."""
    return float(values.abs().max()) or 1.0


def heat_map(
    figure: Figure, axes: Axes, values: Tensor, label: str, *, symmetric: bool = False, aspect: Any = "auto"
) -> None:
    """Draw a matrix; with `symmetric` colours, for values of both signs, white is 0."""
    axes.grid(False)
    most = limit(values)
    colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -most, "vmax": most} if symmetric else {}
    image = axes.imshow(values.tolist(), aspect=aspect, interpolation="nearest", origin="lower", **colours)
    colour_bar(figure, image, axes, label)
