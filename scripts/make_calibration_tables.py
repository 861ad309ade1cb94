#!/usr/bin/env python3
"""Writes tables from docs/measured. Those of docs/calibrate_measured.md: calibration_*.json, which measure_calibration.py
makes, check_*.json, which check_calibration.py makes, fine_tuning_*.json, which measure_fine_tuning.py makes, and
mixtures_*.json, which measure_mixtures.py makes. Those of docs/recall_measured.md: recall_*.json, which
measure_recall.py makes. That of docs/theory_measured.md: training.json, which measure_training.py makes. That of
docs/measuring.md: far_text_stories260K.json, which measure_far_text.py makes.

python scripts/make_calibration_tables.py            # write them
python scripts/make_calibration_tables.py --check    # exit 1 if they are not what was measured
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import marked

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/calibrate_measured.md"
OTHER_PAGES = {
    "recall": ROOT / "docs/recall_measured.md",
    "training": ROOT / "docs/theory_measured.md",
    "far": ROOT / "docs/measuring.md",
}
"""First word of the name of a table -> its page; the others are on `PAGE`."""
BASES = ("stories260K", "stories260K_few", "bitllama2-3M", "embedded_gpt2", "craftgpt-5M")
STARTS = {
    "plain": "plain swap",
    "closed_form": "closed forms",
    "attention": "attention matched",
    "outputs": "outputs matched",
}
CHECKED = ("embedded", "craftgpt-5M", "stories260K", "bitllama2-3M")
TUNED = ("stories260K", "bitllama2-3M", "embedded_gpt2", "craftgpt-5M")
MIXED = ("stories260K", "embedded")
RECALLED = ("rotating", "table")
RECALL_STARTS = {
    "attention": "attention matched",
    "unlabelled": "calibrated without labels",
    "scratch": "from scratch",
}
"""Start -> what the tables of recall call it; the others by their names."""
CONDITIONS = ("1x", "distance 8x", "distance 16x", "items 4x")
"""Columns of the tables of recall."""
SCHEMES = {"mixture": "`t5` in every other layer", "nope": "no positions"}
UNTRAINED = ("window", "far_rope")
"""Rows of README's table. They were neither calibrated nor fine-tuned."""


def cell(found: list[Any], digits: int = 3) -> str:
    """The mean over seeds, or nothing where nothing was measured."""
    return "" if not found or None in found else f"{mean(found):.{digits}f}"


def row(title: str, runs: list[dict[str, Any]], columns: list[tuple[str, str | None]]) -> str:
    """A row of what was measured in the same way with several seeds.

    Args:
        title: its first cell.
        runs: one for each seed.
        columns: length, and tokens of fine-tuning, or None for before it.
    """
    cells = [
        title,
        str(len(runs)),
        cell([each for run in runs for each in run.get("calibration", {}).get("divergence", ())]),
    ]
    for length, tokens in columns:
        after = [run["before"] if tokens is None else run.get("after", {}).get(tokens, {}) for run in runs]
        cells.append(cell([each[length] for each in after if length in each]))
    return f"| {' | '.join(cells)} |"


def table(name: str) -> str:
    """The table of one base."""
    measured = json.loads((ROOT / f"docs/measured/calibration_{name}.json").read_text(encoding="utf-8"))
    runs, settings = measured["runs"], measured["settings"]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, run in runs.items():
        if not key.startswith(UNTRAINED):
            groups.setdefault(tuple(key.split(", ")[:-1]), []).append(run)
    first, last = str(settings["tokens"][0]), str(settings["tokens"][-1])
    lengths = [str(length) for length in settings["lengths"]]
    columns = [(lengths[0], tokens) for tokens in dict.fromkeys((None, first, last))]
    columns += [(length, tokens) for length in lengths[1:] for tokens in (None, last)]
    head = ["", "seeds", "KL"]
    for length, tokens in columns:
        when = "before" if tokens is None else f"after {int(tokens):,}"
        head.append(f"at {int(length):,} {when}")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), row("the base", groups.pop(("control",)), columns)]

    def reached(scheme: str) -> float:
        best = next(groups[scheme, start] for start in reversed(STARTS) if (scheme, start) in groups)
        return mean(run["after"][last][lengths[0]] for run in best)

    for scheme in sorted({scheme for scheme, _ in groups}, key=reached):
        for start in STARTS:
            if (scheme, start) in groups:
                title = f"{SCHEMES.get(scheme, f'`{scheme}`')}, {STARTS[start]}"
                lines.append(row(title, groups[scheme, start], columns))
    return "\n".join(lines)


