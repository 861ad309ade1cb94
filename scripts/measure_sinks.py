#!/usr/bin/env python3
"""Read a long text in chunks with a cache of constant size, with and without sinks.

python scripts/measure_sinks.py CHECKPOINT TEXT --json found.json

The model gets a scheme with a sliding window, and reads the text as one sequence with an `EndlessCache`. For each
number of sinks the JSON file has, section by section, the mean loss of the next token in nats, the keys that a layer
holds, and the peak memory of the process so far. A scheme that is not the model's own is calibrated by closed forms
(`--calibrate`), on the end of the text, which is not read. A text that is too short is read again from its beginning:
no layer sees further back than its window.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import EndlessCache, calibrate, patch_model
from hf_posenc.recipes.results import write_json

RECORDED = ("scheme", "calibrate", "tokens", "window", "chunk")
"""Options that the JSON file repeats."""


@torch.no_grad()
def read(model: Any, ids: Tensor, chunk: int, sections: int) -> list[dict[str, float]]:
    """Return loss, held keys and peak memory of each section of a text.

    Args:
        model: a patched model, each layer of which has a window.
        ids: (T,) tokens.
        chunk: tokens that are read at once. A section is a whole number of chunks.
        sections: number of sections.
    """
    cache, rows = EndlessCache(model), []
    length = (len(ids) - 1) // sections // chunk * chunk
    for section in range(sections):
        losses = []
        for start in range(section * length, (section + 1) * length, chunk):
            logits = model(ids[None, start : start + chunk], past_key_values=cache).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[start + 1 : start + chunk + 1]))
        rows.append(
            {
                "tokens": (section + 1) * length,
                "loss": torch.stack(losses).mean().item(),
                "keys": cache.layers[0].keys.shape[2],
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # in KiB on Linux
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model that rotates")
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens to read")
    parser.add_argument("--scheme", default="rope")
    parser.add_argument("--calibrate", type=int, default=0, help="windows of 512 tokens that calibration reads")
    parser.add_argument("--window", type=int, default=256, help="tokens")
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 4], help="numbers of first tokens that stay")
    parser.add_argument("--chunk", type=int, default=256, help="tokens that are read at once")
    parser.add_argument("--sections", type=int, default=5, help="parts of the text that are measured one by one")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    text = options.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    read_once = len(ids) - options.calibrate * 512
    if read_once < 1:
        parser.error(f"{options.text} has too few tokens for {options.calibrate} windows of 512")
    ids, more = ids[:read_once], ids[read_once:].view(-1, 512)
    ids = ids.repeat(options.tokens // read_once + 1)[: options.tokens + 1]
    found: dict[str, Any] = {"checkpoint": Path(options.checkpoint).name, "torch": torch.__version__, "sinks": {}}
    found["tokens_of_text"] = read_once
    for sinks in options.sinks:
        print(f"window {options.window}, sinks {sinks}")
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
        patch_model(model, options.scheme, window=options.window, sinks=sinks or None, seed=0)
        if options.calibrate:
            calibrate(model, more, matching=None)
        found["sinks"][str(sinks)] = read(model, ids, options.chunk, options.sections)
    write_json(options.json, found | {name: getattr(options, name) for name in RECORDED})
    return 0


if __name__ == "__main__":
    sys.exit(main())
