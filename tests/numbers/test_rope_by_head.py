"""rope_by_head: the base's rotation in chosen pairs of each head, how pairs are chosen, and the calibration of the rest."""

import json
from dataclasses import replace

import pytest
import torch
from cases import attend, dot, rope_frequencies, turn
from decoders import decoder
from families import LONGROPE, YARN, tiny, tokens
from snapshots import assert_same, snapshot
from transformers import CONFIG_MAPPING

import hf_posenc
from hf_posenc import (
    AlreadyPatchedError,
    UnsupportedModelError,
    calibrate,
    choose_pairs,
    describe,
    patch_model,
    patched,
    schemes_of,
    unpatch_model,
    verify,
)
from hf_posenc.calibration import PairChoice
from hf_posenc.engines import reference
from hf_posenc.live.base_model import BaseModel
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


# --------------------------------------------------------------------------------------------------- what it computes


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


def test_one_set_of_pairs_is_a_longrope_of_transformers():
    """A stock model whose `longrope` has zeros rotates like it, and writes the same text with its own cache."""
    ids = tokens(2, 12)
    stock, ours = tiny("llama"), patch_model(tiny("llama"), "rope_by_head", pairs=[0, 3])
    untouched = logits(stock, ids)
    w, _ = rope_frequencies(8, 10000.0, 0, 0, None)
    patch_model(stock, "rope", frequencies=[w[0], 0.0, 0.0, w[3]], scaling="none")
    torch.testing.assert_close(logits(ours, ids), logits(stock, ids), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(stock, ids), untouched, atol=1e-2)
    written = [model.generate(ids, max_new_tokens=8, do_sample=False) for model in (stock, ours)]
    assert written[0].equal(written[1])


def test_by_head_in_a_cache_behind_padding_and_packed():
    model, ids = patch_model(tiny("llama"), "rope_by_head", pairs=MIXED), tokens(1, 20)
    whole = logits(model, ids)
    with torch.no_grad():
        start = model(ids[:, :9], use_cache=True)
        rest = model(ids[:, 9:], past_key_values=start.past_key_values, use_cache=True).logits
    torch.testing.assert_close(torch.cat([start.logits, rest], 1), whole, atol=1e-5, rtol=1e-5)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    found = logits(model, padded, attention_mask=(padded > 0).long())[:, 4:]
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    twice = torch.arange(20).repeat(2)[None]
    torch.testing.assert_close(logits(model, ids.repeat(1, 2), position_ids=twice)[:, 20:], whole, atol=1e-5, rtol=1e-5)


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


def test_a_layer_that_rotates_nothing_does_not_answer():
    """`verify` knows it, and a pair that turns in one head is enough to answer."""
    model = patch_model(tiny("llama"), "rope_by_head", pairs=[[[0], []], [[], []]])
    assert [each.expected for each in verify(model).layers] == [True, False]
    assert verify(model).ok
    model.model.layers[1].self_attn.posenc.kept = None  # now it turns
    assert not verify(model).ok


@pytest.mark.parametrize(
    ("family", "config", "pairs", "error", "words"),
    [
        ("llama", {"rope_parameters": LONGROPE}, [0], UnsupportedModelError, "depend on the length"),
        ("llama", {"rope_parameters": YARN | {"rope_type": "dynamic"}}, [0], ValueError, "dynamic"),
        ("llama", {}, [0, 4], ValueError, "layer 0 has no pair 4 .* 0 to 3"),
        ("llama", {}, [[[0]] * 4] * 2, ValueError, "4 heads in layer 0, which has 2"),
        ("llama", {}, [[[0], [0]]], ValueError, "1 layers, and the scheme is in 2: 0, 1"),
        ("smollm3", {}, [[[0], [0]]] * 2, ValueError, "layer 1 has no pair 0 .* leaves it unrotated"),
    ],
    ids=["longrope", "dynamic", "pair", "heads", "layers", "unrotated"],
)
def test_what_is_refused(family, config, pairs, error, words):
    model, ids = tiny(family, **config), tokens(1, 9)
    before = logits(model, ids)
    with pytest.raises(error, match=words):
        patch_model(model, "rope_by_head", pairs=pairs)
    assert logits(model, ids).equal(before)


# ------------------------------------------------------------------------------------------------------ choosing pairs


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


