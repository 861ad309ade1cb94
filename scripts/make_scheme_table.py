#!/usr/bin/env python3
"""Writes the tables of schemes into README.md and docs/schemes.md, from the classes that are registered.

python scripts/make_scheme_table.py            # write them
python scripts/make_scheme_table.py --check    # exit 1 if one is not what the registry says
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from hf_posenc import Scheme, available_schemes
from hf_posenc.registry import scheme_class
from hf_posenc.schemes.base import EVERY_SCHEME

sys.path.insert(0, str(Path(__file__).parent))
import marked
from scheme_facts import exports, parameters

README = Path(__file__).parents[1] / "README.md"
PAGE = README.parent / "docs/schemes.md"
BEGIN = "<!-- schemes: written by scripts/make_scheme_table.py -->"
END = "<!-- end of schemes -->"


def first_line(documented: object) -> str:
    """First line of a docstring, without its full stop; a cell of a Markdown table."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    return lines[0].rstrip(".").replace("|", r"\|") if lines else ""


def hyperparameters(scheme: type[Scheme]) -> str:
    """`name=default` of each that not every scheme has. `None`: by the base or the scheme, or off."""
    own = [field for field in fields(scheme) if field.name not in EVERY_SCHEME]
    names = (f"`{field.name}={field.default!r}`".replace("|", r"\|") for field in own)
    return ", ".join(names) or "none"


def limit(scheme: type[Scheme]) -> str:
    """What limits the positions: what the class says of its `limit`, if it has one of its own."""
    if scheme.limit is Scheme.limit:
        return "none"
    text = first_line(scheme.limit)
    return text[:1].lower() + text[1:]


def papers(scheme: type[Scheme]) -> str:
    """Links to the papers that the docstring's line `Source:` names by authors, year and arXiv number.

    ValueError if it names none.
    """
    source = re.search(r"^Source: (.+?)(?=\n\n|\Z)", inspect.getdoc(scheme) or "", flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"([^;]+?), arXiv:(\d{4}\.\d{5})", " ".join(source[1].split()) if source else "")
    if not found:
        raise ValueError(f"the docstring of {scheme.__name__} needs a line `Source: AUTHORS YEAR, arXiv:NUMBER.`")
    return ", ".join(f"[{who.strip()}](https://arxiv.org/abs/{number})" for who, number in found)


def table(columns: dict[str, Callable[[type[Scheme]], str]]) -> str:
    """A row for each scheme, by its name; what a column holds is said by its function."""
    rows = [" | ".join(["| scheme", *columns]) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in available_schemes():
        scheme = scheme_class(name)
        rows.append(" | ".join([f"| `{name}`", *(cell(scheme) for cell in columns.values())]) + " |")
    return "\n".join(rows)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the tables of schemes into README.md and docs/schemes.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    tables = {
        README: table({"what it does": first_line, "paper": papers}),
        PAGE: table(
            {
                "hyper-parameters": hyperparameters,
                "limit": limit,
                "parameters": parameters,
                "exports": exports,
                "paper": papers,
            }
        ),
    }
    # A list, so that each file is looked at.
    current = [marked.write(page, BEGIN, END, rows, check=check) for page, rows in tables.items()]
    if check and not all(current):
        print("a table of schemes is out of date; run python scripts/make_scheme_table.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
