"""Positions of two and three coordinates: vectors written out, relative shifts to 1e-12, products of differences."""

import math

import pytest
import torch
from torch.testing import assert_close

from hf_posenc.theory import axis_frequencies, grid_decay, grid_rotation, grid_shift, grid_sinusoids

EXACT = {"rtol": 0, "atol": 1e-12}


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def frequencies(kind, size):
    """Each pair one axis, or every pair a direction of its own."""
    return axis_frequencies(size) if kind == "axes" else drawn(size // 2, 2)


def test_an_axis_has_half_of_the_vector():
    found = grid_sinusoids(torch.tensor([[3, 40], [0, 7]]), axis_frequencies(16))
    for row, place in zip(found, [(3, 40), (0, 7)], strict=True):
        expected = []
        for t in place:
            for u in range(4):
                expected += [math.sin(t * 10000 ** (-u / 4)), math.cos(t * 10000 ** (-u / 4))]
        assert_close(row, torch.tensor(expected, dtype=torch.float64), **EXACT)
    assert axis_frequencies(24, 3, base=100.0).shape == (12, 3)
    assert ((axis_frequencies(24, 3) != 0).sum(-1) == 1).all()
    for size, axes in [(18, 2), (0, 2), (8, 3), (8, 0)]:
        with pytest.raises(ValueError, match="need a size that is a multiple"):
            axis_frequencies(size, axes)


@pytest.mark.parametrize("kind", ["axes", "directions"])
@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (-5, 300), (40, -7)])
def test_a_shift_is_one_map_of_all_places(kind, shift):
    waves, step = frequencies(kind, 32), torch.tensor(shift)
    places = torch.cartesian_prod(torch.arange(0, 100, 7), torch.arange(0, 100, 9))
    matrix = grid_shift(waves, step)
    before, after = grid_sinusoids(places, waves), grid_sinusoids(places + step, waves)
    assert_close(before @ matrix.T, after, **EXACT)
    assert_close(matrix @ matrix.T, torch.eye(32, dtype=torch.float64), **EXACT)
    assert_close(grid_shift(waves, -step), matrix.T, **EXACT)
    assert_close(before @ before.T, after @ after.T, **EXACT)  # products of places do not see the shift
    assert (before - after).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["axes", "directions"])
@pytest.mark.parametrize("shift", [(0, 1), (-5, 300)])
def test_rope_on_a_grid_scores_differences(kind, shift):
    waves, step = frequencies(kind, 16), torch.tensor(shift)
    query, key = drawn(2, 20, 16)
    here, there = torch.randint(100, (2, 20, 2), generator=torch.Generator().manual_seed(1))
    scores = grid_rotation(query, here, waves) @ grid_rotation(key, there, waves).T
    moved = grid_rotation(query, here + step, waves) @ grid_rotation(key, there + step, waves).T
    assert_close(scores, moved, **EXACT)
    for i, j in [(0, 0), (3, 17), (19, 2)]:
        expected = 0.0
        for u in range(8):
            angle = sum((here[i, a] - there[j, a]).item() * waves[u, a].item() for a in range(2))
            (x, y), (z, w) = query[i, 2 * u : 2 * u + 2].tolist(), key[j, 2 * u : 2 * u + 2].tolist()
            expected += (x * z + y * w) * math.cos(angle) + (x * w - y * z) * math.sin(angle)
        assert scores[i, j].item() == pytest.approx(expected, abs=1e-11)
    assert_close(grid_rotation(query, here, waves).norm(dim=-1), query.norm(dim=-1), **EXACT)
    # An absolute place is seen where only one of the two moves.
    assert (grid_rotation(query, here + step, waves) @ grid_rotation(key, there, waves).T - scores).abs().max() > 0.1


def test_what_a_shift_leaves_is_the_product_of_places_of_sinusoids_and_of_rope():
    waves = axis_frequencies(16, base=100.0)
    found = grid_decay(waves, 3)
    centre, place = torch.tensor([5, 7]), torch.tensor([5 + 2, 7 - 3])
    here, there = (grid_sinusoids(each, waves) for each in (centre, place))
    assert found[3 + 2, 3 - 3].item() == pytest.approx((here @ there / 8).item(), abs=1e-14)
    ones = torch.ones(16, dtype=torch.float64)
    turned = [grid_rotation(ones, each, waves) for each in (centre, place)]
    assert found[3 + 2, 3 - 3].item() == pytest.approx((turned[0] @ turned[1] / 16).item(), abs=1e-14)
    assert found[3, 3] == 1
    assert_close(found, found.flip(0, 1))
