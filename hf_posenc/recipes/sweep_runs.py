"""The runs of a sweep in one folder, `runs/VARIANT/seed-N`: finished runs are kept, missing runs are made.

Several programs may make the runs of one sweep, each with other seeds. When a program ends, it writes the summary of
all runs that are finished by then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from . import models, run_folder, training
from . import run_identity as identity
from .corpus import DataArguments, Text, read_text
from .models import Schemes
from .options import Folder, Options, UsageError, option
from .results import Results, read_json
from .training import TrainingArguments

Runs = dict[str, list[Results]]
Run = TypeVar("Run")
KEPT = "Finished runs are kept, and the newest state of the interrupted run: the same command goes on."


@dataclass
class SweepArguments(Options):
    """The folder of the sweep.

    Args:
        seeds: seeds to run every scheme or variant with.
        keep_weights: keep the checkpoint of every run, not only its results.
        output: folder of the sweep.
    """

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    keep_weights: bool = False
    output: Folder = "runs/sweep"


def add_run(runs: dict[str, Run], option_name: str, name: str, run: Run) -> None:
    """Add a run of a sweep under its name; UsageError if two values of the option have the same name."""
    if name in runs:
        raise UsageError(f"{option(option_name)} names {name} twice")
    runs[name] = run


def make(
    arguments: TrainingArguments,
    variants: Mapping[str, Schemes],
    tokenizer: PreTrainedTokenizerBase,
    make_run: Callable[[str, int, Path, Text, Results], None],
) -> None:
    """Make every run of a sweep that has no results yet.

    All variants are run with one seed before the next seed, so that a half-done sweep can compare them.

    Args:
        arguments: checked options of the recipe: a `SweepArguments` and `DataArguments`.
        variants: variant -> its schemes, none for a control.
        tokenizer: tokenizer for the text.
        make_run: function of variant, seed, folder, text and identity that makes a run and writes its results.json.

    Raises:
        UsageError: if the folder contains runs of another sweep. Nothing is run then.
    """
    assert isinstance(arguments, SweepArguments)
    assert isinstance(arguments, DataArguments)
    folder = Path(arguments.output)
    accelerator = training.accelerator_for(arguments, folder)
    text = read_text(arguments, tokenizer, accelerator, arguments.tokens_to_read, arguments.split_seed)
    launched = identity.launched(accelerator)
    runs = {
        folder_of_run(folder, name, seed): (
            *(name, seed),
            identity.of(arguments, text, variant=name, seed=seed, scheme=models.schemes_to_json(schemes), **launched),
        )
        for seed in arguments.seeds
        for name, schemes in variants.items()
    }
    with run_folder.locked(accelerator, folder):
        check(folder, {target: run_identity for target, (_, _, run_identity) in runs.items()})
        for target, (variant, seed, run_identity) in runs.items():
            if not (target / "results.json").is_file():
                print(f"\n=== {variant}, seed {seed} ===", flush=True)
                make_run(variant, seed, target, text, run_identity)


def check(folder: Path, identities: dict[Path, Results]) -> None:
    """Raise UsageError if a run in the folder of a sweep is of another sweep, or has another identity than it should.

    Args:
        folder: folder of the sweep.
        identities: folder of a run -> the identity that a run there must have.
    """
    shared = identity.common(next(iter(identities.values())))
    for target in sorted(folder.glob("runs/*/seed-*")):
        identity.require(target, identities.get(target, shared), "choose another --output, or remove that folder")


def folder_of_run(folder: Path, variant: str, seed: int) -> Path:
    """Return the folder of a run of a sweep."""
    return folder / "runs" / variant / f"seed-{seed}"


def read(folder: Path) -> Runs:
    """Read the results of all finished runs: variant -> results, in the order of their seeds."""
    runs: Runs = {}
    for path in sorted(folder.glob("runs/*/seed-*/results.json")):
        runs.setdefault(path.parents[1].name, []).append(read_json(path))
    return runs
