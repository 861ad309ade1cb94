"""Arguments of the recipes: dataclass fields from a YAML file, overridden by the command line, all checked the same way."""

import json
import sys
from argparse import ArgumentParser
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser

T = TypeVar("T")


class UsageError(Exception):
    """The arguments or the text cannot work; the message says why and what would."""


def parse(cls: type[T], argv: list[str] | None, description: str) -> tuple[T, ArgumentParser]:
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


def as_in(cls: type, name: str, default: Any = MISSING) -> Any:
    """A field as another class of arguments declares it, with its help, and with another default if one is given."""
    known = next(known for known in fields(cls) if known.name == name)
    if default is MISSING and known.default is MISSING:
        return field(default_factory=known.default_factory, metadata=known.metadata)
    return field(default=known.default if default is MISSING else default, metadata=known.metadata)


def default_of(known: Field[Any]) -> Any:
    """The default of a field, made anew where it is a list."""
    return known.default_factory() if known.default_factory is not MISSING else known.default


def from_file(cls: type, words: list[str]) -> list[str]:
    """The words that say the same as the YAML file named by `--config`; none without one."""
    paths = []
    for index, word in enumerate(words):
        if word == "--config":
            paths += words[index + 1 : index + 2]
        elif word.startswith("--config="):
            paths.append(word.partition("=")[2])
    if not paths:
        return []
    if len(paths) > 1:
        raise UsageError(f"--config is for one file, not {len(paths)}: {', '.join(paths)}")
    (path,) = paths
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=Once)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must be a mapping of options, not {type(content).__name__}")
    known = {one.name: one for one in fields(cls)}
    if strange := [str(key) for key in content if key not in known]:
        raise UsageError(f"--config {path}: unknown {', '.join(strange)}; known are {', '.join(known)}")
    said: list[str] = []
    for key, value in content.items():
        default = default_of(known[key])
        if value in (None, [], {}):  # the command line has no words for these
            if default != (None if value is None else []):
                raise UsageError(f"--config {path}: {key} has no value; leave it out for the default, {default}")
            continue
        if isinstance(value, dict):  # hyper-parameters of a scheme read best as a mapping
            value = [f"{name}={json.dumps(item)}" for name, item in value.items()]
        said += [option(key), *map(str, value if isinstance(value, list) else [value])]
    return said


class Once(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are there once."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


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


def each_once(arguments: Any, *names: str) -> None:
    """UsageError unless all of these lists name something, and nothing twice."""
    for name in names:
        values = getattr(arguments, name)
        if len(set(values)) != max(1, len(values)):
            raise UsageError(f"{option(name)} must name each only once, not {' '.join(map(str, values))}")


def refuse(arguments: Any, name: str, reason: str) -> None:
    """UsageError if this option was set to anything but its default, where nothing would read it."""
    default = next(known for known in fields(arguments) if known.name == name).default
    if getattr(arguments, name) != default:
        raise UsageError(f"{option(name)} {reason}: leave it out")
