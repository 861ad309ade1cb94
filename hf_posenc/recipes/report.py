"""Writes the reports of runs again, from their results.json.

python -m hf_posenc.recipes.report runs/gpt2-alibi/results.json      # writes report.html beside it
"""

import sys
from pathlib import Path

from . import run_report
from .results import read_json


def main() -> None:
    """Write report.html beside each results.json that the command line names."""
    for name in sys.argv[1:]:
        source = Path(name)
        run_report.write(source.with_name("report.html"), read_json(source))
        print(source.with_name("report.html"))


if __name__ == "__main__":
    main()
