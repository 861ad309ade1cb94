"""Safe reading and writing of a checkpoint's folder.

A checkpoint is complete or absent. A save collects its files in a staging folder inside the target folder, renames the
complete staging folder to `PENDING`, and then moves the files into place. A kill before the rename leaves the old
checkpoint. A kill after it leaves the new one: readers take `PENDING` if there is one, and the next save moves it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

JsonObject = dict[str, Any]
"""A JSON object. Its readers check its values, because anybody may have written them."""

STAGING = ".hf_posenc-saving"
"""Prefix of staging folders. The next save removes those that a killed process has left."""

PENDING = ".hf_posenc-saved"
"""Folder with the files of a complete save that still have to be moved into place."""

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Names of weight files and of their index that we write."""

_VARIANTS = re.compile(r"model[\w.-]*\.safetensors(\.index[\w.-]*\.json)?")  # also model.fp16.safetensors


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Collect files in a staging folder, and then replace the files of a directory by them, all or none.

    Weight files of the old checkpoint that the new one lacks, such as more shards, are removed. Other files of the
    directory (a trainer's state, a tokenizer, logs) stay. Several processes and threads may save into one directory.
    It then holds the checkpoint of the last one to finish.

    Args:
        directory: folder of the checkpoint; made if it does not exist.

    Yields:
        An empty folder for the files, and for sub-folders. If the body raises, the directory stays as it is.

    Raises:
        OSError: if files cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    staging = _new_staging(directory)
    with ExitStack() as stack:
        with _lock(directory):
            for left in directory.glob(f"{STAGING}-*"):
                with _lock(left, wait=False) as is_abandoned:
                    if is_abandoned:
                        shutil.rmtree(left, ignore_errors=True)
            staging.mkdir()
            stack.enter_context(_lock(staging))
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        yield staging
        if not any(staging.iterdir()):  # another process writes; this one only helped to gather the tensors
            return
        for path in staging.rglob("*"):
            _flush(path)
        with _lock(directory):
            _move_pending(directory)
            os.rename(staging, directory / PENDING)
            _move_pending(directory)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Write one file completely or not at all.

    Args:
        path: path of the file; its folder is made if it does not exist.

    Yields:
        A temporary path in the same folder, to write to. If the body raises, the old file stays as it is.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """Make a folder completely or not at all.

    Args:
        directory: path of the new folder. It must not exist, or be empty. Its parent is made if need be.

    Yields:
        A path of the same name in a temporary folder, where the body makes the folder. If the body raises, nothing is
        left.

    Raises:
        OSError: if the folder cannot be written, or something else was put at `directory` meanwhile.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{STAGING}-", dir=directory.parent) as name:
        partial = Path(name) / directory.name
        yield partial
        os.rename(partial, directory)


def complete(directory: Path) -> None:
    """Complete an interrupted save, if there is one: move its files into place. Every save does this first."""
    if (directory / PENDING).exists():
        with _lock(directory):
            _move_pending(directory)


def _move_pending(directory: Path) -> None:
    """Move the files of a complete save into place. `PENDING` stays complete until all of them are there."""
    pending, copy = directory / PENDING, _new_staging(directory)
    if not pending.is_dir():
        return
    names = {path.name for path in pending.iterdir()}
    shutil.copytree(pending, copy, symlinks=True, copy_function=_link)
    # The config comes first. Once it is in place, stock classes refuse the folder.
    for path in sorted(copy.rglob("*"), key=lambda path: path.name != "config.json"):
        if not path.is_dir():
            target = directory / path.relative_to(copy)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    if any(WEIGHTS.fullmatch(name) for name in names):
        for path in directory.iterdir():
            if WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
    os.rename(pending, copy / PENDING)
    shutil.rmtree(copy)


def _link(source: str, target: str) -> None:
    """Make a second name for a file, or a copy on file systems without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _new_staging(directory: Path) -> Path:
    return directory / f"{STAGING}-{secrets.token_hex(8)}"  # not tempfile: other users could not read its folder


@contextmanager
def _lock(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Keep other writers from a folder for a `with` block, and yield whether they are kept from it.

    They are not on file systems without `flock`, and without `wait` not if another process or thread has the lock.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    is_held = False
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_held = True
        yield is_held
    finally:
        if is_held:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked process may still have the handle
        os.close(handle)


def _flush(path: Path) -> None:
    """Flush a file to the disk."""
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def current(directory: Path) -> Path:
    """Return the folder with the files of a checkpoint: the directory or, after an interrupted save, its `PENDING`."""
    pending = directory / PENDING
    return pending if (pending / "config.json").is_file() else directory


def json_object(path: Path) -> JsonObject:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: if the file holds no JSON object.
        OSError: if the file cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"hf_posenc: {path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"hf_posenc: {path} holds no JSON object")
    return value


def check_folder(folder: Path) -> None:
    """Raise CheckpointError if transformers would load something else than a folder's model and its safetensors."""
    if (folder / "adapter_config.json").exists() and (folder / "config.json").exists():
        raise CheckpointError(
            f"hf_posenc: {folder} holds a whole model and an adapter, which may name another base: load the model "
            "from a folder of its own, then the adapter with hf_posenc.load_adapter"
        )
    for path in folder.glob("model*.safetensors.index*.json"):
        names = json_object(path).get("weight_map")
        if not isinstance(names, dict) or not all(_VARIANTS.fullmatch(str(name)) for name in names.values()):
            raise CheckpointError(f"hf_posenc: {path} names a file that is no model*.safetensors beside it")
