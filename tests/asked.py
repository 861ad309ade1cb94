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
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("helpers", "measuring", "patching", "situations"))]

HEADINGS = ("Equation", "Beyond the training length", "Deviations", "Source")
"""Lines that the docstring of a scheme must have."""


def lacks(name: str) -> list[str]:
    """Return what a registered scheme or a served model type still lacks, a sentence each."""
    from hf_posenc.registry import available_schemes, supported_model_types

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
    import situations
    import test_analysis_properties
    import test_every_decoder
    import test_keywords
    import test_refusals

    from hf_posenc.registry import scheme_class
    from hf_posenc.schemes.base import EVERY_SCHEME

    own = [field.name for field in fields(scheme_class(name)) if field.name not in EVERY_SCHEME]
    text = inspect.getdoc(scheme_class(name)) or ""
    lines = [line.strip() for line in text.splitlines()]
    for heading in HEADINGS:
        if not any(line.startswith((f"{heading}:", f"{heading}s ", f"{heading} ")) for line in lines):
            yield f"hf_posenc/schemes/{name}.py: a line of the docstring that starts with {heading!r}"
    rows = [case.hyperparameters for case in cases.CASES if case.scheme == name]
    if not rows:
        yield "tests/helpers/cases.py: a row, and above it the formula in float64, straight from the paper"
    for field in own:
        if rows and not any(field in row for row in rows):
            yield f"tests/helpers/cases.py: a row that sets {field}"
        if len(set(map(repr, test_keywords.VALUES.get(name, {}).get(field, ())))) < 2:
            yield f"tests/patching/test_keywords.py, VALUES: two values of {field} that differ"
        if not any((scheme, other) == (name, field) for scheme, other, *_ in test_refusals.WRONG):
            yield f"tests/patching/test_refusals.py, WRONG: a wrong value of {field}, and words of its error"
    if name not in test_keywords.VALUES:
        yield "tests/patching/test_keywords.py, VALUES: an entry"
    if name not in {scheme for scheme, _ in situations.CASES.values()}:
        yield "tests/helpers/situations.py, CASES: a row, for caches, padding, packing, compiling, checkpoints and PEFT"
    if name not in test_every_decoder.SCHEMES:
        yield "tests/situations/test_every_decoder.py, SCHEMES: hyper-parameters for tiny models of every type"
    if name not in test_analysis_properties.EXPECTED:
        yield "tests/measuring/test_analysis_properties.py, EXPECTED: its five properties"
    for page in ("README.md", "docs/schemes.md"):
        if f"`{name}`" not in (ROOT / page).read_text(encoding="utf-8"):
            yield f"{page}: its row, by python scripts/make_scheme_table.py"


def _of_type(name: str) -> Iterator[str]:
    from decoders import decoder

    from hf_posenc.registry import _REFUSED

    if name in _REFUSED:
        yield "hf_posenc/families/refused.py: take it off the list"
    if f"`{name}`" not in (ROOT / "docs/families.md").read_text(encoding="utf-8"):
        yield "docs/families.md: its row, by python scripts/make_family_table.py"
    try:
        decoder(name)
    except Exception as error:  # whatever its config or model class raises
        yield f"tests/helpers/decoders.py: sizes by which a tiny model of it can be built ({type(error).__name__}: {error})"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python tests/asked.py NAME: a scheme or a model type")
    found = lacks(sys.argv[1])
    print("\n".join(found) or f"{sys.argv[1]} lacks nothing that a test asks for")
    sys.exit(bool(found))