def checked() -> str:
    """The table of all schemes on all bases: the held-out loss of the plain swap and of the calibrated model."""
    found = {name: json.loads((ROOT / f"docs/measured/check_{name}.json").read_text("utf-8")) for name in CHECKED}
    lines = [f"| scheme | {' | '.join(CHECKED)} |", "|" + "---|" * (1 + len(CHECKED))]
    bases = [next(iter(each["rows"].values()))["held_out"]["base"] for each in found.values()]
    lines.append(f"| the base | {' | '.join(f'{loss:.2f}' for loss in bases)} |")
    for scheme in found[CHECKED[0]]["rows"]:
        cells = []
        for each in found.values():
            row = each["rows"][scheme]
            losses, kept = row["held_out"], row["kept"].replace("_", " ")
            cells.append(f"{losses['swapped']:.2f} to {losses['calibrated']:.2f}, {kept}")
        lines.append(f"| {scheme} | {' | '.join(cells)} |")
    return "\n".join(lines)


def losses_matched() -> str:
    """The table of what the second stage lowered: held-out losses after matching attention, and after outputs."""
    found = {}
    for name in CHECKED:
        paths = [ROOT / f"docs/measured/check_{name}{end}.json" for end in ("_attention", "")]
        found[name] = [json.loads(path.read_text("utf-8"))["rows"] for path in paths]
    lines = [f"| scheme | {' | '.join(CHECKED)} |", "|" + "---|" * (1 + len(CHECKED))]
    for scheme in found[CHECKED[0]][0]:
        cells = []
        for attention, outputs in found.values():
            one, other = attention.get(scheme), outputs.get(scheme)
            both = one and other and other["kept"] == "outputs"
            cells.append(f"{one['held_out']['calibrated']:.2f}, {other['held_out']['calibrated']:.2f}" if both else "")
        if any(cells):
            lines.append(f"| {scheme} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tuned(name: str) -> str:
    """The table of fine-tuning on one base: means over the seeds, and the difference to the same control."""
    measured = json.loads((ROOT / f"docs/measured/fine_tuning_{name}.json").read_text(encoding="utf-8"))
    first, *beyond = map(str, measured["settings"]["lengths"])
    tokens = [str(count) for count in measured["settings"]["tokens"]]
    columns = [(first, None), *((first, count) for count in tokens), *((length, tokens[-1]) for length in beyond)]
    head = ["", "seeds", "rate"]
    for length, count in columns:
        head.append(f"at {int(length):,} {'before' if count is None else f'after {int(count):,}'}")
    lines = [f"| {' | '.join([*head, 'to the control'])} |", "|" + "---|" * (len(head) + 1)]
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, run in measured["runs"].items():
        scheme, target, seed = key.split(", ")
        groups.setdefault((scheme, target), {})[seed] = run
    schemes, ways = (list(dict.fromkeys(names)) for names in zip(*groups, strict=True))
    for (scheme, target), runs in sorted(groups.items(), key=lambda g: (schemes.index(g[0][0]), ways.index(g[0][1]))):
        title = f"{'the base' if scheme == 'control' else f'`{scheme}`'}, {target}"
        cells = [
            title,
            str(len(runs)),
            ", ".join(f"{rate:g}" for rate in sorted({run["rate"] for run in runs.values()})),
        ]
        for length, count in columns:
            losses = [run["before"] if count is None else run["after"][count] for run in runs.values()]
            cells.append(cell([each[length] for each in losses]))
        control = [run["after"][tokens[-1]][first] for run in groups["control", "text"].values()]
        apart = mean(run["after"][tokens[-1]][first] for run in runs.values()) - mean(control)
        lines.append(f"| {' | '.join([*cells, '' if scheme == 'control' else f'{apart:+.3f}'])} |")
    return "\n".join(lines)


def mixtures(name: str) -> str:
    """The table of mixtures on one base: means and standard deviations over the seeds, and paired differences."""
    measured = json.loads((ROOT / f"docs/measured/mixtures_{name}.json").read_text(encoding="utf-8"))
    seeds, tokens = measured["settings"]["seeds"], measured["settings"]["tokens"]
    lengths = list(next(iter(measured["runs"].values()))["before"])
    head = [f"at {int(n):,} {when}" for n in lengths for when in ("before", f"after {tokens:,}")]
    head = ["", *head, f"difference at {int(lengths[-1]):,}, after"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for variant in dict.fromkeys(key.rpartition(", seed ")[0] for key in measured["runs"]):
        runs = [measured["runs"].get(f"{variant}, seed {seed}") for seed in seeds]
        if None in runs:
            continue  # not all seeds yet
        cells = [f"`{variant}`" if variant != "base" else "the base"]
        for length in lengths:
            for when in ("before", "after"):
                losses = [run[when][length] for run in runs if run is not None]
                cells.append("" if None in losses else f"{mean(losses):.3f} ± {stdev(losses):.3f}")
        apart = []
        for pair, found in measured["differences"].items():
            one, _, other = pair.partition(" less ")
            if one == variant and (less := found.get(f"after, {lengths[-1]}")) is not None:
                apart.append(f"{less['mean']:+.3f} ± {less['deviation']:.3f} to {other}")
        lines.append(f"| {' | '.join([*cells, '; '.join(apart)])} |")
    return "\n".join(lines)


def recall(kind: str) -> str:
    """The table of recall on one base: medians over the seeds, and differences to the base, which are paired by seed."""
    measured = json.loads((ROOT / f"docs/measured/recall_{kind}.json").read_text(encoding="utf-8"))
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for key, run in measured["runs"].items():
        name, _, seed = key.rpartition(", seed ")
        groups.setdefault(name, {})[seed] = run
    head = ["", "seeds", "1x, before", *(f"{name}, after" for name in CONDITIONS)]
    head += ["to the base at 1x, after", "solved", "text before", "text after"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, runs in groups.items():
        summary = measured["summary"][name]
        before, after = summary["before"], summary.get("after", {})
        variant, _, start = name.rpartition(", ")
        if start == "scratch":  # trained as the base was, and not fine-tuned
            before, after = {}, before
            runs = {seed: {"after": run["before"]} for seed, run in runs.items()}
        start = RECALL_STARTS.get(start, start)
        cells = ["the base" if variant == "base" else f"`{variant}`, {start}", str(len(runs))]
        cells += [percent(before.get("1x")), *(percent(after.get(condition)) for condition in CONDITIONS)]
        cells.append("" if variant == "base" else to_base(runs, groups["base, plain"]))
        cells += [
            f"{after['solved']:.0%}" if after else "",
            *(cell([s["text_loss"]] if s else []) for s in (before, after)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def training() -> str:
    """The table of small models that were trained from scratch: means over the seeds, and their ranges."""
    runs = json.loads((ROOT / "docs/measured/training.json").read_text(encoding="utf-8"))["runs"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for key, run in runs.items():
        groups.setdefault(key.rpartition(", seed ")[0], []).append(run)
    distance = "mean distance of attention, in bytes: nearest, median, farthest of 16 heads"
    head = ["variant", "seeds", "loss at 128", "loss at 512", distance]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, each in groups.items():
        cells = [name, str(len(each))]
        for length in ("128", "512"):
            losses = [run["loss"][length] for run in each if length in run["loss"]]
            spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
            cells.append(f"{mean(losses):.3f}{spread}" if losses else "")
        distances = [mean(run["mean_distance_of_heads"][part] for run in each) for part in ("least", "median", "most")]
        cells.append(", ".join(f"{distance:.0f}" for distance in distances))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def far_text() -> str:
    """The table of repeat gain of stories260K and its calibrated swap."""
    found = json.loads((ROOT / "docs/measured/far_text_stories260K.json").read_text(encoding="utf-8"))["found"]
    base, swapped = (found[name]["repeat_gain"] for name in ("base", "transformer_xl"))
    head = "| distance | rope (stock): second copy | in place | `transformer_xl`: second copy | in place |"
    lines = [head, "|---|---|---|---|---|"]
    for one, other in zip(base, swapped, strict=True):
        cells = [f"{one['distance']:,}"]
        for row in (one, other):
            cells += [f"{row['second']:.3f}", f"{row['gain_in_place']:.3f} ± {row['gain_in_place_error']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(share: float | None) -> str:
    """A share in percent, or nothing where nothing was measured."""
    return "" if share is None else f"{100 * share:.1f}"


def to_base(runs: dict[str, Any], base: dict[str, Any]) -> str:
    """The mean difference of recall at the trained length after fine-tuning, and twice its standard error."""
    apart = [
        100 * (mean(run["after"]["recall"]["1x"].values()) - mean(base[seed]["after"]["recall"]["1x"].values()))
        for seed, run in runs.items()
        if "after" in run and seed in base
    ]
    if len(apart) < 2:
        return "".join(f"{each:+.1f}" for each in apart)
    return f"{mean(apart):+.1f} ± {2 * stdev(apart) / len(apart) ** 0.5:.1f}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is out of date")
    check, current = parser.parse_args().check, True
    parts = {"checked": checked(), "matched": losses_matched()} | {name: table(name) for name in BASES}
    parts |= {f"tuned {name}": tuned(name) for name in TUNED}
    parts |= {f"mixtures {name}": mixtures(name) for name in MIXED}
    for kind in RECALLED:
        parts[f"recall {kind}"] = recall(kind)
    parts["training"] = training()
    parts["far text"] = far_text()
    for name, part in parts.items():
        begin = f"<!-- calibration {name}: written by scripts/make_calibration_tables.py -->"
        page = OTHER_PAGES.get(name.partition(" ")[0], PAGE)
        current &= marked.write(page, begin, f"<!-- end of {name} -->", part, check=check)
    if check and not current:
        print("docs: tables are out of date; run python scripts/make_calibration_tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
