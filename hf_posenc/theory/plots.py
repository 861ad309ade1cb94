"""Figures of the theory: waves, grids, expansions, Hessians, terms of scores, tables. They need matplotlib.

Every function returns a `matplotlib.figure.Figure`, as those of `hf_posenc.analysis.plots` do, whose `save` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..analysis import pen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from ..analysis.decay import Decay
    from .expansion import Expansion, MixedHessian
    from .position_scores import PositionScores
    from .sparsity import NegativeProducts
    from .statistics import EmbeddingStatistics, VectorStatistics
    from .terms import ScoreTerms

__all__ = [
    "embedding_statistics",
    "expansion_terms",
    "grid_decay",
    "mixed_hessian",
    "negative_products",
    "position_scores",
    "score_terms",
    "wave_curves",
]


def wave_curves(found: Mapping[str, Mapping[str, Decay]], *, title: str = "") -> Figure:
    """Draw means of waves by distance: the integral as a line, the sum over the pairs in dashes of the same colour.

    Args:
        found: label -> result of `WaveDecay.curves` or `RotaryWeights.curves`; means over layers and heads are drawn.
        title: above the axes; empty means none.

    Raises:
        ValueError: if there are no curves.
        ImportError: without matplotlib.
    """
    pen.require(list(found), "waves")
    labels = [f"{label}, {what}" for label, curves in found.items() for what in curves]
    with pen.style():
        figure, axes = pen.new_axes(title, width=pen.width(dict.fromkeys(labels)))
        for (label, curves), look in zip(found.items(), pen.styles(found), strict=True):
            for what, curve in curves.items():
                dash = pen.DASHES[what == "sum"]
                style = {"color": look["color"], "linestyle": dash, "linewidth": 1.0 if what == "sum" else 1.7}
                axes.plot(curve.distances.tolist(), curve.mean.tolist(), label=f"{label}, {what}", **style)
        pen.thousands(axes.xaxis)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel("mean of the waves (of a model: score in nats)")
        pen.legend(axes, dict.fromkeys(labels))
    return figure


def grid_decay(scores: Tensor, *, title: str = "") -> Figure:
    """Draw the product of two places of a grid by their shift.

    Args:
        scores: result of `hf_posenc.theory.grid_decay`, (2 n + 1, 2 n + 1).
        title: above the axes; empty means none.
    """
    reach = len(scores) // 2 + 0.5
    with pen.style():
        figure, axes = pen.new_axes(title, width=5.2, height=4.4)
        axes.grid(False)
        image = axes.imshow(
            scores.T.tolist(),
            cmap="RdBu",
            vmin=-1,
            vmax=1,
            origin="lower",
            interpolation="nearest",
            extent=(-reach, reach, -reach, reach),
        )
        axes.set_xlabel("shift along the first axis (steps)")
        axes.set_ylabel("shift along the second axis (steps)")
        pen.colour_bar(figure, image, axes, "score, where no shift gives 1")
    return figure


def mixed_hessian(found: MixedHessian, *, title: str = "") -> Figure:
    """Draw the rows of the Hessian between two positions, and the share of the diagonal in them.

    Args:
        found: result of `hf_posenc.theory.mixed_hessian`.
        title: above the axes; empty means none.
    """
    rows, size = found.block.shape
    with pen.style():
        figure, axes = pen.new_axes(title, width=6.4, height=4.4)
        pen.heat_map(figure, axes, found.block, "second derivative", symmetric=True)
        step = math.ceil(rows / 8)
        axes.set_yticks(range(0, rows, step), [str(row) for row in found.rows[::step]])
        shares = f"diagonal: {found.diagonal_share:.2%}, without structure {1 / size:.2%}"
        axes.set_xlabel(f"coordinate of n = {found.second} ({shares})")
        axes.set_ylabel(f"coordinate of m = {found.first}")
    return figure


def negative_products(found: NegativeProducts, *, title: str = "") -> Figure:
    """Draw the share of products of queries and keys that are negative, by layer and head.

    Args:
        found: result of `hf_posenc.theory.negative_products`.
        title: above the axes; empty means none.
    """
    layers, heads = found.shares.shape
    with pen.style():
        figure, axes = pen.new_axes(title, width=2.4 + 0.3 * max(heads, 8), height=min(9.0, 1.6 + 0.3 * layers))
        axes.grid(False)
        image = axes.imshow(found.shares.tolist(), vmin=0, vmax=1, cmap="cividis", aspect="auto")
        step = math.ceil(layers / 24)
        axes.set_yticks(range(0, layers, step), [str(index) for index in found.layers[::step]])
        step = math.ceil(heads / 16)
        axes.set_xticks(range(0, heads, step))
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
        pen.colour_bar(figure, image, axes, "negative products (%)", percent=True)
    return figure


def embedding_statistics(found: Mapping[str, EmbeddingStatistics], *, title: str = "") -> Figure:
    """Draw norms, diagonal shares of covariances, and distances of neighbouring positions of several models.

    Args:
        found: label -> result of `hf_posenc.theory.embedding_statistics`. The open mark beside a diagonal share is that
            of independent coordinates.
        title: above the panels; empty means none.

    Raises:
        ValueError: if there are none.
        ImportError: without matplotlib.
    """
    pen.require(list(found), "statistics")
    sets = {
        f"{label}, {what}": each
        for label, measured in found.items()
        for what, each in (("tokens", measured.tokens), ("positions", measured.positions))
        if each is not None
    }
    distances = {
        label: each.neighbour_distances.tolist()
        for label, each in found.items()
        if each.neighbour_distances is not None
    }
    with pen.style():
        height = max(3.4, 1.4 + 0.3 * len(sets))
        figure, (norms, diagonals, steps) = pen.new_panels(title, 1, 3, width=11.0, height=height)
        _norms_and_diagonals(norms, diagonals, sets)
        if distances:
            _steps(steps, distances)
        else:
            steps.set_visible(False)
    return figure


def _norms_and_diagonals(norms: Axes, diagonals: Axes, sets: Mapping[str, VectorStatistics]) -> None:
    """Draw the norms and the diagonal shares of sets of vectors, a row for each set."""
    rows = range(len(sets))
    marks: dict[str, Any] = {"linestyle": "none", "color": pen.COLOURS[0], "marker": "o"}
    means, deviations = ([getattr(each, name) for each in sets.values()] for name in ("mean_norm", "std_norm"))
    norms.errorbar(means, list(rows), xerr=deviations, **marks)
    norms.set_xlim(left=0)
    norms.set_yticks(rows, list(sets))
    norms.set_xlabel("norm (mean and deviation)")
    diagonals.plot([each.diagonal_share for each in sets.values()], rows, label="measured", **marks)
    marks["markerfacecolor"] = "white"
    diagonals.plot([each.independent_share for each in sets.values()], rows, label="independent", **marks)
    diagonals.set_yticks(rows, [""] * len(sets))
    diagonals.set_xlim(-0.03, 1.03)
    diagonals.set_xlabel("share of the diagonal in the covariance")
    diagonals.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for axes in (norms, diagonals):
        axes.set_ylim(len(sets) - 0.5, -0.5)


def _steps(axes: Axes, distances: Mapping[str, list[float]]) -> None:
    """Draw the distances of neighbouring positions of each model."""
    for (label, values), look in zip(distances.items(), pen.styles(distances), strict=True):
        axes.plot(range(1, len(values) + 1), values, label=label, **{**look, "marker": ""})
    axes.set_xscale("log")
    pen.positive_axis(axes, [value for values in distances.values() for value in values])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("distance to the one before")
    pen.legend(axes, distances)


def position_scores(found: PositionScores, *, title: str = "") -> Figure:
    """Draw the bias by distance that is closest to the scores of positions, and the share it explains, head by head.

    Args:
        found: result of `hf_posenc.theory.position_scores`.
        title: above the axes; empty means none.
    """
    with pen.style():
        figure, axes = pen.new_axes(title)
        labels = [f"head {head}: {share:.0%}" for head, share in enumerate(found.explained_in_rows.tolist())]
        for curve, label, look in zip(found.bias.tolist(), labels, pen.styles(labels), strict=True):
            axes.plot(curve, label=label, **{**look, "marker": ""})
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel("bias (nats)")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, title="explained")
    return figure


def expansion_terms(found: Expansion, *, title: str = "") -> Figure:
    """Draw the sizes of the terms of Su's expansion and of its residual, for the input of each layer and the output.

    Args:
        found: result of `hf_posenc.theory.expansion`. Where a term is 0 there is no mark.
        title: above the axes; empty means none.
    """
    rows = [*found.layers, found.output]
    words = {
        "slope_first": "$p_m$, slope",
        "slope_second": "$p_n$, slope",
        "curvature_first": "$p_m$, curvature",
        "curvature_second": "$p_n$, curvature",
        "mixed": "$p_m$ and $p_n$: the sixth term",
        "residual": "residual",
    }
    with pen.style():
        figure, axes = pen.new_axes(title, width=pen.width(dict.fromkeys(words.values())))
        for (name, label), style in zip(words.items(), pen.styles(words.values()), strict=True):
            sizes = [terms.sizes[name] or math.nan for terms in rows]
            axes.plot(range(len(found.layers)), sizes[:-1], label=label, **style)
            axes.plot([len(found.layers)], sizes[-1:], **style)  # of another function, so not joined
        axes.set_yscale("log")
        step = math.ceil(len(found.layers) / 16)
        places = range(0, len(found.layers), step)
        axes.set_xticks([*places, len(found.layers)], [*map(str, places), "output"])
        axes.set_xlabel(f"hidden state into layer (m = {found.first}, n = {found.second})")
        axes.set_ylabel("size (norm; of the output: nats)")
        pen.legend(axes, words)
    return figure


def score_terms(measured: ScoreTerms, *, title: str = "") -> Figure:
    """Draw the shares of the four terms in the attention scores of each layer and head, a panel for each term.

    Args:
        measured: result of `hf_posenc.theory.score_terms`.
        title: above the panels; empty means none.

    Raises:
        ValueError: if there are no layers.
        ImportError: without matplotlib.
    """
    import torch

    pen.require(measured.layers, "terms of scores")
    heads = max(len(layer.shares) for layer in measured.layers)
    shares = torch.full((len(measured.names), len(measured.layers), heads), math.nan, dtype=torch.float64)
    for row, layer in enumerate(measured.layers):
        shares[:, row, : len(layer.shares)] = 100 * layer.shares.T
    most = max(100.0, pen.limit(shares.nan_to_num()))  # above 100 % where a term works against the others
    with pen.style():
        height = min(9.0, 1.7 + 0.3 * len(measured.layers))
        figure, panels = pen.new_panels(title, 1, len(measured.names), width=10.0, height=height, sharey=True)
        for axes, name, values in zip(panels, measured.names, shares, strict=True):
            axes.grid(False)
            image = axes.imshow(
                values.tolist(), aspect="auto", cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest"
            )
            axes.set_title(name, fontsize=10)
            axes.set_xlabel("head")
            axes.xaxis.get_major_locator().set_params(integer=True)
        step = math.ceil(len(measured.layers) / 24)
        rows = range(0, len(measured.layers), step)
        panels[0].set_yticks(rows, [str(measured.layers[row].index) for row in rows])
        panels[0].set_ylabel("layer")
        pen.colour_bar(figure, image, list(panels), "share of the score (%)")
    return figure
