"""Common drawing functions of all figures: style, axes and saving.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Lines also differ in markers and dashes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..checkpoints.files import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from matplotlib.ticker import Locator
    from torch import Tensor

T = TypeVar("T")

Look = dict[str, Any]
"""Keyword arguments of matplotlib for a line, a text or an image."""

MISSING = "plots need matplotlib, which is not installed: pip install matplotlib. The numbers need no plots"

FORMATS = ("png", "svg", "pdf")
"""Formats that `save` can write."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
"""Okabe and Ito 2008, with a grey instead of the yellow, which is too faint on white."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
METHODS = {"non-overlapping": 1, "sliding window": 0, "sliding": 0}
"""Word in a label that names a way to measure perplexity -> index in `DASHES`. The other words decide the colour."""

GREY = "#595959"
BESIDE: Look = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
"""Options of a legend to the right of its axes."""
FAINT: Look = {"color": GREY, "linestyle": (0, (2, 2)), "zorder": 1}
"""Options of a line that marks a length."""
RC_PARAMS: Any = {
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
    """Return the format of a figure from the suffix of its file name; ValueError if it is not one of `FORMATS`."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"a figure is saved as {', '.join(FORMATS)}, not as {path.name!r}")
    return kind


def check_installed() -> None:
    """Raise ImportError if matplotlib is missing. Call it before a long computation whose result is drawn."""
    style()


