"""The documentation site: every public name is in the reference, once; it builds without a warning; nothing is loaded from elsewhere."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from hf_posenc import available_schemes
from hf_posenc.registry import scheme_class

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
    wanted = {f"{scheme_class(name).__module__}.{scheme_class(name).__name__}" for name in available_schemes()}
    elsewhere = {  # also names of hf_posenc
        "hf_posenc.calibration": {
            "calibrate",
            "choose_layers",
            "choose_pairs",
            "search_frequencies",
            "Calibration",
            "DivideAndConquer",
            "Evolution",
            "FrequencySearch",
            "LayerChoice",
            "Matching",
            "PairChoice",
        },
        "hf_posenc.families": {"Family"},
    }
    for module in (
        "",
        ".calibration",
        ".checking",
        ".families",
        ".evaluation",
        ".analysis",
        ".analysis.plots",
        ".theory",
        ".theory.plots",
    ):
        name = f"hf_posenc{module}"
        left_out = elsewhere.get(name, set()) | {"__version__"}
        wanted |= {f"{name}.{each}" for each in importlib.import_module(name).__all__ if each not in left_out}
    assert found == Counter(wanted)


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_one_title_and_sections(path):
    """A page of the site takes its title from the first line; what follows is ordered below it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert cells[0]["source"][0].startswith("# ")
    assert [len(hashes) for hashes in re.findall(r"^(#+) ", text, flags=re.MULTILINE)].count(1) == 1


def test_the_extra_of_the_site_formats_signatures():
    """Without ruff or black, mkdocstrings leaves each signature on one line, which is cut off, and says so only as information."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert any(re.match(r"(ruff|black)\b", requirement) for requirement in extras["docs"])


@pytest.fixture
def project(tmp_path):
    """A copy of what the site is made from."""
    for name in ("docs", "scripts", "hf_posenc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("recipes", "tests", "model_cards"):  # pages link to files in them
        (tmp_path / name).symlink_to(ROOT / name)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.txt"), ROOT / "mkdocs.yml", ROOT / "LICENSE"):
        shutil.copy(path, tmp_path)
    return tmp_path


@needs_mkdocs
@pytest.mark.slow
def test_it_builds_without_a_warning_and_needs_nothing_else(tmp_path):
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr[-3000:]
    assert "WARNING" not in built.stderr
    assert "Formatting signatures" not in built.stderr
    signature = re.search(
        r"patch_model</span>.*?</code>", (tmp_path / "reference/patching.html").read_text(), re.DOTALL
    )
    assert signature[0].count("\n") > 5
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


@needs_mkdocs
@pytest.mark.slow
def test_what_leads_nowhere_stops_the_build(project, tmp_path):
    page = project / "docs/speed.md"
    wrong = {
        "[a](gone.md)": "gone.md",
        "[b](limits.md#gone)": "#gone",
        "[c](../tests/gone.py)": "tests/gone.py",
        "[d](../README.md#nowhere)": "#nowhere",
        "![e](images/gone.png)": "images/gone.png",
    }
    page.write_text("\n\n".join([page.read_text(encoding="utf-8"), *wrong]) + "\n", encoding="utf-8")
    reference = project / "docs/reference/errors.md"
    reference.write_text(reference.read_text(encoding="utf-8") + "\n::: hf_posenc.Gone\n", encoding="utf-8")
    (project / "README.md").write_text("\n\n[f](docs/absent.md)\n", encoding="utf-8")

    first = build(project, tmp_path / "site")
    assert first.returncode != 0
    assert "hf_posenc.Gone" in first.stderr

    reference.unlink()
    second = build(project, tmp_path / "site")
    assert second.returncode != 0
    for words in [*wrong.values(), "absent.md"]:
        assert words in second.stderr, words
