"""rope_by_head: the base's rotation in chosen pairs of each head, and the calibration of the rest."""

import json
from dataclasses import replace

import pytest
import torch
from cases import attend, dot, rope_frequencies, turn
from decoders import decoder
from families import YARN, tiny, tokens
from transformers import CONFIG_MAPPING

import hf_posenc
from hf_posenc import (
    calibrate,
    describe,
    patch_model,
    patched,
    schemes_of,
    unpatch_model,
    verify,
)
from hf_posenc.engines import reference
from hf_posenc.model.base_model import BaseModel
from hf_posenc.schemes.rope_by_head import RopeByHead

MIXED = [[[0, 1], [3]], [[], [2, 0]]]
"""Pairs of a tiny LLaMA: two layers, two key-value heads, four pairs in each."""


def logits(model, ids, **keywords):
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **keywords}).logits


def every_pair(model):
    """Return all pairs, listed by layer and head; none where the base does not rotate."""
    base = BaseModel.of(model)
    angles = base.own_angles(RopeByHead())
    counts = {layer: 0 if each is None else len(each.frequencies) for layer, each in angles.items()}
    return [[[*range(counts[layer])]] * dims.num_key_value_heads for layer, dims in base.sizes.items()]


@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("llama", {"rope_parameters": YARN}), ("gemma3", {}), ("phi", {}), ("smollm3", {})],
    ids=["llama", "yarn", "gemma3", "phi", "smollm3"],
)
def test_with_all_pairs_it_is_the_base_bit_for_bit(family, config):
    model, ids = tiny(family, **config), tokens(2, 20)
    expected, pairs = logits(model, ids), every_pair(model)
    fewer = [[[u for u in head if u] for head in layer] for layer in pairs]
    for given in (None, pairs):
        with patched(model, "rope_by_head", pairs=given):
            assert logits(model, ids).equal(expected)
            assert verify(model).ok
    with patched(model, "rope_by_head", pairs=fewer):
        assert not torch.allclose(logits(model, ids), expected, atol=1e-2)
        assert verify(model).ok
    assert logits(model, ids).equal(expected)


def attention_calls(model, ids):
    """Return the call of each layer's attention, before the scheme."""
    seen = []
    for layer in model.model.layers:
        layer.self_attn.posenc.register_forward_pre_hook(lambda module, args: seen.append((module, args[0])))
    logits(model, ids)
    return seen


@pytest.mark.parametrize(
    ("made", "first", "size", "interleaved", "theta", "scaling"),
    [
        (lambda: tiny("llama", rope_parameters=YARN), 0, 8, False, 100.0, YARN),
        (lambda: decoder("glm", partial_rotary_factor=0.5), 0, 4, True, 10000.0, None),
        (lambda: decoder("youtu"), None, None, False, 10000.0, None),
    ],
    ids=["yarn", "interleaved-part", "latent"],
)
def test_calls_of_real_bases(made, first, size, interleaved, theta, scaling):
    """Outputs and gradients against loops over pairs: other pairs stay, and YaRN's factor stays on them."""
    if first is None and "youtu" not in CONFIG_MAPPING:
        pytest.skip("transformers is older than this type")
    model = made().double().eval()
    base = BaseModel.of(model)
    if first is None:  # latent attention sets the part apart that rotates
        first, size = model.config.qk_nope_head_dim, model.config.qk_rope_head_dim
    heads = base.dims.num_key_value_heads
    pairs = [[[h % (size // 2)] for h in range(heads)], [[] for _ in range(heads - 1)] + [[*range(size // 2)]]]
    module, call = attention_calls(patch_model(model, "rope_by_head", pairs=pairs), tokens(1, 9))[1]
    w, factor = rope_frequencies(size, theta, 9, 16, scaling)
    dimensions = [(u, u + size // 2) for u in range(size // 2)]
    if interleaved:
        dimensions = [(2 * u, 2 * u + 1) for u in range(size // 2)]
    dimensions = [(first + a, first + b) for a, b in dimensions]
    group = call.query.shape[1] // heads

    def score(h, i, j, q, k):
        own = [x if u in pairs[1][h // group] else 0.0 for u, x in enumerate(w)]
        return dot(turn(q, i, own, dimensions, factor), turn(k, j, own, dimensions, factor)) * call.scaling

    inputs = [t.detach().clone().requires_grad_() for t in (call.query, call.key, call.value)]
    output, _ = module(replace(call, query=inputs[0], key=inputs[1], value=inputs[2]), reference.attend)
    expected = attend(*inputs, score)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found, wanted = (torch.autograd.grad(each, inputs, slope, retain_graph=True) for each in (output, expected))
    for ours, theirs in zip((output, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # transformers has the w in float32


def test_lists_by_head_are_described_saved_and_undone(tmp_path):
    model, ids = tiny("llama"), tokens(2, 12)
    stock = logits(model, ids)
    patch_model(model, "rope_by_head", pairs=MIXED)
    assert schemes_of(model)[0].pairs == (((0, 1), (3,)), ((), (0, 2)))
    assert "rope_by_head(pairs=[5 in 4 heads])" in str(describe(model))
    expected = logits(model, ids)
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["position_encoding"]["schemes"][0]
    assert entry["pairs"] == [[[0, 1], [3]], [[], [0, 2]]]
    again = hf_posenc.from_pretrained(tmp_path)
    assert schemes_of(again) == schemes_of(model)
    assert logits(again, ids).equal(expected)
    unpatch_model(model)
    assert logits(model, ids).equal(stock)


def by_distance(model, ids):
    """Return the mean rotation of each head and pair from the weights of eager attention, complex (layers, H, pairs)."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True, use_cache=False).attentions).double()
    weights = weights / weights.sum(-1, keepdim=True)  # eager attention takes its softmax in float32
    w = torch.tensor(rope_frequencies(8, 10000.0, 0, 0, None)[0], dtype=torch.float64)
    at = torch.arange(ids.shape[1])
    phases = torch.exp(1j * (at[:, None] - at)[..., None] * w)
    return torch.einsum("nbhij,iju->nhu", weights.to(phases.dtype), phases) / ids.numel()


# ---------------------------------------------------------------------------------------------------------- calibration


def test_calibration_turns_the_queries_of_the_other_pairs():
    model, ids = tiny("llama").double(), tokens(12, 24, seed=3)
    factors = by_distance(tiny("llama").double(), ids[:-4])
    before = [layer.self_attn.q_proj.weight.detach().clone() for layer in model.model.layers]
    report = calibrate(
        patch_model(model, "rope_by_head", pairs=MIXED), ids, held_out=4, matching=None, judge="attention"
    )
    turned = 0
    for n, layer in enumerate(report.layers):
        assert layer.closed.mean() < layer.before.mean()
        rows, old = (w.view(4, 2, 4, -1) for w in (model.model.layers[n].self_attn.q_proj.weight, before[n]))
        for head, name in enumerate(layer.chosen):
            for u in range(4):
                expected = torch.complex(old[head, 0, u], old[head, 1, u])
                if name == "turned" and u not in MIXED[n][head // 2]:
                    expected, turned = expected * factors[n, head, u], turned + 1
                else:
                    assert rows[head, :, u].equal(old[head, :, u])
                found = torch.complex(rows[head, 0, u], rows[head, 1, u])
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert turned >= 4
