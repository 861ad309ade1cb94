"""Results of a run as tables, sentences and curves, and its report: one HTML file, made from results.json alone."""

import json
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path

from ..analysis import plots
from .results import Results, filled, without_paths, write_text

Rows = list[tuple[str, ...]]
"""Cells of a table, the first row as its header."""
METHODS = (("sliding", "sliding window"), ("non_overlapping", "non-overlapping"))
"""The two perplexities: their names in results, and in words."""
SAME = 0.02
"""Perplexities that differ by less than this share of the base's are called the same."""
HOLDS = 0.05
"""A longer context holds if its perplexity exceeds that at the base's length by at most this share of it."""
# -------------------------------------------------------------------------------------------------------------- numbers


def sliding(rows: list[Results]) -> dict[int, float]:
    """Return the sliding-window perplexity by length, where it was measured."""
    return {row["length"]: row["sliding"]["perplexity"] for row in rows if "sliding" in row}


def accuracy_by_length(cells: Iterable[Results]) -> dict[int, float]:
    """Return the mean accuracy of the retrieval test by length, shortest first."""
    by_length: dict[int, list[float]] = {}
    for cell in cells:
        by_length.setdefault(cell["length"], []).append(cell["accuracy"])
    return {length: statistics.fmean(values) for length, values in sorted(by_length.items())}


def rate_of(results: Results) -> float:
    """Return the peak of the learning rate, given or found."""
    source = results.get("learning_rates")
    return float(source["chosen"] if source else results["arguments"]["learning_rate"])


def curves_by_length(results: Results) -> dict[str, list[tuple[float, float]]]:
    """Return both perplexities before and after, as curves over length."""
    curves = {
        f"{time}, {name}": [(row["length"], row[method]["perplexity"]) for row in results[time] if method in row]
        for time in ("before", "after")
        for method, name in METHODS
    }
    return {label: points for label, points in curves.items() if points}


def curves_by_position(results: Results) -> dict[str, list[tuple[int, int, float]]]:
    """Return the loss by position in the longest windows, before and after."""
    return {
        f"{time}, windows of {row['length']}": [
            (part["first"], part["last"], part["loss"]) for part in row["by_position"]
        ]
        for time in ("before", "after")
        for row in [row for row in results[time] if "by_position" in row][-1:]
    }


def perplexity_rows(results: Results) -> Rows:
    """Return both perplexities before and after, a row per length."""
    header = [f"{name}, {time}" for _, name in METHODS for time in ("before", "after")]
    rows: Rows = [("context", *header, "bits per byte, after")]
    for before, after in zip(results["before"], results["after"], strict=True):
        values = [
            f"{row[method]['perplexity']:.3f}" if method in row else "-"
            for method, _ in METHODS
            for row in (before, after)
        ]
        bits = after.get("bits_per_byte")
        rows.append((str(before["length"]), *values, f"{bits:.3f}" if bits is not None else "-"))
    return rows


# ------------------------------------------------------------------------------------------------------------ sentences


def as_text(results: Results) -> str:
    """Return the table that a run prints at its end: both perplexities by length, before and after."""
    lines = [
        "held-out perplexity     sliding window          non-overlapping",
        f"{'context':>10}  {'before':>12} {'after':>9}  {'before':>14} {'after':>9}",
    ]
    for length, *values in perplexity_rows(results)[1:]:
        lines.append(f"{length:>10}  {values[0]:>12} {values[1]:>9}  {values[2]:>14} {values[3]:>9}")
    reasons = [row["impossible"] for row in results["before"] if "impossible" in row]
    lines += [f"\n-: the model before cannot run there: {reason}" for reason in reasons[:1]]
    return "\n".join([*lines, "", calibration_line(results["calibration"])])


def calibration_line(calibration: Results) -> str:
    """Return the effect of a calibration in one line, with its remarks, which older versions did not make."""
    if calibration["method"] == "none":
        return f"not calibrated: {calibration['why']}"
    losses, divergence = calibration["held_out_loss"], calibration["divergence"]
    remarks = " ".join(remark.rstrip(".") + "." for remark in calibration.get("remarks", ()))
    return (
        f"calibrated: attention {divergence['before']:.3f} nats from the base's before, {divergence['after']:.3f} "
        f"after; held-out loss at {losses['length']} tokens: base {losses['base']:.3f}, "
        f"swapped {losses['swapped']:.3f}, calibrated {losses['calibrated']:.3f}"
    ) + (f". {remarks}".rstrip(".") if remarks else "")


def verdict(results: Results) -> str:
    """Compare sliding-window perplexity, in sentences, with the base at the length it was trained at.

    Args:
        results: of extend_context.py.
    """
    trained, before, after = results["base"]["trained_length"], sliding(results["before"]), sliding(results["after"])
    known = max((length for length in before if length <= trained and length in after), default=None)
    longest = max(after)
    if known is None:
        return (
            f"Nothing was measured at {trained} tokens, where the base was trained, or below: there is no base to "
            "compare with."
        )
    base, now, far = before[known], after[known], after[longest]
    text = f"Perplexity at {known} tokens: {base:.2f} before, {now:.2f} after."
    if now > base * (1 + SAME):
        text += " The model got worse than its base there: train it longer, or choose another scheme."
    elif now < base * (1 - SAME):
        text += " The model is better than its base there; some of that is the text it was fine-tuned on."
    else:
        text += " The model is as good as its base there."
    if longest <= known:
        return text
    then = f"the base {before[longest]:.2f}" if longest in before else "and the base cannot run"
    held = known
    for length in sorted(length for length in after if length > known):
        if after[length] > now * (1 + HOLDS):
            return f"{text} It holds to {held} tokens and gets worse beyond: at {longest} it has {far:.2f}, {then}."
        held = length
    return f"{text} It holds to {longest} tokens, where it has {far:.2f}, {then}."


# ----------------------------------------------------------------------------------------------------------- the report


def write(path: Path, results: Results) -> None:
    """Write the report of an extend_context run. It names no folder of this machine, because it is shown to others."""
    results = without_paths(results)
    training = results["training"]
    page = filled(
        "report.html",
        **{"retrieval_after": None, "calibration": None, "learning_rates": None} | results,
        plots=plots,
        verdict=verdict(results),
        perplexities=perplexity_rows(results),
        by_length=curves_by_length(results),
        by_position=curves_by_position(results),
        calibration_line=calibration_line(results["calibration"]) if "calibration" in results else None,
        losses=list(enumerate(training["loss"], start=1)),
        recovery=[(point["tokens"], point["loss"]) for point in training["curve"]],
        command_line=shlex.join(results["command"]),
        made_with=json.dumps({key: results[key] for key in ("versions", "hardware", "git")}, indent=2),
    )
    write_text(path, page)
