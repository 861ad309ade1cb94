"""Su's expansion: against finite differences of models whose tables of positions were scaled by hand, and literal sums."""

import copy

import pytest
import torch
from families import FAMILIES, LEARNED, tiny, tokens
from torch.testing import assert_close

from hf_posenc import patch_model
from hf_posenc.analysis import position_vectors
from hf_posenc.theory import expansion
from hf_posenc.theory.vectors import sources

M, N = 2, 5
RELATIVE = 1e-6
LEVELS = 6
"""Of Richardson's extrapolation: the error of central differences is a series in the square of the step."""


def with_positions(model, first, second):
    """Return the model with the vectors of two positions, each times a factor, and of no other."""
    moved = copy.deepcopy(model)
    table = moved.transformer.wpe.weight.data
    rows = first * table[M], second * table[N]
    table.zero_()
    table[M], table[N] = rows
    return moved


@torch.no_grad()
def functions(model, ids):
    """Return all hidden states of the last token that is read, and the log-probability of the one behind, as a row."""
    output = model(ids[None, :-1], output_hidden_states=True, use_cache=False)
    states = [state[0, -1] for state in output.hidden_states[:-1]]  # the last one is behind the final norm
    return torch.cat([*states, output.logits[0, -1].log_softmax(-1)[ids[-1:]]])


def extrapolated(difference, step=0.4):
    """Return the limit of a central difference for step -> 0."""
    rows = [[difference(step / 2**level)] for level in range(LEVELS)]
    for level in range(1, LEVELS):
        for order in range(1, level + 1):
            before, better = rows[level - 1][order - 1], rows[level][order - 1]
            rows[level].append(better + (better - before) / (4**order - 1))
    return rows[-1][-1]


@pytest.mark.parametrize("initializer_range", [0.1, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.02, 0.3))])
def test_six_terms_and_the_residual_are_those_of_finite_differences(initializer_range):
    model, ids = tiny("gpt2", initializer_range=initializer_range).double(), tokens(1, 9)[0]

    def f(first, second):
        return functions(with_positions(model, first, second), ids)

    start = f(0, 0)
    expected = {
        "value": start,
        "slope_first": extrapolated(lambda h: (f(h, 0) - f(-h, 0)) / (2 * h)),
        "slope_second": extrapolated(lambda h: (f(0, h) - f(0, -h)) / (2 * h)),
        "curvature_first": extrapolated(lambda h: (f(h, 0) - 2 * start + f(-h, 0)) / (2 * h * h)),
        "curvature_second": extrapolated(lambda h: (f(0, h) - 2 * start + f(0, -h)) / (2 * h * h)),
        "mixed": extrapolated(lambda h: (f(h, h) - f(h, -h) - f(-h, h) + f(-h, -h)) / (4 * h * h)),
    }
    expected["residual"] = f(1, 1) - sum(expected.values())
    found = expansion(model, ids, M, N)
    scale = max(found.output.sizes.values())
    for name, row in expected.items():
        *layers, output = row.split([32] * 2 + [1])
        assert getattr(found.output, name).item() == pytest.approx(output.item(), rel=RELATIVE), name
        for terms, state in zip(found.layers, layers, strict=True):
            # No coordinate matters by itself where terms cancel in it.
            size = max(state.norm().item(), 1e-12 * scale)
            assert_close(getattr(terms, name), state, rtol=0, atol=RELATIVE * size)
    assert set(found.layers[0].sizes.values()) == {0.0}  # the last token has not read the others yet
    assert found.to_dict()["output"]["mixed"] == found.output.mixed.item()


@pytest.mark.parametrize("layout", ["interleaved", "split"])
def test_diagonal_hessian_has_a_relative_and_an_absolute_part(layout):
    """Su's formula with sines in front: the second part has the other sign than with cosines in front."""
    model = patch_model(tiny("gpt2").double(), "sinusoidal", layout=layout, scale=0.3)
    ids = tokens(1, 9)[0]
    found = expansion(model, ids, M, N, rows=32).diagonal
    h = found.diagonal[torch.tensor(found.rows).argsort()]
    waves = torch.tensor([10000 ** (-2 * u / 32) for u in range(16)], dtype=torch.float64)
    of_sines, of_cosines = (h[0::2], h[1::2]) if layout == "interleaved" else (h[:16], h[16:])
    relative = 0.09 * ((of_sines + of_cosines) / 2 * torch.cos((M - N) * waves)).sum()
    absolute = -0.09 * ((of_sines - of_cosines) / 2 * torch.cos((M + N) * waves)).sum()
    assert found.relative == pytest.approx(relative.item(), rel=1e-9)
    assert found.absolute == pytest.approx(absolute.item(), rel=1e-9)
    assert found.sinusoids
    table = 0.3 * torch.stack([each(torch.tensor([M, N])[:, None] * waves) for each in (torch.sin, torch.cos)], -1)
    direct = (of_sines * table[0, :, 0] * table[1, :, 0] + of_cosines * table[0, :, 1] * table[1, :, 1]).sum()
    assert found.relative + found.absolute == pytest.approx(direct.item(), rel=1e-9)


