"""What is committed is what the scripts make: the gallery in docs/images, the model cards."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARDS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/README.md"))


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_cards_are_current(recipes, folder):
    """Each says what the run beside it measured, and nothing else."""
    card = importlib.import_module("hf_posenc.recipes.model_card")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert (folder / "README.md").read_text(encoding="utf-8") == card.card(results)
