#!/usr/bin/env python3
"""What a swap of positions costs, plain and calibrated: losses before fine-tuning and along the way, against the base.

python scripts/measure_calibration.py CHECKPOINT TEXT --schemes t5 kerple --json results.json
python scripts/measure_calibration.py CHECKPOINT --json results.json     text that the base writes itself
python scripts/measure_calibration.py embedded --json results.json       the small GPT-2 of the recipes, trained first

For each scheme and seed: the plain swap, the closed forms, and both stages of calibration, each fine-tuned; and the base
fine-tuned at the rate of the calibrated starts, as the control. The start `outputs` is calibrated as by default; the
starts `closed_form` and `attention` keep what comes closer to the base's attention, whatever it predicts. Documents of TEXT are separated by blank lines; the last
tenth of them is held out and only measured. Results are written after each run, so that an interrupted measurement goes
on where it was. A base with a table of positions is measured and fine-tuned up to the end of its table: where the other
models are measured beyond, it has null.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from results import read, write
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posenc import patch_model
from hf_posenc.analysis import position_vectors
from hf_posenc.calibration import Matching, calibrate
from hf_posenc.recipes.embedded import byte_model, byte_tokenizer, standard_library, train_base
from hf_posenc.schemes.t5 import T5

SCHEMES = {
    "t5": ("t5", {"share_layers": False}),
    "kerple": ("kerple", {"share_layers": False}),
    "alibi": ("alibi", {"trainable": True}),
    "transformer_xl": ("transformer_xl", {}),
    "shaw": ("shaw", {}),
    "da_transformer": ("da_transformer", {}),
    "nope": ("nope", {}),
    "learned": ("learned", {"num_positions": 4096}),
    "sinusoidal": ("sinusoidal", {"trainable": True}),
    "yarn": ("rope", {"scaling": {"rope_type": "yarn", "factor": 8.0}}),
    "window": ("rope", {"window": 512}),
    "far_rope": ("far_rope", {}),
    "mixture": ([T5(share_layers=False, layers="1::2")], {}),  # every other layer keeps what the base has
}
NOT_SETTINGS = (
    "checkpoint",
    "text",
    "json",
    "schemes",
    "starts",
    "seeds",
    "untrained",
)  # the runs say these
ASKED_FOR = ("learned", "sinusoidal", "yarn", "window", "far_rope")
"""Measured only where asked for: on a base that rotates, calibration does not help the tables, and the others need none."""
STARTS = ("plain", "closed_form", "attention", "outputs")
EMBEDDED = "embedded"
FITTED, HELD_OUT, MATCHED = 24, 8, 4
"""Windows that a calibration reads: to fit closed forms, to choose among them, and in each step of the second stage."""
WRITTEN = (96, 1024)
"""Documents that a base writes where no text is given, and tokens of each."""


def documents(tokenizer, text: str) -> list[list[int]]:
    """Return the tokens of each document, with the tokenizer's own first token."""
    return [tokenizer(part.strip()).input_ids for part in text.split("\n\n") if part.strip()]


