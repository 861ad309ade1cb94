"""Extension of griffe, which reads docstrings for the site: lists of what a scheme says of itself, links to papers."""

import re
from typing import Any

import griffe

PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
LABEL = re.compile(r"^(Equations?|Beyond the training length|Deviations|Source)\b([^:\n]*):", flags=re.MULTILINE)


class Labels(griffe.Extension):
    """`Source: ...` at the start of a line becomes a point of a list, with the lines after it; `arXiv:...` a link."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object; its sections (`Args:` and the like) stay."""
        if obj.docstring is None:
            return
        lines: list[str] = []
        inside = False
        for line in obj.docstring.value.splitlines():
            if LABEL.match(line):
                lines += [] if inside else [""]
                lines.append("- " + LABEL.sub(r"**\1**\2:", line))
                inside = True
            elif not line.strip():
                lines.append(line)
                inside = False
            else:
                lines.append("  " + line.strip() if inside else line)
        obj.docstring.value = PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", "\n".join(lines))
