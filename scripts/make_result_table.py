#!/usr/bin/env python3
"""Writes results into pages: README.md's table, from what scripts/measure_calibration.py measured, and the quickstart's.

python scripts/make_result_table.py            # write it
python scripts/make_result_table.py --check    # exit 1 if one is not what was measured
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import marked
from measure_calibration import SCHEMES as OPTIONS
from measured import CONTROL, SWAPS, loss_by_length, measurement

from hf_posenc.recipes.run_report import as_text

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN = "<!-- results: written by scripts/make_result_table.py -->"
END = "<!-- end of results -->"
SCHEMES = ("transformer_xl", "shaw", "t5", "alibi")
RUN = ("<!-- quickstart: written by scripts/make_result_table.py -->", "<!-- end of quickstart -->")
"""In docs/fine_tune.md: what a run prints at its end."""


def table() -> str:
    """Return the perplexity of the base, and of each swap after all of its fine-tuning."""
    measured = measurement(SWAPS)
    base = ("base", CONTROL)
    shown = {"the base, untouched": (base, False)}
    window = OPTIONS["window"][1]["window"]
    shown[f"the base, untouched, in a window of {window} tokens"] = (("window", "plain"), False)
    shown["`far_rope`, untrained"] = (("far_rope", "plain"), False)
    shown["the base, fine-tuned"] = (base, True)
    factor = OPTIONS["yarn"][1]["scaling"]["factor"]
    shown[f"`rope` with YaRN, factor {factor:g}, fine-tuned"] = (("yarn", "plain"), True)
    for scheme in SCHEMES:
        options = "".join(f", `{name}={value}`" for name, value in OPTIONS[scheme][1].items())
        shown[f"`{scheme}`{options}, plain swap, fine-tuned"] = ((scheme, "plain"), True)
        shown[f"`{scheme}`{options}, calibrated, fine-tuned"] = ((scheme, "outputs"), True)
    rows = ["| perplexity at | seeds | " + " | ".join(f"{length:,}" for length in measured.lengths) + " |"]
    rows.append("|---" * (2 + len(measured.lengths)) + "|")
    for label, (name, tuned) in shown.items():
        found = loss_by_length(measured.of(*name).values(), tuned=tuned)
        cells = [cell(found[length]) for length in measured.lengths]
        seeds = len(found[measured.trained]) if tuned else 1  # without training all seeds are one model
        rows.append(" | ".join([f"| {label}", str(seeds), *cells]) + " |")
    return "\n".join(rows)


def cell(losses: list[float]) -> str:
    """Return the perplexity of the mean loss, and the standard deviation over seeds."""
    mean = math.exp(statistics.fmean(losses))
    if len(set(losses)) == 1:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {mean * statistics.stdev(losses):.2f}"


def quickstart() -> str:
    """What the quickstart's run printed, as a block of text; what calibration did is a long line, and left out."""
    results = json.loads((ROOT / "docs/measured/quickstart.json").read_text(encoding="utf-8"))
    return f"```text\n{as_text(results).rpartition(chr(10) * 2)[0]}\n```"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write results into README.md and docs/fine_tune.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table is out of date")
    check = parser.parse_args().check
    current = marked.write(README, BEGIN, END, table(), check=check)
    current &= marked.write(ROOT / "docs/fine_tune.md", *RUN, quickstart(), check=check)
    if check and not current:
        print("README.md, docs/fine_tune.md: results are out of date; run python scripts/make_result_table.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
