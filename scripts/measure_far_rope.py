#!/usr/bin/env python3
"""Measure rotations beyond the trained length: their loss at multiples of that length, before and after fine-tuning.

python scripts/measure_far_rope.py CHECKPOINT TEXT --json found.json
python scripts/measure_far_rope.py CHECKPOINT TEXT --fine-tune 250000 --json found.json

The JSON file has, for each rotation and each multiple, the mean loss of the next token in nats: in windows that are cut
fresh (`fresh`), and of the last quarter of each of these windows (`end`). `dynamic, cached` reads each window with a
cache, in chunks of an eighth of the trained length; all other rows read it at once.

Without training (`rows`), YaRN has the factor of each multiple. Fine-tuning (`fine_tuned`) gives each rotation the same
tokens, in windows of half the largest multiple, with several seeds; YaRN then has the factor of the largest multiple.
The text that is measured is its beginning, and the rest is trained on. Results are written after each row; what is
there already is not measured again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure_calibration import fine_tune, load
from results import read, write
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache

from hf_posenc import patch_model, patched

CACHED = ", cached"
"""End of the name of a row whose windows are read with a cache."""


def rotations(trained: int, multiple: int) -> dict[str, dict[str, Any] | None]:
    """Return name -> arguments of `patch_model` for a multiple of the trained length; None is the model itself."""
    scaling = {"rope_type": "dynamic", "factor": 1.0}
    yarn = {"rope_type": "yarn", "factor": float(multiple), "original_max_position_embeddings": trained}
    far: dict[str, Any] = {"scheme": "far_rope"}
    return {
        "base": None,
        "yarn": {"scheme": "rope", "scaling": yarn},
        "dynamic": {"scheme": "rope", "scaling": scaling},
        f"dynamic{CACHED}": {"scheme": "rope", "scaling": scaling},
        "soft_clip": {"scheme": "rope", "frequencies": {"name": "soft_clip"}},
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


def fine_tuned(options: argparse.Namespace, ids: Tensor, trained: int, found: dict[str, Any]) -> None:
    """Fine-tune each rotation with each seed, and measure it at each multiple."""
    largest = max(options.multiples)
    length = trained * max(1, largest // 2)
    rest = ids[options.tokens :]
    train = rest[: len(rest) // length * length].view(-1, length)
    every = rotations(trained, largest)
    if unknown := set(options.fine_tuned or ()) - set(every):
        raise SystemExit(f"no rotation {', '.join(sorted(unknown))}; choose from {'; '.join(every)}")
    for name, arguments in every.items():
        for seed in options.seeds:
            if name not in (options.fine_tuned or every) or name.endswith(CACHED):
                continue
            if (row := f"{name}, seed {seed}") in found["fine_tuned"]:
                continue
            model = load(options.checkpoint)
            if arguments is not None:
                patch_model(model, **arguments)
            fine_tune(model, train, {}, rate=options.rate, tokens_at=[options.fine_tune], batch_size=1, seed=seed)
            model.eval()
            for each in (name, name + CACHED):
                if each in every:
                    found["fine_tuned"][f"{each}, seed {seed}"] = {
                        str(multiple): measured(model, *windows(options, ids, trained, multiple, each))
                        for multiple in options.multiples
                    }
            write(options.json, found)
            print(row, {n: round(math.exp(at["fresh"]), 3) for n, at in found["fine_tuned"][row].items()}, flush=True)


def windows(
    options: argparse.Namespace, ids: Tensor, trained: int, multiple: int, name: str
) -> tuple[Tensor, int | None]:
    """Return the windows of a multiple, and how many tokens a row reads at once."""
    length = trained * multiple
    return ids[: options.tokens // length * length].view(-1, length), trained // 8 if name.endswith(CACHED) else None


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model that rotates")
    parser.add_argument("text", type=Path, help="text file")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens to measure on")
    parser.add_argument("--multiples", type=int, nargs="+", default=[1, 2, 4, 8], help="of the trained length")
    parser.add_argument("--fine-tune", type=int, default=0, help="tokens of fine-tuning; 0: no fine-tuning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of fine-tuning")
    parser.add_argument("--fine-tuned", nargs="+", help="fine-tune only these rotations (default: all)")
    parser.add_argument("--rate", type=float, default=3e-4, help="of fine-tuning")
    parser.add_argument("--json", type=Path, required=True, help="results; what is there already is not run again")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0]
    model = load(options.checkpoint).eval()
    trained = model.config.max_position_embeddings
    longest = trained * max(options.multiples)
    if len(ids) < options.tokens + (longest if options.fine_tune else 0) or options.tokens < longest:
        parser.error(f"--tokens {options.tokens} must be in {options.text}, and at least one window")
    settings = {"checkpoint": Path(options.checkpoint).name, "tokens": options.tokens, "trained": trained}
    found = read(options.json, settings | {"torch": torch.__version__, "rows": {}})
    if any(found[key] != value for key, value in settings.items()):
        parser.error(f"{options.json} has rows of other settings")
    for multiple in options.multiples:
        for name, arguments in rotations(trained, multiple).items():
            if str(multiple) in (rows := found["rows"].setdefault(name, {})):
                continue
            chosen = windows(options, ids, trained, multiple, name)
            if arguments is None or (multiple == 1 and name == "yarn"):
                rows[str(multiple)] = measured(model, *chosen)
            else:
                with patched(model, **arguments):
                    rows[str(multiple)] = measured(model, *chosen)
            write(options.json, found)
            print(
                f"{name}, {trained * multiple} tokens: perplexity {math.exp(rows[str(multiple)]['fresh']):.2f}",
                flush=True,
            )
    if options.fine_tune:
        kept = {"tokens": options.fine_tune, "rate": options.rate}
        if found.setdefault("fine_tuning", kept) != kept:
            parser.error(f"{options.json} has fine-tuned rows of other settings: {found['fine_tuning']}")
        found.setdefault("fine_tuned", {})
        fine_tuned(options, ids, trained, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
