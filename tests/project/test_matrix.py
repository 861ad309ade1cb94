"""The selections of the default tier are complete, small, the same everywhere, and leave nothing out of both tiers."""

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import covering, matrix
from source_imports import imported_names

HELPERS = Path(__file__).parents[1] / "helpers"
SIZES = [(2, 2), (5, 3), (17, 5, 2, 2), (9, 5, 3), (21, 11, 3), (17, 2, 2, 2), (1, 7, 1), (4, 4, 4, 4)]


def product(sizes):
    return list(itertools.product(*(range(size) for size in sizes)))


def tuples(rows, strength):
    """How often each combination of values occurs, written down in another way than in matrix.py."""
    found = {}
    for row in rows:
        for axes in itertools.combinations(range(len(row)), strength):
            key = (axes, tuple(row[axis] for axis in axes))
            found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_everything_is_covered(sizes, strength, times):
    rows = product(sizes)
    chosen = covering(rows, strength=strength, times=times)
    assert chosen <= set(range(len(rows)))
    wanted, found = tuples(rows, strength), tuples([rows[n] for n in chosen], strength)
    assert all(found.get(key, 0) >= min(times, n) for key, n in wanted.items())
    least = max(math.prod(axes) for axes in itertools.combinations(sizes, strength))
    assert len(chosen) <= min(len(rows), times * 1.5 * least + 2)


def test_rows_that_are_no_product_and_rows_that_are_wanted():
    rows = [row for row in product((6, 5, 3)) if sum(row) % 2]
    chosen = covering(rows, strength=2, chosen=[0, 7])
    assert {0, 7} <= chosen < set(range(len(rows)))
    assert tuples([rows[n] for n in chosen], 2).keys() == tuples(rows, 2).keys()


def test_a_test_has_a_selection_of_its_own_and_the_same_in_every_process():
    code = "import itertools; from matrix import covering; rows = list(itertools.product(range(15), range(11)))\n"
    code += "print(*(sorted(covering(rows, strength=1, seed=seed)) for seed in ('one', 'other')), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=HELPERS, capture_output=True, text=True)
    rows = product((15, 11))
    one, other = (sorted(covering(rows, strength=1, seed=seed)) for seed in ("one", "other"))
    assert done.stdout.split("\n")[:2] == [str(one), str(other)], done.stderr
    assert one != other


def test_what_is_not_in_the_default_tier_is_in_the_slow_one():
    @matrix(letter="abcd", number=range(3), last=[True, False], always=lambda letter, **_: letter == "a")
    def test(letter, number, last):
        pass

    (mark,) = test.pytestmark
    assert list(mark.args[0]) == ["letter", "number", "last"]
    assert [value.values for value in mark.args[1]] == list(itertools.product("abcd", range(3), [True, False]))
    default = [value.values for value in mark.args[1] if not value.marks]
    assert 12 <= len(default) < 24
    assert sum(letter == "a" for letter, *_ in default) == 6
    assert tuples(default, 2).keys() == tuples(itertools.product("abcd", range(3), [True, False]), 2).keys()
    assert {m.name for value in mark.args[1] for m in value.marks} == {"slow"}
    assert mark.args[1][0].id == "a-0-True"


def test_where_rows_take_seconds_the_slow_tier_has_a_few_more_and_a_release_the_rest():
    @matrix(letter="abcdef", number=range(6), strength=1, slow=2)
    def test(letter, number):
        pass

    (mark,) = test.pytestmark
    tiers = {(): [], ("slow",): [], ("exhaustive",): []}
    for value in mark.args[1]:
        tiers[tuple(m.name for m in value.marks)].append(value.values)
    default, slow, rest = tiers.values()
    assert (len(default), len(slow), len(rest)) == (6, 6, 24)
    counts = tuples([*default, *slow], 1)
    assert len(counts) == 12
    assert set(counts.values()) == {2}


TESTS = HELPERS.parent
FILES = sorted(TESTS.rglob("test_*.py"))


def test_every_folder_of_tests_has_its_row_in_the_readme():
    named = re.findall(r"^\| `(\w+)/` \|", (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {path.parent for path in FILES} == {TESTS / name for name in named}


def test_no_test_file_imports_another():
    files = {path.stem for path in FILES}
    assert len(files) == len(FILES), "two of one name"
    for path in FILES:
        names = imported_names(path.read_text(encoding="utf-8"), path.stem, False)
        assert not {name.partition(".")[0] for name in names} & files, path
