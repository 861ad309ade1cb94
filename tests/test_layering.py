"""Files of the package import only from their left, and the core knows no transformers."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_posenc"

LAYERS = (
    ("errors",),
    ("positions", "files"),
    ("registry",),
    ("call",),
    ("forms",),
    ("engines", "schemes", "adapters"),
    ("attention", "hub"),
    ("surgery",),
    ("classes",),
    ("patching",),
    ("verification", "checkpoint", "lora", "parallel"),
    ("__init__",),  # collects the public names; what follows may use them
    ("evaluation", "analysis"),
    ("cli",),
)
"""Left to right. A part imports from what is before its entry, and from itself, but not from its neighbours there."""

RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# What the core may import besides torch and the standard library.
CORE = {
    "errors": set(),
    "positions": set(),
    "call": set(),
    "forms": set(),
    "registry": set(),
    "engines": set(),
    "adapters": set(),
    "schemes": {"transformers.initialization"},
}


def imports_at_run_time(tree):
    """All import statements of a syntax tree, in functions too, but none below `if TYPE_CHECKING:`."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def imported_names(source, module, is_package):
    """Dotted names that a source imports, absolute; `from a import b` counts as `a.b`."""
    package = module if is_package else module.rpartition(".")[0]
    names = set()
    for node in imports_at_run_time(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


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


@pytest.mark.parametrize(("path", "module", "is_package"), FILES, ids=[module for _, module, _ in FILES])
def test_imports_come_from_the_left(path, module, is_package):
    assert violations(path.read_text(encoding="utf-8"), module, is_package) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_posenc.schemes.alibi", "from ..engines import reference"),
        ("hf_posenc.schemes.alibi", "from hf_posenc.adapters.base import Adapter"),
        ("hf_posenc.schemes.alibi", "from transformers import PreTrainedModel"),
        ("hf_posenc.schemes.alibi", "import transformers"),
        ("hf_posenc.engines.reference", "from transformers import initialization"),
        ("hf_posenc.engines.reference", "import numpy as np"),
        ("hf_posenc.adapters.llama", "def late():\n    from ..attention import NAME"),
        ("hf_posenc.attention", "from . import surgery"),
        ("hf_posenc.surgery", "from .classes import PosEncMixin"),
        ("hf_posenc.checkpoint", "from . import verification"),
        ("hf_posenc.patching", "from hf_posenc import patch_model"),
        ("hf_posenc.patching", "import hf_posenc"),
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
            "hf_posenc.attention",
            "import transformers\nfrom .engines import reference\nfrom .schemes.base import Scheme",
        ),
        ("hf_posenc.evaluation.perplexity", "from hf_posenc import patch_model"),
    ],
)
def test_a_right_import_is_allowed(module, source):
    assert violations(source, module) == []
