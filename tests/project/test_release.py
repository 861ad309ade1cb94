"""What is published: the description's links lead somewhere, archives hold what they have to, the ten lines are found."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/hf-posenc/hf_posenc/blob/main/"
IMAGES = "https://raw.githubusercontent.com/hf-posenc/hf_posenc/main/"


@pytest.fixture
def script(monkeypatch):
    """`name` -> a module of scripts/."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module
    for name in ("check_distribution", "ten_lines"):
        sys.modules.pop(name, None)


def description():
    """README.md with the substitutions that the build makes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_no_link_of_the_description_is_relative(script):
    text = description()
    assert script("check_distribution").relative_links(f"Metadata-Version: 2.4\n\n{text}") == []
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert sum(link.startswith(IMAGES) for link in links) == text.count("![") == 1
    own = [link.removeprefix(IMAGES).removeprefix(REPOSITORY) for link in links if "hf-posenc/hf_posenc" in link]
    assert len(own) > 20
    assert [path for path in own if not (ROOT / path.partition("#")[0]).exists()] == []


def declared():
    """What pyproject.toml asks for: the package itself, and the extras that `recipes` stands for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = map(Requirement, [*project["dependencies"], *extras["recipes"], *extras["plots"]])
    return [each for each in requirements if each.name != "hf_posenc"]


def pinned(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = (line.partition("==") for line in lines if not line.startswith("#"))
    return {package.lower().replace("-", "_"): Version(version) for package, _, version in pins}


def test_lower_bounds_are_the_oldest_versions_that_are_tested():
    """But torch's: constraints-oldest.txt says why."""
    bounds = {
        each.name.lower(): Version(part.version)
        for each in declared()
        for part in each.specifier
        if part.operator == ">="
    }
    assert len(bounds) == len(declared())
    oldest = pinned("constraints-oldest.txt")
    assert {name: oldest[name] for name in bounds if name != "torch"} == {
        name: bound for name, bound in bounds.items() if name != "torch"
    }


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_what_is_tested_is_in_the_declared_ranges(name):
    pins = pinned(name)
    assert [each for each in declared() if not each.specifier.contains(pins[each.name.lower()])] == []
