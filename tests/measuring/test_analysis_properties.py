"""The five properties of an encoding, of every scheme."""

import math

import pytest
from rows import ROWS
from torch.testing import assert_close

from hf_posenc import available_schemes
from hf_posenc.analysis import frequencies, linear_map, properties, scheme_vectors
from hf_posenc.core.dims import Dims

DIMS = Dims(num_heads=4, num_key_value_heads=4, head_dim=16, hidden_size=64, num_layers=1)


@pytest.mark.parametrize("layout", ["interleaved", "split"])
def test_linear_map_of_sinusoids(layout):
    table = scheme_vectors("sinusoidal", 3000, dims=DIMS, layout=layout)
    (waves,) = (each.frequencies for each in frequencies("sinusoidal", dims=DIMS, layout=layout))
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
    for kind, arguments in (("yarn", {}), ("dynamic", {}), ("linear", {"partial_rotary_factor": 0.5})):
        scaled = properties("rope", scaling={"rope_type": kind, "factor": 4.0}, **arguments).rows[2]
        assert scaled.verdict == "yes"
        assert " 0 of 64 coordinates" in scaled.evidence


@pytest.mark.parametrize("start", ["sinusoidal", "normal"])
def test_a_table_is_not_linear_whatever_it_starts_with(start):
    found = properties("learned", num_positions=512, initialization=start)
    assert {row.name: row.verdict for row in found.rows}["linear"] == "no"
