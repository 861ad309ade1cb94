"""Locks on a checkpoint's folder: one writer alone, or readers together.

They are `flock`s, which end with their process. Where the file system or the operating system has none, nothing is
locked, and nobody waits.
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
"""File that writers lock alone and readers lock together. It is empty and stays."""

_TURN = 5.0  # seconds that a reader lets a waiting writer go first
_PATIENCE = 60.0  # seconds that a writer waits before it logs a warning


@contextmanager
def write_lock(directory: Path) -> Iterator[None]:
    """Hold a folder as its one writer, once no reader of ours is at work.

    Args:
        directory: of a checkpoint.
    """
    os.close(os.open(directory / LOCK, os.O_CREAT | os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0), 0o666))
    gate = lock(directory, shared=False)  # lets no further readers in, else those who overlap would never end
    handle = None
    try:
        handle = lock(directory / LOCK, shared=False, wait=_PATIENCE)
        if handle is None and fcntl is not None:
            logger.warning("hf_posenc: waiting to save in %s until others have finished there", directory)
            handle = lock(directory / LOCK, shared=False)
        yield
    finally:
        release(handle)
        release(gate)


@contextmanager
def read_lock(directory: Path) -> Iterator[None]:
    """Keep writers from moving files in a folder, after a writer that is waiting already has had its turn.

    It gets its turn only for a while. Otherwise readers who wait for each other (processes that load one model
    together) could be kept apart for good by a writer who waits for the first of them.

    Args:
        directory: of a checkpoint.
    """
    gate = lock(directory, shared=True, wait=_TURN)
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
        path: is only opened.
        shared: whether others may share the lock.
        wait: seconds to wait at most; None waits as long as it takes.

    Returns:
        A handle for `release`, or None if the time is up, there is no such file, or nothing can be locked there.
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


def release(handle: int | None) -> None:
    """Release a lock, if there is one."""
    if handle is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile would keep it locked otherwise
        os.close(handle)
