#!/usr/bin/env python3
"""Writes the table of results into README.md, from what scripts/measure_calibration.py measured.

python scripts/make_result_table.py            # write it
python scripts/make_result_table.py --check    # exit 1 if it is not what was measured
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import marked
from plot_schemes import CALIBRATION, loss_by_length

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- results: written by scripts/make_result_table.py -->"
END = "<!-- end of results -->"
SCHEMES = ("transformer_xl", "shaw", "t5", "alibi")


def table() -> str:
    """Perplexity of the base, and of each swap after all of its fine-tuning: exp of the mean loss of the seeds."""
    measured = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    lengths = measured["settings"]["lengths"]
    shown = {"the base, untouched": ("control", False), "the base, fine-tuned": ("control", True)}
    for scheme in SCHEMES:
        shown[f"`{scheme}`, plain swap, fine-tuned"] = (f"{scheme}, plain", True)
        shown[f"`{scheme}`, calibrated, fine-tuned"] = (f"{scheme}, attention", True)
    rows = ["| perplexity at | seeds | " + " | ".join(f"{length:,}" for length in lengths) + " |"]
    rows.append("|---" * (2 + len(lengths)) + "|")
    for label, (name, tuned) in shown.items():
        found = loss_by_length(measured["runs"], name, tuned=tuned)
        cells = [f"{math.exp(statistics.fmean(found[length])):.2f}" for length in lengths]
        rows.append(" | ".join([f"| {label}", str(len(found[lengths[0]])), *cells]) + " |")
    return "\n".join(rows)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the table of results into README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table is out of date")
    check = parser.parse_args().check
    if not marked.write(README, BEGIN, END, table(), check=check) and check:
        print("README.md: the table of results is out of date; run python scripts/make_result_table.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
