"""Suggest the name that a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def did_you_mean(word: object, known: Iterable[str] | Mapping[str, str]) -> str:
    """Return `. Did you mean alibi?`, to end a message with; an empty string where no known name is close.

    Case does not count, nor does a hyphen for an underscore.

    Args:
        word: the name as it was typed; what is no string is close to nothing.
        known: the names there are. A mapping gives each the answer to print, so that it can hold names under which
            people know a thing that is called otherwise here.
    """
    answers = known if isinstance(known, Mapping) else {name: name for name in known}
    folded = {_folded(name): answer for name, answer in answers.items()}
    close = get_close_matches(_folded(word), folded, n=1) if isinstance(word, str) else []
    return f". Did you mean {folded[close[0]]}?" if close else ""


def _folded(name: str) -> str:
    return name.lstrip("-").casefold().replace("-", "_")
