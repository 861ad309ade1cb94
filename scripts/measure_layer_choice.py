#!/usr/bin/env python3
"""Compare layers chosen by `choose_layers` with evenly spaced ones.

python scripts/measure_layer_choice.py CHECKPOINT TEXT --json found.json

For each number of layers the scheme goes into the cheapest layers of the ranking, and into every layer of an even
spacing. The JSON file has the loss of each model on windows that nothing has read, before and after a calibration by
closed forms, in nats per token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from check_calibration import loss
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posenc import calibrate, choose_layers, patch_model
from hf_posenc.recipes.results import write_json


def even(count: int, layers: int) -> tuple[int, ...]:
    """Return `count` layers at even distances, the last one of each stretch: of 8 layers two are 3 and 7."""
    return tuple((place + 1) * layers // count - 1 for place in range(count))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model")
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("--scheme", default="nope")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="numbers of layers")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=64, help="that are read, 8 held-out ones included")
    parser.add_argument("--unseen", type=int, default=48, help="windows that only measure")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()

    def load() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()

    text = options.text.read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = ids.unfold(0, options.length, options.length)
    needed = options.windows + options.unseen
    if len(windows) < needed:
        parser.error(f"{options.text} has {len(windows)} windows of {options.length} tokens, and {needed} are needed")
    given, unseen = windows[: options.windows], windows[options.windows : needed]

    model = load()
    choice = choose_layers(model, given, options.scheme, progress=True)
    print(choice)
    rows = []
    for count in options.counts:
        for how, layers in (
            ("chosen", choice.cheapest(count)),
            ("even", even(count, model.config.num_hidden_layers)),
        ):
            swapped = patch_model(load(), options.scheme, layers=layers, seed=0)
            plain = loss(swapped, unseen)
            calibrate(swapped, given, matching=None)
            rows.append({"how": how, "layers": layers, "plain": plain, "calibrated": loss(swapped, unseen)})
            print(rows[-1])
    found = {
        "checkpoint": Path(options.checkpoint).name,
        "torch": torch.__version__,
        "base": loss(model, unseen),
        "choice": choice.to_dict(),
        "rows": rows,
    } | {name: getattr(options, name) for name in ("scheme", "length", "windows", "unseen")}
    write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
