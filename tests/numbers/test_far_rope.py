"""far_rope on real bases: their own frequencies and factors, exact beside a cache, and what it refuses."""

import pytest
import torch
from cases import attend, dot, far_position, rope_frequencies, turn
from decoders import decoder
from families import YARN, tiny, tokens
from transformers import CONFIG_MAPPING

from hf_posenc import patch_model, patched, schemes_of, verify

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
KINDS = {
    "rerope": {"near": 5},
    "leaky": {"near": 4, "leak": 0.25},
    "self_extend": {"kind": "self_extend", "near": 6, "group": 4},
    "dual_chunk": {"kind": "dual_chunk", "chunk": 6, "length": 9},
}


def logits(model, ids, **keywords):
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **keywords}).logits


def by_steps(model, ids, first=7):
    """Return the logits of a prompt of some tokens and of single tokens after it, with a cache."""
    with torch.no_grad():
        found = model(ids[:, :first], use_cache=True)
        steps = [found.logits]
        for n in range(first, ids.shape[1]):
            found = model(ids[:, n : n + 1], past_key_values=found.past_key_values, use_cache=True)
            steps.append(found.logits)
    return torch.cat(steps, 1)


@pytest.mark.rows(default=2)
@pytest.mark.parametrize("kind", KINDS)
def test_it_acts_from_the_length_that_it_says(kind):
    """One token less, and the bits are the stock model's."""
    model, ids = tiny("llama"), tokens(2, 20)
    stock = {length: logits(model, ids[:, :length]) for length in range(1, 21)}
    patch_model(model, "far_rope", **KINDS[kind])
    first = next(n for n, expected in stock.items() if not logits(model, ids[:, :n]).equal(expected))
    assert schemes_of(model)[0].acts_from == first


@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("llama", {"rope_parameters": YARN}), ("gemma3", {}), ("gpt_neox", {}), ("smollm3", {})],
    ids=["llama", "yarn", "gemma3", "gpt_neox", "smollm3"],
)
def test_inside_of_near_it_is_the_base_bit_for_bit(family, config):
    model, ids = tiny(family, **config), tokens(2, 20)
    expected = logits(model, ids)
    with patched(model, "far_rope", near=20):
        assert logits(model, ids).equal(expected)
        assert verify(model).ok
    with patched(model, "far_rope", kind="dual_chunk", chunk=15, length=20):
        assert logits(model, ids).equal(expected)
    with patched(model, "far_rope", near=3):
        assert not torch.allclose(logits(model, ids), expected, atol=1e-2)


@pytest.mark.parametrize("kind", ["rerope", "self_extend", "dual_chunk"])
def test_far_keys_get_the_factor_of_yarn(kind):
    """The call of a layer, against loops over pairs with YARN's frequencies and its factor on cosines and sines."""
    model = patch_model(tiny("llama", rope_parameters=YARN).double(), "far_rope", **KINDS[kind])
    attention = model.model.layers[0].self_attn
    seen = {}

    def record(module, args, output):
        seen["call"], seen["output"] = args[0], output[0]

    attention.posenc.register_forward_hook(record)
    logits(model, tokens(1, 17))
    call, size = seen["call"], attention.head_dim
    assert call.key.shape[1] == 2  # key-value heads: nothing was repeated before it was rotated
    w, factor = rope_frequencies(size, 100.0, 17, 16, YARN)
    pairs = [(u, u + size // 2) for u in range(size // 2)]
    default = {"near": None, "leak": 0.0, "group": None, "chunk": None, "length": None, "kind": "rerope"}

    def score(h, i, j, q, k):
        d = far_position(i, j, **{**default, **KINDS[kind]})
        return dot(turn(q, d, w, pairs, factor**2), k) * size**-0.5

    expected = attend(call.query, call.key, call.value, score)
    torch.testing.assert_close(seen["output"], expected, atol=1e-5, rtol=1e-5)  # transformers has the w in float32
    assert factor > 1.05


@pytest.mark.skipif("granite_swa" not in CONFIG_MAPPING, reason="transformers is older than this type")
def test_layers_with_bases_of_their_own():
    """Granite lists a base of frequencies for each layer, which `rope` refuses: far_rope takes each layer's own."""
    model, ids = decoder("granite_swa", layer_rope_theta=[1e4, 30.0]), tokens(1, 20)
    expected = logits(model, ids)
    with patched(model, "far_rope", near=20):
        first, second = (layer.self_attn.posenc.angles.frequencies for layer in model.model.layers)
        assert [first[1], second[1]] == pytest.approx([1e4 ** (-1 / 4), 30 ** (-1 / 4)], rel=1e-6)
        torch.testing.assert_close(logits(model, ids), expected, atol=1e-5, rtol=1e-5)


def test_sinks_behind_a_window_stay_at_trained_distances():
    """Tokens that come before the window change nothing but through the sinks, whose distance has stopped to grow."""
    model = patch_model(tiny("llama", num_hidden_layers=1), "far_rope", near=6, window=6, sinks=2)
    ids = tokens(1, 40)
    shorter = torch.cat([ids[:, :2], ids[:, -6:]], 1)
    torch.testing.assert_close(logits(model, ids)[:, -1], logits(model, shorter)[:, -1], atol=1e-4, rtol=0)
    moved = patch_model(tiny("llama", num_hidden_layers=1), "rope", window=6, sinks=2)
    assert not torch.allclose(logits(moved, ids)[:, -1], logits(moved, shorter)[:, -1], atol=1e-3)


@pytest.mark.parametrize(("scheme", "options"), [("far_rope", {"near": 24}), ("rope_by_head", {}), ("rope", {})])
def test_a_base_that_rotates_a_part_of_each_head_is_left_as_it_is(scheme, options):
    """MiniMax-M2, whose released configs have `rotary_dim`: within `near` tokens nothing changes."""
    ids = tokens(2, 20)
    model = decoder("minimax_m2", rotary_dim=4).eval()
    with torch.no_grad():
        stock = model(ids).logits
        whole = decoder("minimax_m2").eval()(ids).logits
        assert patch_model(model, scheme, **options)(ids).logits.equal(stock)
    if stock.equal(whole):
        pytest.skip("this transformers does not read rotary_dim of minimax_m2; 5.23 does")
    assert (stock - whole).abs().max() > 1e-3
