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

VERDICTS = {"yes": "#B7DFCF", "no": "#F2C6A7", "not applicable": "#E4E4E4"}
"""Lighter shades of the green and the vermilion of the other figures, and a grey."""

# ------------------------------------------------------------------------------------------------------ runs of a model


def perplexity_by_length(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, trained_length: int | None = None, title: str = ""
) -> Figure:
    """Draw perplexity, on a logarithmic axis, against the length of the context.

    Curves whose labels differ only in `sliding` and `non-overlapping` share a colour; the latter is dashed.

    Args:
        curves: label -> (length in tokens, perplexity). A perplexity that is not finite becomes an arrow at the top.
        trained_length: tokens; marked if given.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no points, or a perplexity is not more than 0.
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
        trained_length: tokens; marked if given.
        xlabel: label of the x axis, with its unit.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no bins, or one is empty.
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
        curves: label -> (tokens, steps or seconds, loss in nats).
        xlabel: label of the x axis, with its unit.
        title: above the axes; empty means none.

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
    """Draw retrieval accuracy by context length and depth of the answer; cells that were not measured stay blank.

    Args:
        cells: mappings with `length` (tokens), `depth` (0 start .. 1 end of the context) and `accuracy` (0 .. 1).
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no cells, or two for one place.
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
        vectors: (T, E).
        title: above the axes; empty means none.
    """
    with style.one_panel(title, xlabel="position (tokens)", ylabel="coordinate") as (figure, axes):
        style.image(axes, vectors.T, "value", origin="lower", **style.limits(vectors))
    return figure


def similarity_matrix(vectors: Tensor, *, title: str = "") -> Figure:
    """Draw the cosine of every two position vectors; the label says which range the colours span.

    Args:
        vectors: (T, E).
        title: above the axes; empty means none.
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
    """Draw the score by distance of several schemes on one axis.

    Args:
        curves: label -> result of `hf_posenc.analysis.decay`.
        heads: draw every layer and head of a curve thinly as well as their mean.
        title: above the axes; empty means none.

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
    """Draw the bias that each head adds to the scores, query by key, up to the largest distance.

    Args:
        curve: result of `hf_posenc.analysis.decay` for distances 0 .. n - 1.
        layer: index of the layer whose heads are drawn.
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
    limit = style.limits(scores)["vmax"]
    size = {"width": 1.2 + 1.75 * columns, "height": 0.8 + 1.75 * rows}
    shared = {"squeeze": False, "sharex": True, "sharey": True}
    with style.panels(title, rows, columns, **size, **shared) as (figure, grid):
        from matplotlib.colors import SymLogNorm

        # Heads differ by orders of magnitude, and one scale for all of them keeps them comparable.
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
    """Draw the attention that each layer and head pays to each distance, in bins that double.

    Args:
        measured: result of `hf_posenc.analysis.attention_by_distance`.
        title: above the axes; empty means none.
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
    """Draw wavelengths against the trained length; waves above it never complete a turn in training.

    Args:
        found: result of `hf_posenc.analysis.frequencies` for one trained length. Waves that stand still are left out,
            and counted in the legend.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are none, or trained lengths differ.
    """
    style.require(found, "wavelengths")
    trained = {each.trained_length for each in found}
    if len(trained) > 1:
        raise ValueError(f"one trained length at a time, not {sorted(trained)}")
    (length,) = trained
    labelled = [(f"{each.label} ({each.completed} of {len(each.frequencies)} turn)", each) for each in found]
    with style.curves(labelled, title, "pair of coordinates", "wavelength (tokens per turn)") as (figure, axes, drawn):
        for each, look in drawn:
            places = [(i, y) for i, y in enumerate(each.wavelengths.tolist()) if math.isfinite(y)]
            axes.plot(*style.columns(places), **{**look, "linestyle": "none", "markersize": 3.6})
        axes.set_yscale("log")
        axes.axhline(length, linewidth=1.0, **style.FAINT)
        where: style.Look = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "top", "color": style.GREY}
        style.beside(axes, f"trained length {length:,}", (1, length), (-2, -4), **where)
    return figure


def distinct_biases(found: Sequence[DistinctBiases], *, title: str = "") -> Figure:
    """Draw the share of distances that each method of computing biases tells apart, head by head.

    Args:
        found: result of `hf_posenc.analysis.precision_audit`.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there is nothing.
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
    """Draw the change of each layer's output by another order of its context, alone and with the layers below it.

    Args:
        measured: label -> result of `hf_posenc.analysis.order_sensitivity`.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there is nothing.
    """
    style.require(measured, "order sensitivity")
    panels = {"own": "the layer alone", "accumulated": "with all layers below"}
    return _by_layer(measured, panels, "relative change of the last token", title)


