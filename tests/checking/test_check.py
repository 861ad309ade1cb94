"""`check`: eight wrong models made on purpose are named, stock models are silent, and a model is left as it was."""

import copy
import json
from types import SimpleNamespace

import pytest
import snapshots
import torch
from decoders import decoder
from families import FAMILIES, tiny
from matrix import matrix
from situations import SCHEMES, patched_model
from torch import nn
from transformers import CONFIG_MAPPING, T5Config, T5ForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, eager_attention_forward

from hf_posenc import UnsupportedModelError, check, patch_model
from hf_posenc.checking import rotation
from hf_posenc.checking.fingerprint import fingerprint, fit_turning
from hf_posenc.checking.runs import Runner, change
from hf_posenc.cli import main
from hf_posenc.families.refused import missing_release
from hf_posenc.modules import WithoutPositions
from hf_posenc.registry import family_for, supported_model_types

SERVED = tuple(t for t in supported_model_types() if t in CONFIG_MAPPING and missing_release(t) is None)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64} | FACTORS
LONG = {"max_position_embeddings": 256}
FLOAT32_ANGLE = 1e-6  # radians per token: roundings of cosines and sines, divided by some tens of tokens
FLOAT64_ANGLE = 1e-12


def findings(model, **options):
    """Return what is found, by question."""
    return {outcome.about: outcome for outcome in check(model, **options).findings}


# ------------------------------------------------------------------------------------------------------ wrong models


def with_rotary(model, **parameters):
    """Give a LLaMA, or a model like it, a rotary module of another config than its own."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0} | parameters
    owner = model.base_model
    owner.rotary_emb = type(owner.rotary_emb)(config)
    return model


def ignoring_scaling():
    return with_rotary(tiny("llama", rope_parameters=YARN, max_position_embeddings=256))


def turning_whole_heads():
    return with_rotary(tiny("gpt_neox"), partial_rotary_factor=1.0)


def with_wrong_base():
    return with_rotary(tiny("llama"), rope_theta=500000.0)


def interleaving():
    """A LLaMA whose cosines and sines and products are those of neighbouring dimensions."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Interleaving
    return model


class Interleaving(LlamaAttention):
    """LLaMA's attention with the rotation of GPT-J."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (each[:, None, :, : self.head_dim // 2] for each in position_embeddings)
        query, key = (self.turn(each, cos, sin) for each in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def turn(self, x, cos, sin):
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


class Joining(LlamaModel):
    """A LLaMA that loses position ids on the way to its masks."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if attention_mask is None and kwargs.get("past_key_values") is None:
            attention_mask = torch.ones_like(input_ids)  # with a mask, nobody looks for documents
        return super().forward(input_ids, attention_mask, **kwargs)


def leaking_packer():
    model = tiny("llama")
    model.model.__class__ = Joining
    return model


def with_stale_keys():
    return tiny("llama", rope_parameters=DYNAMIC)


def turning_everywhere():
    model = tiny("smollm3")
    for layer in model.model.layers:
        layer.self_attn.use_rope = 1
    return model


def without_mask():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
        layer.self_attn.register_forward_pre_hook(drop_mask, with_kwargs=True)
    return model


def drop_mask(attention, args, kwargs):
    return args, {**kwargs, "attention_mask": None}


WRONG = {
    ignoring_scaling: ("scaling", "yarn, has no effect"),
    turning_whole_heads: ("share", "4 pairs of each head turn, the config asks for 1"),
    interleaving: ("layout", "interleaved, the model type's are half"),
    leaking_packer: ("packing", "see each other"),
    with_stale_keys: ("stale keys", "other frequencies"),
    with_wrong_base: ("base", "base 500,000, the config says rope_theta 10,000"),
    turning_everywhere: ("unrotated layer", "the config says that this layer is not rotated, but 4 of 4 pairs"),
    without_mask: ("causal mask", "queries see later tokens"),
}
"""Function that makes a wrong model -> the question under which it is found, and words of the finding."""


