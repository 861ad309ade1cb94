"""Files of the recipes: safe writing, templates, how and where a run was made, and removal of this machine's paths."""

import base64
import io
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import accelerate
import datasets
import jinja2
import peft
import torch
import transformers
from accelerate import Accelerator

import hf_posenc

from ..checkpoints import files
from ..checkpoints.markdown import code, fenced, plain
from .options import Options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def filled(template: str, **values: object) -> str:
    """Fill a template of `templates/` with values. HTML templates escape them; Markdown templates use filters.

    Raises:
        KeyError: if a value that the template needs is missing.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=template.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "plain": plain,
        "code": code,
        "fenced": fenced,
        "table": table,
        "png": png,
        "spread": spread,
    }
    try:
        return environment.get_template(template).render(values)
    except jinja2.UndefinedError as error:
        raise KeyError(error.message) from None


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first row is the header."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def png(figure: "Figure") -> str:
    """Return a matplotlib figure as a PNG in base64."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


def spread(value: dict[str, float]) -> str:
    """Return a mean, and its standard deviation if it is known."""
    return f"{value['mean']:.3f}" + (f" ± {value['std']:.3f}" if "std" in value else "")


def origin(recipe: str, arguments: Options, accelerator: Accelerator) -> Results:
    """Return how and where a run was made: arguments, versions, hardware."""
    this_file = Path(__file__)

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", this_file.parent, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    # False for a package that is installed inside another repository.
    is_checkout = git("ls-files", "--error-unmatch", this_file.name) is not None
    modules = (hf_posenc, torch, transformers, accelerate, datasets, peft)
    return {
        "recipe": recipe,
        "arguments": asdict(arguments),
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {
            "commit": git("rev-parse", "HEAD") if is_checkout else None,
            "modified": is_checkout and bool(git("status", "--porcelain", "--untracked-files=no")),
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


def without_paths(results: Results) -> Results:
    """Return a copy of results that names no folder of this machine: absolute paths are replaced by their last name.

    Args:
        results: results of a recipe. They are not changed, because `--resume` compares them.
    """
    words = [
        word
        for text in strings([results["command"], results["arguments"], results["base"]])
        for word in (text, text.partition("=")[2])
    ]
    paths = sorted({word for word in words if is_absolute(word)}, key=len, reverse=True)
    return replace_in_strings(results, {path: last_name(path) for path in paths})


def last_name(path: str) -> str:
    """Return the last name of an absolute path. Return anything else, such as a Hub id, unchanged."""
    if not is_absolute(path):
        return path
    return (PureWindowsPath(path) if PureWindowsPath(path).drive else PurePosixPath(path)).name


def is_absolute(text: str) -> bool:
    """Return whether a text is an absolute path of any operating system, or a path that starts with `~`."""
    path = PureWindowsPath(text)
    return bool(path.name) and (text.startswith(("/", "~")) or path.is_absolute())


def strings(value: object) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def replace_in_strings(value: object, names: dict[str, str]) -> Any:
    """Replace the keys of `names` by their values in all strings of a JSON value."""
    if isinstance(value, str):
        paths = "|".join(map(re.escape, names))  # the longest comes first; the pattern below matches only whole paths
        return re.sub(rf"(?<![\w/\\.])({paths})(?!\w)", lambda match: names[match[0]], value) if names else value
    if isinstance(value, dict):
        return {key: replace_in_strings(item, names) for key, item in value.items()}
    return [replace_in_strings(item, names) for item in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Context manager that stores the time spent inside as `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = round(time.perf_counter() - start, 1)
