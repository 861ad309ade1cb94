"""Statistics of embeddings, the five properties, and distances per dtype."""

import math

import pytest
import torch
from families import tiny, tokens
from torch.testing import assert_close

from hf_posenc import available_schemes, patch_model
from hf_posenc.analysis import (
    embedding_statistics,
    linear_map,
    neighbour_distances,
    precision_audit,
    probe,
    properties,
    vector_statistics,
)
from hf_posenc.schemes.base import Dims

DIMS = Dims(num_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64, num_layers=1)


def test_statistics_of_vectors():
    generator = torch.Generator().manual_seed(0)
    independent = torch.randn(20000, 8, generator=generator, dtype=torch.float64)
    found = vector_statistics(independent)
    assert found.diagonal_share == pytest.approx(1, abs=0.01)
    assert found.mean_norm == pytest.approx(math.sqrt(2) * math.gamma(4.5) / math.gamma(4), rel=0.01)  # chi with 8
    one_direction = independent[:, :1] * torch.ones(8, dtype=torch.float64)
    assert vector_statistics(one_direction).diagonal_share == pytest.approx(1 / 8)


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


@pytest.mark.parametrize("layout", ["interleaved", "split"])
def test_linear_map_of_sinusoids(layout):
    module = probe.build("sinusoidal", dims=DIMS, layout=layout)[1]
    table = module.embed(torch.arange(3000)[None])[0]
    waves = module.fixed_frequencies(torch.device("cpu"))
    for shift in (1, 7, 1000):
        matrix = linear_map(waves, shift, size=64, layout=layout)
        assert_close(table[:-shift] @ matrix.T, table[shift:], rtol=0, atol=1e-12)
        assert_close(linear_map(waves, -shift, size=64, layout=layout), matrix.T)  # back: a rotation
    with pytest.raises(ValueError, match="odd size 7"):
        linear_map(waves, 1, size=7)


EXPECTED = {
    #                  unique linear generalises deterministic dimensions
    "nope": ("no", "not applicable", "not applicable", "yes", "not applicable"),
    "sinusoidal": ("yes", "yes", "no", "yes", "yes"),
    "learned": ("no", "no", "no", "yes", "no"),
    "rope": ("yes", "yes", "no", "yes", "yes"),
    "transformer_xl": ("yes", "not applicable", "no", "yes", "yes"),
    "shaw": ("no", "not applicable", "yes", "yes", "no"),
    "alibi": ("yes", "not applicable", "yes", "yes", "yes"),
    "da_transformer": ("no", "not applicable", "yes", "yes", "no"),
    "t5": ("no", "not applicable", "yes", "yes", "no"),
    "kerple": ("yes", "not applicable", "yes", "yes", "yes"),
    "cope": ("no", "not applicable", "yes", "yes", "no"),
}


@pytest.mark.parametrize("scheme", available_schemes())
def test_five_properties(scheme):
    arguments = {"initialization": "normal"} if scheme == "learned" else {}
    found = properties(scheme, trained_length=256, dims=DIMS, **arguments)
    assert tuple(row.verdict for row in found.rows) == EXPECTED[scheme], str(found)
    assert all(row.evidence for row in found.rows)
    assert [row["name"] for row in found.to_dict()["rows"]] == [row.name for row in found.rows]


def test_scaled_rope_stays_in_the_range_that_was_seen():
    plain = properties("rope", trained_length=256, dims=DIMS)
    scaled = properties("rope", trained_length=256, dims=DIMS, scaling={"rope_type": "linear", "factor": 4.0})
    assert (plain.rows[2].verdict, scaled.rows[2].verdict) == ("no", "no")
    assert "shaw(" not in str(plain)


def test_two_positions_that_coincide_are_named():
    evidence = properties("shaw", trained_length=64, dims=DIMS, max_distance=9).rows[0].evidence
    assert "9 and 10" in evidence


def test_bloom_and_falcon_lose_distances_that_we_keep():
    """Also measured on the library's own builders by others: 875 to 897 of 8192 for BLOOM, 553 to 641 of 2048 for Falcon."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    long = {(row.method, row.dtype): row for row in precision_audit(8192)}
    bloom = build_alibi_tensor(torch.ones(1, 8192, dtype=torch.int64), 16, torch.bfloat16).view(16, 8192)
    assert long["bloom", "bfloat16"].heads == tuple(len(set(row.tolist())) for row in bloom)
    assert (min(long["bloom", "bfloat16"].heads), max(long["bloom", "bfloat16"].heads)) == (875, 897)
    short = {(row.method, row.dtype): row for row in precision_audit(2048, dtypes=(torch.float32,))}
    assert (min(short["falcon", "float32"].heads), max(short["falcon", "float32"].heads)) == (553, 641)
    for (method, _), row in (long | short).items():
        if method == "hf_posenc":
            assert set(row.heads) == {row.length}
            assert row.finite
    with pytest.raises(ValueError, match="no bias by distance"):
        precision_audit(8, scheme="shaw")
