"""Layers that are dropped, copied or appended after patching: they work, or the model refuses to run and to be saved."""

import copy

import pytest
import torch
from families import tiny, tokens
from matrix import matrix
from situations import CASES, SCHEMES, assert_same, in_turn, patched_model

from hf_posenc import AlreadyPatchedError, UnsupportedModelError, from_pretrained, patch_model, unpatch_model
from hf_posenc.core import forms
from hf_posenc.core.positions import Positions
from hf_posenc.schemes import TransformerXL

IDS = tokens(2, 20)


@torch.no_grad()
def logits(model, **options):
    return model(IDS, **{"use_cache": False, **options}).logits


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def renumber(model):
    """What a recipe that prunes or deepens a model has to do on any model of transformers."""
    layers = layers_of(model)
    setattr(model.config, model.config.attribute_map.get("num_hidden_layers", "num_hidden_layers"), len(layers))
    for index, layer in enumerate(layers):
        (layer.attn if hasattr(layer, "attn") else layer.self_attn).layer_idx = index


def drop(model, index):
    del layers_of(model)[index]
    renumber(model)


def double(model, index):
    layers_of(model).insert(index, copy.deepcopy(layers_of(model)[index]))
    renumber(model)


def append_stock(model, family):
    layers_of(model).append(layers_of(tiny(family, seed=9))[0])
    renumber(model)


def owns_the_positions(model, index):
    """Whether this layer is the one whose hook adds positions to the input of a base that has no table."""
    return index == 0 and "posenc" in layers_of(model)[0]._modules and "posenc" not in layers_of(model)[1]._modules


@pytest.mark.rows(default=5, slow=24)
@matrix(case=CASES, family=["gpt2", "llama"], index=[0, 2], change=[drop, double])
def test_a_layer_less_or_more(case, family, index, change, tmp_path):
    model = patched_model(case, family, num_hidden_layers=3)
    refused = owns_the_positions(model, index)
    change(model, index)
    if refused:
        for action in (lambda: logits(model), lambda: model.save_pretrained(tmp_path)):
            with pytest.raises(UnsupportedModelError, match="is not patched as it was"):
                action()
        assert not list(tmp_path.iterdir())
        return
    # A stock model whose layers were changed before it was patched, with the same values.
    expected = tiny(family, num_hidden_layers=3)
    change(expected, index)
    scheme, hyperparameters = CASES[case]
    patch_model(expected, scheme, **hyperparameters)
    expected.load_state_dict(model.state_dict())
    assert_same(logits(model), logits(expected))
    assert_same(logits(model, use_cache=True), logits(model))
    assert (logits(model) - logits(patched_model(case, family, num_hidden_layers=3))).abs().max() > 1e-2
    model.save_pretrained(tmp_path)
    assert logits(from_pretrained(tmp_path)).equal(logits(model))


@pytest.mark.rows(default=5)
@matrix(in_turn(SCHEMES, ["gpt2", "llama"]), case=None, family=None)
def test_an_appended_stock_layer_is_refused(case, family, tmp_path):
    model = patched_model(case, family)
    append_stock(model, family)
    for action in (lambda: logits(model), lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(UnsupportedModelError, match=r"layer 2 of .* is not patched"):
            action()
    assert not list(tmp_path.iterdir())
    del layers_of(model)[2]
    renumber(model)
    assert logits(model).equal(logits(patched_model(case, family)))


@pytest.mark.parametrize("copied", [True, False])
def test_a_layer_of_a_patched_model_in_another_one(copied):
    """Two models that share a layer: the second patch would change what the first one computes."""
    first, second = patched_model("shaw", "llama"), tiny("llama", seed=3)
    before = logits(first)
    layer = first.model.layers[1]
    second.model.layers[1] = copy.deepcopy(layer) if copied else layer
    with pytest.raises(
        AlreadyPatchedError, match=r"model\.layers\.1 of this LlamaForCausalLM is a layer of another patched model"
    ):
        patch_model(second, "alibi")
    assert logits(first).equal(before)


def test_the_config_must_say_how_many_layers_there_are(tmp_path):
    model = patched_model("alibi", "llama")
    del layers_of(model)[1]
    with pytest.raises(UnsupportedModelError, match=r"set config\.num_hidden_layers = 1"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("case", ["alibi", "shaw-shared", "rope", "learned"])
def test_unpatching_with_fewer_layers_and_with_copies(case):
    scheme, hyperparameters = CASES[case]
    model, stock = tiny("gpt2", num_hidden_layers=3), tiny("gpt2", num_hidden_layers=3)
    patch_model(model, scheme, **hyperparameters)
    drop(model, 1)
    drop(stock, 1)
    assert logits(unpatch_model(model)).equal(logits(stock))
    patch_model(model, scheme, **hyperparameters)
    double(model, 1)
    with pytest.raises(UnsupportedModelError, match=r"transformer\.h\.1 is a copy of a patched layer"):
        unpatch_model(model)
    del layers_of(model)[1]
    renumber(model)
    assert logits(unpatch_model(model)).equal(logits(stock))


def test_what_follows_from_positions_alone_is_computed_once(monkeypatch):
    """Not in every layer, for each ladder of frequencies; and the numbers are those of layers that compute it themselves."""
    schemes = [TransformerXL(layers=[0, 1]), TransformerXL(layers=[2, 3], frequencies=[1.0, 0.2, 0.03])]
    model = patch_model(tiny("llama", num_hidden_layers=4), schemes, seed=0, attention="wide").eval()
    ids, counted = tokens(2, 12), []
    compute = forms.waves
    monkeypatch.setattr(forms, "waves", lambda *given: counted.append(given) or compute(*given))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    calls = ({}, {"attention_mask": mask}, {"position_ids": 2 * torch.arange(12)[None]})
    found = [model(ids, use_cache=False, **given).logits for given in calls]
    assert len(counted) == 3 * 4  # a side of queries and of keys, for each ladder
    monkeypatch.setattr(Positions, "once", lambda self, key, compute: compute())
    for given, logits in zip(calls, found, strict=True):
        assert model(ids, use_cache=False, **given).logits.equal(logits)
    assert len(counted) == 3 * 4 + 3 * 8
