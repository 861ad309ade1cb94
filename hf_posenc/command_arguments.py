"""Command lines: one line for what is wrong, each option listed once, and `name=value` words of a scheme."""

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
    """A parser that takes no abbreviations, keeps the lines of its examples, and says in one line what is wrong."""

    def __init__(self, **keywords: Any) -> None:
        """Take the arguments of an ArgumentParser; `epilog` is printed as it stands."""
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **keywords})
        self.guesses: dict[str, str] = {}
        """Spellings that are no options -> the option that is meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read all words. A word that nobody knows ends the program, also in a sub-command: argparse reads it here."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            visible = {
                action.dest: action.option_strings[0] for action in reversed(self._actions) if action.option_strings
            }
            spellings = {each: visible[action.dest] for action in self._actions for each in action.option_strings}
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            meant = did_you_mean(options[0], spellings | self.guesses) if options else ""
            self.error(f"unknown option or stray value: {' '.join(unknown)} (--help lists the options){meant}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is none of the choices; argparse has no public place for this."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"there is no {value}; choose from {', '.join(known)}{did_you_mean(value, known)}"
            )

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def hyperparameters(words: Iterable[str], option: str = "--scheme-args") -> dict[str, Any]:
    """Return `name=value` words as a scheme's keyword arguments.

    A value is read as JSON (`false`, `[1, 2]`), else as Python writes it (`False`, `(1, 2)`), else it is text. Lists
    become tuples, which hyper-parameters are.

    Args:
        words: one for each hyper-parameter.
        option: that they were given to, for what is said of a wrong one.

    Raises:
        ValueError: if a word has another shape, or a name is there twice.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError(f"{option} takes name=value, not {word}")
        if name in found:
            raise ValueError(f"{option} says {name} twice")
        read = _read(value)
        found[name] = tuple(read) if isinstance(read, list) else read
    return found


def meanings(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class and of its bases say under `Args:` or `Attributes:`, by name."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        documented = inspect.cleandoc(owner.__doc__ or "")
        for part in re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n?)*)", documented, re.MULTILINE):
            for name, meaning in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", part, re.MULTILINE):
                found[name] = " ".join(meaning.split())
    return found


def _read(value: str) -> Any:
    for reader, error in ((json.loads, json.JSONDecodeError), (ast.literal_eval, (SyntaxError, ValueError))):
        try:
            return reader(value)
        except error:
            pass
    return value