def test_vectors_in_every_layer_are_all_scaled():
    """Against the same vectors, halved, which are terms of half and a quarter the size."""
    ids = tokens(1, 9)[0]
    whole, half = (
        expansion(
            patch_model(tiny("gpt2"), "sinusoidal", placement="every_layer", scale=scale).double(), ids, M, N, rows=2
        )
        for scale in (0.2, 0.1)
    )
    assert_close(whole.output.slope_first, 2 * half.output.slope_first, rtol=1e-9, atol=0)
    assert_close(whole.output.mixed, 4 * half.output.mixed, rtol=1e-9, atol=0)
    assert_close(whole.output.curvature_second, 4 * half.output.curvature_second, rtol=1e-9, atol=0)
    assert whole.diagonal.rows == (0, 1)
    tables = patch_model(
        tiny("gpt2").double(), "learned", placement="every_layer", share_layers=False, initialization="normal", seed=1
    )
    assert expansion(tables, ids, M, N).diagonal is None  # no Hessian stands between one vector and another


QUICK = ("gpt2", "opt", "llama", "gemma2")


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]
)
def test_families(family):
    model, ids = tiny(family), tokens(1, 9)[0]
    if family not in LEARNED:
        with pytest.raises(ValueError, match="adds no position vectors"):
            expansion(model, ids, M, N)
        patch_model(model, "sinusoidal")
    modes = [module.training for module in model.train().modules()]
    found = expansion(model, ids, M, N, rows=2)
    assert found.output.mixed.dtype == torch.float64
    assert found.output.mixed.abs() > 1e-9
    sixth = expansion(model.double(), ids, M, N, rows=0).output.mixed
    assert_close(found.output.mixed, sixth)  # of a copy in float64, not of the model
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in sources(model))


@pytest.mark.parametrize("scheme", [None, "sinusoidal"])
def test_hessian_is_that_of_finite_differences(scheme):
    """And its product with the vectors of both positions is the sixth term."""
    model, ids = tiny("gpt2").double(), tokens(1, 9)[0]
    table = model.transformer.wpe.weight.detach().clone()
    if scheme:
        patch_model(model, scheme, scale=0.3)
        table = position_vectors(model, 9)
    found = expansion(model, ids, M, N, rows=32)
    rows = torch.tensor(found.diagonal.rows)
    plain = tiny("gpt2").double()
    plain.transformer.wpe.weight.data.zero_()
    start = plain.get_input_embeddings()(ids[None, :-1]).detach()

    def slope(coordinate, by):
        moved = start.clone()
        moved[0, N, coordinate] += by
        moved.requires_grad_()
        result = plain(inputs_embeds=moved, use_cache=False).logits[0, -1].log_softmax(-1)[ids[-1]]
        return torch.autograd.grad(result, moved)[0][0, M]

    for column in (0, 4, 17):
        expected = extrapolated(lambda h, k=column: (slope(k, h) - slope(k, -h)) / (2 * h))
        assert_close(found.hessian[:, column], expected[rows], rtol=1e-6, atol=1e-9)
    squares = found.hessian[rows.argsort()].square()
    assert found.diagonal_share == pytest.approx((squares.diagonal().sum() / squares.sum()).item())
    assert (table[M][rows] @ found.hessian @ table[N]).item() == pytest.approx(found.output.mixed.item(), rel=1e-6)


def test_smaller_vectors_are_those_of_a_smaller_table():
    """Slopes shrink with the size, the sixth term with its square; the residual is that of the scaled table."""
    model, ids = tiny("gpt2", initializer_range=0.1).double(), tokens(1, 9)[0]
    whole, small = (expansion(model, ids, M, N, rows=4, size=size) for size in (1.0, 0.25))
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(0.25)
    scaled = expansion(model, ids, M, N, rows=4)
    for name, size in scaled.output.sizes.items():
        assert small.output.sizes[name] == pytest.approx(size, rel=1e-6), name
    assert small.diagonal.relative == pytest.approx(scaled.diagonal.relative)
    assert small.output.mixed.item() == pytest.approx(whole.output.mixed.item() / 16)
    assert small.output.sizes["residual"] < whole.output.sizes["residual"] / 16  # third order, where f is smooth


def test_wrong_calls():
    for wrong in [(2, 2), (0, 8), (-1, 3)]:
        with pytest.raises(ValueError, match="two positions from 0 to 7"):
            expansion(tiny("gpt2"), tokens(1, 9)[0], *wrong)
