"""Options of the recipes: dataclass fields, read from a YAML file and then from the command line, which wins."""

import json
import sys
import types
from argparse import SUPPRESS, ArgumentTypeError
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from ..arguments import Parser
from ..spelling import did_you_mean

FIRST = (
    *("model", "data", "scheme", "variants", "schemes", "scheme_args", "train_length", "steps", "lengths"),
    *("seed", "seeds", "output", "json", "resume"),
)
"""Options that most command lines have, in the order of --help; the others follow in groups, by what they are of."""
METAVARS = {int: "N", float: "X", str: "TEXT"}


@dataclass
class Options:
    """Options of a program, or a group of them: the fields of a dataclass that inherits this one."""


T = TypeVar("T", bound=Options)


class UsageError(Exception):
    """Arguments, text or model that cannot work. The message says why, and what would work."""


def parse(
    cls: type[T], argv: list[str] | None, description: str | None, *, prog: str | None = None, examples: str = ""
) -> tuple[T, Parser]:
    """Read `--config FILE`, then the other options, which win.

    An unknown key of the file, a value of the wrong type, and an unknown or abbreviated option each end the program
    with a message and status 2.

    Args:
        cls: the options. A field's metadata hold its `help`, and may hold a `metavar`, `was`, an older name, and
            `guesses`, other words that people type for it.
        argv: words of the command line; None takes those of the process.
        description: of the program. Its first line is shown.
        prog: name of the program; None takes the file that was started.
        examples: command lines for the end of --help, in which `{prog}` stands for the name.

    Returns:
        The arguments, and the parser, whose `error` ends the program with a message.
    """
    parser = parser_of(cls, description, prog=prog, examples=examples)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        named = parser.parse_args(from_file(cls, words) + words)
    except UsageError as error:
        parser.error(str(error))
    given = {name: value for name, value in vars(named).items() if name != "config"}
    return cls(**given), parser


def parser_of(cls: type, description: str | None, *, prog: str | None = None, examples: str = "") -> Parser:
    """Return the parser of a dataclass of options: see `parse`."""
    parser = Parser(
        prog=prog, description=(description or "").split("\n")[0], usage="%(prog)s [options]", add_help=False
    )
    parser.epilog = f"examples:\n{examples.strip(chr(10)).format(prog=parser.prog)}" if examples else None
    groups = {"most used": parser.add_argument_group("most used")}
    kinds = get_type_hints(cls)
    for title, known in grouped(cls):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        add(groups[title], known, kinds[known.name])
    parser.guesses = {option(guess): option(name) for guess, name in guesses(cls).items()}
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file with any of these options; the command line wins")
    general.add_argument("-h", "--help", action="help", help="show this and stop")
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


def add(group: Any, known: Field[Any], kind: Any) -> None:
    """Add an option to a group of the parser. An older name of it is read, but not listed."""
    several = get_origin(kind) is list
    inner = [argument for argument in get_args(kind) if argument is not type(None)]
    one = inner[0] if get_origin(kind) in (Union, types.UnionType) or several else kind
    default = default_of(known)
    text = known.metadata["help"] + ("" if default is None or default in ([], "") else f" (default: {shown(default)})")
    keywords: dict[str, Any] = {"default": default, "help": text.replace("%", "%%"), "dest": known.name}
    if one is bool:
        keywords |= {"nargs": "?", "const": True, "type": truth, "metavar": "BOOL"}
        keywords["help"] = known.metadata["help"].replace("%", "%%")
    else:
        keywords |= {"type": one, "metavar": known.metadata.get("metavar", METAVARS[one])}
        if several:
            keywords["nargs"] = "+"
    group.add_argument(option(known.name), **keywords)
    # Underscores for dashes, as 0.1.0 took them too, and names of 0.1.0.
    names = [known.name, *([known.metadata["was"]] if "was" in known.metadata else [])]
    for spelling in dict.fromkeys(spelling for name in names for spelling in (f"--{name}", option(name))):
        if spelling == option(known.name):
            continue
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


def as_in(cls: type, name: str, default: Any = MISSING) -> Any:
    """Return a field as another class declares it, with its help, and with another default if one is given."""
    known = next(known for known in fields(cls) if known.name == name)
    if default is MISSING and known.default is MISSING:
        return field(default_factory=known.default_factory, metadata=known.metadata)
    return field(default=known.default if default is MISSING else default, metadata=known.metadata)


def default_of(known: Field[Any]) -> Any:
    """Return the default of a field; a list is made anew."""
    return known.default_factory() if known.default_factory is not MISSING else known.default


def from_file(cls: type, words: list[str]) -> list[str]:
    """Return the options in the YAML file that `--config` names, as words of a command line; none without a file."""
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
    known = {field.name: field for field in fields(cls)}
    known |= {field.metadata["was"]: field for field in fields(cls) if "was" in field.metadata}
    if strange := [str(key) for key in content if key not in known]:
        raise UsageError(
            f"--config {path}: unknown {', '.join(strange)}; known are {', '.join(known)}"
            f"{did_you_mean(strange[0], {name: field.name for name, field in known.items()} | guesses(cls))}"
        )
    options: list[str] = []
    for key, value in content.items():
        default = default_of(known[key])
        if value in (None, [], {}):  # the command line has no words for these
            if default != (None if value is None else []):
                raise UsageError(f"--config {path}: {key} has no value; leave it out for the default, {default}")
            continue
        if isinstance(value, dict):  # hyper-parameters of a scheme read best as a mapping
            value = [f"{name}={json.dumps(item)}" for name, item in value.items()]
        options += [option(known[key].name), *map(str, value if isinstance(value, list) else [value])]
    return options


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


def at_least(arguments: Options, minimum: float, *names: str) -> None:
    """Raise UsageError unless each of these arguments is given and at least the minimum."""
    for name in names:
        if not getattr(arguments, name) >= minimum:
            raise UsageError(f"{option(name)} must be at least {minimum}, not {getattr(arguments, name)}")


def one_of(arguments: Options, name: str, choices: tuple[Any, ...]) -> None:
    """Raise UsageError unless the argument is one of the choices."""
    if (value := getattr(arguments, name)) not in choices:
        known = [str(choice) for choice in choices if choice is not None]
        raise UsageError(f"{option(name)} must be one of {', '.join(known)}, not {value}{did_you_mean(value, known)}")


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
