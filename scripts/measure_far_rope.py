#!/usr/bin/env python3
"""Measure rotations beyond the trained length, without training: their loss at multiples of that length.

python scripts/measure_far_rope.py CHECKPOINT TEXT --json found.json

The JSON file has, for each rotation and each multiple, the mean loss of the next token in nats: in windows that are cut
fresh (`fresh`), and of the last quarter of each of these windows (`end`). `dynamic, cached` reads each window with a
cache, in chunks of an eighth of the trained length; all other rows read it at once.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_posenc import patched
from hf_posenc.recipes.results import write_json


def rotations(trained: int, multiple: int) -> dict[str, dict[str, Any] | None]:
    """Return name -> arguments of `patch_model` for a multiple of the trained length; None is the model itself."""
    scaling = {"rope_type": "dynamic", "factor": 1.0}
    yarn = {"rope_type": "yarn", "factor": float(multiple), "original_max_position_embeddings": trained}
    far: dict[str, Any] = {"scheme": "far_rope"}
    return {
        "base": None,
        "yarn": {"scheme": "rope", "scaling": yarn},
        "dynamic": {"scheme": "rope", "scaling": scaling},
        "dynamic, cached": {"scheme": "rope", "scaling": scaling},
        "far_rope, dynamic": far | {"kind": "dynamic"},
        "far_rope, rerope": far | {"kind": "rerope"},
        "far_rope, rerope, leak 1/16": far | {"kind": "rerope", "leak": 1 / 16},
        "far_rope, self_extend": far | {"kind": "self_extend", "group": 16},
        "far_rope, dual_chunk": far | {"kind": "dual_chunk"},
    }


@torch.no_grad()
def losses(model: Any, ids: Tensor, chunk: int | None) -> Iterator[Tensor]:
    """Yield the losses (length - 1,) of each window.

    Args:
        model: the model.
        ids: (windows, length) tokens.
        chunk: tokens that are read at once, with a cache; None means all, without.
    """
    for window in ids:
        if chunk is None:
            logits = model(window[None], use_cache=False).logits[0]
        else:
            cache = DynamicCache(config=model.config)
            parts = [model(part[None], past_key_values=cache).logits[0] for part in window.split(chunk)]
            logits = torch.cat(parts)
        yield torch.nn.functional.cross_entropy(logits[:-1].float(), window[1:], reduction="none")


def measured(model: Any, ids: Tensor, chunk: int | None) -> dict[str, float]:
    """Return the mean losses of a model, see the file."""
    found = torch.stack([*losses(model, ids, chunk)])
    return {"fresh": found.mean().item(), "end": found[:, -(ids.shape[1] // 4) :].mean().item()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model that rotates")
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens to read")
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 2, 4, 8], help="of the trained length")
    parser.add_argument("--json", type=Path, required=True, help="results")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    text = options.text.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0, : options.tokens]
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    trained = model.config.max_position_embeddings
    if len(ids) < options.tokens or options.tokens < trained * max(options.multiples):
        parser.error(f"--tokens {options.tokens} must be in {options.text}, and at least one window")
    found: dict[str, Any] = {"checkpoint": Path(options.checkpoint).name, "torch": torch.__version__, "rows": {}}
    for multiple in options.multiples:
        length = trained * multiple
        windows = ids[: len(ids) // length * length].view(-1, length)
        for name, arguments in rotations(trained, multiple).items():
            chunk = trained // 8 if name.endswith("cached") else None
            if arguments is None or (multiple == 1 and name == "yarn"):
                row = measured(model, windows, chunk)
            else:
                with patched(model, **arguments):
                    row = measured(model, windows, chunk)
            found["rows"].setdefault(name, {})[str(multiple)] = row
            print(f"{name}, {length} tokens: perplexity {math.exp(row['fresh']):.2f}", flush=True)
    write_json(options.json, found | {"tokens": options.tokens, "trained": trained})
    return 0


if __name__ == "__main__":
    sys.exit(main())
