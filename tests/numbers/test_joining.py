"""Schemes that join other positions (temperature, forgetting, softpick, ...): beside each of them, their formulas and peers."""

import copy
import dataclasses
import math

import pytest
import torch
from cases import CASES
from decoders import decoder
from families import tiny, tokens
from literal_attention import BESIDE, assert_same_gradients, attend_literally, peer_beside, products
from matrix import matrix
from situations import distance, randomize
from torch import nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    Cache,
    DynamicCache,
    Llama4TextConfig,
    Olmo2Config,
    Qwen3Config,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM
from transformers.models.olmo2.modeling_olmo2 import Olmo2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

import hf_posenc
from hf_posenc import UnsupportedModelError, patch_model, unpatch_model, verify
from hf_posenc.core.registry import scheme_class
from hf_posenc.schemes import Differential, Forgetting, Nope, QKNorm, Rope, Temperature
from hf_posenc.schemes.softpick import softpick
from hf_posenc.testing import check_scheme

STRENGTHS = (0.3, 1.1, 0.7, 2.0)
LENGTH = 6
EPS = 1e-3  # large enough to be seen


def additions(model, name):
    """Return the modules of an addition, layer by layer; of a scheme on scores those on the attentions."""
    ends = ".posenc" if scheme_class(name).computes_scores else f"posenc_additions.{name}"
    return [module for path, module in model.named_modules() if path.endswith(ends)]


def copies(modules, *names):
    """Return copies of some parameters of each module."""
    return [[module.get_parameter(name).detach().clone().requires_grad_() for name in names] for module in modules]


def assert_is_the_formula(family, beside, scheme, name, parameters, literal, options=(), length=9):
    """Logits and all gradients of a patched model are those of a peer that attends literally.

    Args:
        family: of the base.
        beside: row of `BESIDE`.
        scheme: the addition.
        name: of its module.
        parameters: names of its parameters.
        literal: function (peer, copies of the parameters of each layer) -> scores, see `attend_literally`.
        options: of `attend_literally`.
        length: number of tokens.
    """
    ids = tokens(2, length)
    model = randomize(patch_model(tiny(family).double(), [*BESIDE[beside](), scheme]))
    assert verify(model).ok
    peer, slopes = peer_beside(beside, family)
    without = copy.deepcopy(patch_model(tiny(family).double(), BESIDE[beside]()) if BESIDE[beside]() else peer)
    copied = copies(additions(model, name), *parameters)
    if (scores := literal(peer, copied)) is not None:  # otherwise it attends already
        attend_literally(peer, scores, slopes, **dict(options))
    actual, expected = model(ids, use_cache=False).logits, peer(ids, use_cache=False).logits
    assert distance(actual, expected) < 1e-9
    assert distance(without(ids, use_cache=False).logits, expected) > 1e-3, "without the scheme it is the same"
    assert_same_gradients(model, actual, peer, expected)
    for module, theirs in zip(additions(model, name), copied, strict=True):
        for key, their in zip(parameters, theirs, strict=True):
            assert their.grad.abs().max() > 1e-6
            assert distance(module.get_parameter(key).grad, their.grad) < 1e-8, key


# -------------------------------------------------------------------------------------------------------- temperature


