#!/usr/bin/env python3
"""Writes docs/leaderboard.html, every swap that was fine-tuned or only measured, from the results in docs/measured.

python scripts/make_results_page.py            # write it
python scripts/make_results_page.py --check    # exit 1 if it is not what was measured

It reads calibration_*.json, mixtures_*.json, far_rope_*.json and recall_*.json, as measured.py does, and fills
results_page.html. Engines are asked of tiny models with the same schemes.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import measure_calibration
import measure_far_rope
import measure_mixtures
import measure_recall
import results_curves
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from measured import CONTROL, Measurement, loss_by_length, measurements
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_posenc import patch_model, which_engine
from hf_posenc.recipes.models import read_schemes

PAGE = Path(__file__).parents[1] / "docs/leaderboard.html"
STARTS = {
    CONTROL: "control",
    "plain": "plain swap",
    "closed_form": "closed forms",
    "attention": "attention matched",
    "outputs": "calibrated",
    "unlabelled": "calibrated without labels",
    "scratch": "from scratch",
}
"""Start -> what the page calls it."""
TITLES = {
    "calibration": "swaps, plain and calibrated",
    "mixtures": "mixtures of schemes, and schemes that join",
    "far_rope": "rotations, fine-tuned beyond the trained length",
    "recall": "swaps, and what they recall",
}
WITHIN = 0.1
"""Nats that a loss may be above that at the trained length, to count as reached."""
ENGINE_AT = 2048
"""Tokens of the call whose engine is shown."""
NO_OPTIONS = ("checkpoint", "text", "length", "torch", "multiples", "kind", "seeds")
"""Settings that no option of measure_mixtures.py, measure_far_rope.py and measure_recall.py sets, or that a row decides."""


class Spread(NamedTuple):
    """Mean over the seeds, and the range."""

    mean: float
    low: float
    high: float


def spread(values: list[float]) -> Spread | None:
    """Return the mean and the range of what was measured, or None where nothing was."""
    return Spread(fmean(values), min(values), max(values)) if values else None


def reach(after: Mapping[int, list[float]], trained: int) -> int | None:
    """Return the longest measured length up to which the loss stays near that at the trained length.

    None where there is no loss after fine-tuning, or only at one length.
    """
    if trained not in after or len(after) < 2:
        return None
    reached = trained
    for length in sorted(length for length in after if length > trained):
        if fmean(after[length]) > fmean(after[trained]) + WITHIN:
            break
        reached = length
    return reached


def apart(runs: Mapping[int, dict], control: Mapping[int, dict], trained: int) -> Spread | None:
    """Return how far above the control runs end at the trained length, in nats, paired by seed."""
    found = []
    for seed in runs.keys() & control.keys():
        one, other = (loss_by_length([each[seed]], tuned=True).get(trained) for each in (runs, control))
        found += [a - b for a, b in zip(one or [], other or [], strict=False)]
    return spread(found)


def row(measured: Measurement, method: str, start: str) -> dict[str, Any]:
    """Return the cells of a method with one start; None where nothing was measured."""
    runs, trained = measured.of(method, start), measured.trained
    before = loss_by_length(runs.values(), tuned=False)
    after = loss_by_length(runs.values(), tuned=True)
    recall = measured.recall.get((method, start), {})
    calibrations = [run["calibration"] for run in runs.values() if "calibration" in run]

    def middle(name: str) -> float | None:
        found = [each[name] for each in calibrations if name in each]
        return median(found) if found else None

    return {
        "method": method,
        "start": start,
        "positions": positions(measured, method),
        "seeds": len(runs),
        "fine_tuned": sum(bool(run.get("after")) for run in runs.values()),
        "before": spread(before.get(trained, [])),
        "after": spread(after.get(trained, [])),
        "apart": apart(runs, measured.control, trained) if start != CONTROL else None,
        "after_4": spread(after.get(4 * trained, [])),
        "after_8": spread(after.get(8 * trained, [])),
        "recall_1": recall.get("1x"),
        "recall_8": recall.get("distance 8x"),
        "reach": reach(after, trained),
        "tokens": max((int(tokens) for run in runs.values() for tokens in run.get("after", ())), default=None),
        "calibration_tokens": middle("tokens"),
        "seconds": middle("seconds"),
        "engine": engine(measured, method),
        "commands": commands(measured, method, start),
    }


def tiny(model_type: str, length: int) -> PreTrainedModel:
    """Return a small untrained model, whose engines are those of a large one."""
    shape: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 5}
    shape |= {"intermediate_size": 64, "num_key_value_heads": 4} if model_type == "llama" else {}
    tokens = {"vocab_size": 8, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, max_position_embeddings=length, **shape, **tokens)
    return AutoModelForCausalLM.from_config(config)


def scheme(measured: Measurement, method: str) -> tuple[Any, dict[str, Any]]:
    """Return what `patch_model` gets for a method."""
    if measured.kind == "calibration":
        return measure_calibration.SCHEMES[method.partition(" at ")[0]]  # `yarn at another rate`
    if measured.kind == "far_rope":
        arguments = dict(measure_far_rope.rotations(measured.trained, max(measured.settings["multiples"]))[method])
        return arguments.pop("scheme"), arguments
    return read_schemes("variant", positions(measured, method), {}), {}


def positions(measured: Measurement, method: str) -> str:
    """Return what `patch_model` gets for a method, to read."""
    if method == "base":
        return "its own positions"
    if measured.kind == "mixtures":
        return next(run["scheme"] for (name, _, _), run in measured.runs.items() if name == method)
    if measured.kind == "recall":
        return measure_recall.VARIANTS[measured.settings["kind"]][method]
    given, hyperparameters = scheme(measured, method)
    return ", ".join([str(given), *(f"{name}={value!r}" for name, value in hyperparameters.items())])


def engine(measured: Measurement, method: str) -> str:
    """Return the engine that computes the attention of a method, see `ENGINE_AT`; a base attends by itself."""
    beyond = [loss for run in measured.control.values() for loss in run["before"].values()]
    with_table = None in beyond or measured.settings.get("kind") == "table"
    model = tiny("gpt2" if with_table else "llama", measured.trained)
    if method == "base":
        return str(model.config._attn_implementation)
    given, hyperparameters = scheme(measured, method)
    return which_engine(patch_model(model, given, **hyperparameters), ENGINE_AT).engine


def options(settings: Mapping[str, Any], left_out: tuple[str, ...] = ()) -> list[str]:
    """Return settings as options of a command."""
    words = []
    for name, value in settings.items():
        if name not in left_out and value is not None:
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    return words


def commands(measured: Measurement, method: str, start: str) -> list[tuple[list[int], str]]:
    """Return seeds and the command that makes their runs again: one, or two if only some seeds were fine-tuned."""
    runs, found = measured.of(method, start), []
    for tuned in (True, False):
        if not (seeds := [seed for seed, run in runs.items() if bool(run.get("after")) == tuned]):
            continue
        run = runs[seeds[0]]
        settings = run["settings"]
        words = COMMANDS[measured.kind](settings, method, start, run, seeds)
        place = [settings["kind"]] if measured.kind == "recall" else corpus(settings)
        script = f"scripts/measure_{measured.kind}.py"
        found.append((seeds, shlex.join(["python", script, *place, *words, "--json", "results.json"])))
    return found


def corpus(settings: Mapping[str, Any]) -> list[str]:
    """Return the checkpoint, and the text if the command takes one."""
    text = settings.get("text", "TEXT")
    own = settings["checkpoint"] == measure_calibration.EMBEDDED or text == "written by the base"
    return [settings["checkpoint"]] if own else [settings["checkpoint"], text]


def _calibration(settings, method, start, run, seeds) -> list[str]:
    """The control is made with every scheme; the cheapest one then is a swap that is only measured."""
    name = "nope" if start == CONTROL else method.partition(" at ")[0]
    chosen = "plain" if start == CONTROL else start
    rate = {"plain_rate" if start == "plain" else "rate": run["rate"]} if "rate" in run else {}
    only_measured = {} if run.get("after") and start != CONTROL else {"untrained": chosen}
    chosen_runs = {"schemes": name, "starts": chosen, **only_measured, "seeds": seeds}
    return options(chosen_runs) + options(settings | rate, ("checkpoint", "text"))


def _mixtures(settings, method, start, run, seeds) -> list[str]:
    makers = {twin: name for name, (twin, _, _) in measure_mixtures.SAME_WEIGHTS.items()}
    variants = list(dict.fromkeys(["base", makers.get(method, method)]))
    return options({"variants": variants, "seeds": seeds}) + options(settings, NO_OPTIONS)


def _far_rope(settings, method, start, run, seeds) -> list[str]:
    chosen = list(dict.fromkeys(["base", method.removesuffix(measure_far_rope.CACHED)]))
    measured_on = {"tokens": settings["held_out_tokens"], "multiples": settings["multiples"]}
    tuned = {"fine_tune": settings["tokens"], "rate": settings["rate"], "seeds": seeds, "fine_tuned": chosen}
    return options(measured_on | tuned)


def _recall(settings, method, start, run, seeds) -> list[str]:
    asked = {"outputs": "calibrated", CONTROL: "plain"}.get(start, start)
    return options({"variants": method, "starts": asked, "seeds": seeds}) + options(settings, NO_OPTIONS)


COMMANDS = {"calibration": _calibration, "mixtures": _mixtures, "far_rope": _far_rope, "recall": _recall}


def group(measured: Measurement) -> dict[str, Any]:
    """Return what the page shows of a measurement: the rows by loss, and the curves."""
    settings = measured.settings
    names = dict.fromkeys(key[:2] for key in measured.runs)
    rows = [row(measured, method, start) for method, start in names]
    rows.sort(key=lambda r: (r["start"] != CONTROL, r["after"] is None, (r["after"] or r["before"]).mean))
    tokens = settings["tokens"]
    return {
        "kind": measured.kind,
        "title": TITLES[measured.kind],
        "name": re.sub(r"\W", "-", measured.files[0].removesuffix(".json")),
        "base": measured.base,
        "files": measured.files,
        "text": settings.get("text"),
        "trained": measured.trained,
        "lengths": measured.lengths,
        "held_out": settings.get("held_out_tokens"),
        "tokens": max(tokens) if isinstance(tokens, list) else tokens,
        "calibrate_length": settings.get("calibrate_length"),
        "rows": rows,
        "curves": results_curves.curves(measured, STARTS),
    }


def page() -> str:
    """Return the page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    groups = [group(each) for each in measurements()]
    return environment.get_template("results_page.html").render(
        groups=groups,
        bases=list(dict.fromkeys(each["base"] for each in groups)),
        starts=STARTS,
        within=WITHIN,
        engine_at=ENGINE_AT,
        styles=results_curves.STYLES,
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    check, new = parser.parse_args().check, page()
    if check and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != new):
        print("docs/leaderboard.html is out of date; run python scripts/make_results_page.py")
        return 1
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
