"""What a run says when it ends, and its model card: tables and sentences made from results.json alone."""

import statistics
from collections.abc import Iterable

from .results import Results

Rows = list[tuple[str, ...]]
"""Cells of a table by rows; the first row is the header."""
METHODS = (("sliding", "sliding window"), ("non_overlapping", "non-overlapping"))
"""The two perplexities: key in results, and name in texts."""
SAME = 0.02
"""Relative difference to the base's perplexity below which a model counts as good as its base."""
HOLDS = 0.05
"""Relative increase over the perplexity at the base's length up to which a longer context counts as good."""

# -------------------------------------------------------------------------------------------------------------- numbers


def sliding(rows: list[Results]) -> dict[int, float]:
    """Return length -> sliding-window perplexity, for the lengths at which it was measured."""
    return {row["length"]: row["sliding"]["perplexity"] for row in rows if "sliding" in row}


def score_by_length(rows: Iterable[Results]) -> dict[int, float]:
    """Return length -> mean score of a measure, shortest length first."""
    by_length: dict[int, list[float]] = {}
    for row in rows:
        by_length.setdefault(row["length"], []).append(row["score"])
    return {length: statistics.fmean(values) for length, values in sorted(by_length.items())}


def measures_of(results: Results) -> Rows:
    """Return the table of measures of a run, before and after."""
    return measure_rows({time: results[f"measures_{time}"] for time in ("before", "after")})


def measure_rows(found: dict[str, dict[str, list[Results]]]) -> Rows:
    """Return the table of measures, with a row per measure and time; only the header if nothing was measured.

    Args:
        found: time, such as `before` -> name of a measure -> its rows.
    """
    measured = [
        (f"{name}, {time}" if time else name, score_by_length(rows))
        for time, by_name in found.items()
        for name, rows in by_name.items()
    ]
    lengths = sorted({length for _, score in measured for length in score})
    body = ((name, *(f"{score[each]:.2f}" if each in score else "-" for each in lengths)) for name, score in measured)
    return [("measure", *map(str, lengths)), *body]


def curves_by_position(results: Results) -> dict[str, list[tuple[int, int, float]]]:
    """Return label -> loss by position in the longest windows, before and after the run."""
    return {
        f"{time}, windows of {row['length']}": [
            (part["first"], part["last"], part["loss"]) for part in row["by_position"]
        ]
        for time in ("before", "after")
        for row in [row for row in results[time] if "by_position" in row][-1:]
    }


def perplexity_rows(results: Results) -> Rows:
    """Return the table of both perplexities, before and after the run, with a row per length."""
    header = [f"{name}, {time}" for _, name in METHODS for time in ("before", "after")]
    rows: Rows = [("context", *header, "bits per byte, after")]
    for before, after in zip(results["before"], results["after"], strict=True):
        values = [value for both in zip(perplexities(before), perplexities(after), strict=True) for value in both]
        rows.append((str(before["length"]), *values, bits_per_byte(after)))
    return rows


def perplexities(row: Results) -> list[str]:
    """Return both perplexities at a length, as shown in tables."""
    return [f"{row[method]['perplexity']:.3f}" if method in row else "-" for method, _ in METHODS]


def bits_per_byte(row: Results) -> str:
    """Return bits per byte at a length, as shown in tables."""
    return f"{row['bits_per_byte']:.3f}" if row.get("bits_per_byte") is not None else "-"


# ------------------------------------------------------------------------------------------------------------ sentences


def as_text(results: Results) -> str:
    """Return the table that a run prints when it ends: both perplexities by length, before and after."""
    lines = [
        "held-out perplexity     sliding window          non-overlapping",
        f"{'context':>10}  {'before':>12} {'after':>9}  {'before':>14} {'after':>9}",
    ]
    for length, *values in perplexity_rows(results)[1:]:
        lines.append(f"{length:>10}  {values[0]:>12} {values[1]:>9}  {values[2]:>14} {values[3]:>9}")
    reasons = [row["impossible"] for row in results["before"] if "impossible" in row]
    lines += [f"\n-: the base cannot run at that length: {reason}" for reason in reasons[:1]]
    for name, *scores in (rows := measures_of(results))[1:]:
        by_length = ", ".join(f"{length}: {score}" for length, score in zip(rows[0][1:], scores, strict=True))
        lines.append(f"{name}, by length: {by_length}")
    return "\n".join([*lines, *samples(results), "", calibration_line(results["calibration"])])


def samples(results: Results) -> list[str]:
    """Return what a run's base and model write; nothing without `--prompt`."""
    return [f"writes, {time}: {results[key]}" for time in ("before", "after") if (key := f"writes_{time}") in results]


def calibration_line(calibration: Results) -> str:
    """Return the effect of a calibration in one line: advice if it won nothing, losses, remarks."""
    if calibration["method"] == "none":
        return f"not calibrated: {calibration['why']}"
    advice = f"{calibration['advice']}; " if calibration["advice"] else ""
    losses, divergence = calibration["held_out_loss"], calibration["divergence"]
    remarks = " ".join(remark.rstrip(".") + "." for remark in calibration["remarks"])
    return (
        f"{advice}calibrated with {calibration['tokens']:,} tokens: KL divergence of attention from the base's "
        f"{divergence['before']:.3f} nats before, "
        f"{divergence['after']:.3f} after; held-out loss at {losses['length']} tokens: base {losses['base']:.3f}, "
        f"swapped {losses['swapped']:.3f}, calibrated {losses['calibrated']:.3f}"
    ) + (f". {remarks}".rstrip(".") if remarks else "")


def verdict(results: Results) -> str:
    """Return sentences that compare sliding-window perplexity with the base's: at its trained length, and beyond.

    Args:
        results: results of `extend`.
    """
    trained, before, after = results["base"]["trained_length"], sliding(results["before"]), sliding(results["after"])
    length = max((length for length in before if length <= trained and length in after), default=None)
    if length is None:
        return (
            f"Nothing was measured at {trained} tokens, the base's length, or below: there is no base to compare with."
        )
    base, now = before[length], after[length]
    text = f"Perplexity at {length} tokens: {base:.2f} before, {now:.2f} after."
    if now > base * (1 + SAME):
        text += " The model got worse than its base there: train it longer, or choose another scheme."
    elif now < base * (1 - SAME):
        text += " The model is better than its base there; some of that is the text it was fine-tuned on."
    for longer in sorted(each for each in after if each > length):
        of_base = f"the base {before[longer]:.2f}" if longer in before else "the base cannot run"
        worse = ": that is worse" if after[longer] > now * (1 + HOLDS) else ""
        text += f" At {longer} tokens it has {after[longer]:.2f}, {of_base}{worse}."
    return text