def factor(kind, strength, n):
    """The factor of a query that sees n tokens, itself included."""
    return {
        "constant": lambda: strength,
        "log_n": lambda: 1 + strength * (math.log(n) / math.log(LENGTH) - 1) if n > LENGTH else 1 + 0 * strength,
        "llama4": lambda: 1 + strength * math.log(1 + n // LENGTH),
        "scalable": lambda: strength * math.log(n),
    }[kind]()


@pytest.mark.rows(default=5, slow=10)
@matrix(family=["llama", "gpt2"], beside=BESIDE, kind=["constant", "log_n", "llama4", "scalable"])
def test_temperature_is_the_formula(family, beside, kind):
    def literal(peer, copied):
        def scores(module, query, key, h, i, scaling):
            return factor(kind, copied[module.layer_idx][0][h], i + 1) * scaling * products(query, key, h, i)

        return scores

    scheme = Temperature(kind, strength=STRENGTHS, length=None if kind == "constant" else LENGTH, trainable=True)
    assert_is_the_formula(family, beside, scheme, "temperature", ["strength"], literal, length=17)


def test_the_temperature_is_llama_4s():
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


# ------------------------------------------------------------------------------------------------------------ qk_norm

NAMES = ("query_exponent", "key_exponent", "gain")


def literal_size(vectors, head, token, over):
    """Mean square plus eps of one token, over one head or all: (B,)."""
    heads = [head] if over == "head" else range(vectors.shape[1])
    squares = [vectors[:, h, token, u] ** 2 for h in heads for u in range(vectors.shape[-1])]
    return sum(squares) / len(squares) + EPS


@pytest.mark.rows(default=4, slow=8)
@matrix(over=["head", "all_heads"], beside=BESIDE, family=["llama", "gpt2", "opt"])
def test_qk_norm_is_the_formula(over, beside, family):
    def literal(peer, copied):
        def scores(module, query, key, h, i, scaling):
            a, b, gain = copied[module.layer_idx]
            query = query * (scaling / module.scaling)  # OPT scales queries itself, and asks for a factor of 1
            n = h // (query.shape[1] // key.shape[1])
            q = gain[h] * query[:, h, i] / literal_size(query, h, i, over)[:, None] ** (a[h] / 2)
            k = [key[:, n, j] / literal_size(key, n, j, over)[:, None] ** (b[n] / 2) for j in range(i + 1)]
            return module.scaling * (torch.stack(k, 1) @ q[..., None])[..., 0]

        return scores

    assert_is_the_formula(family, beside, QKNorm(over=over, eps=EPS), "qk_norm", NAMES, literal, length=7)


SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip
PEERS = {
    "head": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "all_heads": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
}


@pytest.mark.parametrize("over", PEERS)
def test_the_norm_is_that_of_a_model_which_has_it(over):
    """Qwen3 and OLMo 2 norm before they rotate; with equal weights in all dimensions that is the same."""
    torch.manual_seed(0)
    peer = PEERS[over]().eval()
    model = copy.deepcopy(peer)
    for one, other in zip(peer.model.layers, model.model.layers, strict=True):
        nn.init.constant_(one.self_attn.q_norm.weight, 1.7)
        nn.init.constant_(one.self_attn.k_norm.weight, 0.6)
        other.self_attn.q_norm, other.self_attn.k_norm = nn.Identity(), nn.Identity()
    ids = tokens(2, 23)
    expected = peer(ids, use_cache=False).logits
    assert distance(model(ids).logits, expected) > 1e-2
    patch_model(model, QKNorm(over=over, exponent=1.0, gain=1.7 * 0.6, eps=peer.config.rms_norm_eps, trainable=False))
    assert distance(model(ids, use_cache=False).logits, expected) < 2e-5
    step = model(ids[:, :20])
    assert distance(model(ids[:, 20:], past_key_values=step.past_key_values).logits, expected[:, 20:]) < 2e-5


@pytest.mark.rows(default=4, slow=4)
@matrix(dtype=[torch.float32, torch.bfloat16], family=["llama", "gpt2", "opt", "gemma2"])
def test_the_start_of_qk_norm_changes_no_bit(family, dtype):
    stock, ids = tiny(family).to(dtype), tokens(2, 20)
    schemes = [Rope(rope_theta=50.0), Temperature("constant")]  # the same attention function
    before = patch_model(copy.deepcopy(stock), schemes)(ids).logits
    model = patch_model(copy.deepcopy(stock), [*schemes, QKNorm()])
    assert model(ids).logits.equal(before)
    assert distance(randomize(model)(ids).logits, before) > 1e-2
    assert unpatch_model(model)(ids).logits.equal(stock(ids).logits)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_temperature_acts_after_the_norm_in_whatever_order(order):
    """Before it, the norm would divide the factor out."""
    schemes = [QKNorm(exponent=1.0, trainable=False), Temperature("constant", strength=3.0)]
    model, ids = patch_model(tiny("llama").double(), [schemes[i] for i in order]), tokens(2, 12)
    hot = patch_model(tiny("llama").double(), QKNorm(exponent=1.0, gain=3.0, trainable=False))
    assert distance(model(ids).logits, hot(ids).logits) < 1e-10


NORMED = {
    "qwen3": ({}, "0, 1"), "olmo2": ({}, "0, 1"), "gemma3_text": ({}, "0, 1"), "hunyuan_v1_dense": ({}, "0, 1"),
    "persimmon": ({}, "0, 1"), "phi": ({"qk_layernorm": True}, "0, 1"), "cohere": ({"use_qk_norm": True}, "0, 1"),
    "llama4_text": ({}, "0"),  # it norms in the layers that it rotates
}  # fmt: skip


@pytest.mark.parametrize("model_type", NORMED)
def test_a_base_that_norms_itself_is_refused(model_type):
    config, layers = NORMED[model_type]
    model = decoder(model_type, **config)
    with pytest.raises(UnsupportedModelError, match=f"itself norms the queries and keys of layer {layers}, and"):
        patch_model(model, ["nope", "qk_norm"])
    assert not hf_posenc.is_patched(model)


# ----------------------------------------------------------------------------------------------- weights and outputs


def attend_by_case(peer, case, copied):
    """Let a model attend by the formula of a case, in place, with copies of the parameters of each layer by name."""
    hidden = of_hidden_states(peer, lambda layer, hidden: hidden)

    def attend(module, query, key, value, attention_mask, *, scaling, **_):
        options = {"softmax_scale": scaling, "hidden": hidden[module.layer_idx], **case.hyperparameters}
        return case.attention(query, key, value, copied[module.layer_idx], **options), None

    AttentionInterface.register("by case", attend)
    peer.set_attn_implementation("by case")


OWN = {
    case.scheme: case
    for case in CASES
    if case.id in ("softpick-default", "differential-default", "dape-default", "gated-default", "inkling-near")
}
WEIGHTS = {name: scheme_class(name)(**case.hyperparameters) for name, case in OWN.items()}


@pytest.mark.rows(default=6, slow=12)
@matrix(name=OWN, beside=["the-base", "rope", "nope"], family=["llama", "gpt2"])
def test_weights_and_outputs_are_the_formula(name, beside, family):
    """Also beside the base's own positions: the queries and keys that the formula gets have them."""
    names = [key for key, _ in additions(patch_model(tiny(family), WEIGHTS[name]), name)[0].named_parameters()]

    def literal(peer, copied):
        by_name = [{key.rpartition(".")[2]: p for key, p in zip(names, each, strict=True)} for each in copied]
        attend_by_case(peer, OWN[name], by_name)

    assert_is_the_formula(family, beside, WEIGHTS[name], name, names, literal, length=6)


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_starts_neutral_changes_nothing(name):
    stock, ids = tiny("llama").double(), tokens(2, 20)
    model = patch_model(copy.deepcopy(stock), WEIGHTS[name])
    assert distance(model(ids).logits, stock(ids).logits) < 1e-10
    assert verify(model).ok
    assert distance(randomize(model)(ids).logits, stock(ids).logits) > 1e-2


def test_the_layer_decides_where_pairs_start():
    pairs = additions(patch_model(tiny("llama"), Differential(kind="pairs")), "differential")
    assert [each.factor.unique().item() for each in pairs] == pytest.approx([0.2, 0.8 - 0.6 * math.exp(-0.3)])


def test_softpick_leaves_a_query_without_keys():
    """All scores below 0: all weights are 0, and gradients are numbers."""
    scores = torch.tensor([[[[-200.0, -3.0, torch.finfo(torch.float32).min]]]], requires_grad=True)
    offset = torch.zeros(1, requires_grad=True)
    assert softpick(scores, torch.ones(1)).equal(torch.zeros(1, 1, 1, 3))
    torch.testing.assert_close(softpick(scores, offset), scores.softmax(-1))
    gradients = torch.autograd.grad(softpick(scores, offset)[..., 1].sum(), [scores, offset])
    assert all(each.isfinite().all() for each in gradients)


@pytest.mark.rows(default=3, slow=9)
@matrix(name=WEIGHTS, others=["rope", "alibi", "temperature", "far_rope"], family=["llama", "gpt2"])
def test_what_must_hold_of_every_scheme_holds_of_them_beside_others(name, others, family):
    """With kept first tokens: keys that follow each other in a cache are then no neighbours in the text."""
    others = "nope" if name == "inkling" and others in ("alibi", "far_rope") else others  # both would compute scores
    others = ["rope", Temperature("scalable", length=8)] if others == "temperature" else [others]
    check_scheme(tiny(family).double(), [*others, dataclasses.replace(WEIGHTS[name], window=9, sinks=2)])


# --------------------------------------------------------------------------------------------------------- forgetting


def of_hidden_states(peer, compute):
    """Return a dict that fills with `compute`(layer, hidden states that enter its attention), by layer."""
    found = {}

    def note(module, args, kwargs):
        found[module.layer_idx] = compute(module.layer_idx, args[0] if args else kwargs["hidden_states"])

    for attention in [
        module for module in peer.modules() if hasattr(module, "layer_idx") and hasattr(module, "scaling")
    ]:
        attention.register_forward_pre_hook(note, with_kwargs=True)
    return found


def forget(peer, copied):
    """Return scores with gates of the hidden states that enter each attention."""

    def of_layer(layer, hidden):  # gates (B, T, H), not their logarithms
        weight, bias = copied[layer]
        return 1 / (1 + torch.exp(-(hidden @ weight.T + bias)))

    gates = of_hidden_states(peer, of_layer)

    def scores(module, query, key, h, i, scaling):
        gate = gates[module.layer_idx][..., h]
        one = torch.ones_like(gate[:, 0])
        kept = [math.prod((gate[:, t] for t in range(j + 1, i + 1)), start=one) for j in range(i + 1)]
        return products(query, key, h, i) * scaling + torch.stack(kept, -1).log()

    return scores


GATES = ("tokens.weight", "tokens.bias")


@matrix(family=["llama", "gpt2"], beside=BESIDE)
def test_forgetting_is_the_formula(family, beside):
    assert_is_the_formula(family, beside, Forgetting(), "forgetting", GATES, forget, length=13)


def test_beside_sinks_the_querys_own_gates_count():
    """A sink has no gate, so the part of the bias that all keys share does not cancel."""
    model, peer = (
        randomize(patch_model(decoder("gpt_oss"), [Nope(), Forgetting()])),
        patch_model(decoder("gpt_oss"), "nope"),
    )
    attend_literally(peer, forget(peer, copies(additions(model, "forgetting"), *GATES)), sinks=True)
    ids = tokens(2, 7)  # within the window
    assert distance(model(ids, use_cache=False).logits, peer(ids, use_cache=False).logits) < 1e-5


@pytest.mark.parametrize("engine", ["wide", "chunked", "reference"])
def test_long_sums_keep_the_digits_of_near_keys(engine):
    """Float32 beside float64 on 600 tokens whose gates forget almost everything; the sums reach hundreds."""
    model = patch_model(tiny("llama"), [Nope(), Forgetting(bias=-3.0)], attention=engine)
    for module in additions(model, "forgetting"):
        torch.nn.init.normal_(module.tokens.weight, std=0.5)
    exact = copy.deepcopy(model).double()
    ids = tokens(1, 600)
    with torch.no_grad():
        assert distance(model(ids).logits, exact(ids).logits) < 1e-4


def generating(family="llama", schemes=None, **sizes):
    model = tiny(family, **sizes)
    model.generation_config.eos_token_id = None
    return randomize(patch_model(model, schemes or [Rope(rope_theta=50.0), Forgetting()]))


CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "without-config": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=40),
}
SMALL_WINDOW = {"mistral": {"sliding_window": 6}}


