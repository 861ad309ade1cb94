"""Safe reading and writing of a checkpoint's folder. Every access to it goes through this file.

A folder may come from anybody, and others may read or write it at the same time. Three rules hold everywhere:

- A checkpoint is complete or absent. A save collects its files in a folder of its own inside the target. It renames
  that folder to `PENDING` once it is complete, and then moves its files into place. A kill before the rename leaves the
  old checkpoint. A kill after it leaves the new one, of which some files still lie in `PENDING`.
- Only a writer that holds the lock moves or removes anything. Readers change nothing. After such a kill they read the
  files where they lie.
- A name that is read from a file is never used as a path unless it is one that a save of ours writes.

Where nothing can be locked, readers still notice that files were exchanged while they were reading, and read again.
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
"""Prefix of folders that are being written. The next save removes those that a kill has left."""

PENDING = ".hf_posenc-saved"
"""Folder whose files are complete and replace those beside it."""

ATTEMPTS = 5
"""How often a folder is read anew because somebody exchanged its files without a lock."""

_LIST = "remove.json"
_OWN = ".hf_posenc-"


# -------------------------------------------------------------------------------------------------------------- writing


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Collect files that then replace those of a directory, all or none.

    Weights that the new files do not replace (shards of another number, the one file that became shards) are removed.
    Other files of the directory (a trainer's state, a tokenizer, logs) stay. Several processes and threads may save
    into one directory: it then holds all files of the last one to finish.

    Args:
        directory: where the files belong; made if it does not exist.

    Yields:
        An empty folder to write into, sub-folders included. If the body raises, the directory stays as it is.

    Raises:
        OSError: if files cannot be written.
        CheckpointError: if an interrupted save lies in the directory that no version of this package wrote.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _own_folder(directory) as staging:
        yield staging
        names = {path.name for path in staging.iterdir()}
        if not names:  # a process that only takes part in gathering
            return
        for path in staging.rglob("*"):
            _flush(path)
        with write_lock(directory):
            complete(directory, locked=True)
            stale = []
            if any(WEIGHTS.fullmatch(name) for name in names):
                stale = [p.name for p in directory.iterdir() if WEIGHTS.fullmatch(p.name) and p.name not in names]
            listed = staging / _LIST
            listed.write_text(json.dumps(sorted(stale)))
            _flush(listed)
            os.rename(staging, directory / PENDING)
            complete(directory, locked=True)
            _remove_abandoned(directory)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Write one file, whole or not at all.

    Args:
        path: of the file; its folder is made if it does not exist.

    Yields:
        The path to write to, in the same folder. If the body raises, an older file stays as it is.

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
    """Make a folder, whole or not at all.

    Args:
        directory: must not exist yet, or be empty. The folder that it lies in is made if it does not exist.

    Yields:
        A path of the same name in a temporary folder beside it. The body makes the folder there. If the body raises,
        nothing is left.

    Raises:
        OSError: if it cannot be written, or there is something at `directory` by then.
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
        directory: of a checkpoint.
        locked: whether the caller is the one writer.

    Returns:
        Whether there was an interrupted save.

    Raises:
        OSError: if there was one and the directory cannot be written.
        CheckpointError: if no save of this package left the files that lie there.
    """
    pending = directory / PENDING
    if not os.path.lexists(pending):
        return False
    if not locked:
        with write_lock(directory):
            return complete(directory, locked=True)
    files, stale = _interrupted(pending)
    for path in files:
        target = directory / path.relative_to(pending)
        _make_parents(target, directory)
        moved = directory / f"{STAGING}-{path.name}"
        with suppress(FileNotFoundError):
            os.remove(moved)
        try:
            os.link(path, moved)
        except OSError:  # a file system without hard links
            shutil.copy2(path, moved)
        os.replace(moved, target)
    for name in stale:
        with suppress(FileNotFoundError):
            os.remove(directory / name)
    _flush(directory)
    # The list goes last: while it is there, what is left of the folder can be moved again.
    for path in files:
        os.remove(path)
    for path in sorted((path for path in pending.rglob("*") if path.is_dir()), reverse=True):
        path.rmdir()
    with suppress(FileNotFoundError):
        os.remove(pending / _LIST)
    pending.rmdir()
    return True


def _interrupted(pending: Path) -> tuple[list[Path], list[str]]:
    """Return the files that wait in a `PENDING` folder, and the names of weights to remove.

    The config is the first, because it decides who may read the rest: once it is moved, a stock class refuses the
    folder.
    """
    problem = None
    entries: list[Path] = []
    stale: Any = []
    if pending.is_symlink() or not pending.is_dir():
        problem = "is no folder"
    else:
        entries = sorted(pending.rglob("*"), key=lambda path: (path.name != "config.json", path))
        listed = pending / _LIST
        strange = [path for path in entries if path.is_symlink() or not (path.is_file() or path.is_dir())]
        if strange:
            problem = f"holds {strange[0].name!r}, which is no plain file"
        elif listed.is_file():
            stale = read_json(listed)
            if not isinstance(stale, list) or not all(isinstance(n, str) and WEIGHTS.fullmatch(n) for n in stale):
                problem = f"has a {_LIST} that names something else than weights beside it"
    if problem is not None:
        raise CheckpointError(
            f"hf_posenc: {pending} {problem}, so no save of this package left it. If you trust the files beside it, "
            f"remove {PENDING}; nothing was read, moved or removed"
        )
    return [path for path in entries if path.is_file() and path != pending / _LIST], stale


def _make_parents(target: Path, directory: Path) -> None:
    """Make the sub-folders of a file's path below a directory, through no symbolic link."""
    for folder in reversed(target.relative_to(directory).parents[:-1]):
        here = directory / folder
        if here.is_symlink():
            raise CheckpointError(f"hf_posenc: {here} is a symbolic link: nothing is written through it; remove it")
        here.mkdir(exist_ok=True)


