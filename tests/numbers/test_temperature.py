"""`temperature` beside other schemes computes what its formulas say, and what Llama 4 computes."""

import copy
import math

import pytest
import torch
from decoders import decoder
from families import tiny, tokens
from literal_attention import BESIDE, assert_same_gradients, attend_literally, peer_beside, products
from situations import distance
from transformers import DynamicCache, Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

import hf_posenc
from hf_posenc import UnsupportedModelError, patch_model, schemes_of, unpatch_model, verify
from hf_posenc.schemes import Nope, Rope, Temperature

LENGTH = 6
STRENGTHS = (0.3, 1.1, 0.7, 2.0)


def literal_factor(kind, strength, length, n):
    """The factor of a query that sees n tokens, itself included."""
    return {
        "constant": strength,
        "log_n": max(1.0, 1 + strength * (math.log(n) / math.log(length) - 1)),
        "llama4": 1 + strength * math.log(1 + n // length),
        "scalable": strength * math.log(n),
    }[kind]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", ["constant", "log_n", "llama4", "scalable"])
def test_logits_and_gradients_are_those_of_the_formula(kind, beside, family):
    ids, size = tokens(2, 17), 17
    model = tiny(family).double()
    schemes = [
        *BESIDE[beside](),
        Temperature(kind, strength=STRENGTHS, length=None if kind == "constant" else LENGTH, trainable=True),
    ]
    patch_model(model, schemes)
    assert verify(model).ok

    peer, slopes = peer_beside(beside, family)
    strength = torch.tensor(STRENGTHS, dtype=torch.float64, requires_grad=True)
    factors = [[literal_factor(kind, s, LENGTH, i + 1) for i in range(size)] for s in strength]

    def scores(module, query, key, h, i, scaling):
        return factors[h][i] * scaling * products(query, key, h, i)

    attend_literally(peer, scores, slopes)
    actual, expected = model(ids, use_cache=False).logits, peer(ids, use_cache=False).logits
    assert distance(actual, expected) < 1e-9
    without = patch_model(tiny(family).double(), BESIDE[beside]()) if BESIDE[beside]() else tiny(family).double()
    assert distance(without(ids, use_cache=False).logits, expected) > 1e-3, "without temperature it is the same"

    assert_same_gradients(model, actual, peer, expected)
    total = sum(p.grad for n, p in model.named_parameters() if n.endswith("temperature.strength"))
    assert distance(total, strength.grad) < 1e-8


def test_the_factor_is_llama_4s():
    """A Llama 4 without its temperature, and ours in the layers that it leaves unrotated."""
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_local_experts": 2, "no_rope_layers": [1, 0, 1, 0], "initializer_range": 0.2, "pad_token_id": 0,
        "attention_chunk_size": 64, "floor_scale": 3, "attn_scale": 0.8, "moe_layers": [],
    }  # fmt: skip
    torch.manual_seed(0)
    peer = Llama4ForCausalLM(Llama4TextConfig(**sizes, attn_temperature_tuning=True)).eval()
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, attn_temperature_tuning=False)).eval()
    model.load_state_dict(peer.state_dict())
    ids = tokens(2, 23)
    expected = peer(ids, use_cache=False).logits
    assert distance(model(ids, use_cache=False).logits, expected) > 1e-3
    temperature = Temperature("llama4", strength=0.8, length=3, layers=[1, 3])
    patch_model(model, temperature)
    assert distance(model(ids, use_cache=False).logits, expected) < 1e-5
    unpatch_model(model)
    with pytest.raises(UnsupportedModelError, match="itself multiplies the queries of layer 1, 3"):
        patch_model(peer, temperature)
    patch_model(peer, [Nope(), Temperature("llama4", strength=0.8, length=3)])  # nope silences Llama 4's own factor
    assert verify(peer).ok


def test_a_base_with_a_factor_of_its_own_is_refused():
    with pytest.raises(UnsupportedModelError, match="ministral3 itself multiplies the queries of layer 0, 1"):
        patch_model(decoder("ministral3"), "temperature")


@pytest.mark.parametrize("kind", ["log_n", "llama4"])
def test_nothing_changes_below_the_length(kind):
    model, ids = tiny("llama").double(), tokens(2, 20)
    before = model(ids).logits
    patch_model(model, Temperature(kind, length=10, strength=3.0))
    after = model(ids).logits
    assert distance(after[:, :9], before[:, :9]) < 1e-12
    assert distance(after[:, 10:], before[:, 10:]) > 1e-3


def test_none_is_filled_in_from_the_base_and_written_down(tmp_path):
    model = patch_model(tiny("llama"), ["rope", "temperature"])
    fitted = schemes_of(model)[1]
    assert (fitted.length, fitted.strength, fitted.trainable) == (64, 1.0, False)
    scalable = schemes_of(patch_model(tiny("llama"), Temperature("scalable")))[0]
    assert (scalable.strength, scalable.trainable) == (1 / math.log(64), True)
    model.save_pretrained(tmp_path)
    assert schemes_of(hf_posenc.from_pretrained(tmp_path)) == schemes_of(model)


def test_a_mapping_is_a_list_with_layers():
    by_hand = [Nope(layers="1::2"), Rope(layers=[0]), Temperature(layers=[0], length=5)]
    model = patch_model(tiny("llama"), {"1::2": "nope", "_default": [Rope(), Temperature(length=5)]})
    assert schemes_of(model) == schemes_of(patch_model(tiny("llama"), by_hand))
    assert schemes_of(patch_model(tiny("llama"), {0: "nope"}))[0].layers == (0,)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_positions_of_queries_count_what_is_cached_and_not_what_is_padding(cache):
    model = patch_model(tiny("llama"), [Nope(), Temperature("log_n", length=3)])
    model.generation_config.eos_token_id = None
    ids = tokens(2, 8)
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
    arguments = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    generated = model.generate(padded, attention_mask=mask, **arguments)[:, 5:]
    for n in range(8, 17):
        assert model(generated[:, :n], use_cache=False).logits[:, -1].argmax(-1).equal(generated[:, n])
    past = DynamicCache(config=model.config)
    chunks = [model(part, past_key_values=past).logits for part in generated.split(4, 1)]
    assert distance(torch.cat(chunks, 1), model(generated, use_cache=False).logits) < 1e-5


def test_a_copy_without_the_module_is_noticed():
    model = patch_model(tiny("llama"), [Rope(), Temperature(length=4)])
    broken = copy.deepcopy(model)
    del broken.model.layers[1].self_attn.posenc_additions
    with pytest.raises(UnsupportedModelError, match="layer 1"):
        broken(tokens())
