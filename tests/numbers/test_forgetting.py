"""`forgetting` beside other positions computes the paper's formula, whatever keeps its gates: no cache, or any kind."""

import copy
import math

import pytest
import torch
from decoders import decoder
from families import tiny, tokens
from literal_attention import BESIDE, assert_same_gradients, attend_literally, peer_beside, products
from situations import distance, randomize
from torch.nn import functional as F
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import hf_posenc
from hf_posenc import UnsupportedModelError, patch_model, schemes_of, unpatch_model, verify
from hf_posenc.engines import dispatch
from hf_posenc.schemes import Alibi, Forgetting, Nope, Rope


def attentions_of(model):
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")]


def literal(peer, weights, biases, **options):
    """Let a model attend literally, with gates of the hidden states that enter each attention."""
    gates = {}  # layer -> gates (B, T, H), not their logarithms

    def note(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        index = module.layer_idx
        gates[index] = 1 / (1 + torch.exp(-(hidden @ weights[index].T + biases[index])))

    for attention in attentions_of(peer):
        attention.register_forward_pre_hook(note, with_kwargs=True)

    def scores(module, query, key, h, i, scaling):
        forget = gates[module.layer_idx][..., h]
        kept = [
            math.prod((forget[:, t] for t in range(j + 1, i + 1)), start=torch.ones_like(forget[:, 0]))
            for j in range(i + 1)
        ]
        return products(query, key, h, i) * scaling + torch.stack(kept, -1).log()

    return attend_literally(peer, scores, **options)


def gate_parameters(model):
    """Copies of the parameters of the gates of each layer."""
    pairs = [each.posenc_additions.forgetting.tokens for each in attentions_of(model)]
    copied = [[p.detach().clone().requires_grad_() for p in (pair.weight, pair.bias)] for pair in pairs]
    return [weight for weight, _ in copied], [bias for _, bias in copied]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("beside", BESIDE)
def test_logits_and_gradients_are_those_of_the_formula(beside, family):
    ids = tokens(2, 13)
    model = randomize(patch_model(tiny(family).double(), [*BESIDE[beside](), Forgetting()]))
    assert verify(model).ok
    weights, biases = gate_parameters(model)
    peer, slopes = peer_beside(beside, family)
    literal(peer, weights, biases, slopes=slopes)

    actual, expected = model(ids, use_cache=False).logits, peer(ids, use_cache=False).logits
    assert distance(actual, expected) < 1e-9
    without = patch_model(tiny(family).double(), BESIDE[beside]()) if BESIDE[beside]() else tiny(family).double()
    assert distance(without(ids, use_cache=False).logits, expected) > 1e-3, "without gates it is the same"

    assert_same_gradients(model, actual, peer, expected)
    for attention, weight, bias in zip(attentions_of(model), weights, biases, strict=True):
        tokens_module = attention.posenc_additions.forgetting.tokens
        assert distance(tokens_module.weight.grad, weight.grad) < 1e-8
        assert distance(tokens_module.bias.grad, bias.grad) < 1e-8


def test_beside_sinks_the_querys_own_gates_count():
    """A sink has no gate, so the part of the bias that all keys share does not cancel."""
    model = randomize(patch_model(decoder("gpt_oss"), [Nope(), Forgetting()]))
    peer = literal(patch_model(decoder("gpt_oss"), "nope"), *gate_parameters(model), sinks=True)
    ids = tokens(2, 7)  # within the window
    assert distance(model(ids, use_cache=False).logits, peer(ids, use_cache=False).logits) < 1e-5


def test_the_bias_is_a_difference_of_running_sums():
    """The other usual way to write it, as in x-transformers: c_i - c_j with c the running sum of log gates."""
    model = randomize(patch_model(tiny("llama"), [Nope(), Forgetting()]))
    biases = []

    def record(call, wanted="auto", attend=dispatch.attend):
        biases.append((call.widened().gate_bias(), call.log_gates))
        return attend(call, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "attend", record)
        model(tokens(2, 30))
    assert len(biases) == 2
    for bias, log_gates in biases:
        sums = log_gates.double().cumsum(-1)
        expected = (sums[..., :, None] - sums[..., None, :]).tril()
        torch.testing.assert_close(bias.tril().double(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("engine", ["sdpa", "chunked", "reference"])
def test_long_sums_keep_the_digits_of_near_keys(engine):
    """Float32 beside float64 on 600 tokens whose gates forget almost everything; the sums reach hundreds."""
    model = patch_model(tiny("llama"), [Nope(), Forgetting(bias=-3.0)], attention=engine)
    for attention in attentions_of(model):
        torch.nn.init.normal_(attention.posenc_additions.forgetting.tokens.weight, std=0.5)
    exact = copy.deepcopy(model).double()
    ids = tokens(1, 600)
    with torch.no_grad():
        assert distance(model(ids).logits, exact(ids).logits) < 1e-4


def test_the_engine_is_sdpas_wherever_it_is_without_gates():
    chosen = []

    def record(call, wanted="auto", attend=dispatch.attend):
        chosen.append(dispatch.choose(wanted, call).engine)
        return attend(call, wanted)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dispatch, "attend", record)
        patch_model(tiny("llama"), "forgetting")(tokens(1, 300))
        patch_model(tiny("llama"), [Alibi(), Forgetting()])(tokens(1, 600))
    assert chosen == ["sdpa", "sdpa", "chunked", "chunked"]


def test_the_start_is_nearly_neutral():
    """No score moves by more than 0.0067 per token of distance, as the docstring says."""
    model = patch_model(tiny("llama"), "forgetting")
    start = attentions_of(model)[0].posenc_additions.forgetting.tokens
    hidden = torch.randn(2, 5, 32)
    gates = start(hidden)
    assert gates.shape == (2, 4, 5)
    assert -0.0068 < gates.min() <= gates.max() < -0.0067


# ------------------------------------------------------------------------------------------------------------- caches


def generating(family="llama", schemes=None, **sizes):
    model = tiny(family, **sizes)
    model.generation_config.eos_token_id = None
    return randomize(patch_model(model, schemes or [Rope(rope_theta=50.0), Forgetting()]))


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "without-config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=40),
}
SIZES = {
    "llama": {},
    "gpt_neox": {},
    "gpt2": {},
    "mistral": {"sliding_window": 6},
    "gemma3": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", SIZES)
def test_chunks_with_a_cache_are_the_whole(family, kind, dtype):
    """Also sliding caches, static or not, whose first keys are gone in the last chunks."""
    model = generating(family, [Forgetting()], **SIZES[family]).to(dtype)
    ids, cache = tokens(2, 25), CACHES[kind](model)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 4, 1, 1, 1, 10], 1)]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    assert distance(torch.cat(parts, 1), whole) < tolerance


