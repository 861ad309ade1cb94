"""The folder of a run: which files it contains, and how an interrupted run goes on from them.

`progress.json` holds the identity and the measurements of an unfinished run; `results.json` replaces it at the end.
An unfinished run also has the state of its calibration or the calibrated weights, and the states of its fine-tuning.
With `--train-base` there is also the base.
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

CALIBRATED_WEIGHTS = "calibrated.safetensors"
CALIBRATION_STATE = "calibration.state.safetensors"


@dataclass
class FolderArguments(Options):
    """The folder of the run.

    Args:
        output: folder to write; it must be empty, or not exist yet.
        overwrite: write into a folder that is not empty.
        resume: go on with an interrupted run of the same arguments.
    """

    output: Folder = "runs/extend_context"
    overwrite: bool = False
    resume: bool = False


def check(arguments: FolderArguments) -> None:
    """Raise UsageError if the folder contains files, or an interrupted run, that the options do not allow for."""
    output = Path(arguments.output)
    if arguments.overwrite and arguments.resume:
        raise UsageError("--resume continues the run in the folder, --overwrite begins a new one: choose one of them")
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
def locked(accelerator: Accelerator, folder: Path) -> Iterator[None]:
    """Lock a folder while the body runs, so that no other run writes there. It is made if it does not exist.

    The lock is a `flock` of the folder itself, which leaves no file and ends with the process.

    Raises:
        UsageError: if another run has locked the folder.
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


def earlier_progress(arguments: FolderArguments, run_identity: Results) -> Results | None:
    """Return what progress.json says about the run that `--resume` continues; None without `--resume`.

    Raises:
        UsageError: if the identity of that run is another.
    """
    if not arguments.resume:
        return None
    identity.require(Path(arguments.output), run_identity, "resume with those, or choose another --output")
    return dict(read_json(Path(arguments.output) / "progress.json"))


def begin(accelerator: Accelerator, folder: Path, results: Results) -> None:
    """Remove the states and results of another run in the folder, and write the progress."""
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
    """Write results.json, and remove progress.json and every state."""
    write_json(folder / "results.json", results)
    (folder / "progress.json").unlink()
    discard_states(folder)


def write_calibrated(accelerator: Accelerator, model: nn.Module, folder: Path, results: Results) -> None:
    """Write the weights of a calibrated model, which are not sharded, and then the progress.

    The state of the calibration is removed last, so that a kill at any time leaves enough to go on from.
    """
    if accelerator.is_main_process:
        with files.replaced(folder / CALIBRATED_WEIGHTS) as partial:
            save_file({name: weight.detach().contiguous() for name, weight in model.named_parameters()}, partial)
    write_progress(accelerator, folder, results)
    if accelerator.is_main_process:
        (folder / CALIBRATION_STATE).unlink(missing_ok=True)
    accelerator.wait_for_everyone()


def restore_calibrated(model: nn.Module, folder: Path) -> None:
    """Load the calibrated weights into the patched model, bit for bit."""
    calibrated = load_file(folder / CALIBRATED_WEIGHTS)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(calibrated[name])


def discard_states(folder: Path) -> None:
    """Remove the states of the calibration and of the fine-tuning."""
    (folder / CALIBRATED_WEIGHTS).unlink(missing_ok=True)
    (folder / CALIBRATION_STATE).unlink(missing_ok=True)
    training.discard_states(folder, but=None)


def resume_command(arguments: FolderArguments) -> str:
    """Describe the command that continues the run."""
    return "the same command with --resume" + (" instead of --overwrite" if arguments.overwrite else "")


def kept_message(arguments: FolderArguments) -> str:
    """Return a sentence for a stopped run: what its folder contains, and how to go on."""
    output = Path(arguments.output)
    if (output / "results.json").is_file():
        return f"The run has ended, and its results are kept in {output}."
    if not (output / "progress.json").is_file():
        return "Nothing was finished that could be kept: the same command begins again."
    if state := training.newest_state(output):
        return f"The fine-tuning is kept in {state}: {resume_command(arguments)} goes on from there."
    progress = read_json(output / "progress.json")
    if "calibration" in progress:
        return f"The calibrated model is kept in {output}: {resume_command(arguments)} goes on with the fine-tuning."
    if (output / CALIBRATION_STATE).is_file():
        return (
            f"The calibration is kept in {output / CALIBRATION_STATE}: {resume_command(arguments)} goes on from there."
        )
    if "before" in progress:
        return f"The measurements of the base are kept in {output}: {resume_command(arguments)} goes on from there."
    if (output / "base" / "config.json").is_file():
        return f"The trained base is kept in {output / 'base'}: {resume_command(arguments)} goes on by measuring it."
    return f"Nothing was finished that could be kept: {resume_command(arguments)} begins again."
