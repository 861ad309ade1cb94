#!/usr/bin/env python3
"""How much of what a table of positions does to scores a bias by distance can carry, head by head.

python scripts/measure_position_scores.py gpt2_positions.safetensors CHECKPOINT embedded --json results.json

A source is the folder of a checkpoint with a table of positions, `embedded` for the small GPT-2 of the recipes, which is
trained first, or a safetensors file with the table, the norm and the projections of a first layer alone, by the names
in `TENSORS`. Checkpoints are measured with positions alone and as the mean over tokens: of text that the base writes, or
of what the embedded one was trained on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from measure_calibration import EMBEDDED, embedded, load, position_limit, written
from safetensors.torch import load_file

from hf_posenc.analysis import PositionScores, position_scores, scores_between

TABLE, NORM, PROJECTIONS = "transformer.wpe.weight", "transformer.h.0.ln_1", ("attention_0.query", "attention_0.key")
TENSORS = (TABLE, *(f"{name}.{part}" for name in (NORM, *PROJECTIONS) for part in ("weight", "bias")))
"""The table (T, E), weight and bias (E,) of the norm, weights (E, E), which are multiplied from the right, and biases
(E,) of the projections of queries and keys."""


def of_tensors(path: Path, first: int, last: int, size: int) -> dict[str, PositionScores]:
    """Measure a file of tensors: with the biases of norm and projections, and without."""
    tensors = {name: tensor.double() for name, tensor in load_file(path).items()}
    table, width = tensors[TABLE][:last], tensors[TABLE].shape[1]
    found = {}
    for name, some in (("positions alone", 1.0), ("positions alone, without biases", 0.0)):
        normed = F.layer_norm(table, (width,), tensors[f"{NORM}.weight"], some * tensors[f"{NORM}.bias"])
        query, key = (
            (normed @ tensors[f"{each}.weight"] + some * tensors[f"{each}.bias"]).view(last, -1, size).transpose(0, 1)
            for each in PROJECTIONS
        )
        found[name] = scores_between(query, key, scaling=size**-0.5, first=first, label=path.name)
    return found


def of_checkpoint(name: str, first: int, last: int | None) -> dict[str, PositionScores]:
    """Measure a model with positions alone, and averaged over tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        parts = embedded(scratch) if name == EMBEDDED else None
        model = load(scratch if name == EMBEDDED else name)
    limit = position_limit(model)
    assert limit is not None
    length = min(limit, last or limit)
    first = min(first, length // 8)
    text = torch.tensor(parts[0] if parts else written(model, 4, limit))
    return {
        "positions alone": position_scores(model, length=length, first=first),
        "mean over tokens": position_scores(model, text, length=length, first=first),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help=f"safetensors files, checkpoints, {EMBEDDED}")
    parser.add_argument(
        "--first", type=int, default=64, help="first position that counts; at most an eighth of a table"
    )
    parser.add_argument("--last", type=int, help="positions from here on do not count; by default all of the table do")
    parser.add_argument("--head-size", type=int, default=64, help="of a file of tensors")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()
    results = {}
    for source in options.sources:
        path = Path(source)
        if path.suffix == ".safetensors":
            last = options.last or len(load_file(path)[TABLE])
            found = of_tensors(path, options.first, last, options.head_size)
        else:
            found = of_checkpoint(source, options.first, options.last)
        results[path.stem] = {}
        for name, each in found.items():
            print(f"{path.stem}, {name}", each, sep="\n", flush=True)
            shares = {part: [round(x, 4) for x in getattr(each, part).tolist()] for part in SHOWN}
            results[path.stem][name] = {"first": each.first, "last": each.first + each.mean.shape[1], **shares}
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


SHOWN = ("deviation", "explained", "explained_in_rows")
"""What is written of each head; curves are drawn from the functions."""


if __name__ == "__main__":
    sys.exit(main())
