"""Su's expansion: against finite differences of models whose tables of positions were scaled by hand, and literal sums."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from families import FAMILIES, LEARNED, tiny, tokens
from situations import randomize
from torch.testing import assert_close

from hf_posenc import patch_model
from hf_posenc.theory import MixedHessian, expansion, mixed_hessian, vectors
from hf_posenc.theory.expansion import _diagonal

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
    assert sum(found.output.shares.values()) == pytest.approx(1)
    assert all(math.isfinite(size) for size in found.to_dict()["output"]["shares"].values())
    assert "into layer 1" in str(found)


@pytest.mark.parametrize("layout", ["interleaved", "split"])
def test_diagonal_hessian_has_a_relative_and_an_absolute_part(layout):
    """Su's formula with sines in front: the second part has the other sign than with cosines in front."""
    model = patch_model(tiny("gpt2").double(), "sinusoidal", layout=layout, scale=0.3)
    ids = tokens(1, 9)[0]
    found = expansion(model, ids, M, N, rows=32).diagonal
    h = mixed_hessian(model, ids, M, N, rows=None).block.diagonal()
    waves = torch.tensor([10000 ** (-2 * u / 32) for u in range(16)], dtype=torch.float64)
    of_sines, of_cosines = (h[0::2], h[1::2]) if layout == "interleaved" else (h[:16], h[16:])
    relative = 0.09 * ((of_sines + of_cosines) / 2 * torch.cos((M - N) * waves)).sum()
    absolute = -0.09 * ((of_sines - of_cosines) / 2 * torch.cos((M + N) * waves)).sum()
    assert found.relative == pytest.approx(relative.item(), rel=1e-9)
    assert found.absolute == pytest.approx(absolute.item(), rel=1e-9)
    assert found.complete
    assert found.sinusoids
    table = 0.3 * torch.stack([each(torch.tensor([M, N])[:, None] * waves) for each in (torch.sin, torch.cos)], -1)
    direct = (of_sines * table[0, :, 0] * table[1, :, 0] + of_cosines * table[0, :, 1] * table[1, :, 1]).sum()
    assert found.relative + found.absolute == pytest.approx(direct.item(), rel=1e-9)
    assert found.relative_share == pytest.approx(abs(relative) / (abs(relative) + abs(absolute)))


def test_a_diagonal_that_is_equal_in_each_pair_sees_distances_only():
    angles = torch.tensor([[3.0], [8.0]], dtype=torch.float64) * torch.tensor([1.0, 0.1], dtype=torch.float64)
    table = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    block = torch.diag(torch.tensor([2.0, 2.0, -5.0, -5.0], dtype=torch.float64))
    hessian = MixedHessian(0, 1, block, (0, 1, 2, 3), 1.0, with_positions=False, term=None)
    found = _diagonal(hessian, table, torch.nn.Identity())
    assert found.relative == pytest.approx(2 * math.cos(5 * 1.0) - 5 * math.cos(5 * 0.1))
    assert found.absolute == 0


def test_the_parts_of_a_trained_table_are_the_whole_too():
    model, ids = tiny("gpt2").double(), tokens(1, 9)[0]
    found = expansion(model, ids, M, N, rows=6)
    assert found.diagonal.rows == (0, 1, 10, 11, 20, 21)
    assert not found.diagonal.complete
    assert not found.diagonal.sinusoids
    table = model.transformer.wpe.weight.detach()
    direct = sum(
        h * table[M, k] * table[N, k] for h, k in zip(found.diagonal.diagonal, found.diagonal.rows, strict=True)
    )
    assert found.diagonal.relative + found.diagonal.absolute == pytest.approx(direct.item(), rel=1e-9)
    assert expansion(model, ids, M, N, rows=0).diagonal is None


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


@pytest.mark.filterwarnings("ignore:OPTForCausalLM has ReLU activations:UserWarning")
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
    assert mixed_hessian(model, ids, M, N, rows=None).term == pytest.approx(sixth.item(), rel=1e-4)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in vectors.sources(model))