@pytest.mark.rows(default=5, slow=12)
@matrix(
    family=["llama", "gpt2", "mistral", "gemma3"], kind=CACHES, dtype=[torch.float32, torch.bfloat16, torch.float64]
)
def test_chunks_with_a_cache_are_the_whole(family, kind, dtype):
    """Also sliding caches, static or not, whose first keys are gone in the last chunks."""
    model = generating(family, [Forgetting()], **SMALL_WINDOW.get(family, {})).to(dtype)
    ids, cache = tokens(2, 25), CACHES[kind](model)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 4, 1, 1, 1, 10], 1)]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}[dtype]
    assert distance(torch.cat(parts, 1), whole) < tolerance


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 2**-16), (torch.float16, 2**-19)]
)
def test_a_cache_in_half_precision_keeps_the_digits_of_float32(dtype, tolerance):
    """Two channels hold a number: 1000 gates of 0.9933 are off by less than a thousandth, not by a hundredth."""
    from hf_posenc.transformers_glue.token_numbers import join, split

    numbers = torch.randn(2, 4, 9, 3, generator=torch.Generator().manual_seed(0))
    key = torch.randn(2, 2, 9, 8).to(dtype)
    back, read = split(join(key, numbers), 8, 4, 3)
    assert back.equal(key)
    torch.testing.assert_close(read, numbers.to(read.dtype), atol=1e-6 if tolerance else 0, rtol=tolerance)
    assert split(join(key, numbers), 7, 4, 3) is None


