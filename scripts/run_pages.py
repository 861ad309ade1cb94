#!/usr/bin/env python3
"""Runs the Python of pages and writes what it prints into the blocks of text right below it.

python scripts/run_pages.py                    # every page in docs/ that shows what its Python prints
python scripts/run_pages.py docs/calibrate.md  # this one
"""

import argparse
import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<shown>.*?)^```$)?", flags=re.DOTALL | re.MULTILINE
)
"""A block of Python, and the block of text below it, if there is one: what it prints."""


def printed(code: str, where: str, names: dict[str, object]) -> str:
    """Run a block and return what it prints, without spaces at the ends of lines."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, where, "exec"), names)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def renewed(text: str, name: str) -> str:
    """Run a page from its beginning to its end, and return it with what it prints."""
    names: dict[str, object] = {"__name__": "__main__"}

    def block(found: re.Match[str]) -> str:
        shown = printed(found["code"], name, names)
        return found[0] if found["shown"] is None else f"```python\n{found['code']}```\n\n```text\n{shown}```"

    return BLOCK.sub(block, text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run the Python of pages and keep what it prints.")
    parser.add_argument("pages", nargs="*", type=Path, default=sorted(ROOT.glob("docs/*.md")))
    for page in [path.resolve() for path in parser.parse_args().pages]:
        text = page.read_text(encoding="utf-8")
        if any(found["shown"] is not None for found in BLOCK.finditer(text)):
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                page.write_text(renewed(text, page.name), encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
