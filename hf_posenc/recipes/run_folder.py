"""The folder of a run: empty when it begins, tidy when it ends, and in between enough to go on from.

`progress.json` holds the identity and the measurements of an unfinished run; `results.json` replaces it at the end.
Beside them are the state of the calibration or the calibrated weights, the states of the fine-tuning and, with
`--train-base`, the base.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from ..checkpoints import files
from . import run_identity as identity
from . import training
from .options import Folder, Options, UsageError
from .results import Results, read_json, write_json

CALIBRATED = "calibrated.safetensors"
CALIBRATING = "calibration.state.safetensors"


@dataclass
class FolderArguments(Options):
    """The folder of the run.

    Args:
        output: folder to write; must be empty or absent.
        overwrite: write into a folder that is not empty.
        resume: go on with an interrupted run of the same arguments.
    """

    output: Folder = "runs/extend_context"
    overwrite: bool = False
    resume: bool = False


def check(arguments: FolderArguments) -> None:
    """Raise UsageError unless the folder can be written as asked."""
    output = Path(arguments.output)
    if arguments.overwrite and arguments.resume:
        raise UsageError("--resume goes on with what is there, --overwrite begins anew: choose one")
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output} is a file")
    unfinished = (output / "progress.json").is_file()
    if arguments.resume and (output / "results.json").is_file():
        raise UsageError(f"--resume: the run in {output} has ended, its results are in {output / 'results.json'}")
    if arguments.resume and not unfinished:
        raise UsageError(f"--resume: there is no interrupted run in {output}; without --resume one begins")
    if output.is_dir() and any(output.iterdir()) and not (arguments.overwrite or arguments.resume):
        instead = "--resume" if unfinished else "--overwrite"
        raise UsageError(f"--output {output} is not empty: choose another folder, or {instead}")


@contextmanager
def alone(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Keep every other run out of a folder while the body runs; the folder is made if it does not exist.

    The lock is a `flock` of the folder itself, which leaves no file and ends with the process.

    Raises:
        UsageError: if another process holds the folder.
    """
    if not accelerator.is_main_process:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--output {folder}: another run is writing there; choose another folder") from None
        yield
    finally:
        os.close(handle)


def earlier(arguments: FolderArguments, of: Results) -> Results | None:
    """Return the progress of an interrupted run of the same identity, if `--resume` asks for it."""
    if not arguments.resume:
        return None
    identity.hold(Path(arguments.output), of, "resume with those, or choose another --output")
    return dict(read_json(Path(arguments.output) / "progress.json"))


def begin(accelerator: Accelerator, folder: Path, results: Results) -> None:
    """Remove what another run left and this one would go on from, and write the progress."""
    if accelerator.is_main_process:
        (folder / "results.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "base", ignore_errors=True)
        discard_states(folder)
    write_progress(accelerator, folder, results)


def write_progress(accelerator: Accelerator, folder: Path, results: Results) -> None:
    """Write the identity of an unfinished run and its results so far."""
    if accelerator.is_main_process:
        write_json(folder / "progress.json", results)
    accelerator.wait_for_everyone()


def finish(folder: Path, results: Results) -> None:
    """Write the results in place of the progress, and remove every state."""
    write_json(folder / "results.json", results)
    (folder / "progress.json").unlink()
    discard_states(folder)


def keep_calibrated(accelerator: Accelerator, model: nn.Module, folder: Path, results: Results) -> None:
    """Write the weights of a calibrated model, which is whole on every process, and then the progress.

    The state of the calibration is removed last, so that a kill at any time leaves enough to go on from.
    """
    if accelerator.is_main_process:
        with files.replaced(folder / CALIBRATED) as partial:
            save_file({name: weight.detach().contiguous() for name, weight in model.named_parameters()}, partial)
    write_progress(accelerator, folder, results)
    if accelerator.is_main_process:
        (folder / CALIBRATING).unlink(missing_ok=True)
    accelerator.wait_for_everyone()


def restore_calibrated(model: nn.Module, folder: Path) -> None:
    """Read the calibrated weights into the same model, bit for bit."""
    kept = load_file(folder / CALIBRATED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(kept[name])


def discard_states(folder: Path) -> None:
    """Remove the states of the calibration and of the fine-tuning."""
    (folder / CALIBRATED).unlink(missing_ok=True)
    (folder / CALIBRATING).unlink(missing_ok=True)
    training.discard_states(folder, but=None)


def again(arguments: FolderArguments) -> str:
    """Return the command that goes on, in words."""
    return "the same command with --resume" + (" instead of --overwrite" if arguments.overwrite else "")


def kept(arguments: FolderArguments) -> str:
    """Return a sentence about what the folder of a stopped run holds, and how to go on."""
    output = Path(arguments.output)
    if (output / "results.json").is_file():
        return f"The run has ended, and its results are kept in {output}."
    if not (output / "progress.json").is_file():
        return "Nothing was finished that could be kept: the same command begins again."
    if state := training.newest_state(output):
        return f"The fine-tuning is kept in {state}: {again(arguments)} goes on from there."
    known = read_json(output / "progress.json")
    if "calibration" in known:
        return f"The calibrated model is kept in {output}: {again(arguments)} goes on with the fine-tuning."
    if (output / CALIBRATING).is_file():
        return f"The calibration is kept in {output / CALIBRATING}: {again(arguments)} goes on from there."
    if "before" in known:
        return f"The measurements of the base are kept in {output}: {again(arguments)} goes on from there."
    if (output / "base" / "config.json").is_file():
        return f"The trained base is kept in {output / 'base'}: {again(arguments)} goes on by measuring it."
    return f"Nothing was finished that could be kept: {again(arguments)} begins again."
