#!/usr/bin/env python3
"""What schemes that join, and mixtures of schemes over layers, cost and bring: before and after fine-tuning.

python scripts/measure_mixtures.py CHECKPOINT TEXT --json results.json     a base that rotates
python scripts/measure_mixtures.py embedded --json results.json            the small GPT-2 of the package

Each variant is patched, calibrated (closed forms, then steps that match attention) and fine-tuned with several seeds,
and the base is fine-tuned in the same way. All are measured at once, twice and four times the trained length. A seed
draws new parameters, the batches of the calibration and those of the fine-tuning, the same ones for each variant. So
`differences` are paired: means over the seeds, with their standard deviations. Documents of TEXT are separated by blank
lines; the last tenth of them is held out. Results are written after each run; an interrupted measurement goes on.

A temperature that is 1 up to the trained length changes neither calibration nor fine-tuning. Its variants are therefore
measured with the weights of the variant without it (`SAME_WEIGHTS`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measure_calibration import EMBEDDED, FITTED, documents, fine_tune, load, measure, split, windows
from results import read, rounded, write
from transformers import AutoTokenizer, PreTrainedModel

from hf_posenc import calibrate, choose_layers, patch_model
from hf_posenc.calibration import Matching
from hf_posenc.recipes.embedded import FOLDER, byte_tokenizer, library_parts
from hf_posenc.recipes.models import read_schemes

ROPE = '{"scheme": "rope", "window": LENGTH}'
T5 = '{"scheme": "t5", "share_layers": false}'
T5_WINDOW = '{"scheme": "t5", "share_layers": false, "window": LENGTH}'
ON_ROTATIONS = {
    "window": ROPE,
    "nope, window": f'{{"3::4": "nope", "_default": {ROPE}}}',
    "nope": '{"3::4": "nope"}',
    "chosen 2": '{"scheme": "nope", "layers": CHEAPEST_2}',
    "even 2": '{"scheme": "nope", "layers": [1, 4]}',
    "bam": "bam",
    "forgetting": "forgetting",
    "fire": "fire",
    "chosen 1": '{"scheme": "nope", "layers": CHEAPEST_1}',
}
"""Variants of a base that rotates, as `--scheme` of the recipes takes them: layers that nobody names keep the rotation.

LENGTH stands for the trained length, CHEAPEST_N for the layers that `choose_layers` ranks first.
"""
ON_TABLES = {
    "t5": T5,
    "t5, window": T5_WINDOW,
    "nope": f'{{"3::4": "nope", "_default": {T5}}}',
    "nope, window": f'{{"3::4": "nope", "_default": {T5_WINDOW}}}',
    "rope": "rope",
    "rope, forgetting": '["rope", "forgetting"]',
    "fire": "fire",
    "bam": "bam",
}
"""Variants of a base with a table of positions: it reaches all layers, so all layers get other positions."""
SAME_WEIGHTS = {
    "nope": ("nope, temperature", '"nope"', '["nope", "temperature"]'),
    "nope, window": ("nope, window, temperature", '"nope"', '["nope", "temperature"]'),
}
"""Variant -> the variant that is also measured with its weights, and what to replace in the scheme."""
COMPARED = (
    ("window", "base"),
    ("nope", "base"),
    ("nope", "t5"),
    ("nope, temperature", "nope"),
    ("nope, window", "nope"),
    ("nope, window, temperature", "nope, window"),
    ("nope, window", "window"),
    ("nope, window", "t5, window"),
    ("chosen 1", "nope"),
    ("chosen 2", "even 2"),
    ("forgetting", "base"),
    ("rope, forgetting", "rope"),
    ("fire", "bam"),
    ("fire", "t5"),
)
"""Pairs whose difference is reported, where both were measured."""
RANKED = 64
"""Windows that `choose_layers` reads, 8 of which judge."""


def corpus(options: argparse.Namespace) -> tuple[str, str, list[list[int]], list[list[int]]]:
    """Return the checkpoint, the name of the text, and the documents to train and to measure on."""
    if options.checkpoint == EMBEDDED:
        tokenizer = byte_tokenizer()
        train, held = ([tokenizer(f.read_text("utf-8")).input_ids for f in part] for part in library_parts())
        return str(FOLDER), "the standard library", train, held
    parts = documents(AutoTokenizer.from_pretrained(options.checkpoint), options.text.read_text(encoding="utf-8"))
    return options.checkpoint, options.text.name, parts[: split(parts)], parts[split(parts) :]


def changed(model: PreTrainedModel, base: PreTrainedModel, tokens: torch.Tensor) -> bool:
    """Return whether a patched model predicts anything else than its base."""
    with torch.no_grad():
        return not torch.allclose(model.eval()(tokens).logits, base.eval()(tokens).logits, atol=1e-3)


def one_run(options: argparse.Namespace, checkpoint: str, name: str, scheme: str, seed: int, texts) -> dict[str, Any]:
    """Patch, calibrate, measure, fine-tune and measure again; return the losses of each variant with these weights."""
    train, short, held = texts
    variants = {name: scheme}
    if name in SAME_WEIGHTS:
        other, old, new = SAME_WEIGHTS[name]
        variants[other] = scheme.replace(old, new)
    model, report, began = load(checkpoint), None, time.process_time()
    if name != "base":
        patch_model(model, read_schemes("variant", scheme, {}), seed=seed)
        if changed(model, load(checkpoint), short[:1]):
            matching = Matching(steps=options.steps, loss="attention", seed=seed)
            report = calibrate(model, short[: options.calibrate_windows], closed_windows=FITTED, matching=matching)

    def losses() -> dict[str, Any]:
        found = {}
        for each, its_scheme in variants.items():
            twin = model
            if each != name:
                twin = patch_model(load(checkpoint), read_schemes("variant", its_scheme, {}))
                lacking, more = twin.load_state_dict(model.state_dict(), strict=False)
                assert not more
                assert all(key.endswith("hf_posenc_temperature") for key in lacking)  # a mark, no weight
            found[each] = measure(twin, held)
        return found

    fitted = time.process_time() - began
    before = losses()
    first = {length: tokens[:1] for length, tokens in list(held.items())[:1]}
    fine_tune(
        model, train, first, rate=options.rate, tokens_at=[options.tokens], batch_size=options.batch_size, seed=seed
    )
    after = losses()
    kept = None if report is None else report.kept
    cost = {"cpu_seconds": round(time.process_time() - began, 1), "cpu_seconds_of_calibration": round(fitted, 1)}
    return {
        each: {"scheme": variants[each], "kept": kept, "before": before[each], "after": after[each]} | cost
        for each in variants
    }


def differences(runs: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Return the paired differences of what was compared: mean and standard deviation over the seeds, in nats."""
    found = {}
    for one, other in COMPARED:
        keys = [(f"{one}, seed {seed}", f"{other}, seed {seed}") for seed in seeds]
        if len(seeds) < 2 or not all(key in runs for pair in keys for key in pair):
            continue
        for when in ("before", "after"):
            for length in runs[keys[0][0]][when]:
                both = [(runs[a][when][length], runs[b][when][length]) for a, b in keys]
                if all(loss is not None for pair in both for loss in pair):
                    less = [a - b for a, b in both]
                    row = {"mean": round(mean(less), 4), "deviation": round(stdev(less), 4)}
                    found.setdefault(f"{one} less {other}", {})[f"{when}, {length}"] = row
    return found


