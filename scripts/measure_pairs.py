#!/usr/bin/env python3
"""Measure how many pairs of dimensions can stop turning: the loss of `rope_by_head` with fewer and fewer pairs.

python scripts/measure_pairs.py CHECKPOINT TEXT --json found.json

Pairs are chosen on the first windows of the text (`choose_pairs`), by each number, among the pairs of a head, of a
layer or of the model. By `frequency` the slowest pair of each head stops first. With `whole heads` all pairs of a head
stop together, first in the head with the smallest sum of its numbers. The loss of the next token is measured
on the last windows of the trained length: `plain`, after the closed forms of `calibrate` (`closed_form`), and after its
second stage as well (`matched`). The JSON file has the losses of each share of pairs that stop, in nats above the
base's (`rows`), and the largest share up to which none is above a threshold (`can_stop`). Shares grow until every loss
is above the largest threshold. The file is written after each way to choose.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posenc import Matching, PairChoice, calibrate, choose_pairs, patch_model
from hf_posenc.calibration.pair_choice import AMONG, MEASURES
from hf_posenc.recipes.results import write_json
from hf_posenc.schemes import RopeByHead

WAYS = ("plain", "closed_form", "matched")
FREQUENCY = ("frequency", "head")
WHOLE = ("divergence", "whole heads")
CHOICES = {f"{by}, {among}": (by, among) for by, among in [*itertools.product(MEASURES, AMONG), FREQUENCY, WHOLE]}
"""Name of a way to choose -> the number, and of what the share is kept."""


@torch.no_grad()
def loss_of(model: PreTrainedModel, windows: Tensor) -> float:
    """Return the mean loss of the next token in windows (N, T), in nats."""
    return sum(model(each[None], labels=each[None], use_cache=False).loss.item() for each in windows) / len(windows)


def losses(base: PreTrainedModel, scheme: RopeByHead, short: Tensor, held: Tensor, steps: int) -> dict[str, float]:
    """Return the losses of a scheme in each of `WAYS`.

    Args:
        base: the model, which stays as it is.
        scheme: what is put into copies of it.
        short: windows to calibrate on.
        held: windows to measure on.
        steps: of the second stage.
    """
    found = {}
    for way in WAYS:
        model = patch_model(copy.deepcopy(base), scheme)
        if way != "plain":
            calibrate(model, short, matching=None if way == "closed_form" else Matching(steps=steps, loss="attention"))
        found[way] = loss_of(model.eval(), held)
    return found


def choose(base: PreTrainedModel, windows: Tensor, by: str) -> PairChoice:
    """Return the choice of pairs by a number, on windows (N, T)."""
    if by in MEASURES:
        return choose_pairs(base, windows, by=by)
    other = choose_pairs(base, windows[:1], by="contribution")
    slower = tuple(tuple(tuple(float(-u) for u in range(len(head))) for head in layer) for layer in other.numbers)
    return replace(other, by=by, numbers=slower)


def of_heads(choice: PairChoice, keep: float) -> RopeByHead:
    """Return the scheme that rotates all pairs of a share of the heads, those with the largest sums, and no others."""
    sums = {(place, h): sum(head) for place, layer in enumerate(choice.numbers) for h, head in enumerate(layer)}
    kept = set(sorted(sums, key=lambda head: -sums[head])[: max(1, round(keep * len(sums)))])
    pairs = tuple(
        tuple(tuple(range(len(head))) if (place, h) in kept else () for h, head in enumerate(layer))
        for place, layer in enumerate(choice.numbers)
    )
    return RopeByHead(pairs=pairs, layers=None if choice.every_layer else choice.layers)


def schemes(choice: PairChoice, among: str, parts: int) -> list[tuple[float, RopeByHead]]:
    """Return the shares of pairs that stop, growing by one of `parts`, with the schemes of those that go on."""
    found: list[tuple[float, RopeByHead]] = []
    total = sum(len(head) for layer in choice.numbers for head in layer)
    for kept in range(parts - 1, 0, -1):
        share = kept / parts
        scheme = of_heads(choice, share) if among == WHOLE[1] else choice.scheme(share, among=among)
        turning = sum(len(head) for layer in scheme.by_head or () for head in layer)
        if turning < total and (not found or scheme != found[-1][1]):
            found.append((1 - turning / total, scheme))
    return found


def can_stop(rows: list[dict[str, float]], way: str, threshold: float) -> float:
    """Return the largest share up to which no loss of a way is above a threshold."""
    good = itertools.takewhile(lambda row: row[way] <= threshold, rows)
    return max((row["share"] for row in good), default=0.0)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model that rotates")
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("--tokens", type=int, default=16_384, help="to measure on, at the end of the text")
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), help="only these (default: all)")
    parser.add_argument("--choose-windows", type=int, default=16, help="to choose on, of the trained length")
    parser.add_argument("--calibrate-windows", type=int, default=64, help="of a quarter of the trained length")
    parser.add_argument("--steps", type=int, default=25, help="of the second stage of calibration")
    parser.add_argument("--parts", type=int, default=16, help="shares grow by one of so many parts")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.01, 0.05, 0.2], help="in nats")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()

    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    trained = base.config.max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    count, unseen = options.calibrate_windows * (trained // 4), options.tokens // trained * trained
    first = options.choose_windows * trained
    if options.parts < 2 or not unseen or len(ids) < max(count, first) + unseen:
        parser.error(
            f"--parts must be at least 2, --tokens at least {trained}, and {options.text} longer: it has {len(ids)} tokens"
        )
    if unknown := set(options.choices) - set(CHOICES):
        parser.error(f"no choice {'; '.join(sorted(unknown))}; choose from {'; '.join(CHOICES)}")
    short, held = ids[:count].view(-1, trained // 4), ids[-unseen:].view(-1, trained)
    wanted = {name: CHOICES[name] for name in options.choices}
    choices = {by: choose(base, ids[:first].view(-1, trained), by) for by in dict(wanted.values())}
    names = ("tokens", "choose_windows", "calibrate_windows", "steps", "parts")
    found: dict[str, Any] = {"checkpoint": Path(options.checkpoint).name, "text": options.text.name}
    found |= {name: getattr(options, name) for name in names}
    found |= {"torch": torch.__version__, "base": loss_of(base, held), "rows": {}, "can_stop": {}}
    for name, (by, among) in wanted.items():
        rows: list[dict[str, float]] = []
        for share, scheme in schemes(choices[by], among, options.parts):
            above = {
                way: loss - found["base"] for way, loss in losses(base, scheme, short, held, options.steps).items()
            }
            rows.append({"share": share} | above)
            print(f"{name}:", ", ".join(f"{key} {value:.3f}" for key, value in rows[-1].items()), flush=True)
            if min(above.values()) > max(options.thresholds):
                break
        found["rows"][name] = rows
        found["can_stop"][name] = {
            way: {str(limit): can_stop(rows, way, limit) for limit in options.thresholds} for way in WAYS
        }
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
