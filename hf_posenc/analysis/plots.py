"""Figures of evaluations, analyses and calibrations. They need matplotlib.

Every function returns a `matplotlib.figure.Figure` that belongs to no window and no global state. `save` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

from . import style
from .style import FORMATS, check_installed, kind_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from ..calibration import Calibration, LayerFit
    from .decay import AttentionByDistance, Decay
    from .frequencies import Frequencies
    from .order import Equivariance, OrderSensitivity
    from .precision import DistinctBiases
    from .properties import Properties

__all__ = [
    "FORMATS",
    "attention_by_distance",
    "bias_maps",
    "calibration",
    "check_installed",
    "decay_curves",
    "distinct_biases",
    "equivariance_by_layer",
    "kind_of",
    "loss_by_position",
    "loss_curve",
    "order_by_layer",
    "perplexity_by_length",
    "position_vectors",
    "properties",
    "retrieval_heat_map",
    "save",
    "similarity_matrix",
    "wavelengths",
]

VERDICT_COLOURS = {"yes": "#B7DFCF", "no": "#F2C6A7", "not applicable": "#E4E4E4"}
"""Verdict on a property -> colour of its cell."""

# ------------------------------------------------------------------------------------------------------ runs of a model


def perplexity_by_length(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw perplexity, on a logarithmic axis, against the length of the context.

    Curves whose labels differ only in `sliding` and `non-overlapping` share a colour. The `non-overlapping` one is
    dashed.

    Args:
        curves: label -> points (length in tokens, perplexity). A perplexity that is not finite becomes an arrow at the
            top.
        trained_length: length in tokens to mark; None means no mark.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no points, or a perplexity is 0 or negative.
        ImportError: without matplotlib.
    """
    points = [point for curve in curves.values() for point in curve]
    style.require(points, "perplexity by length")
    with style.curves(curves.items(), title, "context length (tokens)", style.PERPLEXITY) as (figure, axes, drawn):
        for curve, look in drawn:
            style.line(axes, *style.columns(sorted(curve)), **look)
        style.token_axis(axes, {x for x, _ in points})
        style.perplexity_axis(axes, [y for _, y in points])
        style.mark_trained(axes, trained_length)
    return figure


def loss_by_position(
    curves: Mapping[str, Sequence[tuple[int, int, float]]],
    *,
    trained_length: int | None = None,
    xlabel: str = "position in the window (tokens)",
    title: str = "",
) -> Figure:
    """Draw the mean loss of a token against its position in the window, as steps.

    Args:
        curves: label -> bins (first position, last position + 1, mean loss in nats).
        trained_length: length in tokens to mark; None means no mark.
        xlabel: label of the x axis, with its unit.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no bins, or a bin has no positions.
        ImportError: without matplotlib.
    """
    bins = [entry for curve in curves.values() for entry in curve]
    style.require(bins, "loss by position")
    if any(first < 0 or first >= last for first, last, _ in bins):
        raise ValueError("a bin is (first position >= 0, last position + 1, mean loss), with last + 1 > first")
    logarithmic = style.are_uneven([(first, last) for first, last, _ in bins])
    with style.curves(curves.items(), title, xlabel, "mean loss (nats per token)") as (figure, axes, drawn):
        for curve, look in drawn:
            axes.plot(*style.steps(curve, logarithmic), **{**look, "marker": ""})
        if logarithmic:
            style.token_axis(axes, {edge for first, last, _ in bins for edge in (max(first, 1), last)})
        else:
            style.thousands(axes.xaxis)
        style.mark_trained(axes, trained_length)
    return figure


def loss_curve(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, xlabel: str = "tokens", title: str = ""
) -> Figure:
    """Draw loss against the tokens, steps or seconds that were spent.

    Args:
        curves: label -> points (tokens, steps or seconds; loss in nats).
        xlabel: label of the x axis, with its unit.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no points.
        ImportError: without matplotlib.
    """
    style.require([point for curve in curves.values() for point in curve], "loss curve")
    with style.curves(curves.items(), title, xlabel, "loss (nats per token)") as (figure, axes, drawn):
        for curve, look in drawn:
            style.line(axes, *style.columns(sorted(curve)), **(look if len(curve) <= 16 else {**look, "marker": ""}))
        style.thousands(axes.xaxis)
    return figure


