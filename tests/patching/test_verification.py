"""verify says yes to every working patch, says what is wrong with a dead one, and leaves no trace."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from families import tiny, tokens
from matrix import matrix
from rows import ACTS
from situations import EMBEDDING_SCHEMES, JOINING, ROTARY_SCHEMES, WITHOUT_POSITIONS, skip_if_refused
from snapshots import assert_same, snapshot
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from hf_posenc import NotPatchedError, available_schemes, from_pretrained, patch_model, unpatch_model, verify
from hf_posenc.core import registry
from hf_posenc.core.modules import PositionModule, ScoreModule, TokenModule
from hf_posenc.core.registry import family_for, scheme_class
from hf_posenc.families.base import resolve
from hf_posenc.schemes import Forgetting, QKNorm, Temperature
from hf_posenc.schemes.base import ScoreScheme, TokenScheme
from hf_posenc.schemes.rope import Rope

FAMILIES = ("gpt2", "llama", "gemma2", "opt")
SCORES = tuple(
    name for name in available_schemes() if issubclass(scheme_class(name), ScoreScheme) and not scheme_class(name).joins
)
VARIANTS = {
    **{scheme: (scheme, ACTS[scheme]) for scheme in available_schemes()},
    "sinusoidal-every-layer": ("sinusoidal", {"placement": "every_layer"}),
    "sinusoidal-trainable": ("sinusoidal", {"trainable": True}),
    "learned-every-layer": ("learned", {"placement": "every_layer", "share_layers": False}),
    "learned-short": ("learned", {"num_positions": 5}),
    "shaw-shared": ("shaw", {"share_layers": True}),
    "alibi-trainable": ("alibi", {"trainable": True}),
}


def parts(model):
    """The modules of a patched (or stock) model that its adapter names."""
    return resolve(family_for(model.config.model_type.removeprefix("posenc_")), model)


@matrix(variant=VARIANTS, family=FAMILIES)
def test_a_working_patch_is_ok(family, variant):
    scheme, hyperparameters = VARIANTS[variant]
    if variant == "learned-short" and family == "opt":
        hyperparameters = {"num_positions": 9}
    model = tiny(family)
    skip_if_refused(scheme, model)
    patch_model(model, scheme, seed=0, **hyperparameters)
    report = verify(model)
    assert report.ok, str(report)
    assert report.scheme == scheme
    assert [layer.index for layer in report.layers] == list(range(len(parts(model).layers)))
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
        assert report.order_response > 1e-3
    report = verify(patch_model(tiny(family), "da_transformer"))  # neutral, but alive
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


class Crossing(ScoreModule):
    """Scores that read other queries, or neighbouring keys, seen or not."""

    def __init__(self, of):
        super().__init__()
        self.of = of

    def scores(self, call):
        scores = call.products() - 0.1 * call.distance()
        if self.of == "queries":  # selective attention: what earlier queries attend to is masked for later ones
            selected = scores[:, :1].relu() * call.visible()
            return scores - selected.cumsum(2).roll(1, 2)
        seen = scores * call.visible() if self.of == "visible keys" else scores
        return scores + 0.3 * torch.nn.functional.pad(seen, (1, 0))[..., :-1]


class RunningMean(PositionModule):
    """Numbers of tokens that read the hidden states of earlier tokens."""

    def forward(self, hidden_states):
        total = hidden_states.float().sum(-1).cumsum(1)
        return torch.nn.functional.logsigmoid(total)[:, None].expand(-1, 4, -1)


class Gates(TokenModule):
    def __init__(self):
        super().__init__()
        self.tokens = RunningMean()

    def forward(self, call):
        return replace(call, log_gates=call.numbers)


@dataclass(frozen=True, kw_only=True)
class Crosses(ScoreScheme):
    name: ClassVar[str] = "crosses"
    of: str = "queries"

    def build(self, dims):
        return Crossing(self.of)


@dataclass(frozen=True, kw_only=True)
class CrossesTokens(TokenScheme):
    name: ClassVar[str] = "crosses_tokens"

    def build(self, dims):
        return Gates()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scheme", "found"),
    [
        (Crosses(of="queries"), "if queries come 3 at a time"),
        (Crosses(of="all keys"), "behind 2 padding tokens"),
        (CrossesTokens(), "if its numbers are made 3 tokens at a time"),
        (Crosses(of="visible keys"), ""),
    ],
    ids=str,
)
def test_a_scheme_that_reads_what_caches_and_padding_change(scheme, found, dtype, monkeypatch):
    monkeypatch.setitem(registry._SCHEMES, scheme.name, type(scheme))
    model = patch_model(tiny("llama"), scheme)
    ids, pads = tokens(1, 12), torch.zeros(1, 2, dtype=torch.long)
    whole, cache = model(ids).logits, DynamicCache(config=model.config)
    chunks = [model(chunk, past_key_values=cache).logits for chunk in ids.split(3, 1)]
    mask = torch.cat([pads, torch.ones_like(ids)], 1)
    padded = model(torch.cat([pads, ids], 1), attention_mask=mask).logits[:, 2:]
    difference = max((whole - other).abs().max().item() for other in (torch.cat(chunks, 1), padded))
    assert difference > 1e-2 if found else difference < 1e-4
    problems = verify(model.to(dtype)).problems
    if found:
        crossings = [problem for problem in problems if found in problem]
        assert [problem[:8] for problem in crossings] == ["layer 0:", "layer 1:"]
        assert all(f"the attention of {scheme.name} changes by" in problem for problem in crossings)
    else:
        assert problems == ()


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


# ------------------------------------------------------------------------------------------------------ what it must catch


@matrix(scheme=SCORES, family=["gpt2", "gemma2"], dead=[(1,), (0, 1)])
def test_a_dead_layer_is_caught_and_named(family, scheme, dead):
    """Replaced by a module with the same parameters that computes plain attention."""

    class Dead(ScoreModule):
        """`ScoreModule.scores` is plain q.k."""

    model = patch_model(tiny(family), scheme, seed=0)
    for index in dead:
        attention, plain = parts(model).attentions[index], Dead()
        for name, parameter in attention.posenc.named_parameters():
            plain.register_parameter(name, parameter)
        attention.posenc = plain
    report = verify(model)
    assert not report
    assert [layer.ok for layer in report.layers] == [index not in dead for index in (0, 1)]
    assert report.problems == tuple(f"layer {index} ignores positions" for index in dead)
    assert "should answer" in str(report)


@pytest.mark.parametrize("scheme", [name for name in JOINING if not scheme_class(name).computes_scores])
def test_an_addition_that_changes_nothing_or_never_runs_is_caught(scheme):
    given = {"trainable": True} if scheme == "temperature" else {}
    model = patch_model(tiny("llama"), ["rope", scheme_class(scheme)(**given)])
    additions = model.model.layers[1].self_attn.posenc_additions
    same = (lambda call, scores: scores,)  # by another engine
    for dead in (lambda call: call, lambda call: replace(call, score_changes=same)):
        getattr(additions, scheme).forward = dead
        assert verify(model.float()).problems == verify(model.bfloat16()).problems
        assert verify(model).problems == (f"layer 1: {scheme} changes nothing, whatever its parameters are",)
    additions.forward = lambda call, numbers=None: call
    assert verify(model).problems == (f"layer 1: the module of {scheme} never runs",)


@pytest.mark.parametrize("scheme", SCORES[:3])
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


@matrix(scheme=SCORES, backend=["sdpa", "eager"])
def test_a_stock_backend_set_behind_the_back_is_caught(scheme, backend):
    model = patch_model(tiny("llama"), scheme, seed=0)
    model.config._attn_implementation = backend
    report = verify(model)
    assert not report
    assert any(backend in problem and "hf_posenc" in problem for problem in report.problems)
    assert not any(layer.ok for layer in report.layers)


@pytest.mark.parametrize("placement", ["every_layer", "input"])
@pytest.mark.parametrize("scheme", EMBEDDING_SCHEMES)
def test_a_layer_whose_hook_was_removed_is_caught(scheme, placement):
    index = 1 if placement == "every_layer" else 0
    model = patch_model(tiny("llama"), scheme, placement=placement, seed=0)
    layer = parts(model).layers[index]
    layer._forward_pre_hooks.clear()
    layer._forward_pre_hooks_with_kwargs.clear()
    assert verify(model).problems == (f"layer {index} ignores positions",)


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
    from hf_posenc.transformers_glue.rotary import IdentityRotary

    model = patch_model(tiny(family), "rope")
    model.model.rotary_emb = IdentityRotary(model.model.rotary_emb)
    report = verify(model)
    assert len(report.problems) == 2
    assert report.answers_through == "mask"


REPLACES = [scheme for scheme in available_schemes() if scheme not in JOINING]
REPLACES_ROTATION = [scheme for scheme in REPLACES if scheme not in ROTARY_SCHEMES]


@pytest.mark.parametrize("scheme", REPLACES_ROTATION)
def test_a_native_rotation_left_in_place_is_caught(scheme):
    stock = tiny("llama")
    native = stock.model.rotary_emb
    model = patch_model(stock, scheme, seed=0, **ACTS[scheme])
    model.model.rotary_emb = native
    report = verify(model)
    assert not report
    assert any("own rotary embedding is still there" in problem for problem in report.problems)


@matrix(scheme=[scheme for scheme in REPLACES if scheme not in EMBEDDING_SCHEMES], family=["gpt2", "opt"])
def test_a_native_table_left_in_place_is_caught(family, scheme):
    stock = tiny(family)
    owner, name = {"gpt2": ("transformer", "wpe"), "opt": ("model.decoder", "embed_positions")}[family]
    native = getattr(stock.get_submodule(owner), name)
    model = patch_model(stock, scheme, seed=0, **ACTS[scheme])
    setattr(model.get_submodule(owner), name, native)
    report = verify(model)
    assert any("the base's own table is still there" in problem for problem in report.problems)


def test_a_stock_model_is_refused():
    with pytest.raises(NotPatchedError, match="not patched"):
        verify(unpatch_model(patch_model(tiny("llama"), "nope")))


# ------------------------------------------------------------------------------------------------------------- no traces


@matrix(variant=VARIANTS, family=["gpt2", "llama"])
def test_verify_leaves_no_trace(family, variant):
    scheme, hyperparameters = VARIANTS[variant]
    hyperparameters = {**hyperparameters, **({"num_positions": 20} if variant == "learned-short" else {})}
    model = patch_model(tiny(family), scheme, seed=0, **hyperparameters).train()
    parts(model).layers[1].eval()  # each module keeps its own mode
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    state = torch.get_rng_state()
    verify(model)
    assert torch.get_rng_state().equal(state)
    assert_same(snapshot(model), before)
    assert all(parameter.grad.eq(1).all() and parameter.requires_grad for parameter in model.parameters())
    assert torch.is_grad_enabled()


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


@matrix(scheme=available_schemes(), dtype=[torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype(scheme, dtype):
    report = verify(patch_model(tiny("llama").to(dtype), scheme, seed=0, **ACTS[scheme]))
    assert report.ok, str(report)


@matrix(scheme=available_schemes(), family=["gpt2", "llama"])
def test_bare_and_loaded_models(tmp_path, family, scheme):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme])
    assert verify(model.base_model)
    model.save_pretrained(tmp_path)
    assert verify(from_pretrained(tmp_path))


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match="takes 4 or more positions"):
        verify(patch_model(tiny("gpt2"), "alibi"), length=3)
    with pytest.raises(ValueError, match=r"at most as many as the scheme has \(2\), not 2"):
        verify(patch_model(tiny("gpt2"), "learned", num_positions=2))
