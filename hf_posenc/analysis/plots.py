"""Figures of evaluations, analyses and calibrations. They need matplotlib.

Every function returns a `matplotlib.figure.Figure` that belongs to no window and no global state. `save` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from . import pen
from .pen import FORMATS, check_installed, kind_of, save

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
    pen.require(points, "perplexity by length")
    with pen.style():
        figure, axes = pen.new_axes(title, width=pen.width(curves))
        for (label, curve), style in zip(curves.items(), pen.styles(curves), strict=True):
            pen.line(axes, *pen.columns(sorted(curve)), label=label, **style)
        pen.token_axis(axes, {x for x, _ in points})
        pen.perplexity_axis(axes, [y for _, y in points])
        pen.mark_trained(axes, trained_length)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(pen.PERPLEXITY)
        pen.legend(axes, curves)
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
    pen.require(bins, "loss by position")
    if any(first < 0 or first >= last for first, last, _ in bins):
        raise ValueError("a bin is (first position >= 0, last position + 1, mean loss), with last + 1 > first")
    logarithmic = pen.are_uneven([(first, last) for first, last, _ in bins])
    with pen.style():
        figure, axes = pen.new_axes(title, width=pen.width(curves))
        for (label, curve), style in zip(curves.items(), pen.styles(curves), strict=True):
            x, y = pen.steps(curve, logarithmic)
            axes.plot(x, y, label=label, **{**style, "marker": ""})
        if logarithmic:
            edges = {edge for first, last, _ in bins for edge in (max(first, 1), last)}
            pen.token_axis(axes, edges)
        else:
            pen.thousands(axes.xaxis)
        pen.mark_trained(axes, trained_length)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("mean loss (nats per token)")
        pen.legend(axes, curves)
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
    points = [point for curve in curves.values() for point in curve]
    pen.require(points, "loss curve")
    with pen.style():
        figure, axes = pen.new_axes(title, width=pen.width(curves))
        for (label, curve), style in zip(curves.items(), pen.styles(curves), strict=True):
            sparse = len(curve) <= 16
            pen.line(
                axes, *pen.columns(sorted(curve)), label=label, **{**style, "marker": style["marker"] if sparse else ""}
            )
        pen.thousands(axes.xaxis)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("loss (nats per token)")
        pen.legend(axes, curves)
    return figure


def retrieval_heat_map(cells: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Draw retrieval accuracy by context length and depth of the answer; cells that were not measured stay blank.

    Args:
        cells: mappings with `length` (tokens), `depth` (0 start .. 1 end of the context) and `accuracy` (0 .. 1).
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no cells, or two for one place.
        ImportError: without matplotlib.
    """
    pen.require(cells, "retrieval")
    values = {(cell["depth"], cell["length"]): float(cell["accuracy"]) for cell in cells}
    if len(values) != len(cells):
        raise ValueError("two cells have the same length and depth")
    depths, lengths = (sorted({key[i] for key in values}) for i in (0, 1))
    grid = [[values.get((depth, length), math.nan) for length in lengths] for depth in depths]
    with pen.style():
        figure, axes = pen.new_axes(title, width=2.2 + 0.62 * len(lengths), height=1.5 + 0.42 * len(depths))
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
        pen.colour_bar(figure, image, axes, "accuracy (%)", percent=True)
    return figure


# -------------------------------------------------------------------------------------------------- schemes and models


