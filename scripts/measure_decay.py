#!/usr/bin/env python3
"""Measure the score by distance of a model with RoPE, from the products of queries and keys that it turns on a text.

    python scripts/measure_decay.py stories=CHECKPOINT --text FILE --json results.json

For each layer and head: the score at each distance, as the sum over the pairs that the model has, and as the integral over
the same weights and frequencies with straight lines between them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from results import read, rounded, write
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posenc.theory import rotary_weights

DISTANCES = (-512, -128, -32, -8, -1, 0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def measure(model: PreTrainedModel, tokens: Tensor) -> dict[str, Any]:
    """Return scores by layer, head and distance, in nats."""
    found = rotary_weights(model, tokens, progress=True)
    sums = found.decay(DISTANCES).scores
    far, here = (sums[..., DISTANCES.index(d)] for d in (128, 0))
    return {
        "tokens": list(tokens.shape),
        "distances": list(DISTANCES),
        "frequencies": found.frequencies[0].tolist(),
        "layers": list(found.layers),
        "mean": sums.mean((0, 1)).tolist(),
        "heads": int(sums.shape[0] * sums.shape[1]),
        "heads_lower_at_128_than_at_0": int((far < here).sum()),
        "sum": sums.tolist(),
        "integral": found.integral(DISTANCES, progress=True).scores.tolist(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="NAME=CHECKPOINT", help="models that turn queries and keys")
    parser.add_argument("--text", type=Path, required=True, help="what they read, from its beginning")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--windows", type=int, default=16, help="windows")
    parser.add_argument("--json", type=Path, required=True, help="results; other names that are there already stay")
    options = parser.parse_args()
    results = read(options.json, {})
    text = options.text.read_text(encoding="utf-8")
    for name, source in (each.split("=", 1) for each in options.sources):
        wanted = options.length * options.windows
        # No tokenizer makes fewer than one token of 16 characters of prose.
        ids = torch.tensor(AutoTokenizer.from_pretrained(source)(text[: 16 * wanted], verbose=False)["input_ids"])
        if len(ids) < wanted:
            parser.error(f"{options.text} has {len(ids)} tokens for {name}, {wanted} are asked for")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        results[name] = {"text": options.text.name} | measure(model, ids[:wanted].view(options.windows, options.length))
        print(name, results[name]["heads_lower_at_128_than_at_0"], "of", results[name]["heads"], "heads")
    write(options.json, rounded(results), indent=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
