"""What README.md and docs/ show is true: their Python runs as pasted, links lead somewhere, tables are what they say."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from multimodal import multimodal

from hf_posenc import Scheme, cli, registry
from hf_posenc.registry import supported_model_types

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    """Those that train with a Trainer take long; tests/recipes/test_examples.py runs them."""
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [block for block in found if "Trainer(" not in block]


WITH_PYTHON = [page for page in PAGES if blocks(page)]


def test_pages_with_python_are_found():
    """What a page is about decides whether it shows Python; those that only have commands and tables are named here."""
    assert {page.name for page in PAGES} - {page.name for page in WITH_PYTHON} == {
        "calibrate_how.md",
        "calibrate_measured.md",
        "glossary.md",
        "limits.md",
        "recall_measured.md",
        "results.md",
        "speed.md",
        "theory_statements.md",
    }


@pytest.mark.rows(default=3)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_runs_as_pasted(page, script, tiny_checkpoints, monkeypatch):
    """In order, on one page after the other: a later block may use what an earlier one made.

    Checkpoints of the Hub are stood for by tiny ones of the same model types, in folders of their names. A block of text
    below one of Python is what that prints, but for its digits, which another processor rounds differently.
    """
    run_pages = script("run_pages")
    monkeypatch.chdir(tiny_checkpoints)
    smollm = Path(shutil.copytree("llama", "HuggingFaceTB/SmolLM2-135M")) / "config.json"
    smollm.write_text(json.dumps(json.loads(smollm.read_text()) | {"max_position_embeddings": 8192}))
    multimodal("llava").save_pretrained("llava-hf/llava-1.5-7b-hf")
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))  # a page may register schemes and families
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    names = {"__name__": "__main__"}
    for number, block in enumerate(run_pages.BLOCK.finditer(page.read_text(encoding="utf-8"))):
        if "Trainer(" in block["code"]:
            continue
        printed = run_pages.printed(block["code"], f"{page.name}, block {number}", names)
        if block["shown"] is not None:
            assert without_digits(printed) == without_digits(block["shown"]), f"run python scripts/run_pages.py {page}"


def without_digits(text):
    """Of calibration also without the forms that heads have chosen: where two are equally good, rounding decides.

    Nor does it matter whether this version is released.
    """
    text = text.replace(".dev0", "")
    text = re.sub(r"-?\d[\d,]*(\.\d+)?(e[+-]\d+)?", "#", " ".join(text.split()))
    return re.sub(r"(?:# (?:as it was|(?:turned, )?fitted|turned)(?:, )?)+", "", text)


FRONT = [
    ROOT / name
    for name in (
        "README.md",
        "docs/calibrate.md",
        "docs/calibrate_runs.md",
        "docs/choosing_a_scheme.md",
        "docs/fine_tune.md",
    )
]


@pytest.mark.parametrize("page", FRONT, ids=lambda page: page.name)
def test_code_of_the_front_pages_is_not_wide(page):
    """88 columns are what the site shows beside its lists of links on a screen of 1280 pixels."""
    code = "".join(re.findall(r"^```\w+\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE))
    assert [line for line in code.splitlines() if len(line) > 88] == []


def test_the_first_command_makes_what_the_picture_shows():
    first = next(commands(ROOT / "README.md"))
    assert first[0] == "extend"
    assert first[first.index("--scheme") + 1] == "transformer_xl"


def test_results_name_the_options_that_were_measured(script):
    table = script("make_result_table").table()
    options = {name: script("measure_calibration").SCHEMES[name][1] for name in ("t5", "alibi")}
    assert options == {"t5": {"share_layers": False}, "alibi": {"trainable": True}}
    assert table.count("| `t5`, `share_layers=False`, ") == table.count("| `alibi`, `trainable=True`, ") == 2


def test_the_page_of_calibration_begins_with_what_it_does_to_a_real_model(script):
    page = (ROOT / "docs/calibrate.md").read_text(encoding="utf-8")
    first = script("run_pages").BLOCK.search(page)
    losses = dict(re.findall(r"^(base|plain swap|calibrated) +([\d.]+)$", first["shown"], flags=re.MULTILINE))
    base, swapped, calibrated = (float(losses[name]) for name in ("base", "plain swap", "calibrated"))
    assert base < calibrated < swapped
    assert calibrated - base < 0.25 * (swapped - base)


def test_pages_are_renewed_by_what_they_print(script):
    run_pages = script("run_pages")
    page = "```python\nn = 1\n```\n\n```python\nprint(n + 1, ' ')\n```\n\n```text\nold\n```\n\nbelow\n"
    assert run_pages.renewed(page, "page.md") == page.replace("old", "2")


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


@pytest.fixture
def table_script(script, tmp_path, monkeypatch):
    """`(name of a script, text of a README, *arguments)` -> its exit code and the README that it leaves."""

    def run(name, text, *arguments):
        module = script(name)
        readme = tmp_path / "README.md"
        readme.write_text(text, encoding="utf-8")
        monkeypatch.setattr(module, "README", readme)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return module.main(), readme.read_text(encoding="utf-8")

    return run


TABLES = {"make_scheme_table": "| `alibi` |", "make_result_table": "| the base, untouched |"}
"""Script -> how a row of its table in README.md begins."""


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_current(table_script, name):
    assert table_script(name, README, "--check") == (0, README), f"run python scripts/{name}.py"


@pytest.mark.parametrize(("name", "row"), TABLES.items(), ids=TABLES)
def test_table_scripts_repair_what_they_report(table_script, name, row):
    stale = README.replace(row, row.replace("`", "").replace("base", "bass"))
    assert stale != README

    assert table_script(name, stale, "--check") == (1, stale)
    assert table_script(name, stale) == (0, README)


@pytest.mark.parametrize("damage", ["<!-- schemes", "<!-- end of schemes"])
def test_table_script_refuses_a_file_without_markers(table_script, damage):
    with pytest.raises(ValueError, match="expected one"):
        table_script("make_scheme_table", README.replace(damage, "<!-- gone"))


def test_table_of_hyperparameters_is_current(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_scheme_table.py", "--check"])
    module = script("make_scheme_table")
    page = module.PAGE.read_text(encoding="utf-8")
    assert "| `nope` | none | none | 0 | stock (llama), GGUF (gpt2, llama) |" in page
    assert f"| rows of the table | {1024 * 768:,} | stock (gpt2) |" in page  # learned: what GPT-2 has itself
    assert f"| `t5` | `num_buckets=32`, `max_distance=128`, `share_layers=True` | none | {32 * 12} | none |" in page
    assert module.main() == 0, "run python scripts/make_scheme_table.py"


def test_a_scheme_without_a_paper_is_refused(script):
    class Unsourced(Scheme):
        """Nobody says where it is from.

        Source: an idea of ours.
        """

    with pytest.raises(ValueError, match="Unsourced needs a line `Source"):
        script("make_scheme_table").papers(Unsourced)


def test_papers_are_read_across_lines(script):
    class Sourced(Scheme):
        """Two papers.

        Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; the authors' code; Dai et al.
        2019, arXiv:1901.02860.

        Args:
            other: of another paper, arXiv:2104.09864.
        """

    assert script("make_scheme_table").papers(Sourced) == (
        "[Vaswani et al. 2017](https://arxiv.org/abs/1706.03762), [Dai et al. 2019](https://arxiv.org/abs/1901.02860)"
    )


def test_every_family_is_named():
    families = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in families for name in supported_model_types())


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


def anchors(page):
    """The headings of a page as the site links to them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_every_statement_of_the_documents_has_a_row():
    """Each says where it is shown and what came out, or that it is not shown, and why; sections say how many they have."""
    page = ROOT / "docs/theory_statements.md"
    statements, counted = page.read_text(encoding="utf-8").split("\n## Pictures\n")[0], 0
    *documents, _ = re.split(r"^## ", statements, flags=re.MULTILINE)[1:]
    rows = re.findall(r"^\| (?!statement |---)(.*) \|$", statements, flags=re.MULTILINE)
    for section in documents:
        count = len(re.findall(r"^\| (?!statement |---)", section, flags=re.MULTILINE))
        assert f" {count} statements.\n" in section
        counted += count
    assert counted == 125
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    assert [row for row in cells if len(row) != 3 or not all(row)] == []
    assert len({row[0] for row in cells}) == len(cells) >= 125
    missing = [row for row in cells if "not shown" in row[2]]
    assert len(missing) <= 5
    assert all(len(row[2].split()) > 5 for row in missing), "give the reason"
    for name, anchor in re.findall(r"\]\(([\w/]+\.md)#([\w-]+)\)", statements):
        assert anchor in anchors(page.parent / name), f"{name}#{anchor}"


