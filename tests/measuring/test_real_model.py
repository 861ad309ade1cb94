"""A really pretrained LLaMA (stories260K, trained at 512 tokens) patched by every scheme: it generates, trains and is restored.

The checkpoint is not part of the project. Name a folder that holds `models/stories260K` and `text/tinystories/tinystories_clean.txt`
in HF_POSENC_TEST_DATA to run this file; a folder `shared/data` beside the checkout is found by itself.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import available_schemes, patch_model, unpatch_model, verify
from hf_posenc.evaluation import non_overlapping_perplexity

DATA = Path(os.environ.get("HF_POSENC_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
MODEL, TEXT = DATA / "models/stories260K", DATA / "text/tinystories/tinystories_clean.txt"

pytestmark = pytest.mark.skipif(
    not (MODEL.is_dir() and TEXT.is_file()), reason="no stories260K: set HF_POSENC_TEST_DATA to a folder that holds it"
)


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


@pytest.fixture(scope="module")
def all_tokens():
    """All stories, each with `<s>` in front, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stories = TEXT.read_text().strip().split("\n\n")
    return torch.tensor([token for story in tokenizer(stories)["input_ids"] for token in story])


@pytest.fixture(scope="module")
def tokens(all_tokens):
    return all_tokens[:6000]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "published"), [(512, 4.525), (2048, 5.248)])
def test_the_unpatched_model_has_the_perplexity_that_was_published(model, all_tokens, length, published):
    measured = non_overlapping_perplexity(model, all_tokens[: 80_000 // length * length], length=length)
    assert measured.perplexity == pytest.approx(published, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", available_schemes())
def test_generates_trains_and_is_restored(model, tokens, scheme):
    long = tokens[:640][None]  # 128 tokens past the trained context
    with torch.no_grad():
        stock = model(long[:, :512]).logits
    patch_model(model, scheme, seed=0, **({"num_positions": 1024} if scheme == "learned" else {}))
    assert verify(model).ok
    with torch.no_grad():
        assert torch.isfinite(model(long).logits).all()
        text = model.generate(long[:, :600], max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert text.shape == (1, 624)

    stock_names = {name for name, _ in AutoModelForCausalLM.from_pretrained(MODEL).named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = tokens[: 4 * 2 * 256].view(4, 2, 256)
    losses = []
    for step in range(12):
        batch = batches[step % 4]
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if name not in stock_names)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-4:]) < sum(losses[:4])

    weights = {name: p.detach().clone() for name, p in model.named_parameters() if name in stock_names}
    unpatch_model(model)
    assert {name for name, _ in model.named_parameters()} == stock_names
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    fresh = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        restored = model(long[:, :512]).logits
        assert torch.equal(restored, fresh(long[:, :512]).logits)
    assert not torch.equal(restored, stock)  # it was trained
