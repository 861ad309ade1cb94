"""Figures of evaluations and analyses. They need matplotlib.

Every function returns a `matplotlib.figure.Figure` that belongs to no window and no global state. `save` writes it.
Every function has the keyword `title`, a text above the axes. It raises ValueError if there is nothing to draw, and
ImportError without matplotlib.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Lines also differ in markers and dashes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoints.files import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from .decay import Decay

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
"""Okabe and Ito 2008, with a grey instead of the yellow, which is too faint on white."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
GREY = "#595959"
FAINT: Any = {"color": GREY, "linestyle": (0, (2, 2)), "marker": "", "linewidth": 0.8, "zorder": 1}
"""Options of a line that marks a length."""

STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.8,
    "svg.hashsalt": "hf_posenc",  # ids of an SVG are random otherwise
}


def check_installed() -> None:
    """Raise ImportError if matplotlib is missing. Call it before a long computation whose result is drawn."""
    _style()


def save(figure: Figure, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure to a file, atomically. Without date and random ids in it, the same figure gives the same bytes.

    Args:
        figure: any figure of matplotlib.
        path: file to write; it is replaced if it exists. Its suffix decides the format, such as `.png` or `.svg`.
        dpi: pixels per inch of a PNG.

    Returns:
        The path.

    Raises:
        ValueError: for a suffix that matplotlib does not know.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with _style(), replaced(path) as partial:
        figure.savefig(partial, format=kind, dpi=dpi, bbox_inches="tight", metadata=dates.get(kind))
    return path


def _style() -> AbstractContextManager[None]:
    """Use the style of this package's figures within a `with` block; ImportError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.rcsetup import cycler
    except ImportError as error:
        missing = "plots need matplotlib, which is not installed: pip install matplotlib. The numbers need no plots"
        raise ImportError(missing) from error
    looks = cycler(linestyle=DASHES) * cycler(color=COLOURS, marker=MARKERS)
    return rc_context({**STYLE, "axes.prop_cycle": looks})


@contextmanager
def _panel(title: str, width: float, height: float, xlabel: str, ylabel: str) -> Iterator[tuple[Figure, Axes]]:
    """Provide a figure with one panel, and its axes. Width and height are in inches."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot(title=title, xlabel=xlabel, ylabel=ylabel)


@contextmanager
def _curves(
    labels: Collection[str], title: str, xlabel: str, ylabel: str, trained_length: int | None = None
) -> Iterator[tuple[Figure, Axes]]:
    """Provide a figure for labelled curves and its axes; at the end mark the trained length and add a legend."""
    if not labels:
        raise ValueError(f"{ylabel} by {xlabel}: there is nothing to draw")
    many = len(labels) > 4
    with _panel(title, 8.4 if many else 6.4, 4.0, xlabel, ylabel) as (figure, axes):
        axes.xaxis.set_major_formatter("{x:,.10g}")
        yield figure, axes
        if trained_length is not None:
            axes.axvline(trained_length, label=f"trained length {trained_length:,}", **FAINT)
        figure.legend(loc="outside right upper") if many else axes.legend()


def _in_powers_of_two(axes: Axes, ticks: set[float]) -> None:
    """Make the x axis logarithmic to base 2, with ticks at a few lengths in tokens, or else at powers of two."""
    axes.set_xscale("log", base=2)
    if len(ticks) <= 9:
        axes.set_xticks(sorted(ticks))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,.10g}")


# ------------------------------------------------------------------------------------------------------ runs of a model


