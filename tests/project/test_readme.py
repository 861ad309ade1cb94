"""What README.md and docs/ show is true: their Python runs as pasted, links lead somewhere, tables are what they say."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from multimodal import multimodal

from hf_posenc import available_schemes, cli
from hf_posenc.core import registry
from hf_posenc.core.command_arguments import parser_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    """Those that train with a Trainer take long; tests/recipes/test_examples.py runs them."""
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [block for block in found if "Trainer(" not in block]


WITH_PYTHON = [page for page in PAGES if blocks(page)]


@pytest.mark.rows(default=3)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_runs_as_pasted(page, script, tiny_checkpoints, monkeypatch):
    """In order, on one page after the other: a later block may use what an earlier one made.

    Checkpoints of the Hub are stood for by tiny ones of the same model types, in folders of their names. A block of text
    below one of Python is what that prints, but for its digits, which another processor rounds differently.
    """
    run_docs = script("run_docs")
    monkeypatch.chdir(tiny_checkpoints)
    script("ten_lines").stand_in("HuggingFaceTB/SmolLM2-135M-Instruct")
    multimodal("llava").save_pretrained("llava-hf/llava-1.5-7b-hf")
    assert available_schemes()  # all are registered before the registry is copied, and put back
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))  # a page may register schemes and families
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    names = {"__name__": "__main__"}
    for number, block in enumerate(run_docs.BLOCK.finditer(page.read_text(encoding="utf-8"))):
        if "Trainer(" in block["code"]:
            continue
        printed = run_docs.printed(block["code"], f"{page.name}, block {number}", names)
        if block["shown"] is not None:
            assert without_digits(printed) == without_digits(block["shown"]), f"run python scripts/run_docs.py {page}"


def without_digits(text):
    """Of calibration also without the forms that heads have chosen: where two are equally good, rounding decides.

    Nor does it matter whether this version is released.
    """
    text = text.replace(".dev0", "")
    text = re.sub(r"-?\d[\d,]*(\.\d+)?(e[+-]\d+)?", "#", " ".join(text.split()))
    return re.sub(r"(?:# (?:as it was|(?:turned, )?fitted|turned)(?:, )?)+", "", text)


@pytest.fixture
def script(monkeypatch):
    """`name` -> a module of scripts/, imported afresh."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def load(name):
        specification = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    return load


def test_tables_are_current(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_tables.py", "--check"])
    tables = script("make_tables")
    page = (ROOT / "docs/schemes.md").read_text(encoding="utf-8")
    assert " | none | none | 0 | stock (llama), GGUF (gpt2, llama) |" in page
    assert f"| rows of the table | {1024 * 768:,} | stock (gpt2) |" in page  # learned: what GPT-2 has itself
    assert f" | `num_buckets=32`, `max_distance=128`, `share_layers=True` | none | {32 * 12} | none |" in page
    rows = tables.served().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:4]] == ["`gpt2`", "`llama`"]
    assert {row.count("|") for row in rows} == {4}
    assert not any("| - |" in row for row in rows)
    assert tables.main() == 0, "run python scripts/make_tables.py"


def test_tables_are_repaired_and_need_their_comments(script, tmp_path, monkeypatch):
    tables = script("make_tables")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", {"README.md": tables.PAGES["README.md"]})
    readme = tmp_path / "README.md"
    for arguments, left, code in ((["--check"], "stale", 1), ([], "current", 0), (["--check"], "current", 0)):
        if left == "stale":
            readme.write_text(README.replace("`alibi`, `bam`", "`alibi`"), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["make_tables.py", *arguments])
        assert tables.main() == code
        assert (readme.read_text(encoding="utf-8") == README) == (left == "current")
    for damage in ("<!-- schemes", "<!-- end of schemes"):
        readme.write_text(README.replace(damage, "<!-- gone"), encoding="utf-8")
        with pytest.raises(ValueError, match="expected one"):
            tables.main()


