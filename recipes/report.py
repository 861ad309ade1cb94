"""Writes the reports of runs again, each from its results.json alone.

python recipes/report.py runs/gpt2-alibi/results.json      # writes report.html beside it
"""

import sys
from pathlib import Path

import page
from results import read_json

if __name__ == "__main__":
    for name in sys.argv[1:]:
        source = Path(name)
        page.write(source.with_name("report.html"), read_json(source))
        print(source.with_name("report.html"))
