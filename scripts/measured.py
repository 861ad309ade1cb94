"""What the measuring scripts left in docs/measured: one way to read it, for README, the pictures and the results page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from make_recall_bases import LENGTH as RECALL_LENGTH

FOLDER = Path(__file__).parents[1] / "docs/measured"
SWAPS = "calibration_stories260K.json"
"""What README shows. calibration_stories260K_yarn.json joins it: YaRN, fine-tuned at the rate of calibrated starts."""
CONTROL = "control"
"""Start of a base that is fine-tuned and nothing else."""
KINDS = ("calibration", "mixtures", "far_rope", "recall")
"""The measuring scripts whose results are read, and how the names of their files begin."""
BASES = {
    ("calibration", "embedded"): "GPT-2 of the recipes",
    ("mixtures", "embedded"): "GPT-2 of the package",
    ("recall", "rotating"): "recall base that rotates",
    ("recall", "table"): "recall base with a table",
}
"""Kind, and what the file calls its base -> what it is called where several are shown; other bases keep their names."""


@dataclass(frozen=True)
class Measurement:
    """Runs on one base and one text, which can be compared with one another.

    Attributes:
        kind: one of `KINDS`.
        files: names of the files that the runs are in.
        base: name of the base.
        trained: its trained length, in tokens.
        settings: of the first file.
        runs: variant, start and seed -> what was measured, in one form for all kinds: `before`, length -> loss; `after`,
            tokens of fine-tuning -> length -> loss, only if there was any; `settings` of its file; and perhaps
            `calibration`, with `seconds` and perhaps `tokens`, and `scheme`. Losses are in nats, None where the model
            cannot read so many tokens.
        recall: variant and start -> condition -> share of right answers, as `summary` of measure_recall.py has it.
    """

    kind: str
    files: tuple[str, ...]
    base: str
    trained: int
    settings: Mapping[str, Any]
    runs: Mapping[tuple[str, str, int], dict[str, Any]]
    recall: Mapping[tuple[str, str], dict[str, float | None]]

    @property
    def lengths(self) -> list[int]:
        """Lengths at which something was measured."""
        return sorted({int(length) for run in self.runs.values() for length in run["before"]})

    def of(self, method: str, start: str) -> dict[int, dict[str, Any]]:
        """Return seed -> run of a variant with a start."""
        return {key[2]: self.runs[key] for key in sorted(self.runs) if key[:2] == (method, start)}

    @property
    def control(self) -> dict[int, dict[str, Any]]:
        """Seed -> run of the base."""
        return self.of("base", CONTROL)


def loss_by_length(runs: Iterable[Mapping[str, Any]], *, tuned: bool) -> dict[int, list[float]]:
    """Return length -> losses of all runs, before or after all of their fine-tuning; without lengths that none can read."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if tuned and not run.get("after"):
            continue
        losses = run["after"][max(run["after"], key=int)] if tuned else run["before"]
        for length, value in losses.items():
            if value is not None:
                found.setdefault(int(length), []).append(value)
    return found


def loss_by_tokens(runs: Iterable[Mapping[str, Any]], length: int) -> dict[int, list[float]]:
    """Return tokens that were read, those of the calibration included -> losses of all runs that were fine-tuned."""
    found: dict[int, list[float]] = {}
    for run in runs:
        begun = run.get("calibration", {}).get("tokens", 0)
        for tokens, losses in {"0": run["before"], **run["after"]}.items() if run.get("after") else ():
            if losses[str(length)] is not None:
                found.setdefault(begun + int(tokens), []).append(losses[str(length)])
    return found


def measurements(folder: Path = FOLDER) -> list[Measurement]:
    """Return all measurements with fine-tuning, those of the same base together, the largest first."""
    found: list[Measurement] = []
    for kind in KINDS:
        files = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"{kind}_*.json")}
        for name in sorted(files, key=lambda name: (-len(runs_in(kind, files[name])), name)):
            if (each := read(kind, name, files[name])).runs:
                _join(found, each)
    order: dict[str, int] = {}
    for each in found:
        order[each.base] = order.get(each.base, 0) + len(each.runs)
    return sorted(found, key=lambda each: (-order[each.base], each.base, KINDS.index(each.kind)))


def measurement(file: str, folder: Path = FOLDER) -> Measurement:
    """Return the measurement that a file belongs to."""
    return next(each for each in measurements(folder) if file in each.files)


