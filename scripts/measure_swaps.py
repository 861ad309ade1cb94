#!/usr/bin/env python3
"""What a swap of positions costs, plain and calibrated: losses before fine-tuning and along the way, against the base.

python scripts/measure_swaps.py CHECKPOINT TEXT --schemes t5 alibi --json results.json

For each scheme and seed: the plain swap, the closed forms, and both stages of calibration, each fine-tuned; and the base
fine-tuned at the rate of the calibrated starts, as the control, if anything is fine-tuned. The start `calibrated` is
calibrated as by default, `query_key` with `weights="query_key"`, and `outputs` so too, without the steps that match
logits; the starts `closed_form` and `attention` keep what comes closer to the base's attention, whatever it predicts.
Documents of TEXT are separated by blank lines; the last tenth of them is held out and only measured. Results are written
after each run, so that an interrupted measurement goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc import Matching, calibrate, lora_config, patch_model, schemes_of
from hf_posenc.checkpoints.files import new_folder, replaced
from hf_posenc.recipes.measurements import measure_of, written
from hf_posenc.recipes.run_report import score_by_length

MOST = [layer for layer in range(30) if layer not in (10, 16, 17, 18, 19)]
"""Layers of SmolLM2-135M: all but the five dearest for transformer_xl by `choose_layers`, on text said twice."""
SCHEMES = {
    "t5": ("t5", {"share_layers": False}),
    "t5_window": ("t5", {"share_layers": False, "window": 2048, "sinks": 4}),
    "alibi": ("alibi", {"trainable": True}),
    "transformer_xl": ("transformer_xl", {}),
    **{f"transformer_xl_{count}": ("transformer_xl", {"frequencies": count}) for count in (4, 8, 32)},
    "transformer_xl_window": ("transformer_xl", {"window": 512, "sinks": 4}),
    "transformer_xl_most_window": ("transformer_xl", {"layers": MOST, "window": 512, "sinks": 4}),
    "transformer_xl_every_fourth": ("transformer_xl", {"layers": "3::4", "window": 512, "sinks": 4}),
    "shaw": ("shaw", {}),
    "shaw_window": ("shaw", {"window": 2048, "sinks": 4}),
    "shaw_most": ("shaw", {"layers": MOST}),
    "nope_every_fourth": ("nope", {"layers": "3::4"}),
    "yarn_2": ("rope", {"scaling": {"rope_type": "yarn", "factor": 2.0}}),
    "yarn_4": ("rope", {"scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "dynamic_4": ("rope", {"scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "window_sinks": ("rope", {"window": 512, "sinks": 4}),
    "yarn": ("rope", {"scaling": {"rope_type": "yarn", "factor": 8.0}}),
    "window": ("rope", {"window": 512}),
    "far_rope": ("far_rope", {}),
}
NOT_SETTINGS = (
    "checkpoint",
    "text",
    "json",
    "schemes",
    "starts",
    "seeds",
    "untrained",
    "keep",
)  # the runs say these
STARTS = ("plain", "closed_form", "attention", "outputs", "query_key", "calibrated")
RECALL, TRIALS = ("niah_single", "niah_multikey", "vt", "repeat_gain"), 2
"""What --recall measures; trials for each length, and depth of the needle."""
FITTED, HELD_OUT = 6144, 2048
"""Tokens that a calibration reads at most: to fit closed forms, and to choose among them."""


def documents(tokenizer, text: str) -> list[list[int]]:
    """Return the tokens of each document, with the tokenizer's own first token."""
    return [tokenizer(part.strip()).input_ids for part in text.split("\n\n") if part.strip()]


