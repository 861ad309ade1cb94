"""The runs of a sweep in one folder, `runs/VARIANT/seed-N`: finished runs are kept, missing ones are made.

Several programs may work on one sweep with different seeds at the same time. Each writes, at its end, the summary of
all the runs that are there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

import hf_posenc

from . import models, run_folder, training
from . import run_identity as identity
from .corpus import DataArguments, Text, read_text
from .options import Folder, Options
from .results import Results, read_json
from .training import TrainingArguments

Runs = dict[str, list[Results]]
KEPT = "Finished runs are kept, and of the one that was interrupted its newest state: the same command goes on."


@dataclass
class SweepArguments(Options):
    """The folder of the sweep.

    Args:
        seeds: of the runs of each scheme or variant.
        keep_weights: keep every run's checkpoint, not only its JSON.
        output: folder of the sweep.
    """

    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    keep_weights: bool = False
    output: Folder = "runs/sweep"


def make(
    arguments: TrainingArguments,
    variants: Mapping[str, hf_posenc.Scheme | None],
    tokenizer: PreTrainedTokenizerBase,
    one: Callable[[str, int, Path, Text, Results], None],
) -> None:
    """Make every run of a sweep that has no results yet, seed by seed, so that a half-done sweep compares all variants.

    Args:
        arguments: of the recipe, checked; a sweep's, and those of its text.
        variants: the scheme of each variant, None for a control.
        tokenizer: of the text.
        one: makes a run from variant, seed, folder, text and identity, and leaves results.json there.

    Raises:
        UsageError: if the folder holds runs of another sweep; nothing is run then.
    """
    assert isinstance(arguments, SweepArguments)
    assert isinstance(arguments, DataArguments)
    folder = Path(arguments.output)
    accelerator = training.accelerator_for(arguments, folder)
    text = read_text(arguments, tokenizer, accelerator, arguments.tokens_to_read, arguments.split_seed)
    launched = identity.launched(accelerator)
    runs = {
        place(folder, name, seed): (
            *(name, seed),
            identity.of(arguments, text, variant=name, seed=seed, scheme=models.scheme_to_json(scheme), **launched),
        )
        for seed in arguments.seeds
        for name, scheme in variants.items()
    }
    with run_folder.alone(accelerator, folder):
        check(folder, {target: of for target, (_, _, of) in runs.items()})
        for target, (variant, seed, of) in runs.items():
            if not (target / "results.json").is_file():
                print(f"\n=== {variant}, seed {seed} ===", flush=True)
                one(variant, seed, target, text, of)


def check(folder: Path, identities: dict[Path, Results]) -> None:
    """Raise UsageError unless the runs in these folders have these identities, and all others are of the same sweep."""
    shared = identity.common(next(iter(identities.values())))
    for target in sorted(folder.glob("runs/*/seed-*")):
        identity.hold(target, identities.get(target, shared), "choose another --output, or remove that folder")


def place(folder: Path, variant: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / "runs" / variant / f"seed-{seed}"


def read(folder: Path) -> Runs:
    """Return the results by variant, with the seeds in order."""
    runs: Runs = {}
    for path in sorted(folder.glob("runs/*/seed-*/results.json")):
        runs.setdefault(path.parents[1].name, []).append(read_json(path))
    return runs
