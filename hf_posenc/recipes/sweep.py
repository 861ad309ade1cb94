"""Writes the tables and figures of sweeps again, from the JSON of their runs alone.

python -m hf_posenc.recipes.sweep runs/compare      # writes summary.json, summary.md and the figures in it
"""

import sys
from pathlib import Path

from . import summary
from .options import UsageError
from .results import read_json


def main() -> None:
    """Writes the summary of each sweep's folder that the command line names, and prints its tables."""
    for name in sys.argv[1:]:
        try:
            title = read_json(Path(name) / "summary.json")["title"]
            print(summary.markdown(summary.summarize(Path(name), title)))
        except (OSError, UsageError) as error:
            raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
