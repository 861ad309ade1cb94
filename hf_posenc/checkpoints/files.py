"""Safe reading and writing of a checkpoint's folder. Every access to the folder goes through this file.

A folder may come from anybody, and other processes may read or write it at the same time. Three rules hold everywhere:

- A checkpoint is complete or absent. A save collects its files in a staging folder inside the target folder. It renames
  the complete staging folder to `PENDING`, and then moves the files into place. A kill before the rename leaves the old
  checkpoint. A kill after it leaves the new checkpoint, with some files still in `PENDING`.
- Only a writer that holds the lock moves or removes files. Readers change nothing. They also read files in `PENDING`.
- A name that was read from a file is used as a path only if this package writes files of that name.

If a file system has no locks, readers still notice that files were exchanged meanwhile, and read again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError
from .folder_lock import lock, read_lock, release, write_lock
from .headers import VARIANTS, WEIGHTS, read_json

Result = TypeVar("Result")

STAGING = ".hf_posenc-saving"
"""Prefix of staging folders. The next save removes those that a killed process has left."""

PENDING = ".hf_posenc-saved"
"""Folder with the files of a complete save that still have to be moved into place."""

ATTEMPTS = 5
"""How often a folder is read, at most, if somebody exchanges its files without a lock."""

_STALE_LIST = "remove.json"  # in `PENDING`: the names of weight files that the save removes
_INTERNAL = ".hf_posenc-"  # prefix of our lock, staging folders and `PENDING`


# -------------------------------------------------------------------------------------------------------------- writing


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
        CheckpointError: if the directory has a `PENDING` folder that no version of this package wrote.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _own_folder(directory) as staging:
        yield staging
        names = {path.name for path in staging.iterdir()}
        if not names:  # another process writes; this one only helped to gather the tensors
            return
        for path in staging.rglob("*"):
            _flush(path)
        with write_lock(directory):
            complete(directory, locked=True)
            stale = []
            if any(WEIGHTS.fullmatch(name) for name in names):
                stale = [p.name for p in directory.iterdir() if WEIGHTS.fullmatch(p.name) and p.name not in names]
            listed = staging / _STALE_LIST
            listed.write_text(json.dumps(sorted(stale)))
            _flush(listed)
            os.rename(staging, directory / PENDING)
            complete(directory, locked=True)
            _remove_abandoned(directory)


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
    _flush(directory.parent)


def complete(directory: Path, *, locked: bool = False) -> bool:
    """Complete an interrupted save: move its files into place. Every save does this first; readers need not.

    Args:
        directory: folder of a checkpoint.
        locked: whether the caller holds the write lock.

    Returns:
        Whether there was an interrupted save.

    Raises:
        OSError: if there was an interrupted save and the directory cannot be written.
        CheckpointError: if `PENDING` holds files that no save of this package left.
    """
    pending = directory / PENDING
    if not os.path.lexists(pending):
        return False
    if not locked:
        with write_lock(directory):
            return complete(directory, locked=True)
    files, stale = _read_pending(pending)
    for path in files:
        target = directory / path.relative_to(pending)
        _make_parents(target, directory)
        temporary = directory / f"{STAGING}-{path.name}"
        with suppress(FileNotFoundError):
            os.remove(temporary)
        try:
            os.link(path, temporary)
        except OSError:  # a file system without hard links
            shutil.copy2(path, temporary)
        os.replace(temporary, target)
    for name in stale:
        with suppress(FileNotFoundError):
            os.remove(directory / name)
    _flush(directory)
    # `_STALE_LIST` is removed last. While it is there, another call can complete the rest.
    for path in files:
        os.remove(path)
    for path in sorted((path for path in pending.rglob("*") if path.is_dir()), reverse=True):
        path.rmdir()
    with suppress(FileNotFoundError):
        os.remove(pending / _STALE_LIST)
    pending.rmdir()
    return True


def _read_pending(pending: Path) -> tuple[list[Path], list[str]]:
    """Return the files in a `PENDING` folder, and the names of stale weight files to remove.

    The config comes first. Once it is in place, stock classes refuse the folder.
    """
    problem = None
    entries: list[Path] = []
    stale: Any = []
    if pending.is_symlink() or not pending.is_dir():
        problem = "is no folder"
    else:
        entries = sorted(pending.rglob("*"), key=lambda path: (path.name != "config.json", path))
        listed = pending / _STALE_LIST
        strange = [path for path in entries if path.is_symlink() or not (path.is_file() or path.is_dir())]
        if strange:
            problem = f"holds {strange[0].name!r}, which is no plain file"
        elif listed.is_file():
            stale = read_json(listed)
            if not isinstance(stale, list) or not all(isinstance(n, str) and WEIGHTS.fullmatch(n) for n in stale):
                problem = f"has a {_STALE_LIST} that lists other names than those of weight files"
    if problem is not None:
        raise CheckpointError(
            f"hf_posenc: {pending} {problem}, so no save of this package left it. Nothing was read, moved or removed. "
            f"If you trust the files beside it, remove {PENDING}"
        )
    return [path for path in entries if path.is_file() and path != pending / _STALE_LIST], stale


def _make_parents(target: Path, directory: Path) -> None:
    """Make the folders between a directory and a file below it. Raise CheckpointError if one is a symbolic link."""
    for relative in reversed(target.relative_to(directory).parents[:-1]):
        folder = directory / relative
        if folder.is_symlink():
            raise CheckpointError(f"hf_posenc: {folder} is a symbolic link: nothing is written through it; remove it")
        folder.mkdir(exist_ok=True)


@contextmanager
def _own_folder(directory: Path) -> Iterator[Path]:
    """Make a staging folder that nobody else removes while this process lives."""
    while True:
        staging = directory / f"{STAGING}-{secrets.token_hex(8)}"  # not tempfile: other users could not read its folder
        staging.mkdir()
        handle = lock(staging, shared=False)
        if staging.is_dir():  # another save may remove it as abandoned before it is locked
            break
        release(handle)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        release(handle)


def _remove_abandoned(directory: Path) -> None:
    """Remove the staging folders that nobody has locked, because the processes that made them were killed."""
    for path in directory.glob(f"{STAGING}-*"):
        if path.is_symlink() or not path.is_dir():
            with suppress(FileNotFoundError):
                path.unlink()
        elif (handle := lock(path, shared=False, wait=0.0)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            release(handle)


def _flush(path: Path) -> None:
    """Flush a file or the entries of a directory to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------------------------------------- reading


