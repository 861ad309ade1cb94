"""Compares schemes on one base, with the same data, seeds and budget, also with the base itself and RoPE's scalings.

Every run is one results.json under OUTPUT/runs; OUTPUT/summary.md and summary.json are made from them.
Run the same command again to make the runs that are missing and to continue an interrupted one. A folder with runs of
other arguments, another text or another base is refused.

Examples:
  hf-posenc compare --model gpt2 --data book.txt --variants unpatched alibi rope-yarn t5 --seeds 0 1 2
  hf-posenc compare --model gpt2 --data book.txt --variants t5 t5+uncalibrated t5+distill --recovery-steps 50
  accelerate launch -m hf_posenc.recipes.compare_schemes --config compare.yaml      # on many GPUs
"""

import math
import shutil
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import hf_posenc

from ..api import is_mixture
from ..checkpoints.cards import plain
from ..core.did_you_mean import did_you_mean
from ..core.registry import scheme_class
from . import models, one_run, program, run_folder, training
from .corpus import read_text
from .models import UNPATCHED, load
from .one_run import SharedArguments
from .options import NotNegative, UsageError, parse
from .results import Results, last_name, read_json, table, without_paths, write_json, write_text
from .run_report import METHODS, score_by_length

Variants = dict[str, tuple[models.Schemes, dict[str, Any]]]
"""Variant -> its schemes, none for a control, and its own options of `extend`."""
STRETCHED_ROPE = {kind: f"rope-{kind}" for kind in ("linear", "dynamic", "yarn")}
VARIANT_OPTIONS = ("trainable", "uncalibrated", "distill")


@dataclass(kw_only=True)
class Arguments(SharedArguments):
    """The comparison.

    Args:
        variants: what to compare: a scheme, or JSON as of --scheme in `extend`; unpatched; or rope-linear,
            rope-dynamic, rope-yarn (RoPE stretched to --train-length). Append +trainable (trainable=true),
            +uncalibrated (--calibrate none, the plain swap) or +distill (divergence from the base, with weight
            --distill).
        seeds: seeds to run every variant with.
        keep_weights: keep the checkpoint of every run, not only its results.
        output: folder of the comparison.
    """

    model: str = field()
    variants: list[str] | tuple[str, ...] = (UNPATCHED, "nope", "alibi", "rope-yarn")
    seeds: list[int] | tuple[int, ...] = (0, 1, 2)
    keep_weights: bool = False
    distill: NotNegative = 1.0
    output: str = "runs/compare_schemes"


def main(argv: list[str] | None = None, prog: str | None = None) -> Results:
    """Make the runs that are missing and return the summary."""
    arguments, parser = parse(Arguments, argv, __doc__, prog)
    advice = "Finished runs are kept, and the newest state of the interrupted run: the same command goes on"
    with program.ending(parser, advice):
        make(arguments, check_arguments(arguments))
        summary = summarize(Path(arguments.output), f"Schemes on {last_name(arguments.model)}")
    print(markdown(summary))
    return summary


def check_arguments(arguments: Arguments) -> Variants:
    """Check all variants before the first run; return them."""
    runs: Variants = {}
    for variant in arguments.variants:
        own = options_of(arguments, variant)
        run = arguments_of_run(arguments, Path(arguments.output), **own)
        runs[variant] = one_run.check_arguments(run), own
        arguments.lengths, arguments.eval_tokens = run.lengths, run.eval_tokens
    return runs


