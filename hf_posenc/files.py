"""Who may read, move and remove what in the folder of a checkpoint.

A folder may come from anybody, and others may read or write it at the same time. Three rules hold everywhere:

- What is written is complete or absent. A save collects its files in a folder of its own inside the target, renames
  that folder to `PENDING` once it is complete, and then moves its files into place. A kill before the rename leaves the
  old checkpoint; a kill after it leaves the new one, of which some files still lie in `PENDING`.
- Only a writer that holds the lock moves or removes anything. Readers change nothing: after such a kill they read the
  files where they lie.
- A name that is read from a file is never used as a path unless it is one that a save of ours writes.

Locks are `flock`s, which end with their process. Where the file system or the operating system has none, readers still
notice that files were exchanged while they were reading, and read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from .errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

STAGING = ".hf_posenc-saving"
"""Prefix of folders that are being written. What a kill leaves of one is removed by the next save."""

PENDING = ".hf_posenc-saved"
"""Folder whose files are complete and replace those beside it."""

LOCK = ".hf_posenc-lock"
"""File that writers lock alone and readers lock together. It is empty and stays."""

ATTEMPTS = 5
"""How often a folder is read anew because somebody exchanged its files without a lock."""

_LIST = "remove.json"
_OWN = ".hf_posenc-"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_ANY_WEIGHTS = re.compile(r"model[\w.-]*\.safetensors(\.index[\w.-]*\.json)?")
_LARGEST_HEADER = 100_000_000  # as in the safetensors library
_TURN = 5.0  # seconds that a reader lets a waiting writer go first
_PATIENCE = 60.0  # seconds that a writer waits before it says for whom


# -------------------------------------------------------------------------------------------------------------- writing


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Collect files that then replace those of a directory, all or none.

    Weights that the new files do not replace (shards of another number, the one file that became shards) are removed.
    Other files of the directory (a trainer's state, a tokenizer, logs) stay. Several processes and threads may save
    into one directory; the last one to finish wins, whole.

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
        with _alone(directory):
            complete(directory, locked=True)
            stale = []
            if any(_WEIGHTS.fullmatch(name) for name in names):
                stale = [p.name for p in directory.iterdir() if _WEIGHTS.fullmatch(p.name) and p.name not in names]
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
        directory: that does not exist yet, or is empty; the folder that it lies in is made if it does not exist.

    Yields:
        A path of the same name, in a folder of its own beside it, to make the folder at. If the body raises, nothing
        of it is left.

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
    """Move on what an interrupted save left complete but unmoved. Every save does this first; readers need not.

    Args:
        directory: of a checkpoint.
        locked: whether the caller is the one writer.

    Returns:
        Whether there was anything.

    Raises:
        OSError: if there was and the directory cannot be written.
        CheckpointError: if what lies there is not what a save of this package leaves.
    """
    pending = directory / PENDING
    if not os.path.lexists(pending):
        return False
    if not locked:
        with _alone(directory):
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
    """Return the files that wait in a `PENDING` folder, the config first, and the names of weights to remove.

    The config goes first because it decides who may read the rest: from then on a stock class refuses the folder.
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
            stale = _json(listed)
            if not isinstance(stale, list) or not all(isinstance(n, str) and _WEIGHTS.fullmatch(n) for n in stale):
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
        handle = _lock(staging, shared=False)
        if staging.is_dir():  # nobody took it for abandoned before it was locked
            break
        _release(handle)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        _release(handle)


def _remove_abandoned(directory: Path) -> None:
    """Remove what killed saves left half written: nobody holds its lock."""
    for left in directory.glob(f"{STAGING}-*"):
        if left.is_symlink() or not left.is_dir():
            with suppress(FileNotFoundError):
                left.unlink()
        elif (handle := _lock(left, shared=False, wait=0.0)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            _release(handle)


def _flush(path: Path) -> None:
    """Bring a file or a directory's entries to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------------------------------------- reading


def read(directory: Path, load: Callable[[Path], Result]) -> Result:
    """Read a checkpoint's folder while nobody exchanges its files; nothing in it is changed.

    Args:
        directory: of a checkpoint.
        load: gets the folder to read from: the directory itself, or, where a save was killed before it had moved its
            files, a temporary folder of links to where they lie. It is called again if files were exchanged meanwhile.

    Returns:
        What `load` returns.

    Raises:
        CheckpointError: if files were exchanged at each of several attempts, or an interrupted save lies there that no
            version of this package wrote.
        Exception: what `load` raises.
    """
    for _ in range(ATTEMPTS):
        with _among_readers(directory):
            before = _signature(directory)
            try:
                with _view(directory) as folder:
                    result = load(folder)
            except Exception:
                if _signature(directory) == before:
                    raise
            else:
                if _signature(directory) == before:
                    return result
    raise CheckpointError(f"hf_posenc: files of {directory} were exchanged while they were read, {ATTEMPTS} times")


def is_interrupted(directory: Path) -> bool:
    """Return whether a killed save left files that still have to be moved into place."""
    return os.path.lexists(directory / PENDING)


@contextmanager
def _view(directory: Path) -> Iterator[Path]:
    """Give the directory, or links to what it will be once an interrupted save is completed."""
    if not is_interrupted(directory):
        yield directory
        return
    pending = directory / PENDING
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
    """Return what tells that a config or weights were exchanged: inode, size and time of each file."""
    found = {}
    for folder in (directory, directory / PENDING):
        with suppress(OSError):
            for entry in os.scandir(folder):
                if entry.name.endswith(("config.json", ".index.json")) or _ANY_WEIGHTS.fullmatch(entry.name):
                    status = entry.stat()
                    found[f"{folder.name}/{entry.name}"] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


# ---------------------------------------------------------------------------------------------------------------- locks


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Wait until this is the one writer, and no reader of ours is at work."""
    os.close(os.open(directory / LOCK, os.O_CREAT | os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0), 0o666))
    gate = _lock(directory, shared=False)  # lets no further readers in, else those who overlap would never end
    handle = None
    try:
        handle = _lock(directory / LOCK, shared=False, wait=_PATIENCE)
        if handle is None and fcntl is not None:
            logger.warning("hf_posenc: waiting to save in %s until others have finished there", directory)
            handle = _lock(directory / LOCK, shared=False)
        yield
    finally:
        _release(handle)
        _release(gate)


