"""Arguments of the recipes: dataclass fields from a YAML file, overridden by the command line, all checked the same way."""

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser

import hf_posenc

T = TypeVar("T")


class UsageError(Exception):
    """The arguments or the text cannot work; the message says why and what would."""


def parse(cls: type[T], argv: list[str] | None, description: str) -> tuple[T, HfArgumentParser]:
    """Reads `--config FILE` first, then the other options, which win.

    Returns:
        The arguments, and the parser, whose `error` ends the program with a message.

    A key of the file that is no option, a value of the wrong type, an unknown or abbreviated option: each ends the
    program with a message and status 2.
    """
    parser = HfArgumentParser(
        cls, description=description, usage="%(prog)s [options]   (--help lists them)", allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options; the command line wins")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        words = from_file(cls, words) + words
        arguments, rest, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
        assert set(vars(rest)) == {"config"}
        if unknown:
            raise UsageError(f"unknown option or stray value: {' '.join(unknown)}")
    except UsageError as error:
        parser.error(str(error))
    return arguments, parser


def from_file(cls: type, words: list[str]) -> list[str]:
    """The words that say the same as the YAML file named by the last `--config`; none without one."""
    path = None
    for index, word in enumerate(words):
        if word == "--config":
            path = words[index + 1] if index + 1 < len(words) else None
        elif word.startswith("--config="):
            path = word.partition("=")[2]
    if path is None:
        return []
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must be a mapping of options, not {type(content).__name__}")
    names = [field.name for field in fields(cls)]
    if strange := [str(key) for key in content if key not in names]:
        raise UsageError(f"--config {path}: unknown {', '.join(strange)}; known are {', '.join(names)}")
    said: list[str] = []
    for key, value in content.items():
        if value is None:
            continue
        if isinstance(value, dict):  # hyper-parameters of a scheme read best as a mapping
            value = [f"{name}={json.dumps(item)}" for name, item in value.items()]
        values = value if isinstance(value, list) else [value]
        if values:
            said += [option(key), *map(str, values)]
    return said


def option(name: str) -> str:
    """The command-line spelling of an argument."""
    return "--" + name.replace("_", "-")


def at_least(arguments: Any, minimum: float, *names: str) -> None:
    """UsageError unless all of these are given and not smaller."""
    for name in names:
        if not getattr(arguments, name) >= minimum:
            raise UsageError(f"{option(name)} must be at least {minimum}, not {getattr(arguments, name)}")


def one_of(arguments: Any, name: str, choices: tuple[Any, ...]) -> None:
    """UsageError unless it is one of the choices."""
    if getattr(arguments, name) not in choices:
        known = ", ".join(str(choice) for choice in choices if choice is not None)
        raise UsageError(f"{option(name)} must be one of {known}, not {getattr(arguments, name)}")


def hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """`name=value` words as a scheme's keyword arguments: JSON where it is JSON, text otherwise."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise UsageError(f"--scheme-args takes name=value, not {pair}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        values[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return values


def load(cls: Any, name: str, **arguments: Any) -> Any:
    """What the checkpoint holds of this class: its tokenizer, its config, its weights."""
    try:
        return cls.from_pretrained(name, **arguments)
    except (OSError, ValueError, hf_posenc.HfPosencError) as error:
        raise UsageError(f"--model {name}: {error}") from None