@contextmanager
def _own_folder(directory: Path) -> Iterator[Path]:
    """Make a staging folder that nobody else removes while this process lives."""
    while True:
        staging = directory / f"{STAGING}-{secrets.token_hex(8)}"  # not of tempfile, which keeps other users out
        staging.mkdir()
        handle = lock(staging, shared=False)
        if staging.is_dir():  # nobody took it for abandoned before it was locked
            break
        release(handle)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        release(handle)


def _remove_abandoned(directory: Path) -> None:
    """Remove the staging folders of killed saves, which nobody holds the lock of."""
    for left in directory.glob(f"{STAGING}-*"):
        if left.is_symlink() or not left.is_dir():
            with suppress(FileNotFoundError):
                left.unlink()
        elif (handle := lock(left, shared=False, wait=0.0)) is not None:
            shutil.rmtree(left, ignore_errors=True)
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
    """Read a checkpoint's folder while nobody exchanges its files. Nothing in it is changed.

    Args:
        directory: of a checkpoint.
        load: takes the folder to read from. That is the directory itself, or, if a save was killed before it had moved
            its files, a temporary folder of links to them. It is called again if files were exchanged meanwhile.

    Returns:
        The value of `load`.

    Raises:
        CheckpointError: if files were exchanged at each of several attempts, or an interrupted save lies there that no
            version of this package wrote.
        Exception: any that `load` raises.
    """
    for _ in range(ATTEMPTS):
        with read_lock(directory):
            before = _signature(directory)
            try:
                with _view(directory) as folder:
                    result = load(folder)
            except Exception:  # files that were exchanged can fail in any way, in any library that reads them
                if _signature(directory) == before:
                    raise
            else:
                if _signature(directory) == before:
                    return result
    raise CheckpointError(f"hf_posenc: files of {directory} were exchanged while they were read, {ATTEMPTS} times")


@contextmanager
def _view(directory: Path) -> Iterator[Path]:
    """Yield the directory, or a folder of links to the files that completing an interrupted save would leave."""
    pending = directory / PENDING
    if not os.path.lexists(pending):
        yield directory
        return
    files, stale = _interrupted(pending)
    with tempfile.TemporaryDirectory(prefix="hf_posenc-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for path in directory.iterdir():
            if path.name not in stale and not path.name.startswith(_OWN) and not (pending / path.name).exists():
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
    """Return inode, size and time of each config and weight file, which differ once the file was exchanged."""
    signature = {}
    for folder in (directory, directory / PENDING):
        with suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name.endswith(("config.json", ".index.json")) or VARIANTS.fullmatch(entry.name):
                    status = entry.stat()
                    signature[f"{folder.name}/{entry.name}"] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return signature
