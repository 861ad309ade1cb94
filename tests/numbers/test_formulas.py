"""Every scheme, option by option, computes what its paper says: outputs, and gradients of inputs and parameters."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import (
    CASES,
    HEAD_DIM,
    INITIAL_TABLES,
    TRAINED,
    Case,
    paper_slopes,
    plain,
    sinusoidal,
    sinusoidal_table,
    turn,
)
from families import tiny, tokens
from matrix import matrix
from torch import nn

from hf_posenc import patch_model
from hf_posenc.attention_call import Call
from hf_posenc.dims import Dims
from hf_posenc.engines import reference
from hf_posenc.modules import Native, Reference, owner_of
from hf_posenc.positions import Positions, pack, unpack
from hf_posenc.registry import scheme_class
from hf_posenc.schemes.base import ScoreScheme
from hf_posenc.schemes.rope import apply_rotary

# Largest error, relative to the largest value expected (to 1 if that is smaller).
TOLERANCE = {
    torch.float64: 1e-12,  # the same sums in another order
    torch.float32: 1e-5,
    # Computed in float32 and rounded once, at the end: half a unit in the last of bfloat16's 8 binary digits.
    torch.bfloat16: 2**-8 + 1e-5,
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))

# query heads, key-value heads, head size, queries, keys
SHAPES = {
    "3-heads-odd-size": (3, 3, 5, 8, 8),
    "gqa-4-2": (4, 2, 4, 8, 8),
    "mqa-6-1-chunk": (6, 1, 4, 3, 9),
    "gqa-12-4": (12, 4, 2, 6, 6),
    "one-query": (4, 4, 4, 1, 9),
}


SCORES = [case for case in CASES if issubclass(scheme_class(case.scheme), ScoreScheme)]
TABLES = [case for case in CASES if case.table is not None]


def over(cases: list[Case]):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def rounded(*shape: int, seed: int) -> torch.Tensor:
    """Normal values that every dtype represents exactly, so that one float64 reference serves all dtypes."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str, times: int = 1) -> None:
    assert actual.shape == expected.shape, what
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert error <= times * TOLERANCE[dtype], f"{what}: off by {error:.2e}, {TOLERANCE[dtype]:.2e} allowed for {dtype}"


