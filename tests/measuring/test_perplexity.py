"""Perplexity against a loop that scores one window at a time in float64, token counts included."""

import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GPT2Config, LlamaConfig

from hf_posenc.evaluation import Perplexity, non_overlapping_perplexity, sliding_window_perplexity
from hf_posenc.live import logits as forwards

# Float64 models, but transformers computes norms, rotary angles and some softmaxes in float32 whatever the model's
# dtype, and a float32 round-off (6e-8) depends on the shape it is computed in. Relative, on sums over tens of tokens.
TOLERANCE = 1e-6


def tiny(config_class=LlamaConfig, **overrides):
    shape = dict(vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    shape |= dict(intermediate_size=24, head_dim=8, max_position_embeddings=64, initializer_range=0.2)
    shape |= dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    if config_class is GPT2Config:
        shape = dict(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2)
        shape |= dict(bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**(shape | overrides))).double().train()


def text(count):
    return torch.randint(0, 61, (count,), generator=torch.Generator().manual_seed(count))


def token_nll(model, window, index):
    """-log p(window[index] | window[:index]), nothing but the definition."""
    logits = model(input_ids=window[None, :index], use_cache=False).logits[0, -1]
    return -torch.log_softmax(logits.double(), -1)[window[index]].item()


def naive_sliding(model, tokens, length, stride):
    """One token at a time: token t is read from the earliest-starting window that contains it and that no earlier one
    scored."""
    nll = 0.0
    for t in range(1, len(tokens)):
        if t < length:
            start = 0
        else:
            end = min(length + math.ceil((t - length + 1) / stride) * stride, len(tokens))
            start = end - length
        nll += token_nll(model, tokens[start:], t - start)
    return nll, len(tokens) - 1


def naive_non_overlapping(model, tokens, length):
    nll, count = 0.0, 0
    for start in range(0, len(tokens), length):
        window = tokens[start : start + length]
        for index in range(1, len(window)):
            nll += token_nll(model, window, index)
            count += 1
    return nll, count


@pytest.mark.parametrize("config_class", [LlamaConfig, GPT2Config, Gemma2Config])
@pytest.mark.parametrize(
    ("count", "length", "stride"), [(50, 16, 4), (50, 16, 15), (49, 16, 1), (33, 8, 5), (16, 16, 3), (17, 16, 8)]
)
def test_sliding_equals_one_token_at_a_time(config_class, count, length, stride):
    model = tiny(config_class)
    measured = sliding_window_perplexity(model, text(count), length=length, stride=stride, batch_size=3)
    assert model.training
    with torch.no_grad():
        nll, tokens = naive_sliding(model.eval(), text(count), length, stride)
    assert measured.tokens == tokens == count - 1
    assert measured.nll == pytest.approx(nll, rel=TOLERANCE)
    assert measured.loss == pytest.approx(nll / tokens, rel=TOLERANCE)
    assert measured.perplexity == pytest.approx(math.exp(nll / tokens), rel=TOLERANCE)


@pytest.mark.parametrize("config_class", [LlamaConfig, GPT2Config, Gemma2Config])
@pytest.mark.parametrize(("count", "length"), [(48, 16), (50, 16), (49, 16), (47, 7), (16, 16), (9, 2)])
def test_non_overlapping_equals_one_token_at_a_time(config_class, count, length):
    model = tiny(config_class)
    measured = non_overlapping_perplexity(model, text(count), length=length)
    with torch.no_grad():
        nll, tokens = naive_non_overlapping(model.eval(), text(count), length)
    assert measured.tokens == tokens == count - math.ceil(count / length)
    assert measured.nll == pytest.approx(nll, rel=TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_batching_and_logit_pieces_change_nothing(monkeypatch, batch_size):
    model, tokens = tiny(), text(60)
    expected = sliding_window_perplexity(model, tokens, length=16, stride=4, batch_size=1)
    monkeypatch.setattr(forwards, "LOGIT_ROWS", 5)
    measured = sliding_window_perplexity(model, tokens, length=16, stride=4, batch_size=batch_size)
    assert measured.tokens == expected.tokens
    assert measured.nll == pytest.approx(expected.nll, rel=TOLERANCE)


@pytest.mark.parametrize(("config_class", "pieces"), [(LlamaConfig, True), (GPT2Config, True), (Gemma2Config, False)])
def test_logits_of_a_plain_head_are_never_whole(config_class, pieces):
    """Gemma 2 caps its logits after the head: there the model's own forward has to do it."""
    # A cap the tiny logits feel: at the default of 30 the trial would rightly find no difference worth keeping.
    model = tiny(config_class, **({"final_logit_softcapping": 1.0} if config_class is Gemma2Config else {}))
    rows = []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(output.shape[:-1].numel())
    )
    monkey_rows, forwards.LOGIT_ROWS = forwards.LOGIT_ROWS, 10
    try:
        non_overlapping_perplexity(model, text(60), length=60)
    finally:
        forwards.LOGIT_ROWS = monkey_rows
    assert (max(rows) <= 10) == pieces


def test_modes_come_back_module_by_module():
    model = tiny()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    non_overlapping_perplexity(model, text(20), length=10)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(length=1, stride=1), "at least 2"),
        (dict(length=16, stride=0), "between 1 and length - 1 = 15, not 0"),
        (dict(length=16, stride=16), "between 1 and length - 1 = 15, not 16"),
        (dict(length=21, stride=4), "20 tokens, fewer than the 21"),
        (dict(length=16, stride=4, batch_size=0), "batch_size"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sliding_window_perplexity(tiny(), text(20), **arguments)


def test_a_batch_of_texts_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 10\)"):
        non_overlapping_perplexity(tiny(), text(20).view(2, 10), length=5)


DATA = Path(os.environ.get("HF_POSENC_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA / "models/stories260K").is_dir(),
    reason=f"no {DATA}/models/stories260K; set HF_POSENC_TEST_DATA to a folder that has it",
)
@pytest.mark.parametrize(("length", "published"), [(512, 4.525), (1024, 4.672), (2048, 5.248)])
def test_stories260k_reproduces_its_published_perplexity(length, published):
    """Stories with `<s>` in front, concatenated, the first 80,000 tokens in fresh windows: within 1 % of the figures
    that came with them."""
    model = AutoModelForCausalLM.from_pretrained(DATA / "models/stories260K")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "models/stories260K")
    stories = (DATA / "text/tinystories/tinystories_clean.txt").read_text(encoding="utf-8").strip().split("\n\n")
    tokens = torch.tensor([token for story in stories for token in tokenizer(story).input_ids])[:80_000]
    measured = non_overlapping_perplexity(model, tokens, length=length)
    assert measured.perplexity == pytest.approx(published, rel=0.01)


def test_a_loss_that_is_no_number_has_no_perplexity():
    """A broken model must not look like one that predicts badly."""
    for nll, expected in ((math.nan, math.nan), (3000.0, math.inf), (3.0, math.e)):
        found = Perplexity(method="sliding", length=4, stride=4, windows=1, tokens=3, nll=nll)
        assert found.perplexity == pytest.approx(expected, nan_ok=True)
