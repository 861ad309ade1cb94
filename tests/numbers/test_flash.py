"""Schemes that change, or widen, queries and keys keep the model's flash attention: the same numbers as by our own engines, in every kind of call.

Flash attention is transformers' own, over a stand-in for its kernels.
"""

import re
from pathlib import Path

import pytest
import torch
from families import tiny, tokens
from flash_stand_in import install
from situations import distance
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import hf_posenc
from hf_posenc import (
    UnsupportedModelError,
    available_schemes,
    describe,
    patch_model,
    unpatch_model,
    verify,
    which_engine,
)
from hf_posenc.core.registry import family_for, scheme_class
from hf_posenc.schemes import Alibi, Forgetting, Nope, QKNorm, Rope, Temperature, TransformerXL

FLASH = "flash_attention_2"
EXACT = 1e-9  # rounding of float64


@pytest.fixture
def kernel(monkeypatch):
    return install(monkeypatch)


def on_flash(family, schemes=(), **config):
    model = tiny(family, **config).double()
    model.set_attn_implementation(FLASH)
    return patch_model(model, list(schemes), seed=0) if schemes else model


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
    "transformer_xl": [TransformerXL(frequencies=5)],
    "alibi": [Alibi(trainable=True), Temperature("llama4", length=3, strength=0.7)],
    "forgetting": [Rope(), Forgetting(bias=1.0)],
    "qk_norm": [QKNorm(), Temperature("scalable", length=6)],
}

REFUSED = {(name, "gemma2") for name in ("transformer_xl", "alibi", "forgetting")} | {("forgetting", "gpt2")}
"""A soft cap on scores without the bias; gpt2 has no rotation."""


def logits_of(model, call):
    """Logits of the tokens that are no padding: what others compute means nothing."""
    mask, run = CALLS[call]
    logits = run(model, mask)
    return logits if mask is None else logits[mask.bool()]


@pytest.mark.rows(default=12, slow=24)
@pytest.mark.parametrize(
    ("schemes", "family"),
    [
        (schemes, family)
        for schemes in SCHEMES
        for family in ("llama", "gpt2", "mistral", "gemma2")
        if (schemes, family) not in REFUSED
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_that_of_our_engines(call, schemes, family, kernel):
    model = on_flash(family, SCHEMES[schemes])
    peer = patch_model(tiny(family).double(), SCHEMES[schemes], seed=0)
    actual = logits_of(model, call)
    assert len(kernel) >= 2
    expected = logits_of(peer, call)
    assert distance(actual, expected) < EXACT
    replacing = [scheme for scheme in SCHEMES[schemes] if not scheme.joins]
    unscaled = on_flash(family, replacing if len(replacing) < len(SCHEMES[schemes]) else [])
    assert distance(logits_of(unscaled, call), expected) > 1e-3
    if not call.startswith("static"):  # its tensors are written in place
        direction = torch.linspace(-1, 1, actual.numel(), dtype=actual.dtype).view_as(actual)
        for logits in (actual, expected):
            (logits * direction).sum().backward()
        for ours, theirs in zip(model.parameters(), peer.parameters(), strict=True):
            if theirs.grad is not None:
                assert distance(ours.grad, theirs.grad) < 1e-8


def test_what_flash_attention_cannot_compute_is_refused(kernel):
    model, ids = on_flash("mistral", SCHEMES["temperature"]), tokens(2, 11)
    causal = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="4-D attention mask"):
        model(ids, attention_mask=causal)
    with pytest.raises(ValueError, match="hides tokens between"):
        model(ids, attention_mask=with_a_gap())
    with pytest.raises(ValueError, match="fall inside a document"):
        model(tokens(1, 11), position_ids=packed(4, 7), use_cache=True)
    with pytest.raises(ValueError, match="documents"):
        model(tokens(1, 11), use_cache=False, **ENDS)
    with pytest.raises(NotImplementedError, match="paged"):
        model(ids, cache=object())
    with pytest.raises(UnsupportedModelError, match=f"^t5 changes attention scores, which {FLASH}"):
        patch_model(on_flash("llama"), ["t5", "temperature"])
    with pytest.raises(ValueError, match="soft cap"):
        on_flash("gemma2", [TransformerXL()])(ids)
    with pytest.raises(ValueError, match="heads of at most 256"):
        on_flash("llama", [TransformerXL(frequencies=125)])(ids)
    assert kernel == []


def test_it_is_described_verified_and_undone(kernel):
    ids, stock = tokens(2, 11), on_flash("llama")(tokens(2, 11)).logits
    model = on_flash("llama", SCHEMES["one layer"])
    assert describe(model).attention == FLASH
    assert which_engine(model, 16).engine == FLASH
    assert verify(model).ok
    with pytest.raises(ValueError, match=r"would drop .*temperature"):
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
    with pytest.raises(ValueError, match=r"keeps flash.*load it with attn_implementation='sdpa'"):
        hf_posenc.from_pretrained(tmp_path, attn_implementation=FLASH, attention="reference")


def test_the_page_of_limits_names_the_schemes_that_keep_it():
    page = (Path(__file__).parents[2] / "docs/limits.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| flash attention with other schemes than")]
    named = set(re.findall(r"`(\w+)`", row.split("|")[1].partition(", or with")[0]))
    family = family_for("llama")
    schemes = {name: scheme_class(name)() for name in available_schemes()}
    assert named == {n for n, each in schemes.items() if each.keeps_kernel() or not each.needs_our_attention(family)}
