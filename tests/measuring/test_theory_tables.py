"""Embeddings, tables of positions and products: against sums, dense least squares and loops, written out."""

import pytest
import torch
from families import tiny, tokens
from torch.testing import assert_close

from hf_posenc import UnsupportedModelError, patch_model
from hf_posenc.analysis import position_vectors, scheme_vectors
from hf_posenc.theory import embedding_statistics, negative_products, position_scores
from hf_posenc.theory.tables import distance_share, fitted_bias, vector_statistics


def test_statistics_of_vectors():
    drawn = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = torch.cov(drawn.T).square()
    found = vector_statistics(drawn)
    assert found.diagonal_share == pytest.approx((squares.diagonal().sum() / squares.sum()).item())
    assert found.mean_norm == pytest.approx(drawn.norm(dim=-1).mean().item())
    assert vector_statistics(drawn[:, :1] * torch.ones(8).double()).diagonal_share == pytest.approx(1 / 8)


def test_share_of_the_distance():
    """1 for sinusoids, what a mixture of both has for a mixture."""
    waves = scheme_vectors("sinusoidal", 40)
    assert distance_share(waves @ waves.T) == pytest.approx(1, abs=1e-12)
    places = torch.arange(40)
    relative = (places[:, None] - places).double().cos()
    absolute = (places[:, None] + places).double().mul(0.7).sin()
    means = {}
    entries = [(m, n) for m in range(40) for n in range(40) if m != n]
    for m, n in entries:
        means.setdefault(m - n, []).append((relative + absolute)[m, n].item())
    values = torch.tensor([(relative + absolute)[m, n].item() for m, n in entries])
    fitted = torch.tensor([sum(means[m - n]) / len(means[m - n]) for m, n in entries])
    expected = 1 - ((values - fitted).square().mean() / values.var(correction=0)).item()
    assert 0.1 < expected < 0.9
    assert distance_share(relative + absolute) == pytest.approx(expected, rel=1e-5)


def test_statistics_of_models():
    model = tiny("gpt2")
    found = embedding_statistics(model)
    words, places = model.transformer.wte.weight.detach().double(), model.transformer.wpe.weight.detach().double()
    assert found.tokens == vector_statistics(words)
    assert found.positions == vector_statistics(places)
    assert found.ratio == pytest.approx((places.norm(dim=-1).mean() / words.norm(dim=-1).mean()).item())
    assert found.distance_share == pytest.approx(distance_share(places @ places.T))
    assert_close(found.neighbour_distances, (places[1:] - places[:-1]).norm(dim=-1))
    scaled = tiny("gemma3")  # its tokens enter sqrt(E) times as large as they are stored
    norms = scaled.model.embed_tokens.weight.detach().double().norm(dim=-1) * scaled.config.hidden_size**0.5
    assert embedding_statistics(scaled).tokens.mean_norm == pytest.approx(norms.mean().item(), rel=1e-2)
    assert embedding_statistics(scaled).to_dict()["distance_share"] is None
    assert embedding_statistics(patch_model(tiny("gpt2"), "alibi")).positions is None
    offset = tiny("opt")
    assert_close(position_vectors(offset, 5), offset.model.decoder.embed_positions.weight[2:7].double().detach())
    with pytest.raises(ValueError, match="64 position vectors, 65"):
        position_vectors(model, 65)


# ----------------------------------------------------------------------------------------------- scores between positions


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(scores):
    """Explained share and bias by least squares with one unknown for each distance and each query."""
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
    return 1 - left(both) / left(queries), bias - (distances @ bias).mean()


@pytest.mark.parametrize("slope", [0.0, 3.0])
def test_the_bias_is_that_of_dense_least_squares(slope):
    scores = random(14, 14) + slope * torch.arange(14).log1p()
    for found, expected in zip(fitted_bias(scores), dense(scores), strict=True):
        assert_close(found, expected, rtol=0, atol=1e-10)
    # A constant of each query is not seen by the softmax.
    shifted = fitted_bias(scores + 5 * random(14, 1, seed=1))
    assert_close(shifted[1], dense(scores)[1], rtol=0, atol=1e-10)


def test_positions_alone_in_a_first_layer():
    model = tiny("gpt2").double()
    block, table = model.transformer.h[0], model.transformer.wpe.weight[:12].detach()
    query, key, _ = (
        part.view(12, 4, 8).transpose(0, 1) for part in block.attn.c_attn(block.ln_1(table)).split(32, dim=-1)
    )
    found = position_scores(model, length=12)
    for head, scores in enumerate((query @ key.mT * 8**-0.5).detach()):
        explained, bias = dense(scores)
        assert_close(found.explained_in_rows[head], explained, rtol=0, atol=1e-9)
        assert_close(found.bias[head], bias, rtol=0, atol=1e-9)
    assert found.to_dict()["bias"] == found.bias.tolist()


def test_what_has_no_table():
    for model in (tiny("llama"), patch_model(tiny("gpt2"), "alibi")):
        with pytest.raises(UnsupportedModelError, match="adds no table of positions"):
            position_scores(model)


# -------------------------------------------------------------------------------------------------------- negative products


@torch.no_grad()
@pytest.mark.parametrize("scheme", [None, "da_transformer"])
def test_negative_products_are_counted_pair_by_pair(scheme):
    model, ids = tiny("gpt2"), tokens(1, 9)
    if scheme:
        patch_model(model, scheme)
    found = negative_products(model, ids)
    states = model(ids, output_hidden_states=True).hidden_states
    for index, block in enumerate(model.transformer.h):
        query, key, _ = block.attn.c_attn(block.ln_1(states[index]))[0].split(32, -1)
        for head in range(4):
            own = slice(8 * head, 8 * head + 8)
            pairs = [query[i, own] @ key[j, own] < 0 for i in range(9) for j in range(i + 1)]
            assert found[index, head].item() == pytest.approx(sum(pairs).item() / 45)
    assert 0.1 < found.mean() < 0.9