def gradients(
    output: torch.Tensor, cotangent: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return dict(zip(inputs, torch.autograd.grad(output, list(inputs.values()), cotangent), strict=True))


# --- the cases


def test_no_two_rows_have_one_name():
    assert len({case.id for case in CASES}) == len(CASES)


@over(CASES)
def test_hyperparameters_survive_json(case):
    """What is written to a checkpoint builds the same scheme again."""
    scheme = scheme_class(case.scheme).parse(case.hyperparameters)
    again = scheme_class(case.scheme).parse(json.loads(json.dumps(scheme.hyperparameters())))
    assert again == scheme


# --- schemes on scores


def build(case: Case, dims: Dims):
    """The module of one layer, and the parameters it works with."""
    scheme = scheme_class(case.scheme).parse(case.hyperparameters)
    module, shared = scheme.build(dims), scheme.build_shared(dims)
    if shared is None:
        return module, dict(module.named_parameters())
    owner = nn.Module()
    owner.posenc = shared
    placed = scheme.attach_shared(module, Reference(owner, "posenc"))
    return placed, {**dict(shared.named_parameters()), **dict(placed.named_parameters())}


def with_shapes(cases: list[Case]):
    """Every case in every shape that its hyper-parameters fit."""
    pairs = [(case, name) for case in cases for name, sizes in SHAPES.items() if case.num_heads in (None, sizes[0])]
    return pytest.mark.parametrize(("case", "shape"), pairs, ids=[f"{case.id}-{name}" for case, name in pairs])


@cache
def slow_scores(case_id: str, shape: str, softcap: float | None = None):
    """Inputs, parameters, cotangent, and the reference's output and gradients: float64."""
    case = next(case for case in CASES if case.id == case_id)
    heads, key_heads, size, queries, keys = SHAPES[shape]
    dims = Dims(heads, key_heads, size, heads * size, 1)
    inputs = {
        "query": rounded(2, heads, queries, size, seed=1),
        "key": rounded(2, key_heads, keys, size, seed=2),
        "value": rounded(2, key_heads, keys, size, seed=3),
    }
    parameters = {
        name: rounded(*parameter.shape, seed=4 + n) / 2
        for n, (name, parameter) in enumerate(build(case, dims)[1].items())
    }
    leaves = {name: tensor.requires_grad_() for name, tensor in {**inputs, **parameters}.items()}

    def cap(x):
        return x if softcap is None else softcap * torch.tanh(x / softcap)

    arguments = dict(softmax_scale=size**-0.5, cap=cap)
    output = case.attention(*inputs.values(), parameters, **arguments, **case.hyperparameters)
    cotangent = rounded(*output.shape, seed=9)
    if queries * keys > 1 and case.attention is not plain:
        without = plain(*inputs.values(), {}, **arguments)
        assert (output - without).abs().max() > 1e-2, (
            "the scheme does not change this input: the comparison proves nothing"
        )
    return dims, inputs, parameters, cotangent, output.detach(), gradients(output, cotangent, leaves)


def run(case, dims, inputs, parameters, dtype, *, prescaled=False, softcap=None):
    """Our module in `dtype`: its output, weights, and the leaves to differentiate by."""
    module, own = build(case, dims)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.data = parameters[name].detach().to(dtype)
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    queries, keys = inputs["query"].shape[2], inputs["key"].shape[2]
    scaling = dims.head_dim**-0.5
    call = Call(
        leaves["query"] * scaling if prescaled else leaves["query"],
        leaves["key"],
        leaves["value"],
        Positions.causal(queries, keys),
        scaling=1.0 if prescaled else scaling,
        vector_scaling=scaling if prescaled else None,
        softcap=softcap,
    )
    output, weights = module(call, reference.attend)
    return output, weights, {**leaves, **own}


@pytest.mark.rows(default=180)
@DTYPES
@with_shapes(SCORES)
def test_scores(case, shape, dtype):
    dims, inputs, parameters, cotangent, expected, slopes = slow_scores(case.id, shape)
    output, weights, leaves = run(case, dims, inputs, parameters, dtype)
    assert output.dtype == weights.dtype == dtype
    assert_close(output, expected, dtype, "output", case.roundings)
    for name, gradient in gradients(output, cotangent.to(dtype), leaves).items():
        assert gradient.dtype == dtype
        assert_close(gradient, slopes[name], dtype, f"gradient of {name}", case.roundings)


@over(SCORES)
def test_scores_of_queries_that_are_scaled_already(case):
    """OPT multiplies queries by 1/sqrt(D) itself; terms without a query (Transformer-XL's u.k) keep their factor."""
    shape = "gqa-4-2"
    dims, inputs, parameters, cotangent, expected, slopes = slow_scores(case.id, shape)
    output, _, leaves = run(case, dims, inputs, parameters, torch.float64, prescaled=True)
    assert_close(output, expected, torch.float64, "output")
    for name, gradient in gradients(output, cotangent, leaves).items():
        assert_close(gradient, slopes[name], torch.float64, f"gradient of {name}")


@pytest.mark.rows(default=10)
@over(SCORES)
def test_scores_under_a_soft_cap(case):
    """Gemma 2 caps scores by tanh: what is a product of vectors is capped, a bias or factor on it is not."""
    dims, inputs, parameters, cotangent, expected, slopes = slow_scores(case.id, "gqa-4-2", softcap=1.5)
    output, _, leaves = run(case, dims, inputs, parameters, torch.float64, softcap=1.5)
    assert_close(output, expected, torch.float64, "output")
    for name, gradient in gradients(output, cotangent, leaves).items():
        assert_close(gradient, slopes[name], torch.float64, f"gradient of {name}")


@over(SCORES)
def test_coefficients_are_those_of_the_scores(case):
    """Calibration fits `Form.coefficients`, attention computes `Form.scores`: at each distance they are the same."""
    dims, inputs, parameters, *_ = slow_scores(case.id, "gqa-4-2")
    module, own = build(case, dims)
    for name, parameter in own.items():
        parameter.data = parameters[name].detach()
    call = Call(*(each.detach() for each in inputs.values()), Positions.causal(8), scaling=0.5, vector_scaling=0.25)
    call = call.widened()
    form = owner_of(module).form(call.query)
    found = None if form is None else form.coefficients(torch.arange(8))
    if found is None:
        assert form is None or not form.positional
        return
    at = call.distance()[0, 0].long()
    if form.multiplies:
        expected = form.content(call.products()) * found[:, at, 0]
    else:  # without keys the scores are what is added
        call = replace(call, key=torch.zeros_like(call.key))
        query = torch.nn.functional.pad(call.scaling * call.query, (0, 1), value=call.vector_scaling)
        query = query if found.shape[-1] > 1 else torch.ones_like(query[..., :1])
        expected = torch.einsum("bhid,hijd->bhij", query, found.expand(4, -1, -1)[:, at])
    scores, hidden = form.scores(call), torch.finfo(expected.dtype).min / 2
    assert ((scores < hidden) == (expected < hidden)).all()
    visible = call.visible() & (expected > hidden)
    assert_close(scores * visible, expected * visible, torch.float64, "scores")


@over(SCORES)
def test_weights_are_a_distribution_over_visible_keys(case):
    dims, inputs, parameters, *_ = slow_scores(case.id, "gqa-4-2")
    _, weights, _ = run(case, dims, inputs, parameters, torch.float64)
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), torch.float64, "sum of weights")
    assert (weights.triu(1) == 0).all()


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 6, 7, 8, 12, 14, 16, 20, 25, 32, 40])
def test_alibi_slopes_of_any_number_of_heads(num_heads):
    """Read off the bias itself: with queries of zero, weights are softmax(-m d), so m = log(p_0 / p_1)."""
    dims = Dims(num_heads, num_heads, 2, 2 * num_heads, 1)
    module, _ = build(next(case for case in CASES if case.id == "alibi-default"), dims)
    zeros = torch.zeros(1, num_heads, 2, 2, dtype=torch.float64)
    weights = module(Call(zeros, zeros, zeros, Positions.causal(2), scaling=1.0), reference.attend)[1]
    slopes = (weights[0, :, 1, 1] / weights[0, :, 1, 0]).log()
    assert_close(slopes, torch.tensor(paper_slopes(num_heads), dtype=torch.float64), torch.float64, "slopes")


