#!/usr/bin/env python3
"""How near to its base a swap comes by fine-tuning: calibrated or plain, with the base's predictions as a second target.

python scripts/measure_fine_tuning.py CHECKPOINT TEXT --schemes transformer_xl --json results.json
python scripts/measure_fine_tuning.py CHECKPOINT --schemes t5 --json results.json      text that the base writes itself
python scripts/measure_fine_tuning.py embedded --schemes t5 --json results.json        the small GPT-2 of the recipes

Each scheme is calibrated, then fine-tuned on the text alone, and on the text together with the base's predictions. The
base is fine-tuned in the same two ways, as the control. Each of these takes the learning rate of `--rates` that has the
lowest loss after a tenth of the tokens, on held-out windows that are not measured. A plain swap is fine-tuned on the
text, with all tokens at each of `--plain-rates`, and the rate with the lowest loss at the end counts: what is best after
a tenth of the tokens can be too large for the rest. Results are written after each run; an interrupted measurement goes on.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure_calibration as calibration
import torch
from results import read, write
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import patch_model
from hf_posenc.calibration import Matching, calibrate

RATES, PLAIN_RATES = (1e-4, 3e-4, 1e-3), (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
PLAIN = "plain swap"
RUNS = ("text", "text and base", PLAIN)
"""Ways to fine-tune: a calibrated swap in the first two, a plain one, on the text, in the last."""
CONTROL = "control"
CHOOSE, BATCH_TOKENS = 16, 2048
"""Held-out windows that choose the rate, and tokens of a step."""


def start(
    options: argparse.Namespace, checkpoint: str, scheme: str, seed: int, short: Tensor, *, plain: bool
) -> PreTrainedModel:
    """Return the base, or a plain or calibrated swap of it."""
    model = calibration.load(checkpoint)
    if scheme == CONTROL:
        return model
    name, hyperparameters = calibration.SCHEMES[scheme]
    patch_model(model, name, seed=seed, **hyperparameters)
    if plain:
        return model
    matching = Matching(steps=options.steps, weight_rate=options.weight_rate, seed=seed)
    calibrate(model, short, closed_windows=calibration.FITTED, matching=matching)
    return model


def tuned(options, model: PreTrainedModel, train: Tensor, teacher: PreTrainedModel | None, held, rate, tokens, seed):
    """Fine-tune a model, and return its losses at each number of tokens."""
    length = min(train.shape[1], calibration.position_limit(model) or train.shape[1])
    rows = train.reshape(-1, length) if train.shape[1] % length == 0 else train[:, :length]
    settings = {"rate": rate, "tokens_at": tokens, "batch_size": max(1, BATCH_TOKENS // length), "seed": seed}
    return calibration.fine_tune(model, rows, held, **settings, teacher=teacher)


def measure(options: argparse.Namespace, checkpoint: str, parts: list[list[int]], result: dict[str, Any]) -> None:
    """Make the runs that are missing, and write each as it is done."""
    first = calibration.split(parts)
    train = calibration.windows(parts[:first], options.length)
    short = calibration.windows(parts[:first], options.calibrate_length)[: options.calibrate_windows]
    own = options.lengths[0]
    choose = {own: calibration.windows(parts[first:], own)[:CHOOSE]}
    measured = [token for part in parts[first:] for token in part][CHOOSE * own :]
    few = {length: max(4, options.held_out_tokens // length) for length in options.lengths}
    held = {length: calibration.windows([measured], length)[: few[length]] for length in options.lengths}
    teacher = calibration.load(checkpoint).eval()
    for seed in options.seeds:
        for scheme in (CONTROL, *options.schemes):
            missing = [how for how in options.runs if f"{scheme}, {how}, seed {seed}" not in result["runs"]]
            for plain, group in itertools.groupby(missing, lambda how: how == PLAIN):
                if plain and scheme == CONTROL:
                    continue
                begin = start(options, checkpoint, scheme, seed, short, plain=plain)
                before = calibration.measure(begin, held)
                for how in group:
                    began, teaches = time.process_time(), teacher if how == "text and base" else None
                    losses, after = {}, {}
                    measured_on, tokens = (held, options.tokens) if plain else ({}, [max(options.tokens) // 10])
                    for rate in options.plain_rates if plain else options.rates:
                        model = copy.deepcopy(begin)
                        after[rate] = tuned(options, model, train, teaches, measured_on, rate, tokens, seed)
                        losses[rate] = calibration.measure(model, choose)[str(own)]
                    rate = min(losses, key=losses.__getitem__)
                    if not plain:
                        model = copy.deepcopy(begin)
                        after[rate] = tuned(options, model, train, teaches, held, rate, options.tokens, seed)
                    found = {"before": before, "after": after[rate], "rate": rate}
                    found["losses_of_rates"] = {str(each): loss for each, loss in losses.items()}
                    found["cpu_seconds"] = round(time.process_time() - began, 1)
                    result["runs"][f"{scheme}, {how}, seed {seed}"] = found
                    write(options.json, result)
                    print(f"{scheme}, {how}, seed {seed}", json.dumps(found), flush=True)


def main() -> int:
    """Measure what is not in the results yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help=f"folder or Hub id of a pretrained model, or {calibration.EMBEDDED}")
    parser.add_argument("text", nargs="?", type=Path, help="text file, documents separated by blank lines")
    parser.add_argument("--schemes", nargs="+", choices=calibration.SCHEMES, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--length", type=int, default=512, help="tokens of a window of fine-tuning")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048], help="at which is measured")
    parser.add_argument("--calibrate-length", type=int, default=256, help="tokens of a window of calibration")
    parser.add_argument("--calibrate-windows", type=int, default=400)
    parser.add_argument("--steps", type=int, default=100, help="of the second stage of calibration")
    parser.add_argument("--weight-rate", type=float, default=2e-3, help="of weights in the second stage")
    parser.add_argument("--held-out-tokens", type=int, default=32_768, help="to measure on at each length, at most")
    parser.add_argument("--tokens", nargs="+", type=int, default=[10_000, 61_000, 250_000], help="of fine-tuning")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates to choose from")
    parser.add_argument("--plain-rates", nargs="+", type=float, default=list(PLAIN_RATES), help="of plain swaps")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="ways to fine-tune")
    parser.add_argument("--json", type=Path, required=True, help="results; what is there already is not run again")
    options = parser.parse_args()
    if options.checkpoint == calibration.EMBEDDED and options.text:
        parser.error(f"{calibration.EMBEDDED} has a text of its own")
    result = read(options.json, {"settings": {}, "runs": {}})
    unsaid = ("checkpoint", "text", "json", "schemes", "seeds", "runs")
    settings = {name: value for name, value in vars(options).items() if name not in unsaid}
    with tempfile.TemporaryDirectory() as scratch:
        # A base writes as many tokens as are trained on, and a tenth more, which is held out.
        documents = math.ceil(max(options.tokens) / 0.9 / calibration.WRITTEN[1]) + 1
        checkpoint, said, parts = calibration.material(options.checkpoint, options.text, scratch, documents)
        settings |= {"checkpoint": Path(options.checkpoint).name, "text": said, "torch": torch.__version__}
        if result["runs"] and result["settings"] != settings:
            parser.error(f"{options.json} has runs of other settings: {result['settings']}")
        result["settings"] = settings
        measure(options, checkpoint, parts, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
