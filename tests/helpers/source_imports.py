"""What Python sources import, read from their syntax trees."""

import ast
import functools
import importlib.util

parse = functools.cache(ast.parse)
"""The syntax tree of a source, made once; nobody changes it."""


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
    for node in imports_at_run_time(parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names
