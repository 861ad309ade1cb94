"""Entry points of the recipes are imported by none of them, and no module they share comes back to itself."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from test_layering import imported_names

RECIPES = Path(__file__).parents[1] / "recipes"
PROGRAM = '\nif __name__ == "__main__":\n    pass\n'


def is_entry_point(source):
    """Whether it is started by name."""
    nodes = ast.parse(source).body
    return any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in nodes)


def violations(sources):
    """What is wrong with the imports of modules among themselves, in words; sources by the name of the module."""
    entry_points = {name for name, source in sources.items() if is_entry_point(source)}
    imports = {
        name: {imported.split(".")[0] for imported in imported_names(source, name, False)} & set(sources)
        for name, source in sources.items()
    }
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
    sources = {path.stem: path.read_text(encoding="utf-8") for path in RECIPES.rglob("*.py")}
    assert {"extend_context", "pretrain", "report", "run"} <= {
        n for n, source in sources.items() if is_entry_point(source)
    }
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": "import b", "b": PROGRAM}, "a imports b, which is an entry point"),
        ({"a": "from b import main" + PROGRAM, "b": PROGRAM}, "a imports b, which is an entry point"),
        ({"a": "def late():\n    from b import main", "b": PROGRAM}, "a imports b, which is an entry point"),
        ({"a": "import b", "b": "from c import x", "c": "import a"}, "a circle: "),
        ({"a": "import b", "b": "def late():\n    import a"}, "a circle: "),
        ({"a": "import a"}, "a circle: a, a"),
    ],
)
def test_a_wrong_import_is_found(sources, message):
    assert any(found.startswith(message) for found in violations(sources))


def test_right_imports_are_allowed():
    shared = "import torch\nfrom b import x\nimport b"
    assert violations({"a": "import json\nfrom c import x\nimport b" + PROGRAM, "b": "", "c": shared}) == []
