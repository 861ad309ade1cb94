"""Saving many files as one: a kill at any moment leaves the old checkpoint, or the new one.

The files are written into a folder of their own inside the target, which is renamed once they are complete: from then
on they count, and whoever comes next (`recover`) moves on whatever a kill left unmoved. Other files of the target
(a trainer's state, a tokenizer, logs) stay where they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STAGING = ".hf_posenc-saving"
"""Prefix of folders that are being written. What a kill leaves of one is removed by the next save."""

PENDING = ".hf_posenc-saved"
"""Folder whose files are complete and replace those beside it."""

_LIST = "remove.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """Collect files that then replace those of a directory, all or none.

    Weights that the new files do not replace (shards of another number, the one file that became shards) are removed.

    Args:
        directory: where the files belong; made if it does not exist.

    Yields:
        An empty folder to write into. If the body raises, the directory stays as it is.

    Raises:
        OSError: if files cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory)
    for left in directory.glob(STAGING + "*"):
        if not _is_being_written(left):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    staging = directory / f"{STAGING}-{os.getpid()}"
    staging.mkdir()
    try:
        yield staging
        names = {path.name for path in staging.iterdir()}
        if not names:  # a process that only takes part in gathering
            return
        stale = []
        if any(_WEIGHTS.fullmatch(name) for name in names):
            stale = [p.name for p in directory.iterdir() if _WEIGHTS.fullmatch(p.name) and p.name not in names]
        (staging / _LIST).write_text(json.dumps(sorted(stale)))
        for path in staging.iterdir():
            _flush(path)
        os.rename(staging, directory / PENDING)
        recover(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def recover(directory: Path) -> bool:
    """Move on what an interrupted save left complete but unmoved.

    Args:
        directory: of a checkpoint.

    Returns:
        Whether there was anything.

    Raises:
        OSError: if there was and the directory cannot be written.
    """
    pending = directory / PENDING
    if not pending.is_dir():
        return False
    listed = pending / _LIST
    stale = json.loads(listed.read_text()) if listed.is_file() else []
    for path in sorted(pending.iterdir()):
        if path != listed:
            moved = directory / f"{STAGING}-{path.name}"
            with suppress(FileNotFoundError):
                os.remove(moved)
            try:
                os.link(path, moved)
            except OSError:  # a file system without hard links
                shutil.copy2(path, moved)
            os.replace(moved, directory / path.name)
    for name in stale:
        with suppress(FileNotFoundError):
            os.remove(directory / name)
    _flush(directory)
    # The list goes last: while it is there, what is left of the folder can be moved again.
    for path in sorted(pending.iterdir(), key=lambda path: path == listed):
        os.remove(path)
    pending.rmdir()
    return True


def _is_being_written(left: Path) -> bool:
    """Return whether the process that named the folder still runs: another one saves here at the same time."""
    process = left.name.removeprefix(f"{STAGING}-")
    if not process.isdecimal() or int(process) == os.getpid() or os.name == "nt":
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _flush(path: Path) -> None:
    """Bring a file or a directory's entries to the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
