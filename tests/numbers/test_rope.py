"""RoPE without hyper-parameters is the base itself: whatever rotation the base has, and nobody's parameter is dropped."""

import json

import pytest
import torch
import transformers
from decoders import decoder
from families import LENGTH, ROTARY, tiny, tokens
from huggingface_hub.errors import StrictDataclassClassValidationError
from matrix import matrix
from situations import DIFFERENT, distance
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc
from hf_posenc import export_stock, from_pretrained, patch_model, patched, unpatch_model
from hf_posenc.core.registry import family_for, supported_model_types

ORIGINAL = 16
LENGTHS = (ORIGINAL - 6, ORIGINAL + 8, LENGTH + 8, ORIGINAL - 6)  # below, beyond, far beyond, and below again

TYPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 2.0, "beta_slow": 0.05},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},  # and a number per pair, see `base`
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 0.1,
        "high_freq_factor": 1.0,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


def head_dim(family):
    return tiny(family).model.layers[0].self_attn.head_dim if family != "gpt_neox" else 8


def share_of(family):
    """The share of each head that the base turns; GPT-NeoX's own quarter of 8 dimensions would be one pair."""
    return {"gpt_neox": 0.5, "phi": 0.5}.get(family, 1.0)


def parameters(family, kind):
    """Return `rope_parameters` of one type for a family, with a base of frequencies that is nobody's default."""
    made = {"rope_type": kind, "rope_theta": 100.0, **TYPES[kind]}
    if kind == "longrope":
        pairs = int(head_dim(family) * share_of(family)) // 2
        made |= {"short_factor": [1.0 + n / 9 for n in range(pairs)], "long_factor": [1.0 + n for n in range(pairs)]}
    if share_of(family) < 1 or family == "phi3":
        made.setdefault("partial_rotary_factor", share_of(family))
    return made


def base(family, kind, **config):
    """Return a tiny model of a family with this type of rotation; None where transformers itself refuses it."""
    made = parameters(family, kind)
    if family == "gemma3":
        made = {"full_attention": made, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}
    if family == "phi3":
        config["original_max_position_embeddings"] = ORIGINAL
    try:
        model = tiny(family, rope_parameters=made, **config)
        model(tokens(1, 4))
    except (KeyError, ValueError, RuntimeError, StrictDataclassClassValidationError):
        return None
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def seen(model):
    """Logits at several lengths in a row (some types remember the longest), and tokens and scores of cached generation."""
    results = [model(tokens(2, length), use_cache=False).logits for length in LENGTHS]
    made = model.generate(
        tokens(2, ORIGINAL - 4),
        max_new_tokens=8,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        attention_mask=torch.ones(2, ORIGINAL - 4, dtype=torch.long),
        pad_token_id=0,
    )
    return [*results, made.sequences, *made.scores]


def assert_equal(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.equal(theirs)


def test_every_type_of_transformers_is_here():
    assert set(TYPES) == {"default", *ROPE_INIT_FUNCTIONS}


PAIRS = [
    (family, kind)
    for family in ROTARY
    for kind in TYPES
    if (family != "phi3" or kind in ("default", "longrope")) and (family, kind) != ("phi", "proportional")
]


@pytest.mark.rows(default=4, slow=24)
@matrix(PAIRS, family=None, kind=None)
def test_rope_alone_is_the_base_bit_for_bit(family, kind, tmp_path):
    """Live, loaded from its checkpoint, and exported as a stock checkpoint; and `scaling='none'` is another model."""
    expected = seen(base(family, kind))
    model = patch_model(base(family, kind), "rope")
    assert_equal(seen(model), expected)

    model.save_pretrained(tmp_path / "patched")
    entry = json.loads((tmp_path / "patched/config.json").read_text())["position_encoding"]
    said = {
        key: value["full_attention"] if family == "gemma3" else value
        for key, value in entry["schemes"][0].items()
        if key in SAID
    }
    assert said["rope_theta"] == 100.0
    assert said["partial_rotary_factor"] == TYPES[kind].get("partial_rotary_factor", share_of(family))
    assert said["scaling"] == "none" if kind == "default" else said["scaling"]["rope_type"] == kind
    assert kind in str(hf_posenc.describe(model)) or kind == "default"
    loaded = from_pretrained(tmp_path / "patched")
    loaded.generation_config.eos_token_id = None
    assert loaded.config.position_encoding == entry
    assert_equal(seen(loaded), expected)

    export_stock(loaded, tmp_path / "stock")
    stock = type(base(family, kind)).from_pretrained(tmp_path / "stock")
    stock.generation_config.eos_token_id = None
    assert_equal(seen(stock), expected)

    unpatch_model(model)
    assert_equal(seen(model), expected)
    if kind != "default":
        share = {"partial_rotary_factor": 1.0} if kind == "proportional" else {}
        with patched(model, "rope", scaling="none", **share):
            others = seen(model)
        assert any(distance(mine, theirs) > DIFFERENT for mine, theirs in zip(others[:4], expected[:4], strict=True))


SAID = ("rope_theta", "partial_rotary_factor", "scaling")


@pytest.mark.rows(default=2, slow=5)
@pytest.mark.parametrize("family", ROTARY)
def test_a_new_base_of_frequencies_keeps_the_scaling(family):
    kind = "longrope" if family == "phi3" else "linear"
    model = base(family, kind)
    made = {**parameters(family, kind), "rope_theta": 7.0}
    own = {"full_attention": made, "sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}
    # A stock model that says the same itself.
    extra = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    theirs = tiny(family, rope_parameters=own if family == "gemma3" else made, **extra)
    theirs.generation_config.eos_token_id = None
    assert_equal(seen(patch_model(model, "rope", rope_theta=7.0)), seen(theirs))


def test_layer_types_are_scaled_one_by_one():
    """Gemma 3 as it is stretched in practice: its global layers only."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    model, theirs = tiny("gemma3"), tiny("gemma3")
    own = theirs.config.rope_parameters
    theirs = tiny("gemma3", rope_parameters={**own, "full_attention": {**own["full_attention"], **scaling}})
    patch_model(model, "rope", scaling={"full_attention": scaling})
    assert model(tokens()).logits.equal(theirs(tokens()).logits)
    entry = model.config.position_encoding["schemes"][0]
    assert entry["scaling"] == {"full_attention": scaling, "sliding_attention": "none"}
    assert entry["rope_theta"] == {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
    with pytest.raises(
        ValueError, match="names full, which this base does not have: it has sliding_attention, full_at"
    ):
        patch_model(tiny("gemma3"), "rope", rope_theta={"full": 5.0})
    with pytest.raises(ValueError, match="all its layers rotate alike"):
        patch_model(tiny("llama"), "rope", rope_theta={"full_attention": 5.0})


def refuse(scaling, message, family="llama", **hyperparameters):
    model = tiny(family)
    with pytest.raises(ValueError, match=message):
        patch_model(model, "rope", scaling=scaling, **hyperparameters)
    assert not hasattr(model.config, "position_encoding")


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_parameter_that_transformers_does_not_read(family):
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    refuse(dynamic, "dynamic has no parameter original_max_position_embeddings; it has factor", family)
    refuse({"rope_type": "linear", "factor": 2.0, "type": "yarn"}, "linear has no parameter type", family)
    refuse({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1, "mscale": 0.5}, "mscale would not", family)
    refuse({"rope_type": "yarn", "factor": 2.0, "mscale": 0.5}, "mscale would not be read", family)
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    longrope = {"rope_type": "longrope", "factor": 2.0, "attention_factor": 1.2, **lists}
    refuse(longrope, "factor would not be read", family)
    if family == "gemma3":  # transformers looks for it beside the layer types
        refuse({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "no parameter truncate", family)


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi"])
def test_p_rope_turns_the_fastest_pairs_of_whole_heads(family):
    """Three quarters of the pairs, with the frequencies of whole heads; also where the base turns a part of each head."""
    model = patch_model(tiny(family), "rope", scaling={"rope_type": "proportional"}, partial_rotary_factor=0.75)
    expected = 10000.0 ** (-torch.arange(0, 8, 2) / 8) * torch.tensor([1.0, 1.0, 1.0, 0.0])
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    torch.testing.assert_close(rotary.inv_freq, expected)
    assert hf_posenc.verify(model).ok
    ids = tokens()
    assert not model(ids).logits.allclose(patch_model(tiny(family), "rope", rope_theta=10000.0)(ids).logits, atol=1e-2)


LATENT = [
    t for t in supported_model_types() if t in transformers.CONFIG_MAPPING and family_for(t).rotation.parameter_rescales
]


@pytest.mark.rows(default=2, slow=4)
@torch.no_grad()
@pytest.mark.parametrize("model_type", LATENT)
def test_a_scaling_that_the_attention_reads_as_well(model_type, tmp_path):
    """YaRN's `mscale_all_dim` is a factor of the scores too, which an attention computes when it is made."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 0.5}
    own, ids = decoder(model_type), tokens(1)
    beside = {key: own.config.rope_parameters[key] for key in family_for(model_type).rotation.parameter_temperature}

    def logits(model):
        return model(ids, use_cache=False).logits

    scaled = decoder(model_type, rope_parameters={**beside, **scaling, "rope_theta": 1e4})
    unscaled = {**beside, "rope_type": "default", "rope_theta": 1e4}
    plain = decoder(model_type, rope_parameters=unscaled, head_dim=8)  # the part: one type would turn whole heads
    for base, wanted, expected in ((own, scaling, logits(scaled)), (scaled, "none", logits(plain))):
        before = logits(base)
        model = patch_model(base, "rope", rope_theta=1e4, scaling=wanted)
        assert logits(model).equal(expected)
        model.save_pretrained(tmp_path / str(wanted == "none"))
        assert logits(from_pretrained(tmp_path / str(wanted == "none"))).equal(expected)
        assert logits(unpatch_model(model)).equal(before)


MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}


@torch.no_grad()
def test_a_scaling_of_the_bases_own_type_changes_what_it_names():
    """DeepSeek's `mscale_all_dim` is a factor on scores; gpt-oss does not truncate."""
    ids = tokens(1, 40)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    for model_type, extra in (
        ("deepseek_v3", MSCALE),
        ("gpt_oss", {"truncate": False, "beta_fast": 2.0, "beta_slow": 0.05}),
    ):
        base, stock = (decoder(model_type, rope_parameters={**yarn, **extra, "factor": s}) for s in (4.0, 8.0))
        expected = stock(ids, use_cache=False).logits
        model = patch_model(base, "rope", scaling={"rope_type": "yarn", "factor": 8.0})
        assert model(ids, use_cache=False).logits.equal(expected), model_type
        others = decoder(model_type, rope_parameters={**yarn, "factor": 8.0})(ids, use_cache=False).logits
        assert distance(others, expected) > 1e-4  # what the other keys are worth
    attended = decoder("llama", rope_parameters={**yarn, "attention_factor": 1.3})
    with pytest.raises(ValueError, match=r"mscale would not be read: .*attention_factor=None takes the base's away"):
        patch_model(attended, "rope", scaling={"rope_type": "yarn", **MSCALE})
    patch_model(attended, "rope", scaling={"rope_type": "yarn", "attention_factor": None, **MSCALE})
    assert attended.model.rotary_emb.attention_scaling == 1.0


@torch.no_grad()
def test_proportional_is_a_rotation_of_its_own():
    """Gemma 4 turns a quarter of its wide heads by the frequencies of whole heads."""
    base, ids = decoder("gemma4_text"), tokens(1)
    own = base.config.rope_parameters
    halved = {**own, "full_attention": {**own["full_attention"], "factor": 2.0}}
    assert own["full_attention"]["rope_type"] == "proportional"
    expected = decoder("gemma4_text", rope_parameters=halved)(ids, use_cache=False).logits
    for kind in ("linear", "yarn"):
        with pytest.raises(
            ValueError, match=r"would rotate other pairs.*'full_attention': {'rope_type': 'proportional'"
        ):
            patch_model(base, "rope", scaling={"full_attention": {"rope_type": kind, "factor": 2.0}})
    with patched(base, "rope", scaling={"full_attention": {"rope_type": "proportional", "factor": 2.0}}):
        assert base(ids, use_cache=False).logits.equal(expected)
    before = base(ids, use_cache=False).logits
    assert distance(before, expected) > DIFFERENT
    with patched(base, "rope", scaling="none"):
        assert base(ids, use_cache=False).logits.equal(before)


@torch.no_grad()
def test_hunyuans_alpha_stays():
    """Which raises the base of frequencies: its `dynamic` does not depend on the length."""
    own = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    own |= {"mscale_all_dim": 1.0}
    for edit, theta in ({"name": "abf", "factor": 3.0}, 3e4), ({"name": "ntk", "factor": 2.0}, 1e4 * 2 ** (8 / 6)):
        model = patch_model(decoder("hunyuan_v1_dense", rope_parameters=own), "rope", frequencies=edit)
        expected = (theta * 50.0 ** (8 / 6)) ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        torch.testing.assert_close(model.model.rotary_emb.inv_freq.double(), expected, rtol=1e-6, atol=0)
    base = decoder("hunyuan_v1_dense", rope_parameters=own)
    with pytest.raises(ValueError, match="dynamic has no parameter factor; it has alpha"):
        patch_model(base, "rope", scaling={"rope_type": "dynamic", "factor": 2.0})
    expected = base(tokens(1), use_cache=False).logits
    patch_model(base, "rope", scaling={key: value for key, value in own.items() if key != "rope_theta"})
    assert base(tokens(1), use_cache=False).logits.equal(expected)


def test_what_a_type_does_not_take_is_said():
    with pytest.raises(ValueError, match=r"phi3 cannot rotate by yarn: .*Give a scaling that it takes"):
        patch_model(tiny("phi3"), "rope", scaling={"rope_type": "yarn", "factor": 2.0})
    factors = {"short_factor": [1.0] * 3, "long_factor": [1.0] * 3}
    with pytest.raises(ValueError, match=r"one number for each rotated pair of a head"):
        patch_model(tiny("llama"), "rope", scaling={"rope_type": "longrope", **factors})


def test_a_rotary_module_of_which_the_config_says_nothing_is_refused():
    model = tiny("gpt_neox")
    model.config.rope_parameters = None
    with pytest.raises(hf_posenc.UnsupportedModelError, match="gpt_neox has no rope_parameters"):
        patch_model(model, "rope")


@torch.no_grad()
@pytest.mark.parametrize(
    ("field", "value"), [("scaling", {"rope_type": "linear", "factor": 8.0}), ("rope_theta", 5e6)], ids=str
)
def test_one_value_for_layer_types_that_rotate_differently(field, value, tmp_path, recwarn):
    """Gemma 3 is stretched in its global layers only; OLMo 3 scales only these."""
    with pytest.warns(UserWarning, match=f"{field} is one value for .*give {field}={{'full_attention': "):
        patch_model(tiny("gemma3"), "rope", **{field: value})
    olmo = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    olmo["full_attention"] = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    if field == "scaling":
        with pytest.warns(UserWarning, match="give scaling={'full_attention': "):
            patch_model(decoder("olmo3", rope_parameters=olmo), "rope", scaling=value)
    recwarn.clear()
    if field == "rope_theta":  # its layer types have one
        patch_model(decoder("olmo3", rope_parameters=olmo), "rope", rope_theta=value)
    wanted = patch_model(tiny("gemma3"), "rope", **{field: {"full_attention": value}})
    model = patch_model(tiny("gemma3"), "rope", layers="full_attention", **{field: value})
    assert not recwarn.list
    assert distance(model(tokens()).logits, wanted(tokens()).logits) == 0
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no stock class computes"):
        export_stock(model, tmp_path / "stock")
    export_stock(wanted, tmp_path / "stock")
    again = type(tiny("gemma3")).from_pretrained(tmp_path / "stock")
    assert distance(again(tokens()).logits, wanted(tokens()).logits) < 1e-5
