"""Locks on a checkpoint's folder: one writer alone, or readers together.

The locks are `flock`s, which end with their process. If the file system or the operating system has no `flock`, nothing
is locked, and nobody waits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".hf_posenc-lock"
"""Name of the lock file: a writer locks it alone, readers share it. It is empty and stays in the folder."""

_YIELD_SECONDS = 5.0  # how long a reader lets a waiting writer go first
_WARNING_SECONDS = 60.0  # how long a writer waits before it logs a warning


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Wait for the readers of a folder, and be its one writer for a `with` block.

    Args:
        directory: folder of a checkpoint.
    """
    os.close(os.open(directory / LOCK, os.O_CREAT | os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0), 0o666))
    # Keeps new readers out while the writer waits. Otherwise overlapping readers could keep it waiting for ever.
    gate = lock(directory, shared=False)
    handle = None
    try:
        handle = lock(directory / LOCK, shared=False, wait=_WARNING_SECONDS)
        if handle is None and fcntl is not None:
            logger.warning("hf_posenc: waiting to save in %s until others have finished there", directory)
            handle = lock(directory / LOCK, shared=False)
        yield
    finally:
        release(handle)
        release(gate)


@contextmanager
def read_lock(directory: Path) -> Iterator[None]:
    """Keep writers from moving files in a folder for a `with` block. A waiting writer goes first, within a time limit.

    The time limit prevents a deadlock: processes that load one model together wait for each other, while the writer
    waits for the first of them.

    Args:
        directory: folder of a checkpoint.
    """
    gate = lock(directory, shared=True, wait=_YIELD_SECONDS)
    try:
        handle = lock(directory / LOCK, shared=True)
    finally:
        release(gate)
    try:
        yield
    finally:
        release(handle)


def lock(path: Path, *, shared: bool, wait: float | None = None) -> int | None:
    """Lock a file or folder.

    Args:
        path: the file or folder; it stays unchanged.
        shared: whether other processes may share the lock.
        wait: how many seconds to wait at most; None means no limit.

    Returns:
        A handle for `release`, or None if the time is up, the file does not exist, or the file system has no locks.
    """
    if fcntl is None:
        return None
    try:
        # Some network file systems grant an exclusive lock only on files that are open for writing.
        needs_write = not shared and not path.is_dir()
        handle = os.open(path, (os.O_RDWR if needs_write else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0))
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


def release(handle: int | None) -> None:
    """Release a lock, if there is one."""
    if handle is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked process may still have the handle
        os.close(handle)