def retrieval_heat_map(cells: Sequence[Mapping[str, float]], *, title: str = "") -> Figure:
    """Draw retrieval accuracy by context length and depth of the answer. Missing cells stay blank.

    Args:
        cells: mappings with `length` in tokens, `depth` from 0 (start of the context) to 1 (end), and `accuracy` from 0
            to 1.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no cells, or two cells have the same length and depth.
        ImportError: without matplotlib.
    """
    style.require(cells, "retrieval")
    values = {(cell["depth"], cell["length"]): float(cell["accuracy"]) for cell in cells}
    if len(values) != len(cells):
        raise ValueError("two cells have the same length and depth")
    depths, lengths = (sorted({key[i] for key in values}) for i in (0, 1))
    grid = [[values.get((depth, length), math.nan) for length in lengths] for depth in depths]
    size: style.Look = {"width": 2.2 + 0.62 * len(lengths), "height": 1.5 + 0.42 * len(depths)}
    with style.one_panel(title, **size, xlabel="context length (tokens)", ylabel="depth of the answer") as (
        figure,
        axes,
    ):
        style.image(axes, grid, "accuracy (%)", percent=True, vmin=0, vmax=1, cmap="cividis")
        for (depth, length), accuracy in values.items():
            look: style.Look = {"ha": "center", "va": "center", "color": "white" if accuracy < 0.5 else "black"}
            axes.text(lengths.index(length), depths.index(depth), f"{100 * accuracy:.0f}", fontsize=8, **look)
        axes.set_xticks(range(len(lengths)), [f"{length:,.0f}" for length in lengths])
        if len(lengths) > 6:
            axes.tick_params(axis="x", rotation=45)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}%" for depth in depths])
    return figure


# -------------------------------------------------------------------------------------------------- schemes and models


def position_vectors(vectors: Tensor, *, title: str = "") -> Figure:
    """Draw position vectors as a heat map.

    Args:
        vectors: (T, E) vectors of T positions.
        title: text above the axes; empty means none.
    """
    with style.one_panel(title, xlabel="position (tokens)", ylabel="coordinate") as (figure, axes):
        style.image(axes, vectors.T, "value", origin="lower", **style.limits(vectors))
    return figure


def similarity_matrix(vectors: Tensor, *, title: str = "") -> Figure:
    """Draw the cosine similarity of all pairs of position vectors. The colour bar's label gives their range.

    Args:
        vectors: (T, E) vectors of T positions.
        title: text above the axes; empty means none.
    """
    unit = vectors.double() / vectors.double().norm(dim=-1, keepdim=True).clamp(min=1e-300)
    cosines = unit @ unit.T
    low, high = float(cosines.min()), float(cosines.max())
    colours = style.limits(cosines) if low < 0 else {}
    tokens = "position (tokens)"
    with style.one_panel(title, width=5.2, height=4.4, xlabel=tokens, ylabel=tokens) as (figure, axes):
        label = f"cosine similarity ({low:.2f} to {high:.2f})"
        style.image(axes, cosines, label, aspect="equal", origin="lower", **colours)
    return figure


