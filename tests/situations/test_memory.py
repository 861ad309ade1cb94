"""Segments with a memory in transformers' cache, against one long forward whose mask shows each token its segment and its memory."""

from functools import partial

import pytest
import torch
from situations import EMBEDDING_SCHEMES
from transformers import Cache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_posenc import available_schemes, patch_model

VOCABULARY = 61
RELATIVE = tuple(scheme for scheme in available_schemes() if scheme not in EMBEDDING_SCHEMES)
# Float64 models. Rotary angles, and what turns by them, are float32 in transformers whatever the model's dtype.
TOLERANCE = {"rope": 1e-5}
EXACT = 1e-10


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
    cache = Cache(layer_class_to_replicate=partial(DynamicSlidingWindowLayer, memory + 1))
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
