"""The report of a run, made from its results alone: one HTML file with everything in it."""

import base64
import html
import io
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..analysis import plots
from .results import without_paths, write_text
from .tables import (
    calibration_line,
    calibration_rows,
    cost_rows,
    curves_by_length,
    curves_by_position,
    perplexity_rows,
    tried_rows,
)

MADE_WITH = ("versions", "hardware", "git")
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


def write(path: Path, results: dict[str, Any]) -> None:
    """Writes the report of an extend_context run, whole or not at all."""
    write_text(path, page(results))


def page(results: dict[str, Any]) -> str:
    """The report as HTML."""
    results = without_paths(results)  # a report is shown to others
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
    if "calibration" in results:
        parts += calibration(results["calibration"])
    curve = [(index + 1, loss) for index, loss in enumerate(training["loss"])]
    parts += [
        "<h2>Training</h2>",
        figure(plots.loss_curve({"training loss": curve}, xlabel="optimizer step"), "Training loss by step"),
    ]
    if training["curve"]:
        held_out = [(point["tokens"], point["loss"]) for point in training["curve"]]
        parts.append(figure(plots.loss_curve({"held-out loss": held_out}, xlabel="tokens"), "Recovery"))
    if "learning_rates" in results:
        parts.append(cells(tried_rows(results["learning_rates"])))
    made_with = {key: results[key] for key in MADE_WITH}
    parts += [
        cells(cost_rows(results)),
        "<h2>Does every layer answer to its positions?</h2>",
        f"<pre>{html.escape(results.get('verify', 'not patched: a control'))}</pre>",
        "<h2>Configuration</h2>",
        f'<pre class="wrapped">{html.escape(shlex.join(results["command"]))}</pre>',
        "<details><summary>Every option, versions and hardware</summary>",
        cells([("option", "value"), *((key, str(value)) for key, value in results["arguments"].items())]),
        f'<pre class="wrapped">{html.escape(json.dumps(made_with, indent=2))}</pre>',
        "</details>",
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def calibration(found: dict[str, Any]) -> list[str]:
    """What was done between the swap and the fine-tuning."""
    parts = ["<h2>Calibration</h2>", f"<p>{html.escape(calibration_line(found))}.</p>"]
    if found["method"] == "none":
        return parts
    return [
        *parts,
        "<p>Before the fine-tuning the scheme took over what the base's positions did. By layer: the Kullback-Leibler "
        "divergence of its attention from the base's, in nats per query, the mean over heads on windows that nothing "
        "was fitted to. What is left at the end the scheme could not express.</p>",
        cells(calibration_rows(found)),
    ]


def summary(results: dict[str, Any]) -> str:
    """The result in two sentences that hold whichever way it turned out."""
    base, scheme = results["base"], results["scheme"]
    line = (
        f"{base['name']} ({base['parameters']:,} weights, trained at {base['trained_length']} tokens) "
        f"with {scheme['name']}"
        f", fine-tuned on {results['training']['tokens']:,} tokens. "
    )
    before = {row["length"]: row for row in results["before"]}.get(base["trained_length"], {})
    after = [row for row in results["after"] if "sliding" in row]
    if "sliding" not in before or not after:
        return line + "The base was not measured at its trained length: there is no line to compare with."
    reference = before["sliding"]["perplexity"]
    reached = [row["length"] for row in after if row["sliding"]["perplexity"] <= reference]
    return line + (
        f"Sliding-window perplexity of the base at {base['trained_length']}: {reference:.3f}; the result is at or "
        "below "
        + (f"that at {', '.join(map(str, reached))} tokens." if reached else "that at no length that was measured.")
    )


def cells(rows: Iterable[Sequence[str]]) -> str:
    """An HTML table, its first row as header."""
    head, *body = rows

    def line(values: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values) + "</tr>"

    return "\n".join(
        ['<div class="table"><table>', line(head, "th"), *(line(row, "td") for row in body), "</table></div>"]
    )


def figure(drawn: Any, caption: str) -> str:
    """A picture inside the page."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    caption = html.escape(caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )
