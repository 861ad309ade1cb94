"""Statistics of embeddings and of position vectors, against sums written out."""

import math

import pytest
import torch
from families import tiny, tokens
from torch.testing import assert_close

from hf_posenc import patch_model
from hf_posenc.analysis import probe
from hf_posenc.dims import Dims
from hf_posenc.theory import distance_share, embedding_statistics, neighbour_distances, vector_statistics

DIMS = Dims(num_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64, num_layers=1)


def test_statistics_of_vectors():
    generator = torch.Generator().manual_seed(0)
    independent = torch.randn(20000, 8, generator=generator, dtype=torch.float64)
    found = vector_statistics(independent)
    assert found.diagonal_share == pytest.approx(1, abs=0.01)
    assert found.mean_norm == pytest.approx(math.sqrt(2) * math.gamma(4.5) / math.gamma(4), rel=0.01)  # chi with 8
    one_direction = independent[:, :1] * torch.ones(8, dtype=torch.float64)
    assert vector_statistics(one_direction).diagonal_share == pytest.approx(1 / 8)


def test_shares_of_few_vectors():
    """Independent coordinates look correlated where vectors are few: the mean over many draws is known."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0, 1.0]).double()
    drawn = torch.randn(4000, 12, 6, generator=generator, dtype=torch.float64) * sizes
    covariances = torch.stack([torch.cov(each.T) for each in drawn])
    squares = covariances.square()
    diagonal = squares.diagonal(dim1=1, dim2=2).sum(-1).mean()
    expected = diagonal / squares.sum((1, 2)).mean()
    whole = vector_statistics(drawn.flatten(0, 1))
    variances = sizes.square()
    by_hand = variances.square().sum() * (1 + 2 / 11)
    by_hand = by_hand / (by_hand + (variances.sum() ** 2 - variances.square().sum()) / 11)
    assert by_hand.item() == pytest.approx(expected.item(), rel=0.02)
    assert sum(vector_statistics(each).independent_share for each in drawn[:500]) / 500 == pytest.approx(
        by_hand.item(), rel=0.03
    )  # a mean of ratios, not a ratio of means
    assert whole.independent_share == pytest.approx(1, abs=1e-3)
    assert whole.dimensions == pytest.approx((variances.sum() ** 2 / variances.square().sum()).item(), rel=0.02)
    assert whole.common < 0.02
    few = torch.corrcoef(drawn[0].T) - torch.eye(6)
    assert vector_statistics(drawn[0]).correlation == pytest.approx((few.square().sum() / 30).sqrt().item())
    assert few.square().sum() / 30 == pytest.approx(1 / 11, rel=0.5)
    shifted = vector_statistics(drawn[0] + 100)
    assert shifted.common == pytest.approx(1, abs=0.01)
    assert shifted.dimensions == pytest.approx(vector_statistics(drawn[0]).dimensions)


def test_share_of_the_distance():
    """1 for sinusoids, what a mixture of both has for a mixture."""
    places = torch.arange(40)
    waves = probe.build("sinusoidal", dims=DIMS)[1].embed(places[None])[0]
    assert distance_share(waves @ waves.T) == pytest.approx(1, abs=1e-12)
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


def test_statistics_of_whole_matrices():
    model = tiny("gpt2")
    found = embedding_statistics(model)
    words, places = model.transformer.wte.weight.detach().double(), model.transformer.wpe.weight.detach().double()
    assert (found.tokens.count, found.positions.count) == (len(words), len(places))
    assert found.ratio == pytest.approx((places.norm(dim=-1).mean() / words.norm(dim=-1).mean()).item())
    covariance = torch.cov(places.T)
    assert found.positions.diagonal_share == pytest.approx(
        (covariance.diagonal().square().sum() / covariance.square().sum()).item()
    )
    assert found.distance_share == pytest.approx(distance_share(places @ places.T))
    scaled = tiny("gemma3")  # its tokens enter sqrt(E) times as large as they are stored
    norms = scaled.model.embed_tokens.weight.detach().double().norm(dim=-1) * scaled.config.hidden_size**0.5
    assert embedding_statistics(scaled).tokens.mean_norm == pytest.approx(norms.mean().item(), rel=1e-2)
    assert embedding_statistics(scaled).to_dict()["distance_share"] is None


def test_statistics_of_models():
    model, ids = tiny("gpt2"), tokens(2, 24)
    found = embedding_statistics(model, ids)
    words, places = model.transformer.wte(ids).double(), model.transformer.wpe.weight[:24].double()
    assert found.tokens.mean_norm == pytest.approx(words.norm(dim=-1).mean().item())
    assert found.ratio == pytest.approx((places.norm(dim=-1).mean() / words.norm(dim=-1).mean()).item())
    assert_close(found.neighbour_distances, (places[1:] - places[:-1]).norm(dim=-1).detach())
    offset = tiny("opt")
    assert_close(probe.position_vectors(offset, 5), offset.model.decoder.embed_positions.weight[2:7].double().detach())
    assert embedding_statistics(tiny("llama"), ids).to_dict()["positions"] is None
    assert embedding_statistics(patch_model(tiny("gpt2"), "alibi"), ids).positions is None
    with pytest.raises(ValueError, match="64 position vectors, 65"):
        probe.position_vectors(model, 65)


@pytest.mark.parametrize("placement", ["input", "every_layer"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_neighbours_of_sinusoids_are_equally_far(family, placement):
    model = patch_model(tiny(family).double(), "sinusoidal", scale=2.0, placement=placement)
    distances = neighbour_distances(probe.position_vectors(model, 50))
    waves = [10000 ** (-2 * u / 32) for u in range(16)]
    assert_close(
        distances, torch.full((49,), 4 * math.sqrt(sum(math.sin(w / 2) ** 2 for w in waves)), dtype=torch.float64)
    )
