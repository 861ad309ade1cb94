"""Segments with memory against one long forward whose mask shows each token its segment and its memory, in every layer."""

import functools

import decoders
import pytest
import torch
from situations import EMBEDDING_SCHEMES
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_posenc import available_schemes, patch_model
from hf_posenc.core.errors import UnsupportedModelError
from hf_posenc.core.registry import family_for, supported_model_types
from hf_posenc.evaluation import measure_recurrence
from hf_posenc.evaluation.recurrence import check_memory, memory_cache
from hf_posenc.schemes.t5 import T5

VOCABULARY = 61
RELATIVE = tuple(scheme for scheme in available_schemes() if scheme not in EMBEDDING_SCHEMES)
# Float64 models. Rotary angles, and what turns by them, are float32 in transformers whatever the model's dtype.
TOLERANCE = {"rope": 1e-5}
EXACT = 1e-10
FLOAT32 = 1e-5


def make_model(scheme, layers=2, dtype=torch.float64, cls=LlamaForCausalLM, config=LlamaConfig, **more):
    shape = dict(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2)
    shape |= dict(num_key_value_heads=1, intermediate_size=24, head_dim=8, max_position_embeddings=64)
    shape |= dict(initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    model = cls(config(**(shape | more))).to(dtype).eval()
    if scheme is not None:
        patch_model(model, scheme, seed=0)
        with torch.no_grad():  # what a scheme starts from may be flat
            for name, parameter in model.named_parameters():
                if "posenc" in name:
                    parameter.add_(0.3 * torch.rand_like(parameter))
    return model


def make_tokens(count, rows=1, seed=1):
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model, tokens, segment, memory):
    cache = memory_cache(memory)
    parts = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in tokens.split(segment, 1)]
    return torch.cat(parts, 1)


@torch.no_grad()
def long_forward(model, tokens, segment, memory):
    """The definition in one forward: keys are made of hidden states that were themselves made with their memory."""
    index = torch.arange(tokens.shape[1])
    start = index // segment * segment
    seen = (index <= index[:, None]) & (index >= start[:, None] - memory)
    mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    return model(input_ids=tokens, attention_mask=mask[None, None], use_cache=False).logits


def worst(found, expected):
    return ((found - expected).abs().max() / expected.std()).item()


@pytest.mark.parametrize("scheme", RELATIVE)
@pytest.mark.parametrize(("segment", "memory"), [(6, 8), (6, 3)])
def test_reading_with_memory_is_one_long_forward_with_its_mask(scheme, segment, memory):
    model, tokens = make_model(scheme, layers=3), make_tokens(26, rows=2)
    expected = long_forward(model, tokens, segment, memory)
    assert worst(read(model, tokens, segment, memory), expected) < TOLERANCE.get(scheme, EXACT)
    assert worst(read(model, tokens, segment, memory + 1), expected) > 1e-3  # not one token more, nor one less
    with torch.no_grad():
        assert worst(model(input_ids=tokens).logits, expected) > 1e-3


def test_a_sliding_window_of_the_model_still_holds():
    """A window of 5 in each layer: with a longer memory, nothing but the window limits what is seen."""
    more = dict(cls=MistralForCausalLM, config=MistralConfig, sliding_window=5)
    tokens = make_tokens(30)
    for scheme in (None, "kerple"):
        model = make_model(scheme, **more)
        with torch.no_grad():
            whole = model(input_ids=tokens).logits
        assert worst(read(model, tokens, 6, 9), whole) < TOLERANCE["rope"]
        assert worst(read(model, tokens, 6, 2), whole) > 1e-3


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("memory", [0, 5])
def test_what_is_measured(memory, batch_size):
    """Documents of several lengths side by side: one ends with a segment, one within, one before the second."""
    model, segment = make_model("t5").train(), 8
    documents = [make_tokens(count, seed=count)[0] for count in (17, 1, 30, 5, 25, 2)]
    found = measure_recurrence(model, documents, segment=segment, memory=memory, batch_size=batch_size)
    assert model.training
    model.eval()
    nll = sum(  # each document in one forward under the mask that `long_forward` writes
        cross_entropy(long_forward(model, each[None], segment, memory)[0, :-1], each[1:], reduction="sum").item()
        for each in documents
        if len(each) > 1
    )
    assert found.tokens == sum(len(each) - 1 for each in documents)
    assert found.nll == pytest.approx(nll, rel=EXACT)
    assert (found.length, found.windows) == (memory + segment, 2 + 4 + 1 + 3 + 1)
    assert found.bits_per_byte([9] * 6) == pytest.approx(nll / 0.6931471805599453 / 54, rel=EXACT)