def test_a_cache_in_bfloat16_keeps_the_digits_of_float32():
    """Two channels hold a number: 1000 gates of 0.9933 are off by less than a thousandth, not by a hundredth."""
    from hf_posenc.upstream.token_numbers import join, split

    numbers = torch.randn(2, 4, 9, 3, generator=torch.Generator().manual_seed(0))
    for dtype, tolerance in (
        (torch.float32, 0.0),
        (torch.float64, 0.0),
        (torch.bfloat16, 2**-16),
        (torch.float16, 2**-19),
    ):
        key = torch.randn(2, 2, 9, 8).to(dtype)
        joined = join(key, numbers)
        assert joined.dtype == dtype
        back, read = split(joined, 8, 4, 3)
        assert back.equal(key)
        torch.testing.assert_close(read, numbers.to(read.dtype), atol=1e-6 if tolerance else 0, rtol=tolerance)
        assert split(joined, 7, 4, 3) is None


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"num_beams": 2, "cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generation_is_that_without_a_cache(family, how):
    model, ids = generating(family, [Forgetting()]), tokens(1 if "prompt_lookup_num_tokens" in how else 2, 9)
    beams = {"num_beams": how.get("num_beams", 1), "do_sample": False, "max_new_tokens": 12}
    assert model.generate(ids, **{**beams, **how}).equal(model.generate(ids, use_cache=False, **beams))


