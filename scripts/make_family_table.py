#!/usr/bin/env python3
"""Writes the list of model types into docs/families.md, from the families that are registered.

python scripts/make_family_table.py            # write it
python scripts/make_family_table.py --check    # exit 1 if it is not what the registry says
"""

import argparse
import sys
from pathlib import Path

from transformers import CONFIG_MAPPING

from hf_posenc.registry import family_for, supported_model_types

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN = "<!-- families: written by scripts/make_family_table.py -->"
END = "<!-- end of families -->"


def positions(model_type: str) -> str:
    """What the stock model has for positions, in a few words."""
    family = family_for(model_type)
    if family.own_positions is not None:
        return family.own_positions
    if family.position_table is not None:
        return "a learned table at the input"
    if family.use_rope_flag is not None:
        return "rotation, not in every layer"
    return "rotation of a part of each head" if family.slices_rotary else "rotation of whole heads"


def refused(model_type: str) -> str:
    """The settings of its config that are refused."""
    return ", ".join(f"`{name}`" for name in family_for(model_type).refuse) or "-"


def table() -> str:
    """The table, between its markers."""
    rows = ["| model type | its own positions | refused where the config sets |", "|---|---|---|"]
    for model_type in supported_model_types():
        rows.append(f"| `{model_type}` | {positions(model_type)} | {refused(model_type)} |")
    return "\n".join([BEGIN, *rows, END])


def updated(text: str) -> str:
    """`text` with the table renewed; ValueError unless it has both markers, once each, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in after:
        raise ValueError(f"expected one {BEGIN} followed by one {END}")
    return before + table() + after


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
