"""The runs of a sweep in one folder, `runs/VARIANT/seed-N`: finished runs are kept, missing ones are made.

Several programs may work on one sweep with different seeds at the same time. Each writes, at its end, the summary of
all the runs that are there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

import hf_posenc

from . import identity, schemes
from .corpus import Text
from .options import Folder, Options
from .results import read_json

Runs = dict[str, list[dict[str, Any]]]
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


def identify(
    arguments: SweepArguments, text: Text, variants: Mapping[str, hf_posenc.Scheme | None], accelerator: Accelerator
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the identity of each run of a sweep by variant and seed, in the order to make them: seed by seed.

    Args:
        arguments: of the recipe, checked.
        text: that all runs read.
        variants: the scheme of each variant, None for a control.
        accelerator: of the processes that make the runs.
    """
    launched = identity.launched(accelerator)
    return {
        (name, seed): identity.of(arguments, text, variant=name, seed=seed, scheme=schemes.to_json(scheme), **launched)
        for seed in arguments.seeds
        for name, scheme in variants.items()
    }


def complete(
    folder: Path, identities: dict[tuple[str, int], dict[str, Any]], one: Callable[[str, int, Path], None]
) -> None:
    """Make every run that has no results yet, seed by seed, so that a half-done sweep compares all variants.

    Args:
        folder: of the sweep.
        identities: from `identify`.
        one: makes a run from variant, seed and folder, and leaves results.json there.

    Raises:
        UsageError: if the folder holds runs of another sweep; nothing is run then.
    """
    check(folder, identities)
    for variant, seed in identities:
        target = place(folder, variant, seed)
        if not (target / "results.json").is_file():
            print(f"\n=== {variant}, seed {seed} ===", flush=True)
            one(variant, seed, target)


def check(folder: Path, identities: dict[tuple[str, int], dict[str, Any]]) -> None:
    """Raise UsageError unless the runs in the folder have these identities, and all others are of the same sweep."""
    shared = identity.common(next(iter(identities.values())))
    asked = {place(folder, variant, seed): wanted for (variant, seed), wanted in identities.items()}
    for target in sorted(folder.glob("runs/*/seed-*")):
        identity.hold(target, asked.get(target, shared), "choose another --output, or remove that folder")


def place(folder: Path, variant: str, seed: int) -> Path:
    """Return the folder of a run."""
    return folder / "runs" / variant / f"seed-{seed}"


def read(folder: Path) -> Runs:
    """Return the results by variant, with the seeds in order."""
    runs: Runs = {}
    for path in sorted(folder.glob("runs/*/seed-*/results.json")):
        runs.setdefault(path.parents[1].name, []).append(read_json(path))
    return runs