def refused(words):
    return pytest.raises(UnsupportedModelError, match=words)


@pytest.mark.parametrize("scheme", EMBEDDING_SCHEMES)
def test_position_vectors_are_refused(scheme):
    model = make_model(None)
    patch_model(model, scheme)
    with refused("position vectors"):
        measure_recurrence(model, make_tokens(20), segment=8, memory=4)


@pytest.mark.parametrize("scheme", [None, "rope"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_by_length_are_refused(kind, scheme):
    scaling = {"rope_type": kind, "factor": 2.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    model = make_model(None, **({"rope_parameters": {"rope_theta": 1e4, **scaling}} if scheme is None else {}))
    if scheme is not None:
        patch_model(model, "rope", scaling=scaling)
    with refused(f"depend on the length.*{kind}"):
        check_memory(model)


def test_frequencies_that_nothing_reads_are_not_refused():
    model = make_model(None, rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0})
    patch_model(model, [T5(layers="1::2")])
    with refused("depend on the length"):  # the other layer turns by them
        check_memory(model)
    check_memory(patch_model(make_model(None, rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "t5"))


def test_a_model_that_keeps_no_cache_is_refused(monkeypatch):
    model = make_model("alibi")
    forward = model.model.forward
    without = functools.wraps(forward)(lambda *args, past_key_values=None, **kwargs: forward(*args, **kwargs))
    monkeypatch.setattr(model.model, "forward", without)
    with refused("does not store its keys"):
        measure_recurrence(model, make_tokens(20), segment=8, memory=4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"segment": 0, "memory": 1}, "segment must be at least 1, not 0"),
        ({"segment": 4, "memory": -1}, "memory must be at least 0, not -1"),
    ],
)
def test_wrong_values(wrong, words):
    with pytest.raises(ValueError, match=words):
        measure_recurrence(make_model("alibi", layers=1), make_tokens(20), **wrong)


REFUSED = {  # stock models; a scheme changes the first three
    "position vectors": {"biogpt", "gpt2", "gpt_bigcode", "opt"},
    "attention interface": {
        "bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "openai-gpt", "xglm",
    },
    "grows with the position": {"llama4_text", "ministral3", "mistral4"},
    "something else than keys": {
        "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3",
        "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in supported_model_types() if decoders.has_head(t)])
def test_every_decoder_reads_with_memory_or_says_why_not(model_type):
    """Two layers in float32; with a memory for all there is, one forward; with less, one with the mask written out."""
    tokens = torch.randint(3, 97, (1, 60), generator=torch.Generator().manual_seed(0))
    model = decoders.decoder(model_type).eval()
    reason = next((words for words, types in REFUSED.items() if model_type in types), None)
    if reason is not None:
        with refused(reason):
            check_memory(model)
    else:
        assert worst(read(model, tokens, 6, 8), long_forward(model, tokens, 6, 8)) < 1e-4
    patch_model(model, "shaw", seed=0)
    if reason == "something else than keys":
        with refused(reason):
            check_memory(model)
        return
    if family_for(model_type).names.attention_layer_index is None:
        with refused("has no cache"):
            check_memory(model)
        return
    check_memory(model)
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
    assert worst(read(model, tokens, 6, 60), whole) < 1e-4
    cut = read(model, tokens, 6, 12)
    assert worst(cut[:, :18], whole[:, :18]) < 1e-4
    assert worst(cut[:, 18:], whole[:, 18:]) > 1e-3
