"""Options of the recipes: dataclass fields, read from a YAML file and then from the command line, which wins."""

import json
import sys
import textwrap
import types
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, _ArgumentGroup
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from ..command_arguments import Parser, meanings
from ..did_you_mean import did_you_mean

MOST_USED = (
    *("model", "data", "scheme", "variants", "schemes", "scheme_args", "train_length", "steps", "lengths"),
    *("seed", "seeds", "output", "json", "resume"),
)
"""Options that --help lists, in this order. --help-all lists all options, in groups."""
METAVARS = {int: "N", float: "X", str: "TEXT", bool: "BOOL"}


class Limit(NamedTuple):
    """A lower limit of an option's value. With `above`, the value must exceed it."""

    number: float
    above: bool = False


Count = Annotated[int, Limit(1)]
Natural = Annotated[int, Limit(0)]
Length = Annotated[int, Limit(2)]
Positive = Annotated[float, Limit(0, above=True)]
NotNegative = Annotated[float, Limit(0)]
File = Annotated[str, "FILE"]
Folder = Annotated[str, "DIR"]
Name = Annotated[str, "NAME"]
Checkpoint = Annotated[str, "DIR_OR_ID"]
Hyperparameter = Annotated[str, "NAME=VALUE"]


class UsageError(Exception):
    """Arguments, text or model that cannot work. The message says why, and what to do instead."""


@contextmanager
def as_usage_error(subject: str, *errors: type[Exception]) -> Iterator[None]:
    """Context manager that turns these errors into a UsageError, with `subject` before the message."""
    try:
        yield
    except errors as error:
        raise UsageError(f"{subject}{str(error).removeprefix('hf_posenc: ')}") from None


class Values(NamedTuple):
    """The values that an option takes: their type and limits, read from the annotation of its field."""

    type: Callable[[str], object]
    several: bool
    metavar: str
    choices: tuple[str, ...]
    limits: tuple[Limit, ...]

    @classmethod
    def of(cls, annotation: object) -> "Values":
        """Read `list[T]` or `T | None`, where T may be `Annotated` with a metavar, a tuple of choices, or a Limit."""
        several = get_origin(annotation) is list
        if several or get_origin(annotation) in (Union, types.UnionType):
            annotation = next(inner for inner in get_args(annotation) if inner is not type(None))
        value_type, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        choices = next((note for note in notes if type(note) is tuple), ())
        limits = tuple(note for note in notes if isinstance(note, Limit))
        metavar = next((note for note in notes if isinstance(note, str)), METAVARS[value_type])
        return cls(value_type, several, metavar, choices, limits)

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError if a value is not one of the choices, or is below a limit."""
        if self.choices and value not in self.choices:
            suggestion = did_you_mean(value, self.choices)
            raise UsageError(f"{option(name)} must be one of {', '.join(self.choices)}, not {value}{suggestion}")
        for number, above in self.limits:
            if above and not value > number:
                raise UsageError(f"{option(name)} must be positive, not {value}")
            if not value >= number:
                raise UsageError(f"{option(name)} must be at least {number}, not {value}")


@dataclass
class Options:
    """Base class of groups of options. A program's options are a dataclass that inherits from several groups.

    Every field is an option. The first line of the docstring is the title of the group, and `Args:` has the help texts.
    The annotation of a field says which values the option takes; an instance with another value cannot be made.
    """

    def __post_init__(self) -> None:
        """Raise UsageError if an option does not take its value."""
        for name, values in values_of_options(type(self)).items():
            value = getattr(self, name)
            if value is not None and not values.several:
                values.check(name, value)


T = TypeVar("T", bound=Options)


def values_of_options(cls: type) -> dict[str, Values]:
    """Return option -> the values that it takes."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: Values.of(hints[field.name]) for field in fields(cls)}


