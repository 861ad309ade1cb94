"""verify says yes to every working patch, says what is wrong with a dead one, and leaves no trace."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from families import tiny
from rows import ACTS
from situations import EMBEDDING_SCHEMES, JOINING, ROTARY_SCHEMES, WITHOUT_POSITIONS, skip_if_refused
from snapshots import assert_same, snapshot
from transformers.models.llama import modeling_llama

from hf_posenc import (
    NotPatchedError,
    UnsupportedModelError,
    available_schemes,
    from_pretrained,
    patch_model,
    registry,
    unpatch_model,
    verify,
)
from hf_posenc.families.base import resolve
from hf_posenc.modules import PositionModule, ScoreModule
from hf_posenc.placement import OnRotary
from hf_posenc.registry import family_for, scheme_class
from hf_posenc.schemes import Forgetting, QKNorm, Temperature
from hf_posenc.schemes.base import ScoreScheme
from hf_posenc.schemes.rope import Rope

FAMILIES = ("gpt2", "llama", "gemma2", "opt")
SCORES = tuple(name for name in available_schemes() if issubclass(scheme_class(name), ScoreScheme))
VARIANTS = {
    **{scheme: (scheme, ACTS[scheme]) for scheme in available_schemes()},
    "sinusoidal-every-layer": ("sinusoidal", {"placement": "every_layer"}),
    "sinusoidal-trainable": ("sinusoidal", {"trainable": True}),
    "learned-every-layer": ("learned", {"placement": "every_layer", "share_layers": False}),
    "learned-short": ("learned", {"num_positions": 5}),
    "transformer_xl-shared": ("transformer_xl", {"share_biases": True}),
    "shaw-shared": ("shaw", {"share_layers": True}),
    "alibi-trainable": ("alibi", {"trainable": True}),
}


def parts(model):
    """The modules of a patched (or stock) model that its adapter names."""
    return resolve(family_for(model.config.model_type.removeprefix("posenc_")), model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_working_patch_is_ok(family, variant):
    scheme, hyperparameters = VARIANTS[variant]
    if variant == "learned-short" and family == "opt":
        hyperparameters = {"num_positions": 9}
    model = tiny(family)
    skip_if_refused(scheme, model)
    patch_model(model, scheme, seed=0, **hyperparameters)
    report = verify(model)
    assert report.ok, str(report)
    assert report
    assert not report.problems
    assert report.scheme == scheme
    assert [layer.index for layer in report.layers] == list(range(len(parts(model).layers)))
    assert all(layer.ok for layer in report.layers)
    assert report.answers_through == ("mask" if scheme in WITHOUT_POSITIONS else "positions")
    assert report.order_response > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_are_where_the_scheme_acts(family):
    has_table = family in ("gpt2", "opt")
    for scheme, everywhere in [("rope", True), ("alibi", True), ("sinusoidal", False), ("nope", False)]:
        report = verify(patch_model(tiny(family), scheme))
        first, *rest = [layer.live_response > 0 for layer in report.layers]
        assert all(rest) if everywhere else not any(rest)
        assert first == (everywhere or (scheme == "sinusoidal" and not has_table))
        assert (report.input_response > 0) == (scheme == "sinusoidal" and has_table)
        assert (report.model_response > 1e-3) == (scheme != "nope")


@pytest.mark.parametrize("family", FAMILIES)
def test_nope_answers_only_through_the_mask(family):
    report = verify(patch_model(tiny(family), "nope"))
    assert report.model_response == report.input_response == 0
    assert all(layer.response == layer.live_response == 0 for layer in report.layers)
    assert report.order_response > 1e-3
    assert "answers through mask" in str(report)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_da_transformer_is_neutral_but_alive(family):
    report = verify(patch_model(tiny(family), "da_transformer"))
    assert report.ok, str(report)
    assert all(layer.response == 0 < layer.live_response for layer in report.layers)


class FromFarOn(ScoreModule):
    """Keys more than 8192 tokens away cost something, or queries from 8192 on attend more sharply (Llama 4)."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def scores(self, call):
        if self.of == "distance":
            return call.products() - 0.01 * (call.distance() - 8192).clamp(min=0)
        return call.products() * (1 + 0.1 * (1 + call.query_position() // 8192).log())


@dataclass(frozen=True, kw_only=True)
class ActsFromFarOn(ScoreScheme):
    name: ClassVar[str] = "from_far_on"
    of: str = "distance"

    def build(self, dims):
        return FromFarOn(self.of)


@pytest.mark.parametrize("of", ["distance", "position"])
def test_a_scheme_that_acts_from_far_on_is_no_false_alarm(of, monkeypatch):
    monkeypatch.setitem(registry._SCHEMES, "from_far_on", ActsFromFarOn)
    model = patch_model(tiny("llama"), "from_far_on", of=of)
    report = verify(model)
    assert report.ok, str(report)
    assert all(layer.response == 0 < layer.live_response for layer in report.layers)
    model.model.layers[1].self_attn.posenc = ScoreModule()
    assert verify(model).problems == ("layer 1 ignores positions",)


class OnBoth(OnRotary):
    attends = True

    def fit(self, scheme, base):
        base.require_our_attention(scheme.name)
        return super().fit(scheme, base)

    def put(self, scheme, site):
        super().put(scheme, site)
        for layer in site.layers:
            site.on_attention(layer, FromFarOn("position"))


@dataclass(frozen=True, kw_only=True)
class TurnsAndAttends(Rope):
    name: ClassVar[str] = "turns_and_attends"

    @property
    def acts_on(self):
        return OnBoth()


@pytest.mark.parametrize("theta", [None, 50.0])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_scheme_on_scores_that_rotates_as_well(family, theta, monkeypatch):
    monkeypatch.setitem(registry._SCHEMES, "turns_and_attends", TurnsAndAttends)
    report = verify(patch_model(tiny(family), "turns_and_attends", rope_theta=theta))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("addition", "acts", "live"),
    [
        (Temperature(length=4), True, True),
        (Temperature(length=8192), False, True),  # acts beyond the tokens of the probe, with other parameters or not
        (Temperature("constant", trainable=True), False, True),
        (Temperature("constant"), False, False),
        (Forgetting(), True, True),
        (QKNorm(), False, True),
    ],
)
def test_an_addition_acts_or_is_neutral(addition, acts, live):
    model = patch_model(tiny("llama"), [Rope(rope_theta=50.0), addition])
    report = verify(model)
    assert report.ok, str(report)
    assert [(each.scheme, each.layer) for each in report.additions] == [(addition.name, 0), (addition.name, 1)]
    for each in report.additions:
        assert (each.acts, each.live_response > 1e-3) == (acts, live)
    assert f"adds       {addition.name}: acts in {2 if acts else 0}/2 layers" in str(report)
    assert not verify(patch_model(tiny("llama"), "rope")).additions


def test_additions_are_reported_apart():
    model = patch_model(tiny("llama"), [Temperature(length=4, layers=[1]), QKNorm(), Forgetting(layers=[0])])
    found = {(each.scheme, each.layer): each.acts for each in verify(model).additions}
    expected = {("temperature", 1): True, ("qk_norm", 0): False, ("qk_norm", 1): False, ("forgetting", 0): True}
    assert found == expected
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for parameter in attention.posenc_additions.qk_norm.parameters():
            parameter.add_(0.5)
    report = verify(model)
    assert "qk_norm: acts in 1/2 layers; neutral in layer 0" in str(report)
    attention.posenc_additions.temperature.forward = lambda call: call  # a module without parameters
    report = verify(model)
    assert report.ok
    assert "temperature: acts in 0/1 layers" in str(report)


# ------------------------------------------------------------------------------------------------------ what it must catch


@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bias_that_is_never_added_is_caught(family, scheme):
    """Replaced by a module with the same parameters that computes plain attention."""

    class Dead(ScoreModule):
        """`ScoreModule.scores` is plain q.k."""

    model = patch_model(tiny(family), scheme, seed=0)
    for attention in parts(model).attentions:
        dead = Dead()
        for name, parameter in attention.posenc.named_parameters():
            dead.register_parameter(name, parameter)
        attention.posenc = dead
    report = verify(model)
    assert not report
    assert all(any(f"layer {index} ignores positions" in problem for problem in report.problems) for index in (0, 1))
    assert "NOT OK" in str(report)
    assert "should answer" in str(report)


@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_dead_layer_is_caught_and_named(family, scheme):
    model = patch_model(tiny(family), scheme, seed=0)
    parts(model).attentions[1].posenc = ScoreModule()
    report = verify(model)
    assert not report
    assert [layer.ok for layer in report.layers] == [True, False]
    assert report.problems == ("layer 1 ignores positions",)


@pytest.mark.parametrize("scheme", JOINING)
def test_an_addition_with_parameters_that_changes_nothing_is_caught(scheme):
    given = {"trainable": True} if scheme == "temperature" else {}
    model = patch_model(tiny("llama"), ["rope", scheme_class(scheme)(**given)])
    addition = getattr(model.model.layers[1].self_attn.posenc_additions, scheme)
    addition.forward = lambda call: call
    assert verify(model).problems == (f"layer 1: {scheme} changes nothing, whatever its parameters are",)


@pytest.mark.parametrize("scheme", JOINING)
def test_an_addition_that_never_runs_is_caught(scheme):
    model = patch_model(tiny("llama"), ["rope", scheme])
    additions = model.model.layers[1].self_attn.posenc_additions
    additions.forward = lambda call, numbers=None: call
    assert verify(model).problems == (f"layer 1: the module of {scheme} never runs",)


@pytest.mark.parametrize("scheme", SCORES)
def test_a_part_of_the_attention_that_is_left_out_is_caught(scheme, monkeypatch):
    """A base whose own attention has sinks, which nothing hands to ours: they take a share of every weight."""
    model = patch_model(tiny("llama"), scheme, seed=0)
    assert verify(model)
    stock = modeling_llama.eager_attention_forward

    def with_sinks(module, query, key, value, mask, **kwargs):
        output, weights = stock(module, query, key, value, mask, **kwargs)
        return output * (0.8 if module.layer_idx == 1 else 1), weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", with_sinks)
    before = snapshot(model)
    report = verify(model)
    assert_same(snapshot(model), before)
    assert not report
    assert [problem[:7] for problem in report.problems] == ["layer 1"]
    assert "own eager attention by 25.0%" in report.problems[0]


@pytest.mark.parametrize("scheme", SCORES)
def test_sinks_that_arrive_are_no_silent_loss(scheme):
    model = patch_model(tiny("llama"), scheme, seed=0)
    attention = parts(model).attentions[0]
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, s_aux=torch.zeros(4))
    with pytest.raises(TypeError, match="s_aux"):
        verify(model)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_backend_set_behind_the_back_is_caught(family, scheme, backend):
    model = patch_model(tiny(family), scheme, seed=0)
    model.config._attn_implementation = backend
    if (family, backend) == ("gemma2", "sdpa"):  # transformers itself refuses to run
        with pytest.raises(ValueError, match="does not support `softcap`"):
            verify(model)
        return
    report = verify(model)
    assert not report
    assert any(backend in problem and "hf_posenc" in problem for problem in report.problems)
    assert not any(layer.ok for layer in report.layers)


