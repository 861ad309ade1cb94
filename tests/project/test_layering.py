"""Files of the package import only from their left, the core knows no transformers, nobody asks a scheme what it is."""

import ast
import sys
from pathlib import Path

import pytest
from source_imports import imported_names, parse

from hf_posenc import forms
from hf_posenc.placement import Placement
from hf_posenc.registry import available_schemes, scheme_class, supported_model_types

ROOT = Path(__file__).parents[2]
PACKAGE = "hf_posenc"

LAYERS = (
    ("errors", "version", "did_you_mean", "measurement", "dtypes"),
    ("command_arguments", "positions", "sinusoids", "table_cache", "dims", "frequency_edits"),
    ("registry",),
    ("attention_call",),
    ("forms",),
    ("modules",),
    ("layer_state",),
    ("placement",),
    ("engines", "schemes", "families"),
    ("upstream",),
    ("live",),
    ("patching",),
    ("checkpoints",),
    ("classes", "api"),
    ("description", "verification", "loading", "lora", "parallel", "catalogue", "calibration"),
    ("checking",),
    ("__init__",),  # collects the public names; what follows may use them
    ("evaluation", "analysis"),
    ("theory",),
    ("recipes", "plot_kinds"),
    ("commands",),
    ("cli",),
)
"""Left to right. A part imports from what is before its entry, and from itself, but not from its neighbours there."""

RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# What the core may import besides torch and the standard library.
CORE = {
    "errors": set(),
    "did_you_mean": set(),
    "dtypes": set(),
    "command_arguments": set(),
    "positions": set(),
    "dims": set(),
    "table_cache": set(),
    "sinusoids": set(),
    "frequency_edits": set(),
    "placement": set(),
    "modules": set(),
    "attention_call": set(),
    "forms": set(),
    "registry": set(),
    "engines": set(),
    "families": set(),
    "schemes": {"transformers.initialization"},
}


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
        ("hf_posenc.schemes.alibi", "from hf_posenc.families.base import Family"),
        ("hf_posenc.schemes.alibi", "from transformers import PreTrainedModel"),
        ("hf_posenc.schemes.alibi", "import transformers"),
        ("hf_posenc.engines.reference", "from transformers import initialization"),
        ("hf_posenc.engines.reference", "import numpy as np"),
        ("hf_posenc.families.table", "def late():\n    from ..upstream.masks import NAME"),
        ("hf_posenc.upstream.attention", "from ..patching import plan"),
        ("hf_posenc.patching.changes", "from ..checkpoints.model_classes import PosEncMixin"),
        ("hf_posenc.loading", "from . import verification"),
        ("hf_posenc.api", "from hf_posenc import patch_model"),
        ("hf_posenc.api", "import hf_posenc"),
        ("hf_posenc.registry", "if TYPE_CHECKING:\n    pass\nelse:\n    from .schemes import base"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "hf_posenc.schemes.alibi",
            "from .base import Scheme\nfrom ..registry import register_scheme\nimport math, torch",
        ),
        ("hf_posenc.schemes.base", "from transformers import initialization as init"),
        ("hf_posenc.schemes.base", "from transformers.initialization import normal_"),
        ("hf_posenc.registry", "if TYPE_CHECKING:\n    from hf_posenc.schemes.base import Scheme"),
        (
            "hf_posenc.upstream.attention",
            "import transformers\nfrom ..engines import reference\nfrom ..schemes.base import Scheme",
        ),
        ("hf_posenc.evaluation.perplexity", "from hf_posenc import patch_model"),
    ],
)
def test_a_right_import_is_allowed(module, source):
    assert violations(source, module) == []


# ------------------------------------------------------------------------------------------------- who may know what

