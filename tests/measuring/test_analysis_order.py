"""Order: an unmasked stack without positions is equivariant, to rounding; one layer without positions is blind to it, to rounding; a causal stack is not; every scheme sees it."""

import pytest
import torch
from families import FAMILIES, tiny, tokens
from situations import CASES, WITHOUT_POSITIONS, patched_model, randomize

from hf_posenc import patch_model
from hf_posenc.analysis import equivariance, order_sensitivity
from hf_posenc.errors import UnsupportedModelError

BLIND = 1e-13  # float64: the same sum in another order
SEES = 1e-6
SINGLE = 1e-6  # where the family computes the softmax in float32 whatever the dtype


@pytest.mark.parametrize("change", ["swap", "shuffle"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma", "opt"])
def test_one_layer_without_positions_is_blind(family, change):
    model = patch_model(tiny(family, num_hidden_layers=1).double(), "nope")
    found = order_sensitivity(model, tokens(2, 12), change=change)
    assert found.total_variation < BLIND
    assert abs(found.kl) < BLIND
    assert max(found.layers[0].own, found.layers[0].accumulated, found.layers[0].next_token) < BLIND


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_causal_stack_without_positions_is_not(family):
    found = order_sensitivity(patch_model(tiny(family).double(), "nope"), tokens(2, 12), change="shuffle")
    assert max(layer.own for layer in found.layers) < BLIND  # no layer by itself
    assert found.layers[0].accumulated < BLIND  # nothing below the second layer, for the last token
    assert found.layers[1].accumulated > SEES  # but what the others saw differs
    assert found.layers[0].next_token > SEES
    assert found.layers[1].next_token < BLIND  # nothing above it reads the others
    assert found.total_variation > SEES


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_POSITIONS])
def test_every_scheme_sees_order_in_one_layer(case):
    scheme, hyperparameters = CASES[case]
    model = randomize(patch_model(tiny("llama", num_hidden_layers=1).double(), scheme, **hyperparameters))
    found = order_sensitivity(model, tokens(2, 12), change="shuffle")
    assert found.total_variation > SEES
    assert found.layers[0].own > SEES


def test_vectors_at_the_input_are_moved_with_what_they_were_added_to():
    found = order_sensitivity(patched_model("sinusoidal", "gpt2").double(), tokens(2, 12), change="shuffle")
    assert max(layer.own for layer in found.layers) < BLIND
    assert found.layers[0].accumulated > SEES


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_models(family):
    model = tiny(family)
    modes = [module.training for module in model.modules()]
    found = order_sensitivity(model, tokens(1, 8), changes=1)
    assert found.total_variation > SEES
    assert [module.training for module in model.modules()] == modes
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.base_model.modules())
    assert "swap" in str(found)
    assert len(found.to_dict()["layers"]) == 2


def test_total_variation_is_the_change_of_the_distribution():
    model = tiny("llama").double()
    ids = torch.tensor([[5, 60, 7]])  # two tokens of context: one swap there is
    before, after = (model(x).logits[0, -1].softmax(-1) for x in (ids, ids[:, [1, 0, 2]]))
    found = order_sensitivity(model, ids, changes=2)
    assert found.total_variation == pytest.approx((before - after).abs().sum().item() / 2, rel=1e-9)
    assert found.kl == pytest.approx((before * (before / after).log()).sum().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("ids", "arguments", "message"),
    [
        (torch.tensor([5, 5, 5, 6]), {}, "are the same"),
        (torch.tensor([5, 6]), {}, "T >= 3"),
        (torch.tensor([5, 6, 7]), {"change": "reverse"}, "swap or shuffle"),
    ],
)
def test_wrong_calls(ids, arguments, message):
    with pytest.raises(ValueError, match=message):
        order_sensitivity(tiny("gpt2"), ids, **arguments)


# -------------------------------------------------------------------------------------------------- whole stacks


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_an_unmasked_stack_without_positions_is_equivariant(family):
    model = patch_model(tiny(family, num_hidden_layers=3).double(), "nope")
    blind = BLIND if family == "gpt2" else SINGLE
    found = equivariance(model, tokens(2, 12))
    assert all(layer.unmasked < blind for layer in found.layers)
    assert all(layer.causal > SEES for layer in found.layers)
    assert found.layers[0].causal_last < blind  # sees one set of tokens in either order
    assert all(layer.causal_last > SEES for layer in found.layers[1:])  # but the others have seen different ones


def test_equivariance_is_that_of_the_hidden_states_of_a_bidirectional_model():
    """Every token compared with itself, through the model's own output of hidden states, with a mask of zeros."""
    model, ids = tiny("gpt2").double(), torch.tensor([[5, 60, 7]])  # two tokens of context: one order beside their own
    found = equivariance(model, ids, changes=1)
    for layer in found.layers:
        for name, mask in (("unmasked", torch.zeros(1, 1, 3, 3, dtype=torch.float64)), ("causal", None)):
            hooks, states = [], []
            block = model.transformer.h[layer.index]
            hooks.append(block.register_forward_hook(lambda module, args, output, to=states: to.append(output)))
            for text in (ids, ids[:, [1, 0, 2]]):
                model(text, attention_mask=mask)
            hooks[0].remove()
            here, there = (each[0] if isinstance(each, tuple) else each for each in states)
            change = (there[0] - here[0, [1, 0, 2]]).norm(dim=-1) / here[0, [1, 0, 2]].norm(dim=-1)
            assert getattr(layer, name) == pytest.approx(change.mean().item(), rel=1e-9)
            if mask is None:
                assert layer.causal_last == pytest.approx(change[-1].item(), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_equivariance_of_stock_models(family):
    model = tiny(family)
    implementation = model.config._attn_implementation
    found = equivariance(model, tokens(1, 8), changes=1)
    assert all(layer.unmasked > 1e-3 for layer in found.layers)  # positions
    assert model.config._attn_implementation == implementation
    assert not any(layer._forward_hooks for layer in model.base_model.modules())
    assert "unmasked" in str(found)
    assert len(found.to_dict()["layers"]) == 2


@pytest.mark.parametrize("placement", ["input", "every_layer"])
def test_positions_break_equivariance(placement):
    found = equivariance(patch_model(tiny("llama"), "sinusoidal", placement=placement), tokens(1, 8), changes=1)
    assert all(layer.unmasked > 1e-3 for layer in found.layers)


def test_masks_that_cannot_be_taken_away():
    from decoders import decoder

    with pytest.raises(UnsupportedModelError, match="no scheme has distances"):
        equivariance(patch_model(tiny("gpt2"), "alibi"), tokens(1, 8))
    with pytest.raises(UnsupportedModelError, match="applies its own mask"):
        equivariance(decoder("gpt_neo"), tokens(1, 8))
    with pytest.raises(ValueError, match="are the same"):
        equivariance(tiny("gpt2"), torch.tensor([5, 5, 5, 6]))
