"""Every scheme, option by option, computes what its paper says: outputs, and gradients of inputs and parameters."""

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
    turn,
)
from families import tiny, tokens
from matrix import matrix
from situations import in_turn
from torch import nn

from hf_posenc import patch_model
from hf_posenc.core.attention_call import Call
from hf_posenc.core.dims import Dims
from hf_posenc.core.modules import Native, Reference, owner_of
from hf_posenc.core.positions import Positions, pack, unpack
from hf_posenc.core.registry import scheme_class
from hf_posenc.engines import reference
from hf_posenc.schemes.base import ScoreScheme
from hf_posenc.schemes.rope import apply_rotary

# Largest error, relative to the largest value expected (to 1 if that is smaller).
TOLERANCE = {
    torch.float64: 1e-12,  # the same sums in another order
    torch.float32: 1e-5,
    # Computed in float32 and rounded once, at the end: half a unit in the last of bfloat16's 8 binary digits.
    torch.bfloat16: 2**-8 + 1e-5,
}

# query heads, key-value heads, head size, queries, keys
SHAPES = {
    "3-heads-odd-size": (3, 3, 5, 8, 8),
    "gqa-4-2": (4, 2, 4, 8, 8),
    "mqa-6-1-chunk": (6, 1, 4, 3, 9),
    "gqa-12-4": (12, 4, 2, 6, 6),
    "one-query": (4, 4, 4, 1, 9),
}


OF_SCORES = [case for case in CASES if issubclass(scheme_class(case.scheme), ScoreScheme)]
SCORES = [case for case in OF_SCORES if not scheme_class(case.scheme).uses_queries]
EACH = list({case.scheme: case for case in reversed(SCORES)}.values())  # one of each scheme
TABLES = [case for case in CASES if case.table is not None]
BY_ID = {case.id: case for case in CASES}


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


# --- schemes on scores


def build(case: Case, dims: Dims):
    """The module of one layer, and the parameters it works with."""
    scheme = scheme_class(case.scheme).parse(case.hyperparameters)
    module = scheme.build(dims)
    return module, dict(module.named_parameters())


@cache
def slow_scores(case_id: str, shape: str, softcap: float | None = None):
    """Inputs, parameters, cotangent, and the reference's output and gradients: float64."""
    case = BY_ID[case_id]
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


IN_SHAPES = [(case.id, shape) for case in SCORES for shape in SHAPES if case.num_heads in (None, SHAPES[shape][0])]
SHAPED = [(case, shape, torch.float64, "") for case, shape in IN_SHAPES if shape == "gqa-4-2"]
SHAPED += [
    (*row, dtype, "") for row, dtype in in_turn(IN_SHAPES, [torch.float32, torch.bfloat16]) if row[1] != "gqa-4-2"
]
# OPT multiplies queries by 1/sqrt(D) itself; terms without a query (Transformer-XL's u.k) keep their factor. Gemma 2 caps
# scores by tanh: what is a product of vectors is capped, a bias or factor on it is not.
OPTIONS = [(case.id, "gqa-4-2", torch.float64, option) for case in EACH for option in ("prescaled", "softcap")]