def save(figure: Figure, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure to a file, atomically. Without date and random ids in it, the same figure gives the same bytes.

    Args:
        figure: any figure of matplotlib.
        path: file to write; it is replaced if it exists. Its suffix decides the format, one of `FORMATS`.
        dpi: pixels per inch of a PNG.

    Returns:
        The path.

    Raises:
        ValueError: for a suffix that is not in `FORMATS`.
        OSError: if the file cannot be written.
    """
    path, kind = Path(path), kind_of(path)
    # Metadata that matplotlib would write: names of programs and dates.
    unwanted = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}[kind]
    with style(), replaced(path) as partial:
        figure.savefig(partial, format=kind, dpi=dpi, bbox_inches="tight", metadata=dict.fromkeys(unwanted))
    return path


def style() -> AbstractContextManager[None]:
    """Use the style of this package's figures within a `with` block; ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(MISSING) from error
    return matplotlib.rc_context(RC_PARAMS)


@contextmanager
def one_panel(
    title: str, *, width: float = 6.4, height: float = 4.0, xlabel: str = "", ylabel: str = ""
) -> Iterator[tuple[Figure, Axes]]:
    """Provide a figure with one panel, and its axes. Width and height are in inches."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
        if title:
            axes.set_title(title, loc="left", pad=16)  # leaves a line for the label of a marked length
        yield figure, axes


@contextmanager
def panels(
    title: str, rows: int, columns: int, *, width: float, height: float, **options: Any
) -> Iterator[tuple[Figure, Any]]:
    """Provide a figure with several panels, and its axes from `Figure.subplots`. Width and height are in inches."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        yield figure, figure.subplots(rows, columns, **options)


@contextmanager
def curves(
    labelled: Iterable[tuple[str, T]], title: str, xlabel: str, ylabel: str
) -> Iterator[tuple[Figure, Axes, list[tuple[T, Look]]]]:
    """Provide a figure for curves, its axes, and pairs of a curve and its look. Add a legend at the end.

    Args:
        labelled: pairs of a label and the data of its curve.
        title: text above the axes; empty means none.
        xlabel: label of the x axis.
        ylabel: label of the y axis.
    """
    labels, data = zip(*labelled, strict=True)
    # The legend of many curves is beside the axes, and takes this much room.
    width = 6.4 if len(set(labels)) <= 4 else 6.4 + 0.075 * max(map(len, labels)) + 0.5
    with one_panel(title, width=width, xlabel=xlabel, ylabel=ylabel) as (figure, axes):
        yield figure, axes, list(zip(data, styles(labels), strict=True))
        legend(axes, labels)


def require(points: Collection[object], what: str) -> None:
    """Raise ValueError if there is nothing to draw."""
    if not points:
        raise ValueError(f"{what}: there is nothing to draw")


def legend(axes: Axes, labels: Collection[str]) -> None:
    """Add a legend, beside the axes if there are many curves."""
    if len(set(labels)) > 4:
        axes.legend(**BESIDE)
    elif len(set(labels)) > 1 or any(labels):
        axes.legend(loc="best")


def styles(labels: Iterable[str]) -> list[Look]:
    """Return the looks of lines. The method in a label decides the dashes, the other words colour and marker."""
    names: dict[str, int] = {}
    styles = []
    for label in labels:
        method = next((word for word in METHODS if word in label.lower()), None)
        name = label.lower().replace(method or "", "").strip(" ,:;()[]-")
        rank = names.setdefault(name, len(names))
        dash = METHODS[method] if method else 0
        cycle = rank // len(COLOURS)
        styles.append(
            {
                "label": label,
                "color": COLOURS[rank % len(COLOURS)],
                "marker": MARKERS[(rank + cycle) % len(MARKERS)],
                "linestyle": DASHES[(dash + 2 * cycle) % len(DASHES)],
                "markerfacecolor": "white" if dash else COLOURS[rank % len(COLOURS)],
            }
        )
    return styles


def marks(number: int) -> Look:
    """Return the look of marks without a line, for the series with this number."""
    marker = MARKERS[number % len(MARKERS)]
    return {"color": COLOURS[number % len(COLOURS)], "marker": marker, "linestyle": "none"}


def columns(points: Iterable[Sequence[float]]) -> list[list[float]]:
    """Return the x and the y coordinates of points."""
    return [list(column) for column in zip(*points, strict=True)] or [[], []]


def line(axes: Axes, x: Sequence[float], y: Sequence[float], **look: Any) -> None:
    """Draw a line. Values that are not finite become arrows at the upper edge."""
    axes.plot(x, [value if math.isfinite(value) else math.nan for value in y], **look)
    infinite = [coordinate for coordinate, value in zip(x, y, strict=True) if not math.isfinite(value)]
    if infinite:
        arrow = {"color": look["color"], "marker": "$\\uparrow$", "markersize": 11, "linestyle": "none"}
        axes.plot(infinite, [0.97] * len(infinite), transform=axes.get_xaxis_transform(), clip_on=False, **arrow)


def token_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the x axis logarithmic to base 2, with ticks at the values, or at powers of two if these are too close."""
    from matplotlib.ticker import FixedLocator

    axes.set_xscale("log", base=2)
    ticks = sorted(values)
    low, high = ticks[0], ticks[-1]
    if len(ticks) > 9 or any(b / a < 1.25 for a, b in pairwise(ticks)):
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
        step = max(1, math.ceil((last - first + 1) / 9))
        ticks = [2.0**power for power in range(first, last + 1, step)] or ticks[:1]
    _ticks(axes.xaxis, FixedLocator(ticks), ",.0f")


def positive_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the y axis logarithmic if the values span more than a factor of 4, with plain numbers as labels."""
    from matplotlib.ticker import LogLocator

    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) / min(finite) <= 4:
        return
    axes.set_yscale("log")
    _ticks(axes.yaxis, LogLocator(subs=(1, 2, 5) if max(finite) / min(finite) < 100 else (1,)), ",.6g")


PERPLEXITY = "perplexity per token (log scale)"
"""Label of an axis from `perplexity_axis`."""


def perplexity_axis(axes: Axes, values: Iterable[float]) -> None:
    """Make the y axis logarithmic, over a factor of at least 2, so that a small difference looks small.

    Raises:
        ValueError: if a perplexity is 0 or negative.
    """
    from matplotlib.ticker import LogLocator

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
    _ticks(axes.yaxis, LogLocator(subs=subs), ",.6g")


