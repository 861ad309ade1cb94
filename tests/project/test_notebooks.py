"""The notebooks in docs/: each runs from top to bottom, and before that what can be said of it without running it."""

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def shows(source):
    """Whether a cell shows something: it prints, or ends on an expression."""
    tree = ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    last = tree.body[-1] if tree.body and not source.rstrip().endswith(";") else None
    return any(isinstance(call, ast.Name) and call.id == "print" for call in calls) or isinstance(last, ast.Expr)


def printed(cell):
    return "".join(
        "".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/plain", ""))
        for output in cell["outputs"]
    )


ABSOLUTE = re.compile(r"(?<![\w/.])/\w[\w.-]*/|\b[A-Z]:\\\\?\w")


@each_notebook
def test_it_is_kept_with_what_it_shows(path):
    """Of one run from top to bottom, without warnings, addresses in memory or the folders of whoever ran it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), RUN
    assert [cell["id"] for cell in cells if shows("".join(cell["source"])) and not cell["outputs"]] == [], RUN
    for cell in cells:
        assert {output.get("name", "stdout") for output in cell["outputs"]} <= {"stdout"}, cell["id"]
        assert not ABSOLUTE.search(printed(cell)), cell["id"]
        assert not re.search(r"\bat 0x[0-9a-f]{6}", printed(cell)), cell["id"]
    text = path.read_text(encoding="utf-8")
    assert len(text) < 250_000
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


RUN = "run python scripts/run_docs.py"


@each_notebook
def test_its_links_lead_to_files(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.fixture(scope="module")
def run_docs():
    specification = importlib.util.spec_from_file_location("run_docs", ROOT / "scripts" / "run_docs.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def kinds(cell):
    return [(output["output_type"], sorted(output.get("data", {}))) for output in cell.get("outputs", [])]


@pytest.mark.slow
@each_notebook
def test_it_runs(path, run_docs):
    """Where a reader's Jupyter would start it, with the package of this checkout; each cell shows as much as is kept."""
    done = run_docs.executed(path)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert [kinds(cell) for cell in done.cells] == [kinds(cell) for cell in kept["cells"]]
