"""Parsing of command lines: one-line errors, suggestions for misspelt options, and `name=value` hyper-parameters."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from .did_you_mean import did_you_mean


class Parser(argparse.ArgumentParser):
    """A parser that refuses abbreviations, keeps the line breaks of its epilog, and reports errors in one line."""

    def __init__(self, **keywords: Any) -> None:
        """Take the arguments of an ArgumentParser."""
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **keywords})
        self.guesses: dict[str, str] = {}
        """Spelling that is not an option -> the option to suggest for it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read all words. An unknown word ends the program; argparse reads sub-commands through this method, too."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            visible = {
                action.dest: action.option_strings[0] for action in reversed(self._actions) if action.option_strings
            }
            spellings = {each: visible[action.dest] for action in self._actions for each in action.option_strings}
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            suggestion = did_you_mean(options[0], spellings | self.guesses) if options else ""
            self.error(f"unknown option or stray value: {' '.join(unknown)} (--help lists the options){suggestion}")
        return namespace, unknown

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


def hyperparameters(words: Iterable[str], option: str = "--scheme-args") -> dict[str, Any]:
    """Return `name=value` words as a scheme's keyword arguments.

    A value is JSON (`false`, `[1, 2]`) if it parses as JSON, else a Python literal (`False`, `(1, 2)`), else text.
    Lists become tuples, because hyper-parameters are tuples.

    Args:
        words: one `name=value` for each hyper-parameter.
        option: the command-line option that takes the words, for messages.

    Raises:
        ValueError: if a word is not `name=value`, or a name occurs twice.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError(f"{option} takes name=value, not {word}")
        if name in values:
            raise ValueError(f"{option} says {name} twice")
        parsed = _parse_value(value)
        values[name] = tuple(parsed) if isinstance(parsed, list) else parsed
    return values


def meanings(cls: type) -> dict[str, str]:
    """Return name -> description, from `Args:` and `Attributes:` in the docstrings of a class and its bases."""
    descriptions: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        documented = inspect.cleandoc(owner.__doc__ or "")
        for section in re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n?)*)", documented, re.MULTILINE):
            for name, description in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
                descriptions[name] = " ".join(description.split())
    return descriptions


def _parse_value(value: str) -> Any:
    for reader, error in ((json.loads, json.JSONDecodeError), (ast.literal_eval, (SyntaxError, ValueError))):
        try:
            return reader(value)
        except error:
            pass
    return value
