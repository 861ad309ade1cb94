"""What README.md shows is true: its Python runs as pasted, its table is the registry's."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from hf_posenc import available_schemes
from hf_posenc.registry import supported_model_types

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_there_is_python_to_run():
    assert BLOCKS


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_python_runs_as_pasted(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


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
    for name in (*available_schemes(), *supported_model_types()):
        assert f"`{name}`" in README, name


def test_commands_and_links_lead_to_files():
    paths = {*re.findall(r"\]\((?!http)([^)#]+)\)", README), *re.findall(r"bash (\S+\.sh)", README)}
    assert paths
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert missing == []