def test_tables_of_calibrations_are_current(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_calibration_tables.py", "--check"])
    module = script("make_calibration_tables")
    assert module.main() == 0, "run python scripts/make_calibration_tables.py"
    assert all(f"| `transformer_xl`, {start}" in module.table("stories260K") for start in module.STARTS.values())
    run = {"before": {"64": 2.0}, "after": {"100": {"64": None}}, "calibration": {"divergence": [0.5, 0.7]}}
    cells = module.row("t", [run, run | {"before": {"64": 3.0}}], [("64", None), ("64", "100")])
    assert cells == "| t | 2 | 0.600 | 2.500 |  |"


def test_changelog_says_nothing_twice():
    """Merging branches that both write into one section repeats points, whole or in other words at the same start."""
    release = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
    starts = Counter(line[:30] for line in release.splitlines() if line.startswith("- "))
    assert [start for start, count in starts.items() if count > 1] == []
    assert len(release.splitlines()) < 200, "a point for what a user sees, in a line or two"


COMMAND_PAGES = [*PAGES, ROOT / "recipes" / "README.md"]


def published():
    """Every text file that a user may read, with its text."""
    folders = ("docs", "hf_posenc", "recipes", "model_cards", "scripts", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    for path in [*files, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        if path.suffix in (".md", ".py", ".ipynb", ".yaml", ".yml", ".sh"):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_no_line_installs_what_is_nowhere():
    """Nothing is on a package index or a server yet: a clone, or packages of others, are what can be installed."""
    nowhere = re.compile(r"hf[_-]posenc\[|git\+http|git clone http|pip install[^`#\n]*?[ '\"]hf[_-]posenc\b")
    found = [f"{name}: {match[0]}" for name, text in published() for match in nowhere.finditer(text)]
    assert found == []


def test_extras_that_are_named_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {
        each for _, text in published() for names in re.findall(r"'\.\[([\w,]+)\]'", text) for each in names.split(",")
    }
    assert named > {"recipes", "trl", "qlora"}
    assert named <= set(extras)


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_that_only_a_clone_has_say_so(page):
    """An installed package has no recipes/ and no scripts/."""
    text = page.read_text(encoding="utf-8")
    if re.search(r"\b(?:bash|python|launch|--config|--config_file) (?:scripts|recipes)/", text):
        assert re.search(r"\bclone\b", text)


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


def test_commands_are_found():
    assert sum(len(list(commands(page))) for page in COMMAND_PAGES) > 5


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_are_understood(page, capsys):
    """By what reads them; nothing is started."""
    parser = cli._parser(with_recipes=True)
    for words in commands(page):
        if "--help" not in words:
            try:
                parser.parse_args(words)
            except SystemExit:
                pytest.fail(f"{' '.join(words)}: {capsys.readouterr().err}")


def test_list_of_families_is_current(script, monkeypatch):
    module = script("make_family_table")
    monkeypatch.setattr(sys, "argv", ["make_family_table.py", "--check"])
    assert module.main() == 0, "run python scripts/make_family_table.py"
    rows = module.served()
    assert [row.split("|")[1].strip() for row in rows[2:4]] == ["`gpt2`", "`llama`"]
    assert {row.count("|") for row in rows} == {4}
    assert not any("| - |" in row for row in rows)
    assert (
        module.updated(module.PAGE.read_text(encoding="utf-8").replace("`cohere`", "`coherent`")).count("`cohere`") == 1
    )
