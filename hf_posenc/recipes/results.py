"""What a recipe says of itself in JSON, written whole or not at all: with what it was made, where, and what it took."""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
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


class stopwatch:
    """Context manager: `seconds[name]` is the time spent inside."""

    def __init__(self, seconds: dict[str, float], name: str):
        """Nothing runs before it is entered."""
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.start, 1)