HOW = {
    "greedy": {},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 3},
    "look-up": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.rows(default=4, slow=6)
@matrix(family=["llama", "gemma3"], how=HOW)
def test_generation_is_that_without_a_cache(family, how):
    model, ids = generating(family, [Forgetting()]), tokens(1 if how == "look-up" else 2, 9)
    beams = {"num_beams": HOW[how].get("num_beams", 1), "do_sample": False, "max_new_tokens": 12}
    assert model.generate(ids, **{**beams, **HOW[how]}).equal(model.generate(ids, use_cache=False, **beams))


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


def test_a_cache_that_may_not_keep_gates_is_refused_before_anything_is_stored():
    class OwnCache(DynamicCache):
        def update(self, *args, **kwargs):
            return super().update(*args, **kwargs)

    class RoundingLayer(DynamicLayer):
        def update(self, key, value, *args, **kwargs):
            return super().update(key.round(), value, *args, **kwargs)

    stock, model, ids = tiny("llama"), patch_model(tiny("llama"), "forgetting"), tokens()
    for cache, name in ((OwnCache(), "OwnCache"), (Cache(layers=[DynamicLayer(), RoundingLayer()]), "RoundingLayer")):
        with pytest.raises(ValueError, match=f"which {name} may lose: use a dynamic or static cache"):
            model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
    cache = stock(ids).past_key_values
    with pytest.raises(ValueError, match="begin with an empty cache"):
        model(ids, past_key_values=cache)
    assert cache.layers[0].keys.shape[-2] == ids.shape[1]
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        patch_model(decoder("deepseek_v3"), "forgetting")
    with pytest.raises(UnsupportedModelError, match="shares the keys of layer"):
        patch_model(decoder("gemma3n_text"), "forgetting")
