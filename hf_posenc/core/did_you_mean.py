"""Suggest a name for a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def did_you_mean(word: object, known: Iterable[str] | Mapping[str, str]) -> str:
    """Return `. Did you mean alibi?` for the end of a message; an empty string if no known name is close.

    Case does not count, and hyphens count as underscores.

    Args:
        word: the name as typed. For anything but a string there is no suggestion.
        known: the known names; or a mapping from names, synonyms included, to the name to suggest.
    """
    suggestions = known if isinstance(known, Mapping) else {name: name for name in known}
    folded = {_folded(name): suggestion for name, suggestion in suggestions.items()}
    close = get_close_matches(_folded(word), folded, n=1) if isinstance(word, str) else []
    return f". Did you mean {folded[close[0]]}?" if close else ""


def _folded(name: str) -> str:
    return name.lstrip("-").casefold().replace("-", "_")
