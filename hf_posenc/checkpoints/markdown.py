"""Escape values and code for Markdown, so that they show as they are."""

from __future__ import annotations

import re


def plain(value: object) -> str:
    """Return `str(value)` as one line of Markdown, with markup, HTML and the pipes of tables escaped."""
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]|~#$!]", lambda match: "\\" + match[0], text)
    # A number with a dot, a dash or the like would begin a list.
    return re.sub(r"^(\d*)([-+.)])(?= |$)", r"\1\\\2", text)


def one_line(value: object) -> str:
    """Return `str(value)` as one line of text, with unprintable characters escaped."""
    return "".join(map(_printable, " ".join(str(value).split())))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def code(value: object, *, cell: bool = False) -> str:
    """Return `str(value)` as a code span of Markdown, in one line.

    Args:
        value: the value to show.
        cell: whether the span is for the cell of a table, where pipes are escaped.
    """
    text = one_line(value) or " "
    fence = "`" * (_longest_run_of_backticks(text) + 1)
    pad = " " if "`" in (text[0], text[-1]) else ""
    span = f"{fence}{pad}{text}{pad}{fence}"
    return span.replace("|", "\\|") if cell else span


def fenced(text: str) -> str:
    """Return text as a code block of Markdown, with a fence that the text does not contain. Escape the unprintable."""
    text = "\n".join("".join(map(_printable, line)) for line in text.splitlines())
    fence = "`" * max(3, _longest_run_of_backticks(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def _longest_run_of_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