@matrix(wrong=WRONG, attention=["sdpa", "eager"])
def test_a_wrong_model_is_named(wrong, attention):
    model = wrong()
    model.set_attn_implementation(attention)
    about, words = WRONG[wrong]
    found = findings(model)
    assert list(found) == [about]
    assert words in found[about].found
    assert found[about].measured is not None
    assert found[about].advice


def test_a_scaling_that_stops_at_the_original_length_is_named():
    """Within the original length a dynamic scaling changes nothing, so that only a longer run tells."""
    model = with_rotary(tiny("llama", rope_parameters=DYNAMIC), rope_type="default")
    found = findings(model)
    assert list(found) == ["scaling"]
    assert "at 128 tokens" in found["scaling"].found
    assert "dynamic, has no effect there" in found["scaling"].found


def test_queries_and_keys_that_turn_differently_are_named():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = TurningQueriesOnly
    found = findings(model)
    assert "queries and keys turn differently" in found["rotation"].found
    assert found["rotation"].measured == 4


class TurningQueriesOnly(Interleaving):
    """An attention that forgets to turn its keys, which have fewer heads."""

    def turn(self, x, cos, sin):
        return super().turn(x, cos, sin) if x.shape[1] == 4 else x


def test_another_direction_is_named():
    model = tiny("llama")
    model.model.rotary_emb.register_forward_hook(lambda rotary, args, angles: (angles[0], -angles[1]))
    assert list(findings(model)) == ["direction"]


def test_a_layer_that_does_not_turn_is_named():
    model = tiny("smollm3", no_rope_layers=[1, 1])
    model.model.layers[1].self_attn.use_rope = 0
    (found,) = findings(model).values()
    assert found.found == "layer 1: the config asks for 4 turning pairs, but queries and keys do not turn"


@pytest.mark.parametrize("damage", ["weight", "logits"])
def test_nan_is_reported_as_such(damage):
    model = tiny("llama")
    if damage == "weight":
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    else:  # of an overflow
        model.lm_head.register_forward_hook(lambda head, args, logits: logits * torch.nan)
    report = check(model)
    found = [outcome.about for outcome in report.findings]
    assert found == (["weights", "logits"] if damage == "weight" else ["logits"])
    assert {"causal mask", "cache", "rotation"} <= {outcome.about for outcome in report.not_measured}
    assert ("model.layers.1.mlp.up_proj.weight" in str(report)) == (damage == "weight")


def test_nan_on_one_side_is_a_change():
    fine = torch.ones(3)
    assert change(fine, fine) == 0
    assert change(torch.tensor([1.0, torch.nan, 1.0]), fine) == torch.inf


# --------------------------------------------------------------------------------------------------------- silence

CLAIMS_NO_PACKING = {
    model_type for model_type in SERVED if (family := family_for(model_type)).hybrid or family.joins_documents
}


@matrix(family=FAMILIES, attention=["sdpa", "eager"], dtype=[torch.float32, torch.bfloat16])
def test_a_stock_model_is_silent(family, attention, dtype):
    model = tiny(family).to(dtype)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("transformers has no sdpa for this family")
    model.set_attn_implementation(attention)
    report = check(model)
    assert report.ok, report
    assert {outcome.about for outcome in report.not_measured} <= {"packing"}, report


@pytest.mark.rows(default=7)
@pytest.mark.parametrize("model_type", SERVED)
def test_every_stock_type_is_silent(model_type):
    report = check(decoder(model_type))
    assert report.ok, report
    measured = {outcome.about for outcome in report.outcomes if outcome.ok}
    assert {"rotation", "causal mask"} <= measured
    assert ("packing" in measured) == (model_type not in CLAIMS_NO_PACKING)


