"""Curves of the results page, as SVG: one small picture for each method, with its starts and the control."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from markupsafe import Markup
from measured import CONTROL, Measurement, loss_by_length, loss_by_tokens

STYLES = {
    CONTROL: ("#555", "", 1.5),
    "plain": ("#d55e00", "7 4", 2),
    "closed_form": ("#009e73", "2 3", 2.5),
    "attention": ("#56b4e9", "8 2 2 2", 2.5),
    "outputs": ("#0072b2", "", 2.5),
    "unlabelled": ("#e69f00", "4 2", 2),
    "scratch": ("#cc79a7", "9 3 2 3", 2),
}
"""Start -> colour, dashes and width of its line. Colours of Okabe and Ito; the dashes tell the lines apart in grey."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 280, 170, 40, 12, 8, 24
"""Of a picture and its margins, in pixels."""
Losses = Mapping[int, list[float]]


def curves(measured: Measurement, starts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the charts of a measurement: loss by tokens where there are several numbers of tokens, loss by length."""
    methods: dict[str, list[str]] = {}
    for (method, start, _), run in measured.runs.items():
        if start != CONTROL and run.get("after") and start not in methods.setdefault(method, []):
            methods[method].append(start)

    def chart(title: str, losses: Callable[[str, str], Losses], place: Callable[[int], float]) -> dict[str, Any]:
        control = losses("base", CONTROL)
        panels = []
        for method, found in methods.items():
            lines = {CONTROL: control} | {start: losses(method, start) for start in starts if start in found}
            panels.append({"method": method, "svg": picture(lines, place, f"{title}: {method}")})
        return {"title": title, "panels": panels}

    charts = []
    if any(len(run.get("after", ())) > 1 for run in measured.runs.values()):
        charts.append(
            chart(
                f"Loss at {measured.trained:,} tokens against the tokens read, those of calibration included",
                lambda method, start: loss_by_tokens(measured.of(method, start).values(), measured.trained),
                float,
            )
        )
    if methods and len(measured.lengths) > 1:
        charts.append(
            chart(
                "Loss after fine-tuning against the length",
                lambda method, start: loss_by_length(measured.of(method, start).values(), tuned=True),
                math.log2,
            )
        )
    return charts


def ticks(low: float, high: float) -> list[float]:
    """Return three to eight round numbers between two."""
    step = 10.0 ** math.floor(math.log10(high - low))
    step *= next(factor for factor in (1, 0.5, 0.2, 0.1) if (high - low) / (step * factor) >= 3)
    return [round(step * n, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def picture(lines: Mapping[str, Losses], place: Callable[[int], float], title: str) -> Markup:
    """Return the means of the seeds as lines, and from the lowest to the highest seed as bands.

    Args:
        lines: start -> number (tokens, or a length) -> losses of the seeds.
        place: number -> where it stands.
        title: what a screen reader says.
    """
    numbers = sorted({n for losses in lines.values() for n in losses})
    every = [loss for losses in lines.values() for values in losses.values() for loss in values]
    low, high = min(every), max(every)
    margin = max(0.01, 0.06 * (high - low))
    low, high = low - margin, high + margin
    first, last = place(numbers[0]), place(numbers[-1])

    def x(number: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (place(number) - first) / (last - first), 1)

    def y(loss: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{{}}</title>']
    for tick in ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y(tick) + 4:g}" text-anchor="end">{tick:g}</text>')
    shown = numbers if place is math.log2 else [int(tick) for tick in ticks(0, last)]
    for number in shown:
        label = f"{number:,}" if place is math.log2 else f"{number // 1000}k" if number else "0"
        end = "end" if x(number) > WIDTH - 30 else "middle"
        parts.append(f'<text x="{x(number):g}" y="{HEIGHT - 7}" text-anchor="{end}">{label}</text>')
    for start, losses in lines.items():
        parts += line(start, {x(n): values for n, values in sorted(losses.items())}, y)
    return Markup("".join([*parts, "</svg>"])).format(title)


def line(start: str, points: Mapping[float, list[float]], y: Callable[[float], float]) -> list[str]:
    """Return the band and the line of one start; the page's styles have their colours."""
    parts = []
    if any(len(values) > 1 for values in points.values()):
        edge = [(x, max(values)) for x, values in points.items()]
        edge += [(x, min(values)) for x, values in reversed(points.items())]
        parts.append(f'<polygon class="{start}" points="{" ".join(f"{x:g},{y(loss):g}" for x, loss in edge)}"/>')
    means = [(x, y(fmean(values))) for x, values in points.items()]
    parts.append(f'<polyline class="{start}" points="{" ".join(f"{x:g},{height:g}" for x, height in means)}"/>')
    parts += [f'<circle class="{start}" cx="{x:g}" cy="{height:g}" r="2.5"/>' for x, height in means]
    return parts