def kerple(case_id: str, num_heads: int):
    return build(next(case for case in CASES if case.id == case_id), Dims(num_heads, num_heads, 2, 2 * num_heads, 1))


@pytest.mark.parametrize("case_id", ["kerple-per-layer", "kerple-power-per-layer"])
def test_where_kerple_starts(case_id):
    """As the authors' code: uniform in (0, 2) for `r_1` of the logarithm and `r_2` of the power, in (0, 1) else, from 0.01."""
    module, parameters = kerple(case_id, 4000)
    torch.manual_seed(0)
    module.reset_parameters()
    assert not list(module.buffers()), "buffers would be left uninitialised by from_pretrained"
    for name, x in parameters.items():
        assert x.shape == (4000,)
        most = (
            2
            if (case_id, name) in {("kerple-per-layer", "raw_scale"), ("kerple-power-per-layer", "raw_exponent")}
            else 1
        )
        r = 2 / (1 + torch.exp(-x)) if name == "raw_exponent" else torch.log(1 + torch.exp(x))
        assert 0.01 * (1 - 1e-5) <= r.min() < 0.02
        assert 0.99 * most < r.max() <= most * (1 + 1e-5)
        quantiles = torch.tensor([0.25, 0.5, 0.75])
        assert torch.allclose(r.quantile(quantiles), most * quantiles, rtol=0, atol=0.03 * most), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case_id", ["kerple-per-layer", "kerple-power-per-layer"])
