"""`choose_layers` ranks layers by what a swap of each costs, and leaves the model as it was."""

import copy
import gc
import json

import pytest
import torch
import torch.nn.functional as F
from families import tiny
from snapshots import assert_same, snapshot

import hf_posenc
from hf_posenc import AlreadyPatchedError, UnsupportedModelError, calibrate, choose_layers, patch_model
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.nope import Nope

LENGTH = 24


def windows(count=12):
    return torch.randint(97, (count, LENGTH), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def cross_entropy(model, rows, first=0):
    """Mean negative logarithm of the probability of each token after `first`, in float64."""
    logits = model(rows, use_cache=False).logits[:, first:-1].double()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, first + 1 :].flatten()).item()


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("scheme", ["nope", "t5"])
def test_costs_are_those_of_one_swapped_layer(scheme):
    model, tokens = tiny("llama").eval(), windows()
    choice = choose_layers(model, tokens, scheme, held_out=4)
    held = tokens[-4:]
    twice = held[:, : LENGTH // 2].repeat(1, 2)
    base = cross_entropy(model, held), cross_entropy(model, twice, LENGTH // 2)
    assert (choice.base_loss, choice.base_recall) == pytest.approx(base, abs=1e-5)
    assert {each.layer for each in choice.costs} == set(range(model.config.num_hidden_layers))
    for each in choice.costs:
        swapped = patch_model(copy.deepcopy(model), scheme, layers=[each.layer], seed=0)
        report = calibrate(swapped, tokens, held_out=4, matching=None)
        assert each.loss == pytest.approx(cross_entropy(swapped, held) - base[0], abs=1e-5)
        assert each.recall == pytest.approx(cross_entropy(swapped, twice, LENGTH // 2) - base[1], abs=1e-5)
        assert each.divergence == pytest.approx(report.layers[0].after.mean().item(), rel=1e-5)
        assert each.divergence > 0  # a swap that did nothing would cost nothing
    costs = [each.loss + each.recall for each in choice.costs]
    assert costs == sorted(costs)


def test_the_model_stays_as_it_was():
    model = tiny("llama").train()
    before, state = snapshot(model), torch.get_rng_state()
    choose_layers(model, windows(), Alibi(), held_out=4)
    assert_same(snapshot(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_layers_that_the_base_leaves_unrotated_are_left_out_with_the_reason():
    model = tiny("smollm3").eval()
    choice = choose_layers(model, windows(), "nope", held_out=4)
    unrotated = {i for i, rotates in enumerate(model.config.no_rope_layers) if not rotates}
    assert unrotated
    assert set(choice.refused) == unrotated
    assert all("unrotated by itself" in reason for reason in choice.refused.values())
    assert all(str(layer) in str(choice) for layer in unrotated)


def test_the_choice_is_a_value_for_layers():
    model = tiny("llama").eval()
    choice = choose_layers(model, windows(), "nope", held_out=4)
    assert choice.cheapest(1) == (choice.costs[0].layer,)
    everything = choice.cheapest(len(choice.costs))
    assert everything == tuple(sorted(everything))
    patch_model(model, Nope(layers=choice.cheapest(1)))
    assert hf_posenc.schemes_of(model)[0].layers == choice.cheapest(1)
    assert json.loads(json.dumps(choice.to_dict()))["base_loss"] == choice.base_loss
    for count in (0, len(choice.costs) + 1, 1.0):
        with pytest.raises(ValueError, match="from 1 to"):
            choice.cheapest(count)


def test_a_base_whose_table_reaches_every_layer_is_refused():
    with pytest.raises(UnsupportedModelError, match="Give every layer a scheme"):
        choose_layers(tiny("gpt2"), windows(), "nope", held_out=4)


def test_wrong_arguments_change_nothing():
    model = tiny("llama")
    before = snapshot(model)
    with pytest.raises(ValueError, match="for one scheme without layers="):
        choose_layers(model, windows(), "nope", layers=[0])
    with pytest.raises(ValueError, match="too few"):
        choose_layers(model, windows(4), "nope", held_out=4)
    with pytest.raises(ValueError, match="held_out"):
        choose_layers(model, windows(), "nope", held_out=0)
    assert_same(snapshot(model), before)
    patch_model(model, "nope")
    with pytest.raises(AlreadyPatchedError):
        choose_layers(model, windows(), "alibi", held_out=4)


def test_one_copy_at_a_time(monkeypatch):
    """A copy of each layer's swap would be a model of memory for each layer."""
    from hf_posenc.calibration import choices

    model, copies = tiny("llama"), []

    def counted(swapped, *args, **kwargs):
        copies.append(sum(type(each).__name__ == "PosEncLlamaForCausalLM" for each in gc.get_objects()))
        return calibrate(swapped, *args, **kwargs)

    monkeypatch.setattr(choices, "calibrate", counted)
    gc.collect()
    before = sum(type(each).__name__ == "PosEncLlamaForCausalLM" for each in gc.get_objects())
    gc.disable()
    try:
        choose_layers(model, windows())
    finally:
        gc.enable()
    assert copies == [before + 1, before + 1]
