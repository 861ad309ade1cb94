"""Hook of mkdocs.yml: pages that are no Markdown in docs/, and links that lead out of it; and its reader of docstrings.

README.md is the home page, other files become pages too (`PAGES`), and so do notebooks, with what they print and draw. On every page a relative link to a file that is a page
leads to that page, one to any other file of the repository leads to its place on the web. A link to nothing is a warning,
which `--strict` makes an error.
"""

import base64
import json
import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.structure.files import File

from hf_posenc.core.registry import available_schemes, scheme_class

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "recipes/README.md": "recipes.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
PAGES |= {f"docs/notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in ROOT.glob("docs/notebooks/*.ipynb")}
"""File of the repository -> page of the site."""

EVERY_SCHEME = "<!-- every scheme -->"
"""Stands for the reference of every scheme class."""

LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")
FENCE = re.compile(r"^(```.*?^```)", flags=re.DOTALL | re.MULTILINE)
log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no Markdown in docs/."""
    for name, page in PAGES.items():
        if name.endswith(".ipynb"):
            text, pictures = notebook(ROOT / name, config)
            files.append(File.generated(config, page, content=text))
            for picture, content in pictures.items():
                files.append(File.generated(config, f"notebooks/{picture}", content=content))
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def notebook(path: Path, config: Any) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures in it by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            if "image/png" in shown:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(shown["image/png"])
                parts.append(f"![What the cell above draws]({name})")
            else:
                printed = "".join(output.get("text") or shown["text/plain"])
                parts.append(f"```text\n{printed.rstrip()}\n```")
    where = f"{config.extra['repository']}/blob/main/{path.relative_to(ROOT).as_posix()}"
    title, text = parts[0].split("\n", 1)
    page = "\n\n".join([title, f"[This page as a notebook]({where}), to be run.", text, *parts[1:]])
    return page, pictures


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links lead where they lead in the repository."""
    if EVERY_SCHEME in markdown:
        classes = [scheme_class(name) for name in available_schemes()]
        blocks = [f"::: {each.__module__}.{each.__name__}\n    options:\n      members: false" for each in classes]
        markdown = markdown.replace(EVERY_SCHEME, "\n\n".join(blocks))
    path = page.file.src_uri
    origin = next((name for name, other in PAGES.items() if other == path), f"docs/{path}")
    parts = FENCE.split(markdown)
    # Every second part is a block of code.
    parts[::2] = [
        LINK.sub(lambda link: link[1] + target(link[2], origin, path, config) + link[3], t) for t in parts[::2]
    ]
    return "".join(parts)


def target(link: str, origin: str, path: str, config: Any) -> str:
    """Where a link of the repository's file `origin`, which is the page `path`, leads on the site."""
    if "://" in link or link.startswith("mailto:"):
        return link
    name = os.path.normpath(PurePosixPath(origin).parent / link)
    if name in PAGES or (name.startswith("docs/") and not (ROOT / name).is_dir()):
        return os.path.relpath(PAGES.get(name, name.removeprefix("docs/")), PurePosixPath(path).parent)
    if not (ROOT / name).exists():
        log.warning("%s links to %s, which is not there", origin, link)
    kind = "tree" if (ROOT / name).is_dir() else "blob"
    return f"{config.extra['repository']}/{kind}/main/{name}"


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