def position_vectors(vectors: Tensor, *, title: str = "") -> Figure:
    """Draw position vectors as a heat map.

    Args:
        vectors: (T, E).
        title: above the axes; empty means none.
    """
    with pen.style():
        figure, axes = pen.new_axes(title, width=6.4, height=4.0)
        pen.heat_map(figure, axes, vectors.T, "value", symmetric=True)
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("coordinate")
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
    with pen.style():
        figure, axes = pen.new_axes(title, width=5.2, height=4.4)
        label = f"cosine similarity ({low:.2f} to {high:.2f})"
        pen.heat_map(figure, axes, cosines, label, symmetric=low < 0, aspect="equal")
        axes.set_xlabel("position (tokens)")
        axes.set_ylabel("position (tokens)")
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
    pen.require(list(curves), "decay")
    with pen.style():
        figure, axes = pen.new_axes(title, width=pen.width(curves))
        for (label, curve), style in zip(curves.items(), pen.styles(curves), strict=True):
            order = curve.distances.argsort()
            x = curve.distances[order].tolist()
            if heads:
                for row in curve.scores.flatten(0, 1)[:, order].tolist():
                    axes.plot(x, row, color=style["color"], linewidth=0.7, alpha=0.45)
            marks = {**style, "markevery": max(1, len(x) // 8)}
            axes.plot(x, curve.mean[order].tolist(), label=label, **marks)
        pen.thousands(axes.xaxis)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel("score, where the content alone would give 1")
        pen.legend(axes, curves)
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
    limit = pen.limit(scores)
    with pen.style():
        from matplotlib.colors import SymLogNorm

        # Heads differ by orders of magnitude, and one scale for all of them keeps them comparable.
        colours = SymLogNorm(linthresh=limit / 100, vmin=-limit, vmax=limit)
        size = {"width": 1.2 + 1.75 * columns, "height": 0.8 + 1.75 * rows}
        figure, grid = pen.new_panels(title, rows, columns, **size, squeeze=False, sharex=True, sharey=True)
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
        label = f"added to the score (nats),\nlogarithmic beyond ±{limit / 100:.2g}"
        pen.colour_bar(figure, image, list(grid.flat), label)
        ticks = [
            0.0,
            *(sign * limit / step for sign, step in ((-1, 1), (-1, 10), (-1, 100), (1, 100), (1, 10), (1, 1))),
        ]
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
    edges = [0, 1]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    binned = torch.stack([measured.mass[..., a:b].sum(-1) for a, b in pairwise(edges)], -1).flatten(0, 1)
    names = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    with pen.style():
        figure, axes = pen.new_axes(title, width=6.4, height=min(9.0, 1.6 + 0.11 * layers * heads + 0.05 * layers))
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
        pen.colour_bar(figure, image, axes, "share of attention (%)")
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
    pen.require(found, "wavelengths")
    trained = {each.trained_length for each in found}
    if len(trained) > 1:
        raise ValueError(f"one trained length at a time, not {sorted(trained)}")
    labels = [f"{each.label} ({each.completed} of {len(each.frequencies)} turn)" for each in found]
    with pen.style():
        figure, axes = pen.new_axes(title, width=pen.width(dict.fromkeys(labels)))
        for each, label, style in zip(found, labels, pen.styles(labels), strict=True):
            places = [(i, y) for i, y in enumerate(each.wavelengths.tolist()) if math.isfinite(y)]
            axes.plot(*pen.columns(places), label=label, **{**style, "linestyle": "none", "markersize": 3.6})
        axes.set_yscale("log")
        axes.axhline(min(trained), color=pen.GREY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            f"trained length {min(trained):,}",
            (1, min(trained)),
            xycoords=("axes fraction", "data"),
            xytext=(-2, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=pen.GREY,
            fontsize=8.5,
        )
        axes.set_xlabel("pair of coordinates")
        axes.set_ylabel("wavelength (tokens per turn)")
        pen.legend(axes, dict.fromkeys(labels))
    return figure


def distinct_biases(found: Sequence[DistinctBiases], *, title: str = "") -> Figure:
    """Draw the share of distances that each method of computing biases tells apart, head by head.

    Args:
        found: result of `hf_posenc.analysis.precision_audit`.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there is nothing.
    """
    pen.require(found, "distinct biases")
    with pen.style():
        figure, axes = pen.new_axes(title, width=6.4, height=1.2 + 0.34 * len(found))
        methods = list(dict.fromkeys(each.method for each in found))
        for row, each in enumerate(found):
            shares = [100 * count / each.length for count in each.heads]
            place = methods.index(each.method)
            look: dict[str, Any] = {
                "color": pen.COLOURS[place % len(pen.COLOURS)],
                "marker": pen.MARKERS[place % len(pen.MARKERS)],
            }
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
    """Draw the change of each layer's output by another order of its context, alone and with the layers below it.

    Args:
        measured: label -> result of `hf_posenc.analysis.order_sensitivity`.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there is nothing.
    """
    pen.require(list(measured), "order sensitivity")
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
    pen.require(list(measured), "equivariance")
    panels = {"unmasked": "all see all", "causal": "causal mask", "causal_last": "causal mask, last token"}
    return _by_layer(measured, panels, "relative change among shuffled tokens", title)


def _by_layer(measured: Mapping[str, Any], panels: Mapping[str, str], ylabel: str, title: str) -> Figure:
    """Draw numbers of each layer of several models, on one logarithmic axis; panels: attribute -> words above it."""
    floor = 1e-17
    with pen.style():
        figure, grid = pen.new_panels(title, 1, len(panels), width=1.6 + 3.5 * len(panels), height=4.0, sharey=True)
        for axes, (name, words) in zip(grid, panels.items(), strict=True):
            for (label, each), style in zip(measured.items(), pen.styles(measured), strict=True):
                x = [layer.index for layer in each.layers]
                y = [max(getattr(layer, name), floor) for layer in each.layers]
                axes.plot(x, y, label=label, **style)
            axes.set_yscale("log")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_title(words, fontsize=10)
            axes.set_xlabel("layer")
        grid[0].set_ylabel(ylabel)
        grid[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
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
    pen.require(report.layers, "calibration")
    blocks = max(1, round(math.sqrt(len(report.layers) / 8)))
    rows = math.ceil(len(report.layers) / blocks)
    with pen.style():
        size = {"width": 8.4 * blocks, "height": 1.1 + 1.9 * rows}
        figure, grid = pen.new_panels(title, rows, 2 * blocks, **size, squeeze=False)
        panels = [(row[2 * block], row[2 * block + 1]) for block in range(blocks) for row in grid]
        for place, (curves, divergences) in enumerate(panels):
            if place >= len(report.layers):
                curves.set_visible(False)
                divergences.set_visible(False)
                continue
            layer = report.layers[place]
            last = place % rows == rows - 1 or place == len(report.layers) - 1
            _curves_of(curves, layer, label="distance (tokens)" if last else "")
            _divergences_of(divergences, layer, label="head" if last else "")
        handles = [*_lines_of(report), *grid[0][1].get_lines()[:3]]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _lines_of(report: Calibration) -> list[Any]:
    """Return the lines that the legend shows for the panels with curves."""
    from matplotlib.lines import Line2D

    names = ["base"] + [report.scheme] * any(each.scheme_curve is not None for each in report.layers)
    return [
        Line2D([], [], color=pen.GREY, linestyle=dash, label=name)
        for name, dash in zip(names, pen.DASHES[: len(names)], strict=True)
    ]


def _curves_of(axes: Axes, layer: LayerFit, *, label: str) -> None:
    """Draw the scores that positions add in a layer, by distance."""
    _, count = layer.base_curve.shape
    distances = list(range(count))
    drawn: list[tuple[Axes, Tensor, Any]] = [
        (axes, layer.base_curve - _mean_over_pairs(layer.base_curve), pen.DASHES[0])
    ]
    if layer.scheme_curve is not None and layer.multiplies:
        beside = axes.twinx()
        beside.grid(False)
        beside.spines["right"].set_visible(True)
        beside.set_ylabel("factor")
        drawn.append((beside, layer.scheme_curve, pen.DASHES[1]))
    elif layer.scheme_curve is not None:
        drawn.append((axes, layer.scheme_curve - _mean_over_pairs(layer.scheme_curve), pen.DASHES[1]))
    for place, curves, dash in drawn:
        for head, curve in enumerate(curves.tolist()):
            colour = pen.COLOURS[head % len(pen.COLOURS)]
            place.plot(distances, curve, color=colour, linestyle=dash, linewidth=0.9)
    axes.set_xscale("symlog", base=2, linthresh=1)
    ticks = [0, *(2**power for power in range(0, max(1, (count - 1).bit_length()), 2))]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlim(0, count - 1)
    axes.set_xlabel(label)
    axes.set_ylabel(f"layer {layer.index}\nscore (nats)")


def _divergences_of(axes: Axes, layer: LayerFit, *, label: str) -> None:
    """Draw the divergences of a layer's heads from the base's; their numbers have the colours of their curves."""
    floor = 1e-6  # where heads agree to the last digit
    shown = {"before": layer.before, "closed forms": layer.closed, "at the end": layer.after}
    drawn = {name: values.clamp(min=floor).tolist() for name, values in shown.items()}
    for number, (name, values) in enumerate(drawn.items()):
        look: dict[str, Any] = {"color": pen.COLOURS[number], "marker": pen.MARKERS[number]}
        axes.plot(values, linestyle="none", label=name, **look)
    pen.positive_axis(axes, [value for values in drawn.values() for value in values])
    heads = range(0, len(layer.before), math.ceil(len(layer.before) / 16))
    axes.set_xticks(heads)
    for head, tick in zip(heads, axes.get_xticklabels(), strict=True):
        tick.set_color(pen.COLOURS[head % len(pen.COLOURS)])
    axes.set_xlabel(label)
    axes.set_ylabel("KL (nats)")


def _mean_over_pairs(curves: Tensor) -> Tensor:
    """Return the mean of curves (H, T) over the pairs of a query and a key of a window, (H, 1)."""
    pairs = curves.new_tensor(range(curves.shape[1], 0, -1))
    return (curves * pairs).sum(-1, keepdim=True) / pairs.sum()


def properties(found: Mapping[str, Properties], *, title: str = "") -> Figure:
    """Draw the verdicts on the five properties, a row for each scheme or model.

    Args:
        found: label -> result of `hf_posenc.analysis.properties`. An untrained scheme is marked with a star.
        title: above the table; empty means none.

    Raises:
        ValueError: if there are none.
        ImportError: without matplotlib.
    """
    pen.require(list(found), "properties")
    names = [row.name for row in next(iter(found.values())).rows]
    labels = [f"{label} *" if each.untrained else label for label, each in found.items()]
    with pen.style():
        from matplotlib.colors import to_rgb

        figure, axes = pen.new_axes(title, width=1.4 + 1.25 * len(names), height=1.0 + 0.42 * len(found))
        axes.grid(False)
        axes.imshow([[to_rgb(VERDICTS[row.verdict]) for row in each.rows] for each in found.values()], aspect="auto")
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
        if any(each.untrained for each in found.values()):
            axes.set_xlabel("* before training")
    return figure
