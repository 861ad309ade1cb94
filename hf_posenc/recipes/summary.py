"""Runs side by side: tables and figures of a sweep, made from the runs' results alone."""

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from ..analysis import plots
from ..hub import plain
from . import identity
from . import sweep_figures as figures
from .many_runs import Runs, read
from .options import UsageError
from .results import without_paths, write_json, write_text
from .schemes import UNPATCHED
from .tables import METHODS, accuracy_by_length


def summarize(folder: Path, title: str) -> dict[str, Any]:
    """Writes summary.json, summary.md and the figures; returns the summary."""
    runs = read(folder)
    if not runs:
        raise UsageError(f"there are no results in {folder / 'runs'}")
    check_one_sweep(folder, runs)
    first = next(iter(runs.values()))[0]
    summary: dict[str, Any] = {"title": title, "base": without_paths(first)["base"], "variants": {}}
    if first.get("before"):
        summary["before"] = first["before"]
    for variant, found in runs.items():
        rows = [row for row in found[0]["after"] if "sliding" in row]
        summary["variants"][variant] = {
            "seeds": [results["seed"] for results in found],
            "tokens": found[0]["training"]["tokens"],
            "tokens_per_second": spread([results["training"]["tokens_per_second"] for results in found]),
            **{
                method: {
                    str(row["length"]): spread([at(results, row["length"])[method]["perplexity"] for results in found])
                    for row in rows
                }
                for method, _ in METHODS
            },
            "curve": [
                {"tokens": points[0]["tokens"], **spread([point["loss"] for point in points])}
                for points in zip(*(results["training"]["curve"] for results in found), strict=True)
            ],
            "retrieval": {
                str(length): {"mean": mean}
                for length, mean in accuracy_by_length(
                    cell for results in found for cell in results.get("retrieval_after", [])
                ).items()
            },
        }
    reach_plain(summary["variants"])
    write_json(folder / "summary.json", summary)
    write_text(folder / "summary.md", markdown(summary))

    draw(folder, runs, summary)
    return summary


def draw(folder: Path, runs: Runs, summary: dict[str, Any]) -> None:
    """Writes the figures: the untouched base, where it was measured, and every variant, with the spread over seeds."""
    first = next(iter(runs.values()))[0]
    before, trained = first.get("before", []), first["base"]["trained_length"]
    tuned = first["arguments"]["train_length"]
    marks = {"trained at": trained, **({"fine-tuned at": tuned} if tuned != trained else {})}
    entries = summary["variants"]
    most = max(len(entry["seeds"]) for entry in entries.values())
    about = f"mean of {most} seeds; bands are one standard deviation" if most > 1 else "one seed"

    for method, name in METHODS:
        curves = {label: figures.curve(by_number(entry[method])) for label, entry in entries.items()}
        if known := {row["length"]: {"mean": row[method]["perplexity"]} for row in before if method in row}:
            curves[figures.BASE] = figures.curve(known)
        drawn = figures.by_length(curves, marks, f"{summary['title']}: {name}\n{about}")
        plots.save(drawn, folder / f"{method}.png", dpi=110)

    positions = {label: by_position([results["after"] for results in found]) for label, found in runs.items()}
    positions[figures.BASE] = by_position([before])
    drawn = figures.by_position(
        {label: found for label, found in positions.items() if found},
        marks,
        f"{summary['title']}: longest windows\n{about}",
    )
    plots.save(drawn, folder / "loss_by_position.png", dpi=110)

    recovery = {
        label: figures.curve({point["tokens"]: point for point in entry["curve"]})
        for label, entry in entries.items()
        if entry["curve"]
    }
    if recovery:
        if (loss := base_loss(runs)) is not None:
            ends = [
                min(each.places[0] for each in recovery.values()),
                max(each.places[-1] for each in recovery.values()),
            ]
            recovery[figures.BASE] = figures.Curve(ends, [loss, loss], [0.0, 0.0])
        drawn = figures.by_tokens(recovery, f"{summary['title']}: held-out loss\n{about}")
        plots.save(drawn, folder / "recovery.png", dpi=110)


def by_number(values: dict[str, Any]) -> dict[float, Any]:
    """What JSON holds under the text of a length, under the length."""
    return {int(length): value for length, value in values.items()}


def by_position(measured: list[list[dict[str, Any]]]) -> dict[tuple[int, int], dict[str, float]]:
    """Loss in each bin of the longest windows that were measured, over the seeds; empty if none was.

    Args:
        measured: the rows by length of each seed.
    """
    longest = [[row for row in rows if "by_position" in row][-1:] for rows in measured]
    parts = zip(*(row["by_position"] for found in longest for row in found), strict=True)
    return {(part[0]["first"], part[0]["last"]): spread([each["loss"] for each in part]) for part in parts}