def test_kerple_falls_with_the_distance_whatever_is_trained(case_id, dtype):
    """No values of the parameters raise a key above a nearer one, or make anything that is no number."""
    corners = torch.cartesian_prod(*[torch.tensor([-1000.0, -90.0, -1.0, 0.0, 30.0, 90.0, 1000.0])] * 2)
    module, parameters = kerple(case_id, len(corners))
    with torch.no_grad():
        for n, parameter in enumerate(parameters.values()):
            parameter.copy_(corners[:, n])
    distance = torch.tensor([0, 1, 2, 30, 1000, 1_000_000])
    biases = module.to(dtype).form(torch.empty(0, dtype=dtype)).values(distance)
    assert biases.dtype == dtype
    assert biases.isfinite().all()
    assert (biases <= 0).all()
    assert (biases.diff() <= 0).all()
    ordinary = (corners.abs() <= 30).all(1)
    assert (biases.diff()[ordinary] < 0).all()
    gradients = torch.autograd.grad(biases.sum(), list(parameters.values()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("case_id", ["bam-default", "bam-centre"])
def test_bam_starts_as_alibi(case_id):
    """But for the same number at all distances, which the softmax does not see."""
    module, parameters = build(next(case for case in CASES if case.id == case_id), Dims(8, 8, 2, 16, 1))
    module.reset_parameters()
    distance = torch.arange(200)
    biases = module.form(torch.empty(0, dtype=torch.float64)).values(distance)
    slopes = torch.tensor(paper_slopes(8), dtype=torch.float64)
    assert torch.allclose(biases - biases[:, :1], -slopes[:, None] * distance, rtol=1e-5, atol=1e-6)
    assert all(each.shape == (8,) for each in parameters.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_bam_are_numbers_at_its_centre(dtype):
    """At distance 0 and at a centre between tokens, for flat and for steep curves, beside the derivatives by hand."""
    module, parameters = build(next(case for case in CASES if case.id == "bam-centre"), Dims(6, 6, 2, 12, 1))
    starts = {"raw_scale": [0.5] * 6, "raw_exponent": [-4.0, 0.0, 1.0] * 2, "centre": [0.0] * 3 + [1.25] * 3}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.tensor(starts[name]))
    biases = module.to(dtype).form(torch.empty(0, dtype=dtype)).values(torch.arange(4))
    gradients = dict(zip(parameters, torch.autograd.grad(biases.sum(), list(parameters.values())), strict=True))
    for h in range(6):
        x, y, c = (starts[name][h] for name in ("raw_scale", "raw_exponent", "centre"))
        r, p = math.log1p(math.exp(x)), math.log1p(math.exp(y))
        away = [abs(d - c) + 1e-5 for d in range(4)]
        expected = {
            "raw_scale": -sum(a**p for a in away) / (1 + math.exp(-x)),
            "raw_exponent": -sum(r * a**p * math.log(a) for a in away) / (1 + math.exp(-y)),
            "centre": sum(r * p * a ** (p - 1) * ((d > c) - (d < c)) for d, a in enumerate(away)),
        }
        for name, value in expected.items():
            assert math.isclose(gradients[name][h].item(), value, rel_tol=1e-4, abs_tol=1e-5), (name, h)


def test_cope_counts_what_is_visible_in_the_order_of_positions():
    """One query on 9 keys, of which a window, a document and padding hide 5: as if it saw the others only."""
    case = next(case for case in CASES if case.id == "cope-few")
    module, parameters = build(case, Dims(4, 2, 8, 32, 1))
    with torch.no_grad():
        parameters["position_embeddings"].copy_(rounded(3, 8, seed=4))
    query, key, value = rounded(2, 4, 1, 8, seed=1), rounded(2, 2, 9, 8, seed=2), rounded(2, 2, 9, 8, seed=3)
    index, shown = torch.arange(9)[None], [3, 5, 6, 8]

    def attended(order):
        channel = pack(
            torch.tensor([[8]]),
            index[:, order],
            key_valid=(index != 4)[:, order],
            query_valid=torch.tensor([[True]]),
            key_segment=torch.where(index == 7, 1, 0)[:, order],
            query_segment=torch.tensor([[0]]),
            window=6,
        )
        call = Call(query, key[:, :, order], value[:, :, order], unpack(channel, 1), scaling=8**-0.5)
        return module.double()(call, reference.attend)[0]

    expected = case.attention(
        query, key[:, :, shown], value[:, :, shown], parameters, softmax_scale=8**-0.5, **case.hyperparameters
    )
    assert_close(attended(list(range(9))), expected, torch.float64, "in order")
    assert_close(attended([4, 8, 0, 7, 2, 1, 6, 5, 3]), expected, torch.float64, "in another order")


def test_parameters_of_schemes_on_scores():
    """Names, shapes and first values are the checkpoint format, and where training starts."""
    dims = Dims(num_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=24, num_layers=2)
    expected = {
        "transformer_xl-default": {
            "position_projection": ((32, 24), "normal"),
            "content_bias": ((4, 8), 0),
            "position_bias": ((4, 8), 0),
        },
        "shaw-default": {"key_embeddings": ((33, 8), "normal"), "value_embeddings": ((33, 8), "normal")},
        "shaw-per-head": {"key_embeddings": ((4, 4, 8), "normal"), "value_embeddings": ((4, 4, 8), "normal")},
        "shaw-keys-only": {"key_embeddings": ((4, 8), "normal")},
        "alibi-default": {},
        "alibi-trained": {"slopes": ((4,), paper_slopes(4))},
        "alibi-trained-own-slopes": {"slopes": ((4,), [0.9, 0.3, 0.0, 0.01])},
        "da_transformer-default": {"distance_weight": ((4,), 0), "saturation": ((4,), 0)},
        "cope-default": {"position_embeddings": ((64, 8), 0)},
        "fire-default": {
            "input_weight": ((32,), "uniform 1"),
            "input_bias": ((32,), "uniform 1"),
            "output_weight": ((4, 32), "uniform"),
            "rate": ((1,), [0.1]),
            "reach": ((1,), [1.0]),
        },
    }
    for case_id, wanted in expected.items():
        module, parameters = build(next(case for case in CASES if case.id == case_id), dims)
        module.reset_parameters()
        assert {name: tuple(p.shape) for name, p in parameters.items()} == {
            n: shape for n, (shape, _) in wanted.items()
        }
        assert not list(module.buffers()), f"{case_id}: buffers would be left uninitialised by from_pretrained"
        for name, (_, start) in wanted.items():
            if start == "normal":
                assert 0.01 < parameters[name].std() < 0.03, f"{case_id}: {name}"
            elif isinstance(start, str):  # torch's linear layers: uniform up to one over the root of the inputs
                bound = 1.0 if start == "uniform 1" else 32**-0.5
                assert 0.7 * bound < parameters[name].abs().max() <= bound, f"{case_id}: {name}"
                assert parameters[name].std() > 0.4 * bound, f"{case_id}: {name}"
            else:
                assert torch.equal(
                    parameters[name], torch.tensor(start).to(parameters[name]).expand_as(parameters[name])
                )


# --- rope


@DTYPES
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation(layout, share, dtype):
    size, positions = 8, [[0, 1, 2, 7], [5, 3, 100, 1]]
    turning = int(size * share)
    frequencies = [100 ** (-2 * u / turning) for u in range(turning // 2)]
    pairs = [(2 * u, 2 * u + 1) if layout == "interleaved" else (u, u + turning // 2) for u in range(turning // 2)]
    x = rounded(2, 3, 4, size, seed=1).requires_grad_()
    rows = [[turn(x[b, :, n], t, frequencies, pairs, 1.0) for n, t in enumerate(ts)] for b, ts in enumerate(positions)]
    expected = torch.stack([torch.stack(row, 1) for row in rows])
    cotangent = rounded(*expected.shape, seed=2)

    angles = torch.tensor(positions)[..., None].double() * torch.tensor(frequencies, dtype=torch.float64)
    angles = torch.cat([angles, angles], -1)
    ours = x.detach().to(dtype).requires_grad_()
    output = apply_rotary(ours, angles.cos(), angles.sin(), layout)
    assert output.dtype == dtype
    # In bfloat16 every step is rounded, as in transformers' own rotations: cos and sin, two products, their sum; relative
    # to the largest dimension of a pair that is up to sqrt(2) (2 sqrt(2) + 1) = 5.4 times one rounding.
    slack = 5.4 if dtype == torch.bfloat16 else 1.0
    wanted = gradients(expected, cotangent, {"x": x})["x"]
    actual = gradients(output, cotangent.to(dtype), {"x": ours})["x"]
    assert_close(output.double() / slack, expected / slack, dtype, "rotation")
    assert_close(actual.double() / slack, wanted / slack, dtype, "gradient")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0}, "has no parameter beta_fast; it has factor"),
        ({"rope_type": "linear", "factor": 0.5}, "at least 1"),
        ({"rope_type": "dynamic", "factor": True}, "positive number"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 0.0}, "beta_slow must be a positive number"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "needs long_factor"),
        ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0] * 4}, "list of positive numbers"),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "above low_freq_factor",
        ),
    ],
)
def test_rope_refuses_scalings_that_transformers_only_warns_about(scaling, message):
    with pytest.raises(ValueError, match=message):
        patch_model(tiny("llama"), "rope", scaling=scaling)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "phi"])
