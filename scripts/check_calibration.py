#!/usr/bin/env python3
"""Calibrate a checkpoint in fourteen swaps, and check that none predicts worse than its plain swap.

python scripts/check_calibration.py CHECKPOINT TEXT --json found.json
python scripts/check_calibration.py CHECKPOINT --json found.json   text that the base writes itself
python scripts/check_calibration.py embedded --json found.json     the base that comes with the package

Each row has the loss of the plain swap and of the calibrated model, in nats per token: on the held-out windows that
decide, and on windows that calibration never sees. The status is 1 if a model predicts the held-out windows worse than
its swap by more than 0.01 nats. Rows are written one by one; what is in the JSON file already is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from measure_calibration import written
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posenc import Matching, calibrate, patch_model
from hf_posenc.calibration.matching import LOSSES
from hf_posenc.recipes.embedded import byte_tokenizer, standard_library, trained_base

SCHEMES = {
    "alibi": ("alibi", {}),
    "alibi, trainable": ("alibi", {"trainable": True}),
    "cope": ("cope", {}),
    "da_transformer": ("da_transformer", {}),
    "kerple": ("kerple", {}),
    "kerple, own for each layer": ("kerple", {"share_layers": False}),
    "learned": ("learned", {"num_positions": 1024}),
    "nope": ("nope", {}),
    "rope": ("rope", {"rope_theta": 500.0}),
    "shaw": ("shaw", {}),
    "sinusoidal": ("sinusoidal", {}),
    "t5": ("t5", {}),
    "t5, own for each layer": ("t5", {"share_layers": False}),
    "transformer_xl": ("transformer_xl", {}),
}
EMBEDDED = "embedded"
WRITTEN = 512
"""Tokens of a document that a base writes."""
WORSE = 0.01


@torch.no_grad()
def loss(model: PreTrainedModel, windows: torch.Tensor) -> float:
    """Return the mean loss of the next token over windows (N, T), in nats."""
    model.eval()
    found = [F.cross_entropy(model(each[None]).logits[0, :-1], each[1:]).item() for each in windows]
    return sum(found) / len(found)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help=f"folder or Hub id of a pretrained causal language model, or {EMBEDDED}")
    parser.add_argument("text", nargs="?", type=Path, help="text file, documents separated by blank lines")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=200, help="that calibration gets, 8 held-out ones included")
    parser.add_argument("--unseen", type=int, default=64, help="windows that it does not get")
    parser.add_argument("--steps", type=int, default=25, help="of the second stage")
    parser.add_argument("--loss", choices=LOSSES, help="of the second stage (default: outputs, then attention)")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()

    def load() -> PreTrainedModel:
        if options.checkpoint == EMBEDDED:
            return trained_base()
        return AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)

    needed = (options.windows + options.unseen) * options.length
    if options.checkpoint == EMBEDDED:
        tokenizer, texts = byte_tokenizer(), (path.read_text(encoding="utf-8") for path in standard_library())
        documents = (tokenizer(text).input_ids for text in texts)
    elif options.text:
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        texts = (part.strip() for part in options.text.read_text(encoding="utf-8").split("\n\n") if part.strip())
        documents = (tokenizer(text, verbose=False).input_ids for text in texts)
    else:
        documents = iter(written(load(), -(-needed // WRITTEN), WRITTEN))
    ids: list[int] = []
    while len(ids) < needed:
        ids += next(documents)
    windows = torch.tensor(ids[: len(ids) // options.length * options.length]).view(-1, options.length)
    given, unseen = windows[: options.windows], windows[options.windows :][: options.unseen]

    found = json.loads(options.json.read_text()) if options.json.exists() else {"rows": {}}
    found |= {"checkpoint": Path(options.checkpoint).name, "torch": torch.__version__}
    found |= {name: getattr(options, name) for name in ("length", "windows", "unseen", "steps", "loss")}
    found["base_unseen"] = round(loss(load(), unseen), 4)
    for name in options.schemes:
        if name not in found["rows"]:
            scheme, hyperparameters = SCHEMES[name]
            model = patch_model(load(), scheme, seed=0, **hyperparameters)
            swapped, began = loss(model, unseen), time.process_time()
            report = calibrate(model, given, matching=Matching(steps=options.steps, loss=options.loss))
            found["rows"][name] = {
                "held_out": {k: round(v, 4) for k, v in dataclasses.asdict(report.held_out_loss).items()},
                "unseen": {"swapped": round(swapped, 4), "calibrated": round(loss(model, unseen), 4)},
                "kept": report.kept,
                "put_back": {k: round(v, 4) for k, v in report.put_back.items()},
                "cpu_seconds": round(time.process_time() - began, 1),
            }
            scratch = options.json.with_suffix(".part")
            scratch.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(scratch, options.json)
    print(f"{found['checkpoint']}: base {found['base_unseen']:.3f} on unseen windows")
    print("| scheme | swapped | closed forms | calibrated | unseen: swapped | calibrated | kept |\n" + "|---" * 7 + "|")
    bad = []
    for name, row in found["rows"].items():
        held, apart = row["held_out"], row["unseen"]
        numbers = [held["swapped"], held["closed_form"], held["calibrated"], apart["swapped"], apart["calibrated"]]
        print("| " + " | ".join([name, *(f"{number:.3f}" for number in numbers), row["kept"]]) + " |")
        if held["calibrated"] > held["swapped"] + WORSE:
            bad.append(name)
    if bad:
        print(f"worse than the plain swap: {', '.join(bad)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
