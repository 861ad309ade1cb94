"""The five properties of an encoding, and the distances that a dtype tells apart."""

import math

import pytest
import torch
from decoders import decoder
from families import tiny
from rows import ROWS
from situations import JOINING, randomize
from torch.testing import assert_close

from hf_posenc import available_schemes, patch_model
from hf_posenc.analysis import linear_map, precision_audit, probe, properties
from hf_posenc.dims import Dims

DIMS = Dims(num_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64, num_layers=1)


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


@pytest.mark.parametrize("scheme", available_schemes())
def test_five_properties(scheme):
    arguments = {"initialization": "normal"} if scheme == "learned" else {}
    found = properties(scheme, trained_length=256, dims=DIMS, **arguments)
    assert tuple(row.verdict for row in found.rows) == ROWS[scheme].properties, str(found)
    assert all(row.evidence for row in found.rows)
    assert [row["name"] for row in found.to_dict()["rows"]] == [row.name for row in found.rows]


def leave(before, after):
    """How many of cos(t w) and sin(t w) leave from 512 to 2048, by over 1 % of its width, the range they had until then.

    Args:
        before: frequencies that turned until then.
        after: those that turn from then on.
    """
    count = 0
    for w, v in zip(before, after, strict=True):
        for wave in (math.cos, math.sin):
            seen = [wave(t * w) for t in range(512)]
            margin = 0.01 * (max(seen) - min(seen))
            beyond = [wave(t * v) for t in range(512, 2048)]
            count += max(beyond) > max(seen) + margin or min(beyond) < min(seen) - margin
    return count


def test_scaled_rope_is_judged_by_what_its_base_saw():
    waves = [10000 ** (-2 * u / 64) for u in range(32)]
    expected = {factor: leave(waves, [w / factor for w in waves]) for factor in (1.0, 3.9, 4.0)}
    assert expected[1.0] > expected[3.9] > expected[4.0] == 0
    plain = properties("rope").rows[2]
    for factor, count in expected.items():
        scaled = properties("rope", scaling={"rope_type": "linear", "factor": factor}).rows[2]
        assert f"{count} of 64 coordinates" in scaled.evidence
        assert scaled.verdict == ("yes" if count == 0 else "no")
        assert factor > 1 or scaled == plain
    for kind in ("yarn", "dynamic"):
        scaled = properties("rope", scaling={"rope_type": kind, "factor": 4.0}).rows[2]
        assert scaled.verdict == "yes"
        assert " 0 of 64 coordinates" in scaled.evidence


def verdicts(found):
    return {row.name: row.verdict for row in found.rows}


def test_a_table_is_linear_only_if_it_was_trained_to_be():
    for start in ("sinusoidal", "normal"):
        found = properties("learned", num_positions=512, initialization=start)
        assert found.untrained
        assert "(untrained)" in str(found)
        assert verdicts(found)["linear"] == "no"
    assert not properties(tiny("gpt2")).untrained
    assert "untrained" not in str(properties(tiny("gpt2")))
    model = tiny("gpt2", n_positions=128, n_embd=16)  # fewer coordinates than positions to fit a map on
    assert verdicts(properties(model))["linear"] == "no"
    waves = torch.arange(128)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(torch.cat([waves.sin(), waves.cos()], -1))
    found = verdicts(properties(model))
    assert found["linear"] == "yes"
    assert found["deterministic"] == "no"


@pytest.mark.parametrize("scheme", [scheme for scheme in available_schemes() if scheme not in JOINING])
def test_five_properties_of_a_model(scheme):
    """A table has numbers of its own for a position, whatever they are; what is generated has not."""
    model = randomize(patch_model(tiny("llama"), scheme, **ROWS[scheme].variants[""]))
    found = properties(model, trained_length=64, layer=1)
    *_, deterministic, dimensions = ROWS[
        "rope" if scheme in JOINING else scheme
    ].properties  # the base's rotation stays
    assert verdicts(found)["deterministic"] == deterministic
    # This `far_rope` keeps 3 distances apart, and the one of the row half of the trained length.
    assert verdicts(found)["dimensions"] == {"da_transformer": "yes", "far_rope": "no"}.get(scheme, dimensions)
    assert found.scheme == "PosEncLlamaForCausalLM"
    assert not found.untrained


def test_properties_of_stock_models():
    assert verdicts(properties(tiny("llama")))["generalises"] == "no"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    stretched = properties(tiny("llama", max_position_embeddings=256, rope_parameters=yarn))
    assert stretched.trained_length == 64
    assert verdicts(stretched)["generalises"] == "yes"
    patched = patch_model(tiny("llama"), "rope", scaling={"rope_type": "linear", "factor": 4.0})
    assert verdicts(properties(patched, trained_length=64))["generalises"] == "yes"
    assert verdicts(properties(decoder("xglm"), trained_length=32))["linear"] == "yes"  # sinusoids of its own
    with pytest.raises(ValueError, match="give trained_length"):
        properties(patch_model(tiny("llama"), "alibi"))
    with pytest.raises(ValueError, match="layer 2 of this"):
        properties(tiny("gpt2"), layer=2)
    with pytest.raises(ValueError, match="have different rotations"):
        properties(patch_model(tiny("llama"), "nope", layers=[1]), trained_length=64, layer=1)


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
