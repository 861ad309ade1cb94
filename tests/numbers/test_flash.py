"""A temperature keeps the model's flash attention: the same numbers as by our own engines, in every kind of call.

Flash attention is transformers' own, over a stand-in for its kernels. The last test needs a GPU and the real kernels.
"""

import importlib.util
import math
import re
from dataclasses import replace

import peft
import pytest
import torch
from decoders import decoder
from families import tiny, tokens
from flash_stand_in import install
from literal_attention import BESIDE, assert_same_gradients, attend_literally, peer_beside, products
from multimodal import multimodal
from situations import distance
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posenc
from hf_posenc import QueryModule, UnsupportedModelError, describe, patch_model, unpatch_model, verify, which_engine
from hf_posenc.schemes import Nope, QKNorm, Rope, Temperature

FLASH = "flash_attention_2"
STRENGTHS = (0.3, 1.1, 0.7, 2.0)
EXACT = 1e-9  # rounding of float64


@pytest.fixture
def kernel(monkeypatch):
    return install(monkeypatch)


def on_flash(family, schemes=(), **config):
    model = tiny(family, **config).double()
    model.set_attn_implementation(FLASH)
    return patch_model(model, list(schemes)) if schemes else model


def literal_factor(kind, strength, n):
    return {
        "constant": strength,
        "log_n": max(1.0, 1 + strength * (math.log(n) / math.log(6) - 1)),
        "llama4": 1 + strength * math.log(1 + n // 6),
        "scalable": strength * math.log(n),
    }[kind]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("kind", "beside"), [("constant", "nope"), ("log_n", "the-base"), ("llama4", "nope"), ("scalable", "rope")]
)
def test_logits_and_gradients_are_those_of_the_formula(kind, beside, family, kernel):
    ids, size = tokens(2, 13), 13
    scaled = Temperature(kind, strength=STRENGTHS, length=None if kind == "constant" else 6, trainable=True)
    model = on_flash(family, [*BESIDE[beside](), scaled])
    peer, _ = peer_beside(beside, family)
    strength = torch.tensor(STRENGTHS, dtype=torch.float64, requires_grad=True)
    factors = [[literal_factor(kind, s, i + 1) for i in range(size)] for s in strength]
    attend_literally(peer, lambda _, q, k, h, i, scaling: factors[h][i] * scaling * products(q, k, h, i))
    actual, expected = model(ids, use_cache=False).logits, peer(ids, use_cache=False).logits
    assert kernel == [("plain", (2, size, 4, 8))] * 2
    assert distance(actual, expected) < EXACT
    unscaled = on_flash(family, BESIDE[beside]())
    assert distance(unscaled(ids, use_cache=False).logits, expected) > 1e-3
    assert_same_gradients(model, actual, peer, expected)
    total = sum(p.grad for n, p in model.named_parameters() if n.endswith("temperature.strength"))
    assert distance(total, strength.grad) < 1e-8


