"""Order: an unmasked stack without positions is equivariant, to rounding; one layer without positions is blind to it, to rounding; a causal stack is not; every scheme sees it."""

import pytest
import torch
from decoders import decoder
from families import FAMILIES, tiny, tokens
from situations import CASES, WITHOUT_POSITIONS, patched_model, randomize

from hf_posenc import patch_model
from hf_posenc.analysis import equivariance

BLIND = 1e-13  # float64: the same sum in another order
SEES = 1e-6
SINGLE = 1e-6  # where the family computes the softmax in float32 whatever the dtype


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_stack_without_positions(family):
    model = patch_model(tiny(family, num_hidden_layers=3).double(), "nope")
    blind = BLIND if family == "gpt2" else SINGLE
    found = equivariance(model, tokens(2, 12))
    assert all(max(layer.own, layer.unmasked) < blind for layer in found.layers)
    assert all(layer.causal > SEES for layer in found.layers)
    assert found.layers[0].causal_last < blind  # sees one set of tokens in either order
    assert all(layer.causal_last > SEES for layer in found.layers[1:])  # but the others have seen different ones
    assert found.total_variation > SEES


@pytest.mark.parametrize("case", [case for case in CASES if case not in WITHOUT_POSITIONS])
def test_every_scheme_sees_order_in_one_layer(case):
    scheme, hyperparameters = CASES[case]
    model = randomize(patch_model(tiny("llama", num_hidden_layers=1).double(), scheme, **hyperparameters))
    found = equivariance(model, tokens(2, 12))
    assert found.total_variation > SEES
    assert found.layers[0].own > SEES


def test_vectors_at_the_input_are_moved_with_what_they_were_added_to():
    found = equivariance(patched_model("sinusoidal", "gpt2").double(), tokens(2, 12))
    assert max(layer.own for layer in found.layers) < BLIND
    assert found.layers[0].causal_last > SEES


def test_numbers_are_those_of_the_hidden_states_of_a_bidirectional_model():
    """Every token compared with itself, through the model's own output of hidden states, with a mask of zeros."""
    model, ids = tiny("gpt2").double(), torch.tensor([[5, 60, 7]])  # two tokens of context: one order beside their own
    other = ids[:, [1, 0, 2]]
    before, after = (model(x).logits[0, -1].softmax(-1) for x in (ids, other))
    found = equivariance(model, ids, changes=1)
    assert found.total_variation == pytest.approx((before - after).abs().sum().item() / 2, rel=1e-9)
    for layer in found.layers:
        for name, mask in (("unmasked", torch.zeros(1, 1, 3, 3, dtype=torch.float64)), ("causal", None)):
            states = []
            block = model.transformer.h[layer.index]
            hook = block.register_forward_hook(lambda module, args, output, to=states: to.append(output))
            for text in (ids, other):
                model(text, attention_mask=mask)
            hook.remove()
            here, there = (each[0] if isinstance(each, tuple) else each for each in states)
            change = (there[0] - here[0, [1, 0, 2]]).norm(dim=-1) / here[0, [1, 0, 2]].norm(dim=-1)
            assert getattr(layer, name) == pytest.approx(change.mean().item(), rel=1e-9)
            if mask is None:
                assert layer.causal_last == pytest.approx(change[-1].item(), rel=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_models(family):
    model = tiny(family)
    modes, implementation = [module.training for module in model.modules()], model.config._attn_implementation
    found = equivariance(model, tokens(1, 8), changes=1)
    assert all(layer.unmasked > 1e-3 for layer in found.layers)  # positions
    assert model.config._attn_implementation == implementation
    assert [module.training for module in model.modules()] == modes
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.base_model.modules())
    assert str(found).count("e-") >= 2


def test_masks_that_cannot_be_taken_away():
    """No scheme on scores has distances to later tokens; gpt_neo's attention applies its own mask."""
    for model in (patch_model(tiny("gpt2"), "alibi"), decoder("gpt_neo")):
        found = equivariance(model, tokens(1, 8), changes=1)
        assert all(layer.unmasked is None and layer.causal > 1e-3 for layer in found.layers)
        assert " - " in str(found)


@pytest.mark.parametrize(("ids", "message"), [([5, 5, 5, 6], "are the same"), ([5, 6], "T >= 3")])
def test_wrong_calls(ids, message):
    with pytest.raises(ValueError, match=message):
        equivariance(tiny("gpt2"), torch.tensor(ids))
