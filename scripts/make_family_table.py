#!/usr/bin/env python3
"""Writes the lists of model types into docs/families.md, from what is registered.

python scripts/make_family_table.py            # write it
python scripts/make_family_table.py --check    # exit 1 if it is not what the registry says
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from transformers import CONFIG_MAPPING

from hf_posenc.catalogue import ServedType, language_type, refused_types, served_type
from hf_posenc.checkpoints.auto_classes import multimodal_model_types
from hf_posenc.registry import supported_model_types

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
MARKS = {
    name: (f"<!-- {name}: written by scripts/make_family_table.py -->", f"<!-- end of {name} -->")
    for name in ("families", "multimodal", "refused")
}


def code(names: Iterable[str]) -> str:
    """Names as Markdown code."""
    return ", ".join(f"`{name}`" for name in names)


FIRST = ("gpt2", "llama")
"""Model types whose rows come first: what a reader looks for."""


def served() -> list[str]:
    """The table of what can be patched: model types of which the same is known share a row, the largest row first."""
    alike: dict[str, tuple[ServedType, list[str]]] = {}
    for model_type in supported_model_types():
        known = served_type(model_type)
        alike.setdefault(repr(known), (known, []))[1].append(model_type)
    rows = ["| model types | their own positions | what to know |", "|---|---|---|"]
    for known, model_types in sorted(
        alike.values(), key=lambda row: (not set(row[1]) & set(FIRST), -len(row[1]), row[1])
    ):
        notes = list(known.special)
        if known.without:
            notes.append(f"takes no {code(known.without)}")
        notes += (f"refused with `config.{name}`: {reason}" for name, reason in known.refused.items())
        rows.append(f"| {code(model_types)} | {known.positions} | {'<br>'.join(notes)} |")
    return rows


def refused() -> list[str]:
    """The table of what cannot be patched."""
    rows = ["| model types | why |", "|---|---|"]
    for reason, types in refused_types().items():
        rows.append(f"| {code(types)} | {reason} |")
    return rows


def multimodal() -> list[str]:
    """The table of multimodal types whose language model can be patched."""
    types: dict[str, list[str]] = {}
    for model_type in sorted(multimodal_model_types()):
        if (inside := language_type(model_type)) in supported_model_types():
            types.setdefault(inside, []).append(model_type)
    rows = ["| language model | multimodal model types |", "|---|---|"]
    return rows + [f"| `{inside}` | {code(types[inside])} |" for inside in sorted(types)]


def updated(text: str) -> str:
    """`text` with the tables renewed; ValueError unless it has the markers of each, once, in order."""
    for (begin, end), rows in zip(MARKS.values(), (served(), multimodal(), refused()), strict=True):
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end) or begin in after or end in after:
            raise ValueError(f"expected one {begin} followed by one {end}")
        text = before + "\n".join([begin, *rows, end]) + after
    return text


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Write the list of model types into docs/families.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the list is out of date")
    options = parser.parse_args()
    missing = [model_type for model_type in supported_model_types() if model_type not in CONFIG_MAPPING]
    if missing:
        print(f"the installed transformers does not have {', '.join(missing)}", file=sys.stderr)
    text = PAGE.read_text(encoding="utf-8")
    new = updated(text)
    if options.check:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
