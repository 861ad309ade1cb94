"""Files of the package import only from their left, the core knows no transformers, nobody asks a scheme what it is."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from source_imports import imported_names, parse

from hf_posenc.core import forms
from hf_posenc.core.registry import available_schemes, scheme_class, supported_model_types

ROOT = Path(__file__).parents[2]
PACKAGE = "hf_posenc"

LAYERS = (
    ("core",),
    ("engines", "schemes", "families"),
    ("transformers_glue",),
    ("model",),
    ("patching",),
    ("checkpoints",),
    ("classes", "api"),
    ("loading", "parallel", "calibration", "checking"),
    ("__init__",),  # collects the public names; what follows may use them
    ("evaluation", "analysis", "serving", "testing"),
    ("recipes",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""Left to right. A part imports from what is before its entry, and from itself, but not from its neighbours there."""

RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# What the core may import besides torch and the standard library.
CORE = {"core": set(), "engines": set(), "families": set(), "schemes": {"transformers.initialization"}}


def part_of(name):
    """The part of the package that a dotted name below `hf_posenc` belongs to."""
    part = [*name.split("."), "__init__"][1]
    # `from hf_posenc import patch_model` reads the package's own namespace.
    return part if (ROOT / PACKAGE / part).is_dir() or (ROOT / PACKAGE / f"{part}.py").is_file() else "__init__"


def violations(source, module, is_package=False):
    """What one file imports and must not, in words."""
    part = part_of(module)
    if part not in RANK:
        return [f"{module}: give {part!r} its place in LAYERS"]
    found = []
    for name in sorted(imported_names(source, module, is_package)):
        if name.split(".")[0] == PACKAGE:
            other = part_of(name)
            if other != part and RANK.get(other, len(LAYERS)) >= RANK[part]:
                found.append(f"{module} imports {name}, which is not on its left")
        elif part in CORE:
            top = name.split(".")[0]
            allowed = top == "torch" or top in sys.stdlib_module_names
            if not allowed and not any(f"{name}.".startswith(f"{other}.") for other in CORE[part]):
                found.append(f"{module} imports {name}; {part} may use torch and the standard library only")
    return found


def files():
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


FILES = list(files())


def test_imports_come_from_the_left():
    assert [each for path, *module in FILES for each in violations(path.read_text(encoding="utf-8"), *module)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_posenc.schemes.alibi", "from ..engines import reference"),
        ("hf_posenc.engines.reference", "import numpy as np"),
        ("hf_posenc.families.table", "def late():\n    from ..transformers_glue.masks import NAME"),
        ("hf_posenc.api", "from hf_posenc import patch_model"),
        ("hf_posenc.api", "import hf_posenc"),
        ("hf_posenc.core.registry", "if TYPE_CHECKING:\n    pass\nelse:\n    from ..schemes import base"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert violations(source, module)


SCHEME_CLASSES = {scheme_class(name).__name__ for name in available_schemes()} | {
    "ScoreScheme",
    "EmbeddingScheme",
    "RotaryScheme",
}
FORMS = {name for name, each in vars(forms).items() if isinstance(each, type) and issubclass(each, forms.Form)}


def asks_what_a_scheme_is(source, module):
    """Lines outside `schemes` that look at the class or the name of a scheme, in words."""
    if part_of(module) == "schemes":
        return []
    found = []
    for node in ast.walk(parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            named = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            named |= {part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)}
            if named & SCHEME_CLASSES:
                found.append(f"{module}:{node.lineno} asks whether something is a {', '.join(named & SCHEME_CLASSES)}")
        if isinstance(node, ast.Compare):
            texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            if texts & set(available_schemes()):
                found.append(
                    f"{module}:{node.lineno} compares a name with {', '.join(texts & set(available_schemes()))}"
                )
    return found


def asks_what_a_form_is(source, module):
    """Lines outside `forms` that look at the class of a form, in words. `forms.for_form` reads tables by class."""
    if module == "hf_posenc.core.forms":
        return []
    found = []
    for node in ast.walk(parse(source)):
        parts = list(ast.walk(node))
        words = {part.id for part in parts if isinstance(part, ast.Name)}
        words |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
        words |= {part.value for part in parts if isinstance(part, ast.Constant)}
        asks = False
        if isinstance(node, (ast.Compare, ast.MatchClass)):
            asks = words & FORMS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asks = node.func.id in ("isinstance", "issubclass") and words & {*FORMS, "forms"}
            asks = asks or (node.func.id == "type" and "form" in words)
        if asks:
            found.append(f"{module}:{node.lineno} asks what a form is: {ast.unparse(node)}")
    return found


def names_an_architecture(source, module):
    """Lines outside `families` that hold the model type of a family, in words."""
    types = set(supported_model_types())
    return [
        f"{module}:{node.lineno} names {node.value}"
        for node in ast.walk(parse(source))
        if part_of(module) != "families" and isinstance(node, ast.Constant) and node.value in types
    ]


@pytest.mark.parametrize(
    "rule",
    [asks_what_a_scheme_is, asks_what_a_form_is, names_an_architecture],
)
def test_a_rule_holds(rule):
    assert [each for path, module, _ in FILES for each in rule(path.read_text(encoding="utf-8"), module)] == []


def test_recipes_do_not_import_entry_points_or_each_other_in_a_circle():
    modules = {m.rpartition(".")[2]: p.read_text(encoding="utf-8") for p, m, _ in FILES if ".recipes." in f"{m}."}
    own = {
        name: {
            each.split(".")[2]
            for each in imported_names(text, f"hf_posenc.recipes.{name}", False)
            if ".recipes." in each
        }
        for name, text in modules.items()
    }
    entry_points = {name for name, text in modules.items() if '\nif __name__ == "__main__":' in text}
    assert entry_points >= {"calibrate", "extend_context", "compare_schemes", "evaluate"}
    assert {
        name: others & entry_points - {name} for name, others in own.items() if others & entry_points - {name}
    } == {}
    TopologicalSorter({name: others & set(modules) - {name} for name, others in own.items()}).prepare()
