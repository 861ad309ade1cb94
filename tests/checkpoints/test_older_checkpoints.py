"""Checkpoints that earlier versions wrote load, are what they were, and can be saved again."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import from_pretrained, inspect, verify

VERSIONS = ("0.1.0", "0.2.0.dev0")
FOLDERS = sorted(path.parent for name in VERSIONS for path in (Path(__file__).parent / name).glob("*/config.json"))
EACH = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")


@pytest.fixture(autouse=True)
def one_thread():
    """The order of sums, and with it the last bit, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def assert_as_it_was(model, folder):
    expected = safetensors.torch.load_file(folder / "logits.safetensors")
    with torch.no_grad():
        found = model(expected["tokens"]).logits
    # Bit for bit on the machine that made them; other processors round differently, by a few units in the last place.
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=1e-4)


def test_every_scheme_has_one():
    kept = {name: {each.name.split("-")[0] for each in FOLDERS if each.parent.name == name} for name in VERSIONS}
    first = {"nope", "sinusoidal", "learned", "rope", "transformer_xl", "shaw", "alibi", "da_transformer"}
    assert kept == {"0.1.0": first, "0.2.0.dev0": first | {"t5", "kerple", "cope", "mixture"}}


@pytest.mark.rows(default=20)
@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained], ids=["ours", "auto"])
@EACH
def test_it_is_what_it_was(folder, loader):
    model = loader(folder)
    assert_as_it_was(model, folder)
    assert verify(model).ok
    assert inspect(folder).version == folder.parent.name
    assert inspect(folder).problem is None


@pytest.mark.rows(default=17)
@EACH
def test_it_can_be_saved_again(folder, tmp_path):
    from_pretrained(folder).save_pretrained(tmp_path)
    assert_as_it_was(from_pretrained(tmp_path), folder)
    assert inspect(tmp_path).problem is None
    assert inspect(tmp_path).version == hf_posenc.__version__
