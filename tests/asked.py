"""What a new scheme or model type is asked for. `python tests/asked.py NAME` prints what it still lacks.

One list for both: the tests hold every scheme and model type to it, and whoever adds one reads it here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

HEADINGS = ("Equation", "Beyond the training length", "Deviations", "Source")
"""Lines that the docstring of a scheme must have."""


def lacks(name: str) -> list[str]:
    """Return what a registered scheme or a served model type still lacks, a sentence each."""
    from hf_posenc.core.registry import available_schemes, supported_model_types

    if name in available_schemes():
        return [*_of_scheme(name)]
    if name in supported_model_types():
        return [*_of_type(name)]
    raise SystemExit(
        f"{name!r} is neither a registered scheme nor a served model type. A scheme is a file in hf_posenc/schemes/ with "
        "@register_scheme on its class; a model type is a row in hf_posenc/families/table.py"
    )


def _of_scheme(name: str) -> Iterator[str]:
    import cases
    import rows

    from hf_posenc.core.registry import scheme_class
    from hf_posenc.schemes.base import EVERY_SCHEME, ScoreScheme

    own = [field.name for field in fields(scheme_class(name)) if field.name not in EVERY_SCHEME]
    text = inspect.getdoc(scheme_class(name)) or ""
    lines = [line.strip() for line in text.splitlines()]
    for heading in HEADINGS:
        if not any(line.startswith((f"{heading}:", f"{heading}s ", f"{heading} ")) for line in lines):
            yield f"hf_posenc/schemes/{name}.py: a line of the docstring that starts with {heading!r}"
    formulas = [case.hyperparameters for case in cases.CASES if case.scheme == name]
    if not formulas:
        yield "tests/helpers/cases.py: a case, and above it the formula in float64, straight from the paper"
    row = rows.ROWS.get(name)
    if row is None:
        yield "tests/helpers/rows.py: a row"
    for hyperparameter in own:
        if formulas and not any(hyperparameter in case for case in formulas):
            yield f"tests/helpers/cases.py: a case that sets {hyperparameter}"
        if len(set(map(repr, row.values.get(hyperparameter, ()) if row else ()))) < 2:
            yield f"tests/helpers/rows.py, values: two of {hyperparameter} that differ"
        if not row or not any(hyperparameter == wrong for wrong, *_ in row.wrong):
            yield f"tests/helpers/rows.py, wrong: a value of {hyperparameter}, and words of its error"
    if row and issubclass(scheme_class(name), ScoreScheme) and not row.modules and not scheme_class(name).uses_queries:
        yield "tests/helpers/rows.py, modules: hyper-parameters that engines are compared with"
    for page in ("README.md", "docs/schemes.md"):
        if f"`{name}`" not in (ROOT / page).read_text(encoding="utf-8"):
            yield f"{page}: its row, by python scripts/make_tables.py"


def _of_type(name: str) -> Iterator[str]:
    from decoders import decoder

    from hf_posenc.core.registry import _REFUSED

    if name in _REFUSED:
        yield "hf_posenc/families/refused.py: take it off the list"
    if f"`{name}`" not in (ROOT / "docs/families.md").read_text(encoding="utf-8"):
        yield "docs/families.md: its row, by python scripts/make_tables.py"
    try:
        decoder(name)
    except Exception as error:  # whatever its config or model class raises
        yield f"tests/helpers/decoders.py: sizes by which a tiny model of it can be built ({type(error).__name__}: {error})"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python tests/asked.py NAME: a scheme or a model type")
    found = lacks(sys.argv[1])
    print(
        "\n".join(found)
        or f"{sys.argv[1]} has all its rows; now run: python -m pytest -m 'slow or not slow' -k {sys.argv[1]}"
    )
    sys.exit(bool(found))