@pytest.mark.parametrize("share", [0.1, 0.4], ids=["nothing-left", "odd"])
def test_rope_refuses_to_rotate_half_a_pair(family, share):
    """Unchecked, none of 8 dimensions would be rotated, or all of them, or the first forward would fail."""
    with pytest.raises(ValueError, match="not pairs"):
        patch_model(tiny(family), "rope", partial_rotary_factor=share)


# --- schemes on embeddings

NATIVE = Native(table=rounded(12, 16, seed=7) * 0.1, token_rms=0.3, max_positions=12)


def embedding(case: Case, size: int, dtype: torch.dtype, native: Native):
    dims = Dims(1, 1, size, size, 1)
    module = scheme_class(case.scheme).parse(case.hyperparameters).resolve(native, dims).build(dims)
    with torch.no_grad():
        module.initialize(native)
        for n, parameter in enumerate(module.parameters()):
            parameter.data = rounded(*parameter.shape, seed=n).to(dtype)
    owner = nn.Module()
    owner.tokens = nn.Embedding(1, size, dtype=dtype)
    module.like = Reference(owner, "tokens")  # decides the dtype of the vectors
    return module


@DTYPES
@pytest.mark.parametrize("size", [16, 15], ids=["even", "odd"])
@over(TABLES)
def test_embeddings(case, size, dtype):
    native = NATIVE if size == 16 else Native(table=None, token_rms=0.3, max_positions=12)
    match = native.token_rms if native.table is None else native.table.square().mean().sqrt().item()
    module = embedding(case, size, dtype, native)
    ids = torch.tensor([[0, 1, 2, 3, 5], [7, 7, 90, 40, 0]])
    parameters = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    expected = torch.stack(
        [case.table(row, size, parameters, match=match, **case.hyperparameters) for row in ids.tolist()]
    )
    output = module(ids)
    assert output.dtype == dtype
    assert_close(output, expected, dtype, "table")
    assert torch.equal(module(position_ids=ids), output)
    if parameters:
        cotangent = rounded(*output.shape, seed=9)
        wanted = gradients(expected, cotangent, parameters)
        for name, gradient in gradients(output, cotangent.to(dtype), dict(module.named_parameters())).items():
            assert_close(gradient, wanted[name], dtype, f"gradient of {name}")


@over([case for case in TABLES if case.scheme == "sinusoidal"])
def test_sinusoids_are_exact_at_any_position(case):
    """A float32 product of position and frequency would be wrong by 0.004 radians here."""
    far = [0, 5_000, 131_071, 1_000_003]
    module = embedding(case, 16, torch.float64, NATIVE)
    parameters = dict(module.double().named_parameters())
    match = NATIVE.table.square().mean().sqrt().item()
    expected = case.table(far, 16, parameters, match=match, **case.hyperparameters)
    error = (module(torch.tensor([far]))[0] - expected).abs().max()
    assert error < 1e-8  # float64 resolves 1e6 radians to 1e-10


@pytest.mark.parametrize(("trainable", "name"), [(True, "log_ratios"), ("radians", "frequencies")])
@pytest.mark.parametrize("frequencies", ["exponential", "power"])
def test_trained_frequencies_start_at_the_fixed_ones(frequencies, trainable, name):
    dims = Dims(1, 1, 15, 15, 1)
    fixed, trained = (
        scheme_class("sinusoidal")(frequencies=frequencies, trainable=each, scale=1.0).build(dims)
        for each in (False, trainable)
    )
    trained.double().initialize(NATIVE)
    assert {name: tuple(p.shape) for name, p in trained.named_parameters()} == {name: (8,)}
    assert not list(fixed.parameters())
    ids = torch.arange(50)[None]
    assert torch.equal(trained(ids), fixed(ids))


def trained_wavelengths(trainable):
    """Wavelengths in tokens before and after 40 steps of AdamW that pull on each wave with the sign of a coin."""
    dims = Dims(1, 1, 128, 128, 1)
    module = scheme_class("sinusoidal")(trainable=trainable, scale=1.0).build(dims)
    module.initialize(NATIVE)
    (parameter,) = module.parameters()
    signs = torch.randint(2, parameter.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    before = 2 * torch.pi / module.waves(torch.device("cpu")).detach()
    optimizer = torch.optim.AdamW([parameter], lr=3e-3, weight_decay=0.01)
    for _ in range(40):
        parameter.grad = signs.to(parameter.dtype)
        optimizer.step()
    return before, 2 * torch.pi / module.waves(torch.device("cpu")).detach()


def test_trained_frequencies_keep_their_long_waves():
    """Each step of AdamW moves a parameter by its learning rate: 40 steps of 0.003 are 0.12 in all."""
    before, after = trained_wavelengths(True)
    assert ((after / before).log().abs() < 0.12 + 1e-4).all()
    assert (after > 1000).sum() == (before > 1000).sum() == 28
    _, radians = trained_wavelengths("radians")
    assert (radians < 0).any()
    assert (radians.abs() > 1000).sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [True, "radians"])