def read(directory: Path, load: Callable[[Path], Result]) -> Result:
    """Read a checkpoint's folder while nobody exchanges its files. The folder stays unchanged.

    Args:
        directory: folder of a checkpoint.
        load: function that loads from a folder. It gets the directory itself or, after an interrupted save, a
            temporary folder of links to the files. `load` is called again if files were exchanged meanwhile.

    Returns:
        The value of `load`.

    Raises:
        CheckpointError: if files were exchanged at each of `ATTEMPTS` attempts, or the directory has a `PENDING`
            folder that no version of this package wrote.
        Exception: any exception of `load`.
    """
    for _ in range(ATTEMPTS):
        with read_lock(directory):
            before = _signature(directory)
            try:
                with _view(directory) as folder:
                    result = load(folder)
            except Exception:  # libraries can fail in any way on exchanged files
                if _signature(directory) == before:
                    raise
            else:
                if _signature(directory) == before:
                    return result
    raise CheckpointError(f"hf_posenc: files of {directory} were exchanged while they were read, {ATTEMPTS} times")


@contextmanager
def _view(directory: Path) -> Iterator[Path]:
    """Yield the directory, or after an interrupted save a folder of links to the files of the completed checkpoint."""
    pending = directory / PENDING
    if not os.path.lexists(pending):
        yield directory
        return
    files, stale = _read_pending(pending)
    with tempfile.TemporaryDirectory(prefix="hf_posenc-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path in directory.iterdir():
            if path.name not in stale and not path.name.startswith(_INTERNAL) and not (pending / path.name).exists():
                _link(path, folder / path.name)
        for path in files:
            target = folder / path.relative_to(pending)
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(path, target)
        yield folder


def _link(path: Path, target: Path) -> None:
    try:
        os.symlink(path.absolute(), target, target_is_directory=path.is_dir())
    except OSError:  # Windows, without the right to make links
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, target)


def _signature(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and modification time of each config and weight file. They differ for an exchanged file."""
    signature = {}
    for folder in (directory, directory / PENDING):
        with suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name.endswith(("config.json", ".index.json")) or VARIANTS.fullmatch(entry.name):
                    status = entry.stat()
                    signature[f"{folder.name}/{entry.name}"] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return signature
