"""Options of the recipes: dataclass fields, read from a YAML file and then from the command line, which wins."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import yaml

from ..core.command_arguments import Parser, at_least, option, parser_of

Count = Annotated[int, at_least(int, 1)]
Natural = Annotated[int, at_least(int, 0)]
Length = Annotated[int, at_least(int, 2)]
Positive = Annotated[float, at_least(float, 0, above=True)]
NotNegative = Annotated[float, at_least(float, 0)]
T = TypeVar("T")


class UsageError(Exception):
    """Arguments, text or model that cannot work. The message says why, and what to do instead."""


@contextmanager
def as_usage_error(subject: str, *errors: type[Exception]) -> Iterator[None]:
    """Context manager that turns these errors into a UsageError, with `subject` before the message."""
    try:
        yield
    except errors as error:
        raise UsageError(f"{subject}{str(error).removeprefix('hf_posenc: ')}") from None


def parse(cls: type[T], argv: list[str] | None, description: str | None, prog: str | None = None) -> tuple[T, Parser]:
    """Read the options from the file of `--config` and from the command line, which wins.

    Unknown options and keys, and values that an option does not take, end the program with a message and status 2.

    Args:
        cls: dataclass of the options: every field is one.
        argv: words of the command line; None means those of this process.
        description: text of --help.
        prog: name of the program; None means the file that was started.

    Returns:
        The options, and the parser, whose `error` ends the program with a message.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = parser_of(cls, prog, description or "")
    parser.add_argument("--config", help="YAML file with any of these options; the command line wins")
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--config")
    try:
        path = file.parse_known_args(words)[0].config
        values = vars(parser.parse_args([*(words_of(parser, path) if path else ()), *words]))
    except UsageError as error:
        parser.error(str(error))
    return cls(**{name: value for name, value in values.items() if name != "config"}), parser


def words_of(parser: Parser, path: str) -> Iterator[str]:
    """Yield the options of a YAML file as words of a command line.

    A mapping for an option that takes several words is written `name=value`. Other mappings and lists become JSON.
    """
    with as_usage_error(f"--config {path}: ", OSError, UnicodeDecodeError, yaml.YAMLError):
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must be a mapping of options, not {type(content).__name__}")
    several = {action.dest for action in parser._actions if action.nargs == "+"}
    for name, value in content.items():
        if value is None:
            continue
        yield option(str(name))
        if name in several and isinstance(value, dict):
            yield from (f"{key}={json.dumps(item)}" for key, item in value.items())
        else:
            items = value if name in several and isinstance(value, list) else [value]
            yield from (json.dumps(item) if isinstance(item, (dict, list)) else str(item) for item in items)