def test_wavelengths_of_a_model_in_training(trainable, recipes):
    """150 steps of AdamW at 0.003 on the recipes' byte-level GPT-2, whose 64 waves begin as Vaswani's."""
    from hf_posenc.recipes.embedded import byte_model, byte_tokenizer, standard_library

    tokenizer = byte_tokenizer()
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in standard_library()[:12])
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    torch.manual_seed(0)
    model = patch_model(byte_model(tokenizer), "sinusoidal", trainable=trainable).train()
    module = model.transformer.wpe
    before = module.waves(torch.device("cpu")).detach().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(150):
        batch = ids[torch.randint(0, len(ids) - 128, (4, 1)) + torch.arange(128)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ratio = module.waves(torch.device("cpu")).detach().double() / before
    moved, negative = int((ratio.abs().log().abs() > math.log(2)).sum()), int((ratio < 0).sum())
    long = int((2 * math.pi / (ratio * before).abs() > 1000).sum())
    assert int((2 * math.pi / before > 1000).sum()) == 28
    if trainable == "radians":  # 32, 9 and 10 where this was written
        assert moved > 20
        assert negative > 0
        assert long < 20
    else:
        assert (moved, negative, long) == (0, 0, 28)


def test_frequencies_as_a_list():
    listed = [1.0, 0.5, 0.0, 0.125, 3.0, 0.01, 0.002, 0.0001]
    case = sinusoidal("listed", frequencies=listed, layout="split", scale=1.0)
    module = embedding(case, 16, torch.float64, NATIVE)
    expected = case.table(range(40), 16, {}, match=1.0, **case.hyperparameters)
    assert_close(module(torch.arange(40)[None])[0].double(), expected, torch.float64, "table")
    dims = Dims(1, 1, 16, 16, 1)
    for wrong, error, message in [
        ({"frequencies": [1.0, 0.1]}, ValueError, "size 16 have 8 frequencies, not 2"),
        ({"frequencies": [1.0] * 8, "base": 500.0}, ValueError, "base is not read"),
        ({"frequencies": [1.0] * 8, "alpha": 3.0}, ValueError, "alpha is not read"),
        ({"frequencies": [1.0] * 7 + [float("nan")]}, ValueError, "must be finite"),
        ({"frequencies": ["1"] * 8}, TypeError, "must be numbers"),
        ({"frequencies": "linear"}, ValueError, "exponential, power, a list of numbers"),
        ({"trainable": "logarithm"}, TypeError, "trainable must be True or False"),
    ]:
        with pytest.raises(error, match=message):
            scheme_class("sinusoidal").parse(wrong).resolve(NATIVE, dims)


@pytest.mark.parametrize(
    "native", [NATIVE, Native(table=None, token_rms=0.3, max_positions=12)], ids=["table", "tokens"]
)
@pytest.mark.parametrize("frequencies", ["exponential", "power"])
def test_scale_matches_what_is_replaced(native, frequencies):
    dims = Dims(1, 1, 16, 16, 1)
    table = (
        scheme_class("sinusoidal")(frequencies=frequencies).resolve(native, dims).build(dims)(torch.arange(40)[None])
    )
    wanted = 0.3 if native.table is None else native.table.square().mean().sqrt()
    assert abs(table.square().mean().sqrt() / wanted - 1) < 1e-12


# --- learned table


def native_table(model) -> torch.Tensor:
    """The base's own table, without the two rows that OPT keeps before position 0."""
    if model.config.model_type == "opt":
        return model.model.decoder.embed_positions.weight.detach()[2:].clone()
    return model.transformer.wpe.weight.detach().clone()


def learned_of(model) -> torch.Tensor:
    return next(p for name, p in model.named_parameters() if name.endswith(".table")).detach()


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize(
    ("initialization", "count"),
    [
        ("native", 8),
        ("native", 5),
        ("interpolated", 13),
        ("interpolated", 8),
        ("interpolated", 3),
        ("hierarchical", 9),
        ("hierarchical", 64),
        ("hierarchical", 5),
        ("sinusoidal", 20),
    ],
)
def test_learned_starts_from_the_base(family, initialization, count):
    model = tiny(family, max_position_embeddings=8)
    native = native_table(model).double()
    patch_model(model, "learned", num_positions=count, initialization=initialization)
    match = native.square().mean().sqrt().item()
    assert_close(learned_of(model), INITIAL_TABLES[initialization](native, count, match), torch.float32, initialization)
    if initialization in ("native", "hierarchical"):  # what the model was trained on is not touched, to the last bit
        kept = min(count, 8)
        assert torch.equal(learned_of(model)[:kept], native.float()[:kept])


def test_learned_hierarchy_is_not_symmetric():
    """With alpha = 0.5 positions (i, j) and (j, i) would be one vector; 0.4 tells all n^2 apart."""
    model = patch_model(tiny("gpt2", n_positions=8), "learned", num_positions=64, initialization="hierarchical")
    distances = torch.cdist(learned_of(model), learned_of(model)) + 10 * torch.eye(64)
    assert distances.min() > 1e-2


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_learned_normal(family):
    tables = [
        learned_of(patch_model(tiny(family), "learned", num_positions=200, initialization="normal", seed=seed))
        for seed in (0, 0, 1)
    ]
    assert abs(tables[0].std() / 0.02 - 1) < 0.05
    assert abs(tables[0].mean()) < 1e-3
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_learned_sinusoidal_matches_the_tokens_of_a_base_without_table():
    model = tiny("llama")
    match = model.model.embed_tokens.weight.detach().double().square().mean().sqrt().item()
    patch_model(model, "learned", num_positions=20, initialization="sinusoidal")
    expected = sinusoidal_table(range(20), model.config.hidden_size, {}, match=match)
    assert_close(learned_of(model), expected, torch.float32, "sinusoidal")


@pytest.mark.parametrize(
    ("family", "count", "initialization"),
    [("gpt2", None, "native"), ("gpt2", 8, "native"), ("gpt2", 40, "hierarchical"), ("llama", 20, "sinusoidal")],
)
def test_learned_chooses_an_initialization(family, count, initialization):
    hyperparameters = {} if count is None else {"num_positions": count}
    chosen = patch_model(tiny(family, max_position_embeddings=8), "learned", **hyperparameters)
    named = patch_model(
        tiny(family, max_position_embeddings=8), "learned", num_positions=count or 8, initialization=initialization
    )
    assert torch.equal(learned_of(chosen), learned_of(named))


@pytest.mark.parametrize(
    ("family", "hyperparameters", "message"),
    [
        ("llama", {"initialization": "native"}, "sinusoidal or normal"),
        ("llama", {"initialization": "hierarchical"}, "sinusoidal or normal"),
        ("llama", {"initialization": "interpolated"}, "sinusoidal or normal"),
        ("gpt2", {"initialization": "native", "num_positions": 9}, "8 positions, 9 were asked for"),
        ("gpt2", {"initialization": "hierarchical", "num_positions": 65}, "reaches 64, not 65"),
        ("gpt2", {"initialization": "copied"}, "native, interpolated, hierarchical, sinusoidal, normal"),
    ],
)
def test_learned_refuses_what_the_base_cannot_give(family, hyperparameters, message):
    with pytest.raises(ValueError, match=message):
        patch_model(tiny(family, max_position_embeddings=8), "learned", **hyperparameters)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("placement", ["input", "every_layer"])
def test_learned_past_its_table(family, placement):
    model = patch_model(tiny(family), "learned", num_positions=12, placement=placement, initialization="normal")
    assert model(tokens(length=12)).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"position 12 .* 12 positions"):
        model(tokens(length=13))


