"""Decay and frequencies: against formulas written out, and the numbers of models."""

import math

import pytest
import torch
from decoders import decoder
from families import LENGTH, tiny, tokens
from situations import JOINING, randomize
from torch.testing import assert_close

from hf_posenc import available_schemes, patch_model
from hf_posenc.analysis import decay, frequencies, model_decay, position_vectors, scheme_vectors
from hf_posenc.core.dims import Dims

DIMS = Dims(num_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64, num_layers=1)
EXACT = {"rtol": 0, "atol": 1e-12}
TABLE = {"rtol": 0, "atol": 2e-6}  # transformers computes cosines in float32


@pytest.mark.parametrize("scheme", available_schemes())
def test_every_scheme_has_a_curve_that_starts_near_1(scheme):
    if scheme in JOINING:
        with pytest.raises(ValueError, match=f"{scheme} joins the positions of a layer"):
            decay(scheme, 40, dims=DIMS)
        return
    found = decay(scheme, 40, dims=DIMS)
    assert found.scores.shape[-1] == 40
    assert found.mean[0] == pytest.approx(1, abs=0.5)
    assert found.to_dict()["distances"] == list(range(40))


@pytest.mark.parametrize("base", [100.0, 10000.0])
def test_sinusoids(base):
    found = decay("sinusoidal", 60, dims=DIMS, base=base).scores[0, 0]
    expected = [sum(math.cos(d * base ** (-2 * u / 64)) for u in range(32)) / 32 for d in range(60)]
    assert_close(found, torch.tensor(expected, dtype=torch.float64), **EXACT)


def test_rope_and_its_scalings():
    w = torch.tensor([10000.0 ** (-2 * u / 16) for u in range(8)], dtype=torch.float64)
    d = torch.arange(60)
    assert_close(decay("rope", 60, dims=DIMS).scores[0, 0], (d[:, None] * w).cos().mean(-1), **TABLE)
    linear = decay("rope", 60, dims=DIMS, scaling={"rope_type": "linear", "factor": 4.0}).scores[0, 0]
    assert_close(linear, (d[:, None] * w / 4).cos().mean(-1), **TABLE)
    yarn = decay("rope", 60, dims=DIMS, scaling={"rope_type": "yarn", "factor": 4.0}).scores[0, 0]
    assert yarn[0].item() == pytest.approx((0.1 * math.log(4) + 1) ** 2, rel=1e-6)  # YaRN's temperature, squared
    half = decay("rope", 60, dims=DIMS, partial_rotary_factor=0.5).scores[0, 0]
    narrow = torch.tensor([10000.0 ** (-2 * u / 8) for u in range(4)] + [0.0] * 4, dtype=torch.float64)
    assert_close(half, (d[:, None] * narrow).cos().mean(-1), **TABLE)


def test_biases():
    d = torch.arange(60, dtype=torch.float64)
    slopes = torch.tensor([[1 / 4], [1 / 16], [1 / 64], [1 / 256]], dtype=torch.float64)
    assert_close(decay("alibi", 60, dims=DIMS).scores[0], 1 - slopes * d, **EXACT)
    assert_close(decay("da_transformer", 60, dims=DIMS).scores, torch.ones(1, 4, 60, dtype=torch.float64), **EXACT)
    assert_close(decay("nope", 60).scores, torch.ones(1, 1, 60, dtype=torch.float64), **EXACT)
    clipped = decay("shaw", 60, dims=DIMS, max_distance=8).scores[0]
    assert (clipped[:, 8:] == clipped[:, 8:9]).all()
    assert (clipped[:, :8].diff() != 0).all()
    blind = decay("shaw", 60, dims=DIMS, max_distance=0).scores[0]
    assert (blind == blind[:, :1]).all()


def test_learned_positions_are_averaged_over_pairs():
    found = decay("learned", [0, 3, 29], dims=DIMS, num_positions=30, initialization="normal", seed=3).scores[0, 0]
    table = scheme_vectors("learned", 30, dims=DIMS, num_positions=30, initialization="normal", seed=3)
    by_hand = [sum(table[m] @ table[m + d] for m in range(30 - d)) / (30 - d) for d in (0, 3, 29)]
    assert_close(found, torch.stack(by_hand) / by_hand[0], **EXACT)
    with pytest.raises(ValueError, match="30 position vectors, 31"):
        decay("learned", 31, dims=DIMS, num_positions=30)


@pytest.mark.parametrize(
    ("scheme", "family"), [("shaw", "llama"), ("transformer_xl", "gpt2"), ("alibi", "opt"), ("da_transformer", "llama")]
)
def test_a_model_as_it_stands(scheme, family):
    model = randomize(patch_model(tiny(family).double(), scheme))
    found = model_decay(model, tokens(1, 24), 20)
    assert found.scores.shape == (2, 4, 20)
    assert found.scores.diff().abs().max() > 1e-3
    if scheme == "da_transformer":
        module = model.model.layers[1].self_attn.posenc
        w, v = module.distance_weight.detach(), module.saturation.detach()
        d = torch.arange(20, dtype=torch.float64)
        expected = (1 + v.exp())[:, None] / (1 + (v[:, None] - w[:, None] * d).exp())
        assert_close(found.scores[1], expected, rtol=1e-9, atol=1e-9)
    if scheme == "alibi":
        assert_close(
            found.scores.diff(),
            torch.tensor([-(0.25**h) for h in (1, 2, 3, 4)]).double()[None, :, None].expand(2, 4, 19),
            rtol=0,
            atol=1e-9,
        )
    if scheme == "shaw":
        assert_close(found.scores[..., 5:], decay_of_shaw(model, tokens(1, 24))[..., 5:20], rtol=0, atol=1e-9)


