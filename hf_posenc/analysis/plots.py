"""Every picture of the package. Needs matplotlib, the extra `plots`; the numbers behind a picture never do."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which the colour-blind can tell apart; the styles repeat it with other lines and markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
LINES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def require() -> None:
    """Raise ImportError, with the remedy, unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "pictures need matplotlib: pip install 'hf_posenc[plots]'; the numbers are available without it"
        ) from None


def perplexity_by_length(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw perplexity over context length, both on logarithmic axes.

    Args:
        curves: by label, (tokens, perplexity) points.
        trained_length: marked by a vertical line.
        title: of the picture.
    """
    figure, axes = _axes(title, "context length (tokens)", "perplexity")
    _lines(axes, curves)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain_ticks(axes, sorted({x for points in curves.values() for x, _ in points}))
    _trained(axes, trained_length)
    _legend(axes, len(curves))
    return figure


def loss_by_position(
    curves: Mapping[str, Sequence[tuple[int, int, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw mean loss over the place in a window.

    Args:
        curves: by label, (first place, last place + 1, loss in nats) bins.
        trained_length: marked by a vertical line.
        title: of the picture.
    """
    figure, axes = _axes(title, "place in the window (tokens)", "loss (nats per token)")
    centred = {label: [((a * b) ** 0.5, loss) for a, b, loss in bins] for label, bins in curves.items()}
    _lines(axes, centred)
    axes.set_xscale("log", base=2)
    _trained(axes, trained_length)
    _legend(axes, len(curves))
    return figure


def loss_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, xlabel: str = "tokens", title: str = ""
) -> Figure:
    """Draw loss over the course of training.

    Args:
        curves: by label, (tokens or steps, loss in nats) points.
        xlabel: what the first of them is.
        title: of the picture.
    """
    figure, axes = _axes(title, xlabel, "loss (nats per token)")
    _lines(axes, curves)
    _legend(axes, len(curves))
    return figure


def retrieval_heat_map(cells: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Draw accuracy over length and depth.

    Args:
        cells: mappings with `length`, `depth` and `accuracy`.
        title: of the picture.
    """
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    figure, axes = _axes(title, "context length (tokens)", "depth (0: beginning)")
    grid = [[float("nan")] * len(lengths) for _ in depths]
    for cell in cells:
        grid[depths.index(cell["depth"])][lengths.index(cell["length"])] = cell["accuracy"]
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.grid(False)
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="black" if value > 0.55 else "white")
    figure.colorbar(image, ax=axes, label="accuracy")
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture, whole or not at all; the same picture gives the same bytes.

    Args:
        figure: from this module.
        path: ends in `.png` or `.svg`.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a picture ends in .png or .svg, not {path.name}")
    import matplotlib

    buffer = io.BytesIO()
    # Neither dates nor random identifiers.
    with matplotlib.rc_context({"svg.hashsalt": "hf_posenc", "svg.fonttype": "none"}):
        metadata = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
        figure.savefig(buffer, format=path.suffix[1:], dpi=120, metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(buffer.getvalue())
    os.replace(partial, path)


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _lines(axes: Axes, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for index, (label, points) in enumerate(curves.items()):
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.plot(
            x,
            y,
            label=label,
            color=COLOURS[index % len(COLOURS)],
            linestyle=LINES[index // len(COLOURS) % len(LINES)],
            marker=MARKERS[index % len(MARKERS)] if len(x) <= 32 else None,
            markersize=4,
            linewidth=1.5,
        )


def _legend(axes: Axes, curves: int) -> None:
    if curves > 6:  # beside the axes, where it hides nothing
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    elif curves > 1:
        axes.legend(frameon=False, fontsize="small")


def _plain_ticks(axes: Axes, lengths: Sequence[float]) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter() if _narrow(axes) else NullFormatter())


def _narrow(axes: Axes) -> bool:
    low, high = axes.get_ylim()
    return high / low < 10


def _trained(axes: Axes, length: int | None) -> None:
    if length is not None:
        axes.axvline(length, color="#555555", linewidth=0.8, linestyle=(0, (2, 2)))
        axes.annotate(
            "trained length",
            (length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -10),
            textcoords="offset points",
            fontsize="small",
            color="#555555",
        )
