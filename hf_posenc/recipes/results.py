"""What a recipe says of itself in JSON, written whole or not at all: with what it was made, where, and what it took."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
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


def read_json(path: Path) -> Any:
    """What a file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: an interrupted write leaves what was there."""
    write_whole(path, json.dumps(results, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """The same of any text; bytes of a file's name that are no text are shown as escapes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)


def origin(recipe: str, arguments: Any, accelerator: Accelerator) -> dict[str, Any]:
    """What somebody needs to run the same again."""
    here = Path(__file__)

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", here.parent, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    checkout = (
        git("ls-files", "--error-unmatch", here.name) is not None
    )  # not an installation inside another repository

    modules = (hf_posenc, torch, transformers, accelerate, datasets, peft)
    return {
        "recipe": recipe,
        "arguments": asdict(arguments),
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {
            "commit": git("rev-parse", "HEAD") if checkout else None,
            "modified": checkout and bool(git("status", "--porcelain", "--untracked-files=no")),
        },
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in modules},
        },
        "hardware": {
            "device": str(accelerator.device),
            "name": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.processor(),
            "processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
        },
    }


def without_paths(results: dict[str, Any]) -> dict[str, Any]:
    """Return results in which folders of this machine are not named: of each absolute path the last name is left.

    Args:
        results: of a recipe; they stay as they are, since a run goes on by them.
    """
    words = [
        word
        for text in strings([results["command"], results["arguments"], results["base"]])
        for word in (text, text.partition("=")[2])
    ]
    paths = sorted({word for word in words if is_absolute(word)}, key=len, reverse=True)
    return replaced_in(results, {path: last_name(path) for path in paths})


def last_name(path: str) -> str:
    """Return the last name of an absolute path; anything else, such as a Hub id, as it is."""
    if not is_absolute(path):
        return path
    return (PureWindowsPath(path) if PureWindowsPath(path).drive else PurePosixPath(path)).name


def is_absolute(text: str) -> bool:
    """Return whether a text is an absolute path, of any operating system, or begins at somebody's home."""
    path = PureWindowsPath(text)
    return bool(path.name) and (text.startswith(("/", "~")) or path.is_absolute())


def strings(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings(each)


def replaced_in(value: Any, names: dict[str, str]) -> Any:
    """Return a JSON value with each text that is a key, also within another text, exchanged for what belongs to it."""
    if isinstance(value, str):
        found = "|".join(map(re.escape, names))  # the longest first, each where it begins and ends
        return re.sub(rf"(?<![\w/\\.])({found})(?!\w)", lambda path: names[path[0]], value) if names else value
    if isinstance(value, dict):
        return {key: replaced_in(each, names) for key, each in value.items()}
    return [replaced_in(each, names) for each in value] if isinstance(value, (list, tuple)) else value


class stopwatch:
    """Context manager: `seconds[name]` is the time spent inside."""

    def __init__(self, seconds: dict[str, float], name: str):
        """Nothing runs before it is entered."""
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.start, 1)