def options_of(arguments: Arguments, variant: str) -> dict[str, Any]:
    """Return the options of `extend` that a variant sets: the scheme, with a table or a scaling for the lengths.

    Raises:
        UsageError: if there is no such variant, or RoPE would be stretched to a length that the base was trained at.
    """
    end = max(variant.rfind("}"), variant.rfind("]")) + 1 if is_mixture(variant) else 0  # JSON may have a +
    name, *options = variant[end:].split("+")
    name = variant[:end] + name
    if strange := [word for word in options if word not in VARIANT_OPTIONS]:
        raise UsageError(
            f"--variants {variant}: +{strange[0]} is none of +{', +'.join(VARIANT_OPTIONS)}"
            f"{did_you_mean(strange[0], VARIANT_OPTIONS)}"
        )
    names = (UNPATCHED, *hf_posenc.available_schemes(), *STRETCHED_ROPE.values())
    if name not in names and not is_mixture(name):
        meant = did_you_mean(name, STRETCHED_ROPE | {name: name for name in names})
        raise UsageError(f"--variants {variant}: unknown {name!r}; choose from {', '.join(names)}{meant}")
    scheme, hyperparameters, length = name, [], arguments.train_length
    if name in STRETCHED_ROPE.values():
        scheme, scaling = name.split("-")
        trained = models.trained_length(arguments.model) or length
        if length <= trained:
            raise UsageError(
                f"--variants {variant} stretches RoPE to --train-length {length}, but the base was trained at {trained}"
            )
        hyperparameters = [f'scaling={{"rope_type": "{scaling}", "factor": {length / trained}}}']
    elif name != UNPATCHED and not is_mixture(name):
        if getattr(scheme_class(scheme), "num_positions", 0) is None:  # a table, whose length has no default
            hyperparameters = [f"num_positions={max(length, *(arguments.lengths or [2 * length]))}"]
    if "trainable" in options:
        if is_mixture(name):
            raise UsageError(f"--variants {variant}: write trainable into the JSON of a mixture, instead of +trainable")
        hyperparameters.append("trainable=true")
    distill = arguments.distill if "distill" in options else 0.0
    own = {"scheme": scheme, "scheme_args": hyperparameters, "distill": distill}
    return own | ({"calibrate": "none"} if "uncalibrated" in options else {})


# ------------------------------------------------------------------------------------------------------------- the runs


def make(arguments: Arguments, variants: Variants) -> None:
    """Make every run, `runs/VARIANT/seed-N`, that has no results yet.

    All variants are run with one seed before the next seed, so that a half-done comparison has all of them.

    Args:
        arguments: checked options of the recipe.
        variants: what `check_arguments` returns.

    Raises:
        UsageError: if the folder contains runs of another comparison. Nothing is run then.
    """
    folder, tokenizer = Path(arguments.output), load(AutoTokenizer, arguments.model)
    accelerator = training.accelerator_for(arguments, folder)
    text = read_text(arguments, tokenizer, accelerator, arguments.tokens_to_read)
    common = run_folder.identity(arguments, text, accelerator, arguments.model)
    runs: dict[Path, Results] = {}
    for seed in arguments.seeds:
        for name, (schemes, _) in variants.items():
            own = {"variant": name, "seed": seed, "scheme": models.schemes_to_json(schemes)}
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
        earlier = {key: earlier[key] for key in ("before", "measures_before", "writes_before") if key in earlier}
        shared = one_run.Shared(text, tokenizer, identity, earlier)
        one_run.run(arguments_of_run(arguments, target, seed=seed, **variants[name][1]), shared)
        accelerator.free_memory()  # a patched model and its patch hold each other
        if accelerator.is_main_process and not arguments.keep_weights:
            shutil.rmtree(target / "model")


def arguments_of_run(arguments: Arguments, target: Path, **own: Any) -> one_run.Arguments:
    """Return the arguments of a run: those of the comparison, with those of its own. An interrupted run goes on."""
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
        "measures": {
            name: score_by_length(row for results in runs for row in results["measures_after"][name])
            for name in runs[0]["measures_after"]
        },
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
    names = sorted({name for entry in variants.values() for name in entry["measures"]})
    rows = [("", "tokens", "tokens/s", "held-out loss at the end", *(f"{plain(name)}, by length" for name in names))]
    for label, entry in variants.items():
        scores = (", ".join(f"{at}: {each:.2f}" for at, each in entry["measures"][name].items()) for name in names)
        speed, loss = f"{entry['tokens_per_second']:,.0f}", shown((entry["curve"] or [None])[-1])
        rows.append((plain(label), f"{entry['tokens']:,}", speed, loss, *scores))
    return "\n\n".join([*parts, "## Cost, recovery and measures", table(rows)]) + "\n"


if __name__ == "__main__":
    program.start(main)
