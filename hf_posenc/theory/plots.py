"""Figures of the theory: waves, grids, expansions, Hessians, terms of scores, tables. They need matplotlib.

Every function returns a `matplotlib.figure.Figure`. Write it with `hf_posenc.analysis.plots.save`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..analysis import style

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
    """Draw means of waves by distance: integrals as solid lines, sums over the pairs as dashed ones of the same colour.

    Args:
        found: label -> result of `WaveDecay.curves` or `RotaryWeights.curves`; means over layers and heads are drawn.
        title: text above the axes; empty means none.

    Raises:
        ValueError: if there are no curves.
        ImportError: without matplotlib.
    """
    style.require(found, "waves")
    colours = {label: look["color"] for label, look in zip(found, style.styles(found), strict=True)}
    labelled = [(f"{label}, {what}", (label, what)) for label, curves in found.items() for what in curves]
    ylabel = "mean of the waves (of a model: score in nats)"
    with style.curves(labelled, title, "distance (tokens)", ylabel) as (figure, axes, drawn):
        for (label, what), look in drawn:
            curve, is_sum = found[label][what], what == "sum"
            line = {"color": colours[label], "linestyle": style.DASHES[is_sum], "linewidth": 1.0 if is_sum else 1.7}
            axes.plot(curve.distances.tolist(), curve.mean.tolist(), **{**look, **line, "marker": ""})
        style.thousands(axes.xaxis)
    return figure


def grid_decay(scores: Tensor, *, title: str = "") -> Figure:
    """Draw the score of two places of a grid by their shift.

    Args:
        scores: result of `hf_posenc.theory.grid_decay`, (2 n + 1, 2 n + 1).
        title: text above the axes; empty means none.
    """
    reach = len(scores) // 2 + 0.5
    shape: style.Look = {"origin": "lower", "aspect": "equal", "extent": (-reach, reach, -reach, reach)}
    words = {name: f"shift along the {axis} axis (steps)" for name, axis in (("xlabel", "first"), ("ylabel", "second"))}
    with style.one_panel(title, width=5.2, height=4.4, **words) as (figure, axes):
        style.image(axes, scores.T, "score, where no shift gives 1", cmap="RdBu", vmin=-1, vmax=1, **shape)
    return figure


def mixed_hessian(found: MixedHessian, *, title: str = "") -> Figure:
    """Draw the rows of the Hessian between two positions, and the share of the diagonal in them.

    Args:
        found: result of `hf_posenc.theory.mixed_hessian`.
        title: text above the axes; empty means none.
    """
    shares = f"diagonal: {found.diagonal_share:.2%}, without structure {1 / found.block.shape[1]:.2%}"
    xlabel, ylabel = f"coordinate of n = {found.second} ({shares})", f"coordinate of m = {found.first}"
    with style.one_panel(title, height=4.4, xlabel=xlabel, ylabel=ylabel) as (figure, axes):
        style.image(axes, found.block, "second derivative", origin="lower", **style.limits(found.block))
        style.ticks(axes.yaxis, found.rows, 8)
    return figure


def negative_products(found: NegativeProducts, *, title: str = "") -> Figure:
    """Draw the share of products of queries and keys that are negative, by layer and head.

    Args:
        found: result of `hf_posenc.theory.negative_products`.
        title: text above the axes; empty means none.
    """
    layers, heads = found.shares.shape
    size: style.Look = {"width": 2.4 + 0.3 * max(heads, 8), "height": min(9.0, 1.6 + 0.3 * layers)}
    with style.one_panel(title, **size, xlabel="head", ylabel="layer") as (figure, axes):
        style.image(axes, found.shares, "negative products (%)", percent=True, vmin=0, vmax=1, cmap="cividis")
        style.ticks(axes.yaxis, found.layers, 24)
        style.ticks(axes.xaxis, range(heads), 16)
    return figure


def embedding_statistics(found: Mapping[str, EmbeddingStatistics], *, title: str = "") -> Figure:
    """Draw norms, diagonal shares of covariances, and distances of neighbouring positions of several models.

    A filled mark is the measured diagonal share, an open mark that of independent coordinates.

    Args:
        found: label -> result of `hf_posenc.theory.embedding_statistics`.
        title: text above the panels; empty means none.

    Raises:
        ValueError: if there are no results.
        ImportError: without matplotlib.
    """
    style.require(found, "statistics")
    sets = {
        f"{label}, {what}": each
        for label, measured in found.items()
        for what, each in (("tokens", measured.tokens), ("positions", measured.positions))
        if each is not None
    }
    steps = {
        label: each.neighbour_distances.tolist()
        for label, each in found.items()
        if each.neighbour_distances is not None
    }
    height = max(3.4, 1.4 + 0.3 * len(sets))
    with style.panels(title, 1, 3, width=11.0, height=height) as (figure, (norms, diagonals, last)):
        _norms_and_diagonals(norms, diagonals, sets)
        last.set_visible(bool(steps))
        for values, look in zip(steps.values(), style.styles(steps), strict=True):
            last.plot(range(1, len(values) + 1), values, **{**look, "marker": ""})
        last.set(xscale="log", xlabel="position (tokens)", ylabel="distance to the one before")
        style.positive_axis(last, [value for values in steps.values() for value in values])
        style.legend(last, steps)
    return figure


def _norms_and_diagonals(norms: Axes, diagonals: Axes, sets: Mapping[str, VectorStatistics]) -> None:
    """Draw the norms and the diagonal shares of sets of vectors, a row for each set."""
    rows = range(len(sets))
    look = style.marks(0)
    means, deviations = ([getattr(each, name) for each in sets.values()] for name in ("mean_norm", "std_norm"))
    norms.errorbar(means, list(rows), xerr=deviations, **look)
    norms.set_yticks(rows, list(sets))
    norms.set(xlabel="norm (mean and deviation)", xlim=(0, None))
    diagonals.plot([each.diagonal_share for each in sets.values()], rows, label="measured", **look)
    look["markerfacecolor"] = "white"
    diagonals.plot([each.independent_share for each in sets.values()], rows, label="independent", **look)
    diagonals.set_yticks(rows, [""] * len(sets))
    diagonals.set(xlabel="share of the diagonal in the covariance", xlim=(-0.03, 1.03))
    diagonals.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for axes in (norms, diagonals):
        axes.set_ylim(len(sets) - 0.5, -0.5)


def position_scores(found: PositionScores, *, title: str = "") -> Figure:
    """Draw the bias by distance that fits each head's scores of positions best, with the share that it explains.

    Args:
        found: result of `hf_posenc.theory.position_scores`.
        title: text above the axes; empty means none.
    """
    labels = [f"head {head}: {share:.0%}" for head, share in enumerate(found.explained_in_rows.tolist())]
    with style.one_panel(title, xlabel="distance (tokens)", ylabel="bias (nats)") as (figure, axes):
        for curve, look in zip(found.bias.tolist(), style.styles(labels), strict=True):
            axes.plot(curve, **{**look, "marker": ""})
        axes.legend(**style.BESIDE, title="explained")
    return figure


def expansion_terms(found: Expansion, *, title: str = "") -> Figure:
    """Draw the sizes of the terms of Su's expansion and of its residual, for the input of each layer and the output.

    Args:
        found: result of `hf_posenc.theory.expansion`. A term that is 0 has no mark.
        title: text above the axes; empty means none.
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
    xlabel, last = f"hidden state into layer (m = {found.first}, n = {found.second})", len(found.layers)
    labelled = [(label, name) for name, label in words.items()]
    with style.curves(labelled, title, xlabel, "size (norm; of the output: nats)") as (figure, axes, drawn):
        for name, look in drawn:
            sizes = [terms.sizes[name] or math.nan for terms in rows]
            axes.plot(sizes[:-1], **look)
            axes.plot([last], sizes[-1:], **{**look, "label": None})  # not joined, because it is another function
        axes.set_yscale("log")
        places = range(0, last, math.ceil(last / 16))
        axes.set_xticks([*places, last], [*map(str, places), "output"])
    return figure


