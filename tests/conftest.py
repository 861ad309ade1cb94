"""What every test relies on: no network, two threads or workers; and what the tests of the recipes share."""

import importlib
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, which reads it once
# Two threads, or one in each of the workers of `pytest -n 2`, and in what they start: the other core is the other's.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from matrix import sort_into_tiers

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

RECIPES = Path(__file__).parents[1] / "recipes"
PROGRAMS = Path(__file__).parents[1] / "hf_posenc" / "recipes"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Before `-m` is applied."""
    sort_into_tiers(items)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk():
    """Flushing is for power cuts, which no test makes; every save would wait for it. It still takes open files only.

    Processes that tests start, and kill, flush as users' do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Dynamo gives up on a code object after a few graphs, whatever model they were for: no test has those of another."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def recipes(monkeypatch, tmp_path):
    """The folder of the recipes, with a fresh accelerate and an empty cache."""
    import datasets
    from accelerate.state import AcceleratorState

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets_cache"))
    AcceleratorState._reset_state(reset_partial_state=True)
    yield RECIPES
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def recipe(recipes):
    """The module of `hf-posenc extend`."""
    return importlib.import_module("hf_posenc.recipes.extend_context")


@pytest.fixture
def trained_tokens(text):
    """Tokens of `text` that a run with seed 0 trains on, split as the recipe does.

    Documents are in an order of the seed, the last ones held out until there are 200 tokens.
    """
    tokenizer = importlib.import_module("hf_posenc.recipes.embedded").byte_tokenizer()
    documents = [[*tokenizer(part).input_ids, 256] for part in text.read_text().split("\f")]
    shuffled = list(range(12))
    random.Random(0).shuffle(shuffled)
    return [token for index in sorted(shuffled[:-1]) for token in documents[index]]


@pytest.fixture
def tiny_checkpoints(tmp_path, recipes):
    """A folder with a tiny byte-level GPT-2 (32 positions in its table) and a tiny LLaMA, `gpt2` and `llama`."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from hf_posenc.recipes.embedded import byte_tokenizer

    tokenizer = byte_tokenizer()
    shape = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "bos_token_id": 256, "eos_token_id": 256}
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **shape))
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            **shape,
        )
    )
    for name, model in (("gpt2", gpt2), ("llama", llama)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


@pytest.fixture
def text(tmp_path):
    """Twelve documents of this project's own sources, 300 bytes each, separated by form feeds."""
    source = (PROGRAMS / "training.py").read_text(encoding="utf-8").replace("\n", " ")  # ends are stripped of these
    path = tmp_path / "text.txt"
    path.write_text("\f".join(source[start : start + 300] for start in range(0, 3600, 300)), encoding="utf-8")
    return path