@pytest.mark.parametrize("scheme", SCORES)
def test_a_layer_without_its_scheme_cannot_run(scheme):
    """Worse than a report: a forward pass that would ignore positions raises, in verify as anywhere."""
    model = patch_model(tiny("llama"), scheme, seed=0)
    del parts(model).attentions[1].posenc
    with pytest.raises(UnsupportedModelError, match="layer 1 of PosEncLlamaModel is not patched"):
        verify(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", EMBEDDING_SCHEMES)
def test_a_layer_whose_hook_was_removed_is_caught(family, scheme):
    model = patch_model(tiny(family), scheme, placement="every_layer", seed=0)
    layer = parts(model).layers[1]
    layer._forward_pre_hooks.clear()
    layer._forward_pre_hooks_with_kwargs.clear()
    report = verify(model)
    assert not report
    assert report.problems == ("layer 1 ignores positions",)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("scheme", EMBEDDING_SCHEMES)
def test_an_input_embedding_whose_hook_was_removed_is_caught(family, scheme):
    model = patch_model(tiny(family), scheme, seed=0)
    layer = parts(model).layers[0]
    layer._forward_pre_hooks.clear()
    layer._forward_pre_hooks_with_kwargs.clear()
    report = verify(model)
    assert report.problems == ("layer 0 ignores positions",)
    assert report.answers_through == "mask"


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("scheme", EMBEDDING_SCHEMES)
def test_a_table_of_zeros_is_caught(family, scheme):
    model = patch_model(tiny(family), scheme, seed=0)
    parts(model).position_table.embed = lambda ids: torch.zeros(*ids.shape, 32)
    report = verify(model)
    assert not report
    assert any("enter the first layer ignore positions" in problem for problem in report.problems)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_layer_that_does_not_rotate_is_caught(family):
    model = patch_model(tiny(family), "rope")
    attention = parts(model).attentions[1]
    attention.__class__ = type(attention).__mro__[2]
    report = verify(model)
    assert report.problems == ("layer 1 ignores positions",)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_rotation_that_stands_still_is_caught(family):
    from hf_posenc.upstream.rotary import IdentityRotary

    model = patch_model(tiny(family), "rope")
    model.model.rotary_emb = IdentityRotary(model.model.rotary_emb)
    report = verify(model)
    assert len(report.problems) == 2
    assert report.answers_through == "mask"


REPLACES = [scheme for scheme in available_schemes() if scheme not in JOINING]
REPLACES_ROTATION = [scheme for scheme in REPLACES if scheme not in ROTARY_SCHEMES]


@pytest.mark.parametrize("scheme", REPLACES_ROTATION)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_native_rotation_left_in_place_is_caught(family, scheme):
    stock = tiny(family)
    native = stock.model.rotary_emb
    model = patch_model(stock, scheme, seed=0, **ACTS[scheme])
    model.model.rotary_emb = native
    report = verify(model)
    assert not report
    assert any("own rotary embedding is still there" in problem for problem in report.problems)


@pytest.mark.parametrize("scheme", [scheme for scheme in REPLACES if scheme not in EMBEDDING_SCHEMES])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_native_table_left_in_place_is_caught(family, scheme):
    stock = tiny(family)
    owner, name = {"gpt2": ("transformer", "wpe"), "opt": ("model.decoder", "embed_positions")}[family]
    native = getattr(stock.get_submodule(owner), name)
    model = patch_model(stock, scheme, seed=0, **ACTS[scheme])
    setattr(model.get_submodule(owner), name, native)
    report = verify(model)
    assert any("the base's own table is still there" in problem for problem in report.problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_model_is_refused(family):
    model = tiny(family)
    before = snapshot(model)
    with pytest.raises(NotPatchedError, match="not patched"):
        verify(model)
    assert_same(snapshot(model), before)
    patch_model(model, "nope")
    unpatch_model(model)
    with pytest.raises(NotPatchedError):
        verify(model)


# ------------------------------------------------------------------------------------------------------------- no traces


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_verify_leaves_no_trace(family, variant):
    scheme, hyperparameters = VARIANTS[variant]
    hyperparameters = {**hyperparameters, **({"num_positions": 20} if variant == "learned-short" else {})}
    model = patch_model(tiny(family), scheme, seed=0, **hyperparameters).train()
    parts(model).layers[1].eval()  # each module keeps its own mode
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    verify(model)
    assert torch.get_rng_state().equal(state)
    assert_same(snapshot(model), before)
    assert all(parameter.grad.eq(1).all() and parameter.requires_grad for parameter in model.parameters())


def test_parameters_come_back_when_the_trial_fails(monkeypatch):
    model = patch_model(tiny("llama"), "da_transformer")
    before = snapshot(model)
    runs = []

    def fail_the_second_time(layer, args, kwargs):
        runs.append(layer)
        assert len(runs) <= 4, "injected"

    handle = parts(model).layers[0].register_forward_pre_hook(fail_the_second_time, with_kwargs=True)
    with pytest.raises(AssertionError, match="injected"):
        verify(model)
    handle.remove()
    assert_same(snapshot(model), before)


def test_no_gradient_graph_and_no_grad_mode_left():
    model = patch_model(tiny("gpt2"), "shaw", seed=0)
    verify(model)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_same_call_gives_the_same_report():
    model = patch_model(tiny("gpt2"), "da_transformer")
    assert verify(model) == verify(model)
    assert verify(model, seed=1) != verify(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", available_schemes())
def test_any_dtype(scheme, dtype):
    report = verify(patch_model(tiny("llama").to(dtype), scheme, seed=0, **ACTS[scheme]))
    assert report.ok, str(report)


@pytest.mark.parametrize("scheme", available_schemes())
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bare_and_loaded_models(tmp_path, family, scheme):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme])
    assert verify(model.base_model)
    model.save_pretrained(tmp_path)
    assert verify(from_pretrained(tmp_path))


@pytest.mark.parametrize("length", [0, 3])
def test_too_few_tokens_are_refused(length):
    with pytest.raises(ValueError, match="at least 4"):
        verify(patch_model(tiny("gpt2"), "alibi"), length=length)


def test_the_report_reads_well():
    text = str(verify(patch_model(tiny("llama"), "alibi")))
    lines = text.splitlines()
    assert lines[0] == "alibi: ok; answers through positions; 2/2 layers answer to positions"
    assert [line.split()[0] for line in lines[1:]] == ["place", "input", "layer", "layer", "model", "order"]
    assert all(len(line) < 100 for line in lines)


def test_every_position_module_is_seen_by_the_trial():
    model = patch_model(tiny("gpt2"), "transformer_xl", share_biases=True)
    owners = [module for module in model.modules() if isinstance(module, PositionModule)]
    assert {id(p) for owner in owners for p in owner.parameters()} == {
        id(p) for name, p in model.named_parameters() if "posenc" in name
    }


def test_a_scheme_with_few_positions_is_refused_in_words():
    model = patch_model(tiny("gpt2"), "learned", num_positions=2)
    with pytest.raises(ValueError, match="verify needs 4 positions, and the scheme has 2"):
        verify(model)
