"""The notebooks in docs/: each runs from top to bottom, and before that what can be said of it without running it."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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


RUN = "run python scripts/run_notebooks.py"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/tmp/tmpx/model: alibi", True),
        ("in 'C:\\\\Users'", True),
        ("4/4 layers, 1.2 s/step", False),
        ("a/b/c.py", False),
    ],
)
def test_absolute_paths_are_noticed(text, found):
    assert bool(ABSOLUTE.search(text)) == found


@each_notebook
def test_its_links_lead_to_files(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.fixture(scope="module")
def run_notebooks():
    specification = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def kinds(cell):
    return [(output["output_type"], sorted(output.get("data", {}))) for output in cell.get("outputs", [])]


@pytest.mark.slow
@each_notebook
def test_it_runs(path, run_notebooks):
    """Where a reader's Jupyter would start it, with the package of this checkout; each cell shows as much as is kept."""
    done = run_notebooks.executed(path)
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert [kinds(cell) for cell in done.cells] == [kinds(cell) for cell in kept["cells"]]


@pytest.mark.slow
def test_a_cell_that_fails_fails(run_notebooks, tmp_path):
    cell = nbformat.v4.new_code_cell("assert 1 == 2")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "wrong.ipynb")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run_notebooks.executed(tmp_path / "wrong.ipynb")


@pytest.mark.slow
def test_a_cell_that_warns_fails(run_notebooks, tmp_path):
    cell = nbformat.v4.new_code_cell("import warnings; warnings.warn('old')")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "warns.ipynb")
    with pytest.raises(RuntimeError, match="old"):
        run_notebooks.executed(tmp_path / "warns.ipynb")
