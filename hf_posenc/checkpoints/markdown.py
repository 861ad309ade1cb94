"""Text for Markdown: values and code are shown as they are, whatever they contain."""

from __future__ import annotations

import re


def plain(value: object) -> str:
    """Return a value as one line of Markdown without markup, HTML, or an end of a table's cell.

    Args:
        value: is shown as `str` does.
    """
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]|~#$!]", lambda found: "\\" + found[0], text)
    # At the beginning of a line these would begin a list.
    return re.sub(r"^(\d*)([-+.)])(?= |$)", r"\1\\\2", text)


def one_line(value: object) -> str:
    """Return a value as one line of text, with control characters and others that cannot be printed as escapes.

    Args:
        value: is shown as `str` does.
    """
    return "".join(map(_printable, " ".join(str(value).split())))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def code(value: object, *, cell: bool = False) -> str:
    """Return a value as an inline code span of Markdown.

    Args:
        value: is shown as `str` does, in one line.
        cell: whether it is for a cell of a table, where a pipe would end it.
    """
    text = one_line(value) or " "
    fence = "`" * (_longest_run_of_backticks(text) + 1)
    pad = " " if "`" in (text[0], text[-1]) else ""
    span = f"{fence}{pad}{text}{pad}{fence}"
    return span.replace("|", "\\|") if cell else span


def fenced(text: str) -> str:
    """Return lines as a code block of Markdown that nothing in them ends. Escapes stand for what cannot be printed."""
    text = "\n".join("".join(map(_printable, line)) for line in text.splitlines())
    fence = "`" * max(3, _longest_run_of_backticks(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def _longest_run_of_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
