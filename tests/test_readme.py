"""What README.md and docs/ show is true: their Python runs as pasted, links lead somewhere, the table is the registry's."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from hf_posenc import available_schemes, registry
from hf_posenc.registry import supported_model_types

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs_as_pasted(page, tmp_path, monkeypatch):
    """In order, on one page after the other: a later block may use what an earlier one made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))  # a page may register schemes and families
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    found = blocks(page)
    assert found
    names = {"__name__": "__main__"}
    for number, block in enumerate(found):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


@pytest.fixture
def table_script(monkeypatch):
    """`(readme, *arguments)` -> exit code of scripts/make_scheme_table.py on that file."""
    specification = importlib.util.spec_from_file_location("make_scheme_table", ROOT / "scripts/make_scheme_table.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)

    def run(readme, *arguments):
        monkeypatch.setattr(script, "README", readme)
        monkeypatch.setattr(sys, "argv", ["make_scheme_table.py", *arguments])
        return script.main()

    return run


def test_table_of_schemes_is_current(table_script):
    assert table_script(ROOT / "README.md", "--check") == 0, "run python scripts/make_scheme_table.py"


def test_table_script_repairs_what_it_reports(table_script, tmp_path):
    readme = tmp_path / "README.md"
    stale = README.replace("| `alibi` |", "| `alibye` |")
    assert stale != README
    readme.write_text(stale, encoding="utf-8")

    assert table_script(readme, "--check") == 1
    assert readme.read_text(encoding="utf-8") == stale
    assert table_script(readme) == 0
    assert readme.read_text(encoding="utf-8") == README


@pytest.mark.parametrize("damage", ["<!-- schemes", "<!-- end of schemes"])
def test_table_script_refuses_a_file_without_markers(table_script, tmp_path, damage):
    readme = tmp_path / "README.md"
    readme.write_text(README.replace(damage, "<!-- gone"), encoding="utf-8")
    with pytest.raises(ValueError, match="expected one"):
        table_script(readme)


def test_every_scheme_and_family_is_named():
    for name in available_schemes():
        assert f"`{name}`" in README, name
    families = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in families for name in supported_model_types())


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "recipes" / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name
)
def test_commands_and_links_lead_to_files(page):
    text = page.read_text(encoding="utf-8")
    links = {page.parent / path for path in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text)}
    files = {ROOT / path for path in re.findall(r"\b(?:scripts|recipes|docs)/[\w/]+\.(?:sh|py|yaml|md)\b", text)}
    assert [str(path) for path in sorted(links | files) if not path.exists()] == []


def test_list_of_families_is_current(monkeypatch):
    specification = importlib.util.spec_from_file_location("make_family_table", ROOT / "scripts/make_family_table.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["make_family_table.py", "--check"])
    assert script.main() == 0, "run python scripts/make_family_table.py"
    assert (
        script.updated(script.PAGE.read_text(encoding="utf-8").replace("`cohere`", "`coherent`")).count("`cohere`") == 1
    )