# --- inside a patched model


def small(family: str, num_heads: int | None):
    """A model with an odd (gpt2: 3) or grouped (llama: 6 in 2 groups) number of heads, trained on TRAINED positions."""
    if family == "gpt2":
        heads = num_heads or 3
        return tiny("gpt2", n_head=heads, n_embd=heads * HEAD_DIM, n_positions=TRAINED)
    heads = num_heads or 6
    return tiny(
        "llama",
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        hidden_size=24,  # not heads times head size: nothing may assume so
        max_position_embeddings=TRAINED,
    )


def parts(family: str, model):
    """Decoder, layers, attentions, token embedding."""
    if family == "gpt2":
        decoder = model.transformer
        return decoder, decoder.h, [layer.attn for layer in decoder.h], decoder.wte
    return model.model, model.model.layers, [layer.self_attn for layer in model.model.layers], model.model.embed_tokens


def project(family: str, attention, hidden: torch.Tensor):
    """Query (B, H, T, D), key and value (B, K, T, D) of hidden states, in float64, before any position is applied."""
    if family == "gpt2":
        weight, bias = attention.c_attn.weight.detach().double(), attention.c_attn.bias.detach().double()
        projected = (hidden @ weight + bias).chunk(3, -1)
    else:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        projected = [hidden @ p.weight.detach().double().T for p in projections]
    return [x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in projected]


def merge(family: str, attention, output: torch.Tensor) -> torch.Tensor:
    """(B, T, E) of the heads' outputs (B, T, H, D)."""
    if family == "gpt2":
        return output.flatten(2) @ attention.c_proj.weight.detach().double() + attention.c_proj.bias.detach().double()
    return output.flatten(2) @ attention.o_proj.weight.detach().double().T


def first(x):
    return x[0] if isinstance(x, tuple) else x


def recorded(modules):
    """Lists that fill with each module's hidden states in and out (after pre-hooks) when the model runs."""
    record = [[] for _ in modules]
    for module, slot in zip(modules, record, strict=True):

        def hook(_, args, kwargs, output, slot=slot):
            slot.append((args[0] if args else kwargs["hidden_states"], first(output)))

        module.register_forward_hook(hook, with_kwargs=True)
    return record


def own_parameters(*modules) -> dict[str, torch.Tensor]:
    """Parameters by the last part of their names."""
    named = [each for module in modules if module is not None for each in module.named_parameters()]
    return {name.rpartition(".")[2]: p.detach().double() for name, p in named}


BY_ID = {case.id: case for case in CASES}
ON_ATTENTION = ("posenc", "posenc_additions")
IN_MODELS = [(case.id, family) for case in CASES for family in case.bases]


