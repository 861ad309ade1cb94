"""Command lines made from signatures: errors in one line, suggestions for misspelt words, `name=value` words."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from .did_you_mean import did_you_mean

Number = TypeVar("Number", int, float)
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SEVERAL = (list, tuple)
"""Types of the parameters that take several words."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses abbreviations, keeps the line breaks of its texts, and reports errors in one line."""

    def __init__(self, **keywords: Any) -> None:
        """Take the arguments of an ArgumentParser."""
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **keywords})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read all words. An unknown word ends the program."""
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [spelling for action in self._actions for spelling in action.option_strings]
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            suggestion = did_you_mean(options[0], known) if options else ""
            self.error(f"unknown option or stray value: {' '.join(unknown)} (--help lists the options){suggestion}")
        return namespace

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse a value that is not a choice. argparse has no public method for this."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"there is no {value}; choose from {', '.join(choices)}{did_you_mean(value, choices)}"
            )

    def error(self, message: str) -> NoReturn:
        """Print the message and end the program with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parser_of(target: Callable[..., object], prog: str | None, description: str | None = None) -> Parser:
    """Make the parser of a function, or of a dataclass of options.

    Parameters that can be given by position are positional on the command line, too; all others are options. `Literal`
    gives choices, `list[T]` or `tuple[T, ...]` takes several words, and a function in `Annotated` reads a word. Help
    comes from the docstring: of a class, options are grouped by the class that declares them.

    Args:
        target: the function or class.
        prog: name of the program; None means the file that was started.
        description: text of --help; None means the docstring up to its `Args:`.
    """
    if description is None:
        description = (inspect.getdoc(target) or "").partition("\nArgs:\n")[0]
    parser = Parser(prog=prog, description=description.strip(), usage="%(prog)s [options]" if prog is None else None)
    hints, help_texts = get_type_hints(target, include_extras=True), meanings(target)
    classes = getattr(target, "__mro__", ())
    owners = {name: owner for owner in classes for name in inspect.get_annotations(owner)}
    groups: dict[object, Any] = {
        owner: parser.add_argument_group((owner.__doc__ or "").split("\n")[0].rstrip(".").lower())
        for owner in classes
        if owner in owners.values()
    }
    for name, parameter in inspect.signature(target).parameters.items():
        group = groups[owners[name]] if classes else parser
        _add_argument(group, parameter, hints[name], help_texts.get(name, ""))
    return parser


def _add_argument(group: Any, parameter: inspect.Parameter, hint: Any, help_text: str) -> None:
    """Add a parameter to a parser or to a group of it."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(inner for inner in get_args(hint) if inner is not type(None))
    several = get_origin(hint) in SEVERAL
    hint = get_args(hint)[0] if several else hint
    value_type, *readers = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    needed, default = parameter.default is parameter.empty, parameter.default
    if default is not False and default not in (None, "", (), parameter.empty):
        shown = f"{default:g}" if isinstance(default, float) else default
        help_text += f" (default: {' '.join(map(str, shown)) if several else shown})"
    keywords: dict[str, Any] = {"help": help_text.replace("%", "%%"), "default": None if needed else default}
    if get_origin(value_type) is Literal:
        keywords["choices"] = get_args(value_type)
    elif value_type is bool:
        keywords |= {"nargs": "?", "const": True, "type": truth}
    else:
        keywords["type"] = readers[0] if readers else value_type
    positional = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    if several:
        keywords["nargs"] = "*" if positional and not needed else "+"
    elif positional and not needed:
        keywords["nargs"] = "?"
    if positional:
        group.add_argument(parameter.name, **keywords)
    else:
        group.add_argument(option(parameter.name), required=needed, **keywords)


def option(name: str) -> str:
    """Return the name of an option on the command line."""
    return "--" + name.replace("_", "-")


def truth(word: str) -> bool:
    """Read `true` or `false`."""
    value = {"true": True, "false": False}.get(word.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"true or false, not {word}")
    return value


def at_least(number: type[Number], limit: float, *, above: bool = False) -> Callable[[str], Number]:
    """Return a reader of numbers that refuses those below a limit, or at it with `above`."""

    def read(word: str) -> Number:
        value = number(word)
        if not (value > limit if above else value >= limit):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {limit}, not {word}")
        return value

    read.__name__ = number.__name__  # for argparse's own message about a word that is no number
    return read


def hyperparameters(words: Iterable[str]) -> dict[str, Any]:
    """Return `name=value` words as a scheme's keyword arguments.

    A value is JSON (`false`, `[1, 2]`) if it parses as JSON, else a Python literal (`False`, `(1, 2)`), else text.
    Lists become tuples, because hyper-parameters are tuples.

    Raises:
        ValueError: if a word is not `name=value`, or a name occurs twice.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError(f"--scheme-args takes name=value, not {word}")
        if name in values:
            raise ValueError(f"--scheme-args says {name} twice")
        parsed = _parse_value(value)
        values[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return values


def _parse_value(value: str) -> Any:
    for reader, error in ((json.loads, json.JSONDecodeError), (ast.literal_eval, (SyntaxError, ValueError))):
        try:
            return reader(value)
        except error:
            pass
    return value


def meanings(target: object) -> dict[str, str]:
    """Return name -> description, from `Args:` and `Attributes:` in the docstring; of a class also in its bases'."""
    descriptions: dict[str, str] = {}
    for owner in reversed(getattr(target, "__mro__", (target,))):
        documented = inspect.cleandoc(owner.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n?)*)", documented, re.MULTILINE):
            for name, description in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
                descriptions[name] = " ".join(description.split())
    return descriptions
