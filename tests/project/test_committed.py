"""What is committed is what the scripts make: the gallery in docs/images, the sweeps, the model cards."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWEEPS = sorted(path.parent for path in (ROOT / "model_cards/results").glob("*/summary.json"))
CARDS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/README.md"))


@pytest.mark.slow
def test_the_gallery_is_current(tmp_path, monkeypatch):
    """The same pictures, up to what another version of matplotlib or another processor rounds differently."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")
    specification = importlib.util.spec_from_file_location("plot_schemes", ROOT / "scripts/plot_schemes.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["plot_schemes.py", str(tmp_path)])
    script.main()
    assert_same_pictures(ROOT / "docs/images", tmp_path, "run python scripts/plot_schemes.py docs/images")


@pytest.mark.slow
@pytest.mark.parametrize("folder", SWEEPS, ids=lambda folder: folder.name)
def test_sweeps_are_current(recipes, folder, tmp_path):
    """Tables and figures are those of the committed runs."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")
    (tmp_path / "runs").symlink_to(folder / "runs")
    title = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["title"]
    importlib.import_module("hf_posenc.recipes.sweep_report").summarize(tmp_path, title)
    for name in ("summary.json", "summary.md"):
        assert (tmp_path / name).read_text(encoding="utf-8") == (folder / name).read_text(encoding="utf-8")
    assert_same_pictures(folder, tmp_path, f"run python recipes/sweep.py {folder}")


def assert_same_pictures(committed, made, remedy):
    from matplotlib.image import imread

    names = sorted(path.name for path in committed.glob("*.png"))
    assert names == sorted(path.name for path in made.glob("*.png"))
    for name in names:
        old, new = imread(committed / name), imread(made / name)
        assert old.shape == new.shape, f"{remedy} ({name})"
        assert abs(old - new).mean() < 1e-3, f"{remedy} ({name})"


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_cards_are_current(recipes, folder):
    """Each says what the committed run that it names measured, and nothing else."""
    card = importlib.import_module("hf_posenc.recipes.model_card")
    source = json.loads((folder / "source.json").read_text(encoding="utf-8"))
    results = json.loads((ROOT / "model_cards" / source["results"]).read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == card.card(results, source["repository"])
