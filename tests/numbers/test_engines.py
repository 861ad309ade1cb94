"""Fast engines compute what the reference engine computes in float64, and the choice among them never changes a result."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from calls import (
    FORMLESS,
    FORMS,
    HEAD_DIM,
    MODULES,
    SCALING,
    SITUATIONS,
    call_of,
    compare,
    inputs,
    left_padded,
    never_short,
    seeded,
    windowed,
)
from families import FAMILIES, tiny, tokens
from matrix import matrix
from situations import SCORE_SCHEMES, assert_same, crossed, in_turn, patched_model
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc import NotPatchedError, patch_model, which_engine
from hf_posenc.core.forms import RelativeKeys, Slopes
from hf_posenc.core.layer_state import STATE, OnAttention
from hf_posenc.core.modules import WithoutPositions
from hf_posenc.core.positions import Positions, pack, unpack
from hf_posenc.engines import banded, decode, dispatch, reference, toeplitz
from hf_posenc.engines.dispatch import choose, find_engine
from hf_posenc.engines.spans import SpanEngine
from hf_posenc.schemes.alibi import Alibi

FLOORS = {engine: engine.floors for engine in dispatch.ENGINES}


@pytest.fixture(autouse=True)
def every_call_by_the_fastest(monkeypatch):
    never_short(monkeypatch)


# ------------------------------------------------------------------------------------------------ against the reference


ENGINES = {
    **{
        engine: tuple(name for name, form in FORMS.items() if form in find_engine(engine).forms)
        for engine in ("banded", "toeplitz", "clipped", "rescaled")
    },
    "wide": tuple(name for name, form in FORMS.items() if issubclass(form, (Slopes, RelativeKeys))),
    "chunked": tuple(MODULES),
}
EXPECTED_REFUSALS = {
    # The far keys are computed without a mask: the engine would need one for them to carry windows.
    ("clipped", "it has no sliding windows"),
    ("wide", "the first tokens stay visible outside the window, at a distance that depends on the query"),
    ("wide", "positions add no product of two sides to the scores, or not at real positions in 16 bits"),  # windows
    *(
        (engine.name, reason)
        for engine in dispatch.ENGINES
        if isinstance(engine, SpanEngine)
        for reason in (
            "padded keys in a cache, padding inside a document, or position_ids with gaps",
            "the first tokens stay visible outside the window, and it computes near keys only",
        )
    ),
}
ROWS = [(engine, module) for engine, modules in ENGINES.items() for module in modules]


CACHED = (
    "one query",
    "padded cache",
    "one query, first keys kept",
    "one query, static cache with a window",
    "distances beyond the number of keys",
)
DECODED = [("decode", case) for case in MODULES if case not in FORMLESS]
VECTORS = ENGINES["clipped"]
NARROW_VALUES = [row for row in ROWS if row[0] != "clipped"] + [("clipped", "shaw-keys-only")]
# Each engine in every situation, and with every module in three that differ; with sinks and with values of another size
# (as in latent attention) each module once.
COMPARED = [
    *((e, modules[0], situation, "") for (e, modules), situation in itertools.product(ENGINES.items(), SITUATIONS)),
    *((*row, situation, "") for row in ROWS for situation in ("causal", "packed", "static cache")),
    *(
        (*row, situation, "sinks")
        for row, situation in in_turn(itertools.product(["reference", "chunked"], MODULES), SITUATIONS)
    ),
    *((*row, situation, "sinks") for row, situation in in_turn(DECODED, CACHED)),
    *((*row, situation, "10") for row, situation in in_turn(NARROW_VALUES, SITUATIONS)),
    *(("chunked", case, situation, "24") for case, situation in in_turn(VECTORS, SITUATIONS)),
    *(
        ("decode", case, situation, size)
        for case, situation, size in in_turn(["alibi", *VECTORS] * 2, CACHED, ["10", "24", "24"])
    ),
]
# Transformer-XL's terms are of the order of 10; DA-Transformer's gradients are sums of terms times distances that cancel,
# in the reference engine's float32 as well; so are those of FIRE's biases.
CLOSE = {"transformer_xl": 4e-5, "fire": 5e-5, "da_transformer": 2e-4, "da_transformer-signed": 2e-4}


def logits_of(call):
    wide = call.widened()
    return wide.positions.mask(wide.formula.scores(wide))


def results(engine, module, positions, tensors, shown, weight):
    """Return output and the gradients of inputs and parameters, none when decoding; `formula` is the reference engine.

    Sinks (the fourth tensor) hold a share of each row, which no value gets: `formula` computes them from that.
    """
    call = call_of(
        module, *tensors[:3], positions, sinks=tensors[3] if len(tensors) > 3 and engine != "formula" else None
    )
    if engine == "formula":
        output, _ = reference.attend(call)
        if len(tensors) > 3:
            kept = torch.sigmoid(logits_of(call).logsumexp(-1) - tensors[3][:, None])
            output = output * kept.transpose(1, 2)[..., None]
    else:
        with torch.set_grad_enabled(engine != "decode"):
            if (reason := find_engine(engine).refusal(call)) is not None:
                assert (engine, reason) in EXPECTED_REFUSALS
                pytest.skip(reason)
            output, _ = dispatch.attend(call, engine)
    if shown is not None:
        output = output * shown[:, :, None, None]
    if not output.requires_grad:
        return [output]
    return [output, *torch.autograd.grad((output.double() * weight).sum(), [*tensors, *module.parameters()])]


@pytest.mark.rows(default=150)
@matrix(in_turn(dict.fromkeys(COMPARED), [(4, 1), (6, 3), (5, 5), (6, 2)]), row=None, heads_and_groups=None)
def test_against_the_reference(row, heads_and_groups):
    (engine, case, situation, extra), (heads, groups) = row, heads_and_groups
    size = int(extra) if extra.isdigit() else HEAD_DIM
    positions, shown = SITUATIONS[situation]()
    module = MODULES[case](heads, **({"value_dim": size} if extra.isdigit() else {}))
    tensors = inputs(positions, heads, groups, torch.float32)
    tensors[2] = seeded(*tensors[2].shape[:3], size).float().requires_grad_()
    if extra == "sinks":  # around what the scores of a row add up to: they hold much of some rows and little of others
        sums = logits_of(call_of(module, *tensors, positions)).logsumexp(-1).detach()
        middle = sums.transpose(0, 1).flatten(1).median(-1).values
        tensors.append((middle + torch.linspace(-2, 2, heads)).requires_grad_())
    weight = seeded(2, tensors[0].shape[2], heads, size)
    actual = results(engine, module, positions, tensors, shown, weight)
    wide, exact = [each.detach().double().requires_grad_() for each in tensors], copy.deepcopy(module).double()
    expected = results("formula", exact, positions, wide, shown, weight)
    compare(actual, expected[: len(actual)], max(CLOSE.get(case, 1e-5), 5e-5 if extra else 0))
    if extra == "sinks":
        plain = results("formula", exact, positions, wide[:3], shown, weight)[0]
        assert (plain - expected[0]).norm() > 0.05 * expected[0].norm()


@matrix(situation=SITUATIONS, window=[None, 17])
def test_attention_without_positions(situation, window):
    heads, groups = (4, 1) if window is None else (6, 3)
    positions, shown = SITUATIONS[situation]()
    positions = positions if window is None else positions.within(window)
    tensors = inputs(positions, heads, groups, torch.float32)
    weight = seeded(2, tensors[0].shape[2], heads, HEAD_DIM)
    actual = results("sdpa", WithoutPositions(), positions, tensors, shown, weight)
    wide = [each.detach().double().requires_grad_() for each in tensors]
    compare(actual, results("formula", WithoutPositions(), positions, wide, shown, weight), 1e-5)


@pytest.mark.parametrize("engine", ["reference", "chunked", "rescaled", "decode"])
@pytest.mark.parametrize("weight", [0.02, 3.0, -3.0], ids=["ordinary factors", "huge factors", "factors of 0"])
def test_a_saturation_whose_exponential_overflows(engine, weight):
    """`exp(200)` is no float32 number. At first `f = exp(w d)` nevertheless; with a large `w` it is huge itself."""
    module, positions = MODULES["da_transformer"](4), Positions.causal(1 if engine == "decode" else 60, 60)
    with torch.no_grad():
        module.saturation.copy_(torch.tensor([100.0, 200.0, -100.0, -200.0]))
        module.distance_weight.fill_(weight)
    tensors = inputs(positions, 4, 1, torch.float32)
    with torch.set_grad_enabled(engine != "decode"):
        actual = step(engine, module, positions, tensors)[0]
        assert actual.isfinite().all()
        if engine != "decode":
            actual.square().sum().backward()
            assert all(each.grad.isfinite().all() for each in (*tensors, *module.parameters()))
    if abs(weight) < 1:  # beyond, `f` leaves the numbers of float32
        distance = torch.arange(60, dtype=torch.float64)
        v, wd = module.saturation.detach().double()[:, None], weight * distance
        plain = (1 + v.exp()) / (1 + (v - wd).exp())  # equation (5), which float64 can hold
        assert (module.form(tensors[0]).curve(60).detach() / plain - 1).abs().max() < 1e-4


@pytest.mark.rows(default=20)
@matrix(in_turn(ROWS, SITUATIONS), row=None, situation=None)
def test_bfloat16(row, situation):
    engine, case = row
    positions, shown = SITUATIONS[situation]()
    module, tensors = MODULES[case](4), inputs(positions, 4, 2, torch.bfloat16)
    weight = seeded(2, tensors[0].shape[2], 4, HEAD_DIM)
    actual = results(engine, module, positions, tensors, shown, weight)
    assert actual[0].dtype == torch.bfloat16
    wide = [each.detach().double().requires_grad_() for each in tensors]
    expected = results("formula", copy.deepcopy(module).double(), positions, wide, shown, weight)
    # The kernel rounds weights to 8 bits before it sums values; relative norm, since single entries are noise.
    # The gradients of the clipped engine's tables are differences: the score gradients of a row add up to 0. So are those
    # of the one number per head that bends a logarithm, and of slopes.
    tolerance = 0.04 if engine == "clipped" or case in ("kerple", "fire", "transformer_xl", "alibi-trainable") else 0.02
    # A unit of FIRE's network that no distance switches off has an offset without effect: its gradient is 0, and what
    # is left of a sum over all pairs is rounding.
    remainder = {"fire": 2e-4, "shaw-one-vector": 0.02}.get(case, 1e-6)  # whose key vector the softmax does not see
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() <= tolerance * e.norm() + remainder


# ------------------------------------------------------------------------------------------------------------ wider heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["transformer_xl", "alibi", "gates"])
def test_wider_heads_far_from_the_first_token_are_as_exact_as_the_reference(case, dtype):
    """At positions from 100,000 on; errors against float64 are at most twice those of the reference engine."""
    index = torch.arange(700)[None]
    there = index + 100_003
    positions = unpack(pack(index, index, query_positions=there, key_positions=there), 700)
    module, gates = (WithoutPositions(), True) if case == "gates" else (MODULES[case](4), False)
    tensors = inputs(positions, 4, 1, dtype, batch=1)
    gates = torch.nn.functional.logsigmoid(seeded(1, 4, 700).float() * 2 + 3) if gates else None

    def output(engine, dtype):
        given = call_of(
            copy.deepcopy(module).to(torch.promote_types(dtype, torch.float32)),
            *(each.to(dtype) for each in tensors),
            positions,
        )
        given = replace(given, log_gates=None if gates is None else gates.to(torch.promote_types(dtype, torch.float32)))
        with torch.no_grad():
            return dispatch.attend(given, engine)[0].double()

    exact = output("reference", torch.float64)
    error, own = ((output(engine, dtype) - exact).square().mean().sqrt() for engine in ("wide", "reference"))
    assert error <= 2 * own


@pytest.mark.parametrize("situation", SITUATIONS)
def test_gates_and_biases_of_keys_as_columns(situation):
    """In float64, where four query heads share a key; with the gradients of both."""
    positions, shown = SITUATIONS[situation]()
    tensors = [each.detach().double().requires_grad_() for each in inputs(positions, 8, 4, torch.float32)]
    keys = tensors[1].shape[2]
    gates = torch.nn.functional.logsigmoid(seeded(2, 8, keys) + 1).requires_grad_()
    bias, weight = seeded(2, 8, keys).requires_grad_(), seeded(2, tensors[0].shape[2], 8, HEAD_DIM)
    found = []
    for engine in ("wide", "reference"):
        given = call_of(WithoutPositions(), *tensors, positions, log_gates=gates, key_bias=bias)
        if engine == "wide" and find_engine(engine).why_not(given) is not None:
            assert "first keys kept" in situation
            return
        output, _ = dispatch.attend(given, engine)
        output = output if shown is None else output * shown[:, :, None, None]
        found.append([output, *torch.autograd.grad((output * weight).sum(), [*tensors, gates, bias])])
    compare(*found, 1e-12)


# -------------------------------------------------------------------------------------------------------------- decoding


def step(engine, module, positions, tensors, **options):
    return dispatch.attend(call_of(module, *tensors, positions, vector_scaling=0.7 * SCALING, **options), engine)


OPTIONS = {"plain": {}, "softcap": {"softcap": 2.0}, "weights": {"weights": True}}
STEPS = [
    *itertools.product([case for case in MODULES if case not in FORMLESS], OPTIONS),
    *itertools.product(["alibi", "shaw", "transformer_xl"], ["plain"] * len(CACHED)),
]


@torch.no_grad()
@matrix(in_turn(STEPS, CACHED, [(4, 1), (6, 3)]), row=None, situation=None, heads_and_groups=None)
def test_a_step_of_generation(row, situation, heads_and_groups, monkeypatch):
    (case, option), (heads, groups) = row, heads_and_groups
    options = OPTIONS[option]
    positions, _ = SITUATIONS[situation]()
    module, tensors = MODULES[case](heads), inputs(positions, heads, groups, torch.float32)
    assert choose("auto", call_of(module, *tensors, positions, **options)).engine == "decode"
    wide = [each.double() for each in tensors]
    expected, weights = step("reference", copy.deepcopy(module).double(), positions, wide, **options)
    for dtype, tolerance, products in (
        (torch.float32, 5e-6, False),
        (torch.float64, 1e-12, False),
        (torch.bfloat16, 0.05, False),
        (torch.bfloat16, 0.05, True),  # what this depends on is the processor
        (torch.float16, 0.01, False),
    ):
        monkeypatch.setattr(decode, "products_are_faster", lambda products=products: products)
        fitting = copy.deepcopy(module).double() if dtype == torch.float64 else module
        output, found = step("decode", fitting, positions, [each.to(dtype) for each in tensors], **options)
        assert output.dtype == dtype
        assert (output - expected).norm() <= tolerance * expected.norm()
        assert (found is None) == ("weights" not in options)
        if found is not None:
            assert (found - weights).norm() <= tolerance * weights.norm()


# --------------------------------------------------------------------------------------------------------------- banding


def dense_alibi(q, k, v, slopes):
    length, start = k.shape[2], k.shape[2] - q.shape[2]
    distance = (torch.arange(start, length)[:, None] - torch.arange(length)).double()
    scores = q.double() @ k.double().mT * SCALING - slopes.double()[:, None, None] * distance
    return scores.masked_fill(distance < 0, -math.inf).softmax(-1) @ v.double()


HARD = {
    "random": lambda k: k,
    "large": lambda k: 6 * k,
    # What a window chosen without looking at the data would miss: one far key that everyone looks at.
    "one far key": lambda k: torch.cat([40 * k[:, :, :1], k[:, :, 1:]], 2),
    "growing": lambda k: k * torch.linspace(12, 0.1, k.shape[2])[:, None],
    "in common": lambda k: k + 20 * torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(5)),
    "one large coordinate": lambda k: k * torch.cat([torch.tensor([30.0]), torch.ones(HEAD_DIM - 1)]),
}


@pytest.mark.parametrize("what", HARD)
@pytest.mark.rows(slow=8)
@pytest.mark.parametrize("queries", [600, 90])
def test_skipped_keys_do_not_count(what, queries):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 8, n, HEAD_DIM, generator=generator) for n in (queries, 600, 600))
    q, k = q + 1, HARD[what](k + 1)
    slopes = torch.tensor([2.0**-n for n in range(1, 9)])
    output = banded.attend(q, k, v, slopes, scaling=SCALING, rows=32)
    expected = dense_alibi(q, k, v, slopes)
    plain = toeplitz.attend(q, k, v, -slopes[:, None] * torch.arange(600), scaling=SCALING)
    own_error = (plain.double() - expected).abs().max()
    assert (output.double() - expected).abs().max() <= 2 * own_error + 1e-6


def test_keys_are_skipped():
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 8, 2048, HEAD_DIM, generator=generator) for _ in range(2))
    slopes = torch.tensor([2.0**-n for n in range(1, 9)])
    needed = banded.windows(q, k, slopes, SCALING, 256)
    pieces = banded.plan(needed, 2048, 2048, 256)
    area = sum((end - i) * (h_end - h) * (end - j) for i, end, h, h_end, j in pieces)
    whole = sum((end - i) * (h_end - h) * (end - j) for i, end, h, h_end, j in toeplitz.whole(2048, 8, 256))
    assert area < 0.75 * whole
    covered = {(i, h) for i, _, h0, h1, _ in pieces for h in range(h0, h1)}
    assert len(covered) == 8 * 8  # every chunk of every head, once
    assert sum(h1 - h0 for _, _, h0, h1, _ in pieces) == 8 * 8


def test_slopes_that_reward_distance_keep_every_key():
    slopes = torch.tensor([0.5, 0.0, -0.01])
    q, k = torch.randn(1, 3, 64, HEAD_DIM), torch.randn(1, 3, 64, HEAD_DIM)
    needed = banded.windows(q, k, slopes, SCALING, 32)
    assert needed[1:].isinf().all()
    assert needed[0].isfinite().all()
    v = torch.randn(1, 3, 64, HEAD_DIM)
    output = banded.attend(q, k, v, slopes, scaling=SCALING)
    assert (output.double() - dense_alibi(q, k, v, slopes)).abs().max() < 1e-5


# ---------------------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns; views do not count."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.element_size())
        return out


@pytest.mark.parametrize("engine", [*ENGINES, "sdpa"])
@pytest.mark.parametrize("where", [None, lambda n: windowed(n, 9), lambda n: left_padded(n, 13)])
def test_nothing_grows_with_the_square_of_the_length(engine, where, monkeypatch):
    if engine == "sdpa":
        monkeypatch.undo()  # the sizes as they are

    def largest(length, engine):
        positions, shown = (Positions.causal(length), None) if where is None else where(length)
        module = WithoutPositions() if engine == "sdpa" else MODULES[ENGINES.get(engine, ["alibi"])[0]](4)
        with Largest() as probe:
            results(engine, module, positions, inputs(positions, 4, 1, torch.float32, batch=2), shown, torch.ones(()))
        return probe.numel

    long = 2048 if engine == "sdpa" else 512
    assert largest(long, engine) <= 2.2 * largest(long // 2, engine)
    if engine == "chunked":
        assert largest(512, "formula") >= 4 * 512 * 512  # what the probe would see


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine not in ("chunked", "wide")])
def test_a_second_derivative_is_refused(engine):
    module, tensors = MODULES[ENGINES[engine][0]](4), inputs(Positions.causal(40), 4, 1, torch.float32)
    output, _ = dispatch.attend(call_of(module, *tensors, Positions.causal(40)), engine)
    (gradient,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ------------------------------------------------------------------------------------------------------------ the choice


def call(case="alibi", length=40, dtype=torch.float32, **options):
    positions = Positions.causal(length)
    return call_of(MODULES[case](4), *inputs(positions, 4, 1, dtype), positions, **options)


def other_values(case, change):
    positions = Positions.causal(40)
    q, k, v = inputs(positions, 4, 1, torch.float32)
    return call_of(MODULES[case](4), q, k, change(v), positions)


WIDE, NARROW = other_values("alibi", lambda v: torch.cat([v, v], -1)), other_values("shaw", lambda v: v[..., :10])


@pytest.mark.parametrize(
    ("given", "engine", "reason"),
    [
        (call(), "banded", "the fastest"),
        (call("shaw"), "clipped", "no linear bias"),
        (call("da_transformer"), "rescaled", "no vectors of clipped distances"),
        (call("transformer_xl"), "wide", "does not rescale scores"),
        (call("fire"), "chunked", "pair by pair, which is slow by nature"),
        (call(dtype=torch.float64), "wide", "float32, bfloat16"),
        (call(softcap=5.0), "chunked", "soft cap"),
        (call(dropout=0.1), "wide", "dropout"),
        (call(sinks=torch.zeros(4)), "chunked", "attention sinks"),
        (call(weights=True), "reference", "weights were asked for"),
        (WIDE, "wide", "here they have 32 and not 16"),
        (NARROW, "chunked", "the scheme adds vectors to values, which have 10 dimensions"),
    ],
)
def test_the_choice_and_its_reason(given, engine, reason):
    chosen = choose("auto", given)
    assert chosen.engine == engine
    assert reason in str(chosen)
    if engine != "banded":
        with pytest.raises(ValueError, match=r"attention='banded' cannot compute this call: .*'auto'"):
            choose("banded", given)


@pytest.mark.parametrize(
    ("case", "length", "dtype", "engine"),
    [
        ("alibi", 1100, torch.float32, "banded"),
        ("alibi", 1000, torch.bfloat16, "toeplitz"),
        ("shaw", 300, torch.float32, "clipped"),
        ("da_transformer", 300, torch.float32, "rescaled"),
    ],
)
def test_short_calls_go_to_simpler_engines(case, length, dtype, engine, monkeypatch):
    for engine_, floors in FLOORS.items():
        monkeypatch.setattr(engine_, "floors", floors)
    assert choose("auto", call(case, length, dtype)).engine == engine


def test_which_engine(monkeypatch):
    for engine_, floors in FLOORS.items():
        monkeypatch.setattr(engine_, "floors", floors)
    model = patch_model(tiny("llama"), "alibi")
    assert which_engine(model, 1, keys=4096).engine == "decode"
    assert which_engine(model, 1, keys=512).engine == "reference"
    assert which_engine(patch_model(tiny("gemma2"), "alibi"), 4096).engine == "chunked"  # it caps its scores
    with pytest.raises(NotPatchedError):
        which_engine(tiny("llama"), 4096)
    with pytest.raises(ValueError, match="cannot compute this call"):
        which_engine(patch_model(tiny("llama"), "shaw", attention="banded"), 4096)


@torch.no_grad()
def test_layers_with_and_without_windows_of_heads_keep_biases_of_their_own():
    """What layers compute of positions is kept for the next ones, in a step of generation too."""
    schemes = [Alibi(layers=[0]), Alibi(layers=[1], windows=[2, 2, 3, 3])]
    model, ids = patch_model(tiny("llama"), schemes), tokens(1, 1101)
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    assert_same(model(ids[:, -1:], past_key_values=cache).logits, model(ids, use_cache=False).logits[:, -1:])


OTHERS = {f"far_rope {kind}": ("far_rope", {"kind": kind}) for kind in ("rerope", "self_extend", "dual_chunk")}
OTHERS |= {"rope_by_head": ("rope_by_head", {}), "rope_by_head [0]": ("rope_by_head", {"pairs": [0]})}


@torch.no_grad()
@pytest.mark.rows(default=8, slow=24)
@matrix(case=[*SCORE_SCHEMES, *OTHERS], length=[16, 40, 700])
def test_which_engine_names_the_engine_that_runs(case, length, monkeypatch):
    """Also where the scheme rotates queries and keys itself, and hands on what has a simpler formula, or none."""
    scheme, options = OTHERS.get(case, (case, {}))
    model = patch_model(tiny("llama", max_position_embeddings=64), scheme, seed=0, **options).eval()
    said, ran = which_engine(model, length).engine, []
    monkeypatch.setattr(dispatch, "choose", lambda *given: ran.append(choose(*given)) or ran[-1])
    model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    assert said == ran[0].engine


@pytest.mark.rows(default=20, slow=50)
@torch.no_grad()
@matrix(crossed(SCORE_SCHEMES, FAMILIES), case=None, family=None)
def test_every_family_by_its_engine_equals_the_reference(case, family):
    model = patched_model(case, family)
    ids = tokens(2, 50)
    fast = model(ids, use_cache=False).logits
    for module in model.modules():
        if isinstance(getattr(module, STATE, None), OnAttention):
            setattr(module, STATE, replace(OnAttention.of(module), engine="reference"))
    assert_same(fast, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("case", {FORMS.get(case): case for case in SCORE_SCHEMES}.values())  # one of each form
def test_dropout_is_not_ignored(case):
    model, ids = patched_model(case, "llama", attention_dropout=0.5).train(), tokens(2, 50)
    torch.manual_seed(0)
    first, second = (model(ids, use_cache=False).logits for _ in range(2))
    assert (first - second).abs().max() > 1e-2
    torch.manual_seed(0)
    model(ids, labels=ids, use_cache=False).loss.backward()  # recomputed with the same dropped weights
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_inside_a_sequence_does_not_part_it(family):
    ids = tokens(1, 40)
    mask = torch.ones_like(ids)
    mask[0, 15:20] = 0
    model = patch_model(tiny(family), "alibi")
    joined = patch_model(tiny(family), "alibi", attention="reference")
    assert_same(
        model(ids, attention_mask=mask).logits[mask.bool()], joined(ids, attention_mask=mask).logits[mask.bool()]
    )
    with pytest.raises(ValueError, match="padding inside a document"):
        patch_model(tiny(family), "alibi", attention="banded")(ids, attention_mask=mask)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad):
    q, k, v = torch.randn(3, 1, 2, 90, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([0.5, 0.1])
    expected = banded.attend(q, k, v, slopes, scaling=SCALING)
    q[0, 0, 50, 0] = bad
    actual = banded.attend(q, k, v, slopes, scaling=SCALING)
    assert actual[0, 0, 50].isnan().all()
    actual[0, 0, 50] = expected[0, 0, 50]
    assert (actual - expected).abs().max() <= 1e-5
