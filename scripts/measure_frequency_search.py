#!/usr/bin/env python3
"""Search the frequencies of a RoPE model at longer lengths, and compare what they predict with the known scalings.

python scripts/measure_frequency_search.py CHECKPOINT TEXT --search 1024 2048 --lengths 512 1024 2048 --json found.json

The first tokens of the text only measure; the searches read windows after them. The JSON file has, for each strategy and
length of a search, the report of the search and the perplexity in fresh windows of every length.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import DivideAndConquer, Evolution, patched, search_frequencies
from hf_posenc.evaluation import non_overlapping_perplexity
from hf_posenc.recipes.results import write_json


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model that rotates")
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("--search", type=int, nargs="+", required=True, help="lengths of the searches, in tokens")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="lengths that are measured, in tokens")
    parser.add_argument("--measured", type=int, default=16_384, help="tokens that only measure")
    parser.add_argument("--windows", type=int, default=6, help="windows of a search")
    parser.add_argument("--held-out", type=int, default=2, help="windows among them that only judge")
    parser.add_argument("--population", type=int, default=32, help="of the evolution")
    parser.add_argument("--iterations", type=int, default=6, help="of the evolution")
    parser.add_argument("--increments", type=int, default=10, help="of the divide and conquer")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    text = options.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    unseen, rest = ids[: options.measured], ids[options.measured :]
    strategies = (
        DivideAndConquer(increments=options.increments),
        Evolution(population=options.population, iterations=options.iterations, parents=8, mutations=8, crossovers=8),
    )
    rows = []
    for length in options.search:
        windows = rest[: options.windows * length].view(-1, length)
        for strategy in strategies:
            found = search_frequencies(
                model, windows, length, strategy=strategy, held_out=options.held_out, progress=True
            )
            print(found)
            with patched(model, found.scheme):
                perplexities = {
                    each: non_overlapping_perplexity(model, unseen, length=each).perplexity for each in options.lengths
                }
            rows.append({"search": found.to_dict(), "perplexities": perplexities})
            print(perplexities)
            write_json(options.json, {"checkpoint": Path(options.checkpoint).name, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
