#!/usr/bin/env python3
"""Does a swapped model still recall? Accuracy in recall tasks after a swap, calibrated or not, and after fine-tuning.

python scripts/measure_recall.py rotating --json results.json        the base of make_recall_bases.py that rotates
python scripts/measure_recall.py table --json results.json           the one with a table of positions

Each variant is swapped in plainly or calibrated, measured, fine-tuned on the text and the tasks that the base was
trained on, and measured again. Two things grow apart: the distance (as many items in a longer context), and the number
of items together with the length. Differences between variants are paired, because a seed draws the same examples,
batches and windows for all. `--starts scratch` trains a variant from the base's random weights: the ceiling.

The learning rate of a variant is one of `RATES`: the one with the lowest loss on held-out rows after a quarter of the
tokens, with seed 0. Results are written after each run; an interrupted measurement goes on.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import make_recall_bases as bases
import torch
from results import read, rounded, write
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc import calibrate, patch_model
from hf_posenc.calibration import Matching
from hf_posenc.evaluation import TaskTokens, measure_recall
from hf_posenc.recipes.models import read_schemes

YARN = '{"scheme": "rope", "scaling": {"rope_type": "yarn", "factor": 8.0}}'
BOTH = {
    "transformer_xl": "transformer_xl",
    "shaw": "shaw",
    "t5": '{"scheme": "t5", "share_layers": false}',
    "da_transformer": "da_transformer",
    "kerple": '{"scheme": "kerple", "share_layers": false}',
    "alibi": '{"scheme": "alibi", "trainable": true}',
    "bam": "bam",
    "fire": "fire",
    "cope": "cope",
    "nope": "nope",
    "sinusoidal": '{"scheme": "sinusoidal", "trainable": true}',
    "learned": '{"scheme": "learned", "num_positions": 2048}',
}
"""Variants of both bases, as `--scheme` of the recipes takes them; the base itself is the control."""
VARIANTS = {
    "rotating": {
        "yarn": YARN,
        "rerope": '{"scheme": "far_rope", "kind": "rerope"}',
        "dual_chunk": '{"scheme": "far_rope", "kind": "dual_chunk"}',
        "forgetting": "forgetting",
        "nope in layer 0": '{"0": "nope"}',
        "nope in layer 1": '{"1": "nope"}',
    }
    | BOTH,
    "table": {"rope": "rope", "rope, forgetting": '["rope", "forgetting"]'} | BOTH,
}
STARTS = ("plain", "calibrated", "attention", "unlabelled", "scratch")
"""`attention` and `unlabelled` are calibrated, too: by matching attention instead of what heads read, and without labels,
so that tokens that no base was trained to predict count in the loss that decides."""
TIMES = (2, 4, 8, 16)
"""Multiples of the trained length."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
HELD_ROWS = 64
CALIBRATED_ROWS = 128
BATCH = 32
SOLVED = 0.95


