"""Which tier runs a row: selections are complete, small and the same everywhere, and no row is lost."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

HELPERS = Path(__file__).parents[1] / "helpers"
TESTS = HELPERS.parent
FILES = sorted(TESTS.rglob("test_*.py"))
COLLECTED = """
import pytest
from matrix import sort_into_tiers

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    sort_into_tiers(items)
"""
ROWS = """
import pytest
from matrix import matrix

@matrix(letter="abcdef", number=range(6))
def test_product(letter, number): ...

@pytest.mark.rows(default=2, slow=9)
@matrix(letter="abcdef", number=range(6))
def test_long(letter, number): ...

@pytest.mark.slow
@pytest.mark.rows(slow=4)
@pytest.mark.parametrize("letter", "abcdef")
def test_longer(letter): ...

@pytest.mark.parametrize("value", [[1], {"a": 1}, pytest.param(2, marks=pytest.mark.slow)])
def test_marked(value): ...

def test_single(): ...
"""
EXPECTED = {  # default, slow
    "test_product": (6, 30),
    "test_long": (2, 7),
    "test_longer": (0, 4),
    "test_marked": (2, 1),
    "test_single": (1, 0),
}


def test_every_row_is_in_one_tier_or_in_none(tmp_path):
    (tmp_path / "conftest.py").write_text(COLLECTED)
    (tmp_path / "test_rows.py").write_text(ROWS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {HELPERS}\nmarkers =\n    rows\n    slow\n")
    counts = []
    for marks in ("not slow", "slow"):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", marks]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        rows = re.findall(r"^test_rows.py::(.+)$", done.stdout, re.MULTILINE)
        counts.append(Counter(row.partition("[")[0] for row in rows))
    assert {test: tuple(count[test] for count in counts) for test in EXPECTED} == EXPECTED


def test_every_folder_of_tests_has_its_row_in_the_readme():
    named = re.findall(r"^\| `(\w+)/` \|", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {path.parent for path in FILES} == {TESTS / name for name in named}


def test_no_test_file_imports_another():
    assert len({path.stem for path in FILES}) == len(FILES), "two of one name"
    importing = re.compile(r"^\s*(?:from|import) test_", re.MULTILINE)
    assert [path for path in FILES if importing.search(path.read_text(encoding="utf-8"))] == []
