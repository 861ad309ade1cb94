"""Numbers of a run's results as rows, as curves and as tables."""

import statistics
from collections.abc import Iterable
from typing import Any

METHODS = (("sliding", "sliding window"), ("non_overlapping", "non-overlapping"))
"""The two perplexities: their names in results, and in words."""


def as_text(results: dict[str, Any]) -> str:
    """Lengths x before and after, both perplexities; lower is better."""
    lines = [
        "held-out perplexity     sliding window          non-overlapping",
        f"{'context':>10}  {'before':>12} {'after':>9}  {'before':>14} {'after':>9}",
    ]
    reasons = [row["impossible"] for row in results["before"] if "impossible" in row]
    for length, *values in perplexity_rows(results)[1:]:
        lines.append(f"{length:>10}  {values[0]:>12} {values[1]:>9}  {values[2]:>14} {values[3]:>9}")
    said = [f"\n-: the model before cannot run there: {reason}" for reason in reasons[:1]]
    return "\n".join([*lines, *said, "", calibration_line(results["calibration"])])


def rate_of(results: dict[str, Any]) -> float:
    """Peak of the learning rate, given or found."""
    found = results.get("learning_rates")
    return found["chosen"] if found else results["arguments"]["learning_rate"]


def tried_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Learning rates that were tried: a header and a row for each."""
    said = [
        (f"{each['rate']:g}" + (" (taken)" if each["rate"] == found["chosen"] else ""), f"{each['loss']:.4f}")
        for each in found["tried"]
    ]
    return [("learning rate", f"loss after {found['steps']} steps, on text kept aside"), *said]


def calibration_line(found: dict[str, Any]) -> str:
    """What calibration did, in one line."""
    if found["method"] == "none":
        return f"not calibrated: {found['why']}"
    losses, divergence = found["held_out_loss"], found["divergence"]
    return (
        f"calibrated: attention {divergence['before']:.3f} nats from the base's before, {divergence['after']:.3f} "
        f"after; held-out loss at {losses['length']} tokens: base {losses['base']:.3f}, "
        f"swapped {losses['swapped']:.3f}, calibrated {losses['calibrated']:.3f}" + remarks(found)
    )


def remarks(found: dict[str, Any]) -> str:
    """What a calibration took back, and what would come closer, each sentence after a blank; none of older versions."""
    said = " ".join(each.rstrip(".") + "." for each in found.get("remarks", ()))
    return f". {said}".rstrip(".") if said else ""


SAME = 0.02
"""Perplexities that differ by less than this share of the base's are called the same."""
HOLDS = 0.05
"""And at a longer context it holds if it is no more above that at the base's length than this share of it."""


def verdict(results: dict[str, Any]) -> str:
    """What came of a run, in sentences: sliding-window perplexity, against the base at the length it was trained at.

    Args:
        results: of extend_context.py.
    """
    trained = results["base"]["trained_length"]
    before = {row["length"]: row["sliding"]["perplexity"] for row in results["before"] if "sliding" in row}
    after = {row["length"]: row["sliding"]["perplexity"] for row in results["after"] if "sliding" in row}
    known = max((length for length in before if length <= trained and length in after), default=None)
    longest = max(after)
    if known is None:
        return (
            f"Nothing was measured at {trained} tokens, where the base was trained, or below: there is no base to "
            "compare with."
        )
    base, now, far = before[known], after[known], after[longest]
    said = f"Perplexity at {known} tokens: {base:.2f} before, {now:.2f} after."
    if now > base * (1 + SAME):
        said += " The model got worse than its base there: train it longer, or choose another scheme."
    elif now < base * (1 - SAME):
        said += " The model is better than its base there; some of that is the text it was fine-tuned on."
    else:
        said += " The model is as good as its base there."
    if longest <= known:
        return said
    then = f"the base {before[longest]:.2f}" if longest in before else "and the base cannot run"
    held = known
    for length in sorted(length for length in after if length > known):
        if after[length] > now * (1 + HOLDS):
            return f"{said} It holds to {held} tokens and gets worse beyond: at {longest} it has {far:.2f}, {then}."
        held = length
    return f"{said} It holds to {longest} tokens, where it has {far:.2f}, {then}."


def calibration_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """How far the attention of each layer is from the base's: a header and a row per layer."""
    rows: list[tuple[str, ...]] = [("layer", "as swapped", "closed forms", "at the end", "heads by closed form")]
    for each in found["layers"]:
        chosen = ", ".join(f"{count} {name}" for name, count in each["chosen"].items())
        rows.append((str(each["index"]), *(f"{each[name]:.3f}" for name in ("before", "closed", "after")), chosen))
    return rows


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Rows as Markdown, the first as header."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def perplexity_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A header and a row per length."""
    rows: list[tuple[str, ...]] = [
        ("context", *(f"{name}, {time}" for _, name in METHODS for time in ("before", "after")), "bits per byte, after")
    ]
    for before, after in zip(results["before"], results["after"], strict=True):
        values = [
            f"{row[method]['perplexity']:.3f}" if method in row else "-"
            for method, _ in METHODS
            for row in (before, after)
        ]
        bits = after.get("bits_per_byte")
        rows.append((str(before["length"]), *values, f"{bits:.3f}" if bits is not None else "-"))
    return rows


def cost_rows(results: dict[str, Any]) -> list[tuple[str, str]]:
    """What the run took."""
    training = results["training"]
    return [
        ("cost", ""),
        ("tokens", f"{training['tokens']:,}"),
        ("passes over the text", f"{training['passes_over_the_text']:.2f}"),
        ("tokens per second", f"{training['tokens_per_second']:,.0f}"),
        ("peak memory", f"{training['peak_memory_bytes'] / 2**30:.2f} GiB"),
        *((f"seconds, {name}", f"{value:,.1f}") for name, value in results["seconds"].items()),
    ]


def curves_by_length(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Both perplexities before and after, as curves over length."""
    curves = {
        f"{time}, {name}": [(row["length"], row[method]["perplexity"]) for row in results[time] if method in row]
        for time in ("before", "after")
        for method, name in METHODS
    }
    return {label: points for label, points in curves.items() if points}


def curves_by_position(results: dict[str, Any]) -> dict[str, list[tuple[int, int, float]]]:
    """Loss by position in the longest windows, before and after."""
    return {
        f"{time}, windows of {row['length']}": [
            (part["first"], part["last"], part["loss"]) for part in row["by_position"]
        ]
        for time in ("before", "after")
        for row in [row for row in results[time] if "by_position" in row][-1:]
    }


def accuracy_by_length(cells: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Mean accuracy of the retrieval test by length, shortest first."""
    by_length: dict[int, list[float]] = {}
    for cell in cells:
        by_length.setdefault(cell["length"], []).append(cell["accuracy"])
    return {length: statistics.fmean(values) for length, values in sorted(by_length.items())}
