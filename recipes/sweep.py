"""Writes the tables and figures of sweeps again, from the JSON of their runs alone.

python recipes/sweep.py runs/compare      # writes summary.json, summary.md and the figures in it
"""

import sys
from pathlib import Path

import summary
from options import UsageError
from results import read_json

if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            title = read_json(Path(name) / "summary.json")["title"]
            print(summary.markdown(summary.summarize(Path(name), title)))
        except (OSError, UsageError) as error:
            raise SystemExit(f"{error}") from None