def cells(seed: int, model: PreTrainedModel, tokens: TaskTokens, examples: int) -> dict[str, dict[str, float | None]]:
    """Return condition -> task -> share of right answers; None where the model takes no context of this length.

    Conditions: `1x`; `distance Nx`, the same items in N times the length; `items Nx`, N times both.
    """
    found: dict[str, dict[str, float | None]] = {}
    conditions = {"1x": (1, 1)}
    for times in TIMES:
        conditions |= {f"distance {times}x": (1, times), f"items {times}x": (times, times)}
    limit = getattr(model.config, "n_positions", None) if model.config.model_type == "gpt2" else None
    for condition, (more, longer) in conditions.items():
        length = bases.LENGTH * longer
        if limit is not None and length > limit:
            found[condition] = dict.fromkeys(bases.ITEMS)
            continue
        asked = [(task, items * more, length) for task, items in bases.ITEMS.items()]
        count = max(examples // longer, examples // 4)
        measured = measure_recall(model, tokens, cells=asked, examples=count, seed=seed)
        found[condition] = {cell.task: cell.accuracy for cell in measured}
    return found


def draw(text: Tensor, tokens: TaskTokens, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return rows as in the later part of the base's training, and which of their tokens are trained on."""
    return bases.draw_rows(text, tokens, bases.LENGTH, rows, bases.shares_of(bases.LATER_SHARES), generator)


def load(kind: str) -> PreTrainedModel:
    """Return a base, in float32."""
    return AutoModelForCausalLM.from_pretrained(bases.FOLDER / kind, dtype=torch.float32)


def swapped(kind: str, name: str, start: str, seed: int, material: tuple[Tensor, TaskTokens], steps: int) -> Any:
    """Return a variant before fine-tuning, and what a calibration kept."""
    text, tokens = material
    torch.manual_seed(seed)
    model = bases.untrained(kind, len(tokens)) if start == "scratch" else load(kind)
    if name != "base":
        patch_model(model, read_schemes("variant", VARIANTS[kind][name], {}), seed=seed)
    if start == "scratch":
        bases.train(model, tokens, text, steps=steps, seed=seed)
        return model, None
    if start == "plain":
        return model, None
    generator = torch.Generator().manual_seed(seed)
    rows, scored = draw(text, tokens, CALIBRATED_ROWS, generator)
    order = torch.randperm(len(rows), generator=generator)  # they come task by task
    labels = rows.masked_fill(~scored, -100)  # most tokens of a task are random: the base's loss there says nothing
    matching = Matching(seed=seed, loss="attention" if start == "attention" else None)
    given = None if start == "unlabelled" else labels[order]
    return model, calibrate(model, rows[order], labels=given, matching=matching).kept


def fine_tune(model: PreTrainedModel, material: tuple[Tensor, TaskTokens], count: int, rate: float, seed: int) -> None:
    """Train on so many tokens with AdamW; the rate is constant after a tenth of warm-up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    generator, steps = torch.Generator().manual_seed(1000 + seed), max(1, count // (BATCH * bases.LENGTH))
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / max(1, steps // 10))
        bases.recall_loss(model, *draw(*material, BATCH, generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def held_out_losses(model: PreTrainedModel, tokens: TaskTokens, text: Tensor) -> tuple[float, float]:
    """Return the losses on held-out rows, in nats: of rows as in training, and of text alone."""
    rows, scored = draw(text, tokens, HELD_ROWS, torch.Generator().manual_seed(10**6))
    windows = text[: HELD_ROWS * bases.LENGTH].view(-1, bases.LENGTH)
    every = torch.ones_like(windows, dtype=torch.bool)
    return bases.recall_loss(model, rows, scored).item(), bases.recall_loss(model, windows, every).item()


def choose_rate(
    result: dict[str, Any], options: argparse.Namespace, name: str, start: str, material, held: Tensor
) -> float:
    """Return the rate with the lowest held-out loss after a quarter of the tokens, with seed 0.

    Rates whose loss `result` lacks are measured. If another rate wins than before, the runs at the old rate are dropped.
    """
    run = f"{name}, {start}"
    before = result["rates"].get(run, {"rate": None, "losses": {}})
    losses = dict(before["losses"])
    if missing := [rate for rate in RATES if str(rate) not in losses]:
        begin, _ = swapped(options.kind, name, start, 0, material, options.scratch_steps)
        for rate in missing:
            model = copy.deepcopy(begin)
            fine_tune(model, material, options.tokens // 4, rate, 0)
            losses[str(rate)] = rounded(held_out_losses(model, material[1], held)[0])
        best = float(min(losses, key=losses.__getitem__))
        if best != before["rate"]:
            result["runs"] = {key: each for key, each in result["runs"].items() if not key.startswith(f"{run}, seed ")}
        result["rates"][run] = {"rate": best, "losses": losses}
        result["summary"] = summary(result["runs"])
        write(options.json, result)
        print(f"{run}: rate {best}, losses {losses}", flush=True)
    return result["rates"][run]["rate"]


def one_run(options: argparse.Namespace, name: str, start: str, seed: int, rate: float, material, held) -> dict:
    """Swap, measure, fine-tune and measure again."""
    began = time.process_time()
    model, kept = swapped(options.kind, name, start, seed, material, options.scratch_steps)

    def state() -> dict[str, Any]:
        tokens = material[1]
        return {"recall": cells(seed, model.eval(), tokens, options.examples)} | dict(
            zip(("loss", "text_loss"), held_out_losses(model, tokens, held), strict=True)
        )

    found: dict[str, Any] = {"kept": kept, "before": state()}
    if start != "scratch":
        fine_tune(model, material, options.tokens, rate, seed)
        found["after"] = state()
    return rounded(found | {"cpu_seconds": time.process_time() - began})


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Return variant and start -> condition -> median over the seeds of the mean accuracy, and the share that solve 1x.

    A seed solves a variant if each task has 95 % right answers at the trained length.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, run in runs.items():
        groups.setdefault(name.rsplit(", seed", 1)[0], []).append(run)
    found: dict[str, Any] = {}
    for name, group in groups.items():
        for when in ("before", "after"):
            states = [run[when] for run in group if when in run]
            if not states:
                continue
            row: dict[str, Any] = {"seeds": len(states)}
            for condition in states[0]["recall"]:
                each = [list(state["recall"][condition].values()) for state in states]
                known = [sum(values) / len(values) for values in each if None not in values]
                row[condition] = median(known) if known else None
            row["solved"] = sum(min(s["recall"]["1x"].values()) >= SOLVED for s in states) / len(states)
            row["text_loss"] = median(state["text_loss"] for state in states)
            found.setdefault(name, {})[when] = rounded(row)
    return found


def main() -> int:
    """Make the runs that are missing, and write each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=bases.KINDS)
    parser.add_argument("--variants", nargs="+", help="only these (default: the base and all)")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["plain", "calibrated"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--tokens", type=int, default=250_000, help="of fine-tuning")
    parser.add_argument("--examples", type=int, default=32, help="of each task at the trained length; fewer beyond it")
    parser.add_argument("--scratch-steps", type=int, help="default: as many as the base was trained with")
    parser.add_argument("--json", type=Path, required=True, help="results; what is there already is not run again")
    options = parser.parse_args()
    options.scratch_steps = options.scratch_steps or bases.STEPS[options.kind]
    torch.set_num_threads(1)
    known = {"base": ""} | VARIANTS[options.kind]
    if unknown := set(options.variants or ()) - set(known):
        parser.error(f"no variant {', '.join(sorted(unknown))}; choose from {'; '.join(known)}")
    settings = {name: getattr(options, name) for name in ("kind", "tokens", "examples", "scratch_steps")}
    settings["torch"] = torch.__version__
    result = read(options.json, {"settings": settings, "rates": {}, "runs": {}, "summary": {}})
    if result["settings"] != settings:
        parser.error(f"{options.json} has runs of other settings: {result['settings']}")
    material, held = (bases.library_tokens(), bases.task_tokens()), bases.library_tokens(held_out=True)
    for seed in options.seeds:
        for name in options.variants or known:
            for start in options.starts:
                run = f"{name}, {start}"
                if name == "base" and start == "calibrated":
                    continue
                rate = choose_rate(result, options, name, start, material, held) if start != "scratch" else 0.0
                if f"{run}, seed {seed}" in result["runs"]:
                    continue
                found = one_run(options, name, start, seed, rate, material, held)
                result["runs"][f"{run}, seed {seed}"] = found
                result["summary"] = summary(result["runs"])
                write(options.json, result)
                print(f"{run}, seed {seed}", result["summary"][run], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
