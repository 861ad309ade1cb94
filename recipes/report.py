"""The report of a run, made from its results.json alone: one HTML file with everything in it, and a table as text.

python recipes/report.py runs/gpt2-alibi/results.json      # writes report.html beside it
"""

import base64
import html
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.analysis import plots

METHODS = (("sliding", "sliding window"), ("non_overlapping", "non-overlapping"))

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .2rem .8rem; text-align: right }
th { border-bottom: 1px solid #222 } td:first-child, th:first-child { text-align: left }
pre { background: #f4f4f4; padding: .8rem; overflow-x: auto } img { max-width: 100% } figcaption { color: #555 }
"""


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes the report of an extend_context run, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(page(results), encoding="utf-8")
    os.replace(partial, path)


def page(results: dict[str, Any]) -> str:
    """The report as HTML."""
    base, scheme, training = results["base"], results["scheme"], results["training"]
    trained = base["trained_length"]
    title = f"{base['name']} with {scheme['name']}"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(summary(results))}</p>",
        "<h2>Perplexity by context length</h2>",
        "<p>On held-out documents; lower is better. <em>Sliding window</em> scores every token with nearly the full "
        "context. <em>Non-overlapping</em> cuts the text into fresh windows; it falls with length even when nothing of "
        "the longer context is used, because fewer tokens stand at the beginning of a window. Their difference is that "
        "effect alone. The line to beat is the base at its trained length, "
        f"{trained}.</p>",
        cells(perplexity_rows(results)),
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
    curve = [(index + 1, loss) for index, loss in enumerate(training["loss"])]
    parts += [
        "<h2>Training</h2>",
        figure(plots.loss_curve({"training loss": curve}, xlabel="optimizer step"), "Training loss by step"),
    ]
    if training["curve"]:
        held_out = [(point["tokens"], point["loss"]) for point in training["curve"]]
        parts.append(figure(plots.loss_curve({"held-out loss": held_out}, xlabel="tokens"), "Recovery"))
    parts += [
        cells(cost_rows(results)),
        "<h2>Does every layer answer to its positions?</h2>",
        f"<pre>{html.escape(results.get('verify', 'not patched: a control'))}</pre>",
        "<h2>Configuration</h2>",
        f"<pre>{html.escape(' '.join(results['command']))}</pre>",
        cells([("option", "value"), *((key, str(value)) for key, value in results["arguments"].items())]),
        f"<pre>{html.escape(json.dumps({key: results[key] for key in ('versions', 'hardware', 'git')}, indent=2))}</pre>",
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def summary(results: dict[str, Any]) -> str:
    """The result in two sentences that hold whichever way it turned out."""
    base, scheme = results["base"], results["scheme"]
    line = (
        f"{base['name']} ({base['parameters']:,} weights, trained at {base['trained_length']} tokens) with {scheme['name']}"
        f", fine-tuned on {results['training']['tokens']:,} tokens. "
    )
    before = {row["length"]: row for row in results["before"]}.get(base["trained_length"], {})
    after = [row for row in results["after"] if "sliding" in row]
    if "sliding" not in before or not after:
        return line + "The base was not measured at its trained length: there is no line to compare with."
    reference = before["sliding"]["perplexity"]
    reached = [row["length"] for row in after if row["sliding"]["perplexity"] <= reference]
    return line + (
        f"Sliding-window perplexity of the base at {base['trained_length']}: {reference:.3f}; the result is at or below "
        + (f"that at {', '.join(map(str, reached))} tokens." if reached else "that at no length that was measured.")
    )


def table(results: dict[str, Any]) -> str:
    """Lengths x before and after, both perplexities; lower is better."""
    lines = [
        "held-out perplexity     sliding window          non-overlapping",
        f"{'context':>10}  {'before':>12} {'after':>9}  {'before':>14} {'after':>9}",
    ]
    reasons = [row["impossible"] for row in results["before"] if "impossible" in row]
    for length, *values in perplexity_rows(results)[1:]:
        lines.append(f"{length:>10}  {values[0]:>12} {values[1]:>9}  {values[2]:>14} {values[3]:>9}")
    return "\n".join([*lines, *(f"\n-: the model before cannot run there: {reason}" for reason in reasons[:1])])


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


def cells(rows: Iterable[Sequence[str]]) -> str:
    """An HTML table, its first row as header."""
    head, *body = rows

    def line(values: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in body), "</table>"])


def figure(drawn: Any, caption: str) -> str:
    """A picture inside the page."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    caption = html.escape(caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        source = Path(name)
        write(source.with_name("report.html"), json.loads(source.read_text(encoding="utf-8")))
        print(source.with_name("report.html"))