def decay_curves(curves: Mapping[str, Decay], *, heads: bool = False, title: str = "") -> Figure:
    """Draw the scores by distance of several schemes in one panel.

    Args:
        curves: label -> result of `hf_posenc.analysis.decay`.
        heads: draw thin lines for all layers and heads, and not only their mean.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no curves.
    """
    style.require(curves, "decay")
    ylabel = "score, where the content alone would give 1"
    with style.curves(curves.items(), title, "distance (tokens)", ylabel) as (figure, axes, drawn):
        for curve, look in drawn:
            order = curve.distances.argsort()
            x = curve.distances[order].tolist()
            if heads:
                rows = curve.scores.flatten(0, 1)[:, order].T.tolist()
                axes.plot(x, rows, color=look["color"], linewidth=0.7, alpha=0.45)
            axes.plot(x, curve.mean[order].tolist(), markevery=max(1, len(x) // 8), **look)
        style.thousands(axes.xaxis)
    return figure


def bias_maps(curve: Decay, *, layer: int = 0, title: str = "") -> Figure:
    """Draw one map per head of the bias that is added to the score of each query and key.

    Args:
        curve: result of `hf_posenc.analysis.decay` for the distances 0 .. n - 1.
        layer: index of the layer whose heads are drawn.
        title: text above the axes; empty means none.

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
    limit = style.limits(scores)["vmax"]
    size = {"width": 1.2 + 1.75 * columns, "height": 0.8 + 1.75 * rows}
    shared = {"squeeze": False, "sharex": True, "sharey": True}
    with style.panels(title, rows, columns, **size, **shared) as (figure, grid):
        from matplotlib.colors import SymLogNorm

        # A logarithmic scale, because heads differ by orders of magnitude and one scale makes them comparable.
        colours = SymLogNorm(linthresh=limit / 100, vmin=-limit, vmax=limit)
        for head, (axes, values) in enumerate(zip(grid.flat, maps, strict=False)):
            image = style.image(axes, values, aspect="equal", cmap="RdBu", norm=colours)
            axes.set_title(f"head {head}", fontsize=9)
        for axes in grid.flat[len(maps) :]:
            axes.set_visible(False)
        figure.supxlabel("key (position)", fontsize=10)
        figure.supylabel("query (position)", fontsize=10)
        label = f"added to the score (nats),\nlogarithmic beyond ±{limit / 100:.2g}"
        style.colour_bar(image, list(grid.flat), label)
        ticks = [0.0, *(limit / step for step in (-1, -10, -100, 100, 10, 1))]
        figure.axes[-1].yaxis.set_ticks(ticks, [f"{tick:.2g}" for tick in ticks])
        figure.axes[-1].yaxis.set_ticks([], minor=True)
    return figure


def attention_by_distance(measured: AttentionByDistance, *, title: str = "") -> Figure:
    """Draw the share of attention by distance, a row for every head, in bins whose widths double.

    Args:
        measured: result of `hf_posenc.analysis.attention_by_distance`.
        title: text above the axes; empty means none.
    """
    import torch

    layers, heads, length = measured.mass.shape
    edges = [0, *(1 << power for power in range((length - 1).bit_length())), length]
    binned = torch.stack([measured.mass[..., a:b].sum(-1) for a, b in pairwise(edges)], -1).flatten(0, 1)
    names = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    height, ylabel = min(9.0, 1.6 + 0.11 * layers * heads + 0.05 * layers), f"layer ({heads} heads each)"
    with style.one_panel(title, height=height, xlabel="distance (tokens)", ylabel=ylabel) as (figure, axes):
        style.image(axes, 100 * binned, "share of attention (%)", vmin=0, vmax=100)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        shown = range(0, layers, math.ceil(layers / 24))
        axes.set_yticks([heads * layer + (heads - 1) / 2 for layer in shown], list(map(str, shown)))
        for layer in range(1, layers):
            axes.axhline(heads * layer - 0.5, color="white", linewidth=1.2)
        axes.tick_params(axis="y", length=0)
    return figure


def wavelengths(found: Sequence[Frequencies], *, title: str = "") -> Figure:
    """Draw wavelengths against the trained length. Longer waves never complete a turn in training.

    Args:
        found: results of `hf_posenc.analysis.frequencies`, all for the same trained length. Waves with frequency 0 are
            not drawn, but count in the legend.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no results, or their trained lengths differ.
    """
    style.require(found, "wavelengths")
    trained = {each.trained_length for each in found}
    if len(trained) > 1:
        raise ValueError(f"all waves must have the same trained length, not {sorted(trained)}")
    (length,) = trained
    labelled = [(f"{each.label} ({each.completed} of {len(each.frequencies)} turn)", each) for each in found]
    with style.curves(labelled, title, "pair of coordinates", "wavelength (tokens per turn)") as (figure, axes, drawn):
        for each, look in drawn:
            points = [(i, y) for i, y in enumerate(each.wavelengths.tolist()) if math.isfinite(y)]
            axes.plot(*style.columns(points), **{**look, "linestyle": "none", "markersize": 3.6})
        axes.set_yscale("log")
        axes.axhline(length, linewidth=1.0, **style.FAINT)
        look = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "top", "color": style.GREY}
        style.beside(axes, f"trained length {length:,}", (1, length), (-2, -4), **look)
    return figure


def distinct_biases(found: Sequence[DistinctBiases], *, title: str = "") -> Figure:
    """Draw the share of distances with a different bias, a row for every method and a mark for every head.

    Args:
        found: result of `hf_posenc.analysis.precision_audit`.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no results.
    """
    style.require(found, "distinct biases")
    xlabel = f"distances told apart (% of {found[0].length:,}, one mark per head)"
    with style.one_panel(title, height=1.2 + 0.34 * len(found), xlabel=xlabel) as (figure, axes):
        methods = list(dict.fromkeys(each.method for each in found))
        for row, each in enumerate(found):
            shares = [100 * count / each.length for count in each.heads]
            axes.plot(shares, [row] * len(shares), alpha=0.6, **style.marks(methods.index(each.method)))
            low, high = min(each.heads), max(each.heads)
            text = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            offset, side = (7, "left") if max(shares) < 80 else (-7, "right")
            style.beside(axes, text, (max(shares), row), (offset, 0), va="center", ha=side)
        axes.set_yticks(range(len(found)), [f"{each.method}, {each.dtype}" for each in found])
        axes.invert_yaxis()
        axes.set_xlim(-3, 103)
        axes.grid(axis="y", visible=False)
    return figure


def order_by_layer(measured: Mapping[str, OrderSensitivity], *, title: str = "") -> Figure:
    """Draw how much each layer's output changes when its context is reordered.

    The left panel reorders the context for this layer alone, the right one for all layers below as well.

    Args:
        measured: label -> result of `hf_posenc.analysis.order_sensitivity`.
        title: text above the panels; empty means none.

    Raises:
        ValueError: if there are no results.
    """
    style.require(measured, "order sensitivity")
    panels = {"own": "the layer alone", "accumulated": "with all layers below"}
    return _plot_by_layer(measured, panels, "relative change of the last token", title)


def equivariance_by_layer(measured: Mapping[str, Equivariance], *, title: str = "") -> Figure:
    """Draw how far each layer's output is from equivariance, without the causal mask and with it.

    Args:
        measured: label -> result of `hf_posenc.analysis.equivariance`.
        title: text above the panels; empty means none.

    Raises:
        ValueError: if there are no results.
    """
    style.require(measured, "equivariance")
    panels = {"unmasked": "no mask", "causal": "causal mask", "causal_last": "causal mask, last token"}
    return _plot_by_layer(measured, panels, "relative change among shuffled tokens", title)


def _plot_by_layer(
    measured: Mapping[str, OrderSensitivity | Equivariance], panels: Mapping[str, str], ylabel: str, title: str
) -> Figure:
    """Draw numbers by layer on a logarithmic axis, a curve for every model.

    Args:
        measured: label -> result with layers.
        panels: attribute of a layer -> title of its panel.
        ylabel: label of the y axis.
        title: text above the panels; empty means none.
    """
    floor = 1e-17
    size = {"width": 1.6 + 3.5 * len(panels), "height": 4.0}
    with style.panels(title, 1, len(panels), **size, sharey=True) as (figure, grid):
        for axes, (name, words) in zip(grid, panels.items(), strict=True):
            for each, look in zip(measured.values(), style.styles(measured), strict=True):
                x = [layer.index for layer in each.layers]
                axes.plot(x, [max(getattr(layer, name), floor) for layer in each.layers], **look)
            axes.set(yscale="log", xlabel="layer")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_title(words, fontsize=10)
        grid[0].set_ylabel(ylabel)
        grid[-1].legend(**style.BESIDE)
    return figure


def calibration(report: Calibration, *, title: str = "") -> Figure:
    """Draw the result of a calibration, two panels for each layer.

    The left panel shows the score that the base's positions add, and the scheme's bias, a colour for each head. Their
    means over pairs are subtracted, because the softmax ignores them. Factors of a scheme that multiplies scores have a
    separate axis. The right panel shows the Kullback-Leibler divergence of each head from the base's attention before
    calibration, after the closed forms, and at the end.

    Args:
        report: result of `hf_posenc.calibrate`.
        title: text above the panels; empty means none.

    Raises:
        ValueError: if no layer was calibrated.
        ImportError: without matplotlib.
    """
    style.require(report.layers, "calibration")
    blocks = max(1, round(math.sqrt(len(report.layers) / 8)))
    rows = math.ceil(len(report.layers) / blocks)
    size = {"width": 8.4 * blocks, "height": 1.1 + 1.9 * rows}
    with style.panels(title, rows, 2 * blocks, **size, squeeze=False) as (figure, grid):
        from matplotlib.lines import Line2D

        panels = [row[2 * block : 2 * block + 2] for block in range(blocks) for row in grid]
        for number, ((curves, divergences), layer) in enumerate(zip(panels, report.layers, strict=False)):
            is_lowest = number % rows == rows - 1 or number == len(report.layers) - 1
            _plot_curves(curves, layer, label="distance (tokens)" if is_lowest else "")
            _plot_divergences(divergences, layer, label="head" if is_lowest else "")
        for axes in (axes for pair in panels[len(report.layers) :] for axes in pair):
            axes.set_visible(False)
        names = ["base"] + [report.scheme] * any(each.scheme_curve is not None for each in report.layers)
        dashes = zip(names, style.DASHES, strict=False)
        handles = [Line2D([], [], color=style.GREY, linestyle=dash, label=name) for name, dash in dashes]
        handles += grid[0][1].get_lines()[:3]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _plot_curves(axes: Axes, layer: LayerFit, *, label: str) -> None:
    """Draw the curves by distance of a layer, the base's and the scheme's."""
    _, count = layer.base_curve.shape
    drawn = [(axes, _centred(layer.base_curve))]
    if layer.scheme_curve is not None and layer.multiplies:
        factor_axes = axes.twinx()
        factor_axes.grid(False)
        factor_axes.spines["right"].set_visible(True)
        factor_axes.set_ylabel("factor")
        drawn.append((factor_axes, layer.scheme_curve))
    elif layer.scheme_curve is not None:
        drawn.append((axes, _centred(layer.scheme_curve)))
    for (target, curves), dash in zip(drawn, style.DASHES, strict=False):
        for curve, colour in zip(curves.tolist(), cycle(style.COLOURS), strict=False):
            target.plot(curve, color=colour, linestyle=dash, linewidth=0.9)
    axes.set_xscale("symlog", base=2, linthresh=1)
    ticks = [0, *(2**power for power in range(0, max(1, (count - 1).bit_length()), 2))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlim=(0, count - 1), xlabel=label, ylabel=f"layer {layer.index}\nscore (nats)")


def _plot_divergences(axes: Axes, layer: LayerFit, *, label: str) -> None:
    """Draw the divergences of a layer's heads. The heads' numbers have the colours of their curves."""
    floor = 1e-6  # where heads agree to the last digit
    shown = {"before": layer.before, "closed forms": layer.closed, "at the end": layer.after}
    for number, (name, values) in enumerate(shown.items()):
        axes.plot(values.clamp(min=floor).tolist(), label=name, **style.marks(number))
    style.positive_axis(axes, [value for values in shown.values() for value in values.clamp(min=floor).tolist()])
    heads = range(0, len(layer.before), math.ceil(len(layer.before) / 16))
    axes.set_xticks(heads)
    for head, tick in zip(heads, axes.get_xticklabels(), strict=True):
        tick.set_color(style.COLOURS[head % len(style.COLOURS)])
    axes.set(xlabel=label, ylabel="KL (nats)")


def _centred(curves: Tensor) -> Tensor:
    """Return curves (H, T) minus their means over all pairs of a query and a key in a window."""
    pairs = curves.new_tensor(range(curves.shape[1], 0, -1))
    return curves - (curves * pairs).sum(-1, keepdim=True) / pairs.sum()


def properties(found: Mapping[str, Properties], *, title: str = "") -> Figure:
    """Draw the verdicts on the five properties, a row for each scheme or model.

    Args:
        found: label -> result of `hf_posenc.analysis.properties`. An untrained scheme is marked with a star.
        title: text above the table; empty means none.

    Raises:
        ValueError: if there are no results.
        ImportError: without matplotlib.
    """
    style.require(found, "properties")
    names = [row.name for row in next(iter(found.values())).rows]
    labels = [f"{label} *" if each.untrained else label for label, each in found.items()]
    xlabel = "* before training" if any(each.untrained for each in found.values()) else ""
    with style.one_panel(title, width=1.4 + 1.25 * len(names), height=1.0 + 0.42 * len(found), xlabel=xlabel) as (
        figure,
        axes,
    ):
        from matplotlib.colors import to_rgb

        style.image(axes, [[to_rgb(VERDICT_COLOURS[row.verdict]) for row in each.rows] for each in found.values()])
        for line, each in enumerate(found.values()):
            for column, row in enumerate(each.rows):
                axes.text(column, line, row.verdict, ha="center", va="center", fontsize=9)
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(length=0)
        for between in range(1, len(labels)):
            axes.axhline(between - 0.5, color="white", linewidth=1.5)
        for between in range(1, len(names)):
            axes.axvline(between - 0.5, color="white", linewidth=1.5)
    return figure
