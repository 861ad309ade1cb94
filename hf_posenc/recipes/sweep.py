"""Writes the tables and figures of sweeps again, from the results.json of their runs.

python -m hf_posenc.recipes.sweep runs/compare      # writes summary.json, summary.md and the figures there
"""

import sys
from pathlib import Path

from . import sweep_report
from .options import UsageError
from .results import read_json


def main() -> None:
    """Write the summary of each folder that the command line names, and print its tables."""
    for name in sys.argv[1:]:
        try:
            title = read_json(Path(name) / "summary.json")["title"]
            print(sweep_report.markdown(sweep_report.summarize(Path(name), title)))
        except (OSError, UsageError) as error:
            raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