def decay_of_shaw(model, ids):
    """1 + mean query . a_d / sqrt(D), from queries computed anew layer by layer."""
    queries = []
    hooks = [
        layer.self_attn.posenc.register_forward_pre_hook(lambda m, args: queries.append(args[0].query))
        for layer in model.model.layers
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    tables = [layer.self_attn.posenc.key_embeddings for layer in model.model.layers]
    rows = [
        torch.stack([1 + q.mean((0, 2)) @ t[min(d, t.shape[0] - 1)] / q.shape[-1] ** 0.5 for d in range(20)], -1)
        for q, t in zip(queries, tables, strict=True)
    ]
    return torch.stack(rows).detach()


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi", "gpt2", "opt"])
def test_a_stock_model_as_it_stands(family):
    model = tiny(family)
    found = model_decay(model, tokens(1, 24), 20)
    assert found.scores[..., 0] == pytest.approx(1, abs=1e-6)
    if family == "gpt2":
        table = model.transformer.wpe.weight.detach().double()
        by_hand = [sum(table[m] @ table[m + d] for m in range(LENGTH - d)) / (LENGTH - d) for d in range(20)]
        assert_close(found.scores[0, 0], torch.stack(by_hand) / by_hand[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", ["sinusoidal", "rope", "nope"])
def test_a_distance_back_is_as_far(scheme):
    there, back = decay(scheme, range(40), dims=DIMS), decay(scheme, range(0, -40, -1), dims=DIMS)
    assert_close(there.scores, back.scores, rtol=0, atol=0)
    assert back.distances.tolist() == list(range(0, -40, -1))


def test_attention_looks_back_only():
    with pytest.raises(ValueError, match="must be >= 0"):
        decay("alibi", [-1, 0, 1], dims=DIMS)


def test_frequencies_of_sinusoids_and_rope():
    (waves,) = frequencies("sinusoidal", dims=DIMS, trained_length=512)
    expected = torch.tensor([10000 ** (-2 * u / 64) for u in range(32)], dtype=torch.float64)
    assert_close(waves.frequencies, expected, **EXACT)
    assert waves.completed == sum(2 * math.pi * 10000 ** (2 * u / 64) <= 512 for u in range(32)) == 16
    (turned,) = frequencies("rope", dims=DIMS, trained_length=512)
    assert_close(turned.frequencies, expected[::4], rtol=1e-6, atol=0)
    (linear,) = frequencies("rope", dims=DIMS, trained_length=512, scaling={"rope_type": "linear", "factor": 4.0})
    assert_close(linear.frequencies * 4, turned.frequencies, rtol=1e-6, atol=0)
    # NTK-aware (dynamic) scaling: a larger base once the length exceeds the trained one.
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    (short,) = frequencies("rope", dims=DIMS, trained_length=512, scaling=dynamic)
    (long,) = frequencies("rope", dims=DIMS, trained_length=512, length=2048, scaling=dynamic)
    assert_close(short.frequencies, turned.frequencies, rtol=1e-6, atol=0)
    base = 10000 * (2 * 2048 / 512 - 1) ** (16 / 14)
    ntk = torch.tensor([base ** (-2 * u / 16) for u in range(8)], dtype=torch.float64)
    assert_close(long.frequencies, ntk, rtol=1e-5, atol=0)


def test_frequencies_of_models():
    assert len(frequencies(tiny("gemma3"))) == 2  # local and global layers
    (found,) = frequencies(patch_model(tiny("gpt2"), "rope"))
    assert_close(found.frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]).double(), rtol=1e-6, atol=0)
    assert found.trained_length == LENGTH
    partial = patch_model(tiny("llama"), "rope", partial_rotary_factor=0.5)
    assert frequencies(partial)[0].wavelengths[2:].tolist() == [math.inf, math.inf]  # they stand still
    for model in (tiny("gpt2"), patch_model(tiny("llama"), "alibi")):
        with pytest.raises(ValueError, match="has no waves"):
            frequencies(model)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "cohere", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text"])
def test_angles_in_every_form(model_type, patched):
    """Given twice, side by side, once, or as complex numbers: the angles of 4 pairs are the same."""
    model = decoder(model_type, rope_parameters={"rope_type": "default", "rope_theta": 10000.0 if not patched else 7.0})
    if patched:
        patch_model(model, "rope", rope_theta=10000.0)
    (found,) = frequencies(model)
    assert_close(found.frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]).double(), rtol=1e-5, atol=0)
    curve = [sum(math.cos(d * 10.0**-u) for u in range(4)) / 4 for d in range(30)]
    assert_close(
        model_decay(model, tokens(1, 30)).scores[0, 0].double(), torch.tensor(curve).double(), rtol=0, atol=1e-5
    )


def test_vectors_of_models():
    model, offset = tiny("gpt2"), tiny("opt")
    assert_close(position_vectors(model), model.transformer.wpe.weight.double().detach())
    assert_close(position_vectors(offset, 5), offset.model.decoder.embed_positions.weight[2:7].double().detach())
    assert position_vectors(patch_model(tiny("gpt2"), "alibi")) is None
    with pytest.raises(ValueError, match="64 position vectors, 65"):
        position_vectors(model, 65)