def parse(
    cls: type[T], argv: list[str] | None, description: str | None, *, prog: str | None = None, examples: str = ""
) -> tuple[T, Parser]:
    """Read the options from the file of `--config` and from the command line, which wins.

    Unknown keys of the file, unknown or abbreviated options, and values that an option does not take end the program
    with a message and status 2.

    Args:
        cls: dataclass of the options. The metadata of a field can contain `was`, an older name that is still read, and
            `guesses`, wrong names for which a message suggests this one.
        argv: words of the command line; None means those of this process.
        description: description of the program, of which --help shows the first line.
        prog: name of the program; None means the file that was started.
        examples: command lines to show at the end of --help; `{prog}` stands for the name of the program.

    Returns:
        The options, and the parser, whose `error` ends the program with a message.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(cls, description, prog=prog, examples=examples, show_all="--help-all" in words)
    try:
        values = vars(parser.parse_args(from_file(cls, words) + words))
        return cls(**{name: value for name, value in values.items() if name != "config"}), parser
    except UsageError as error:
        parser.error(str(error))


def parser_of(
    cls: type, description: str | None, *, prog: str | None = None, examples: str = "", show_all: bool = True
) -> Parser:
    """Make the parser of a dataclass of options: see `parse`. Its help lists all options, or those used most."""
    parser = Parser(
        prog=prog, description=(description or "").split("\n")[0], usage="%(prog)s [options]", add_help=False
    )
    parser.epilog = f"examples:\n{examples.strip(chr(10)).format(prog=parser.prog)}" if examples else None
    groups: dict[str, _ArgumentGroup] = {}
    option_values, help_texts = values_of_options(cls), meanings(cls)
    for title, field in grouped(cls):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        is_shown = show_all or field.name in MOST_USED
        add(groups[title], field, option_values[field.name], help_texts.get(field.name, "") if is_shown else SUPPRESS)
    parser.guesses = {option(guess): option(name) for guess, name in guesses(cls).items()}
    if not show_all:
        titles = textwrap.wrap("; ".join(list(groups)[1:]).lower(), 76, break_on_hyphens=False)
        parser.add_argument_group("more options, which --help-all lists", "\n".join(titles))
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file with any of these options; the command line wins")
    general.add_argument("-h", "--help", action="help", help="show the options that are used most, and exit")
    general.add_argument("--help-all", action="help", help="show all options, and exit")
    return parser


def guesses(cls: type) -> dict[str, str]:
    """Return wrong name that people may type -> name of the option that they mean."""
    return {guess: field.name for field in fields(cls) for guess in field.metadata.get("guesses", ())}


def grouped(cls: type) -> list[tuple[str, Field[Any]]]:
    """Return pairs of group title and field, in the order of --help.

    The title comes from the docstring of the class that declares the field first.
    """
    owners = {field.name: cls for field in fields(cls)}
    for owner in cls.__mro__:  # the last class wins: it declares the option, the others change its default
        owners |= {name: owner for name in vars(owner).get("__annotations__", {}) if name in owners}

    def rank(field: Field[object]) -> tuple[int, int]:
        first = MOST_USED.index(field.name) if field.name in MOST_USED else len(MOST_USED)
        return first, cls.__mro__.index(owners[field.name])

    def title(field: Field[object]) -> str:
        return "most used" if field.name in MOST_USED else (owners[field.name].__doc__ or "").split("\n")[0].rstrip(".")

    return [(title(field), field) for field in sorted(fields(cls), key=rank)]


def add(group: _ArgumentGroup, field: Field[object], values: Values, help_text: str) -> None:
    """Add an option to a group of the parser. Its older name is accepted too, but --help does not list it.

    Args:
        group: group of the parser.
        field: the option.
        values: values that the option takes.
        help_text: help of the option; with SUPPRESS --help does not list it.
    """
    default = default_of(field)
    text = " | ".join(values.choices) + ": " * bool(values.choices) + help_text.removesuffix(".")
    if values.type is not bool and default not in (None, "", []):
        text += f" (default: {shown(default)})"
    text = SUPPRESS if help_text is SUPPRESS else text.replace("%", "%%")
    keywords: dict[str, Any] = {"default": default, "help": text, "dest": field.name, "metavar": values.metavar}
    if values.type is bool:
        keywords |= {"nargs": "?", "const": True, "type": truth}
    else:
        keywords |= {"type": values.type, **({"nargs": "+"} if values.several else {})}
    group.add_argument(option(field.name), **keywords)
    # Version 0.1.0 also accepted underscores instead of dashes, and it had other names.
    names = [field.name, *([field.metadata["was"]] if "was" in field.metadata else [])]
    for spelling in dict.fromkeys(spelling for name in names for spelling in (f"--{name}", option(name))):
        if spelling != option(field.name):
            group.add_argument(spelling, **keywords | {"help": SUPPRESS, "default": SUPPRESS})


def shown(default: object) -> str:
    """Return a default in the form in which a user would type it."""
    if isinstance(default, list):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def truth(word: str) -> bool:
    """Read a word such as `true` or `no` as a boolean."""
    value = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(word.lower())
    if value is None:
        raise ArgumentTypeError(f"true or false, not {word}")
    return value


def default_of(field: Field[object]) -> Any:
    """Return the default of a field; a list is a new one."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def from_file(cls: type, words: list[str]) -> list[str]:
    """Return the options in the YAML file of `--config` as words of a command line; no words without a file."""
    reader = ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config", action="append", nargs="?", default=[])
    paths = [path for path in reader.parse_known_args(words)[0].config if path]
    if len(paths) > 1:
        raise UsageError(f"--config is for one file, not {len(paths)}: {', '.join(paths)}")
    return [word for path in paths for word in words_of(cls, path)]