def padded(left, right, length=11):
    """A batch of two: the first row with padding, the second without."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :left], mask[0, length - right :] = 0, 0
    return mask


def with_a_gap():
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 4:6] = 0
    return mask


def packed(*lengths, rows=1):
    return torch.cat([torch.arange(length) for length in lengths])[None].expand(rows, -1)


def in_chunks(model, sizes, cache, mask=None):
    """Logits of the tokens in chunks, with a cache."""
    ids, past, done, logits = tokens(2, sum(sizes)), cache(model.config), 0, []
    for size in sizes:
        seen = None if mask is None else mask[:, : done + size]
        logits.append(model(ids[:, done : done + size], attention_mask=seen, past_key_values=past).logits)
        done += size
    return torch.cat(logits, 1)


def dynamic(config):
    return DynamicCache(config=config)


def static(config):
    return StaticCache(config=config, max_cache_len=20)


def whole(**arguments):
    return lambda model, mask: model(tokens(2, 11), attention_mask=mask, **arguments).logits


def one_row(**arguments):
    return lambda model, _: model(tokens(1, 11), position_ids=packed(4, 7), use_cache=False, **arguments).logits


def chunks(cache, *sizes):
    return lambda model, mask: in_chunks(model, sizes, cache, mask)


LENGTHS = torch.tensor([0, 4, 11], dtype=torch.int32)
ENDS = {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS, "max_length_q": 7, "max_length_k": 7}
CALLS = {
    "left padding": (padded(4, 0), whole()),
    "left padding, counted": (padded(4, 0), whole(position_ids=(padded(4, 0).cumsum(-1) - 1).clamp(min=0))),
    "right padding": (padded(0, 3), whole()),
    "packed": (None, one_row()),
    "packed, ends given": (None, one_row(**ENDS)),
    "packed rows": (None, whole(position_ids=packed(4, 7, rows=2), use_cache=False)),
    "chosen positions": (None, whole(position_ids=3 * packed(11))),
    "cache": (None, chunks(dynamic, 5, 1, 1, 4)),
    "cache, left padding": (padded(3, 0), chunks(dynamic, 5, 1, 4, 1)),
    "long chunk, left padding": (padded(4, 0), chunks(dynamic, 2, 8, 1)),
    "static cache": (None, chunks(static, 5, 1, 1, 4)),
    "static cache, left padding": (padded(3, 0), chunks(static, 5, 4, 1, 1)),
}
"""Attention mask or None, and a function of a model and the mask that returns logits."""

SCHEMES = {
    "temperature": [Temperature("llama4", length=3, strength=0.7)],
    "nope": [Nope(), Temperature("log_n", length=3, strength=2.0)],
    "one layer": [Rope(rope_theta=50.0), Temperature("log_n", length=3, strength=2.0, layers=[1])],
    "qk_norm": [QKNorm(), Temperature("scalable", length=6)],
}


def logits_of(model, call):
    """Logits of the tokens that are no padding: what others compute means nothing."""
    mask, run = CALLS[call]
    logits = run(model, mask)
    return logits if mask is None else logits[mask.bool()]


@pytest.mark.rows(default=16, slow=60)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2"])
@pytest.mark.parametrize("schemes", SCHEMES)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_that_of_our_engines(call, schemes, family, kernel):
    model = on_flash(family, SCHEMES[schemes])
    peer = patch_model(tiny(family).double(), SCHEMES[schemes])
    actual = logits_of(model, call)
    assert len(kernel) >= 2
    expected = logits_of(peer, call)
    assert distance(actual, expected) < EXACT
    unscaled = on_flash(family, [scheme for scheme in SCHEMES[schemes] if not scheme.acts_on.joins()])
    assert distance(logits_of(unscaled, call), expected) > 1e-3
    if not call.startswith("static"):  # its tensors are written in place
        direction = torch.linspace(-1, 1, actual.numel(), dtype=actual.dtype).view_as(actual)
        for logits in (actual, expected):
            (logits * direction).sum().backward()
        for ours, theirs in zip(model.parameters(), peer.parameters(), strict=True):
            if theirs.grad is not None:
                assert distance(ours.grad, theirs.grad) < 1e-8


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache, family, kernel):
    arguments = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": cache}
    generated = []
    for model in (on_flash(family, SCHEMES["nope"]), patch_model(tiny(family).double(), SCHEMES["nope"])):
        model.generation_config.eos_token_id = None
        generated.append(model.generate(tokens(2, 11), attention_mask=padded(4, 0), **arguments))
    assert generated[0].equal(generated[1])
    assert len(kernel) == 2 * 9


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_bigcode", "opt", "qwen3_next"])
def test_other_attentions(model_type, kernel):
    """Latent attention with values narrower than queries; one key head; positions in the mask; layers without attention."""
    call = {"input_ids": tokens(2, 11), "attention_mask": padded(4, 0)}
    models = [decoder(model_type) for _ in range(3)]  # in float32, which experts take on a CPU
    for model in models[:2]:
        model.set_attn_implementation(FLASH)
    for model in models[1:]:
        patch_model(model, SCHEMES["temperature"])
    shown = padded(4, 0).bool()
    unscaled, actual, expected = (model(**call).logits[shown] for model in models)
    assert distance(actual, expected) < 1e-4
    assert distance(unscaled, expected) > 1e-2


@pytest.mark.slow
def test_the_language_model_of_a_multimodal_model(kernel, tmp_path):
    model, peer = multimodal("llava"), patch_model(multimodal("llava"), SCHEMES["temperature"])
    model.set_attn_implementation({"text_config": FLASH})
    patch_model(model, SCHEMES["temperature"]).save_pretrained(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation={"text_config": FLASH})
    expected = peer(input_ids=tokens(2, 11)).logits
    for each in (model, loaded):
        kernel.clear()
        assert distance(each(input_ids=tokens(2, 11)).logits, expected) < 1e-4
        assert kernel


# -------------------------------------------------------------------------------------------------------------- refusals


class Biased(QueryModule):
    def forward(self, call):
        return replace(call, scaling=2.0 * call.scaling)


def test_what_flash_attention_cannot_compute_is_refused(kernel):
    model, ids = on_flash("mistral", SCHEMES["temperature"]), tokens(2, 11)
    causal = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="4-D attention mask"):
        model(ids, attention_mask=causal)
    with pytest.raises(ValueError, match="hides tokens between"):
        model(ids, attention_mask=with_a_gap())
    with pytest.raises(ValueError, match="start again inside a row"):
        model(tokens(1, 11), position_ids=packed(4, 7), use_cache=True)
    with pytest.raises(ValueError, match="documents"):
        model(tokens(1, 11), use_cache=False, **ENDS)
    with pytest.raises(NotImplementedError, match="paged"):
        model(ids, cache=object())
    assert kernel == []
    model.model.layers[0].self_attn.posenc_additions.temperature = Biased()
    with pytest.raises(ValueError, match="temperature changes scaling"):
        model(ids)


def test_gaps_without_a_window(kernel):
    shown = with_a_gap().bool()
    call = {"input_ids": tokens(2, 11), "attention_mask": with_a_gap()}
    model, peer = on_flash("llama", SCHEMES["nope"]), patch_model(tiny("llama").double(), SCHEMES["nope"])
    assert distance(model(**call).logits[shown], peer(**call).logits[shown]) < EXACT


@pytest.mark.parametrize(
    ("schemes", "culprit"),
    [
        (["alibi", "temperature"], "alibi"),
        (["temperature", "forgetting"], "forgetting"),
        ([Temperature(window=4)], "temperature with a window"),
    ],
)
def test_schemes_that_flash_attention_cannot_carry(schemes, culprit, kernel):
    model = on_flash("llama")
    with pytest.raises(UnsupportedModelError, match=f"^{culprit} changes attention scores, which {FLASH}"):
        patch_model(model, schemes)
    assert model.config._attn_implementation == FLASH


def test_engines_and_other_kernels(kernel, monkeypatch):
    with pytest.raises(UnsupportedModelError, match="which flash_attention_2 cannot carry"):
        patch_model(on_flash("llama"), "temperature", attention="reference")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "some/flash-kernel", lambda *_, **__: None)
    for name in ("some/flash-kernel", "some/unloaded-flash-kernel", f"paged|{FLASH}"):
        other = tiny("llama")
        other.config._attn_implementation_internal = name
        with pytest.raises(UnsupportedModelError, match=f"which {re.escape(name)} cannot carry"):
            patch_model(other, "temperature")


# ------------------------------------------------------------------------------------------------------------ everything else


def test_weights_come_from_our_engines(kernel):
    model, ids = on_flash("llama", SCHEMES["nope"]), tokens(1, 9)
    peer = patch_model(tiny("llama").double(), SCHEMES["nope"])
    found, expected = (each(ids, output_attentions=True).attentions for each in (model, peer))
    assert all(distance(a, b) < EXACT for a, b in zip(found, expected, strict=True))
    assert kernel == []


def test_it_is_described_verified_and_undone(kernel):
    ids, stock = tokens(2, 11), on_flash("llama")(tokens(2, 11)).logits
    model = on_flash("llama", SCHEMES["one layer"])
    assert describe(model).attention == FLASH
    assert which_engine(model, 16).engine == FLASH
    assert verify(model).ok
    with pytest.raises(ValueError, match="would drop temperature"):
        model.set_attn_implementation("eager")
    unpatch_model(model)
    assert model.config._attn_implementation == FLASH
    assert distance(model(ids).logits, stock) == 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoint_is_loaded_with_flash_attention(family, kernel, tmp_path):
    ids, saved = tokens(2, 11), on_flash(family, SCHEMES["one layer"])
    saved.save_pretrained(tmp_path)
    expected = saved(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    kernel.clear()
    assert distance(plain(ids).logits, expected) < EXACT
    assert kernel == []
    for load in (AutoModelForCausalLM.from_pretrained, hf_posenc.from_pretrained):
        loaded = load(tmp_path, attn_implementation=FLASH)
        kernel.clear()
        assert distance(loaded(ids).logits, expected) < EXACT
        assert len(kernel) == 2
        assert describe(loaded).attention == FLASH
        assert verify(loaded).ok
    with pytest.raises(ValueError, match="computes the attention of this model"):
        hf_posenc.from_pretrained(tmp_path, attn_implementation=FLASH, attention="reference")


# peft asks the model for an attribute that transformers 5.23 has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_with_an_adapter_of_peft(kernel):
    scheme, logits = Temperature("scalable", length=6), []
    for model in (on_flash("llama", [scheme]), patch_model(tiny("llama").double(), scheme)):
        adapter = peft.LoraConfig(
            target_modules=["q_proj"], modules_to_save=["posenc_additions"], task_type="CAUSAL_LM"
        )
        wrapped = peft.get_peft_model(model, adapter, autocast_adapter_dtype=False)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "modules_to_save" in name:
                    parameter *= 3
        logits.append(wrapped(tokens(2, 11)).logits)
    assert distance(*logits) < EXACT
    assert kernel


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: run `pytest -m gpu` where there is one")
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="`pip install flash-attn` runs this test")
@pytest.mark.parametrize("call", ["plain", "left padding", "packed"])
def test_the_real_kernels(call):
    """In bfloat16, against our engines in float32: 8 bits in every product, through two layers."""
    arguments = {
        "plain": {},
        "left padding": {"attention_mask": padded(4, 0).cuda()},
        "packed": {"position_ids": packed(4, 7, rows=2).cuda(), "use_cache": False},
    }[call]
    shown, ids = arguments.get("attention_mask", torch.ones(2, 11)).bool(), tokens(2, 11).cuda()
    model, peer = (tiny("llama", hidden_size=128).cuda() for _ in range(2))
    model.to(torch.bfloat16).set_attn_implementation(FLASH)
    unscaled = model(ids, **arguments).logits[shown].float()
    actual = patch_model(model, SCHEMES["temperature"])(ids, **arguments).logits[shown].float()
    expected = patch_model(peer, SCHEMES["temperature"])(ids, **arguments).logits[shown]
    assert (actual - expected).norm() < 5e-2 * expected.norm()
    assert (unscaled - expected).norm() > 1e-1 * expected.norm()