def score_terms(measured: ScoreTerms, *, title: str = "") -> Figure:
    """Draw the shares of the four terms in the attention scores, a panel for each term with layers and heads.

    Args:
        measured: result of `hf_posenc.theory.score_terms`.
        title: text above the panels; empty means none.

    Raises:
        ValueError: if there are no layers.
        ImportError: without matplotlib.
    """
    import torch

    style.require(measured.layers, "terms of scores")
    heads = max(len(layer.shares) for layer in measured.layers)
    shares = torch.full((len(measured.names), len(measured.layers), heads), math.nan, dtype=torch.float64)
    for row, layer in enumerate(measured.layers):
        shares[:, row, : len(layer.shares)] = 100 * layer.shares.T
    colours = style.limits(shares.nan_to_num(), 100.0)  # shares pass 100 % where another term is negative
    size = {"width": 10.0, "height": min(9.0, 1.7 + 0.3 * len(measured.layers))}
    with style.panels(title, 1, len(measured.names), **size, sharey=True) as (figure, panels):
        for axes, name, values in zip(panels, measured.names, shares, strict=True):
            image = style.image(axes, values, **colours)
            axes.set_title(name, fontsize=10)
            axes.set_xlabel("head")
            axes.xaxis.get_major_locator().set_params(integer=True)
        style.ticks(panels[0].yaxis, [layer.index for layer in measured.layers], 24)
        panels[0].set_ylabel("layer")
        style.colour_bar(image, list(panels), "share of the score (%)")
    return figure