@pytest.mark.parametrize(
    ("scheme", "family"),
    [
        (None, "gpt2"),
        ("shaw", "llama"),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in [(None, "llama"), ("alibi", "gpt2")]),
    ],
)
def test_hessian_block_is_that_of_finite_differences(scheme, family):
    """Where the model is used, with its positions."""
    model = tiny(family).double()
    if scheme:
        randomize(patch_model(model, scheme))
    ids = tokens(1, 8)[0]
    found = mixed_hessian(model, ids, 2, 5, rows=None, with_positions=True)
    start = model.get_input_embeddings()(ids[None, :-1]).detach()

    def value(*moves):
        moved = start.clone()
        for position, coordinate, by in moves:
            moved[0, position, coordinate] += by
        moved.requires_grad_()
        result = model(inputs_embeds=moved, use_cache=False).logits[0, -1].log_softmax(-1)[ids[-1]]
        return result.item(), torch.autograd.grad(result, moved)[0][0]

    # LLaMA's RMSNorm works in float32 even here: second differences of values would drown in its rounding, first
    # differences of gradients do not.
    scale = found.block.abs().max().item()
    assert scale > 1e-3
    step = 1e-3
    for column in (0, 4, 17):
        slopes = (value((5, column, step))[1][2] - value((5, column, -step))[1][2]) / (2 * step)
        assert_close(found.block[:, column], slopes, rtol=1e-2, atol=2e-3 * scale)
    squares = found.block.square()
    assert found.diagonal_share == pytest.approx((squares.diagonal().sum() / squares.sum()).item())
    part = mixed_hessian(model, ids, 2, 5, rows=4, with_positions=True)
    assert part.rows == (0, 8, 16, 24)
    assert_close(part.block, found.block[list(part.rows)])
    assert part.term is None
    if (scheme, family) == (None, "gpt2"):
        table = model.transformer.wpe.weight.detach()
        assert found.term == pytest.approx((table[2] @ found.block @ table[5]).item())
        assert found.term != pytest.approx(mixed_hessian(model, ids, 2, 5, rows=None).term, rel=0.1)
    else:
        assert found.term is None
    for wrong in [(2, 2), (0, 7), (-1, 3)]:
        with pytest.raises(ValueError, match="two positions from 0 to 6"):
            mixed_hessian(model, ids, *wrong)


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
    for wrong in (0, -1.0, math.inf, math.nan, True, "1"):
        with pytest.raises(ValueError, match="positive and finite"):
            expansion(model, ids, M, N, size=wrong)


def test_kinks_are_reported():
    """No derivative sees the curvature of a ReLU."""
    ids = tokens(1, 9)[0]
    for call in (expansion, mixed_hessian):
        with pytest.warns(UserWarning, match="OPTForCausalLM has ReLU activations") as caught:
            call(tiny("opt"), ids, M, N, rows=2)
        assert len(caught) == 1
        call(tiny("gpt2"), ids, M, N, rows=2)  # warns of nothing


def test_wrong_calls():
    for wrong in [(2, 2), (0, 8), (-1, 3)]:
        with pytest.raises(ValueError, match="two positions from 0 to 7"):
            expansion(tiny("gpt2"), tokens(1, 9)[0], *wrong)
    with pytest.raises(ValueError, match="one text"):
        expansion(tiny("gpt2"), tokens(2, 9), M, N)


@pytest.mark.slow
def test_the_script_measures_a_checkpoint(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import measure_theory

    tiny("gpt2").save_pretrained(tmp_path / "model")
    results = tmp_path / "results.json"
    few = ["--texts", "2", "--pairs", "2", "--hessians", "1", "--plot", str(tmp_path / "terms.png")]
    measure_theory.main([str(tmp_path / "model"), "--json", str(results), *few])
    found = json.loads(results.read_text())
    assert found["expansion"]["pairs"] == 4
    assert 0 < found["hessian"]["relative_share"]["median"] < 1
    by_size = found["expansion"]["residual over mixed, by size"]
    assert by_size["1"] == found["expansion"]["residual over mixed"]
    assert by_size["0.001"]["median"] < by_size["1"]["median"] / 10  # GPT-2's activation is smooth
    assert len(found["terms"]["layers"]) == len(found["equivariance"]["without, float64"]["layers"]) == 2
    assert (tmp_path / "terms.png").exists()