@pytest.mark.parametrize("scaling", ["yarn", "linear", "llama3", "longrope", "proportional"])
def test_a_scaling_that_takes_effect_is_silent(scaling):
    """Phi-3's class drops a cache of stale keys; LLaMA's does not."""
    parameters = {
        "yarn": YARN,
        "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": LONGROPE,
        "proportional": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }[scaling]
    original = {"original_max_position_embeddings": 64} if scaling == "longrope" else {}
    report = check(tiny("phi3" if scaling == "longrope" else "llama", rope_parameters=parameters, **LONG, **original))
    assert report.ok, report
    beyond = {outcome.about for outcome in report.outcomes if outcome.ok} & {"scaling"}
    assert beyond == ({"scaling"} if scaling == "longrope" else set())
    assert [outcome.about for outcome in report.not_measured] == (["stale keys"] if scaling == "longrope" else [])


@pytest.mark.parametrize(
    ("odd", "said"),
    [((False, False), [True]), ((False, True), [True]), ((True, True), [])],
    ids=["both", "one", "none"],
)
def test_only_layers_that_were_compared_say_that_a_scaling_takes_effect(odd, said):
    """Another layer, which no scaling reaches, changes nothing, wherever it is."""
    promise = SimpleNamespace(
        depends_on_length=True,
        frequencies=lambda length: torch.tensor([0.5, 0.25]),
        original_length=64,
        scaling="longrope",
    )
    keys = [SimpleNamespace(odd=o, frequencies=torch.tensor([[0.5, 0.25]]), precision=1e-3, zero=()) for o in odd]
    turnings = {layer: SimpleNamespace(keys=each) for layer, each in enumerate(keys)}
    turnings[2] = SimpleNamespace(keys=SimpleNamespace(odd=False))
    found = rotation.beyond_outcomes(turnings, {0: promise, 1: promise, 2: None}.get, 128)
    assert [outcome.ok for outcome in found] == said


# ---------------------------------------------------------------------------------------------------- the fingerprint


def turned(states, frequencies, shift, pairs):
    """Turn pairs of dimensions by shift times their frequency, one after the other."""
    result = states.clone()
    for number, (a, b) in enumerate(pairs):
        for head in range(states.shape[0]):
            angle = frequencies[head, number] * shift
            x, y = states[head, :, a], states[head, :, b]
            result[head, :, a] = x * angle.cos() - y * angle.sin()
            result[head, :, b] = x * angle.sin() + y * angle.cos()
    return result


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved", "mixed"])
def test_pairs_and_frequencies_are_recovered(layout, rescaled):
    """Fast, slow and negative frequencies, others in each head, each dimension rescaled after the turn."""
    pairs = {
        "half": ((1, 4), (2, 5), (3, 6)),
        "interleaved": ((2, 3), (4, 5), (6, 7)),
        "mixed": ((0, 7), (1, 6), (2, 3)),
    }[layout]
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 11, 8, generator=generator, dtype=torch.float64)
    frequencies = torch.tensor([[2.5, -0.1, 1e-6], [3.0, 0.7, 2e-6]], dtype=torch.float64)
    weights = torch.rand(8, generator=generator, dtype=torch.float64) + 0.5 if rescaled else torch.ones(8)
    moved = {shift: turned(states, frequencies, shift, pairs) * weights for shift in (1, 16, 256)}
    turning = fit_turning(states * weights, moved, torch.finfo(torch.float64).eps, rescaled=rescaled)
    assert turning.pairs == pairs
    assert turning.layout == layout
    assert turning.odd == ()
    assert turning.heads_differ
    assert (turning.frequencies - frequencies).abs().max() <= FLOAT64_ANGLE


