"""The base that comes with the package and its text: what it holds, what it has not seen, what it computes in."""

import importlib
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc.evaluation import non_overlapping_perplexity


@pytest.fixture
def embedded(recipes):
    return importlib.import_module("hf_posenc.recipes.embedded")


class NoBfloat16(TorchDispatchMode):
    """Counts the operations inside, and fails at the first that takes or makes a tensor of bfloat16."""

    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.operations += 1
        for value in (*args, *(kwargs or {}).values(), made):
            for each in value if isinstance(value, (list, tuple)) else [value]:
                assert getattr(each, "dtype", None) is not torch.bfloat16, f"{function} in bfloat16"
        return made


def words(text, output):
    """Command line of a run of the embedded base, as short as it can be, with every stage of the default."""
    options = {
        "data": text,
        "separator": r"\f",
        "output": output,
        "train_base": "",
        "base_steps": 2,
        "lengths": 32,
        "eval_tokens": 64,
        "train_length": 48,
        "recovery_steps": 1,
        "steps": 2,
        "gradient_accumulation": 1,
        "calibrate_length": 32,
        "calibrate_windows": 12,
        "calibrate_steps": 1,
        "retrieval_trials": 1,
    }
    return [w for key, value in options.items() for w in (f"--{key.replace('_', '-')}", *str(value).split(" ")) if w]


def test_nothing_is_computed_in_bfloat16(embedded, text, tmp_path, monkeypatch):
    """Many processors have no instructions for it, and compute in it tens of times more slowly than in float32.

    All of the default path but loading, with one layer: the base is trained, swapped, calibrated, fine-tuned, measured.
    """
    recipe = importlib.import_module("hf_posenc.recipes.extend_context")
    one_run = importlib.import_module("hf_posenc.recipes.one_run")

    def first_layer(tokenizer):
        model = embedded.byte_model(tokenizer)
        model.transformer.h, model.config.n_layer = model.transformer.h[:1], 1
        return model

    monkeypatch.setattr(one_run, "byte_model", first_layer)
    monkeypatch.setattr(one_run, "sample", lambda model, tokenizer: embedded.sample(model, tokenizer, tokens=2))
    monkeypatch.setattr(importlib.import_module("hf_posenc.calibration.fitting"), "STEPS", 1)
    monkeypatch.setattr(one_run, "check_patch", lambda *_: None)  # patches and verifies once more
    with NoBfloat16() as mode:
        results = recipe.main(words(text, tmp_path / "out"))
    assert mode.operations > 1000
    assert results["calibration"]["method"] == "attention"
    assert len(results["training"]["loss"]) == 2


def test_muon_of_torch_would_be_noticed():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2)
    with NoBfloat16(), pytest.raises(AssertionError, match="in bfloat16"):
        torch.optim.Muon([weight]).step()


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
    """Whatever the seed of the split, in any version of Python: the modules are chosen by name."""
    corpus = importlib.import_module("hf_posenc.recipes.corpus")
    training, held_out = embedded.library_parts()
    assert {path.stem for path in held_out} == set(embedded.HELD_OUT)
    assert not set(training) & set(held_out)
    provenance = (embedded.FOLDER / "README.md").read_text(encoding="utf-8")
    assert ", ".join(embedded.HELD_OUT) in provenance
    files = (training[:3], held_out[:4])
    arguments = importlib.import_module("hf_posenc.recipes.one_run").Arguments(eval_tokens=3000)
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    tokenizer, measured = embedded.byte_tokenizer(), set()
    monkeypatch.setattr(corpus, "library_parts", lambda: files)

    def starts(paths):
        return {path.read_text(encoding="utf-8").strip("\n")[:200] for path in paths}

    for arguments.split_seed in range(4):
        found = corpus.read_text(arguments, tokenizer, accelerator, training_tokens=0, split_seed=arguments.split_seed)
        assert {tokenizer.decode(document.tokens[:200]) for document in found.train} == starts(files[0])
        measured |= {tokenizer.decode(document.tokens[:200]) for document in found.held_out}
        assert sum(len(document.tokens) for document in found.held_out) == 3000
    assert len(measured) > 1
    assert measured <= starts(files[1])


def test_matrices_are_made_orthogonal(embedded):
    """The singular vectors stay, in float64; the singular values come near 1."""
    torch.manual_seed(0)
    for shape in ((12, 40), (40, 12), (9, 9)):
        matrix = torch.randn(shape, dtype=torch.float64)
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        between = left.T @ embedded.orthogonalize(matrix) @ right.T
        torch.testing.assert_close(between, between.diag().diag(), rtol=0, atol=1e-9)
        assert 0.6 < between.diag().min() <= between.diag().max() < 1.3


def test_the_optimizer_of_matrices_is_muon(embedded):
    """Steps of torch's, which computes them in bfloat16: that is the tolerance."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(24, 16)) for _ in range(2)]
    with torch.no_grad():
        weights[1].copy_(weights[0])
    ours = embedded.Orthogonalized([weights[0]], lr=0.02, weight_decay=0.01)
    theirs = torch.optim.Muon([weights[1]], lr=0.02, weight_decay=0.01)
    start = weights[0].detach().clone()
    for _ in range(5):
        weights[0].grad = torch.randn(24, 16)
        weights[1].grad = weights[0].grad.clone()
        ours.step()
        theirs.step()
    moved = (weights[0] - start).norm()
    assert (weights[0] - weights[1]).norm() < 0.02 * moved


def test_where_the_base_comes_from_is_said(embedded):
    """The file beside it names its text, the license of that, the command and what came of it."""
    said = (embedded.FOLDER / "README.md").read_text(encoding="utf-8")
    for word in ("PSF License", "scripts/make_embedded_base.py --steps", "--seed", "held-out text", "torch 2."):
        assert word in said
    config = json.loads((embedded.FOLDER / "config.json").read_text())
    assert config["n_positions"] == embedded.CONTEXT == 256
    assert re.search(r"(\d\.\d+) on the held-out text", said)
