"""`qk_norm` beside other schemes computes what its formula says, and what Qwen3 and OLMo 2 compute."""

import copy

import pytest
import torch
from decoders import decoder
from families import tiny, tokens
from literal_attention import BESIDE, assert_same_gradients, attend_literally, peer_beside
from matrix import matrix
from situations import distance, randomize
from torch import nn
from transformers import DynamicCache, Olmo2Config, Qwen3Config
from transformers.models.olmo2.modeling_olmo2 import Olmo2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

import hf_posenc
from hf_posenc import UnsupportedModelError, patch_model, schemes_of, unpatch_model, verify
from hf_posenc.schemes import Nope, QKNorm, Rope, Temperature

EPS = 1e-3  # large enough to be seen
NAMES = ("query_exponent", "key_exponent", "gain")


def literal_size(vectors, head, token, over):
    """Mean square plus eps of one token, over one head or all: (B,)."""
    heads = [head] if over == "head" else range(vectors.shape[1])
    squares = [vectors[:, h, token, u] ** 2 for h in heads for u in range(vectors.shape[-1])]
    return sum(squares) / len(squares) + EPS


def literal_scores(over, parameters):
    """Scores of one query, from the parameters of each layer."""

    def scores(module, query, key, h, i, scaling):
        a, b, gain = parameters[module.layer_idx]
        query = query * (scaling / module.scaling)  # OPT scales queries itself, and asks for a factor of 1
        n = h // (query.shape[1] // key.shape[1])
        q = gain[h] * query[:, h, i] / literal_size(query, h, i, over)[:, None] ** (a[h] / 2)
        k = [key[:, n, j] / literal_size(key, n, j, over)[:, None] ** (b[n] / 2) for j in range(i + 1)]
        return module.scaling * (torch.stack(k, 1) @ q[..., None])[..., 0]

    return scores


def norms_of(model):
    return [module for name, module in model.named_modules() if name.endswith("posenc_additions.qk_norm")]


@pytest.mark.rows(default=2)
@matrix(over=["head", "all_heads"], beside=BESIDE, family=["llama", "gpt2", "opt"])
def test_logits_and_gradients_are_those_of_the_formula(over, beside, family):
    ids = tokens(2, 7)
    model = patch_model(tiny(family).double(), [*BESIDE[beside](), QKNorm(over=over, eps=EPS)])
    assert verify(model).ok
    randomize(model)

    peer, slopes = peer_beside(beside, family)
    literal = [[getattr(norm, name).detach().clone().requires_grad_() for name in NAMES] for norm in norms_of(model)]
    without = copy.deepcopy(peer)(ids, use_cache=False).logits
    attend_literally(peer, literal_scores(over, literal), slopes)

    actual, expected = model(ids, use_cache=False).logits, peer(ids, use_cache=False).logits
    assert distance(actual, expected) < 1e-9
    assert distance(without, expected) > 1e-2, "without the norm it is the same"

    assert_same_gradients(model, actual, peer, expected)
    for norm, parameters in zip(norms_of(model), literal, strict=True):
        for name, parameter in zip(NAMES, parameters, strict=True):
            assert parameter.grad.abs().min() > 1e-6
            assert distance(getattr(norm, name).grad, parameter.grad) < 1e-8, name


SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip
PEERS = {
    "head": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "all_heads": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
}


@pytest.mark.parametrize("nope", [False, True], ids=["rotated", "nope"])
@pytest.mark.parametrize("over", PEERS)
def test_the_norm_is_that_of_a_model_which_has_it(over, nope):
    """Qwen3 and OLMo 2 norm before they rotate; with equal weights in all dimensions that is the same."""
    torch.manual_seed(0)
    peer = PEERS[over]().eval()
    model = copy.deepcopy(peer)
    for one, other in zip(peer.model.layers, model.model.layers, strict=True):
        nn.init.constant_(one.self_attn.q_norm.weight, 1.7)
        nn.init.constant_(one.self_attn.k_norm.weight, 0.6)
        other.self_attn.q_norm, other.self_attn.k_norm = nn.Identity(), nn.Identity()
    ids = tokens(2, 23)
    if nope:
        patch_model(peer, "nope")
    expected = peer(ids, use_cache=False).logits
    assert distance(patch_model(model, "nope")(ids).logits if nope else model(ids).logits, expected) > 1e-2
    if nope:
        unpatch_model(model)
    norm = QKNorm(over=over, exponent=1.0, gain=1.7 * 0.6, eps=peer.config.rms_norm_eps, trainable=False)
    patch_model(model, [*([Nope()] if nope else []), norm])
    assert distance(model(ids, use_cache=False).logits, expected) < 2e-5
    step = model(ids[:, :20])
    assert distance(model(ids[:, 20:], past_key_values=step.past_key_values).logits, expected[:, 20:]) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2"])