def test_numbers_of_the_paper_and_of_the_mean_rotation():
    """From the outputs of the projections, and from the weights of eager attention."""
    model, ids = tiny("llama").double(), tokens(3, 16)
    before, outputs = snapshot(model), []
    choices = [choose_pairs(model, ids, by=by) for by in ("contribution", "unexplained")]
    assert_same(snapshot(model), before)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_hook(lambda module, args, output: outputs.append(output))
    factors = by_distance(model, ids)
    norms = [each.unflatten(-1, (-1, 2, 4)).norm(dim=-2).mean((0, 1)) for each in outputs]
    for layer in range(2):
        contribution = norms[2 * layer] * norms[2 * layer + 1].repeat_interleave(2, 0) * 8**-0.5
        unexplained = contribution * (1 - factors[layer].abs().square()).sqrt()
        for choice, expected in zip(choices, (contribution, unexplained), strict=True):
            found = torch.tensor(choice.numbers[layer], dtype=torch.float64)
            torch.testing.assert_close(found, expected.view(2, 2, 4).mean(1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "config"), [("llama", {"rope_parameters": YARN}), ("gemma2", {})], ids=["yarn", "softcap"]
)
def test_divergence_is_that_of_a_scheme_without_the_pair(family, config):
    """From the weights of eager attention, stock and with rope_by_head in one layer."""
    model, ids = tiny(family, attn_implementation="eager", **config), tokens(2, 16)
    choice = choose_pairs(model, ids)
    assert (choice.by, choice.layers, choice.every_layer) == ("divergence", (0, 1), True)

    def weights(layer):
        with torch.no_grad():
            return model(ids, output_attentions=True, use_cache=False).attentions[layer].double()

    for layer, (head, pair) in ((0, (1, 0)), (1, (0, 2))):
        lists = [[0, 1, 2, 3], [0, 1, 2, 3]]
        lists[head] = [u for u in range(4) if u != pair]
        p = weights(layer)
        with patched(model, RopeByHead(pairs=[lists], layers=[layer])):
            q = weights(layer)
        kl = torch.where(p > 0, p * (p / q.clamp(min=1e-30)).log(), 0).sum(-1).mean((0, 2)).view(2, 2).mean(1)
        assert choice.numbers[layer][head][pair] == pytest.approx(kl[head].item(), rel=1e-3)
        assert kl[head] > 1e-4
        assert kl[1 - head] == pytest.approx(0, abs=1e-6)


def test_shares_of_heads_of_layers_and_of_the_model():
    choice = PairChoice("divergence", (0, 2), False, (((5.0, 4.0), (1.0, 0.0)), ((3.0, 9.0), (8.0, 7.0))))

    def pairs(keep, among):
        return choice.scheme(keep, among=among).pairs

    assert pairs(0.5, "head") == (((0,), (0,)), ((1,), (0,)))
    assert pairs(0.5, "layer") == (((0, 1), ()), ((1,), (0,)))
    assert pairs(0.5, "model") == (((0,), ()), ((1,), (0, 1)))
    assert pairs(0.01, "model") == (((), ()), ((1,), ()))  # one at least
    assert pairs(1, "head") == (((0, 1), (0, 1)),) * 2
    assert choice.scheme(1.0).layers == (0, 2)
    assert replace(choice, every_layer=True).scheme(1.0).layers is None
    assert json.loads(json.dumps(choice.to_dict()))["numbers"][1][0][1] == 9.0
    assert str(choice).splitlines()[-1].split() == ["2", "11", "16"]
    for keep in (0, 1.5, True, "half"):
        with pytest.raises(ValueError, match="keep must be"):
            choice.scheme(keep)
    with pytest.raises(ValueError, match="among must be"):
        choice.scheme(0.5, among="heads")


@pytest.mark.parametrize("by", ["divergence", "unexplained", "contribution"])
def test_a_pair_that_does_not_count_can_stop(by):
    """One pair of each head has no weight: without its rotation the model stays what it is."""
    model, ids = tiny("llama"), tokens(2, 16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.view(4, 2, 4, -1)[:, :, 2] = 0
    expected, choice = logits(model, ids), choose_pairs(model, ids, by=by)
    assert all(head[2] == pytest.approx(0, abs=1e-7) for layer in choice.numbers for head in layer)
    patch_model(model, choice.scheme(0.75))
    assert schemes_of(model)[0].pairs == (((0, 1, 3),) * 2,) * 2
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-5, rtol=1e-5)


def test_layers_that_the_base_leaves_unrotated_are_left_out():
    choice = choose_pairs(tiny("smollm3"), tokens(2, 16))
    assert choice.layers == (0,)
    assert verify(patch_model(tiny("smollm3"), choice.scheme(0.5))).ok


def test_what_choose_pairs_refuses():
    model = tiny("llama", rope_parameters=LONGROPE)
    with pytest.raises(UnsupportedModelError, match="depend on the length"):
        choose_pairs(model, tokens(2, 16))
    with pytest.raises(UnsupportedModelError, match="does not rotate"):
        choose_pairs(tiny("gpt2"), tokens(2, 16))
    with pytest.raises(UnsupportedModelError, match="several coordinates: choose from divergence, contribution"):
        choose_pairs(decoder("ernie4_5_vl_moe_text"), tokens(2, 16), by="unexplained")
    with pytest.raises(ValueError, match="by must be one of divergence"):
        choose_pairs(tiny("llama"), tokens(2, 16), by="norm")
    with pytest.raises(ValueError, match="tokens must be integers"):
        choose_pairs(tiny("llama"), [1, 2])
    with pytest.raises(AlreadyPatchedError):
        choose_pairs(patch_model(tiny("llama"), "rope_by_head", pairs=[0]), tokens(2, 16))


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


def test_with_all_pairs_there_is_nothing_to_calibrate():
    model = patch_model(tiny("llama"), "rope_by_head")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = calibrate(model, tokens(6, 24), held_out=2, matching=None)
    assert report.kept == "nothing"
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
