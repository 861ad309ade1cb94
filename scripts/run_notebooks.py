#!/usr/bin/env python3
"""Runs the notebooks in docs/notebooks and keeps what they print and draw in them.

python scripts/run_notebooks.py                     # all of them
python scripts/run_notebooks.py read_a_report       # this one
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
SECONDS_PER_CELL = 1800


def executed(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder, by this Python and the package of this checkout.

    Progress bars are off. RuntimeError if a cell writes to stderr: a warning is mended, not kept.
    """
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
    return json.dumps(json.loads(nbformat.writes(notebook)), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Command line."""
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description="Run the notebooks in docs/notebooks and keep their outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    given = parser.parse_args().names
    if unknown := sorted(set(given) - set(names)):
        parser.error(f"there is no notebook {', '.join(unknown)}; choose from {', '.join(names)}")
    for name in given or names:
        path = FOLDER / f"{name}.ipynb"
        path.write_text(text(executed(path)), encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