def test_the_start_changes_no_bit(family, dtype):
    stock, ids = tiny(family).to(dtype), tokens(2, 20)
    schemes = [Rope(rope_theta=50.0), Temperature("constant")]  # the same attention function
    before = patch_model(copy.deepcopy(stock), schemes)(ids).logits
    model = patch_model(copy.deepcopy(stock), [*schemes, QKNorm()])
    assert model(ids).logits.equal(before)
    randomize(model)
    assert distance(model(ids).logits, before) > 1e-2
    assert unpatch_model(model)(ids).logits.equal(stock(ids).logits)


def test_training_moves_the_exponents_away_from_the_start():
    model, ids = patch_model(tiny("llama"), [Nope(), QKNorm()]), tokens(4, 24)
    before = model(ids, labels=ids).loss.item()
    optimizer = torch.optim.Adam([p for norm in norms_of(model) for p in norm.parameters()], lr=0.02)
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < before - 1e-3
    starts = dict(zip(NAMES, (0, 0, 1), strict=True))
    assert all(getattr(norm, name).ne(starts[name]).all() for norm in norms_of(model) for name in NAMES)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_temperature_acts_after_the_norm_in_whatever_order(order):
    """Before it, the norm would divide the factor out."""
    schemes = [QKNorm(exponent=1.0, trainable=False), Temperature("constant", strength=3.0)]
    model, ids = patch_model(tiny("llama").double(), [schemes[i] for i in order]), tokens(2, 12)
    hot = patch_model(tiny("llama").double(), QKNorm(exponent=1.0, gain=3.0, trainable=False))
    assert distance(model(ids).logits, hot(ids).logits) < 1e-10


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("over", ["head", "all_heads"])
def test_a_cached_key_is_a_recomputed_one(over, cache):
    model = randomize(patch_model(tiny("llama"), [Rope(rope_theta=50.0), QKNorm(over=over), Temperature(length=3)]))
    model.generation_config.eos_token_id = None
    ids = tokens(2, 8)
    padded = nn.functional.pad(ids, (5, 0))
    mask = nn.functional.pad(torch.ones_like(ids), (5, 0))
    arguments = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    generated = model.generate(padded, attention_mask=mask, **arguments)[:, 5:]
    for n in range(8, 17):
        assert model(generated[:, :n], use_cache=False).logits[:, -1].argmax(-1).equal(generated[:, n])
    past = DynamicCache(config=model.config)
    chunks = [model(part, past_key_values=past).logits for part in generated.split(4, 1)]
    assert distance(torch.cat(chunks, 1), model(generated, use_cache=False).logits) < 1e-5


def test_saved_and_loaded(tmp_path):
    model = randomize(patch_model(tiny("llama"), [Nope(layers=[1]), QKNorm(over="all_heads", layers=[0, 1])]))
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path).eval()
    assert schemes_of(loaded) == schemes_of(model)
    assert loaded(tokens()).logits.equal(model(tokens()).logits)


# peft 0.21 asks for it by the name that transformers 5.23 renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_holds_the_norm(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = patch_model(tiny("llama"), [Nope(), QKNorm()])
    model = peft.get_peft_model(model, hf_posenc.lora_config(model, r=2))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum("qk_norm" in name for name in trained) == 6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.add_(0.3)
    expected = model.eval()(tokens()).logits
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.load_adapter(patch_model(tiny("llama"), [Nope(), QKNorm()]), tmp_path).eval()
    assert distance(loaded(tokens()).logits, expected) < 1e-6


NORMED = {
    "qwen3": ({}, "0, 1"),
    "olmo2": ({}, "0, 1"),
    "gemma3_text": ({}, "0, 1"),
    "hunyuan_v1_dense": ({}, "0, 1"),
    "persimmon": ({}, "0, 1"),
    "phi": ({"qk_layernorm": True}, "0, 1"),
    "cohere": ({"use_qk_norm": True}, "0, 1"),
    "llama4_text": ({}, "0"),  # it norms in the layers that it rotates
}


@pytest.mark.parametrize("model_type", NORMED)
def test_a_base_that_norms_itself_is_refused(model_type):
    config, layers = NORMED[model_type]
    model = decoder(model_type, **config)
    with pytest.raises(UnsupportedModelError, match=f"itself norms the queries and keys of layer {layers}, and"):
        patch_model(model, ["nope", "qk_norm"])
    assert not hf_posenc.is_patched(model)


def test_phi_without_its_norm_takes_ours():
    assert verify(patch_model(decoder("phi"), "qk_norm")).ok


def test_a_base_whose_own_factor_would_be_divided_out_is_refused():
    with pytest.raises(UnsupportedModelError, match="llama4_text itself multiplies the queries of layer 1"):
        patch_model(decoder("llama4_text"), QKNorm(layers=[1]))


def test_what_would_never_norm_anything_is_refused():
    with pytest.raises(ValueError, match="norms nothing if it is not trained"):
        QKNorm(trainable=False, gain=2.0)
