"""The folder of a run: what identifies the run, which files it has, and how an interrupted run goes on from them.

`progress.json` holds the identity and the measurements of an unfinished run; `results.json` replaces it at the end.
An unfinished run also has the state of its calibration or the calibrated weights, and the states of its fine-tuning.

The identity consists of every argument that changes the results, and of digests of text and base. A run is continued,
and a sweep shown again, only if it is the same: a number must never stand under arguments that it was not made with.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from ..checkpoints import files
from ..core.command_arguments import option
from . import training
from .corpus import Text
from .options import UsageError
from .results import Results, read_json, write_json

CALIBRATED_WEIGHTS = "calibrated.safetensors"
CALIBRATION_STATE = "calibration.state.pt"
# Options that change no result: where it is written, what happens to the weights, what is saved and shown meanwhile.
# Of some the identity has a digest or the run's own value instead. All other options, new ones too, are part of it.
NOT_PART = (
    *("output", "resume", "keep_weights", "save_every", "tracker"),
    *("data", "model", "variants", "seeds", "scheme_args"),
)
CHECKPOINT_FILES = ("config.json", "*.safetensors", "*.bin", "*.index.json")

# ------------------------------------------------------------------------------------------------------------- identity


def identity(arguments: Any, text: Text, accelerator: Accelerator, base: str, **more: object) -> Results:
    """Return the identity of a run, ready for JSON.

    Args:
        arguments: checked options of the recipe.
        text: text that the run reads.
        accelerator: accelerator of the processes, whose number and precision change results.
        base: folder or Hub id of the base.
        **more: other entries: `scheme` with all its hyper-parameters, and in a sweep `variant` and `seed`.
    """
    entries = {name: value for name, value in asdict(arguments).items() if name not in NOT_PART} | more
    entries |= {"mixed_precision": accelerator.mixed_precision, "processes": accelerator.num_processes}
    entries |= {"text": text.digest(), "base": digest_of(base)}
    return dict(json.loads(json.dumps(entries)))


def digest_of(model: str) -> str:
    """Return the SHA-256 of a local checkpoint's config and weights, or the commit of a checkpoint on the Hub."""
    if not Path(model).is_dir():
        return str(getattr(AutoConfig.from_pretrained(model), "_commit_hash", None) or model)
    digest = hashlib.sha256()
    for path in sorted({path for pattern in CHECKPOINT_FILES for path in Path(model).glob(pattern)}):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def require_same(folder: Path, wanted: Results, advice: str) -> None:
    """Raise UsageError, with the differences and advice, if the run in a folder lacks an entry of this identity."""
    file = next((folder / name for name in ("results.json", "progress.json") if (folder / name).is_file()), None)
    if file is None:
        return
    words, found = [], read_json(file)["identity"]
    for name in sorted(wanted):
        before, after = found.get(name), wanted[name]
        if name in ("text", "base") and before != after:
            words.append(f"another {name}")
        elif before != after:
            words.append(f"{option(name)} was {before}, is {after}")
    if words:
        raise UsageError(f"the run in {folder} had other arguments: {', '.join(words)}: {advice}")


# ---------------------------------------------------------------------------------------------------------------- files


def check(output: Path, resume: bool) -> None:
    """Raise UsageError if the folder contains files, or an interrupted run, that the options do not allow for."""
    unfinished, results = (output / "progress.json").is_file(), output / "results.json"
    if resume and not unfinished:
        ended = f": it has ended, its results are in {results}" if results.is_file() else ""
        raise UsageError(f"--resume: there is no interrupted run in {output}{ended}")
    if not resume and output.exists() and (output.is_file() or any(output.iterdir())):
        instead = "--resume" if unfinished else "remove it"
        raise UsageError(f"--output {output} is not empty: choose another folder, or {instead}")


def write_progress(accelerator: Accelerator, folder: Path, results: Results) -> None:
    """Write the identity of an unfinished run and its results so far."""
    if accelerator.is_main_process:
        write_json(folder / "progress.json", results)
    accelerator.wait_for_everyone()


def finish(folder: Path, results: Results) -> None:
    """Write results.json, and remove progress.json and every state."""
    write_json(folder / "results.json", results)
    for name in ("progress.json", CALIBRATED_WEIGHTS, CALIBRATION_STATE):
        (folder / name).unlink(missing_ok=True)
    training.discard_states(folder)


def write_calibrated(accelerator: Accelerator, model: nn.Module, folder: Path, results: Results) -> None:
    """Write the weights of a calibrated model, which are not sharded, and then the progress."""
    if accelerator.is_main_process:
        with files.replaced(folder / CALIBRATED_WEIGHTS) as partial:
            save_file({name: weight.detach().contiguous() for name, weight in model.named_parameters()}, partial)
    write_progress(accelerator, folder, results)


def restore_calibrated(model: nn.Module, folder: Path) -> None:
    """Load the calibrated weights into the patched model, bit for bit."""
    calibrated = load_file(folder / CALIBRATED_WEIGHTS)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(calibrated[name])
