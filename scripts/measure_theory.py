#!/usr/bin/env python3
"""Measure the numbers of docs/theory_terms.md for a trained model: Su's expansion, Dai's four terms, equivariance.

python scripts/measure_theory.py CHECKPOINT --json results.json --plot terms.png
python scripts/measure_theory.py embedded --json results.json      the base that comes with the package

CHECKPOINT is a stock model that adds position vectors, with a token that texts begin with. It writes texts of its trained
length, and pairs of positions are drawn in each. The Hessian at the token embeddings does not depend on the model's own
positions, so its diagonal is split for sinusoids of the size of the model's table.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers
from results import write
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hf_posenc import analysis, patched, theory
from hf_posenc.analysis.plots import save
from hf_posenc.recipes.embedded import trained_base
from hf_posenc.theory import Expansion, plots
from hf_posenc.version import VERSION

EMBEDDED = "embedded"
SIZES = (0.5, 0.1, 0.03, 0.01, 0.001)
"""Factors of the position vectors, besides 1."""


def written(model: PreTrainedModel, count: int, length: int) -> torch.Tensor:
    """Return texts (count, length) that a model writes, past the token that would end them."""
    model.generation_config.eos_token_id = None
    start = torch.full((count, 1), model.config.bos_token_id)
    return model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, max_length=length, pad_token_id=0
    )


def quartiles(values: list[float]) -> dict[str, float]:
    """Return the quartiles of numbers, to three digits."""
    found = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    return {name: float(f"{value:.3g}") for name, value in zip(("lower", "median", "upper"), found, strict=True)}


def shares(found: list[Expansion], index: int | None) -> dict[str, dict[str, float]]:
    """Return the quartiles of the share of each term, for the input of a layer or for the output."""
    rows = [(each.output if index is None else each.layers[index]).shares for each in found]
    return {name: quartiles([row[name] for row in rows]) for name in rows[0]}


def residuals(found: list[Expansion]) -> dict[str, float]:
    """Return the quartiles of the residual of the output, divided by its sixth term."""
    return quartiles([each.output.sizes["residual"] / each.output.sizes["mixed"] for each in found])


def main(arguments: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--plot", type=Path, help="picture of the four terms")
    parser.add_argument("--texts", type=int, default=16, help="how many the model writes (default 16)")
    parser.add_argument("--pairs", type=int, default=4, help="of positions, in each text (default 4)")
    parser.add_argument("--hessians", type=int, default=8, help="texts of which the whole Hessian is taken (default 8)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    torch.manual_seed(options.seed)
    if options.checkpoint == EMBEDDED:
        model: PreTrainedModel = trained_base().eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint).eval()
    length = model.config.max_position_embeddings
    texts = written(model, options.texts, length)

    pairs = [torch.randperm(length - 1)[:2].sort().values.tolist() for _ in range(options.texts * options.pairs)]

    def expanded(size: float) -> list[Expansion]:
        return [
            theory.expansion(model, texts[number % options.texts], *pair, rows=0, size=size)
            for number, pair in enumerate(pairs)
        ]

    by_size = {1.0: expanded(1.0)}
    for size in SIZES:
        by_size[size] = expanded(size)
    found = by_size[1.0]
    with patched(model, "sinusoidal"):
        split = [
            theory.expansion(model, texts[number], *pairs[number], rows=model.config.hidden_size)
            for number in range(options.hessians)
        ]
    terms = theory.score_terms(model, texts)
    single = analysis.equivariance(model, texts)
    with patched(model, "nope"):
        blind = analysis.equivariance(model.double(), texts)
    result: dict[str, Any] = {
        "model": Path(options.checkpoint).name,
        "hf_posenc": VERSION,
        "transformers": transformers.__version__,
        "arguments": {
            name: value for name, value in vars(options).items() if name not in ("checkpoint", "json", "plot")
        },
        "expansion": {
            "pairs": len(found),
            "layers": [shares(found, index) for index in range(len(found[0].layers))],
            "output": shares(found, None),
            "residual over mixed": residuals(found),
            "residual over mixed, by size": {f"{size:g}": residuals(each) for size, each in by_size.items()},
            "sixth term is the smallest": statistics.mean(
                min(each.output.sizes, key=each.output.sizes.__getitem__) == "mixed" for each in found
            ),
        },
        "hessian": {
            "size": model.config.hidden_size,
            "diagonal_share": quartiles([each.diagonal_share for each in split]),
            "relative_share": quartiles([each.diagonal.relative_share for each in split]),
            "diagonal over mixed": quartiles(
                [abs(e.diagonal.relative + e.diagonal.absolute) / e.output.sizes["mixed"] for e in split]
            ),
        },
        "terms": terms.to_dict(),
        "equivariance": {"with its positions": single.to_dict(), "without, float64": blind.to_dict()},
    }
    write(options.json, result)
    if options.plot:
        save(plots.score_terms(terms, title=f"Scores of {result['model']}"), options.plot)


if __name__ == "__main__":
    main()