def split(parts: list[list[int]]) -> int:
    """Return how many documents, the first ones, are trained on."""
    return len(parts) - max(1, len(parts) // 10)


def windows(parts: list[list[int]], length: int) -> torch.Tensor:
    """Return documents one after the other, cut into windows (N, length)."""
    ids = torch.tensor([token for part in parts for token in part])
    return ids[: len(ids) // length * length].view(-1, length)


MEASURED = Path(__file__).parents[1] / "docs/measured"
SMALL, LARGE, LATEST = (MEASURED / f"{name}.json" for name in ("swaps", "smollm2", "smollm2_attention"))
"""What was measured: on stories260K; on SmolLM2-135M-Instruct with `weights="query_key"`; on it as by default."""


def kept_runs(variant: str, results: Path) -> list[dict[str, Any]]:
    """Return the kept runs of a variant, such as `control` or `t5, plain`, one per seed."""
    runs = json.loads(results.read_text(encoding="utf-8"))["runs"]
    return [run for name, run in runs.items() if name.rpartition(", seed ")[0] == variant]


def loss_by_length(variant: str, *, tuned: bool, results: Path = SMALL) -> dict[int, list[float]]:
    """Return length -> losses of all kept runs in nats, before or after all of their fine-tuning."""
    runs = kept_runs(variant, results)
    found = [run["after"][max(run["after"], key=int)] if tuned else run["before"] for run in runs]
    return {int(length): [losses[length] for losses in found] for length in found[0]}


def loss_by_tokens(
    variant: str, length: int, results: Path = SMALL, seeds: int | None = None
) -> dict[int, list[float]]:
    """Return tokens that were read, those of the calibration included -> losses of the first `seeds` kept runs, or all."""
    found: dict[int, list[float]] = {}
    for run in kept_runs(variant, results)[:seeds]:
        begun = run.get("calibration", {}).get("tokens", 0)
        for tokens, losses in {"0": run["before"], **run.get("after", {})}.items():
            found.setdefault(begun + int(tokens), []).append(losses[str(length)])
    return found


@torch.no_grad()
def loss(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Return the mean cross entropy of the next token, in nats."""
    model.eval()
    sums = 0.0
    for batch in tokens.to(model.device).split(max(1, 4096 // tokens.shape[1])):
        logits = model(batch, use_cache=False).logits[:, :-1]
        sums += F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return sums / tokens[:, 1:].numel()


def measure(model: PreTrainedModel, held: dict[int, torch.Tensor]) -> dict[str, float]:
    """Return the loss at each length."""
    return {str(length): round(loss(model, tokens), 4) for length, tokens in held.items()}


def recall(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor, lengths: list[int]
) -> dict:
    """Return name of a measure -> length -> mean score."""
    found = {}
    for name in RECALL:
        rows = measure_of(name)(model.eval(), tokenizer, tokens, lengths=lengths, trials=TRIALS)
        found[name] = {str(length): round(score, 3) for length, score in score_by_length(rows).items()}
    return found


def fine_tune(model, train, held, *, rate, tokens_at, batch_size, seed, bfloat16=False, state=None):
    """Train with AdamW, the rate constant after a tenth of warm-up; return the losses at each number of tokens.

    On the way only the first length is measured. With `state`, a file, training goes on where that file says.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    per_step, found, done = batch_size * train.shape[1], {}, 0
    steps = {math.ceil(tokens / per_step): tokens for tokens in tokens_at}
    if state is not None and state.exists():
        saved = torch.load(state, map_location=model.device)
        found, done = saved["found"], saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"].cpu())
        for parameter, value in zip(trained, saved["trained"], strict=True):
            parameter.data.copy_(value)
    warm = max(1, max(steps) // 10)
    for step in range(done + 1, max(steps) + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / warm)
        model.train()
        batch = train[torch.randint(len(train), (batch_size,), generator=generator)].to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            logits = model(batch, use_cache=False).logits[:, :-1]
        value = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            first = dict(list(held.items())[:1])
            found[str(steps[step])] = measure(model, held if step == max(steps) else first)
            print(f"  {steps[step]:,} tokens: {found[str(steps[step])]}", flush=True)
            if state is not None and step < max(steps):
                now = {"found": found, "step": step, "optimizer": optimizer.state_dict()}
                now |= {"generator": generator.get_state(), "trained": [each.data for each in trained]}
                with replaced(state) as partial:
                    torch.save(now, partial)
    if state is not None:
        state.unlink(missing_ok=True)
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder or Hub id of a pretrained causal language model")
    parser.add_argument("text", type=Path, help="text file, documents separated by blank lines")
    parser.add_argument("--schemes", nargs="*", choices=SCHEMES, default=["t5", "alibi", "transformer_xl", "shaw"])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["plain", "calibrated"])
    parser.add_argument(
        "--untrained", nargs="*", choices=STARTS, default=[], help="starts that are only measured, not fine-tuned"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--length", type=int, default=512, help="tokens of a window of fine-tuning")
    parser.add_argument("--calibrate-length", type=int, default=256, help="tokens of a window of calibration")
    parser.add_argument(
        "--calibrate-windows", type=int, default=600, help="of text that calibration reads, as often as its steps need"
    )
    parser.add_argument("--steps", type=int, default=50, help="of the second stage of calibration, for each loss")
    parser.add_argument("--calibrate-batch-size", type=int, default=4, help="windows in each of these steps")
    parser.add_argument("--calibrate-dtype", choices=["float32", "bfloat16"], default="float32", help="of its weights")
    parser.add_argument("--weight-rate", type=float, default=1e-3, help="of weights in the second stage")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 4096], help="at which is measured")
    parser.add_argument("--held-out-tokens", type=int, default=40_000, help="to measure on at each length, at most")
    parser.add_argument("--tokens", nargs="+", type=int, default=[25_000, 50_000, 100_000, 250_000])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-4, help="of fine-tuning from calibrated starts, and the base")
    parser.add_argument("--plain-rate", type=float, default=1e-3, help="of fine-tuning from plain swaps")
    parser.add_argument("--count-calibration", action="store_true", help="--tokens are those of calibration as well")
    parser.add_argument("--bfloat16", action="store_true", help="fine-tune in mixed precision")
    parser.add_argument("--lora", type=int, metavar="RANK", help="fine-tune adapters of this rank on all linear layers")
    parser.add_argument("--recall", nargs="*", type=int, default=[], help="lengths at which recall is measured")
    parser.add_argument("--prompt", help="of a text that every model writes, which the results keep")
    parser.add_argument(
        "--keep", type=Path, help="folder of calibrated and fine-tuned models, and of training that goes on"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, required=True, help="results; what is there already is not run again")
    options = parser.parse_args()
    results = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {"runs": {}}
    results["settings"] = {k: v for k, v in vars(options).items() if k not in NOT_SETTINGS}
    results["settings"] |= {"checkpoint": Path(options.checkpoint).name, "text": options.text.name}
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    run(options, tokenizer, results)
    return 0


def load(checkpoint: str, device: str, dtype: str = "float32") -> PreTrainedModel:
    """Return the base."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device)


def run(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, results: dict) -> None:
    """Measure what is not in the results yet."""
    checkpoint, parts = options.checkpoint, documents(tokenizer, options.text.read_text(encoding="utf-8"))
    first = split(parts)
    train = windows(parts[:first], options.length)
    short = windows(parts[:first], options.calibrate_length)
    few = {length: max(1, options.held_out_tokens // length) for length in options.lengths}
    held = {length: windows(parts[first:], length)[: few[length]] for length in options.lengths}

    def keep(name: str, found: dict) -> None:
        results["runs"][name] = found
        with replaced(options.json) as partial:
            partial.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(found), flush=True)

    def said(model: PreTrainedModel, when: str = "") -> dict:
        """Return what the model writes, and what it recalls."""
        found = {f"writes{when}": written(model, tokenizer, options.prompt)} if options.prompt else {}
        if options.recall:
            found[f"recall{when}"] = recall(model, tokenizer, windows(parts[first:], 1).flatten(), options.recall)
        return found

    def as_it_is(model: PreTrainedModel) -> dict:
        """Return the losses, and what the model writes and recalls."""
        found = said(model)  # first: a needle may not fit
        return {"before": measure(model, held)} | found

    def tuned(model: PreTrainedModel, name: str, rate: float, seed: int, begun: int) -> dict:
        """Return the losses after each number of tokens, and the rate."""
        points = [each - begun if options.count_calibration else each for each in options.tokens]
        if options.lora:
            torch.manual_seed(seed)  # PEFT draws its weights
            config = LoraConfig(r=options.lora, target_modules="all-linear")
            model = get_peft_model(model, lora_config(model, r=options.lora) if schemes_of(model) else config)
        state = options.keep and options.keep / f"{name}.pt"
        settings = {"batch_size": options.batch_size, "seed": seed, "bfloat16": options.bfloat16, "state": state}
        points = [each for each in points if each > 0]
        after = fine_tune(model, train, held, rate=rate, tokens_at=points, **settings)
        if options.lora:
            model = model.merge_and_unload()
        if options.keep:
            with new_folder(options.keep / f"{name}, fine-tuned") as made:
                model.save_pretrained(made)
                tokenizer.save_pretrained(made)
        return {"after": after, "rate": rate} | said(model, "_after")

    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    suffix = f", LoRA {options.lora}" if options.lora else ""
    for seed in options.seeds:
        fine_tunes = any(start not in options.untrained for start in options.starts)
        if not fine_tunes and "base" not in results["runs"]:
            keep("base", as_it_is(load(checkpoint, options.device)))
        if fine_tunes and (name := f"control{suffix}, seed {seed}") not in results["runs"]:
            base = load(checkpoint, options.device)
            keep(name, as_it_is(base) | tuned(base, name, options.rate, seed, 0))
        for scheme in options.schemes:
            for start in options.starts:
                if (name := f"{scheme}, {start}{suffix}, seed {seed}") in results["runs"]:
                    continue
                swapped, calibration = started(options, checkpoint, short, scheme, start, seed)
                found = as_it_is(swapped) | calibration
                if start not in options.untrained:
                    rate = options.plain_rate if start == "plain" else options.rate
                    found |= tuned(swapped, name, rate, seed, calibration.get("calibration", {}).get("tokens", 0))
                keep(name, found)


def started(
    options: argparse.Namespace, checkpoint: str, short: torch.Tensor, scheme: str, start: str, seed: int
) -> tuple[PreTrainedModel, dict]:
    """Return a swapped model as it starts, and what its calibration reports; kept models are read again."""
    folder = options.keep and options.keep / f"{scheme}, {start}, seed {seed}"
    if folder and folder.exists():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(options.device)
        return model, json.loads((folder / "calibration.json").read_text(encoding="utf-8"))
    given, hyperparameters = SCHEMES[scheme]
    dtype = "float32" if start == "plain" else options.calibrate_dtype
    swapped = patch_model(load(checkpoint, options.device, dtype), given, seed=seed, **hyperparameters)
    if start == "plain":
        return swapped, {}
    began = time.process_time()
    matching = Matching(
        steps=options.steps,
        batch_size=options.calibrate_batch_size,
        weight_rate=options.weight_rate,
        loss=start if start in ("attention", "outputs") else None,
        weights=None if start == "calibrated" else "query_key",
        seed=seed,
    )
    report = calibrate(
        swapped,
        short[: options.calibrate_windows],
        held_out=max(1, HELD_OUT // options.calibrate_length),
        closed_windows=FITTED // options.calibrate_length,
        matching=None if start == "closed_form" else matching,
        judge="attention" if start in ("closed_form", "attention") else "loss",
        progress=True,
    )
    swapped.float()
    found = {
        "calibration": {
            "cpu_seconds": round(time.process_time() - began, 1),
            "tokens": report.tokens,
            "kept": report.kept,
            "steps": options.steps,
        }
    }
    if folder:
        with new_folder(folder) as made:
            swapped.save_pretrained(made)
            AutoTokenizer.from_pretrained(checkpoint).save_pretrained(made)  # for the commands
            (made / "calibration.json").write_text(json.dumps(found), encoding="utf-8")
    return swapped, found


if __name__ == "__main__":
    sys.exit(main())
