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

FIRST = (
    *("model", "data", "scheme", "variants", "schemes", "scheme_args", "train_length", "steps", "lengths"),
    *("seed", "seeds", "output", "json", "resume"),
)
"""Options that most command lines have, in the order of --help; --help-all lists the others too, in groups."""
METAVARS = {int: "N", float: "X", str: "TEXT", bool: "BOOL"}


class Limit(NamedTuple):
    """The least number that an option takes, or with `above` the number that it must exceed."""

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
    """Arguments, text or model that cannot work. The message says why, and what would work."""


@contextmanager
def as_usage_error(what: str, *errors: type[Exception]) -> Iterator[None]:
    """Context manager that turns these errors into a UsageError, whose message begins with what they are about."""
    try:
        yield
    except errors as error:
        raise UsageError(f"{what}{str(error).removeprefix('hf_posenc: ')}") from None


class Kind(NamedTuple):
    """The values of an option, as its annotation gives them."""

    type: Callable[[str], object]
    several: bool
    metavar: str
    choices: tuple[str, ...]
    limits: tuple[Limit, ...]

    @classmethod
    def of(cls, annotation: Any) -> "Kind":
        """Read `list[T]` or `T | None`, where T may be `Annotated` with a metavar, a tuple of choices, or a Limit."""
        several = get_origin(annotation) is list
        if several or get_origin(annotation) in (Union, types.UnionType):
            annotation = next(inner for inner in get_args(annotation) if inner is not type(None))
        known, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        choices = next((note for note in notes if type(note) is tuple), ())
        limits = tuple(note for note in notes if isinstance(note, Limit))
        metavar = next((note for note in notes if isinstance(note, str)), METAVARS[known])
        return cls(known, several, metavar, choices, limits)

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError if a value is none of the choices or beyond a limit."""
        if self.choices and value not in self.choices:
            known = did_you_mean(value, self.choices)
            raise UsageError(f"{option(name)} must be one of {', '.join(self.choices)}, not {value}{known}")
        for number, above in self.limits:
            if above and not value > number:
                raise UsageError(f"{option(name)} must be positive, not {value}")
            if not value >= number:
                raise UsageError(f"{option(name)} must be at least {number}, not {value}")


@dataclass
class Options:
    """Options of a program, or a group of them: the fields of a dataclass that inherits this one.

    The first line of its docstring is the title of the group, and `Args:` holds the help of each option. Annotations
    say which values an option takes, and an instance with another value cannot be made.
    """

    def __post_init__(self) -> None:
        """Raise UsageError if a value is not what its option takes."""
        for name, kind in kinds(type(self)).items():
            value = getattr(self, name)
            if value is not None and not kind.several:
                kind.check(name, value)


T = TypeVar("T", bound=Options)


def kinds(cls: type) -> dict[str, Kind]:
    """Return the values that each option takes."""
    hints = get_type_hints(cls, include_extras=True)
    return {known.name: Kind.of(hints[known.name]) for known in fields(cls)}


def parse(
    cls: type[T], argv: list[str] | None, description: str | None, *, prog: str | None = None, examples: str = ""
) -> tuple[T, Parser]:
    """Read `--config FILE`, then the other options, which win.

    An unknown key of the file, a value that an option does not take, and an unknown or abbreviated option each end the
    program with a message and status 2.

    Args:
        cls: the options. A field's metadata may hold `was`, an older name, and `guesses`, other words that people
            type for it.
        argv: words of the command line; None takes those of the process.
        description: of the program. Its first line is shown.
        prog: name of the program; None takes the file that was started.
        examples: command lines for the end of --help, in which `{prog}` stands for the name.

    Returns:
        The arguments, and the parser, whose `error` ends the program with a message.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = parser_of(cls, description, prog=prog, examples=examples, every="--help-all" in words)
    try:
        named = vars(parser.parse_args(from_file(cls, words) + words))
        return cls(**{name: value for name, value in named.items() if name != "config"}), parser
    except UsageError as error:
        parser.error(str(error))


def parser_of(
    cls: type, description: str | None, *, prog: str | None = None, examples: str = "", every: bool = True
) -> Parser:
    """Return the parser of a dataclass of options: see `parse`. Its help lists `every` option, or those used most."""
    parser = Parser(
        prog=prog, description=(description or "").split("\n")[0], usage="%(prog)s [options]", add_help=False
    )
    parser.epilog = f"examples:\n{examples.strip(chr(10)).format(prog=parser.prog)}" if examples else None
    groups: dict[str, _ArgumentGroup] = {}
    known_kinds, said = kinds(cls), meanings(cls)
    for title, known in grouped(cls):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        shown = every or known.name in FIRST
        add(groups[title], known, known_kinds[known.name], said.get(known.name, "") if shown else SUPPRESS)
    parser.guesses = {option(guess): option(name) for guess, name in guesses(cls).items()}
    if not every:
        titles = textwrap.wrap("; ".join(list(groups)[1:]).lower(), 76, break_on_hyphens=False)
        parser.add_argument_group("more options, which --help-all lists", "\n".join(titles))
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file with any of these options; the command line wins")
    general.add_argument("-h", "--help", action="help", help="show the options that are used most, and stop")
    general.add_argument("--help-all", action="help", help="show every option, and stop")
    return parser


def guesses(cls: type) -> dict[str, str]:
    """Return the names that people type for another: guess -> name of the field."""
    return {guess: known.name for known in fields(cls) for guess in known.metadata.get("guesses", ())}


