"""Figures of what is measured and computed elsewhere; the only file that draws, and the only one that needs matplotlib.

Every function returns a `matplotlib.figure.Figure` that belongs to no window and no global state; `save` writes it.
Colours are Okabe and Ito's, told apart by colour-blind readers; lines differ in marker and dashes as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from .decay import AttentionByDistance, Decay
    from .frequencies import Frequencies
    from .order import OrderSensitivity
    from .precision import DistinctBiases

MISSING = "plots need matplotlib, which is not installed: pip install 'hf_posenc[plots]'. The numbers need no plots"

FORMATS = ("png", "svg", "pdf")
"""What `save` can write."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
"""Okabe and Ito 2008, without the yellow (too faint on white), with a grey."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
METHODS = {"non-overlapping": 1, "sliding": 0}
"""Words in a label that say how perplexity was counted, and the dashes that they get; the rest decides the colour."""

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


def save(figure: Figure, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure, atomically; the same figure gives the same bytes (no date, no random ids).

    Args:
        figure: of this module, or any other.
        path: its suffix decides the format, one of `FORMATS`. An existing file is replaced.
        dpi: pixels per inch of a PNG.

    Returns:
        The path.

    Raises:
        ValueError: for another suffix.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"a figure is saved as {', '.join(FORMATS)}, not as {path.name!r}")
    # What each format writes about its making.
    unwanted = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Creator", "Producer")}[kind]
    with _style(), replaced(path) as partial:
        figure.savefig(partial, format=kind, dpi=dpi, bbox_inches="tight", metadata=dict.fromkeys(unwanted))
    return path


# ------------------------------------------------------------------------------------------------------ runs of a model


def perplexity_by_length(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw perplexity against the length of the context.

    Curves whose labels differ only in `sliding` and `non-overlapping` share a colour; the latter is dashed.

    Args:
        curves: label -> (length in tokens, perplexity). A perplexity that is not finite becomes an arrow at the top.
        trained_length: tokens; marked if given.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no points.
        ImportError: without matplotlib.
    """
    points = [point for curve in curves.values() for point in curve]
    _require(points, "perplexity by length")
    with _style():
        figure, axes = _axes(title, width=_width(curves))
        for (label, curve), style in zip(curves.items(), _styles(curves), strict=True):
            _line(axes, *_columns(sorted(curve)), label=label, **style)
        _token_axis(axes, {x for x, _ in points})
        _positive_axis(axes, [y for _, y in points])
        _mark_trained(axes, trained_length)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel("perplexity per token")
        _legend(axes, curves)
    return figure


