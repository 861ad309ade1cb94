#!/usr/bin/env python3
"""Runs the Python of pages, and notebooks, and keeps what they print.

python scripts/run_docs.py                               # every page that shows what its Python prints, and all notebooks
python scripts/run_docs.py docs/calibrate.md             # this page: the blocks of text right below its Python
python scripts/run_docs.py docs/notebooks/read_a_report.ipynb # this notebook
"""

import argparse
import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")

ROOT = Path(__file__).parents[1]
SECONDS_PER_CELL = 1800
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


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder, by this Python and the package of this checkout.

    Progress bars are off. RuntimeError if a cell writes to stderr: a warning is mended, not kept.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    )
    settings = {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
    client.execute(env=os.environ | settings)
    notebook.metadata.language_info = {"name": "python"}
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise RuntimeError(f"{path.name}, {cell.id} wrote to stderr: {output.text}")
    return notebook


def text(notebook: Any) -> str:
    """The file of a notebook: JSON in which a change can be read line by line."""
    import nbformat

    return json.dumps(json.loads(nbformat.writes(notebook)), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run the Python of pages, and notebooks, and keep what they print.")
    every = [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("docs/notebooks/*.ipynb"))]
    parser.add_argument("files", nargs="*", type=Path, default=every)
    for file in [path.resolve() for path in parser.parse_args().files]:
        if not file.is_file():
            parser.error(f"there is no file {file}")
        if file.suffix == ".ipynb":
            file.write_text(text(executed(file)), encoding="utf-8")
        else:
            page = file.read_text(encoding="utf-8")
            if not any(found["shown"] is not None for found in BLOCK.finditer(page)):
                continue
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                file.write_text(renewed(page, file.name), encoding="utf-8")
        print(file.relative_to(ROOT))


if __name__ == "__main__":
    main()
