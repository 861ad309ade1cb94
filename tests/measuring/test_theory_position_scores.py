"""Scores between positions: against dense least squares, curves that are known, and a first layer written out."""

import json
from pathlib import Path

import pytest
import torch
from families import tiny, tokens
from positioned import positioned

from hf_posenc import UnsupportedModelError, patch_model
from hf_posenc.theory import position_scores, scores_between

LENGTH = 16


def factors(scores):
    """Queries and keys (1, T, T) whose products are the scores."""
    return scores[None].double(), torch.eye(len(scores), dtype=torch.float64)[None]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(scores):
    """Explained shares and the bias by least squares with one unknown for each distance and each query."""
    count = len(scores)
    pairs = [(i, j) for i in range(count) for j in range(i + 1)]
    values = torch.stack([scores[i, j] for i, j in pairs])
    distances, queries = (torch.zeros(len(pairs), count, dtype=torch.float64) for _ in range(2))
    for row, (i, j) in enumerate(pairs):
        distances[row, i - j] = queries[row, i] = 1.0

    def solved(design):
        return torch.linalg.lstsq(design, values[:, None]).solution

    def left(design):
        return (values - (design @ solved(design))[:, 0]).square().sum()

    both = torch.cat([distances[:, 1:], queries], 1)  # the bias of distance 0 is a constant of all queries
    bias = torch.cat([torch.zeros(1, dtype=torch.float64), solved(both)[: count - 1, 0]])
    bias = bias - (distances @ bias).mean()
    whole = (values - values.mean()).square().sum()
    return 1 - left(distances) / whole, 1 - left(both) / left(queries), bias, (left(queries) / len(pairs)).sqrt()


@pytest.mark.parametrize("first", [0, 3])
def test_shares_and_bias_are_those_of_dense_least_squares(first):
    scores = random(2, 14, 14)
    scores[1] += 3.0 * torch.arange(14).log1p()
    query, key = scores, torch.eye(14, dtype=torch.float64).expand(2, -1, -1)
    found = scores_between(query, key, scaling=0.5, first=first)
    for head in range(2):
        explained, in_rows, bias, deviation = dense(0.5 * scores[head, first:, first:])
        assert found.explained[head] == pytest.approx(explained.item(), abs=1e-10)
        assert found.explained_in_rows[head] == pytest.approx(in_rows.item(), abs=1e-10)
        assert found.deviation[head] == pytest.approx(deviation.item(), rel=1e-10)
        assert (found.bias[head] - bias).abs().max() <= 1e-10
    assert found.mean.shape == found.bias.shape == (2, 14 - first)


def test_what_depends_on_distance_alone_is_explained_and_what_the_softmax_does_not_see_only_in_rows():
    lag = (torch.arange(20)[:, None] - torch.arange(20)).clamp(min=0)
    curve = random(20)
    found = scores_between(*factors(curve[lag]), scaling=1.0)
    assert found.explained.item() == pytest.approx(1, abs=1e-12)
    assert (found.mean[0] - curve).abs().max() <= 1e-12
    shifted = scores_between(*factors(curve[lag] + 5 * random(20, 1, seed=1)), scaling=1.0)
    assert shifted.explained.item() < 0.5
    assert shifted.explained_in_rows.item() == pytest.approx(1, abs=1e-12)
    assert (shifted.bias - found.bias).abs().max() <= 1e-12


def test_positions_alone_in_a_first_layer():
    model = tiny("gpt2").double()
    block, table = model.transformer.h[0], model.transformer.wpe.weight
    query, key, _ = (
        part.view(64, 4, 8).transpose(0, 1) for part in block.attn.c_attn(block.ln_1(table)).split(32, dim=-1)
    )
    expected = scores_between(query, key, scaling=8**-0.5)
    found = position_scores(model)
    assert (found.bias - expected.bias).abs().max() <= 1e-12
    assert (found.explained - expected.explained).abs().max() <= 1e-12


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_the_mean_score_over_pairs_of_tokens(family):
    model, ids = tiny(family).double(), tokens(1, 6)[0]
    found = position_scores(model, ids, length=10, first=2)
    decoder = model.transformer if family == "gpt2" else model.model.decoder
    words = decoder.wte(ids) if family == "gpt2" else decoder.embed_tokens(ids)
    table = decoder.wpe.weight[:10] if family == "gpt2" else decoder.embed_positions.weight[2:12]
    x = words[:, None] + table  # (tokens, positions, E)
    if family == "gpt2":
        query, key, _ = decoder.h[0].attn.c_attn(decoder.h[0].ln_1(x)).chunk(3, -1)
    else:
        layer = decoder.layers[0]
        query, key = (p(layer.self_attn_layer_norm(x)) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj))
    query, key = (each.view(6, 10, 4, 8) for each in (query, key))
    scores = torch.einsum("aihd,bjhd->hij", query, key) / 36 * 8**-0.5  # over all pairs of two tokens
    for head in range(4):
        explained, in_rows, bias, _ = dense(scores[head, 2:, 2:].detach())
        assert found.explained[head] == pytest.approx(explained.item(), abs=1e-9)
        assert found.explained_in_rows[head] == pytest.approx(in_rows.item(), abs=1e-9)
        assert (found.bias[head] - bias).abs().max() <= 1e-9
    assert (position_scores(model, ids, length=10, first=2, samples=2).bias - found.bias).abs().max() > 1e-3


def test_a_table_made_for_biases_is_explained_by_them():
    biases = random(1, 2, LENGTH)
    model = positioned(biases)
    found = position_scores(model, torch.arange(97))
    pairs = torch.arange(LENGTH, 0, -1)
    assert (1 - found.explained_in_rows).abs().max() <= 1e-6
    assert (found.bias - (biases[0] - (biases[0] * pairs).sum(-1, keepdim=True) / pairs.sum())).abs().max() <= 1e-4


def test_it_prints_and_goes_to_json():
    found = position_scores(tiny("gpt2"), length=12)
    assert str(found).startswith("GPT2LMHeadModel: scores between positions 0 to 11\n")
    assert str(found).count("\n") == 5
    written = json.loads(json.dumps(found.to_dict()))
    assert written["bias"] == found.bias.tolist()
    assert written["first"] == 0


def test_what_cannot_be_measured():
    with pytest.raises(UnsupportedModelError, match="adds no table of positions"):
        position_scores(tiny("llama"))
    with pytest.raises(UnsupportedModelError, match="unpatch"):
        position_scores(patch_model(tiny("gpt2"), "alibi"))
    with pytest.raises(ValueError, match="the model has 64 position vectors"):
        position_scores(tiny("gpt2"), length=65)
    with pytest.raises(ValueError, match="of 10 positions at least 3 must be left from first=8 on"):
        position_scores(tiny("gpt2"), length=10, first=8)
    with pytest.raises(ValueError, match="no tokens"):
        position_scores(tiny("gpt2"), torch.empty(0, dtype=torch.int64))


def test_what_the_script_says_of_the_table_beside_attention(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from measure_calibration import keep_mean, loss
    from measure_position_scores import loss_without_table

    model, ids = tiny("gpt2"), tokens(2, 20)
    expected = loss(model, ids)
    keep_mean(model)
    assert loss(model, ids) == pytest.approx(expected, abs=1e-5)
    assert model.transformer.wpe.weight.mean(0).abs().max() < 1e-6
    assert abs(loss_without_table(model, ids) - expected) > 1e-3
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    assert loss_without_table(model, ids) == pytest.approx(loss(model, ids), abs=1e-5)