LINKED = [
    *PAGES,
    *sorted((ROOT / "docs/reference").glob("*.md")),
    *(ROOT / name for name in ("recipes/README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    links = {page.parent / path for path in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text)}
    files = {
        ROOT / path for path in re.findall(r"(?<!\w/)\b(?:scripts|recipes|docs)/[\w/]+\.(?:sh|py|yaml|md)\b", text)
    }
    assert [str(path) for path in sorted(links | files) if not path.exists()] == []


COMMAND_PAGES = [*PAGES, ROOT / "recipes" / "README.md"]


RECIPE = re.compile(r"(?:accelerate launch|python) (?:-m hf_posenc\.recipes\.|recipes/)(\w+)(?:\.py)?\b")
"""How a recipe is started in one process or in many."""


def commands(page):
    """What its blocks tell one to type that `hf-posenc` reads, as words; a recipe by the command that starts it."""
    started = {f"{module}": name for name, (module, _) in cli.RECIPES.items()}
    for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            recipe = RECIPE.match(line)
            if recipe and recipe[1] in started:
                line = f"hf-posenc {started[recipe[1]]}{line[recipe.end() :]}"
            if line.startswith("hf-posenc "):
                yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_understood(page, capsys):
    """By what reads them; nothing is started."""
    for name, *words in commands(page):
        if name in cli.RECIPES:
            target = importlib.import_module(f"hf_posenc.recipes.{cli.RECIPES[name][0]}").Arguments
        else:
            target = getattr(importlib.import_module("hf_posenc.commands"), name.removeprefix("--"), None)
        if target is not None and "--help" not in words:
            try:
                parser = parser_of(target, name)
                parser.add_argument("--config")
                parser.parse_args(words)
            except SystemExit:
                pytest.fail(f"{name} {' '.join(words)}: {capsys.readouterr().err}")


@pytest.mark.slow
def test_the_benchmark_of_attention_runs(script, monkeypatch, capsys):
    """Every scheme and phase, on a few tokens; the numbers mean nothing there."""
    monkeypatch.setattr("sys.argv", ["benchmark", "--lengths", "16", "--dtypes", "float32", "--rounds", "1"])
    script("benchmark_attention").main()
    printed = set(capsys.readouterr().out.split())
    assert {"alibi", "shaw", "da_transformer", "transformer_xl", "wide", "decode", "mask"} <= printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_a_measurement_of_swaps_goes_on_where_it_was(script, tiny_checkpoints, text, monkeypatch):
    """Killed while it fine-tunes, and run again: the numbers of an undisturbed run. Fewer tokens for what calibrated."""
    swaps, folder = script("measure_swaps"), tiny_checkpoints
    text.write_text(text.read_text().replace("\f", "\n\n"))
    monkeypatch.setattr(swaps, "HELD_OUT", 64)
    monkeypatch.setattr(swaps, "FITTED", 64)
    monkeypatch.setattr(swaps, "RECALL", ["repeat_gain"])  # a needle takes 370 of this model's tokens
    words = f"{folder}/llama {text} --schemes shaw --length 16 --lengths 16 32 --held-out-tokens 64 --steps 2 --lora 2"
    words += " --calibrate-length 16 --calibrate-windows 30 --tokens 700 900 --batch-size 8 --count-calibration"

    def run(name):
        made = f" --keep {folder}/{name} --json {folder}/{name}.json --prompt Once --recall 32"
        monkeypatch.setattr("sys.argv", ["measure_swaps.py", *(words + made).split()])
        swaps.main()
        return json.loads((folder / f"{name}.json").read_text())["runs"]

    expected = run("whole")
    assert len(expected) == 3
    calibrated = expected["shaw, calibrated, LoRA 2, seed 0"]
    begun = calibrated["calibration"]["tokens"]
    assert list(calibrated["after"]) == [str(each - begun) for each in (700, 900)]
    assert calibrated["writes"].startswith("Once")
    assert calibrated["writes_after"].startswith("Once")
    assert list(calibrated["recall_after"]) == ["repeat_gain"]
    assert calibrated["after"][str(900 - begun)] != calibrated["before"]
    assert calibrated["before"] != expected["shaw, plain, LoRA 2, seed 0"]["before"]
    measure, calls = swaps.measure, []

    def killed(*arguments):
        calls.append(1)
        if len(calls) == 9:  # the last model's first measurement while it trains is kept already
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(swaps, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        run("parts")
    assert list((folder / "parts").glob("*.pt")) == [folder / "parts" / "shaw, calibrated, LoRA 2, seed 0.pt"]
    monkeypatch.setattr(swaps, "measure", measure)
    found = run("parts")
    del calibrated["calibration"]["cpu_seconds"]
    del found["shaw, calibrated, LoRA 2, seed 0"]["calibration"]["cpu_seconds"]
    assert found == expected
    assert not list((folder / "parts").glob("*.pt"))


@pytest.mark.slow
def test_the_suite_for_gpus_runs_dry(tmp_path):
    """Each of its stages, on a CPU; a stage that fails fails alone."""
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "scripts" / "gpu_suite.sh"), str(tmp_path / "made"), "--dry-run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = "tests 0 models 0 attention 0 compiled 0 swaps 0".split()
    assert (tmp_path / "made" / "codes.txt").read_text().split() == ended
    runs = json.loads((tmp_path / "made" / "swaps.json").read_text())["runs"]
    assert list(runs) == ["control, seed 0", "alibi, outputs, seed 0"]
    for stage, scheme in (("models", "alibi"), ("attention", "far_rope"), ("compiled", "alibi")):
        measured = json.loads((tmp_path / "made" / f"{stage}.json").read_text())
        assert measured["device"] == "cpu"
        assert scheme in {row["scheme"] for row in measured["rows"]}
    assert subprocess.run(command[:2], capture_output=True).returncode == 2
