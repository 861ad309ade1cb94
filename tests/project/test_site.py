"""The documentation site: every public name is in the reference, once; it builds without a warning; nothing is loaded from elsewhere."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers")
needs_mkdocs = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED), reason="no mkdocs: pip install -e '.[docs]' runs this"
)


def build(project, site):
    """Run mkdocs as scripts/build_docs.sh does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(
        command, cwd=project, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )


def test_the_reference_has_every_public_name_once():
    pages = sorted((ROOT / "docs/reference").glob("*.md"))
    found = Counter(name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE))
    assert "<!-- every scheme -->" in (ROOT / "docs/reference/schemes.md").read_text()  # site_pages.py writes them
    wanted = set()
    elsewhere = {  # also names of hf_posenc
        "hf_posenc.families": {"Family"},
    }
    for part in (
        "",
        ".calibration",
        ".checking",
        ".families",
        ".evaluation",
        ".analysis",
        ".analysis.plots",
        ".testing",
    ):
        name = f"hf_posenc{part}"
        left_out = elsewhere.get(name, set()) | {"__version__"}
        public = getattr(module := importlib.import_module(name), "__all__", None) or [
            each for each, value in vars(module).items() if getattr(value, "__module__", None) == name
        ]
        wanted |= {f"{name}.{each}" for each in public if not each.startswith("_") and each not in left_out}
    assert found == Counter(wanted)


@needs_mkdocs
@pytest.mark.slow
def test_it_builds_without_a_warning_and_needs_nothing_else(tmp_path):
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr[-3000:]
    assert "WARNING" not in built.stderr
    assert "Formatting signatures" not in built.stderr
    read = (tmp_path / "notebooks/read_a_report.html").read_text(encoding="utf-8")
    assert "4/4 layers answer to positions" in read
    assert 'src="read_a_report-1.png"' in read
    assert (tmp_path / "notebooks/read_a_report-1.png").read_bytes().startswith(b"\x89PNG")
    loaded = (
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)|<link\b(?=[^>]*stylesheet|[^>]*icon)[^>]*href=\"([^\"]+)"
    )
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for match in re.findall(loaded, page.read_text(encoding="utf-8")):
            assert "//" not in "".join(match), (page.name, match)
    assert "fonts." not in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "ALiBi" in (tmp_path / "search/search_index.js").read_text(encoding="utf-8")
