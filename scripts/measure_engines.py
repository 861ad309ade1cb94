#!/usr/bin/env python3
"""What other engines compute of swapped models: the table of docs/serving.md.

python scripts/measure_engines.py CHECKPOINT FOLDER --vllm PYTHON --llama-cpp PYTHON --transformers4 PYTHON --json FILE

Swaps the positions of a LLaMA without calibrating, exports it into FOLDER, and compares log-probabilities by
`check(engine=...)`. Each PYTHON has that engine installed; engines without one are left out. Results are written after
each comparison, and those that are there are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_posenc import check, export_gguf, export_stock, patch_model
from hf_posenc.checking.other_engines import OtherEngine
from hf_posenc.checkpoints.files import replaced
from hf_posenc.core.errors import HfPosencError

LENGTH = 767
"""Tokens of the longest prompt within the trained length."""

SWAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "`transformer_xl`": ("transformer_xl", {}),
    "`transformer_xl`, RoPE in the last five layers": ("transformer_xl", {"layers": range(25)}),
    "`alibi`": ("alibi", {}),
    "`alibi`, trained slopes": ("alibi", {"trainable": True}),
    "`nope` in `3::4`": ("nope", {"layers": "3::4"}),
    "`rope`, YaRN": ("rope", {"scaling": {"rope_type": "yarn", "factor": 2.0}}),
    "`rope`, `soft_clip`": ("rope", {"frequencies": {"name": "soft_clip"}}),
    "`rope`, a window of 128": ("rope", {"window": 128}),
    "`nope`": ("nope", {}),
}


def swapped(checkpoint: str, name: str) -> Any:
    """Return the patched model; what starts at random starts the same in each run."""
    scheme, options = SWAPS[name]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    patch_model(model, scheme, seed=0, **options)
    if options.get("trainable"):
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "posenc" in key:
                    parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
    return model


def targets(model: Any, name: str, folder: Path, pythons: dict[str, str]) -> dict[str, OtherEngine]:
    """Export a model, and return what each engine is to run."""
    found: dict[str, OtherEngine] = {}
    if SWAPS[name][0] != "alibi":
        export_stock(model, folder / "stock")
        for column, engine in (
            ("transformers 5", "transformers"),
            ("transformers 4.57", "transformers"),
            ("vLLM", "vllm"),
        ):
            if column in pythons:
                found[column] = OtherEngine(engine, str(folder / "stock"), pythons[column])
    elif "vLLM" in pythons:
        model.save_pretrained(folder / "patched")
        found["vLLM"] = OtherEngine("vllm", str(folder / "patched"), pythons["vLLM"])
    for column, dtype in (("llama.cpp, float32", "float32"), ("llama.cpp, q8_0", "q8_0")):
        if "llama.cpp" in pythons:
            try:
                export_gguf(model, folder / f"{dtype}.gguf", dtype=dtype)
            except (HfPosencError, ValueError):  # no graph, or rows that q8_0 cannot hold
                continue
            found[column] = OtherEngine("llama.cpp", str(folder / f"{dtype}.gguf"), pythons["llama.cpp"])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm")
    parser.add_argument("--llama-cpp")
    parser.add_argument("--transformers4")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    named = {"vLLM": arguments.vllm, "llama.cpp": arguments.llama_cpp, "transformers 4.57": arguments.transformers4}
    pythons = {"transformers 5": sys.executable, **{key: value for key, value in named.items() if value}}
    rows: dict[str, Any] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    for name in SWAPS:
        if name in rows:
            continue
        model = swapped(arguments.checkpoint, name)
        row = {}
        for column, target in targets(model, name, arguments.folder / re.sub(r"\W+", "-", name), pythons).items():
            report = check(model, engine=target, length=LENGTH)
            asked = {each.about: {"mean": each.measured, "found": each.found} for each in report.outcomes}
            row[column] = asked
            print(f"{name}, {column}: {report}", flush=True)
        rows[name] = row
        with replaced(arguments.json) as partial:
            partial.write_text(json.dumps(rows, indent=1) + "\n")
        del model
        gc.collect()
    print(table(rows))


def table(rows: dict[str, Any]) -> str:
    """Return the table of the page: largest difference in a prompt, and greedy tokens that are the same."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = []
        for column in columns:
            if (asked := row.get(column)) is None:
                cells.append("")
                continue
            largest = re.search(r"differ by (\S+) at most", asked["prompt"]["found"])
            same = re.search(r"(\d+) of \d+ greedy", asked["decoding"]["found"])
            cells.append(f"{largest[1] if largest else ''}, {same[1] if same else ''}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
