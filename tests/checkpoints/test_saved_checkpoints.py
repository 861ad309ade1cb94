"""Checkpoints that an earlier commit wrote load, are what they were, and can be saved again."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import from_pretrained, inspect, verify

FOLDERS = sorted(path.parent for path in (Path(__file__).parent / "saved").glob("*/config.json"))


def assert_as_it_was(model, folder):
    expected = safetensors.torch.load_file(folder / "logits.safetensors")
    with torch.no_grad():
        found = model(expected["tokens"]).logits
    # Other processors and numbers of threads round differently, by a few units in the last place.
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_it_is_what_it_was(folder, tmp_path):
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = loader(folder)
        assert_as_it_was(model, folder)
    assert verify(model).ok
    assert inspect(folder).problem is None
    model.save_pretrained(tmp_path)
    assert_as_it_was(from_pretrained(tmp_path), folder)
    assert inspect(tmp_path).problem is None