def _ticks(axis: Axis, places: Locator, form: str) -> None:
    """Set the major ticks of an axis and the format of their labels, and remove minor ticks."""
    from matplotlib.ticker import NullLocator

    axis.set_major_locator(places)
    axis.set_major_formatter(lambda value, _: format(value, form))
    axis.set_minor_locator(NullLocator())


def are_uneven(bins: Sequence[tuple[int, int]]) -> bool:
    """Return whether bins (first, last + 1) grow so much that they need a logarithmic axis."""
    widths = [last - first for first, last in bins]
    return max(widths) > 2 * min(widths)


def steps(bins: Iterable[tuple[int, int, float]], logarithmic: bool) -> list[list[float]]:
    """Return the x and y coordinates of steps for bins (first, last + 1, value), with gaps for missing bins."""
    points: list[tuple[float, float]] = []
    for first, last, value in sorted(bins):
        start = max(first, 0.5) if logarithmic else first  # a logarithmic axis has no 0
        if points and points[-1][0] != start:
            points.append((points[-1][0], math.nan))
        points += [(start, value), (last, value)]
    return columns(points)


def thousands(axis: Axis) -> None:
    """Label 1000 as 1k."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def mark_trained(axes: Axes, trained_length: int | None) -> None:
    """Mark the trained length on the x axis unless it is None. Call it after scale and lines are set."""
    if trained_length is None:
        return
    share, _ = axes.transAxes.inverted().transform(axes.transData.transform((trained_length, axes.get_ylim()[1])))
    # Keep the text within the width of the axes.
    side: Literal["left", "center", "right"] = "left" if share < 0.2 else "right" if share > 0.8 else "center"
    mark_length(axes, f"trained length {trained_length:,}", trained_length, side)


def mark_length(axes: Axes, text: str, tokens: int, side: Literal["left", "center", "right"]) -> None:
    """Draw a thin vertical line with a text above it. `side` is the side of the text that is aligned to the line."""
    axes.axvline(tokens, linewidth=0.8, **FAINT)
    beside(axes, text, (tokens, 1), (0, 2), xycoords=("data", "axes fraction"), ha=side, color=GREY)


def beside(axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **options: Any) -> None:
    """Write a small text at an offset in points from a place of the axes, with options of `Axes.annotate`."""
    axes.annotate(text, place, xytext=offset, textcoords="offset points", fontsize=8.5, **options)


def colour_bar(image: AxesImage, axes: Any, label: str, *, percent: bool = False) -> None:
    """Add the colour bar of an image beside axes."""
    bar = image.axes.figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if percent:
        bar.set_ticks([0, 0.25, 0.5, 0.75, 1.0], labels=["0", "25", "50", "75", "100"])


def limits(values: Tensor, least: float = 0.0) -> Look:
    """Return a symmetric colour range for values of both signs, with white for 0. It spans at least `least`."""
    most = max(least, float(values.abs().max())) or 1.0
    return {"cmap": "RdBu", "vmin": -most, "vmax": most}


def image(axes: Axes, values: Any, bar: str = "", *, percent: bool = False, **options: Any) -> AxesImage:
    """Draw a matrix with options of `Axes.imshow`, and a colour bar if `bar` gives its label."""
    axes.grid(False)
    rows = values if isinstance(values, list) else values.tolist()
    drawn = axes.imshow(rows, **{"aspect": "auto", "interpolation": "nearest", **options})
    if bar:
        colour_bar(drawn, axes, bar, percent=percent)
    return drawn


def ticks(axis: Axis, labels: Sequence[object], most: int) -> None:
    """Label the coordinates 0, 1, ... of an axis, or at most `most` evenly spread ones."""
    step = max(1, math.ceil(len(labels) / most))
    axis.set_ticks(range(0, len(labels), step), [str(label) for label in labels[::step]])