def _join(found: list[Measurement], new: Measurement) -> None:
    """Add a measurement; one without a control of its own to the runs that it differs from in nothing but the rate."""

    def protocol(each: Measurement) -> dict[str, Any]:
        return {key: value for key, value in each.settings.items() if key != "plain_rate"} | {"kind": each.kind}

    for place, each in enumerate(found):
        if not any(start == CONTROL for _, start, _ in new.runs) and protocol(each) == protocol(new):
            files, runs = each.files + new.files, {**each.runs, **new.runs}
            found[place] = Measurement(each.kind, files, each.base, each.trained, each.settings, runs, each.recall)
            return
    found.append(new)


def runs_in(kind: str, results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the runs of a file as it has them; far_rope_*.json calls them `fine_tuned`."""
    return results.get("fine_tuned", {}) if kind == "far_rope" else results["runs"]


def read(kind: str, name: str, results: Mapping[str, Any]) -> Measurement:
    """Return what one file has, with runs in one form."""
    settings = results.get("settings") or {
        "checkpoint": results["checkpoint"],
        "held_out_tokens": results["tokens"],
        "multiples": sorted({int(n) for row in results["rows"].values() for n in row}),
        **results.get("fine_tuning", {}),
    }
    trained = trained_length(kind, results)
    runs = {}
    for key, run in runs_in(kind, results).items():
        variant, _, seed = key.rpartition(", seed ")
        method, start, form = FORMS[kind](variant, run, results, trained)
        runs[method, start, int(seed)] = form | {"settings": settings}
    base = settings["kind"] if kind == "recall" else settings["checkpoint"]
    recall = {}
    for variant, states in results.get("summary", {}).items():
        method, start, _ = _recall(variant, {"before": {"text_loss": None}}, results, trained)
        recall[method, start] = states.get("after", states["before"])
    return Measurement(kind, (name,), BASES.get((kind, base), base), trained, settings, runs, recall)


def trained_length(kind: str, results: Mapping[str, Any]) -> int:
    """Return the trained length of a file's base; a calibration measures it first, whatever it fine-tunes at."""
    if kind == "calibration":
        return results["settings"]["lengths"][0]
    if kind == "mixtures":
        return results["settings"]["length"]
    return results["trained"] if kind == "far_rope" else RECALL_LENGTH


def _calibration(variant: str, run: Mapping[str, Any], results: Any, trained: int) -> tuple[str, str, dict[str, Any]]:
    method, _, start = variant.rpartition(", ")
    return ("base", CONTROL, dict(run)) if variant == CONTROL else (method, start, dict(run))


def _mixtures(variant: str, run: Mapping[str, Any], results: Any, trained: int) -> tuple[str, str, dict[str, Any]]:
    form = {"before": run["before"], "after": {str(results["settings"]["tokens"]): run["after"]}}
    form |= {"scheme": run["scheme"]}
    if run["kept"] is None:
        return variant, CONTROL if variant == "base" else "plain", form
    return variant, "attention", form | {"calibration": {"seconds": run["cpu_seconds_of_calibration"]}}


def _far_rope(variant: str, run: Mapping[str, Any], results: Any, trained: int) -> tuple[str, str, dict[str, Any]]:
    """Before fine-tuning YaRN has another factor at each multiple, and none is the model that was fine-tuned."""

    def by_length(row: Mapping[str, Any]) -> dict[str, float]:
        return {str(int(multiple) * trained): losses["fresh"] for multiple, losses in row.items()}

    before = by_length(results["rows"].get(variant, {}))
    after = by_length(run)
    if variant == "yarn" or not before:
        before = dict.fromkeys(after)
    form = {"before": before, "after": {str(results["fine_tuning"]["tokens"]): after}}
    return variant, CONTROL if variant == "base" else "plain", form


def _recall(variant: str, run: Mapping[str, Any], results: Any, trained: int) -> tuple[str, str, dict[str, Any]]:
    method, _, start = variant.rpartition(", ")
    form: dict[str, Any] = {"before": {str(trained): run["before"]["text_loss"]}}
    if "after" in run:
        form["after"] = {str(results["settings"]["tokens"]): {str(trained): run["after"]["text_loss"]}}
    if start == "calibrated":
        start = "outputs"
    return method, CONTROL if (method, start) == ("base", "plain") else start, form


FORMS = {"calibration": _calibration, "mixtures": _mixtures, "far_rope": _far_rope, "recall": _recall}
