"""What is committed is what the scripts make: the gallery in docs/images, the model cards."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CARDS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/README.md"))


@pytest.mark.slow
def test_the_gallery_is_current(tmp_path, monkeypatch):
    """The same pictures, up to what another version of matplotlib or another processor rounds differently."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")
    from matplotlib.image import imread

    specification = importlib.util.spec_from_file_location("plot_schemes", ROOT / "scripts/plot_schemes.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["plot_schemes.py", str(tmp_path)])
    script.main()
    committed = sorted(path.name for path in (ROOT / "docs/images").glob("*.png"))
    assert committed == sorted(path.name for path in tmp_path.iterdir())
    for name in committed:
        old, new = imread(ROOT / "docs/images" / name), imread(tmp_path / name)
        assert old.shape == new.shape, f"run python scripts/plot_schemes.py docs/images ({name})"
        assert abs(old - new).mean() < 1e-3, f"run python scripts/plot_schemes.py docs/images ({name})"


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_cards_are_current(recipes, folder):
    """Each says what the committed run that it names measured, and nothing else."""
    card = importlib.import_module("hf_posenc.recipes.card")
    source = json.loads((folder / "source.json").read_text(encoding="utf-8"))
    results = json.loads((ROOT / "model_cards" / source["results"]).read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == card.card(results, source["repository"])
