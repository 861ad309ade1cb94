"""Which tier runs a row: selections are complete, small and the same everywhere, and no row is lost."""

import ast
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from matrix import chosen_rows, matrix
from source_imports import imported_names

HELPERS = Path(__file__).parents[1] / "helpers"
TESTS = HELPERS.parent
FILES = sorted(TESTS.rglob("test_*.py"))
SIZES = [(2, 2), (5, 3), (17, 5, 2, 2), (9, 5, 3), (21, 11, 3), (17, 2, 2, 2), (1, 7, 1), (4, 4, 4, 4)]


def product(sizes):
    return list(itertools.product(*(range(size) for size in sizes)))


def times_of_values(rows):
    return Counter(itertools.chain(*(enumerate(row) for row in rows)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_value_is_there_and_few_rows_are(sizes):
    rows = product(sizes)
    chosen = chosen_rows(rows)
    assert times_of_values([rows[n] for n in chosen]).keys() == times_of_values(rows).keys()
    assert len(set(chosen)) == len(chosen) <= 1.5 * max(sizes) + 1


@pytest.mark.parametrize("number", [0, 1, 5, 12, 24, 100])
def test_a_number_of_rows_has_values_as_often_as_possible(number):
    rows = product((6, 4))
    chosen = chosen_rows(rows, number)
    assert len(set(chosen)) == len(chosen) == min(number, 24)
    times = times_of_values([rows[n] for n in chosen])
    assert all(times[0, value] in (len(chosen) // 6, len(chosen) // 6 + 1) for value in range(6))


def test_rows_that_are_no_product():
    rows = [row for row in product((6, 5, 3)) if sum(row) % 2]
    assert times_of_values([rows[n] for n in chosen_rows(rows)]).keys() == times_of_values(rows).keys()


def test_a_test_has_a_selection_of_its_own_and_the_same_in_every_process():
    code = "import itertools; from matrix import chosen_rows; rows = list(itertools.product(range(15), range(11)))\n"
    code += "print(*(chosen_rows(rows, seed=seed) for seed in ('one', 'other')), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=HELPERS, capture_output=True, text=True)
    one, other = (chosen_rows(product((15, 11)), seed=seed) for seed in ("one", "other"))
    assert done.stdout.split("\n")[:2] == [str(one), str(other)], done.stderr
    assert one != other


def test_a_matrix_is_a_product_or_the_rows_themselves():
    @matrix(letter="abcd", last=[True, False])
    def test(letter, last):
        pass

    (mark,) = test.pytestmark
    assert mark.args[0] == ["letter", "last"]
    assert [value.values for value in mark.args[1]] == list(itertools.product("abcd", [True, False]))
    assert mark.args[1][0].id == "a-True"
    mark = matrix([("a", 1), ("b", 2)], letter=None, number=None).mark
    assert [value.values for value in mark.args[1]] == [("a", 1), ("b", 2)]


COLLECTED = """
import pytest
from matrix import matrix, sort_into_tiers

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    sort_into_tiers(items)
"""
ROWS = """
import pytest
from matrix import matrix

@matrix(letter="abcdef", number=range(6))
def test_product(letter, number): ...

@pytest.mark.parametrize("letter", "abcdef")
def test_list(letter): ...

@pytest.mark.rows(default=2, slow=9)
@matrix(letter="abcdef", number=range(6))
def test_long(letter, number): ...

@pytest.mark.slow
@pytest.mark.rows(slow=4)
@pytest.mark.parametrize("letter", "abcdef")
def test_longer(letter): ...

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.exhaustive)])
def test_marked(number): ...

@pytest.mark.rows(default=1)
@pytest.mark.parametrize("value", [[1], [2], {"a": 1}])
def test_unhashable(value): ...

def test_single(): ...
"""
TIERS = {"default": "not slow and not exhaustive", "slow": "slow", "exhaustive": "exhaustive"}
EXPECTED = {  # default, slow, exhaustive
    "test_product": (6, 30, 0),
    "test_list": (6, 0, 0),
    "test_long": (2, 7, 27),
    "test_longer": (0, 4, 2),
    "test_marked": (1, 1, 1),
    "test_unhashable": (1, 2, 0),
    "test_single": (1, 0, 0),
}


def test_every_row_is_in_one_tier(tmp_path):
    (tmp_path / "conftest.py").write_text(COLLECTED)
    (tmp_path / "test_rows.py").write_text(ROWS)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {HELPERS}\nmarkers =\n    rows\n    slow\n    exhaustive\n"
    )
    found = {}
    for tier, marks in TIERS.items():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", marks]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        found[tier] = re.findall(r"^test_rows.py::(.+)$", done.stdout, re.MULTILINE)
    rows = [row for tier in found.values() for row in tier]
    assert len(rows) == len(set(rows)) == sum(map(sum, EXPECTED.values()))
    counts = {tier: Counter(row.partition("[")[0] for row in rows) for tier, rows in found.items()}
    assert {test: tuple(counts[tier][test] for tier in TIERS) for test in EXPECTED} == EXPECTED


def bound_twice(source):
    """Names at the top of a module that a second statement gives another value: tests above it read the last one."""
    names = [
        target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id != "_"
    ]
    return {name for name, times in Counter(names).items() if times > 1}


def test_no_table_of_tests_is_replaced_by_a_later_one():
    assert bound_twice("WAYS = {}\ndef test(): WAYS['a']\nWAYS = []") == {"WAYS"}
    assert {path: names for path in FILES if (names := bound_twice(path.read_text(encoding="utf-8")))} == {}


def test_every_folder_of_tests_has_its_row_in_the_readme():
    named = re.findall(r"^\| `(\w+)/` \|", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {path.parent for path in FILES} == {TESTS / name for name in named}


def test_no_test_file_imports_another():
    files = {path.stem for path in FILES}
    assert len(files) == len(FILES), "two of one name"
    for path in FILES:
        names = imported_names(path.read_text(encoding="utf-8"), path.stem, False)
        assert not {name.partition(".")[0] for name in names} & files, path
