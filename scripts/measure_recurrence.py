#!/usr/bin/env python3
"""Measure gain and cost of segments with memory, against segments without and sliding windows of the same span.

python scripts/measure_recurrence.py CHECKPOINT TEXT... --schemes transformer_xl --train TEXT... --json results.json

Each TEXT is a document, of which the first --tokens are read; the parts of a text that blank lines separate follow each
other, each begun as the tokenizer begins one. The stock model is measured first, then each scheme on it, calibrated by
closed forms on the first --windows windows of the training's texts; then all of them are fine-tuned there, on as many
tokens. A memory of M beside segments of T is compared with sliding windows of M + T that move by T: the same tokens are
scored with the same span in one layer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import write
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from hf_posenc import patch_model
from hf_posenc.calibration import calibrate
from hf_posenc.evaluation import measure_recurrence, sliding_window_perplexity
from hf_posenc.version import VERSION


def document(tokenizer: Any, paths: list[Path], count: int) -> Tensor:
    """Return the first tokens (count,) of texts; ValueError if they are too short."""
    found: list[int] = []
    for path in paths:
        for part in path.read_text(encoding="utf-8").split("\n\n"):
            if part.strip():
                found += tokenizer(part.strip(), verbose=False).input_ids
            if len(found) >= count:
                return torch.tensor(found[:count])
    raise ValueError(f"{', '.join(map(str, paths))}: there are {len(found)} tokens, {count} were asked for")


def fine_tune(model: PreTrainedModel, windows: Tensor, batch_size: int, rate: float) -> None:
    """Train once on windows (N, T) with AdamW, the rate falling to 0 along a line."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    order = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))].split(batch_size)
    model.train()
    for number, batch in enumerate(order):
        optimizer.param_groups[0]["lr"] = rate * (1 - number / len(order))
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 25 == 0:
            print(f"step {number} of {len(order)}: {loss.item():.3f}", file=sys.stderr, flush=True)
    model.eval()


def sliding(model: PreTrainedModel, documents: list[Tensor], span: int, segment: int) -> dict[str, float]:
    """Return loss and speed of windows of a span that move by one segment."""
    began = time.perf_counter()
    found = [sliding_window_perplexity(model, each, length=span, stride=segment) for each in documents]
    seconds, tokens = time.perf_counter() - began, sum(each.tokens for each in found)
    return {"loss": round(sum(each.nll for each in found) / tokens, 4), "tokens_per_second": round(tokens / seconds)}


def rows(model: PreTrainedModel, documents: list[Tensor], spans: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return a row of results for each (segment, memory)."""
    measured = []
    for segment, memory in spans:
        found = measure_recurrence(model, documents, segment=segment, memory=memory)
        row: dict[str, Any] = {
            "segment": segment,
            "memory": memory,
            "loss": round(found.perplexity.loss, 4),
            "tokens_per_second": round(found.tokens_per_second),
            "by_position": {part.first: round(part.loss, 4) for part in found.by_position},
            "sliding": sliding(model, documents, memory + segment, segment) if memory else None,
        }
        measured.append(row)
        print(
            json.dumps({key: value for key, value in row.items() if key != "by_position"}), file=sys.stderr, flush=True
        )
    return measured


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument(
        "--schemes", nargs="*", default=["transformer_xl"], help="on the checkpoint, after the stock model"
    )
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="texts to calibrate and fine-tune on")
    parser.add_argument("--windows", type=int, default=10, help="that schemes are calibrated on (default 10)")
    parser.add_argument("--steps", type=int, default=0, help="of fine-tuning (default 0)")
    parser.add_argument("--batch-size", type=int, default=4, help="windows in a step (default 4)")
    parser.add_argument("--rate", type=float, default=2e-3, help="of the first step (default 2e-3)")
    parser.add_argument("--length", type=int, default=512, help="tokens in each of them (default 512)")
    parser.add_argument("--tokens", type=int, default=4096, help="of each document (default 4096)")
    parser.add_argument(
        "--segments", type=int, nargs="+", default=[64, 256], help="tokens in a segment (default 64 256)"
    )
    parser.add_argument(
        "--spans", type=int, nargs="+", default=[128, 256, 512, 1024], help="memory and segment together, where longer"
    )
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    options = parser.parse_args()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    documents = [document(tokenizer, [path], options.tokens) for path in options.text]
    count = max(options.windows, options.steps * options.batch_size)
    windows = document(tokenizer, options.train, count * options.length).view(-1, options.length)
    spans = [(each, span - each) for each in options.segments for span in (each, *options.spans) if span >= each]
    spans = list(dict.fromkeys(spans))
    found = {}
    for scheme in (None, *options.schemes):
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint).eval()
        if scheme is not None:
            calibrate(patch_model(model, scheme, seed=0), windows[: options.windows], matching=None)
        if options.steps:
            fine_tune(model, windows[: options.steps * options.batch_size], options.batch_size, options.rate)
        print(scheme or "stock", file=sys.stderr)
        found[scheme or "stock"] = rows(model, documents, spans)
    result = {
        "model": Path(options.checkpoint).name,
        "texts": [path.name for path in options.text],
        "tokens": options.tokens * len(documents),
        "train": {
            "texts": [path.name for path in options.train],
            **{name: getattr(options, name) for name in ("windows", "length", "steps", "batch_size", "rate")},
        },
        "threads": torch.get_num_threads(),
        "hf_posenc": VERSION,
        "found": found,
    }
    write(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