def test_an_assistant_takes_tokens_back():
    model, assistant, ids = generating(), tiny("llama"), tokens(1, 9)
    arguments = {"max_new_tokens": 12, "do_sample": False}
    assert model.generate(ids, assistant_model=assistant, **arguments).equal(model.generate(ids, **arguments))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_has_no_gate(cache):
    model, ids = generating(schemes=[Nope(), Forgetting()]), tokens(2, 8)
    mask = torch.ones_like(ids)
    left = {"input_ids": F.pad(ids, (5, 0)), "attention_mask": F.pad(mask, (5, 0))}
    arguments = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    assert model.generate(**left, **arguments)[:, 5:].equal(model.generate(ids, attention_mask=mask, **arguments))
    logits = model(ids).logits
    gap = torch.cat([ids[:, :3], ids[:, :2], ids[:, 3:]], 1), torch.tensor([[1] * 3 + [0] * 2 + [1] * 5] * 2)
    inside = model(gap[0], attention_mask=gap[1], use_cache=False).logits
    assert distance(torch.cat([inside[:, :3], inside[:, 5:]], 1), logits) < 1e-5


def test_documents_of_a_packed_batch_are_separate():
    model, ids = generating(), tokens(1, 20)
    position_ids = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = model(ids, position_ids=position_ids, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split([8, 12], 1)]
    assert distance(packed, torch.cat(alone, 1)) < 1e-5


def test_a_users_own_mask_and_weights():
    model, ids = generating().double(), tokens(2, 12)
    mask = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12)
    expected = model(ids, use_cache=False)
    assert distance(model(ids, attention_mask=mask, use_cache=False).logits, expected.logits) < 1e-12
    weighted = model(ids, use_cache=False, output_attentions=True)
    assert distance(weighted.logits, expected.logits) < 1e-12
    assert len(weighted.attentions) == 2


@pytest.mark.parametrize("layers", [[1], None])
def test_an_unknown_cache_is_refused_before_anything_is_stored(layers):
    class OwnCache(DynamicCache):
        def update(self, *args, **kwargs):
            return super().update(*args, **kwargs)

    model, ids = patch_model(tiny("llama"), "forgetting", layers=layers), tokens()

    class RoundingLayer(DynamicLayer):
        def update(self, key, value, *args, **kwargs):
            return super().update(key.round(), value, *args, **kwargs)

    own = OwnCache()
    for cache, name in ((own, "OwnCache"), (Cache(layers=[DynamicLayer(), RoundingLayer()]), "RoundingLayer")):
        with pytest.raises(ValueError, match=f"unknown whether {name} would keep them: use a dynamic or static cache"):
            model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0


def test_a_cache_of_another_model_is_refused():
    stock, model, ids = tiny("llama"), patch_model(tiny("llama"), "forgetting"), tokens()
    cache = stock(ids).past_key_values
    with pytest.raises(ValueError, match="Begin with an empty cache"):
        model(ids, past_key_values=cache)
    assert cache.layers[0].keys.shape[-2] == ids.shape[1]


# ----------------------------------------------------------------------------------------------------- the life of a model


def test_a_model_whose_keys_cannot_hold_numbers_is_refused():
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        patch_model(decoder("deepseek_v3"), "forgetting")
    with pytest.raises(UnsupportedModelError, match="shares the keys of layer"):
        patch_model(decoder("gemma3n_text"), "forgetting")


def test_a_forward_that_bypasses_the_hook_is_noticed():
    model = patch_model(tiny("llama"), "forgetting")
    attention = attentions_of(model)[1]
    attention._forward_pre_hooks.clear()
    with pytest.raises(ValueError, match="did not arrive at the attention of LlamaAttention"):
        model(tokens())


def test_it_is_saved_loaded_copied_and_undone(tmp_path):
    model = tiny("llama")
    before, ids = {name: p.clone() for name, p in model.state_dict().items()}, tokens()
    stock = model(ids).logits
    hooks = [len(attention._forward_pre_hooks) for attention in attentions_of(model)]
    randomize(patch_model(model, [Rope(), Forgetting(bias=3, layers=[1])]))
    expected = model(ids).logits
    assert copy.deepcopy(model)(ids).logits.equal(expected)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert schemes_of(loaded) == schemes_of(model)
    assert loaded.eval()(ids).logits.equal(expected)
    (getattr(loaded, "activation_checkpointing_enable", None) or loaded.gradient_checkpointing_enable)()
    loaded.train()(ids, labels=ids).loss.backward()
    model.train()(ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert p.grad is None or distance(q.grad, p.grad) < 1e-5, name
    unpatch_model(model.eval())
    assert model(ids).logits.equal(stock)
    assert model.state_dict().keys() == before.keys()
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert hooks == [len(attention._forward_pre_hooks) for attention in attentions_of(model)]
