"""The runs of a sweep in one folder, `runs/VARIANT/seed-N`, and the tables that are made from them.

Finished runs are kept, missing runs are made.
"""

import math
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..checkpoints.cards import plain
from . import one_run, run_folder, training
from .corpus import read_text
from .measurements import HeldOutArguments
from .models import Schemes, schemes_to_json
from .results import Results, read_json, table, without_paths, write_json, write_text
from .run_report import METHODS, accuracy_by_length
from .training import TrainingArguments

ADVICE = "Finished runs are kept, and the newest state of the interrupted run: the same command goes on"


@dataclass(kw_only=True)
class SweepArguments(HeldOutArguments, TrainingArguments):
    """The sweep.

    Args:
        seeds: seeds to run every scheme or variant with.
        keep_weights: keep the checkpoint of every run, not only its results.
        output: folder of the sweep.
    """

    seeds: list[int] | tuple[int, ...] = (0, 1, 2)
    keep_weights: bool = False
    output: str = "runs/sweep"


def make(
    arguments: SweepArguments,
    variants: Mapping[str, tuple[Schemes, dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    base: str,
) -> None:
    """Make every run of a sweep that has no results yet.

    All variants are run with one seed before the next seed, so that a half-done sweep can compare them.

    Args:
        arguments: checked options of the recipe.
        variants: variant -> its schemes, none for a control, and its own options.
        tokenizer: tokenizer for the text.
        base: folder or Hub id of the base.

    Raises:
        UsageError: if the folder contains runs of another sweep. Nothing is run then.
    """
    folder = Path(arguments.output)
    accelerator = training.accelerator_for(arguments, folder)
    text = read_text(arguments, tokenizer, accelerator, arguments.tokens_to_read)
    common = run_folder.identity(arguments, text, accelerator, base)
    runs: dict[Path, Results] = {}
    for seed in arguments.seeds:
        for name, (schemes, _) in variants.items():
            own = {"variant": name, "seed": seed, "scheme": schemes_to_json(schemes)}
            runs[folder / "runs" / name / f"seed-{seed}"] = common | own
    for target in sorted(folder.glob("runs/*/seed-*")):
        run_folder.require_same(target, runs.get(target, common), "choose another --output, or remove that folder")
    for target, identity in runs.items():
        if (target / "results.json").is_file():
            continue
        name, seed = identity["variant"], identity["seed"]
        accelerator.print(f"\n=== {name}, seed {seed} ===", flush=True)
        if accelerator.is_main_process and not (target / "progress.json").is_file():
            shutil.rmtree(target, ignore_errors=True)  # what is left of a run whose results were removed
        accelerator.wait_for_everyone()
        made = read(folder)
        earlier: Results = next(iter(made.values()))[0] if made else {}
        earlier = {key: earlier[key] for key in ("before", "retrieval_before") if key in earlier}
        shared = one_run.Shared(text, tokenizer, identity, earlier)
        one_run.run(arguments_of_run(arguments, target, seed=seed, **variants[name][1]), shared)
        if accelerator.is_main_process and not arguments.keep_weights:
            shutil.rmtree(target / "model")


def arguments_of_run(arguments: SweepArguments, target: Path, **own: Any) -> one_run.Arguments:
    """Return the arguments of a run: those of the sweep, with those of its own. An interrupted run goes on."""
    shared = {name: value for name, value in vars(arguments).items() if name in one_run.Arguments.__dataclass_fields__}
    resume = (target / "progress.json").is_file()
    return one_run.Arguments(**{**shared, "output": str(target), "resume": resume, **own})


def read(folder: Path) -> dict[str, list[Results]]:
    """Read the results of all finished runs: variant -> results, in the order of their seeds."""
    runs: dict[str, list[Results]] = {}
    for path in sorted(folder.glob("runs/*/seed-*/results.json")):
        runs.setdefault(path.parents[1].name, []).append(read_json(path))
    return runs


# ---------------------------------------------------------------------------------------------------------- the summary


def summarize(folder: Path, title: str) -> Results:
    """Write summary.json and summary.md; return the summary."""
    runs = read(folder)
    first = next(iter(runs.values()))[0]
    summary = {
        "title": title,
        "base": without_paths(first["base"]),
        "before": perplexities([first["before"]]),
        "variants": {variant: summarize_variant(results) for variant, results in runs.items()},
    }
    write_json(folder / "summary.json", summary)
    write_text(folder / "summary.md", markdown(summary))
    return summary


def summarize_variant(runs: list[Results]) -> Results:
    """Return the numbers of a variant, averaged over its seeds."""
    curves = zip(*(results["training"]["curve"] for results in runs), strict=True)
    return {
        "seeds": [results["seed"] for results in runs],
        "tokens": runs[0]["training"]["tokens"],
        "tokens_per_second": statistics.fmean(results["training"]["tokens_per_second"] for results in runs),
        **perplexities([results["after"] for results in runs]),
        "curve": [{"tokens": seeds[0]["tokens"], **spread([seed["loss"] for seed in seeds])} for seeds in curves],
        "retrieval": accuracy_by_length(cell for results in runs for cell in results["retrieval_after"]),
    }


def perplexities(measured: list[list[Results]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return method -> length -> perplexity over seeds, of the rows by length that every seed has."""
    return {
        method: {
            str(rows[0]["length"]): spread([row[method]["perplexity"] for row in rows])
            for rows in zip(*measured, strict=True)
            if method in rows[0]
        }
        for method, _ in METHODS
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return mean and sample standard deviation. A single value has no deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan
    return {"mean": statistics.fmean(values), **({} if math.isnan(deviation) else {"std": deviation})}


def shown(value: dict[str, float] | None) -> str:
    """Return a mean, and its standard deviation if it is known."""
    if value is None:
        return "-"
    return f"{value['mean']:.3f}" + (f" ± {value['std']:.3f}" if "std" in value else "")


def markdown(summary: Results) -> str:
    """Return the tables of a summary as Markdown."""
    base, variants = summary["base"], summary["variants"]
    lengths = sorted({length for entry in variants.values() for length in entry["sliding"]}, key=int)
    parts = [
        f"# {plain(summary['title'])}",
        f"Base: {plain(base['name'])}, {base['parameters']:,} weights, trained at {base['trained_length']} tokens.",
    ]
    for method, name in METHODS:
        rows = [("", "seeds", *lengths)]
        for label, entry in {"base, before": summary["before"] | {"seeds": "-"}, **variants}.items():
            rows.append((plain(label), str(len(entry["seeds"])), *(shown(entry[method].get(each)) for each in lengths)))
        about = "Mean and standard deviation over seeds on held-out text; lower is better."
        parts += [f"## Perplexity, {name}", about, table(rows)]
    rows = [("", "tokens", "tokens/s", "held-out loss at the end", "induction copy, by length")]
    for label, entry in variants.items():
        copied = ", ".join(f"{length}: {accuracy:.2f}" for length, accuracy in entry["retrieval"].items())
        speed, loss = f"{entry['tokens_per_second']:,.0f}", shown((entry["curve"] or [None])[-1])
        rows.append((plain(label), f"{entry['tokens']:,}", speed, loss, copied or "-"))
    return "\n\n".join([*parts, "## Cost, recovery and retrieval", table(rows)]) + "\n"
