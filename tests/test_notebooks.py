"""The notebooks in docs/: each runs from top to bottom, and before that what can be said of it without running it."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
SECONDS_PER_CELL = 1200
"""Training the embedded base beside other work is the longest."""


def code(notebook):
    """The code of a notebook as one program; commands to the notebook itself, such as `%matplotlib inline`, left out."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return "\n".join(line for cell in cells for line in cell.splitlines() if not line.startswith("%"))


def imported(tree):
    """The names that a program's imports bind, each with what it stands for; an import of what does not exist raises."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = importlib.import_module(alias.name)
                top = importlib.import_module(alias.name.partition(".")[0])
                names[alias.asname or top.__name__] = module if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            for alias in node.names:
                names[alias.asname or alias.name] = (
                    getattr(module, alias.name)
                    if hasattr(module, alias.name)
                    else importlib.import_module(f"{node.module}.{alias.name}")
                )
    return names


def stale(program):
    """What a program asks of the things that it imports and they do not have: attributes, keyword arguments."""
    tree = ast.parse(program)
    names, found = imported(tree), []

    def meant(node):
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute) and inspect.ismodule(owner := meant(node.value)):
            if not hasattr(owner, node.attr):
                found.append(f"{owner.__name__}.{node.attr}")
            return getattr(owner, node.attr, None)
        return None

    for node in ast.walk(tree):
        target = meant(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
        if not isinstance(node, ast.Call) or not callable(target := meant(node.func)):
            continue
        if not getattr(target, "__module__", "").startswith("hf_posenc"):
            continue
        parameters = inspect.signature(target).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            asked = {keyword.arg for keyword in node.keywords if keyword.arg}
            found += [f"{target.__name__}({name}=)" for name in sorted(asked - set(parameters))]
    return sorted(set(found))


@each_notebook
def test_its_code_compiles_and_names_what_exists(path):
    program = code(json.loads(path.read_text(encoding="utf-8")))
    compile(program, path.name, "exec")
    assert stale(program) == []


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import hf_posenc\nhf_posenc.verify(model)", []),
        ("import hf_posenc\nhf_posenc.verifies(model)", ["hf_posenc.verifies"]),
        ("from hf_posenc.evaluation import measure_context\nmeasure_context(m, d, length=[3])", ["measure_context(length=)"]),
        ("from hf_posenc import patch_model\npatch_model(model, 'shaw', max_distance=8)", []),  # takes a scheme's own
    ],
)  # fmt: skip
def test_stale_names_are_noticed(program, expected):
    assert stale(program) == expected


def test_an_import_of_what_is_gone_is_noticed():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        stale("from hf_posenc.no_such_module import patch")
    with pytest.raises(ModuleNotFoundError, match="no_such_name"):
        stale("from hf_posenc import no_such_name")


@each_notebook
def test_it_is_kept_without_outputs(path):
    """What is kept is what a person wrote, so that a change can be read; the numbers are those of whoever runs it."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []
    assert path.read_text(encoding="utf-8") == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


@each_notebook
def test_its_links_lead_to_files(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []


def run(notebook, folder):
    """Runs a notebook's cells in a kernel of this Python, in a folder; the first that fails raises."""
    client = NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


@pytest.mark.slow
@each_notebook
def test_it_runs(path, monkeypatch):
    """Where a reader's Jupyter would start it, with the package of this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = run(nbformat.read(path, as_version=4), path.parent)
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    shown = [output for cell in cells for output in cell.outputs if output.output_type == "execute_result"]
    figures = [output for output in shown if "Figure" in output.data.get("text/plain", "")]
    assert all("image/png" in output.data for output in figures)


@pytest.mark.slow
def test_a_cell_that_fails_fails(tmp_path):
    cell = nbformat.v4.new_code_cell("assert 1 == 2")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(nbformat.v4.new_notebook(cells=[cell]), tmp_path)