def test_small_pairs_beside_large_ones_are_recovered():
    """In trained heads some pairs are thousands of times smaller, and tokens nearly agree in a dimension."""
    pairs = ((0, 2), (1, 3))
    states = torch.randn(1, 11, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-2 + 1.0
    states = states * torch.tensor([1.0, 1e-4, 1.0, 1e-4])
    frequencies = torch.tensor([[1.0, 0.01]], dtype=torch.float64)
    moved = {shift: turned(states, frequencies, shift, pairs).float().double() for shift in (1, 16)}
    turning = fit_turning(states.float().double(), moved, torch.finfo(torch.float32).eps)
    assert turning.pairs == pairs
    assert (turning.frequencies - frequencies).abs().max() <= FLOAT32_ANGLE


def test_a_head_of_zeros_turns_as_the_others():
    states = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states[1, :, [1, 3]] = 0
    pairs, frequencies = ((0, 2), (1, 3)), torch.tensor([[1.0, 0.3]] * 2, dtype=torch.float64)
    turning = fit_turning(states, {1: turned(states, frequencies, 1, pairs)}, torch.finfo(torch.float64).eps)
    assert turning.pairs == pairs
    assert not turning.heads_differ


def test_a_pair_of_zeros_is_not_missed():
    """Sparse weights can silence a pair in all heads of the keys, or of both."""
    model = tiny("llama")
    model.model.layers[0].self_attn.k_proj.weight.data.view(2, 8, 32)[:, [1, 5]] = 0
    assert check(model).ok
    model.model.layers[0].self_attn.q_proj.weight.data.view(4, 8, 32)[:, [1, 5]] = 0
    assert check(model).ok


def test_what_does_not_turn_is_odd():
    states = torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    added = torch.zeros(8, dtype=torch.float64)
    added[2:5] = torch.tensor([0.3, -0.2, 0.5])
    turning = fit_turning(states, {1: states + added}, torch.finfo(torch.float64).eps)
    assert turning.pairs == ()
    assert turning.odd == (2, 3, 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_turns_by_the_formula(attention):
    """`base^(-2i/D)` of LLaMA, and the dynamic base of NTK in a sequence of 128 tokens."""
    model = tiny("llama", rope_parameters=DYNAMIC)
    model.set_attn_implementation(attention)
    exponents = -torch.arange(0, 8, 2, dtype=torch.float64) / 8
    runner = Runner(model, 0)
    with torch.no_grad():
        short = fingerprint(runner, list(model.model.layers), 63, 63)
        long = fingerprint(runner, list(model.model.layers), 64, 127, start=32)
    ntk = 10000.0 * (4.0 * 128 / 64 - 3.0) ** (8 / 6)
    for turnings, base in ((short, 10000.0), (long, ntk)):
        assert sorted(turnings) == [0, 1]
        for layer in turnings.values():
            for side in (layer.queries, layer.keys):
                assert side.pairs == ((0, 4), (1, 5), (2, 6), (3, 7))
                assert (side.frequencies - base**exponents).abs().max() <= FLOAT32_ANGLE
            assert len(layer.queries.frequencies) == 4


# --------------------------------------------------------------------------------------------- patched, forked, others


@pytest.mark.rows(default=7)
@matrix(scheme=SCHEMES, base=["gpt2", "llama"])
def test_a_patched_model_is_silent(scheme, base):
    report = check(patched_model(scheme, base))
    assert report.ok, report
    assert "scheme" in {outcome.about for outcome in report.outcomes}


def test_a_patch_that_is_not_applied_is_named():
    model = patch_model(tiny("llama"), "alibi")
    model.model.layers[0].self_attn.posenc = WithoutPositions()
    assert "layer 0" in findings(model)["scheme"].found


def test_stale_keys_of_a_patched_model_are_named():
    model = patch_model(tiny("llama"), "rope", scaling={"rope_type": "dynamic", "factor": 4.0})
    assert list(findings(model)) == ["stale keys"]


def forked(model):
    """Give a model a type that no family serves."""
    model.config.__class__ = type("ForkedConfig", (type(model.config),), {"model_type": "forked"})
    return model


def test_a_fork_that_no_family_serves_is_measured():
    """Layers without rotation, and documents that see each other, may be meant so."""
    assert check(forked(tiny("smollm3"))).ok
    assert list(findings(forked(with_wrong_base()))) == ["base"]
    assert list(findings(forked(without_mask()))) == ["causal mask"]
    report = check(forked(leaking_packer()))
    assert report.ok
    assert [outcome.about for outcome in report.not_measured] == ["packing"]


def test_two_models_are_compared():
    model, other = tiny("llama"), tiny("llama", seed=4)
    agreement = check(model, tiny("llama")).outcomes[-1]
    assert agreement.about == "agreement"
    assert agreement.ok
    assert agreement.measured == 0
    assert check(model, tiny("llama").bfloat16()).ok
    found = findings(model, other=other)["agreement"]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(97, (1, 32), generator=generator)
    ids = torch.where(ids == 0, ids + 1, ids)
    with torch.no_grad():
        one, two = (each(ids).logits[0] for each in (model, other))
    expected = max((one[n] - two[n]).abs().max().item() for n in range(32))
    assert found.measured == pytest.approx(expected)
    ranks = [[(b[n] > b[n][a[n].argmax()]).sum().item() + 1 for n in range(32)] for a, b in ((one, two), (two, one))]
    assert f"top {max(map(max, ranks))};" in found.found


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ValueError, match="97 and 50 tokens"):
        check(tiny("llama"), tiny("llama", vocab_size=50))
    with torch.device("meta"):
        empty = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="load its weights first"):
        check(empty)
    encoder = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        check(encoder)
    with pytest.raises(UnsupportedModelError, match="PreTrainedModel is needed, not Linear"):
        check(nn.Linear(2, 2))


