"""Files of the recipes: safe writing, how and where a run was made, and removal of this machine's paths."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import accelerate
import datasets
import peft
import torch
import transformers
from accelerate import Accelerator

import hf_posenc

from ..checkpoints import files

Results = dict[str, Any]
"""Results of a run, or a part of them, ready for JSON."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, results: Results) -> None:
    """Write a JSON file; an interrupted write leaves the old one."""
    write_text(path, json.dumps(results, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file; an interrupted write leaves the old one. File names in it that are not UTF-8 are escaped."""
    with files.replaced(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first row is the header."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def origin(recipe: str, arguments: Any, accelerator: Accelerator) -> Results:
    """Return how and where a run was made: arguments, versions, hardware."""
    modules = (hf_posenc, torch, transformers, accelerate, datasets, peft)
    return {
        "recipe": recipe,
        "arguments": asdict(arguments),
        "command": ["hf-posenc" if Path(sys.argv[0]).name == "__main__.py" else sys.argv[0], *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": git_commit(),
        "versions": {"python": platform.python_version()} | {module.__name__: module.__version__ for module in modules},
        "hardware": {
            "device": str(accelerator.device),
            "name": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.processor(),
            "processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
        },
    }


def git_commit() -> str | None:
    """Return the commit of this checkout, with `-dirty` if files were changed; None for an installed package."""
    git = ["git", "-C", str(Path(__file__).parent)]
    run: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    try:
        # the package may be installed inside another repository
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], **run)
        described = [*git, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        return str(subprocess.run(described, **run).stdout).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def without_paths(value: Any) -> Any:
    """Return a copy of results that names no folder of this machine: absolute paths become their last name.

    The results themselves keep them, because `--resume` compares them.
    """
    if isinstance(value, str):
        return ", ".join(map(_without_path, value.split(", ")))
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, (list, tuple)) else value


def _without_path(word: str) -> str:
    name, equals, path = word.rpartition("=")
    return name + equals + last_name(path)


def last_name(path: str) -> str:
    """Return the last name of an absolute path of any operating system; anything else, such as a Hub id, unchanged."""
    windows = PureWindowsPath(path)
    if not windows.name or "\n" in path or not (path.startswith(("/", "~")) or windows.is_absolute()):
        return path
    return (windows if windows.drive else PurePosixPath(path)).name