def perplexity_by_length(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw perplexity, on a logarithmic axis, against the length of the context.

    The axis spans a factor of at least 2, so that a small difference looks small.

    Args:
        curves: label -> points (length in tokens, perplexity). One that is not finite is left out.
        trained_length: length in tokens to mark; None means no mark.
        title: text above the axes; empty means none.
    """
    labels = "context length (tokens)", "perplexity per token (log scale)"
    with _curves(curves, title, *labels, trained_length) as (figure, axes):
        from matplotlib.ticker import LogLocator

        for label, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), label=label)
        _in_powers_of_two(axes, {length for points in curves.values() for length, _ in points})
        axes.set_yscale("log")
        values = [value for points in curves.values() for _, value in points if math.isfinite(value)] or [1.0]
        middle, room = math.sqrt(min(values) * max(values)), math.sqrt(max(2.0, 1.1 * max(values) / min(values)))
        axes.set_ylim(middle / room, middle * room)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
        axes.yaxis.set_major_formatter("{x:,.6g}")
        axes.minorticks_off()
    return figure


def loss_by_position(
    curves: Mapping[str, Sequence[tuple[int, int, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw the mean loss of a token against its position in the window, as steps.

    Args:
        curves: label -> bins (first position, last position + 1, mean loss in nats), each where the last one ends.
        trained_length: length in tokens to mark; None means no mark.
        title: text above the axes; empty means none.
    """
    labels = "position in the window (tokens)", "mean loss (nats per token)"
    with _curves(curves, title, *labels, trained_length) as (figure, axes):
        ends = {last for bins in curves.values() for _, last, _ in bins}
        widths = [last - first for bins in curves.values() for first, last, _ in bins]
        for label, bins in curves.items():
            edges = [max(0.5, bins[0][0]), *(last for _, last, _ in bins)]  # a logarithmic axis has no 0
            axes.stairs([loss for *_, loss in bins], edges, baseline=None, linewidth=1.7, label=label)
        if max(widths) > 2 * min(widths):
            _in_powers_of_two(axes, {*ends})
    return figure


def loss_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, xlabel: str = "tokens", title: str = ""
) -> Figure:
    """Draw loss against the tokens, steps or seconds that were spent.

    Args:
        curves: label -> points (tokens, steps or seconds; loss in nats).
        xlabel: label of the x axis, with its unit.
        title: text above the axes; empty means none.
    """
    with _curves(curves, title, xlabel, "loss (nats per token)") as (figure, axes):
        for label, points in curves.items():
            axes.plot(*zip(*sorted(points), strict=True), label=label, markevery=max(1, len(points) // 16))
    return figure


# -------------------------------------------------------------------------------------------------- schemes and models


def similarity_matrix(vectors: Tensor, *, title: str = "") -> Figure:
    """Draw the cosine similarity of all pairs of position vectors. The colour bar's label gives their range.

    Args:
        vectors: (T, E) vectors of T positions.
        title: text above the axes; empty means none.
    """
    unit = vectors.double() / vectors.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)
    cosines = unit @ unit.T
    low, high = float(cosines.min()), float(cosines.max())
    with _panel(title, 5.2, 4.4, "position (tokens)", "position (tokens)") as (figure, axes):
        axes.grid(False)
        drawn = axes.imshow(cosines.tolist(), interpolation="nearest", origin="lower")
        label = f"cosine similarity ({low:.2f} to {high:.2f})"
        figure.colorbar(drawn, ax=axes, shrink=0.9, pad=0.02, label=label)
    return figure


def decay_curves(curves: Mapping[str, Decay], *, heads: bool = False, title: str = "") -> Figure:
    """Draw the scores by distance of several schemes in one panel.

    Args:
        curves: label -> result of `hf_posenc.analysis.decay`.
        heads: draw thin lines for all layers and heads, and not only their mean.
        title: text above the axes; empty means none.
    """
    with _curves(curves, title, "distance (tokens)", "score, where the content alone would give 1") as (figure, axes):
        for label, curve in curves.items():
            order = curve.distances.argsort()
            x = curve.distances[order].tolist()
            (mean,) = axes.plot(x, curve.mean[order].tolist(), markevery=max(1, len(x) // 8), label=label)
            for row in curve.scores.flatten(0, 1)[:, order].tolist() if heads else ():
                axes.plot(x, row, color=mean.get_color(), marker="", linestyle="-", linewidth=0.7, alpha=0.45)
    return figure
