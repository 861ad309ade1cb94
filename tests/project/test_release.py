"""What is published: the description's links lead somewhere, archives hold what they have to, the ten lines are found."""

import importlib
import io
import re
import sys
import tarfile
import tomllib
import zipfile
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


def archives(folder, script, *, without=(), extra=(), text="[a](https://example.org)"):
    """Write a wheel and a source distribution of the package's files, with empty contents."""
    names = [name for name in sorted(script("check_distribution").package_files()) if name not in without]
    with zipfile.ZipFile(folder / "hf_posenc-1-py3-none-any.whl", "w") as wheel:
        for name in [*names, *extra]:
            wheel.writestr(name, "")
        wheel.writestr("hf_posenc-1.dist-info/METADATA", f"Metadata-Version: 2.4\nName: hf_posenc\n\n{text}\n")
        wheel.writestr("hf_posenc-1.dist-info/entry_points.txt", "[console_scripts]\nhf-posenc = hf_posenc.cli:main\n")
    with tarfile.open(folder / "hf_posenc-1.tar.gz", "w:gz") as source:
        for name in [*names, *extra, "README.md", "PKG-INFO"]:
            source.addfile(tarfile.TarInfo(f"hf_posenc-1/{name}"), io.BytesIO())


def test_archives_of_the_package_are_accepted(script, tmp_path):
    archives(tmp_path, script)
    assert script("check_distribution").problems(tmp_path) == []


def test_what_is_wrong_with_archives_is_said(script, tmp_path):
    gone, result = "hf_posenc/recipes/embedded_base/model.safetensors", "model_cards/results/books/summary.json"
    archives(tmp_path, script, without=[gone], extra=[result], text="[a](docs/install.md) [b](#here)")
    assert script("check_distribution").problems(tmp_path) == [
        f"wheel: {gone} is missing",
        f"wheel: {result} does not belong there",
        f"source distribution: {gone} is missing",
        f"source distribution: {result} does not belong there",
        "description: docs/install.md is a relative link",
    ]


def test_a_folder_with_two_wheels_is_refused(script, tmp_path):
    archives(tmp_path, script)
    (tmp_path / "hf_posenc-2-py3-none-any.whl").touch()
    with pytest.raises(ValueError, match="2 wheels and 1 source"):
        script("check_distribution").problems(tmp_path)


def test_the_ten_lines_are_found(script, tmp_path, monkeypatch, capsys):
    module = script("ten_lines")
    lines, name = module.ten_lines((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([line for line in lines.splitlines() if line]) <= 12
    assert (name, "calibrate(model" in lines) == ("HuggingFaceTB/SmolLM2-135M", True)
    with pytest.raises(ValueError, match="right under"):
        module.ten_lines("## Ten lines\n\nNot yet.\n")

    readme = tmp_path / "README.md"
    readme.write_text('## Ten lines\n\n```python\nname = "me/model"\nprint(name)\n```\n')
    monkeypatch.setattr(module, "README", readme)
    monkeypatch.setattr(sys, "argv", ["ten_lines.py"])
    monkeypatch.chdir(tmp_path)
    module.main()
    assert capsys.readouterr().out == "me/model\n"
    assert (tmp_path / "me/model/model.safetensors").is_file()


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
