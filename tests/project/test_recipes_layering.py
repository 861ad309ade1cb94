"""Entry points are imported by no recipe but what starts them from a checkout; no module they share comes back to itself."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from source_imports import imported_names

ROOT = Path(__file__).parents[2]
PACKAGE = "hf_posenc.recipes"
PROGRAMS = {"calibrate", "extend_context", "compare_schemes", "pretrain", "evaluate", "report", "sweep"}
PROGRAM = '\nif __name__ == "__main__":\n    pass\n'


def is_entry_point(source):
    """Whether it is started by name."""
    nodes = ast.parse(source).body
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in nodes)


def imported_recipes(source):
    """The modules of the package's recipes that a source imports."""
    names = imported_names(source, f"{PACKAGE}.x", False)
    return {name.removeprefix(f"{PACKAGE}.").split(".")[0] for name in names if name.startswith(f"{PACKAGE}.")}


def violations(sources):
    """What is wrong with the imports of modules among themselves, in words; sources by the name of the module."""
    entry_points = {name for name, source in sources.items() if is_entry_point(source)}
    imports = {name: imported_recipes(source) & set(sources) for name, source in sources.items()}
    found = [
        f"{name} imports {other}, which is an entry point"
        for name in sorted(imports)
        for other in sorted(imports[name] & entry_points)
    ]
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found.append("a circle: " + ", ".join(error.args[1]))
    return found


def test_recipes_do_not_import_entry_points_or_each_other_in_a_circle():
    folder = ROOT / "hf_posenc" / "recipes"
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.stem != "__init__"}
    assert PROGRAMS == {name for name, source in sources.items() if is_entry_point(source)}
    assert violations(sources) == []


def test_a_checkout_starts_what_an_installation_starts():
    """Files of the checkout that are named as a recipe is start it, and do nothing else."""
    files = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "recipes").glob("*.py")}
    for name in PROGRAMS:
        assert imported_recipes(files[name]) <= {name, "program"}
        assert len(ast.parse(files[name]).body) <= 4, "a docstring, imports and the start"
    assert not imported_recipes(files["trainer_example"])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": "from . import b", "b": PROGRAM}, "a imports b, which is an entry point"),
        ({"a": "from .b import main" + PROGRAM, "b": PROGRAM}, "a imports b, which is an entry point"),
        ({"a": "def late():\n    from .b import main", "b": PROGRAM}, "a imports b, which is an entry point"),
        ({"a": "import hf_posenc.recipes.b", "b": PROGRAM}, "a imports b, which is an entry point"),
        ({"a": "from . import b", "b": "from .c import x", "c": "from . import a"}, "a circle: "),
        ({"a": "from . import b", "b": "def late():\n    from . import a"}, "a circle: "),
        ({"a": "from . import a"}, "a circle: a, a"),
    ],
)
def test_a_wrong_import_is_found(sources, message):
    assert any(found.startswith(message) for found in violations(sources))


def test_right_imports_are_allowed():
    shared = "import torch\nfrom .b import x\nfrom . import b"
    assert violations({"a": "import json\nfrom .c import x\nfrom . import b" + PROGRAM, "b": "", "c": shared}) == []