def grouped(cls: type) -> list[tuple[str, Field[Any]]]:
    """Return the fields in the order of --help, each with the title of its group.

    The title is the docstring of the class that declares the field first.
    """
    owners = {known.name: cls for known in fields(cls)}
    for owner in cls.__mro__:  # the last one wins: where an option is declared first, not where its default is changed
        owners |= {name: owner for name in vars(owner).get("__annotations__", {}) if name in owners}

    def place(known: Field[Any]) -> tuple[int, int]:
        first = FIRST.index(known.name) if known.name in FIRST else len(FIRST)
        return first, cls.__mro__.index(owners[known.name])

    def title(known: Field[Any]) -> str:
        return "most used" if known.name in FIRST else (owners[known.name].__doc__ or "").split("\n")[0].rstrip(".")

    return [(title(known), known) for known in sorted(fields(cls), key=place)]


def add(group: _ArgumentGroup, known: Field[Any], kind: Kind, said: str) -> None:
    """Add an option to a group of the parser. An older name of it is read, but not listed.

    Args:
        group: of the parser.
        known: the option.
        kind: the values that it takes.
        said: its help; with SUPPRESS the option is not listed.
    """
    default = default_of(known)
    text = " | ".join(kind.choices) + ": " * bool(kind.choices) + said.removesuffix(".")
    if kind.type is not bool and default not in (None, "", []):
        text += f" (default: {shown(default)})"
    text = SUPPRESS if said is SUPPRESS else text.replace("%", "%%")
    keywords: dict[str, Any] = {"default": default, "help": text, "dest": known.name, "metavar": kind.metavar}
    if kind.type is bool:
        keywords |= {"nargs": "?", "const": True, "type": truth}
    else:
        keywords |= {"type": kind.type, **({"nargs": "+"} if kind.several else {})}
    group.add_argument(option(known.name), **keywords)
    # Underscores for dashes, as 0.1.0 took them too, and names of 0.1.0.
    names = [known.name, *([known.metadata["was"]] if "was" in known.metadata else [])]
    for spelling in dict.fromkeys(spelling for name in names for spelling in (f"--{name}", option(name))):
        if spelling != option(known.name):
            group.add_argument(spelling, **keywords | {"help": SUPPRESS, "default": SUPPRESS})


def shown(default: Any) -> str:
    """Return a default as it would be typed."""
    if isinstance(default, list):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def truth(word: str) -> bool:
    """Return the value of a switch, from a word such as `true` or `no`."""
    value = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(word.lower())
    if value is None:
        raise ArgumentTypeError(f"true or false, not {word}")
    return value


def default_of(known: Field[Any]) -> Any:
    """Return the default of a field; a list is made anew."""
    return known.default_factory() if known.default_factory is not MISSING else known.default


def from_file(cls: type, words: list[str]) -> list[str]:
    """Return the options in the YAML file that `--config` names, as words of a command line; none without a file."""
    reader = ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config", action="append", nargs="?", default=[])
    paths = [path for path in reader.parse_known_args(words)[0].config if path]
    if len(paths) > 1:
        raise UsageError(f"--config is for one file, not {len(paths)}: {', '.join(paths)}")
    return [word for path in paths for word in words_of(cls, path)]


def words_of(cls: type, path: str) -> Iterator[str]:
    """Yield the options of a YAML file as words of a command line."""
    with as_usage_error(f"--config {path}: ", OSError, UnicodeDecodeError, yaml.YAMLError):
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=Once)
    if not isinstance(content, dict):
        raise UsageError(f"--config {path}: must be a mapping of options, not {type(content).__name__}")
    known = {field.name: field for field in fields(cls)}
    known |= {field.metadata["was"]: field for field in fields(cls) if "was" in field.metadata}
    if strange := [str(key) for key in content if key not in known]:
        meant = did_you_mean(strange[0], {name: field.name for name, field in known.items()} | guesses(cls))
        raise UsageError(f"--config {path}: unknown {', '.join(strange)}; known are {', '.join(known)}{meant}")
    for key, value in content.items():
        default = default_of(known[key])
        if value in (None, [], {}):  # the command line has no words for these
            if default != (None if value is None else []):
                raise UsageError(f"--config {path}: {key} has no value; leave it out for the default, {default}")
            continue
        if isinstance(value, dict):  # hyper-parameters of a scheme read best as a mapping
            value = [f"{name}={json.dumps(item)}" for name, item in value.items()]
        yield option(known[key].name)
        yield from map(str, value if isinstance(value, list) else [value])


class Once(yaml.SafeLoader):
    """A loader that refuses a key that is there twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; raise ConstructorError if a key is there twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [key for index, key in enumerate(keys) if key in keys[:index]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def option(name: str) -> str:
    """Return the command-line spelling of an argument."""
    return "--" + name.replace("_", "-")


def each_once(arguments: Options, *names: str) -> None:
    """Raise UsageError unless each of these lists names something, and nothing twice."""
    for name in names:
        values = getattr(arguments, name)
        if len(set(values)) != max(1, len(values)):
            raise UsageError(f"{option(name)} must name each only once, not {' '.join(map(str, values))}")


def refuse(arguments: Options, name: str, reason: str) -> None:
    """Raise UsageError if an option that nothing would read has another value than its default."""
    default = default_of(next(known for known in fields(arguments) if known.name == name))
    if getattr(arguments, name) != default:
        raise UsageError(f"{option(name)} {reason}: leave it out")