@pytest.mark.rows(default=10)
@matrix(IN_MODELS, case=None, family=None)
@torch.no_grad()
def test_a_patched_model_computes_it_in_every_layer(case, family):
    """Each layer's attention and input, recorded in a running model, are what the formula says, with nothing native."""
    case = BY_ID[case]
    model = small(family, case.num_heads)
    replaced = model.transformer.wpe if family == "gpt2" else model.model.embed_tokens
    match = replaced.weight.double().square().mean().sqrt().item()
    stock = set(model.state_dict())
    scheme = scheme_class(case.scheme).parse(case.hyperparameters)
    joins = scheme.acts_on.joins()
    patch_model(model, ["nope", scheme] if joins else scheme, seed=5)
    for n, (name, parameter) in enumerate(model.named_parameters()):
        if name not in stock:
            parameter.copy_(rounded(*parameter.shape, seed=n) / 2)

    decoder, layers, attentions, embedding = parts(family, model)
    inside, around = recorded(attentions), recorded(layers)
    ids = tokens(length=TRAINED + 4 if case.scheme == "rope" else 9)  # rope: past the trained length, for its scalings
    model(ids)

    shared = getattr(decoder, "posenc", None)
    stream = embedding(ids).double()
    for layer, attention, [(hidden, output)], [(before, after)] in zip(layers, attentions, inside, around, strict=True):
        if case.table is not None and (layer is layers[0] or case.hyperparameters.get("placement") == "every_layer"):
            owner = decoder.wpe if family == "gpt2" and "placement" not in case.hyperparameters else None
            parameters = own_parameters(owner, shared, getattr(layer, "posenc", None))
            size = stream.shape[-1]
            table = case.table(range(ids.shape[1]), size, parameters, match=match, **case.hyperparameters)
            assert table.abs().max() > 1e-3
            stream = stream + table
        assert_close(before, stream, torch.float32, "input of a layer")
        stream = after.double()

        query, key, value = project(family, attention, hidden.double())
        heads = case.attention(
            query,
            key,
            value,
            own_parameters(None if case.table else shared, *(getattr(attention, name, None) for name in ON_ATTENTION)),
            softmax_scale=HEAD_DIM**-0.5,
            trained=TRAINED,
            whole_heads=family == "llama",
            hidden=hidden.double(),
            **case.hyperparameters,
        )
        assert_close(output, merge(family, attention, heads), torch.float32, "output of an attention")
        if case.attention is not plain:
            without = plain(query, key, value, {}, softmax_scale=HEAD_DIM**-0.5)
            assert (heads - without).abs().max() > 1e-2, "the scheme does not change this input"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("case_id", "keys"),
    [
        ("nope", []),
        ("alibi-default", []),
        ("rope-default", []),
        ("sinusoidal-default", []),
        ("alibi-trained", ["{a0}.slopes", "{a1}.slopes"]),
        (
            "shaw-default",
            ["{a0}.key_embeddings", "{a0}.value_embeddings", "{a1}.key_embeddings", "{a1}.value_embeddings"],
        ),
        ("shaw-shared-layers", ["{d}.key_embeddings", "{d}.value_embeddings"]),
        (
            "transformer_xl-shared-biases",
            ["{a0}.position_projection", "{a1}.position_projection", "{d}.content_bias", "{d}.position_bias"],
        ),
        ("da_transformer-no-relu", [f"{{a{n}}}.{p}" for n in (0, 1) for p in ("distance_weight", "saturation")]),
        ("kerple-default", ["{d}.raw_scale", "{d}.raw_rate"]),
        ("kerple-power-per-layer", [f"{{a{n}}}.{p}" for n in (0, 1) for p in ("raw_scale", "raw_exponent")]),
        ("bam-default", [f"{{a{n}}}.{p}" for n in (0, 1) for p in ("raw_scale", "raw_exponent")]),
        ("bam-centre", [f"{{a{n}}}.{p}" for n in (0, 1) for p in ("raw_scale", "raw_exponent", "centre")]),
        ("bam-shared-layers", ["{d}.raw_scale", "{d}.raw_exponent"]),
        ("cope-few", ["{a0}.position_embeddings", "{a1}.position_embeddings"]),
        ("cope-shared-layers", ["{d}.position_embeddings"]),
        (
            "fire-near",
            [f"{{a{n}}}.{p}" for n in (0, 1) for p in ("input_weight", "input_bias", "output_weight", "rate", "reach")],
        ),
        ("sinusoidal-every-layer-trained", ["{d}.log_ratios"]),
        ("sinusoidal-trained-in-radians", ["{d}.frequencies"]),
        ("learned-every-layer", ["{d}.table"]),
        ("learned-table-per-layer", ["{l0}.table", "{l1}.table"]),
    ],
)
def test_parameter_names_in_a_checkpoint(family, case_id, keys):
    case = next(case for case in CASES if case.id == case_id)
    model = tiny(family)
    stock = set(model.state_dict())
    patch_model(model, case.scheme, **case.hyperparameters)
    decoder, attention = ("transformer", "h.{}.attn") if family == "gpt2" else ("model", "layers.{}.self_attn")
    places = {"d": f"{decoder}.posenc"}
    for n in (0, 1):
        places[f"a{n}"] = f"{decoder}.{attention.format(n)}.posenc"
        places[f"l{n}"] = f"{decoder}.{attention.format(n).rpartition('.')[0]}.posenc"
    markers = {f"{places[layer].removesuffix('posenc')}hf_posenc_{case.scheme}" for layer in ("l0", "l1")}
    assert set(model.state_dict()) - stock == markers | {key.format(**places) for key in keys}
