"""Patching is undone exactly: after unpatching, after an exception, and after a failure at any step of patching."""

import copy
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from families import FAMILIES, LENGTH, tiny, tokens
from matrix import matrix
from rows import ACTS, NEUTRAL
from situations import JOINING, ROTARY_SCHEMES, randomize, skip_if_refused
from snapshots import assert_same, logits, snapshot
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import (
    AlreadyPatchedError,
    NotPatchedError,
    UnsupportedModelError,
    available_schemes,
    patch_model,
    patched,
    unpatch_model,
)
from hf_posenc.core.registry import scheme_class
from hf_posenc.model.undo import Undo
from hf_posenc.schemes.base import ScoreScheme

# Every scheme with its defaults, and every option that changes which modules, hooks or parameters are put in.
VARIANTS = {
    **{scheme: (scheme, ACTS[scheme]) for scheme in available_schemes()},
    "sinusoidal-every-layer": ("sinusoidal", {"placement": "every_layer"}),
    "sinusoidal-trainable": ("sinusoidal", {"trainable": True}),
    "sinusoidal-trainable-every-layer": ("sinusoidal", {"trainable": True, "placement": "every_layer"}),
    "learned-longer": ("learned", {"num_positions": 2 * LENGTH}),
    "learned-every-layer-shared": ("learned", {"placement": "every_layer"}),
    "learned-every-layer": ("learned", {"placement": "every_layer", "share_layers": False}),
    "rope-linear": ("rope", {"scaling": {"rope_type": "linear", "factor": 2.0}}),
    "rope-partial": ("rope", {"partial_rotary_factor": 0.5}),
    "shaw-shared": ("shaw", {"share_layers": True, "max_distance": 4}),
    "shaw-per-head": ("shaw", {"share_heads": False, "values": False, "max_distance": 4}),
    "alibi-trainable": ("alibi", {"trainable": True}),
    "da_transformer-linear": ("da_transformer", {"relu": False}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_scheme = pytest.mark.parametrize("scheme", available_schemes())


def variants_of(family):
    """Names of the variants that the family can carry."""
    return [name for name in VARIANTS if (family, name) != ("phi3", "rope-linear")]  # Phi3Config allows longrope only


FAMILY_VARIANTS = [(family, variant) for family in FAMILIES for variant in variants_of(family)]


def is_neutral(model, variant):
    """Whether the patch starts as the base itself: its own rotation again, or its own table of positions."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    if variant == "rope":
        return theta is not None
    if variant == "rope-partial":
        return rope.get("partial_rotary_factor") == 0.5
    if variant == "rope_by_head":  # whose heads have one pair
        return rope.get("partial_rotary_factor") == 0.25
    return theta is None and variant in ("learned", "learned-longer")


# ---------------------------------------------------------------------------------------------------------------- undo


@pytest.mark.parametrize(("family", "variant"), FAMILY_VARIANTS)
def test_unpatch_restores_everything(family, variant):
    scheme, hyperparameters = VARIANTS[variant]
    model = tiny(family)
    skip_if_refused(scheme, model)
    before = snapshot(model)
    neutral = is_neutral(model, variant)
    assert patch_model(model, scheme, seed=0, **hyperparameters) is model
    during = logits(randomize(model) if scheme in NEUTRAL else model)
    if neutral:  # without the first row, whose padding OPT gives a position of its own
        assert during[1].equal(before.logits[1]), "the patch changed what it should keep"
    else:
        assert not torch.allclose(during[1], before.logits[1], rtol=1e-2, atol=1e-2), "the patch did nothing"
    assert unpatch_model(model) is model
    assert_same(snapshot(model), before)


@every_scheme
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_patched_undoes_itself_also_after_an_exception(family, scheme):
    model = tiny(family)
    before = snapshot(model)
    with patched(model, scheme, seed=0, **ACTS[scheme]) as inside:
        assert inside is model
        logits(model)
    assert_same(snapshot(model), before)
    with pytest.raises(KeyboardInterrupt), patched(model, scheme, seed=0, **ACTS[scheme]):
        raise KeyboardInterrupt
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_patched_whose_body_unpatches(family):
    """It ends with a stock model."""
    model = tiny(family)
    before = snapshot(model)
    with patched(model, "alibi"):
        unpatch_model(model)
    assert_same(snapshot(model), before)
    with patched(model, "alibi"):
        unpatch_model(model)
        patch_model(model, "nope")
    assert_same(snapshot(model), before)


FAILING = [(family, variant) for family in ("gpt2", "llama") for variant in VARIANTS] + [
    (family, variant)
    for family in ("opt", "gemma3", "phi", "smollm3")
    for variant in ("rope", "shaw", "learned-every-layer")
]


@pytest.mark.rows(default=8, slow=74)
@matrix(
    [(*row, moment) for row in FAILING for moment in ("before-recording", "after-recording")],
    family=None,
    variant=None,
    moment=None,
)
def test_a_failure_at_any_step_leaves_the_model_as_it_was(monkeypatch, family, variant, moment):
    scheme, hyperparameters = VARIANTS[variant]
    model = tiny(family)
    before = snapshot(model)
    record = Undo.add
    steps = 0

    def add(undo, *step):
        nonlocal steps
        steps += 1
        if moment == "after-recording":
            record(undo, *step)
        if steps == failing:
            raise MemoryError(f"injected at step {failing}")
        if moment == "before-recording":
            record(undo, *step)

    monkeypatch.setattr("hf_posenc.model.undo.Undo.add", add)
    for failing in range(1, 200):  # noqa: B007  (`add` reads it)
        steps = 0
        try:
            patch_model(model, scheme, seed=0, **hyperparameters)
        except MemoryError:
            assert_same(snapshot(model, run=False), snapshot_without_logits(before))
        else:
            break
    assert failing > 5
    assert steps == failing - 1, "the last run must be the one that needed no failing step"
    monkeypatch.undo()
    unpatch_model(model)
    assert_same(snapshot(model), before)


def snapshot_without_logits(whole):
    return type(whole)(**{**vars(whole), "logits": torch.empty(0)})


@pytest.mark.parametrize(
    "where",
    [
        "patching.changes._guard",
        "api.make_entry",
        "checkpoints.model_classes.model_class",
    ],
)
@every_scheme
def test_a_failure_between_steps_leaves_the_model_as_it_was(monkeypatch, scheme, where):
    def fail(*args, **kwargs):
        raise MemoryError("injected")

    for family in ("gpt2", "llama"):
        model = tiny(family)
        before = snapshot(model)
        with monkeypatch.context() as patch:
            patch.setattr(f"hf_posenc.{where}", fail)
            with pytest.raises(MemoryError):
                patch_model(model, scheme, seed=0, **ACTS[scheme])
        assert_same(snapshot(model), before)


@every_scheme
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
def test_hooks_that_were_there_stay_and_ours_go(family, scheme):
    """Handles of hooks registered before, between and after stay valid, whatever the order of removal."""
    model = tiny(family)
    skip_if_refused(scheme, model)
    layer = model.get_submodule("transformer.h.0" if family == "gpt2" else "model.layers.0")
    calls = []
    early = layer.register_forward_pre_hook(lambda *_: calls.append("early"))
    before = snapshot(model)
    patch_model(model, scheme, seed=0, **ACTS[scheme])
    late = layer.register_forward_pre_hook(lambda *_: calls.append("late"))
    logits(model)
    assert calls[-2:] == ["early", "late"]
    unpatch_model(model)
    calls.clear()
    logits(model)
    assert calls == ["early", "late"]
    late.remove()
    assert_same(snapshot(model), before)
    early.remove()
    assert not layer._forward_pre_hooks


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal"])
def test_outputs_that_the_config_asks_for_are_all_there(scheme):
    """transformers installs the hooks that record outputs once, in the first forward that is asked for any."""
    model, ids = tiny("llama", output_hidden_states=True), tokens()
    expected = tiny("llama", output_hidden_states=True)(ids).hidden_states
    patch_model(model, scheme)
    left = []  # by each layer
    watches = [layer.register_forward_hook(lambda _, args, output: left.append(output)) for layer in model.model.layers]
    states = model(ids).hidden_states
    assert len(states) == len(expected) == 3
    assert states[1].equal(left[0])
    if scheme != "sinusoidal":
        assert states[0].equal(expected[0])
    for watch in watches:
        watch.remove()
    unpatch_model(model)
    after = model(ids).hidden_states
    assert len(after) == 3
    assert all(one.equal(other) for one, other in zip(after, expected, strict=True))


def test_two_threads_on_one_model():
    """One call changes it, the other is refused."""
    model, refused = tiny("llama"), []

    def meanwhile():
        for change in (lambda: patch_model(model.model, "t5"), lambda: unpatch_model(model)):
            with pytest.raises(UnsupportedModelError, match="another call is patching, unpatching or calibrating"):
                change()
            refused.append(change)

    def on_embedding(*_):
        watch.remove()
        with ThreadPoolExecutor(1) as other:
            other.submit(meanwhile).result()

    watch = model.model.embed_tokens.register_forward_hook(on_embedding)
    patch_model(model, "sinusoidal")  # measures the vectors that enter the first layer
    assert len(refused) == 2
    assert logits(model).equal(logits(patch_model(tiny("llama"), "sinusoidal")))


@every_scheme
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_another_scheme_after_unpatching(family, scheme):
    other = {"alibi": "learned", "learned": "rope"}.get(scheme, "alibi")
    fresh = logits(patch_model(tiny(family), other, seed=0))
    model = tiny(family)
    before = snapshot(model)
    for _ in range(2):
        patch_model(model, scheme, seed=0, **ACTS[scheme])
        logits(model)
        unpatch_model(model)
        assert logits(patch_model(model, other, seed=0)).equal(fresh)
        unpatch_model(model)
    assert_same(snapshot(model), before)


# ---------------------------------------------------------------------------------------------------- what came between


CAST = [(family, scheme) for family in ("gpt2", "llama") for scheme in available_schemes()] + [
    (family, scheme) for family in FAMILIES if family not in ("gpt2", "llama") for scheme in ("nope", "rope", "alibi")
]


@pytest.mark.parametrize(("family", "scheme"), CAST)
def test_unpatch_after_a_cast_is_the_stock_model_cast(family, scheme):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme]).to(torch.bfloat16)
    logits(model)
    unpatch_model(model)
    expected = tiny(family).to(torch.bfloat16)
    # The base's own rotary module was kept aside, in the precision it had: as when a model is loaded in bfloat16.
    # `rope` as the base has it leaves the module in its place, and so does what joins the base's rotation.
    for name, buffer in tiny(family).named_buffers():
        if name.endswith("inv_freq") and scheme not in (*ROTARY_SCHEMES, *JOINING):
            owner, _, leaf = name.rpartition(".")
            setattr(expected.get_submodule(owner), leaf, buffer)
    assert {key: value.dtype for key, value in model.state_dict().items()} == {
        key: value.dtype for key, value in expected.state_dict().items()
    }
    for (name, buffer), (_, wanted) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert buffer.dtype == wanted.dtype, name
    assert logits(model).equal(logits(expected))


@every_scheme
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gemma2"])
def test_unpatch_after_training_keeps_the_trained_weights(family, scheme):
    model = tiny(family)
    names = set(model.state_dict())
    start = {key: value.clone() for key, value in model.state_dict().items()}
    patch_model(model, scheme, seed=0, **ACTS[scheme]).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    trained = {key: value.clone() for key, value in model.state_dict().items() if key in names}
    unpatch_model(model)
    assert model.training
    assert all(module.training for module in model.modules())
    after = model.state_dict()
    assert set(after) == names
    kept = [
        key for key in trained if "wpe" not in key and "embed_positions" not in key and after[key].equal(trained[key])
    ]
    assert set(kept) >= names - {"transformer.wpe.weight", "model.decoder.embed_positions.weight"}
    assert not all(after[key].equal(start[key]) for key in names), "nothing was trained"
    model.eval()
    fresh = tiny(family)
    fresh.load_state_dict(after)
    assert logits(model).equal(logits(fresh))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@matrix(variant=VARIANTS, family=["gpt2", "llama"], copier=[copy.deepcopy, pickled])
def test_a_copy_is_undone_by_itself(family, variant, copier):
    scheme, hyperparameters = VARIANTS[variant]
    stock = tiny(family)
    expected = logits(stock)
    original = patch_model(stock, scheme, seed=0, **hyperparameters)
    patched_logits = logits(original)
    other = copier(original)
    assert type(other) is type(original)
    assert type(other.config) is type(original.config)
    assert logits(other).equal(patched_logits)

    before = snapshot(original)
    unpatch_model(other)
    assert logits(other).equal(expected)
    assert_same(snapshot(original), before)
    assert not set(map(id, other.modules())) & set(map(id, original.modules()))
    with pytest.raises(AlreadyPatchedError):
        patch_model(original, scheme)

    another = copier(original)
    unpatch_model(original)
    assert logits(original).equal(expected)
    assert logits(another).equal(patched_logits)
    unpatch_model(another)
    assert logits(another).equal(expected)


@every_scheme
def test_models_that_share_a_config_never_lose_positions_in_silence(scheme):
    """Two models built from one config object: patching the first tells the config, and the second reads it."""
    config = tiny("llama").config
    first, second = transformers.LlamaForCausalLM(config).eval(), transformers.LlamaForCausalLM(config).eval()
    expected = logits(second)
    patch_model(first, scheme, **ACTS[scheme])
    if issubclass(scheme_class(scheme), ScoreScheme) or scheme in JOINING:
        with pytest.raises(ValueError, match="carries no position encoding"):
            logits(second)
    else:
        assert logits(second).equal(expected)
    with pytest.raises(AlreadyPatchedError, match=r"make each model from a config of its own, copy\.deepcopy"):
        patch_model(second, "nope")
    unpatch_model(first)
    assert logits(second).equal(expected)


@every_scheme
def test_seed_gives_the_same_parameters_and_leaves_the_generator(scheme):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one = patch_model(tiny("llama"), scheme, seed=5, **ACTS[scheme]).state_dict()
    assert torch.get_rng_state().equal(state)
    two = patch_model(tiny("llama"), scheme, seed=5, **ACTS[scheme]).state_dict()
    assert all(one[key].equal(two[key]) for key in one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@every_variant
def test_new_parameters_take_the_layers_dtype(variant, dtype):
    scheme, hyperparameters = VARIANTS[variant]
    for family in ("gpt2", "llama"):
        model = patch_model(tiny(family).to(dtype), scheme, seed=0, **hyperparameters)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert all(parameter.ndim >= 1 for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.rows(default=20)
@every_variant
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, family, variant):
    scheme, hyperparameters = VARIANTS[variant]
    model = patch_model(tiny(family), scheme, seed=0, **hyperparameters)
    with torch.no_grad():  # away from the start, where some parameters are zero
        for name, parameter in model.named_parameters():
            if "posenc" in name or "wpe" in name:
                parameter.add_(torch.linspace(0.0, 0.5, parameter.numel()).view_as(parameter))
    expected = logits(model)
    model.save_pretrained(tmp_path)

    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == f"posenc_{family}"
    assert saved["architectures"] == [type(model).__name__] == [f"PosEnc{type(tiny(family)).__name__}"]
    assert saved["position_encoding"]["schemes"][0]["scheme"] == scheme
    assert set(hyperparameters) <= set(saved["position_encoding"]["schemes"][0])
    assert saved["attn_implementation"] == "hf_posenc_patched"  # a name that nothing is registered under

    for load in (hf_posenc.from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is type(model)
        assert list(loaded.state_dict()) == list(model.state_dict())
        assert logits(loaded).equal(expected)
        with pytest.raises(NotPatchedError, match="load the stock checkpoint"):
            unpatch_model(loaded)
        with pytest.raises(AlreadyPatchedError):
            patch_model(loaded, "nope")


def test_a_stock_checkpoint_saved_after_unpatching_is_stock(tmp_path):
    model = tiny("llama")
    expected = logits(model)
    model.save_pretrained(tmp_path / "before")
    with patched(model, "shaw"):
        logits(model)
    model.save_pretrained(tmp_path / "after")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "before")) == sorted(os.listdir(tmp_path / "after"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "after")
    assert logits(loaded).equal(expected)


@every_variant
def test_the_default_device_and_dtype_do_not_matter(variant):
    scheme, hyperparameters = VARIANTS[variant]
    expected = logits(patch_model(tiny("gpt2"), scheme, seed=0, **hyperparameters))
    model = tiny("gpt2")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            patch_model(model, scheme, seed=0, **hyperparameters)
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits(model).equal(expected)
