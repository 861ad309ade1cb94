#!/usr/bin/env python3
"""Measure whether a base and its calibrated swap use far text: repeat gain and LongPPL.

python scripts/measure_far_text.py CHECKPOINT TEXT --json results.json
python scripts/measure_far_text.py CHECKPOINT TEXT --other NOVEL --json results.json      also the judge's share of key tokens in NOVEL

The swap is calibrated, and not fine-tuned. Documents of TEXT are separated by blank lines; the last tenth of them is
held out and only measured. The base at its trained length is the judge of LongPPL.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import measure_calibration as calibration
import torch
from results import rounded, write
from torch import Tensor
from transformers import AutoTokenizer

from hf_posenc import Matching, calibrate, patch_model
from hf_posenc.evaluation import long_perplexity, repeat_gain


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model")
    parser.add_argument("text", type=Path, help="text file, documents separated by blank lines")
    parser.add_argument("--other", type=Path, help="another text, in which the judge only counts key tokens")
    parser.add_argument("--scheme", choices=calibration.SCHEMES, default="transformer_xl")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window of calibration, and of the judge")
    parser.add_argument("--calibrate-windows", type=int, default=256)
    parser.add_argument("--distances", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 1984])
    parser.add_argument("--trials", type=int, default=64, help="passages that occur twice, at each distance")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048], help="of windows of LongPPL")
    parser.add_argument("--tokens", type=int, default=30_000, help="of the text of LongPPL, at most")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    parts = calibration.documents(tokenizer, options.text.read_text(encoding="utf-8"))
    first = calibration.split(parts)
    given = calibration.windows(parts[:first], options.length)[: options.calibrate_windows]
    text = torch.tensor([token for part in parts[first:] for token in part])
    base = calibration.load(options.checkpoint).eval()
    name, hyperparameters = calibration.SCHEMES[options.scheme]
    swapped = patch_model(calibration.load(options.checkpoint), name, seed=0, **hyperparameters)
    calibrate(swapped, given, matching=Matching())
    found = {
        "base": far(base, base, text, options),
        options.scheme: far(swapped.eval(), base, text, options),
    }
    if options.other is not None:
        ids = tokenizer(options.other.read_text(encoding="utf-8")[: 8 * options.tokens]).input_ids
        (row,) = long_perplexity(base, base, torch.tensor(ids[: options.tokens]), judge_length=options.length)
        found["share of key tokens in the other text"] = row.key_share
    settings = {
        key: value for key, value in vars(options).items() if key not in ("checkpoint", "text", "other", "json")
    }
    settings |= {"checkpoint": Path(options.checkpoint).name, "text": options.text.name, "torch": torch.__version__}
    if options.other is not None:
        settings["other"] = options.other.name
    write(options.json, {"settings": settings, "found": rounded(found)})
    return 0


def far(model: torch.nn.Module, judge: torch.nn.Module, text: Tensor, options: argparse.Namespace) -> dict[str, object]:
    """Return the rows of repeat gain and of LongPPL of a model."""
    gains = repeat_gain(model, text, distances=options.distances, trials=options.trials)
    key = {"judge_length": options.length, "lengths": options.lengths}
    perplexities = long_perplexity(model, judge, text[: options.tokens], **key)
    return {
        "repeat_gain": [row.to_dict() for row in gains],
        "long_perplexity": [row.to_dict() for row in perplexities],
    }


if __name__ == "__main__":
    sys.exit(main())