@contextmanager
def _among_readers(directory: Path) -> Iterator[None]:
    """Keep writers from moving files; lets one that is waiting go first, for a while.

    Only for a while, so that readers who wait for each other (processes that load one model together) cannot be kept
    apart for good by a writer who waits for the first of them.
    """
    gate = _lock(directory, shared=True, wait=_TURN)
    try:
        handle = _lock(directory / LOCK, shared=True)
    finally:
        _release(gate)
    try:
        yield
    finally:
        _release(handle)


def _lock(path: Path, *, shared: bool, wait: float | None = None) -> int | None:
    """Lock a file or folder.

    Args:
        path: what to lock; it is only opened.
        shared: together with others who share.
        wait: seconds to wait at most; None waits as long as it takes.

    Returns:
        A handle, or None if the time is up, there is no such file, or locks are not to be had there.
    """
    if fcntl is None:
        return None
    try:
        # Some network file systems grant an exclusive lock only to who may write.
        writable = not shared and not path.is_dir()
        handle = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = None if wait is None else time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(handle, kind if deadline is None else kind | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if deadline is None or time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
    except OSError:  # no locks on this file system
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _release(handle: int | None) -> None:
    if handle is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile would keep it locked otherwise
        os.close(handle)


# ------------------------------------------------------------------------------------------------------------- contents


def json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
        path: of the file.

    Returns:
        The object.

    Raises:
        CheckpointError: if it holds anything else.
        OSError: if it cannot be read.
    """
    found = _json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"hf_posenc: {path} holds no JSON object")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"hf_posenc: {path} is no valid JSON: {error}") from error


def digest(content: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys and its spaces."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_default_weights(name: str) -> bool:
    """Return whether a file name is that of weights or their index, of no variant (`model.fp16.safetensors`)."""
    return _WEIGHTS.fullmatch(name) is not None


def weight_digests(directory: Path) -> dict[str, str]:
    """Return what tells whose weights a folder holds, without reading the weights.

    Args:
        directory: of a checkpoint.

    Returns:
        By file name the digest of each header of a `model*.safetensors` (names, dtypes, shapes and places of its
        tensors) and of each index of shards.

    Raises:
        CheckpointError: if a header or an index cannot be read, or an index names a file that is not beside it.
    """
    found = {}
    for path in sorted(directory.iterdir()):
        if not _ANY_WEIGHTS.fullmatch(path.name) or not path.is_file():
            continue
        if path.name.endswith(".json"):
            index = json_object(path)
            names = index.get("weight_map")
            if not isinstance(names, dict) or not all(
                isinstance(name, str) and _ANY_WEIGHTS.fullmatch(name) for name in names.values()
            ):
                raise CheckpointError(f"hf_posenc: {path} names a file that is no model*.safetensors beside it")
            found[path.name] = digest(index)
        else:
            found[path.name] = digest(_header(path))
    return found


def tensors(directory: Path) -> dict[str, dict[str, Any]]:
    """Return what the headers of a checkpoint's weight files say of each tensor, without reading the weights.

    Args:
        directory: of a checkpoint.

    Returns:
        By name its `dtype`, as safetensors calls it, its `shape` and its `data_offsets`; empty without weights.

    Raises:
        CheckpointError: if a header cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        if is_default_weights(path.name):
            found.update({name: each for name, each in _header(path).items() if name != "__metadata__"})
    for name, each in found.items():
        if (
            not isinstance(each, dict)
            or not isinstance(each.get("dtype"), str)
            or not isinstance(each.get("shape"), list)
        ):
            raise CheckpointError(f"hf_posenc: the weights in {directory} say no dtype and shape of {name!r}")
    return found


def _header(path: Path) -> dict[str, Any]:
    """Read the header of a safetensors file."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(_LARGEST_HEADER, path.stat().st_size - 8):
            raise CheckpointError(f"hf_posenc: {path} is no safetensors file: its header would have {size:,} bytes")
        text = file.read(size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"hf_posenc: the header of {path} is no valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"hf_posenc: the header of {path} is no JSON object")
    return header