SCHEME_CLASSES = {scheme_class(name).__name__ for name in available_schemes()} | {
    "ScoreScheme",
    "EmbeddingScheme",
    "RotaryScheme",
}
FORMS = {name for name, each in vars(forms).items() if isinstance(each, type) and issubclass(each, forms.Form)}
REGISTRIES = {
    ("hf_posenc.registry", "_SCHEMES"),
    ("hf_posenc.registry", "_FAMILIES"),
    ("hf_posenc.registry", "_REFUSED"),
    ("hf_posenc.registry", "_ENTRY_POINTS"),  # what installed packages offer for these two, not imported yet
    ("hf_posenc.registry", "_BROKEN"),  # and what of it cannot be made: a module registers its scheme only once
    # One class for each stock class, however often it is asked for: otherwise two models would be of different types.
    ("hf_posenc.checkpoints.model_classes", "config_class"),
    ("hf_posenc.checkpoints.model_classes", "_model_class"),
    ("hf_posenc.checkpoints.model_classes", "register_models"),  # fills transformers' registries, once for each class
    # What the processor can do, which does not change; torch.compile's own wrapper, which keeps kernels by itself; and
    # whether these kernels are right, which a self-test of seconds finds once for each kind.
    ("hf_posenc.engines.cpu_features", "has_amx"),
    ("hf_posenc.engines.cpu_features", "multiplies_bfloat16"),
    ("hf_posenc.engines.flex", "compiled"),
    ("hf_posenc.engines.selftest", "tried"),
}
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


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
    if part_of(module) == "forms":
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


def keeps_state(source, module):
    """Names of a module that its functions change, or that remember calls, in words. A `cached_property` ends with its object."""
    tree = parse(source)
    own = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = set()
    for function in [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]:
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found |= set(node.names)
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                found |= {node.value.id} & own if isinstance(node.value, ast.Name) else set()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
                found |= {node.func.value.id} & own if isinstance(node.func.value, ast.Name) else set()
        decorators = [ast.unparse(each) for each in getattr(function, "decorator_list", ())]
        if any("cache" in each and "cached_property" not in each for each in decorators):
            found.add(function.name)
    return [f"{module} keeps state in {name}" for name in sorted(found) if (module, name) not in REGISTRIES]


def reads_a_flag_of_a_placement(source, module):
    """Lines that read a plain attribute of a placement: it decides by methods, so that nobody else has to."""
    return [
        f"{module}:{node.lineno} reads acts_on.{node.attr}, which is no method"
        for node in ast.walk(parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "acts_on"
        and node.attr != "words"
        and not callable(getattr(Placement, node.attr, None))
    ]


@pytest.mark.parametrize(
    "rule",
    [asks_what_a_scheme_is, asks_what_a_form_is, names_an_architecture, keeps_state, reads_a_flag_of_a_placement],
)
def test_a_rule_holds(rule):
    assert [each for path, module, _ in FILES for each in rule(path.read_text(encoding="utf-8"), module)] == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (asks_what_a_scheme_is, "def f(s):\n    return isinstance(s, (int, Rope))"),
        (asks_what_a_scheme_is, "def f(s):\n    return isinstance(s, base.ScoreScheme)"),
        (asks_what_a_scheme_is, "def f(s):\n    return s.name == 'nope'"),
        (asks_what_a_scheme_is, "def f(s):\n    return s.name in ('alibi', 'x')"),
        (asks_what_a_form_is, "def f(x):\n    return isinstance(x, (int, Bias))"),
        (asks_what_a_form_is, "def f(x):\n    return isinstance(x, forms.Factors)"),
        (asks_what_a_form_is, "def f(call):\n    return isinstance(call.form, self.forms)"),
        (asks_what_a_form_is, "def f(x):\n    return type(x) is Slopes"),
        (asks_what_a_form_is, "def f(x):\n    return type(x) in (Slopes, Bias)"),
        (asks_what_a_form_is, "def f(x):\n    return x.__class__.__name__ == 'Slopes'"),
        (asks_what_a_form_is, "def f(form):\n    return TABLE[type(form)]"),
        (asks_what_a_form_is, "def f(x):\n    match x:\n        case Bias():\n            return 1"),
        (names_an_architecture, "def f(c):\n    return c.model_type == 'gemma2'"),
        (names_an_architecture, "TWINS = {'llama': 1}"),
        (reads_a_flag_of_a_placement, "def f(s):\n    return s.acts_on.rotates"),
        (keeps_state, "SEEN = {}\ndef f(x):\n    SEEN[x] = 1"),
        (keeps_state, "SEEN: list = []\ndef f(x):\n    SEEN.append(x)"),
        (keeps_state, "COUNT = 0\ndef f():\n    global COUNT\n    COUNT += 1"),
        (keeps_state, "import functools\n@functools.cache\ndef f(x):\n    return x"),
    ],
)
def test_a_broken_rule_is_found(rule, source):
    assert rule(source, "hf_posenc.verification")
