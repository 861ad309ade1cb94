"""The summary of a sweep: tables and figures, made from the results of its runs alone.

A figure has panels with a few lines. Every panel also shows the base, with which all runs are compared.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..analysis import plots
from ..analysis import style as pen
from . import run_identity as identity
from .models import UNPATCHED
from .options import UsageError
from .results import Results, filled, without_paths, write_json, write_text
from .run_report import METHODS, accuracy_by_length
from .sweep_runs import Runs, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Side = Literal["left", "center", "right"]
LINES_PER_PANEL = 6
"""Largest number of lines in a panel, including the lines of the base."""
BASE = "base, untouched"
_REFERENCES: dict[str, dict[str, Any]] = {
    BASE: {"color": "#000000", "marker": "X", "linestyle": (0, (5, 2)), "linewidth": 1.3, "label": BASE},
    UNPATCHED: {
        "color": pen.GREY,
        "marker": "P",
        "linestyle": (0, (1, 1.2)),
        "label": f"{UNPATCHED}: the base, fine-tuned",
    },
}
"""Style of the lines that every panel shows, if they were measured."""

Bins = dict[tuple[int, int], dict[str, float]]
"""Loss by position: (first position, last position + 1) -> mean and standard deviation."""


def summarize(folder: Path, title: str) -> Results:
    """Write summary.json, summary.md and the figures; return the summary."""
    runs = read(folder)
    if not runs:
        raise UsageError(f"there are no results in {folder / 'runs'}")
    check_one_sweep(folder, runs)
    first = next(iter(runs.values()))[0]
    variants = {variant: summarize_variant(results) for variant, results in runs.items()}
    reach_plain(variants)
    summary = {"title": title, "base": without_paths(first)["base"], "variants": variants}
    if first.get("before"):
        summary["before"] = first["before"]
    write_json(folder / "summary.json", summary)
    write_text(folder / "summary.md", markdown(summary))
    draw(folder, runs, summary)
    return summary


def check_one_sweep(folder: Path, runs: Runs) -> None:
    """Raise UsageError if the runs belong to different sweeps, because they cannot be compared then."""
    everything = [results for variant in runs.values() for results in variant]
    identities = [results["identity"] for results in everything if "identity" in results]
    for other in identities:
        if different := identity.differences(identity.common(identities[0]), identity.common(other)):
            raise UsageError(f"the runs in {folder} are not of one sweep: {different}")
    if without_identity := len(everything) - len(identities):
        print(f"{without_identity} runs in {folder} have no identity: an older version made them", file=sys.stderr)


# -------------------------------------------------------------------------------------------------------------- numbers


def summarize_variant(runs: list[Results]) -> Results:
    """Return the numbers of a variant, averaged over its seeds."""
    lengths = [row["length"] for row in runs[0]["after"] if "sliding" in row]
    rows = [{row["length"]: row for row in results["after"]} for results in runs]
    cells = (cell for results in runs for cell in results.get("retrieval_after", []))
    return {
        "seeds": [results["seed"] for results in runs],
        "tokens": runs[0]["training"]["tokens"],
        "tokens_per_second": spread([results["training"]["tokens_per_second"] for results in runs]),
        **{
            method: {str(length): spread([row[length][method]["perplexity"] for row in rows]) for length in lengths}
            for method, _ in METHODS
        },
        "curve": [
            {"tokens": points[0]["tokens"], **spread([point["loss"] for point in points])}
            for points in zip(*(results["training"]["curve"] for results in runs), strict=True)
        ],
        "retrieval": {str(length): {"mean": mean} for length, mean in accuracy_by_length(cells).items()},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return mean and sample standard deviation. A single value has no deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
    return {"mean": statistics.fmean(values), **({} if math.isnan(deviation) else {"std": deviation})}


def by_position(measured: list[list[Results]]) -> Bins:
    """Return the loss by position in the longest windows, averaged over the seeds; empty if it was not measured.

    Args:
        measured: for every seed, the rows by length.
    """
    longest = [[row for row in rows if "by_position" in row][-1:] for rows in measured]
    bins = zip(*(row["by_position"] for rows in longest for row in rows), strict=True)
    return {(seeds[0]["first"], seeds[0]["last"]): spread([seed["loss"] for seed in seeds]) for seeds in bins}


def base_loss(runs: Runs) -> float | None:
    """Return the held-out loss of the untouched base, measured as for the curves; None if it was not measured."""
    for results in runs.get(UNPATCHED, []):
        if points := results["training"]["curve"]:
            return float(points[0]["loss"])  # before the first step
    for results in (results for variant in runs.values() for results in variant):
        losses = results.get("calibration", {}).get("held_out_loss")
        if losses and losses["length"] == results["base"]["trained_length"]:
            return float(losses["base"])
    return None


def reach_plain(variants: Results) -> None:
    """Add to every variant `X+OPTION` the number of tokens after which its loss reaches the final loss of X.

    The entry also has this number as a share of the tokens of X.
    """
    for name, entry in variants.items():
        reference = variants.get(name.partition("+")[0])
        if "+" not in name or reference is None or not reference["curve"] or not entry["curve"]:
            continue
        goal, previous = reference["curve"][-1]["mean"], None
        for point in entry["curve"]:
            if point["mean"] <= goal:
                reached = float(point["tokens"])
                if previous is not None:  # interpolate between two points
                    share = (previous["mean"] - goal) / (previous["mean"] - point["mean"])
                    reached = previous["tokens"] + share * (point["tokens"] - previous["tokens"])
                entry["reaches_plain_at"] = {"tokens": reached, "share": reached / reference["curve"][-1]["tokens"]}
                break
            previous = point


# --------------------------------------------------------------------------------------------------------------- tables


def markdown(summary: Results) -> str:
    """Return the tables of a summary as Markdown."""
    lengths = sorted({length for entry in summary["variants"].values() for length in entry["sliding"]}, key=int)
    untouched = {
        method: {str(row["length"]): f"{row[method]['perplexity']:.3f}" for row in summary["before"] if method in row}
        for method, _ in METHODS
        if "before" in summary
    }
    return filled("summary.md", **summary, methods=METHODS, lengths=lengths, untouched=untouched)


# -------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Curve:
    """Means over seeds at points of the x axis, and their standard deviations: 0 if they are not known."""

    xs: Sequence[float]
    means: Sequence[float]
    deviations: Sequence[float]

    @classmethod
    def of(cls, values: Mapping[float, Mapping[str, float]]) -> "Curve":
        """Make a curve from x -> `mean` and, if known, `std`."""
        xs = sorted(values)
        return cls(xs, [values[x]["mean"] for x in xs], [values[x].get("std", 0.0) for x in xs])

    def band(self) -> list[tuple[float, float]]:
        """Return each mean minus and plus one standard deviation. At least half the mean, for log axes."""
        pairs = zip(self.means, self.deviations, strict=True)
        return [(max(mean - deviation, mean / 2), mean + deviation) for mean, deviation in pairs]


def draw(folder: Path, runs: Runs, summary: Results) -> None:
    """Write the figures, with every variant and its spread over seeds, and the untouched base if it was measured."""
    first, entries = next(iter(runs.values()))[0], summary["variants"]
    before, trained_length = first.get("before", []), first["base"]["trained_length"]
    train_length = first["arguments"]["train_length"]
    marks = {"trained at": trained_length}
    if train_length != trained_length:
        marks["fine-tuned at"] = train_length
    max_seeds = max(len(entry["seeds"]) for entry in entries.values())
    note = f"mean of {max_seeds} seeds; bands are one standard deviation" if max_seeds > 1 else "one seed"

    def save(figure: "Figure", name: str, title: str) -> None:
        set_title(figure, f"{summary['title']}: {title}\n{note}")
        plots.save(figure, folder / f"{name}.png", dpi=110)

    for method, name in METHODS:
        curves = {}
        for label, entry in entries.items():
            curves[label] = Curve.of({int(length): value for length, value in entry[method].items()})
        if base_curve := {row["length"]: {"mean": row[method]["perplexity"]} for row in before if method in row}:
            curves[BASE] = Curve.of(base_curve)
        save(plot_by_length(curves, marks), method, name)
    positions = {label: by_position([run["after"] for run in variant]) for label, variant in runs.items()}
    positions[BASE] = by_position([before])
    positions = {label: bins for label, bins in positions.items() if bins}
    save(plot_by_position(positions, marks), "loss_by_position", "longest windows")
    recovery = {
        label: Curve.of({point["tokens"]: point for point in entry["curve"]})
        for label, entry in entries.items()
        if entry["curve"]
    }
    if recovery:
        if (loss := base_loss(runs)) is not None:
            xs = [x for curve in recovery.values() for x in (curve.xs[0], curve.xs[-1])]
            recovery[BASE] = Curve([min(xs), max(xs)], [loss, loss], [0.0, 0.0])
        figure, axes = _figure(recovery, {}, xlabel="tokens", ylabel="loss (nats per token)")
        pen.thousands(axes.xaxis)
        save(figure, "recovery", "held-out loss")


def set_title(figure: "Figure", title: str) -> None:
    """Write a title above a figure."""
    # A path may contain characters that no font has, or two dollar signs, which matplotlib would read as a formula.
    title = title.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def plot_by_length(curves: Mapping[str, Curve], marks: Mapping[str, int]) -> "Figure":
    """Draw perplexity against context length, and mark lengths (name -> tokens)."""
    figure, axes = _figure(curves, marks, xlabel="context length (tokens)", ylabel=pen.PERPLEXITY)
    pen.token_axis(axes, {x for curve in curves.values() for x in curve.xs})
    pen.perplexity_axis(axes, [edge for curve in curves.values() for edges in curve.band() for edge in edges])
    return figure


def plot_by_position(positions: Mapping[str, Bins], marks: Mapping[str, int]) -> "Figure":
    """Draw loss against the position in the window, as steps."""
    edges = [edges for bins in positions.values() for edges in bins]
    logarithmic, curves = pen.are_uneven(edges), {}
    for name, bins in positions.items():
        xs, means = pen.steps([(*edges, value["mean"]) for edges, value in bins.items()], logarithmic)
        _, deviations = pen.steps([(*edges, value.get("std", 0.0)) for edges, value in bins.items()], logarithmic)
        curves[name] = Curve(xs, means, deviations)
    labels = {"xlabel": "position in the window (tokens)", "ylabel": "mean loss (nats per token)"}
    figure, axes = _figure(curves, marks, **labels, markers=False)
    if logarithmic:
        pen.token_axis(axes, {max(1, edge) for pair in edges for edge in pair})
    else:
        pen.thousands(axes.xaxis)
    return figure


def panels(names: Iterable[str]) -> list[list[str]]:
    """Distribute curves over as few panels as possible, evenly. Variants of one scheme share a panel if they fit.

    Args:
        names: names of all curves. The curves of the base come first in every panel.
    """
    names = list(names)
    base_names = [name for name in _REFERENCES if name in names]
    by_scheme: dict[str, list[str]] = {}
    for name in names:
        if name not in base_names:
            by_scheme.setdefault(name.partition("+")[0].partition("-")[0], []).append(name)
    count = sum(map(len, by_scheme.values()))
    per_panel = math.ceil(count / max(1, math.ceil(count / (LINES_PER_PANEL - len(base_names)))))
    groups = [
        group[start : start + per_panel] for group in by_scheme.values() for start in range(0, len(group), per_panel)
    ]
    panels_so_far: list[list[str]] = []
    for group in sorted(groups, key=len, reverse=True):
        target = next((panel for panel in panels_so_far if len(panel) + len(group) <= per_panel), None)
        if target is None:
            panels_so_far.append(target := [])
        target += group
    return [base_names + panel for panel in panels_so_far] or [base_names] * bool(base_names)


def _figure(
    curves: Mapping[str, Curve], marks: Mapping[str, int], *, xlabel: str, ylabel: str, markers: bool = True
) -> tuple["Figure", "Axes"]:
    """Draw curves in `panels` that share both axes. Return the figure and the axes of the first panel."""
    shown = panels(curves)
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    with pen.style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2 * columns, 0.5 + 3.9 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(shown) :]:
            axes.set_visible(False)
        for axes, names in zip(grid.flat, shown, strict=False):
            for name, style in _styles(names, markers).items():
                _draw(axes, curves[name], style)
            for name, tokens in marks.items():
                # Of two marks, the labels stand on the outer sides.
                side: Side = "center" if len(marks) == 1 else "right" if tokens == min(marks.values()) else "left"
                pen.mark_length(axes, f"{name} {tokens:,}", tokens, side)
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set_xlabel(xlabel)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=9)
        for row in grid:
            row[0].set_ylabel(ylabel)
    return figure, grid[0][0]


def _styles(names: Sequence[str], markers: bool) -> dict[str, dict[str, Any]]:
    """Return name -> style of the line, for one panel. No two lines have the same colour or marker."""
    styles = {name: _REFERENCES[name] for name in names if name in _REFERENCES}
    for rank, name in enumerate(name for name in names if name not in _REFERENCES):
        styles[name] = {
            "color": pen.COLOURS[rank],
            "marker": pen.MARKERS[rank],
            # Thinner than the line before it, so that both are visible where one covers the other.
            "linewidth": 3.2 - 0.4 * rank,
            "markersize": 7.5 - 0.8 * rank,
            "label": name,
        }
    return styles if markers else {name: {**style, "marker": ""} for name, style in styles.items()}


def _draw(axes: "Axes", curve: Curve, style: dict[str, object]) -> None:
    """Draw the means as a line, with a band of one standard deviation."""
    pen.line(axes, curve.xs, curve.means, **style)
    if any(curve.deviations):
        low, high = pen.columns(curve.band())
        finite = [math.isfinite(edge) for edge in high]
        axes.fill_between(curve.xs, low, high, where=finite, color=style["color"], alpha=0.25, linewidth=0)
