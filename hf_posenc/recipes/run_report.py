"""Results of a run as tables, sentences and curves, and its report: one HTML file, made from results.json alone."""

import base64
import html
import io
import json
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..analysis import plots
from .results import without_paths, write_text

Rows = list[tuple[str, ...]]
"""Cells of a table, the first row as its header."""
METHODS = (("sliding", "sliding window"), ("non_overlapping", "non-overlapping"))
"""The two perplexities: their names in results, and in words."""
SAME = 0.02
"""Perplexities that differ by less than this share of the base's are called the same."""
HOLDS = 0.05
"""A longer context holds if its perplexity exceeds that at the base's length by at most this share of it."""
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
body { overflow-wrap: anywhere } h1 { line-height: 1.2 }
.table { overflow-x: auto; margin: 1rem 0 } table { border-collapse: collapse; overflow-wrap: normal }
th, td { padding: .2rem .8rem; text-align: right }
th { border-bottom: 1px solid #222 } td:first-child, th:first-child { text-align: left }
details th, details td { overflow-wrap: anywhere } summary { cursor: pointer }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto } pre.wrapped { white-space: pre-wrap }
figure { margin: 1rem 0 } img { max-width: 100% } figcaption { color: #555 }
"""

# -------------------------------------------------------------------------------------------------------------- numbers


def sliding(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Return the sliding-window perplexity by length, where it was measured."""
    return {row["length"]: row["sliding"]["perplexity"] for row in rows if "sliding" in row}


def accuracy_by_length(cells: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Return the mean accuracy of the retrieval test by length, shortest first."""
    by_length: dict[int, list[float]] = {}
    for cell in cells:
        by_length.setdefault(cell["length"], []).append(cell["accuracy"])
    return {length: statistics.fmean(values) for length, values in sorted(by_length.items())}


def rate_of(results: dict[str, Any]) -> float:
    """Return the peak of the learning rate, given or found."""
    source = results.get("learning_rates")
    return float(source["chosen"] if source else results["arguments"]["learning_rate"])


def curves_by_length(results: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return both perplexities before and after, as curves over length."""
    curves = {
        f"{time}, {name}": [(row["length"], row[method]["perplexity"]) for row in results[time] if method in row]
        for time in ("before", "after")
        for method, name in METHODS
    }
    return {label: points for label, points in curves.items() if points}


def curves_by_position(results: dict[str, Any]) -> dict[str, list[tuple[int, int, float]]]:
    """Return the loss by position in the longest windows, before and after."""
    return {
        f"{time}, windows of {row['length']}": [
            (part["first"], part["last"], part["loss"]) for part in row["by_position"]
        ]
        for time in ("before", "after")
        for row in [row for row in results[time] if "by_position" in row][-1:]
    }


# --------------------------------------------------------------------------------------------------------------- tables


def perplexity_rows(results: dict[str, Any]) -> Rows:
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


def tried_rows(search: dict[str, Any]) -> Rows:
    """Return the learning rates that were tried, a row for each."""
    rows: Rows = [("learning rate", f"loss after {search['steps']} steps, on text kept aside")]
    for trial in search["tried"]:
        taken = " (taken)" if trial["rate"] == search["chosen"] else ""
        rows.append((f"{trial['rate']:g}{taken}", f"{trial['loss']:.4f}"))
    return rows


def calibration_rows(calibration: dict[str, Any]) -> Rows:
    """Return the divergence of each layer's attention from the base's, a row per layer."""
    rows: Rows = [("layer", "as swapped", "closed forms", "at the end", "heads by closed form")]
    for layer in calibration["layers"]:
        chosen = ", ".join(f"{count} {name}" for name, count in layer["chosen"].items())
        rows.append((str(layer["index"]), *(f"{layer[name]:.3f}" for name in ("before", "closed", "after")), chosen))
    return rows


def cost_rows(results: dict[str, Any]) -> Rows:
    """Return tokens, speed, memory and seconds of a run."""
    training = results["training"]
    return [
        ("cost", ""),
        ("tokens", f"{training['tokens']:,}"),
        ("passes over the text", f"{training['passes_over_the_text']:.2f}"),
        ("tokens per second", f"{training['tokens_per_second']:,.0f}"),
        ("peak memory", f"{training['peak_memory_bytes'] / 2**30:.2f} GiB"),
        *((f"seconds, {name}", f"{value:,.1f}") for name, value in results["seconds"].items()),
    ]


# ------------------------------------------------------------------------------------------------------------ sentences


def as_text(results: dict[str, Any]) -> str:
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


def calibration_line(calibration: dict[str, Any]) -> str:
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


def verdict(results: dict[str, Any]) -> str:
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


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the report of an extend_context run."""
    write_text(path, page(results))


def page(results: dict[str, Any]) -> str:
    """Return the report as HTML. It names no folder of this machine, because it is shown to others."""
    results = without_paths(results)
    base, tokens = results["base"], results["training"]["tokens"]
    title = html.escape(f"{base['name']} with {results['scheme']['name']}")
    parts = [
        f"<h1>{title}</h1>",
        f"<p>A base of {base['parameters']:,} weights, trained at {base['trained_length']} tokens, fine-tuned on "
        f"{tokens:,} tokens. {html.escape(verdict(results))}</p>",
        *measurement_sections(results),
        *(calibration_section(results["calibration"]) if "calibration" in results else []),
        *training_section(results),
        *configuration_sections(results),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def measurement_sections(results: dict[str, Any]) -> list[str]:
    """Return the sections on perplexity, loss by position and retrieval."""
    trained = results["base"]["trained_length"]
    parts = [
        "<h2>Perplexity by context length</h2>",
        "<p>On held-out documents; lower is better. <em>Sliding window</em> scores every token with nearly the full "
        "context. <em>Non-overlapping</em> cuts the text into fresh windows; it falls with length even when nothing of "
        "the longer context is used, because fewer tokens stand at the beginning of a window. Their difference is that "
        "effect alone. The line to beat is the base at its trained length, "
        f"{trained}.</p>",
        table(perplexity_rows(results)),
        figure(plots.perplexity_by_length(curves_by_length(results), trained_length=trained), "Perplexity by length"),
        "<h2>Loss by position</h2>",
        "<p>Mean loss of the tokens at each place of a fresh window, the longest that was measured. A model that uses "
        "its context goes on falling; one that cannot read it rises.</p>",
        figure(plots.loss_by_position(curves_by_position(results), trained_length=trained), "Loss by position"),
    ]
    if results.get("retrieval_after"):
        parts += [
            "<h2>Retrieval</h2>",
            "<p>A random passage is repeated after a gap; how much of it the model predicts the second time.</p>",
            figure(plots.retrieval_heat_map(results["retrieval_after"]), "Induction copy after fine-tuning"),
        ]
    return parts


def calibration_section(calibration: dict[str, Any]) -> list[str]:
    """Return the section on the calibration."""
    parts = ["<h2>Calibration</h2>", f"<p>{html.escape(calibration_line(calibration))}.</p>"]
    if calibration["method"] == "none":
        return parts
    return [
        *parts,
        "<p>Before the fine-tuning the scheme took over what the base's positions did. By layer: the Kullback-Leibler "
        "divergence of its attention from the base's, in nats per query, the mean over heads on windows that nothing "
        "was fitted to. What is left at the end the scheme could not express.</p>",
        table(calibration_rows(calibration)),
    ]


def training_section(results: dict[str, Any]) -> list[str]:
    """Return the section on the training: its losses and its cost."""
    training = results["training"]
    losses = {"training loss": list(enumerate(training["loss"], start=1))}
    parts = [
        "<h2>Training</h2>",
        figure(plots.loss_curve(losses, xlabel="optimizer step"), "Training loss by step"),
    ]
    if training["curve"]:
        held_out = [(point["tokens"], point["loss"]) for point in training["curve"]]
        parts.append(figure(plots.loss_curve({"held-out loss": held_out}, xlabel="tokens"), "Recovery"))
    if "learning_rates" in results:
        parts.append(table(tried_rows(results["learning_rates"])))
    return [*parts, table(cost_rows(results))]


def configuration_sections(results: dict[str, Any]) -> list[str]:
    """Return the sections on `verify` and on the circumstances of the run."""
    made_with = {key: results[key] for key in ("versions", "hardware", "git")}
    return [
        "<h2>Does every layer answer to its positions?</h2>",
        f"<pre>{html.escape(results.get('verify', 'not patched: a control'))}</pre>",
        "<h2>Configuration</h2>",
        f'<pre class="wrapped">{html.escape(shlex.join(results["command"]))}</pre>',
        "<details><summary>Every option, versions and hardware</summary>",
        table([("option", "value"), *((key, str(value)) for key, value in results["arguments"].items())]),
        f'<pre class="wrapped">{html.escape(json.dumps(made_with, indent=2))}</pre>',
        "</details>",
    ]


def table(rows: Rows) -> str:
    """Return rows as an HTML table."""

    def line(values: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    head, *body = rows
    lines = [line(head, "th"), *(line(row, "td") for row in body)]
    return "\n".join(['<div class="table"><table>', *lines, "</table></div>"])


def figure(drawn: Any, caption: str) -> str:
    """Return a matplotlib figure as a picture inside the page."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    caption = html.escape(caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )
