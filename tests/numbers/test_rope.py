"""RoPE without hyper-parameters is the base itself: whatever rotation the base has, and nobody's parameter is dropped."""

import inspect
import json

import pytest
import torch
import transformers
from decoders import decoder
from families import LENGTH, ROTARY, tiny, tokens
from huggingface_hub.errors import StrictDataclassClassValidationError
from matrix import matrix
from situations import DIFFERENT, distance
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posenc
from hf_posenc import export_stock, from_pretrained, patch_model, patched, unpatch_model, verify
from hf_posenc.registry import family_for, supported_model_types
from hf_posenc.schemes.rope import WITH_LENGTH, Rope

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


def test_what_is_left_out():
    """Pairs that transformers refuses to build or to run, so that there is no base to compare with."""
    refused = {(family, kind) for family in ROTARY for kind in TYPES if base(family, kind) is None}
    only_longrope = {("phi3", kind) for kind in TYPES if kind not in ("default", "longrope")}
    assert refused == only_longrope | {("phi", "proportional")}


PAIRS = [
    (family, kind)
    for family in ROTARY
    for kind in TYPES
    if (family != "phi3" or kind in ("default", "longrope")) and (family, kind) != ("phi", "proportional")
]


@pytest.mark.rows(default=4)
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


def test_layers_that_do_not_rotate_stay_so(tmp_path):
    model = tiny("smollm3", no_rope_layers=[1, 0])
    expected = model(tokens()).logits
    patch_model(model, "rope")
    assert model(tokens()).logits.equal(expected)
    report = verify(model)
    assert report.ok
    assert [layer.expected for layer in report.layers] == [True, False]
    with torch.no_grad():
        unpatch_model(model)
        patch_model(model, "rope", rope_theta=7.0)
        assert verify(model).ok
        assert [bool(layer.self_attn.use_rope) for layer in model.model.layers] == [True, False]
        export_stock(model, tmp_path)
        stock = transformers.SmolLM3ForCausalLM.from_pretrained(tmp_path)
        assert stock(tokens()).logits.equal(model(tokens()).logits)


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


# ------------------------------------------------------------------------------------------- parameters that nobody reads


def refuse(scaling, message, family="llama", **hyperparameters):
    model = tiny(family)
    if family == "gpt_neox":  # more than the one pair that a quarter of 8 dimensions is
        hyperparameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match=message):
        patch_model(model, "rope", scaling=scaling, **hyperparameters)
    assert not hasattr(model.config, "position_encoding")


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "gemma3"])
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


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "default"])
def test_what_a_type_needs_is_named(kind):
    refuse({"rope_type": kind}, r"needs \w*factor") if kind != "proportional" else None
    refuse({"rope_type": kind, **parameters("llama", kind), "oops": 1.0}, "beside scaling, not in it")


def test_a_base_with_parameters_that_nobody_reads_is_still_the_base():
    stray = {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0, "finetuned": True, "mrope_section": [1, 1, 2]}
    model = tiny("llama", rope_parameters=stray)
    expected = model(tokens()).logits
    patch_model(model, "rope")
    assert model(tokens()).logits.equal(expected)
    assert model.config.position_encoding["schemes"][0]["scaling"] == {"rope_type": "linear", "factor": 3.0}
    ignored = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}  # LLaMA turns whole heads
    model = tiny("llama", rope_parameters=ignored)
    expected = model(tokens()).logits
    assert patch_model(model, "rope")(tokens()).logits.equal(expected)
    assert model.config.position_encoding["schemes"][0]["partial_rotary_factor"] == 1.0


def test_the_length_that_phi3_keeps_beside_its_parameters_follows_them(tmp_path):
    """transformers prefers `config.original_max_position_embeddings` to the one in `rope_parameters`."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 4.0}
    model = patch_model(tiny("phi3"), "rope", scaling={**scaling, "original_max_position_embeddings": ORIGINAL})
    short, long = (
        patch_model(tiny("phi3"), "rope", scaling={**scaling, "original_max_position_embeddings": length})
        for length in (ORIGINAL, 4096)
    )
    ids = tokens(2, ORIGINAL + 6)
    assert distance(short(ids).logits, long(ids).logits) > DIFFERENT
    model.save_pretrained(tmp_path)
    assert from_pretrained(tmp_path)(ids).logits.equal(model(ids).logits)
    assert model.config.original_max_position_embeddings == ORIGINAL


# ------------------------------------------------------------------------------------------ checkpoints of version 0.1.0


def as_written_by_0_1_0(folder, rope_parameters):
    """Turn a saved patched checkpoint into what version 0.1.0 wrote: what was not given is null, null scaling is none."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("hf_posenc_digests", None)
    config["position_encoding"] = {
        "scheme": "rope",
        "rope_theta": None,
        "layout": "half",
        "partial_rotary_factor": None,
        "scaling": None,
        "hf_posenc_version": "0.1.0",
    }
    if rope_parameters is not None:
        config["rope_parameters"] = rope_parameters
    path.write_text(json.dumps(config))


def test_a_checkpoint_of_0_1_0_has_no_scaling(tmp_path):
    llama3 = parameters("llama", "llama3")
    model = patch_model(tiny("llama", rope_parameters=llama3), "rope", scaling="none")
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path)
    as_written_by_0_1_0(tmp_path, {"rope_type": "default", "rope_theta": 100.0})
    loaded = from_pretrained(tmp_path)
    assert loaded(tokens()).logits.equal(expected)
    assert loaded.config.position_encoding["schemes"][0]["scaling"] == "none"
    loaded.save_pretrained(tmp_path / "again")
    assert from_pretrained(tmp_path / "again")(tokens()).logits.equal(expected)

    model = patch_model(tiny("gpt2"), "rope", rope_theta=10000.0)
    expected = model(tokens()).logits
    model.save_pretrained(tmp_path / "gpt2")
    as_written_by_0_1_0(tmp_path / "gpt2", None)
    assert from_pretrained(tmp_path / "gpt2")(tokens()).logits.equal(expected)


def test_a_smollm3_of_0_1_0_rotates_in_every_layer(tmp_path):
    model = patch_model(tiny("smollm3", no_rope_layers=[1, 1]), "rope")
    expected = model(tokens()).logits
    model.config.no_rope_layers = [1, 0]  # what 0.1.0 left in the config, while every layer was rotated
    model.save_pretrained(tmp_path / "old")
    as_written_by_0_1_0(tmp_path / "old", None)
    loaded = from_pretrained(tmp_path / "old")
    assert loaded(tokens()).logits.equal(expected)
    export_stock(loaded, tmp_path / "stock")
    assert transformers.SmolLM3ForCausalLM.from_pretrained(tmp_path / "stock")(tokens()).logits.equal(expected)


# ------------------------------------------------------------------------------------- what is assumed of transformers


def test_which_types_know_the_length_of_the_training():
    """`standardize_rope_params` fills it in for these, and their functions cannot do without it."""
    for kind in ROPE_INIT_FUNCTIONS:
        config = LlamaConfig(max_position_embeddings=77, hidden_size=32, num_attention_heads=4)
        config.rope_parameters = {**parameters("llama", kind)}
        config.rope_parameters.pop("original_max_position_embeddings", None)
        config.standardize_rope_params()
        assert ("original_max_position_embeddings" in config.rope_parameters) == (kind in WITH_LENGTH)


def test_parameters_are_read_from_the_dict_that_the_config_holds():
    """Which is how we know what transformers reads: through `[]` and `get` of that object, not of a copy."""
    from hf_posenc.upstream.rotary import _RecordedParameters

    for kind, function in ROPE_INIT_FUNCTIONS.items():
        config = LlamaConfig(max_position_embeddings=LENGTH, hidden_size=32, num_attention_heads=4)
        asked = _RecordedParameters({**parameters("llama", kind), "nobody": 1.0})
        config.rope_parameters = asked
        function(config)
        assert config.rope_parameters is asked
        assert asked.unread() == {"nobody"}, kind
        assert {"rope_theta"} <= asked.keys_read
    assert "rope_parameters" in inspect.getsource(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "phi"])
def test_p_rope_turns_the_fastest_pairs_of_whole_heads(family):
    """Three quarters of the pairs, with the frequencies of whole heads; also where the base turns a part of each head."""
    model = patch_model(tiny(family), "rope", scaling={"rope_type": "proportional"}, partial_rotary_factor=0.75)
    expected = 10000.0 ** (-torch.arange(0, 8, 2) / 8) * torch.tensor([1.0, 1.0, 1.0, 0.0])
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    torch.testing.assert_close(rotary.inv_freq, expected)
    assert hf_posenc.verify(model).ok
    ids = tokens()
    assert not model(ids).logits.allclose(patch_model(tiny(family), "rope", rope_theta=10000.0)(ids).logits, atol=1e-2)


def test_resolved_is_resolved():
    for kind in TYPES:
        own = parameters("llama", kind)
        once = Rope().with_base(own, LENGTH, tuple(ROPE_INIT_FUNCTIONS))
        assert once.with_base({"rope_type": "default", "rope_theta": 1.0}, 5, tuple(ROPE_INIT_FUNCTIONS)) == once
        assert Rope.parse(json.loads(json.dumps(once.hyperparameters()))) == once
    assert family_for("smollm3").rotation.config_switches in transformers.SmolLM3Config().to_dict()


LATENT = [t for t in supported_model_types() if t in transformers.CONFIG_MAPPING and family_for(t).rotation.rescales]


@pytest.mark.rows(default=2)
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


@torch.no_grad()
def test_a_scaling_in_some_layers_that_the_attention_reads_as_well(tmp_path):
    """Layers that are named one after the other are those that are named at once."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 0.5}
    model = patch_model(decoder("deepseek_v3"), [Rope(layers=[n], scaling=scaling) for n in (0, 1)])
    expected = patch_model(decoder("deepseek_v3"), "rope", scaling=scaling)(tokens(1), use_cache=False).logits
    torch.testing.assert_close(model(tokens(1), use_cache=False).logits, expected)
    model.save_pretrained(tmp_path)
    assert from_pretrained(tmp_path)(tokens(1), use_cache=False).logits.allclose(expected)