def main() -> int:
    """Make the runs that are missing, and write each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help=f"folder or Hub id of a pretrained causal language model, or {EMBEDDED}")
    parser.add_argument("text", nargs="?", type=Path, help="text file, documents separated by blank lines")
    parser.add_argument("--variants", nargs="+", help="only these (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=250_000, help="of fine-tuning, in windows of the trained length")
    parser.add_argument("--batch-size", type=int, default=4, help="windows in a step")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--calibrate-windows", type=int, default=200, help="of half of the trained length")
    parser.add_argument("--steps", type=int, default=25, help="of the second stage of calibration")
    parser.add_argument("--held-out-tokens", type=int, default=16_384, help="to measure on at each length, at most")
    parser.add_argument("--json", type=Path, required=True, help="results; what is there already is not run again")
    options = parser.parse_args()
    if (options.checkpoint == EMBEDDED) == (options.text is not None):
        parser.error(f"give a text, but none for {EMBEDDED}")
    torch.set_num_threads(1)
    checkpoint, said, train, held_out = corpus(options)
    base = load(checkpoint)
    length = base.config.max_position_embeddings
    held = {n: windows(held_out, n)[: options.held_out_tokens // n] for n in (length, 2 * length, 4 * length)}
    texts = windows(train, length), windows(train, length // 2), held
    names = ("tokens", "batch_size", "rate", "calibrate_windows", "steps", "held_out_tokens", "seeds")
    settings = {name: getattr(options, name) for name in names} | {"length": length, "torch": torch.__version__}
    settings |= {"checkpoint": Path(options.checkpoint).name, "text": said}
    result = read(options.json, {"settings": settings, "runs": {}})
    if result["settings"] != settings:
        parser.error(f"{options.json} has runs of other settings: {result['settings']}")
    every = {"base": ""} | (ON_TABLES if options.checkpoint == EMBEDDED else ON_ROTATIONS)
    if unknown := set(options.variants or ()) - set(every):
        parser.error(f"no variant {', '.join(sorted(unknown))}; choose from {'; '.join(every)}")
    variants = {name: scheme for name, scheme in every.items() if name in (options.variants or every)}
    if any("CHEAPEST" in scheme for scheme in variants.values()) and "choice" not in result:
        result["choice"] = rounded(choose_layers(base, texts[0][:RANKED], "nope").to_dict())
        write(options.json, result)
    ranked = [cost["layer"] for cost in result.get("choice", {}).get("costs", [])]
    for name, scheme in variants.items():
        for seed in options.seeds:
            if f"{name}, seed {seed}" in result["runs"]:
                continue
            scheme = scheme.replace("LENGTH", str(length))
            for count in (1, 2):
                scheme = scheme.replace(f"CHEAPEST_{count}", str(sorted(ranked[:count])))
            for each, found in one_run(options, checkpoint, name, scheme, seed, texts).items():
                result["runs"][f"{each}, seed {seed}"] = found
                print(f"{each}, seed {seed}", json.dumps(found), flush=True)
            result["differences"] = differences(result["runs"], options.seeds)
            write(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
