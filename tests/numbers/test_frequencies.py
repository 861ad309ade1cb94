"""`rope(frequencies=...)`: own frequencies and edits of the base's, in models, in checkpoints, and exported as stock."""

import json

import pytest
import torch
from families import tiny, tokens
from situations import DIFFERENT, distance

from hf_posenc import analysis, export_stock, from_pretrained, patch_model, schemes_of, unpatch_model, verify

OWN = (1.0, 0.3, 0.02, 0.0)
SOFT_CLIP = {"name": "soft_clip", "pairs": 3}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 0.1, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LENGTHS = (20, 90, 20)
"""Below and beyond the 64 positions of a tiny model, and below again."""


EDITS = {
    "own": OWN,
    "soft_clip": SOFT_CLIP,
    "hope": {"name": "hope", "length": 40},
    "abf": {"name": "abf", "factor": 9.0},
    "ntk": {"name": "ntk", "factor": 4.0},
}


@torch.no_grad()
def seen(model):
    """Logits at several lengths in a row, and scores of cached generation across 64 tokens, with padding."""
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :5] = 0
    made = model.generate(
        tokens(2, 60),
        attention_mask=mask,
        max_new_tokens=7,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return [*(model(tokens(2, length), use_cache=False).logits for length in LENGTHS), made.sequences, *made.scores]


def assert_equal(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.equal(theirs)


@pytest.mark.rows(default=2)
@pytest.mark.parametrize(
    ("family", "edit"), [*(("llama", edit) for edit in EDITS), ("phi3", "own"), ("gemma3", "own"), ("gemma3", "hope")]
)
def test_saved_exported_and_undone(family, edit, tmp_path):
    """The stock checkpoint says the same bit by bit, at every length, without this package."""
    model = tiny(family)
    before = seen(model)
    frequencies = EDITS[edit]
    if family == "gemma3" and edit == "own":
        frequencies = {"full_attention": OWN}
    patch_model(model, "rope", frequencies=frequencies)
    assert verify(model).ok
    expected = seen(model)
    assert all(distance(mine, theirs) > DIFFERENT for mine, theirs in zip(expected[:3], before[:3], strict=True))

    model.save_pretrained(tmp_path / "patched")
    loaded = from_pretrained(tmp_path / "patched")
    assert schemes_of(loaded) == schemes_of(model)
    assert_equal(seen(loaded), expected)

    export_stock(model, tmp_path / "stock")
    stock = type(tiny(family)).from_pretrained(tmp_path / "stock")
    assert_equal(seen(stock), expected)
    said = json.loads((tmp_path / "stock/config.json").read_text())["rope_parameters"]
    said = said["full_attention"] if family == "gemma3" else said
    assert said["rope_type"] == ("default" if edit in ("abf", "ntk") else "longrope")

    assert_equal(seen(unpatch_model(model)), before)


def test_a_cache_is_recomputation_beyond_the_length():
    """Keys that were cached before token 64 stay right after it, unlike those of a longrope with two lists."""
    model, ids = patch_model(tiny("llama"), "rope", frequencies=SOFT_CLIP), tokens(1, 80)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :50], use_cache=True)
        rest = model(ids[:, 50:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], 1), whole, atol=2e-5, rtol=1e-4)


def test_edits_act_on_each_layer_types_own_frequencies():
    """Gemma 3 rotates by 10,000 in windows and by 1,000,000 beyond: one list of numbers fits neither."""
    with pytest.raises(ValueError, match="frequencies of their own: give frequencies as a dict with sliding_attention"):
        patch_model(tiny("gemma3"), "rope", frequencies=OWN)
    model = patch_model(tiny("gemma3"), "rope", frequencies={"name": "hope", "length": 5_000})
    for found in analysis.frequencies(model):
        theta = 1e6 if "full_attention" in found.label else 1e4
        w = theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        torch.testing.assert_close(found.frequencies, w.where(w >= 2 * torch.pi / 5_000, 0), rtol=1e-6, atol=1e-20)
    with pytest.raises(ValueError, match="nothing with length=10000 in layers of the type sliding_attention: name the"):
        patch_model(tiny("gemma3"), "rope", frequencies={"name": "hope", "length": 10_000})
    model = patch_model(tiny("gemma3"), "rope", frequencies={"full_attention": {"name": "abf", "factor": 3.0}})
    (scheme,) = schemes_of(model)
    assert scheme.rope_theta == {"sliding_attention": 1e4, "full_attention": 3e6}
    with pytest.raises(ValueError, match="all its layers rotate alike"):
        patch_model(tiny("llama"), "rope", frequencies={"full_attention": OWN})


def test_edits_act_on_a_scaled_base():
    """Clipped RoPE on a LLaMA 3.1 clips what that model rotates by, and never drops its scaling."""
    model = tiny("llama", rope_parameters=LLAMA3)
    (before,) = analysis.frequencies(model)
    patch_model(model, "rope", frequencies={"name": "soft_clip", "pairs": 2})
    (after,) = analysis.frequencies(model)
    torch.testing.assert_close(after.frequencies[:3], before.frequencies[:3], rtol=1e-6, atol=0)
    assert after.frequencies[3] < 1e-20 < before.frequencies[3]
    with pytest.raises(ValueError, match="yarn multiplies cosines and sines as well: give scaling='none'"):
        patch_model(tiny("llama", rope_parameters=YARN), "rope", frequencies=SOFT_CLIP)
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="dynamic depend on the length"):
        patch_model(tiny("llama"), "rope", frequencies=SOFT_CLIP, scaling=dynamic)
    stock = tiny("llama", rope_parameters={**YARN, "rope_theta": 300.0})
    model = patch_model(tiny("llama", rope_parameters=YARN), "rope", frequencies={"name": "abf", "factor": 3.0})
    assert model(tokens(2, 90)).logits.equal(stock(tokens(2, 90)).logits)


@pytest.mark.parametrize(("length", "longest"), [(64, 256), (8192, 10000)])
def test_the_ladder_of_transformer_xl_ends_at_four_times_the_length_or_the_papers_10000(length, longest):
    model = patch_model(tiny("llama", max_position_embeddings=length), "transformer_xl", frequencies=4)
    (scheme,) = schemes_of(model)
    assert scheme.longest == longest
    found = model.model.layers[0].self_attn.posenc.form(torch.ones(1)).waves.frequencies()
    torch.testing.assert_close(found, torch.tensor([longest ** (-t / 4) for t in range(4)], dtype=torch.float64))
