#!/usr/bin/env python3
"""Measure the share of a table of positions' scores that a bias by distance can carry, head by head.

python scripts/measure_position_scores.py gpt2_positions.safetensors CHECKPOINT embedded --json results.json

A source is the folder of a checkpoint with a table of positions, `embedded` for the small GPT-2 of the recipes, which is
trained first, or a safetensors file with the table, the norm and the projections of a first layer alone, by the names
in `TENSORS`. Checkpoints are measured with positions alone and as the mean over tokens: of text that the base writes, or
of what the embedded one was trained on.

It also measures the worth of the table beside attention: the loss if each layer has the base's own attention weights, but
values, MLPs and the head read hidden states without the table, or with its mean only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from measure_calibration import EMBEDDED, embedded, keep_mean, load, loss, position_limit, split, windows, written
from results import write
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.theory import PositionScores, position_scores, scores_between

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


@torch.no_grad()
def loss_without_table(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Return the loss of a GPT-2 whose attention weights see its table of positions, and nothing else does."""
    body, heads = model.transformer, model.config.n_head
    batch, length = tokens.shape
    ahead = torch.full((length, length), -torch.inf).triu(1)
    without = body.wte(tokens)
    whole = without + body.wpe.weight[:length]

    def split_heads(attention: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(batch, length, heads, -1).transpose(1, 2) for part in attention.c_attn(hidden).chunk(3, -1)]

    for block in body.h:
        query, key, value = split_heads(block.attn, block.ln_1(whole))
        weights = (query @ key.mT * query.shape[-1] ** -0.5 + ahead).softmax(-1)
        values = (value, split_heads(block.attn, block.ln_1(without))[2])
        whole, without = (
            hidden + block.attn.c_proj((weights @ each).transpose(1, 2).flatten(2))
            for hidden, each in zip((whole, without), values, strict=True)
        )
        whole, without = (hidden + block.mlp(block.ln_2(hidden)) for hidden in (whole, without))
    logits = model.lm_head(body.ln_f(without))[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def worth(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, float]:
    """Return the loss of a base, without its table beside attention, and with the mean of it; its table is changed."""
    found = {"base": loss(model, tokens), "without the table": loss_without_table(model, tokens)}
    keep_mean(model)
    found["with its mean"] = loss_without_table(model, tokens)
    return {name: round(value, 4) for name, value in found.items()}


def of_checkpoint(name: str, first: int, last: int | None) -> tuple[dict[str, PositionScores], dict[str, float]]:
    """Measure a model with positions alone, and averaged over tokens; and what its table is worth beside attention."""
    with tempfile.TemporaryDirectory() as scratch:
        parts = embedded(scratch) if name == EMBEDDED else None
        model = load(scratch if name == EMBEDDED else name)
    limit = position_limit(model)
    assert limit is not None
    length = min(limit, last or limit)
    first = min(first, length // 8)
    own = parts or written(model, 16, 4 * limit)
    text = torch.tensor(own[0])
    found = {
        "positions alone": position_scores(model, length=length, first=first),
        "mean over tokens": position_scores(model, text, length=length, first=first),
    }
    held = windows(own[split(own) :] if parts else own, limit)[: 16_384 // limit]
    return found, worth(model.eval(), held)


def main() -> int:
    """Run the command."""
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
            found, losses = of_tensors(path, options.first, last, options.head_size), None
        else:
            found, losses = of_checkpoint(source, options.first, options.last)
        results[path.stem] = {} if losses is None else {"loss with the base's attention": losses}
        if losses:
            print(path.stem, losses)
        for name, each in found.items():
            print(f"{path.stem}, {name}", each, sep="\n", flush=True)
            shares = {part: [round(x, 4) for x in getattr(each, part).tolist()] for part in SHOWN}
            results[path.stem][name] = {"first": each.first, "last": each.first + each.mean.shape[1], **shares}
    write(options.json, results)
    return 0


SHOWN = ("deviation", "explained", "explained_in_rows")
"""What is written of each head; curves are drawn from the functions."""


if __name__ == "__main__":
    sys.exit(main())