def loss_by_position(
    curves: Mapping[str, Sequence[tuple[int, int, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw the mean loss of a token against its position in the window, as steps.

    Args:
        curves: label -> bins (first position, last position + 1, mean loss in nats).
        trained_length: tokens; marked if given.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no bins, or one is empty.
        ImportError: without matplotlib.
    """
    bins = [entry for curve in curves.values() for entry in curve]
    _require(bins, "loss by position")
    if any(first < 0 or first >= last for first, last, _ in bins):
        raise ValueError("a bin is (first position >= 0, last position + 1, mean loss), with last + 1 > first")
    logarithmic = max(last - first for first, last, _ in bins) > 2 * min(last - first for first, last, _ in bins)
    with _style():
        figure, axes = _axes(title, width=_width(curves))
        for (label, curve), style in zip(curves.items(), _styles(curves), strict=True):
            x: list[float] = []
            y: list[float] = []
            for first, last, loss in sorted(curve):
                start = max(first, 0.5) if logarithmic else first  # position 0 has no place on a logarithmic axis
                if x and x[-1] != start:
                    x.append(x[-1])
                    y.append(math.nan)
                x += [start, last]
                y += [loss, loss]
            axes.plot(x, y, label=label, **{**style, "marker": ""})
        if logarithmic:
            edges = {edge for first, last, _ in bins for edge in (max(first, 1), last)}
            _token_axis(axes, edges)
        else:
            _thousands(axes.xaxis)
        _mark_trained(axes, trained_length)
        axes.set_xlabel("position in the window (tokens)")
        axes.set_ylabel("mean loss (nats per token)")
        _legend(axes, curves)
    return figure


def loss_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, xlabel: str = "tokens", title: str = ""
) -> Figure:
    """Draw loss against what was spent on it.

    Args:
        curves: label -> (tokens, steps or seconds, loss in nats).
        xlabel: what was spent, with its unit.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no points.
        ImportError: without matplotlib.
    """
    points = [point for curve in curves.values() for point in curve]
    _require(points, "loss curve")
    with _style():
        figure, axes = _axes(title, width=_width(curves))
        for (label, curve), style in zip(curves.items(), _styles(curves), strict=True):
            sparse = len(curve) <= 16
            _line(axes, *_columns(sorted(curve)), label=label, **{**style, "marker": style["marker"] if sparse else ""})
        _thousands(axes.xaxis)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("loss (nats per token)")
        _legend(axes, curves)
    return figure


def retrieval_heat_map(cells: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Draw retrieval accuracy by context length and depth of what is to be found; cells not measured stay blank.

    Args:
        cells: mappings with `length` (tokens), `depth` (0 start .. 1 end of the context) and `accuracy` (0 .. 1).
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no cells, or two for one place.
        ImportError: without matplotlib.
    """
    _require(cells, "retrieval")
    values = {(cell["depth"], cell["length"]): float(cell["accuracy"]) for cell in cells}
    if len(values) != len(cells):
        raise ValueError("two cells have the same length and depth")
    depths, lengths = (sorted({key[i] for key in values}) for i in (0, 1))
    grid = [[values.get((depth, length), math.nan) for length in lengths] for depth in depths]
    with _style():
        figure, axes = _axes(title, width=2.2 + 0.62 * len(lengths), height=1.5 + 0.42 * len(depths))
        axes.grid(False)
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                if (depth, length) in values:
                    accuracy = values[depth, length]
                    colour = "white" if accuracy < 0.5 else "black"
                    axes.text(column, row, f"{100 * accuracy:.0f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(lengths)), [f"{length:,.0f}" for length in lengths])
        if len(lengths) > 6:
            axes.tick_params(axis="x", rotation=45)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel("depth of the answer")
        _colour_bar(figure, image, axes, "accuracy (%)", percent=True)
    return figure


# -------------------------------------------------------------------------------------------------- schemes and models


def position_vectors(vectors: Tensor, *, title: str = "") -> Figure:
    """Draw position vectors as a heat map.

    Args:
        vectors: (T, E).
        title: above the axes; empty means none.
    """
    with _style():
        figure, axes = _axes(title, width=6.4, height=4.0)
        _heat_map(figure, axes, vectors.T, "value", symmetric=True)
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("coordinate")
    return figure


def similarity_matrix(vectors: Tensor, *, title: str = "") -> Figure:
    """Draw the cosine of every two position vectors.

    Args:
        vectors: (T, E).
        title: above the axes; empty means none.
    """
    unit = vectors.double() / vectors.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)
    with _style():
        figure, axes = _axes(title, width=5.2, height=4.4)
        _heat_map(figure, axes, unit @ unit.T, "cosine similarity", symmetric=True, aspect="equal")
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("position (tokens)")
    return figure


def decay_curves(curves: Mapping[str, Decay], *, heads: bool = False, title: str = "") -> Figure:
    """Draw the score by distance of several schemes on one axis.

    Args:
        curves: label -> what `hf_posenc.analysis.decay` returned.
        heads: draw every layer and head of a curve thinly as well as their mean.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no curves.
    """
    _require(list(curves), "decay")
    with _style():
        figure, axes = _axes(title, width=_width(curves))
        for (label, curve), style in zip(curves.items(), _styles(curves), strict=True):
            order = curve.distances.argsort()
            x = curve.distances[order].tolist()
            if heads:
                for row in curve.scores.flatten(0, 1)[:, order].tolist():
                    axes.plot(x, row, color=style["color"], linewidth=0.7, alpha=0.45)
            marks = {**style, "markevery": max(1, len(x) // 8)}
            axes.plot(x, curve.mean[order].tolist(), label=label, **marks)
        _thousands(axes.xaxis)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel("score, where the content alone would give 1")
        _legend(axes, curves)
    return figure


def bias_maps(curve: Decay, *, layer: int = 0, title: str = "") -> Figure:
    """Draw what each head adds to the scores, query by key, up to the largest distance.

    Args:
        curve: what `hf_posenc.analysis.decay` returned, of distances 0 .. n - 1.
        layer: whose heads.
        title: above the axes; empty means none.

    Raises:
        ValueError: if distances are missing.
    """
    import torch

    count = len(curve.distances)
    if not torch.equal(curve.distances.cpu(), torch.arange(count)):
        raise ValueError("a map of biases needs every distance from 0")
    scores = curve.scores[layer] - 1
    lag = torch.arange(count)[:, None] - torch.arange(count)
    maps = torch.where(lag >= 0, scores[:, lag.clamp(min=0)], math.nan)
    columns = min(4, len(maps))
    rows = math.ceil(len(maps) / columns)
    limit = _limit(scores)
    with _style():
        from matplotlib.colors import SymLogNorm
        from matplotlib.figure import Figure

        # Heads differ by orders of magnitude, and one scale for all of them keeps them comparable.
        colours = SymLogNorm(linthresh=limit / 100, vmin=-limit, vmax=limit)
        figure = Figure(figsize=(1.2 + 1.75 * columns, 0.8 + 1.75 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        image = None
        for head, axes in enumerate(grid.flat):
            if head >= len(maps):
                axes.set_visible(False)
                continue
            axes.grid(False)
            image = axes.imshow(maps[head].tolist(), cmap="RdBu", norm=colours, interpolation="nearest")
            axes.set_title(f"head {head}", fontsize=9)
        figure.supxlabel("key (position)", fontsize=10)
        figure.supylabel("query (position)", fontsize=10)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        _colour_bar(figure, image, list(grid.flat), "added to the score (nats)")
        ticks = [sign * limit / step for sign, step in ((-1, 1), (-1, 10), (-1, 100), (1, 100), (1, 10), (1, 1))]
        figure.axes[-1].yaxis.set_ticks(ticks, [f"{tick:.2g}" for tick in ticks])
        figure.axes[-1].yaxis.set_ticks([], minor=True)
    return figure


def attention_by_distance(measured: AttentionByDistance, *, title: str = "") -> Figure:
    """Draw the attention that each layer and head pays to each distance, in bins that double.

    Args:
        measured: what `hf_posenc.analysis.attention_by_distance` returned.
        title: above the axes; empty means none.
    """
    import torch

    layers, heads, length = measured.mass.shape
    edges = [0, 1]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    binned = torch.stack([measured.mass[..., a:b].sum(-1) for a, b in pairwise(edges)], -1).flatten(0, 1)
    names = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    with _style():
        figure, axes = _axes(title, width=6.4, height=min(9.0, 1.6 + 0.11 * layers * heads + 0.05 * layers))
        axes.grid(False)
        image = axes.imshow(
            (100 * binned).tolist(), aspect="auto", cmap="viridis", vmin=0, vmax=100, interpolation="nearest"
        )
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        step = math.ceil(layers / 24)
        axes.set_yticks(
            [heads * layer + (heads - 1) / 2 for layer in range(0, layers, step)],
            [f"{n}" for n in range(0, layers, step)],
        )
        for layer in range(1, layers):
            axes.axhline(heads * layer - 0.5, color="white", linewidth=1.2)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel(f"layer ({heads} heads each)")
        _colour_bar(figure, image, axes, "share of attention (%)")
    return figure


def wavelengths(found: Sequence[Frequencies], *, title: str = "") -> Figure:
    """Draw wavelengths against the trained length: what lies above it never completes a turn in training.

    Args:
        found: what `hf_posenc.analysis.frequencies` returned, of one trained length. Waves that stand still are left
            out, and counted in the legend.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are none, or trained lengths differ.
    """
    _require(found, "wavelengths")
    trained = {each.trained_length for each in found}
    if len(trained) > 1:
        raise ValueError(f"one trained length at a time, not {sorted(trained)}")
    labels = [f"{each.label} ({each.completed} of {len(each.frequencies)} turn)" for each in found]
    with _style():
        figure, axes = _axes(title, width=_width(dict.fromkeys(labels)))
        for each, label, style in zip(found, labels, _styles(labels), strict=True):
            places = [(i, y) for i, y in enumerate(each.wavelengths.tolist()) if math.isfinite(y)]
            axes.plot(*_columns(places), label=label, **{**style, "linestyle": "none", "markersize": 3.6})
        axes.set_yscale("log")
        axes.axhline(min(trained), color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            f"trained length {min(trained):,}",
            (1, min(trained)),
            xycoords=("axes fraction", "data"),
            xytext=(-2, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=GREY,
            fontsize=8.5,
        )
        axes.set_xlabel("pair of coordinates")
        axes.set_ylabel("wavelength (tokens per turn)")
        _legend(axes, dict.fromkeys(labels))
    return figure


def distinct_biases(found: Sequence[DistinctBiases], *, title: str = "") -> Figure:
    """Draw how many distances each way of computing biases tells apart, head by head, in percent of the length.

    Args:
        found: what `hf_posenc.analysis.precision_audit` returned.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there is nothing.
    """
    _require(found, "distinct biases")
    with _style():
        figure, axes = _axes(title, width=6.4, height=1.2 + 0.34 * len(found))
        methods = list(dict.fromkeys(each.method for each in found))
        for row, each in enumerate(found):
            shares = [100 * count / each.length for count in each.heads]
            place = methods.index(each.method)
            look: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
            axes.plot(shares, [row] * len(shares), linestyle="none", alpha=0.6, **look)
            low, high = min(each.heads), max(each.heads)
            axes.annotate(
                f"{low:,}" if low == high else f"{low:,} to {high:,}",
                (max(shares), row),
                xytext=(7, 0) if max(shares) < 80 else (-7, 0),
                textcoords="offset points",
                va="center",
                ha="left" if max(shares) < 80 else "right",
                fontsize=8.5,
            )
        axes.set_yticks(range(len(found)), [f"{each.method}, {each.dtype}" for each in found])
        axes.invert_yaxis()
        axes.set_xlim(-3, 103)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"distances told apart (% of {found[0].length:,}, one mark per head)")
    return figure


def order_by_layer(measured: Mapping[str, OrderSensitivity], *, title: str = "") -> Figure:
    """Draw how much each layer notices of the order of its context, by itself and with those below it.

    Args:
        measured: label -> what `hf_posenc.analysis.order_sensitivity` returned.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there is nothing.
    """
    _require(list(measured), "order sensitivity")
    floor = 1e-17
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.6, 4.0), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, name, words in zip(
            panels, ("own", "accumulated"), ("the layer alone", "with all layers below"), strict=True
        ):
            for (label, each), style in zip(measured.items(), _styles(measured), strict=True):
                x = [layer.index for layer in each.layers]
                y = [max(getattr(layer, name), floor) for layer in each.layers]
                axes.plot(x, y, label=label, **style)
            axes.set_yscale("log")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_title(words, fontsize=10)
            axes.set_xlabel("layer")
        panels[0].set_ylabel("relative change of the last token")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        panels[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    return figure


# -------------------------------------------------------------------------------------------------------------- the pen


def _style() -> AbstractContextManager[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(MISSING) from error
    return matplotlib.rc_context(_STYLE)


def _axes(title: str, *, width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    if title:
        axes.set_title(title, loc="left", pad=16)  # leaves a line for what is marked
    return figure, axes


def _require(points: Sequence[Any], what: str) -> None:
    if not points:
        raise ValueError(f"{what}: there is nothing to draw")


def _width(curves: Mapping[str, Any]) -> float:
    """Return inches: the legend of many curves stands beside them."""
    return 6.4 if len(curves) <= 4 else 6.4 + 0.075 * max(map(len, curves)) + 0.5


def _legend(axes: Axes, curves: Mapping[str, Any]) -> None:
    if len(curves) > 4:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    elif len(curves) > 1 or any(curves):
        axes.legend(loc="best")


def _styles(labels: Iterable[str]) -> list[dict[str, Any]]:
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


def _columns(points: Iterable[Sequence[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*points, strict=True)] or [[], []]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """Draw a line; values that are not finite become arrows at the upper edge."""
    axes.plot(x, [value if math.isfinite(value) else math.nan for value in y], **style)
    beyond = [place for place, value in zip(x, y, strict=True) if not math.isfinite(value)]
    if beyond:
        arrow = {"color": style["color"], "marker": "$\\uparrow$", "markersize": 11, "linestyle": "none"}
        axes.plot(beyond, [0.97] * len(beyond), transform=axes.get_xaxis_transform(), clip_on=False, **arrow)


def _token_axis(axes: Axes, values: Iterable[float]) -> None:
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


def _positive_axis(axes: Axes, values: Iterable[float]) -> None:
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


def _thousands(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))


def _mark_trained(axes: Axes, trained_length: int | None) -> None:
    if trained_length is None:
        return
    axes.axvline(trained_length, color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    axes.annotate(
        f"trained length {trained_length:,}",
        (trained_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        color=GREY,
        fontsize=8.5,
    )


def _colour_bar(figure: Figure, image: Any, axes: Any, label: str, *, percent: bool = False) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    bar.set_label(label)
    bar.outline.set_visible(False)
    if percent:
        bar.set_ticks([0, 0.25, 0.5, 0.75, 1.0], labels=["0", "25", "50", "75", "100"])


def _limit(values: Tensor) -> float:
    """Return the largest magnitude of values, 1 if all are 0."""
    return float(values.abs().max()) or 1.0


def _heat_map(
    figure: Figure, axes: Axes, values: Tensor, label: str, *, symmetric: bool = False, aspect: Any = "auto"
) -> None:
    """Draw a matrix; where the sign means something, white is 0."""
    axes.grid(False)
    limit = _limit(values)
    colours: dict[str, Any] = {"cmap": "RdBu", "vmin": -limit, "vmax": limit} if symmetric else {}
    image = axes.imshow(values.tolist(), aspect=aspect, interpolation="nearest", origin="lower", **colours)
    _colour_bar(figure, image, axes, label)
