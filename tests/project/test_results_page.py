"""docs/leaderboard.html says what docs/measured has, needs nothing else, and its commands are understood."""

import argparse
import html
import json
import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from statistics import mean, median, stdev

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/leaderboard.html").read_text(encoding="utf-8")


@pytest.fixture
def pages(monkeypatch):
    """scripts/make_results_page.py"""
    pytest.importorskip("jinja2", reason="pip install jinja2 runs this")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_results_page

    return make_results_page


def measured(name):
    return json.loads((ROOT / f"docs/measured/{name}.json").read_text(encoding="utf-8"))


def cells(section, method, start):
    """What a row of the page shows, without the command."""
    part = PAGE.split(f'id="{section}"')[1].split("</section>")[0]
    row = re.search(rf'<tr data-start="{start}" data-method="{re.escape(method)}">(.*?)</tr>', part, re.DOTALL)[1]
    found = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
    return [re.sub(r"<[^>]+>", " ", cell).strip() for cell in found[1:]]


def shown(values, form=".3f"):
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return f"{mean(values):{form}}" + (f" {low} to {high}" if min(values) != max(values) else "")


def test_it_is_current_and_loads_nothing(pages, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_results_page.py", "--check"])
    assert pages.main() == 0, "run python scripts/make_results_page.py"
    monkeypatch.setattr(pages, "PAGE", ROOT / "docs/results.md")
    assert pages.main() == 1
    assert re.findall(r"\bsrc\s*=|<link|@import|url\(|https?:|fetch\(", PAGE) == []


def test_a_row_of_a_calibration_is_what_was_measured():
    runs = measured("calibration_stories260K")["runs"]
    mine, control = ([runs[f"{name}, seed {n}"] for n in range(3)] for name in ("transformer_xl, outputs", "control"))
    last = [run["after"]["250000"] for run in mine]
    apart = [run["512"] - base["after"]["250000"]["512"] for run, base in zip(last, control, strict=True)]
    assert max(mean(run[n] for run in last) for n in ("2048", "4096")) < mean(run["512"] for run in last) + 0.1
    assert cells("calibration_stories260K", "transformer_xl", "outputs") == [
        "calibrated",
        "3",
        shown([run["before"]["512"] for run in mine]),
        shown([run["512"] for run in last]),
        shown(apart, "+.3f"),
        shown([run["2048"] for run in last]),
        shown([run["4096"] for run in last]),
        *("", ""),
        "4,096",
        "250,000",
        f"{median(run['calibration']['tokens'] for run in mine):,.0f}",
        f"{median(run['calibration']['seconds'] for run in mine):.0f}",
        "skewed",
    ]
    losses = [[run[n] for run in last] for n in ("512", "2048", "4096")]
    perplexities = [f"{math.exp(mean(each)):.2f} ± {math.exp(mean(each)) * stdev(each):.2f}" for each in losses]
    row = f"| `transformer_xl`, calibrated, fine-tuned | 3 | {' | '.join(perplexities)} |"
    assert row in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_row_of_a_mixture_is_what_was_measured():
    runs = measured("mixtures_embedded")["runs"]
    mine, base = ([runs[f"{name}, seed {n}"] for n in range(3)] for name in ("rope", "base"))
    after = {n: mean(run["after"][n] for run in mine) for n in ("256", "512", "1024")}
    assert after["512"] < after["256"] + 0.1 < after["1024"]
    assert cells("mixtures_embedded", "rope", "attention") == [
        "attention matched",
        "3",
        shown([run["before"]["256"] for run in mine]),
        shown([run["after"]["256"] for run in mine]),
        shown([one["after"]["256"] - two["after"]["256"] for one, two in zip(mine, base, strict=True)], "+.3f"),
        shown([run["after"]["1024"] for run in mine]),
        *("", "", ""),
        "512",
        "250,000",
        "",
        f"{median(run['cpu_seconds_of_calibration'] for run in mine):.0f}",
        "sdpa",
    ]


def test_recall_and_reach(pages, tmp_path):
    """Recall stands in its columns where its file is there, also where a seed was trained from scratch only."""
    shutil.copy(ROOT / "docs/measured/calibration_craftgpt-5M.json", tmp_path)
    state = {"recall": {"1x": {"a": 1.0, "b": 0.8}, "distance 8x": {"a": 0.5, "b": 0.3}}, "text_loss": 1.5}
    runs = {"t5, calibrated, seed 0": {"before": state, "after": state | {"text_loss": 1.25}}}
    runs |= {"base, plain, seed 0": {"before": state, "after": state}, "t5, scratch, seed 0": {"before": state}}
    settings = {"kind": "rotating", "tokens": 1000, "examples": 8, "scratch_steps": 5}
    results = {"settings": settings, "runs": runs, "summary": pages.measure_recall.summary(runs)}
    (tmp_path / "recall_rotating.json").write_text(json.dumps(results))

    (found,) = (each for each in pages.measurements(tmp_path) if each.kind == "recall")
    row = pages.row(found, "t5", "outputs")
    assert [row[name] for name in ("recall_1", "recall_8", "tokens", "reach")] == [0.9, 0.4, 1000, None]
    assert (row["after"].mean, row["apart"].mean) == (1.25, -0.25)
    assert pages.row(found, "t5", "scratch")["after"] is None
    assert pages.reach({64: [1.0], 128: [1.0, 1.18], 256: [1.2], 512: [1.0]}, 64) == 128


def test_its_commands_are_understood(pages, monkeypatch):
    """By the scripts that they start, which stop once they have read them."""
    read = argparse.ArgumentParser.parse_args
    found = []

    def stop(self):
        found.append(read(self))
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    commands = [shlex.split(html.unescape(each)) for each in re.findall(r"<code>(python .*?)</code>", PAGE)]
    assert len(commands) > 80
    for _, script, *words in commands:
        monkeypatch.setattr(sys, "argv", [script, *words])
        with pytest.raises(InterruptedError):
            sys.modules[Path(script).stem].main()
    assert {len(vars(options)["seeds"]) for options in found} == {1, 2, 3, 5}
    variants = {name for options in found for name in getattr(options, "variants", None) or ()}
    recalled = pages.measure_recall.VARIANTS["rotating"] | pages.measure_recall.VARIANTS["table"]
    mixed = pages.measure_mixtures.ON_ROTATIONS | pages.measure_mixtures.ON_TABLES
    assert variants <= {"base"} | mixed.keys() | recalled.keys()