@pytest.mark.rows(default=110)
@matrix(dict.fromkeys([*SHAPED, *OPTIONS]), case=None, shape=None, dtype=None, option=None)
def test_scores(case, shape, dtype, option):
    case, softcap = BY_ID[case], 1.5 if option == "softcap" else None
    dims, inputs, parameters, cotangent, expected, slopes = slow_scores(case.id, shape, softcap)
    output, weights, leaves = run(
        case, dims, inputs, parameters, dtype, prescaled=option == "prescaled", softcap=softcap
    )
    assert output.dtype == weights.dtype == dtype
    assert_close(output, expected, dtype, "output", case.roundings)
    for name, gradient in gradients(output, cotangent.to(dtype), leaves).items():
        assert gradient.dtype == dtype
        assert_close(gradient, slopes[name], dtype, f"gradient of {name}", case.roundings)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kerple_falls_with_the_distance_whatever_is_trained(dtype):
    """No values of the parameters raise a key above a nearer one, or make anything that is no number."""
    corners = torch.cartesian_prod(*[torch.tensor([-1000.0, -90.0, -1.0, 0.0, 30.0, 90.0, 1000.0])] * 2)
    module, parameters = build(BY_ID["kerple-per-layer"], Dims(len(corners), len(corners), 2, 2 * len(corners), 1))
    with torch.no_grad():
        for n, parameter in enumerate(parameters.values()):
            parameter.copy_(corners[:, n])
    distance = torch.tensor([0, 1, 2, 30, 1000, 1_000_000])
    biases = module.to(dtype).form(torch.empty(0, dtype=dtype)).values(distance)
    assert biases.isfinite().all()
    assert (biases <= 0).all()
    assert (biases.diff() <= 0).all()
    assert (biases.diff()[(corners.abs() <= 30).all(1)] < 0).all()
    gradients = torch.autograd.grad(biases.sum(), list(parameters.values()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("case_id", ["bam-default", "bam-centre"])
def test_bam_starts_as_alibi(case_id):
    """But for the same number at all distances, which the softmax does not see."""
    module, parameters = build(BY_ID[case_id], Dims(8, 8, 2, 16, 1))
    module.reset_parameters()
    distance = torch.arange(200)
    biases = module.form(torch.empty(0, dtype=torch.float64)).values(distance)
    slopes = torch.tensor(paper_slopes(8), dtype=torch.float64)
    assert torch.allclose(biases - biases[:, :1], -slopes[:, None] * distance, rtol=1e-5, atol=1e-6)
    if "centre" in parameters:  # where the distance from it is 0
        assert all(each.isfinite().all() for each in torch.autograd.grad(biases.sum(), list(parameters.values())))


def test_cope_counts_what_is_visible_in_the_order_of_positions():
    """One query on 9 keys, of which a window, a document and padding hide 5: as if it saw the others only."""
    case = BY_ID["cope-few"]
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


# --- rope


@pytest.mark.rows(slow=9)
@matrix(dtype=TOLERANCE, share=[1.0, 0.5, 0.25], layout=["half", "interleaved"])
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


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("share", [0.1, 0.4], ids=["nothing-left", "odd"])
def test_rope_refuses_to_rotate_half_a_pair(family, share):
    """Unchecked, none of 8 dimensions would be rotated, or all of them, or the first forward would fail."""
    with pytest.raises(ValueError, match="not pairs"):
        patch_model(tiny(family), "rope", partial_rotary_factor=share)


# --- schemes on embeddings

NATIVE = Native(table=rounded(12, 16, seed=7) * 0.1, token_rms=lambda: 0.3, max_positions=12)


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


@pytest.mark.rows(slow=30)
@matrix(dtype=TOLERANCE, size=[16, 15], case=TABLES)
def test_embeddings(case, size, dtype):
    native = NATIVE if size == 16 else Native(table=None, token_rms=lambda: 0.3, max_positions=12)
    match = native.token_rms() if native.table is None else native.table.square().mean().sqrt().item()
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
        ("native", 5),
        ("native", 9),
        ("native", 64),
        ("sinusoidal", 20),
    ],
)
def test_learned_starts_from_the_base(family, initialization, count):
    model = tiny(family, max_position_embeddings=8)
    native = native_table(model).double()
    patch_model(model, "learned", num_positions=count, initialization=initialization)
    match = native.square().mean().sqrt().item()
    assert_close(learned_of(model), INITIAL_TABLES[initialization](native, count, match), torch.float32, initialization)
    if initialization == "native":  # what the model was trained on is not touched, to the last bit
        kept = min(count, 8)
        assert torch.equal(learned_of(model)[:kept], native.float()[:kept])


@pytest.mark.parametrize(
    ("family", "hyperparameters", "message"),
    [
        ("llama", {"initialization": "native"}, "sinusoidal or normal"),
        ("gpt2", {"initialization": "native", "num_positions": 65}, "reaches 64, not 65"),
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


ON_ATTENTION = ("posenc", "posenc_additions")
IN_MODELS = [(case.id, family) for case in CASES for family in case.bases]


@pytest.mark.rows(default=12, slow=50)
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
    joins = scheme.joins
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
            assert (heads - without).abs().max() > 1e-3, "the scheme does not change this input"


def test_where_training_starts():
    """First values of the parameters: neutral where a scheme can be, or as the authors' code draws them."""
    dims = Dims(num_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=24, num_layers=2)
    starts = {
        "transformer_xl-default": {"position_projection": 0.02, "content_bias": 0, "position_bias": 0},
        "shaw-per-head": {"key_embeddings": 0.02, "value_embeddings": 0.02},
        "alibi-trained": {"slopes": paper_slopes(4)},
        "alibi-trained-own-slopes": {"slopes": [0.9, 0.3, 0.0, 0.01]},
        "da_transformer-default": {"distance_weight": 0, "saturation": 0},
        "cope-default": {"position_embeddings": 0},
        "fire-far": {"input_weight": None, "input_bias": None, "output_weight": None, "rate": [0.1], "reach": [1.0]},
    }
    for case_id, wanted in starts.items():
        module, parameters = build(BY_ID[case_id], dims)
        module.reset_parameters()
        assert parameters.keys() == wanted.keys()
        assert not list(module.buffers()), f"{case_id}: buffers would be left uninitialised by from_pretrained"
        for name, start in wanted.items():
            if start is None:  # as torch's linear layers
                assert 0.05 < parameters[name].abs().max() <= 1, f"{case_id}: {name}"
            elif isinstance(start, float):
                assert 0.6 * start < parameters[name].std() < 1.5 * start, f"{case_id}: {name}"
            else:
                expected = torch.tensor(start).to(parameters[name])
                assert torch.equal(parameters[name], expected.expand_as(parameters[name])), f"{case_id}: {name}"
