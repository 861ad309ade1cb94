#!/usr/bin/env python3
"""Writes the table of schemes into README.md, from the classes that are registered.

python scripts/make_scheme_table.py            # write it
python scripts/make_scheme_table.py --check    # exit 1 if it is not what the registry says
"""

import argparse
import inspect
import sys
from dataclasses import fields
from pathlib import Path

from hf_posenc import Scheme, available_schemes
from hf_posenc.registry import scheme_class
from hf_posenc.schemes.base import EVERY_SCHEME

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- schemes: written by scripts/make_scheme_table.py -->"
END = "<!-- end of schemes -->"


def first_line(documented: object) -> str:
    """First line of a docstring, without its full stop; a cell of a Markdown table."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    return lines[0].rstrip(".").replace("|", r"\|") if lines else ""


def hyperparameters(scheme: type[Scheme]) -> str:
    """`name=default` of each that not every scheme has, with `None` where the base model decides or the option is off."""
    own = [field for field in fields(scheme) if field.name not in EVERY_SCHEME]
    names = (f"`{field.name}={field.default!r}`".replace("|", r"\|") for field in own)
    return ", ".join(names) or "none"


def limit(scheme: type[Scheme]) -> str:
    """What limits the positions: what the class says of its `limit`, if it has one of its own."""
    if scheme.limit is Scheme.limit:
        return "none"
    text = first_line(scheme.limit)
    return text[:1].lower() + text[1:]


def table() -> str:
    """The table, between its markers."""
    rows = ["| scheme | what it does | hyper-parameters | limit |", "|---|---|---|---|"]
    for name in available_schemes():
        scheme = scheme_class(name)
        rows.append(f"| `{name}` | {first_line(scheme)} | {hyperparameters(scheme)} | {limit(scheme)} |")
    return "\n".join([BEGIN, *rows, END])


def updated(text: str) -> str:
    """`text` with the table renewed; ValueError unless it has both markers, once each, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in after:
        raise ValueError(f"expected one {BEGIN} followed by one {END}")
    return before + table() + after


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the table of schemes into README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table is out of date")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = updated(text)
    if arguments.check:
        if new != text:
            print("README.md: the table of schemes is out of date; run python scripts/make_scheme_table.py")
            return 1
    elif new != text:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
