#!/usr/bin/env python3
"""Measure token and position matrices: norms, diagonal shares of covariances, distances of neighbours.

    python scripts/measure_embeddings.py --json results.json                                  # a GPT-2 trained on the spot
    python scripts/measure_embeddings.py stories=CHECKPOINT gpt2=FILE.safetensors:KEY --json results.json

A source is a name with a checkpoint, whose matrices are read as they enter the model, or with one position table of a
file. Without any, the byte-level GPT-2 of recipes/embedded.py is trained first, which takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from results import read, rounded, write
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc.analysis import position_vectors
from hf_posenc.theory import (
    EmbeddingStatistics,
    distance_share,
    embedding_statistics,
    neighbour_distances,
    vector_statistics,
)

ROWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1022, 1023)
"""Positions whose norms and neighbours are written down; of the others, means and extremes."""


def embedded(steps: int, seed: int) -> PreTrainedModel:
    """Train the byte-level GPT-2 of the recipes on the standard library's sources."""
    from hf_posenc.recipes.embedded import byte_model, byte_tokenizer, standard_library, train_base

    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in standard_library())
    model = byte_model(tokenizer)
    train_base(model, torch.tensor(tokenizer(text, verbose=False)["input_ids"]), steps=steps)
    return model


def of_table(table: torch.Tensor) -> dict[str, Any]:
    """Describe a position table (T, E)."""
    norms, steps = table.double().norm(dim=-1), neighbour_distances(table)
    return {
        "norms": {str(row): norms[row].item() for row in ROWS if row < len(norms)},
        "neighbour_distances": {
            "mean": steps.mean().item(),
            "median": steps.median().item(),
            "smallest": [steps.min().item(), int(steps.argmin())],
            "largest": [steps.max().item(), int(steps.argmax())],
            "at": {str(row): steps[row].item() for row in ROWS if row < len(steps)},
        },
    }


def of_file(path: str, key: str) -> dict[str, Any]:
    """Describe one table of a safetensors file."""
    with safe_open(path, "pt") as file:
        table = file.get_tensor(key).double()
    found = {"positions": vector_statistics(table).__dict__, "distance_share": distance_share(table @ table.T)}
    return found | of_table(table)


def of_model(model: PreTrainedModel) -> dict[str, Any]:
    """Describe both matrices of a model."""
    found: EmbeddingStatistics = embedding_statistics(model)
    described = {key: each for key, each in found.to_dict().items() if key != "neighbour_distances"}
    if found.neighbour_distances is None:
        return described
    table = position_vectors(model)
    assert table is not None
    return described | of_table(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", metavar="NAME=SOURCE", help="a checkpoint, or FILE.safetensors:KEY")
    parser.add_argument("--steps", type=int, default=1200, help="of the model that is trained where no source is named")
    parser.add_argument("--seed", type=int, default=0, help="of that model")
    parser.add_argument("--json", type=Path, required=True, help="results; other names that are there already stay")
    options = parser.parse_args()
    sources = dict(source.split("=", 1) for source in options.sources)
    results = read(options.json, {})
    if not sources:
        settings = {"steps": options.steps, "seed": options.seed}
        results["embedded GPT-2"] = settings | of_model(embedded(options.steps, options.seed))
        results["embedded GPT-2, as it starts"] = settings | {"steps": 0} | of_model(embedded(0, options.seed))
    for name, source in sources.items():
        path, _, key = source.rpartition(":")
        if path.endswith(".safetensors"):
            results[name] = of_file(path, key)
        else:
            results[name] = of_model(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))
    write(options.json, rounded(results, 5))
    for name, each in results.items():
        positions, tokens = each.get("positions"), each.get("tokens")
        for what, found in (("tokens", tokens), ("positions", positions)):
            if found is not None:
                print(
                    f"{name}: {found['count']:,} {what}, norm {found['mean_norm']:.3f} +- {found['std_norm']:.3f}, "
                    f"diagonal {found['diagonal_share']:.3f} (independent {found['independent_share']:.3f}), "
                    f"correlation {found['correlation']:.3f}, "
                    f"{found['dimensions']:.1f} dimensions, common {found['common']:.3f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