@torch.no_grad()
def written(base: PreTrainedModel, count: int, length: int) -> list[list[int]]:
    """Return documents that a base writes itself, drawn from its own distribution, the same each time.

    Beyond its context it goes on from the second half of what it sees. It therefore has no dependences beyond that, and
    what the base's loss on it is, no other model can fall far below.
    """
    context = position_limit(base) or base.config.max_position_embeddings
    generator = torch.Generator().manual_seed(0)
    rows = torch.full((count, 1), base.config.bos_token_id)
    base.eval()
    while rows.shape[1] < length:
        part, past = rows[:, -context // 2 :], None
        for _ in range(context - part.shape[1]):
            out = base(part, past_key_values=past, use_cache=True)
            part = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
            rows, past = torch.cat([rows, part], 1), out.past_key_values
    return rows[:, :length].tolist()


def embedded(folder: str) -> list[list[int]]:
    """Train the small GPT-2 of the recipes, save it, and return the text: modules of the standard library."""
    tokenizer = byte_tokenizer()
    parts = [tokenizer(path.read_text(encoding="utf-8")).input_ids for path in standard_library()]
    torch.manual_seed(0)
    base = byte_model(tokenizer)
    stream = torch.tensor([token for part in parts[: split(parts)] for token in part])
    train_base(base, stream, steps=1200, progress=False)
    base.save_pretrained(folder)
    return parts


def split(parts: list[list[int]]) -> int:
    """Return how many documents, the first ones, are trained on."""
    return len(parts) - max(1, len(parts) // 10)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the rows of the table of positions that a model has, or None."""
    vectors = position_vectors(model)
    return None if vectors is None else len(vectors)


@torch.no_grad()
def keep_mean(model: PreTrainedModel) -> None:
    """Move the mean of a GPT-2's table of positions into its token embeddings, which changes nothing that it predicts.

    A head that shares the embeddings adds the same number to all logits.
    """
    tokens, positions = model.transformer.wte.weight, model.transformer.wpe.weight
    mean = positions.mean(0)
    tokens += mean
    positions -= mean


def windows(parts: list[list[int]], length: int) -> torch.Tensor:
    """Return documents one after the other, cut into windows (N, length)."""
    ids = torch.tensor([token for part in parts for token in part])
    return ids[: len(ids) // length * length].view(-1, length)


@torch.no_grad()
def loss(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Return the mean cross entropy of the next token, in nats."""
    model.eval()
    sums = 0.0
    for batch in tokens.split(max(1, 4096 // tokens.shape[1])):
        logits = model(batch, use_cache=False).logits[:, :-1]
        sums += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return sums / tokens[:, 1:].numel()


def measure(model: PreTrainedModel, held: dict[int, torch.Tensor]) -> dict[str, float | None]:
    """Return the loss at each length; None where the model has no such positions."""
    limit = position_limit(model)
    able = {length: limit is None or length <= limit for length in held}
    return {str(length): round(loss(model, tokens), 4) if able[length] else None for length, tokens in held.items()}


def fine_tune(model, train, held, *, rate, tokens_at, batch_size, seed, teacher=None) -> dict[str, dict]:
    """Train with AdamW, the rate constant after a tenth of warm-up; return the losses at each number of tokens.

    On the way only the first length is measured. With a teacher, the mean divergence from its predictions is added to
    the mean loss of the text, also where it reads a part of each window only (the recipes' `--distill` adds sums).
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    per_step, found = batch_size * train.shape[1], {}
    steps = {math.ceil(tokens / per_step): tokens for tokens in tokens_at}
    warm = max(1, max(steps) // 10)
    for step in range(1, max(steps) + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / warm)
        model.train()
        batch = train[torch.randint(len(train), (batch_size,), generator=generator)]
        logits = model(batch, use_cache=False).logits[:, :-1]
        value = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        if teacher is not None:
            value += divergence(logits, teacher, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            first = dict(list(held.items())[:1])
            found[str(steps[step])] = measure(model, held if step == max(steps) else first)
    return found


def divergence(logits: torch.Tensor, teacher: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean divergence of predictions from a teacher's, in nats, at the positions that the teacher has."""
    able = min(position_limit(teacher) or batch.shape[1], logits.shape[1])
    with torch.no_grad():
        target = teacher(batch[:, :able], use_cache=False).logits.log_softmax(-1).flatten(0, 1)
    predicted = logits[:, :able].log_softmax(-1).flatten(0, 1)
    return F.kl_div(predicted, target, log_target=True, reduction="batchmean")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help=f"folder or Hub id of a pretrained causal language model, or {EMBEDDED}")
    parser.add_argument("text", nargs="?", type=Path, help="text file, documents separated by blank lines")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=[s for s in SCHEMES if s not in ASKED_FOR])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["plain", "outputs"])
    parser.add_argument(
        "--untrained", nargs="*", choices=STARTS, default=[], help="starts that are only measured, not fine-tuned"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--length", type=int, default=512, help="tokens of a window of fine-tuning")
    parser.add_argument("--calibrate-length", type=int, default=256, help="tokens of a window of calibration")
    parser.add_argument(
        "--calibrate-windows", type=int, default=600, help="of text that calibration reads, as often as its steps need"
    )
    parser.add_argument("--steps", type=int, default=150, help="of the second stage of calibration")
    parser.add_argument("--weight-rate", type=float, default=2e-3, help="of weights in the second stage")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 4096], help="at which is measured")
    parser.add_argument("--held-out-tokens", type=int, default=40_000, help="to measure on at each length, at most")
    parser.add_argument("--tokens", nargs="+", type=int, default=[25_000, 50_000, 100_000, 250_000])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-4, help="of fine-tuning from calibrated starts, and the base")
    parser.add_argument("--plain-rate", type=float, default=1e-3, help="of fine-tuning from plain swaps")
    parser.add_argument("--json", type=Path, required=True, help="results; what is there already is not run again")
    options = parser.parse_args()
    if options.checkpoint == EMBEDDED and options.text:
        parser.error(f"{EMBEDDED} has a text of its own")
    results = read(options.json, {"runs": {}})
    results["settings"] = {k: v for k, v in vars(options).items() if k not in NOT_SETTINGS}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint, said, parts = material(options.checkpoint, options.text, scratch)
        results["settings"] |= {"checkpoint": Path(options.checkpoint).name, "text": said}
        run(options, checkpoint, parts, results)
    return 0


def material(
    checkpoint: str, text: Path | None, scratch: str, documents_written: int = WRITTEN[0]
) -> tuple[str, str, list[list[int]]]:
    """Return the folder or id of the base, the name of its text, and the tokens of the documents of that text.

    Args:
        checkpoint: the base, or `EMBEDDED`.
        text: file with documents; None for text that the base writes.
        scratch: folder for a base that is trained first.
        documents_written: number of documents that the base writes.
    """
    if checkpoint == EMBEDDED:
        return scratch, "the standard library", embedded(scratch)
    if text:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        return checkpoint, text.name, documents(tokenizer, text.read_text(encoding="utf-8"))
    return checkpoint, "written by the base", written(load(checkpoint), documents_written, WRITTEN[1])


def load(checkpoint: str) -> PreTrainedModel:
    """Return the base, in float32."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def run(options: argparse.Namespace, checkpoint: str, parts: list[list[int]], results: dict) -> None:
    """Measure what is not in the results yet."""
    first = split(parts)
    train = windows(parts[:first], options.length)
    short = windows(parts[:first], options.calibrate_length)
    few = {length: max(8, options.held_out_tokens // length) for length in options.lengths}
    held = {length: windows(parts[first:], length)[: few[length]] for length in options.lengths}

    def keep(name: str, found: dict) -> None:
        results["runs"][name] = found
        write(options.json, results)
        print(name, json.dumps(found), flush=True)

    settings = {"tokens_at": options.tokens}
    batch_size = options.batch_size
    for seed in options.seeds:
        if (name := f"control, seed {seed}") not in results["runs"]:
            base = load(checkpoint)
            before = measure(base, held)
            length = min(options.length, position_limit(base) or options.length)
            own = train if length == options.length else windows(parts[:first], length)
            rows = batch_size * options.length // length  # as many tokens in a step
            after = fine_tune(base, own, held, rate=options.rate, batch_size=rows, seed=seed, **settings)
            keep(name, {"before": before, "after": after, "rate": options.rate})
        for scheme in options.schemes:
            for start in options.starts:
                if (name := f"{scheme}, {start}, seed {seed}") in results["runs"]:
                    continue
                given, hyperparameters = SCHEMES[scheme]
                swapped = patch_model(load(checkpoint), given, seed=seed, **hyperparameters)
                began, report = time.perf_counter(), None
                if start != "plain":
                    matching = Matching(
                        steps=options.steps,
                        batch_size=MATCHED,
                        weight_rate=options.weight_rate,
                        loss=None if start == "closed_form" else start,
                        seed=seed,
                    )
                    report = calibrate(
                        swapped,
                        short[: options.calibrate_windows],
                        held_out=HELD_OUT,
                        closed_windows=FITTED,
                        matching=None if start == "closed_form" else matching,
                        judge="loss" if start == "outputs" else "attention",
                    )
                seconds = time.perf_counter() - began
                before = measure(swapped, held)
                rate = options.plain_rate if start == "plain" else options.rate
                found = {"before": before}
                if start not in options.untrained:
                    after = fine_tune(swapped, train, held, rate=rate, batch_size=batch_size, seed=seed, **settings)
                    found |= {"after": after, "rate": rate}
                if report is not None:
                    found["calibration"] = {
                        "seconds": round(seconds, 1),
                        "tokens": report.tokens,
                        "kept": report.kept,
                        "divergence": [round(each.after.mean().item(), 4) for each in report.layers],
                        "chosen": [list(each.chosen) for each in report.layers],
                    }
                keep(name, found)


if __name__ == "__main__":
    sys.exit(main())