def words_of(cls: type, path: str) -> Iterator[str]:
    """Yield the options of a YAML file as words of a command line."""
    with as_usage_error(f"--config {path}: ", OSError, UnicodeDecodeError, yaml.YAMLError):
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must be a mapping of options, not {type(content).__name__}")
    options, accepted = {field.name: field for field in fields(cls)}, values_of_options(cls)
    options |= {field.metadata["was"]: field for field in fields(cls) if "was" in field.metadata}
    if unknown := [str(key) for key in content if key not in options]:
        suggestion = did_you_mean(unknown[0], {name: field.name for name, field in options.items()} | guesses(cls))
        raise UsageError(f"--config {path}: unknown {', '.join(unknown)}; known are {', '.join(options)}{suggestion}")
    for key, value in content.items():
        default = default_of(options[key])
        if value in (None, [], {}):  # words of a command line cannot express these
            if default != (None if value is None else []):
                raise UsageError(f"--config {path}: {key} has no value; leave it out for the default, {default}")
            continue
        yield option(options[key].name)
        if isinstance(value, dict) and accepted[options[key].name].metavar == get_args(Hyperparameter)[1]:
            yield from (f"{name}={json.dumps(item)}" for name, item in value.items())
            continue
        listed = value if isinstance(value, list) and accepted[options[key].name].several else [value]
        yield from (json.dumps(item) if isinstance(item, (dict, list)) else str(item) for item in listed)


class UniqueKeyLoader(yaml.SafeLoader):
    """A loader that refuses repeated keys. PyYAML would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; raise ConstructorError for a repeated key."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def option(name: str) -> str:
    """Return the name of an option on the command line."""
    return "--" + name.replace("_", "-")


def each_once(arguments: Options, *names: str) -> None:
    """Raise UsageError for a list option that is empty or contains something twice."""
    for name in names:
        values = getattr(arguments, name)
        if len(set(values)) != max(1, len(values)):
            raise UsageError(f"{option(name)} must name each only once, not {' '.join(map(str, values))}")


def refuse(arguments: Options, name: str, reason: str) -> None:
    """Raise UsageError if an option that has no effect was set to something else than its default."""
    default = default_of(next(field for field in fields(arguments) if field.name == name))
    if getattr(arguments, name) != default:
        raise UsageError(f"{option(name)} {reason}: leave it out")