def equivariance_by_layer(measured: Mapping[str, Equivariance], *, title: str = "") -> Figure:
    """Draw the distance from equivariance of the hidden states behind each layer, without the causal mask and with it.

    Args:
        measured: label -> result of `hf_posenc.analysis.equivariance`.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there is nothing.
    """
    style.require(measured, "equivariance")
    panels = {"unmasked": "all see all", "causal": "causal mask", "causal_last": "causal mask, last token"}
    return _by_layer(measured, panels, "relative change among shuffled tokens", title)


def _by_layer(
    measured: Mapping[str, OrderSensitivity | Equivariance], panels: Mapping[str, str], ylabel: str, title: str
) -> Figure:
    """Draw numbers of each layer of several models, on one logarithmic axis; panels: attribute -> words above it."""
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
    """Draw the result of a calibration for each layer: curves by distance, and divergences from the base's attention.

    The left panel has the score that the base's positions add, and the scheme's bias, one colour for each head. Both
    are shown minus their mean over pairs, which the softmax does not see. A scheme that multiplies scores has its
    factors on another axis. The right panel has the Kullback-Leibler divergence of each head before, after the closed
    forms, and at the end.

    Args:
        report: result of `hf_posenc.calibrate`.
        title: above the panels; empty means none.

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
        for place, ((curves, divergences), layer) in enumerate(zip(panels, report.layers, strict=False)):
            last = place % rows == rows - 1 or place == len(report.layers) - 1
            _curves_of(curves, layer, label="distance (tokens)" if last else "")
            _divergences_of(divergences, layer, label="head" if last else "")
        for axes in (axes for pair in panels[len(report.layers) :] for axes in pair):
            axes.set_visible(False)
        names = ["base"] + [report.scheme] * any(each.scheme_curve is not None for each in report.layers)
        dashes = zip(names, style.DASHES, strict=False)
        handles = [Line2D([], [], color=style.GREY, linestyle=dash, label=name) for name, dash in dashes]
        handles += grid[0][1].get_lines()[:3]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _curves_of(axes: Axes, layer: LayerFit, *, label: str) -> None:
    """Draw the scores that positions add in a layer, by distance."""
    _, count = layer.base_curve.shape
    drawn = [(axes, _centred(layer.base_curve))]
    if layer.scheme_curve is not None and layer.multiplies:
        beside = axes.twinx()
        beside.grid(False)
        beside.spines["right"].set_visible(True)
        beside.set_ylabel("factor")
        drawn.append((beside, layer.scheme_curve))
    elif layer.scheme_curve is not None:
        drawn.append((axes, _centred(layer.scheme_curve)))
    for (place, curves), dash in zip(drawn, style.DASHES, strict=False):
        for curve, colour in zip(curves.tolist(), cycle(style.COLOURS), strict=False):
            place.plot(curve, color=colour, linestyle=dash, linewidth=0.9)
    axes.set_xscale("symlog", base=2, linthresh=1)
    ticks = [0, *(2**power for power in range(0, max(1, (count - 1).bit_length()), 2))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlim=(0, count - 1), xlabel=label, ylabel=f"layer {layer.index}\nscore (nats)")


def _divergences_of(axes: Axes, layer: LayerFit, *, label: str) -> None:
    """Draw the divergences of a layer's heads from the base's; their numbers have the colours of their curves."""
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
    """Return curves (H, T) minus their means over the pairs of a query and a key of a window."""
    pairs = curves.new_tensor(range(curves.shape[1], 0, -1))
    return curves - (curves * pairs).sum(-1, keepdim=True) / pairs.sum()


def properties(found: Mapping[str, Properties], *, title: str = "") -> Figure:
    """Draw the verdicts on the five properties, a row for each scheme or model.

    Args:
        found: label -> result of `hf_posenc.analysis.properties`. An untrained scheme is marked with a star.
        title: above the table; empty means none.

    Raises:
        ValueError: if there are none.
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

        style.image(axes, [[to_rgb(VERDICTS[row.verdict]) for row in each.rows] for each in found.values()])
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