def base_loss(runs: Runs) -> float | None:
    """The untouched base's held-out loss, as the curves have it; None where there is no base, or nobody measured it."""
    for results in runs.get(UNPATCHED, []):
        if curve := results["training"]["curve"]:
            return curve[0]["loss"]  # nothing was trained yet
    for results in (each for found in runs.values() for each in found):
        losses = results.get("calibration", {}).get("held_out_loss")
        if losses and losses["length"] == results["base"]["trained_length"]:
            return losses["base"]
    return None


def check_one_sweep(folder: Path, runs: Runs) -> None:
    """UsageError if the runs are not of one sweep: their rows would say different things."""
    said = [results["identity"] for found in runs.values() for results in found if "identity" in results]
    for other in said:
        if wrong := identity.differences(identity.common(said[0]), identity.common(other)):
            raise UsageError(f"the runs in {folder} are not of one sweep: {wrong}")
    if silent := sum(len(found) for found in runs.values()) - len(said):
        print(f"{silent} runs in {folder} do not say what they are of: an older version made them", file=sys.stderr)


def at(results: dict[str, Any], length: int) -> dict[str, Any]:
    """A run's measurement at a length."""
    return next(row for row in results["after"] if row["length"] == length)


def spread(values: list[float]) -> dict[str, float]:
    """Mean and sample standard deviation; of a single value the deviation is not known."""
    deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
    return {"mean": statistics.fmean(values), **({} if math.isnan(deviation) else {"std": deviation})}


def reach_plain(variants: dict[str, Any]) -> None:
    """Notes, of `X+OPTION`, after how many tokens it is where plain X ends, as a share of plain X's tokens."""
    for name, entry in variants.items():
        plain = variants.get(name.partition("+")[0])
        if "+" not in name or plain is None or not plain["curve"] or not entry["curve"]:
            continue
        goal, last = plain["curve"][-1]["mean"], None
        for point in entry["curve"]:
            if point["mean"] <= goal:
                if last is None:
                    reached = float(point["tokens"])
                else:  # between two points, along the straight line
                    share = (last["mean"] - goal) / (last["mean"] - point["mean"])
                    reached = last["tokens"] + share * (point["tokens"] - last["tokens"])
                entry["reaches_plain_at"] = {"tokens": reached, "share": reached / plain["curve"][-1]["tokens"]}
                break
            last = point


def markdown(summary: dict[str, Any]) -> str:
    """The tables, as they are."""
    variants = summary["variants"]
    lengths = sorted({length for entry in variants.values() for length in entry["sliding"]}, key=int)
    lines = [f"# {plain(summary['title'])}", ""]
    base = summary["base"]
    lines += [
        f"Base: {plain(base['name'])}, {base['parameters']:,} weights, trained at {base['trained_length']} tokens.",
        "",
    ]
    for method, name in METHODS:
        lines += [
            f"## Perplexity, {name}",
            "",
            "Mean and standard deviation over seeds on held-out text; lower is better.",
            "",
            "| | seeds | " + " | ".join(lengths) + " |",
            "|---|---|" + "---|" * len(lengths),
        ]
        if "before" in summary:
            known = {str(row["length"]): row[method]["perplexity"] for row in summary["before"] if method in row}
            values = [f"{known[length]:.3f}" if length in known else "-" for length in lengths]
            lines.append("| base, before | | " + " | ".join(values) + " |")
        for label, entry in variants.items():
            values = [shown(entry[method][length]) if length in entry[method] else "-" for length in lengths]
            lines.append(f"| {plain(label)} | {len(entry['seeds'])} | " + " | ".join(values) + " |")
        lines.append("")
    lines += ["## Cost, recovery and retrieval", ""]
    lines += [
        "| | tokens | tokens/s | held-out loss at the end | reaches plain's end at | induction copy, by length |",
        "|---|---|---|---|---|---|",
    ]
    for label, entry in variants.items():
        end = shown(entry["curve"][-1]) if entry["curve"] else "-"
        share = f"{entry['reaches_plain_at']['share']:.0%} of its tokens" if "reaches_plain_at" in entry else "-"
        copied = ", ".join(f"{length}: {value['mean']:.2f}" for length, value in entry["retrieval"].items()) or "-"
        speed = f"{entry['tokens_per_second']['mean']:,.0f}"
        lines.append(f"| {plain(label)} | {entry['tokens']:,} | {speed} | {end} | {share} | {copied} |")
    return "\n".join([*lines, ""])


def shown(value: dict[str, float]) -> str:
    """Mean, and deviation where there is one."""
    return f"{value['mean']:.3f}" + (f" ± {value['std']:.3f}" if "std" in value else "")