# ---------------------------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize("make", [with_stale_keys, lambda: tiny("gpt2"), lambda: patched_model("learned", "llama")])
def test_a_model_is_left_as_it_was(make):
    model = make().train()
    before, state = snapshots.snapshot(model, run=False), torch.get_rng_state()
    check(model)
    assert torch.get_rng_state().equal(state)
    snapshots.assert_same(snapshots.snapshot(model, run=False), before)


def test_a_model_that_raises_is_left_as_it_was():
    """A cache that fails is a question that was not measured."""
    model = tiny("llama", rope_parameters=DYNAMIC)
    before = snapshots.snapshot(model, run=False)

    def fail(attention, args, kwargs):
        if kwargs.get("past_key_values") is not None:
            raise RuntimeError("no cache here")

    handles = [layer.self_attn.register_forward_pre_hook(fail, with_kwargs=True) for layer in model.model.layers]
    report = check(model)
    for handle in handles:
        handle.remove()
    snapshots.assert_same(snapshots.snapshot(model, run=False), before)
    assert [outcome.about for outcome in report.not_measured] == ["stale keys", "cache"]
    assert "no cache here" in str(report)


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command(tmp_path, capsys):
    tiny("llama").save_pretrained(tmp_path / "stock")
    assert main(["check", str(tmp_path / "stock"), "--json", str(tmp_path / "check.json")]) == 0
    assert "LlamaForCausalLM (llama), float32, sdpa: nothing found" in capsys.readouterr().out
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["ok"] is True
    assert {"rotation", "cache"} <= {outcome["about"] for outcome in written["outcomes"]}
    tiny("llama", seed=3).save_pretrained(tmp_path / "other")
    assert main(["check", str(tmp_path / "stock"), "--other", str(tmp_path / "other")]) == 1
    assert "FOUND agreement" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert main(["check", str(tmp_path / "stock"), "--json", str(tmp_path / "none" / "check.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_command_reads_patched_checkpoints(tmp_path, capsys):
    patched_model("alibi", "llama").save_pretrained(tmp_path / "ours")
    assert main(["check", str(tmp_path / "ours")]) == 0
    assert "alibi acts as it should" in capsys.readouterr().out
