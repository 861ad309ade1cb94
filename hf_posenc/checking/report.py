"""The results of `check`: one outcome per question, and the page that shows them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from ..measurement import Result

WIDTH = 112
"""Number of characters in a line of the page."""


@dataclass(frozen=True)
class Outcome(Result):
    """The answer to one question about a model.

    Attributes:
        about: the question in one or two words, such as `cache`.
        ok: whether nothing is wrong; None if the question could not be measured.
        found: what was found, in words; where nothing was measured, the reason.
        measured: the number behind it; None if there is none.
        advice: what to do about a finding; empty if nothing is wrong.
    """

    about: str
    ok: bool | None
    found: str
    measured: float | None = None
    advice: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        mark = {True: "ok", False: "FOUND", None: "-"}[self.ok]
        head = f"  {mark:<6}{self.about:<16}"
        yield from textwrap.wrap(self.found, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
        if self.advice:
            lead = " " * len(head) + "do: "
            yield from textwrap.wrap(self.advice, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


@dataclass(frozen=True)
class CheckReport(Result):
    """The results of `check`. `str` gives one page; the report is true if nothing was found.

    Attributes:
        model: class of the model, its model type, dtype and attention implementation.
        outcomes: one or more outcomes per question.
    """

    derived = ("ok",)

    model: str
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing wrong was found. Questions that could not be measured do not count."""
        return not self.findings

    @property
    def findings(self) -> tuple[Outcome, ...]:
        """What is wrong."""
        return tuple(outcome for outcome in self.outcomes if outcome.ok is False)

    @property
    def not_measured(self) -> tuple[Outcome, ...]:
        """The questions that could not be measured, each with the reason in `found`."""
        return tuple(outcome for outcome in self.outcomes if outcome.ok is None)

    def __bool__(self) -> bool:
        """Whether nothing wrong was found."""
        return self.ok

    def __str__(self) -> str:
        """Return one page: the findings first, then what is right, then what was not measured."""
        count = len(self.findings)
        verdict = "nothing found" if self.ok else f"{count} finding{'s' if count > 1 else ''}"
        order = sorted(self.outcomes, key=lambda outcome: (False, True, None).index(outcome.ok))
        lines = [line for outcome in order if outcome.ok is not None for line in outcome.lines()]
        if self.not_measured:
            lines += ["  not measured:", *(line for outcome in self.not_measured for line in outcome.lines())]
        return "\n".join([f"{self.model}: {verdict}", *lines])
