"""The base that comes with the package and its text: what it holds, what it has not seen, what it computes in."""

import importlib

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.evaluation import non_overlapping_perplexity


@pytest.fixture
def embedded(recipes):
    return importlib.import_module("hf_posenc.recipes.embedded")


def test_the_base_that_is_shipped(embedded):
    """Small, half as wide on disk as when it is loaded, and trained; its tokenizer is the one that code makes."""
    assert sum(path.stat().st_size for path in embedded.FOLDER.iterdir()) < 2_000_000
    stored = load_file(embedded.FOLDER / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.float16}
    model = embedded.trained_base()
    as_others_load_it = AutoModelForCausalLM.from_pretrained(embedded.FOLDER)
    for name, weight in as_others_load_it.named_parameters():
        assert weight.dtype is torch.float32
        assert torch.equal(weight, model.get_parameter(name))
    text = "for name in sorted(names):\n    print(f'{name} äß')\n"
    tokenizer = AutoTokenizer.from_pretrained(embedded.FOLDER)
    assert tokenizer(text).input_ids == embedded.byte_tokenizer()(text).input_ids
    (module,) = (path for path in embedded.library_parts()[1] if path.stem == "heapq")
    ids = torch.tensor(tokenizer(module.read_text(encoding="utf-8")[:2048]).input_ids)
    assert non_overlapping_perplexity(model, ids, length=256).loss < 2  # of the ln 257 = 5.5 of an untrained one


def test_what_the_base_saw_is_not_measured(embedded, monkeypatch):
    """In any version of Python: the modules are chosen by name."""
    corpus = importlib.import_module("hf_posenc.recipes.corpus")
    training, held_out = embedded.library_parts()
    assert {path.stem for path in held_out} == set(embedded.HELD_OUT)
    assert not set(training) & set(held_out)
    provenance = (embedded.FOLDER / "README.md").read_text(encoding="utf-8")
    assert ", ".join(embedded.HELD_OUT) in provenance
    files = (training[:3], held_out[:4])
    arguments = importlib.import_module("hf_posenc.recipes.one_run").Arguments(eval_tokens=3000)
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    tokenizer = embedded.byte_tokenizer()
    monkeypatch.setattr(corpus, "library_parts", lambda: files)

    def starts(paths):
        return {path.read_text(encoding="utf-8").strip("\n")[:200] for path in paths}

    found = corpus.read_text(arguments, tokenizer, accelerator, training_tokens=0)
    assert {tokenizer.decode(document.tokens[:200]) for document in found.train} == starts(files[0])
    assert {tokenizer.decode(document.tokens[:200]) for document in found.held_out} <= starts(files[1])
    assert sum(len(document.tokens) for document in found.held_out) == 3000
