"""Fast engines compute what the reference engine computes in float64, and the choice among them never changes a result."""

import copy
import itertools
import math
import pickle
import re

import pytest
import torch
from calls import (
    FORMLESS,
    FORMS,
    HEAD_DIM,
    MODULES,
    SCALING,
    SITUATIONS,
    build,
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
from situations import SCORE_CASES, SCORE_SCHEMES, assert_same, patched_model, randomize
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc import NotPatchedError, engines, patch_model, which_engine
from hf_posenc.engines import banded, decode, dispatch, reference, toeplitz
from hf_posenc.engines.dispatch import choose, find_engine
from hf_posenc.engines.spans import SpanEngine
from hf_posenc.layer_state import STATE, OnAttention, use_engine
from hf_posenc.modules import WithoutPositions
from hf_posenc.positions import Positions

FLOORS = {engine: engine.floors for engine in dispatch.ENGINES}


@pytest.fixture(autouse=True)
def every_call_by_the_fastest(monkeypatch):
    never_short(monkeypatch)


# ------------------------------------------------------------------------------------------------ against the reference


ENGINES = {
    **{
        engine: tuple(name for name, form in FORMS.items() if form in find_engine(engine).forms)
        for engine in ("banded", "toeplitz", "clipped", "rescaled", "skewed")
    },
    "chunked": tuple(MODULES),
}
EXPECTED_REFUSALS = {
    # The far keys are computed without a mask: the engine would need one for them to carry windows.
    ("clipped", "it has no sliding windows"),
    *(
        (engine.name, "padded keys in a cache, padding inside a document, or position_ids with gaps")
        for engine in dispatch.ENGINES
        if isinstance(engine, SpanEngine)
    ),
    *(
        (engine.name, "the first tokens stay visible outside the window, and it computes near keys only")
        for engine in dispatch.ENGINES
        if isinstance(engine, SpanEngine)
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


def results(engine, module, positions, tensors, shown, weight):
    """Return output and the gradients of inputs and parameters."""
    q, k, v = tensors
    if engine == "reference":
        output, _ = reference.attend(call_of(module, q, k, v, positions))
    else:
        call = call_of(module, q, k, v, positions)
        if (reason := find_engine(engine).why_not(call)) is not None:
            assert (engine, reason) in EXPECTED_REFUSALS
            pytest.skip(reason)
        output, weights = dispatch.attend(call, engine)
        assert weights is None
    if shown is not None:
        output = output * shown[:, :, None, None]
    leaves = [*tensors, *module.parameters()]
    return [output, *torch.autograd.grad((output.double() * weight).sum(), leaves)]


@pytest.mark.rows(default=250)
@matrix(row=ROWS, situation=SITUATIONS, heads_and_groups=[(4, 1), (6, 3), (5, 5)])
def test_against_the_reference(row, situation, heads_and_groups):
    (engine, case), (heads, groups) = row, heads_and_groups
    positions, shown = SITUATIONS[situation]()
    module, tensors = MODULES[case](heads), inputs(positions, heads, groups, torch.float32)
    weight = seeded(2, tensors[0].shape[2], heads, HEAD_DIM)
    actual = results(engine, module, positions, tensors, shown, weight)
    wide = [each.detach().double().requires_grad_() for each in tensors]
    expected = results("reference", copy.deepcopy(module).double(), positions, wide, shown, weight)
    # Transformer-XL's terms are of the order of 10; DA-Transformer's gradients are sums of terms times distances that
    # cancel, in the reference engine's float32 as well; so are those of FIRE's biases.
    compare(
        actual,
        expected,
        {"transformer_xl": 4e-5, "fire": 5e-5, "da_transformer": 2e-4, "da_transformer-signed": 2e-4}.get(case, 1e-5),
    )


@matrix(situation=SITUATIONS, heads_and_groups=[(4, 1), (6, 3)], window=[None, 17])
def test_attention_without_positions(situation, heads_and_groups, window):
    heads, groups = heads_and_groups
    positions, shown = SITUATIONS[situation]()
    positions = positions if window is None else positions.within(window)
    tensors = inputs(positions, heads, groups, torch.float32)
    weight = seeded(2, tensors[0].shape[2], heads, HEAD_DIM)
    actual = results("sdpa", WithoutPositions(), positions, tensors, shown, weight)
    wide = [each.detach().double().requires_grad_() for each in tensors]
    compare(actual, results("reference", WithoutPositions(), positions, wide, shown, weight), 1e-5)


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
        assert (module.form(tensors[0]).table(60).detach() / plain - 1).abs().max() < 1e-4


@pytest.mark.rows(default=100)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("engine", "case"), ROWS)
def test_bfloat16(engine, case, situation):
    positions, shown = SITUATIONS[situation]()
    module, tensors = MODULES[case](4), inputs(positions, 4, 2, torch.bfloat16)
    weight = seeded(2, tensors[0].shape[2], 4, HEAD_DIM)
    actual = results(engine, module, positions, tensors, shown, weight)
    assert actual[0].dtype == torch.bfloat16
    wide = [each.detach().double().requires_grad_() for each in tensors]
    expected = results("reference", copy.deepcopy(module).double(), positions, wide, shown, weight)
    # The kernel rounds weights to 8 bits before it sums values; relative norm, since single entries are noise.
    # The gradients of the clipped engine's tables are differences: the score gradients of a row add up to 0. So are those
    # of the one number per head that bends a logarithm.
    tolerance = 0.04 if engine == "clipped" or case in ("kerple", "fire") else 0.02
    # A unit of FIRE's network that no distance switches off has an offset without effect: its gradient is 0, and what
    # is left of a sum over all pairs is rounding.
    remainder = 2e-4 if case == "fire" else 1e-6
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() <= tolerance * e.norm() + remainder


# ------------------------------------------------------------------------------------------- sinks, and smaller values


def logits_of(call):
    wide = call.widened()
    return wide.positions.mask(wide.formula.scores(wide))


def with_sinks(module, q, k, v, positions, sinks):
    """Return the output with sinks, from that without: they hold a share of each row, which no value gets."""
    call = call_of(module, q, k, v, positions)
    total, (output, _) = logits_of(call).logsumexp(-1), reference.attend(call)  # (B, H, Q)
    return output * torch.sigmoid(total - sinks[:, None]).transpose(1, 2)[..., None]


@matrix(
    [
        (*row, dtype)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for row in [
            *itertools.product(["reference", "chunked"], MODULES, SITUATIONS),
            *itertools.product(["decode"], [case for case in MODULES if case not in FORMLESS], CACHED),
        ]
    ],
    engine=None,
    case=None,
    situation=None,
    dtype=None,
)
def test_attention_sinks(engine, case, situation, dtype):
    positions, shown = SITUATIONS[situation]()
    module, heads = MODULES[case](6), 6
    tensors = inputs(positions, heads, 3, dtype)
    fitting = copy.deepcopy(module).double() if dtype == torch.float64 else module
    # Around what the scores of a row add up to, so that they hold much of some rows and little of others.
    sums = (
        logits_of(call_of(module, *tensors, positions))
        .logsumexp(-1)
        .detach()
        .transpose(0, 1)
        .flatten(1)
        .median(-1)
        .values
    )
    sinks = (sums + torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])).requires_grad_()
    call = call_of(fitting, *tensors, positions, sinks=sinks)
    with torch.set_grad_enabled(engine != "decode"):
        output, _ = dispatch.attend(call, engine)
    wide = [each.detach().double().requires_grad_() for each in tensors]
    exact = sinks.detach().double().requires_grad_()
    expected = with_sinks(copy.deepcopy(module).double(), *wide, positions, exact)
    plain, _ = reference.attend(call_of(copy.deepcopy(module).double(), *wide, positions))
    seen = torch.ones_like(expected[..., :1]) if shown is None else shown[:, :, None, None]
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]
    assert ((output - expected) * seen).norm() <= tolerance * (expected * seen).norm()
    assert ((plain - expected) * seen).norm() > 0.05 * (expected * seen).norm()
    if output.requires_grad:
        weight = seeded(2, output.shape[1], heads, HEAD_DIM) * seen
        (mine,) = torch.autograd.grad((output.double() * weight).sum(), sinks)
        (theirs,) = torch.autograd.grad((expected * weight).sum(), exact)
        assert (mine - theirs).norm() <= 10 * tolerance * theirs.norm()


@pytest.mark.parametrize("engine", ["banded", "toeplitz", "clipped", "rescaled", "skewed"])
def test_an_engine_without_sinks_leaves_them_to_one_that_has(engine):
    case = ENGINES[engine][0]
    given = call(case, sinks=torch.zeros(4))
    assert choose("auto", call(case)).engine != "chunked"
    assert choose("auto", given).engine == "chunked"
    with pytest.raises(ValueError, match="attention sinks"):
        choose(engine, given)


@pytest.mark.rows(default=100)
@matrix(
    [
        *((*row, situation, 10) for row in ROWS for situation in SITUATIONS if row[0] != "clipped"),
        *(("clipped", "shaw-keys-only", situation, 10) for situation in SITUATIONS),
        *((*row, 24) for row in itertools.product(["chunked"], MODULES, SITUATIONS)),
        *(
            (*row, size)
            for row in itertools.product(["decode"], ["alibi", *ENGINES["clipped"]], CACHED)
            for size in (10, 24)
        ),
    ],
    engine=None,
    case=None,
    situation=None,
    size=None,
)
def test_values_of_another_size(engine, case, situation, size):
    """As in latent attention: V is smaller than D as a rule."""
    positions, shown = SITUATIONS[situation]()
    module = MODULES[case](4, value_dim=size)
    q, k, v = inputs(positions, 4, 1, torch.float32)
    v = torch.randn(*v.shape[:-1], size, generator=torch.Generator().manual_seed(5)).requires_grad_()
    given = call_of(module, q, k, v, positions)
    with torch.set_grad_enabled(engine != "decode"):
        if (reason := find_engine(engine).refusal(given)) is not None:
            assert (engine, reason) in EXPECTED_REFUSALS
            pytest.skip(reason)
        output, _ = dispatch.attend(given, engine)
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    expected, _ = reference.attend(call_of(copy.deepcopy(module).double(), *wide, positions))
    assert output.shape == expected.shape == (2, q.shape[2], 4, size)
    seen = torch.ones_like(expected[..., :1]) if shown is None else shown[:, :, None, None]
    assert ((output - expected) * seen).norm() <= 2e-5 * (expected * seen).norm()
    if output.requires_grad:
        weight = seeded(*expected.shape) * seen
        mine = torch.autograd.grad((output.double() * weight).sum(), (q, k, v))
        theirs = torch.autograd.grad((expected * weight).sum(), wide)
        for a, e in zip(mine, theirs, strict=True):
            assert (a - e).norm() <= 2e-4 * e.norm().clamp(min=1e-6)


def test_values_that_an_engine_cannot_take():
    """Larger ones, and smaller ones to which a scheme adds vectors of their size."""
    positions = Positions.causal(40)
    q, k, v = inputs(positions, 4, 1, torch.float32)
    given = call_of(MODULES["alibi"](4), q, k, torch.cat([v, v], -1), positions)
    assert choose("auto", given).engine == "chunked"
    with pytest.raises(ValueError, match="here they have 32 and not 16"):
        choose("banded", given)
    given = call_of(MODULES["shaw"](4), q, k, v[..., :10], positions)
    assert choose("auto", given).engine == "chunked"
    with pytest.raises(ValueError, match="the scheme adds vectors to values, which have 10 dimensions"):
        choose("clipped", given)


# -------------------------------------------------------------------------------------------------------------- decoding


def step(engine, module, positions, tensors, **options):
    return dispatch.attend(call_of(module, *tensors, positions, vector_scaling=0.7 * SCALING, **options), engine)


@torch.no_grad()
@matrix(
    case=[case for case in MODULES if case not in FORMLESS],
    situation=CACHED,
    heads_and_groups=[(4, 1), (6, 3)],
    option=[None, "softcap", "weights"],
)
def test_a_step_of_generation(case, situation, heads_and_groups, option, monkeypatch):
    heads, groups = heads_and_groups
    options = {None: {}, "softcap": {"softcap": 2.0}, "weights": {"weights": True}}[option]
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


@torch.no_grad()
def test_what_is_kept_between_steps_follows_the_weights(monkeypatch):
    module, positions = MODULES["transformer_xl"](4), Positions.causal(1, 40)
    tensors, made = inputs(positions, 4, 1, torch.float32), []
    original = type(module).projected_sinusoids
    monkeypatch.setattr(
        type(module), "projected_sinusoids", lambda self, n, like: made.append(n) or original(self, n, like)
    )

    def stepped():
        made.clear()
        output = step("decode", module, positions, tensors)[0]
        decoded = [n for n in made if n]
        assert (output - step("chunked", copy.deepcopy(module), positions, tensors)[0]).abs().max() <= 1e-5
        return decoded

    assert stepped() == [1024]
    assert stepped() == []
    changed = torch.randn(module.position_projection.shape, generator=torch.Generator().manual_seed(2))
    for change in (
        lambda weight: weight.mul_(1.5),  # as an optimizer does
        lambda weight: weight.data.lerp_(changed, 0.1),  # as a moving average does, which leaves no trace
        lambda weight: weight.data.view(-1)[-1:].neg_(),
        lambda weight: weight.data.copy_(weight.data.flip(0)),
        lambda weight: module.load_state_dict({**module.state_dict(), "position_projection": changed}),
        lambda weight: setattr(weight, "data", weight.data * 2),
        lambda weight: setattr(module, "position_projection", torch.nn.Parameter(weight * 0.5)),
    ):
        change(module.position_projection)
        assert stepped() == [1024]
        assert stepped() == []
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert module.kept.table is not None
        assert copied.kept.table is copied.kept.weight is None
    assert len(module.state_dict()) == 3
    step("reference", module, Positions.causal(4), inputs(Positions.causal(4), 4, 1, torch.float32))
    assert module.kept.table is None


# --------------------------------------------------------------------------------------------------------------- banding


@pytest.mark.parametrize("engine", ["reference", "chunked", "clipped", "decode"])
def test_one_vector_for_all_distances(engine):
    """With `max_distance=0` softmax does not see the vector of keys, and that of values is added to every output."""
    module = build("shaw", 4, max_distance=0)
    positions = Positions.causal(1 if engine == "decode" else 90, 90)
    q, k, v = tensors = inputs(positions, 4, 2, torch.float32)
    leaves = [*tensors, *module.parameters()]
    plain = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=engine != "decode", scale=SCALING, enable_gqa=True
    )
    expected = (plain + module.value_embeddings[0]).transpose(1, 2)
    weight = seeded(*expected.shape)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves, materialize_grads=True, allow_unused=True)
    if engine == "decode":
        with torch.no_grad():
            compare([step(engine, module, positions, tensors)[0]], [expected], 1e-5)
    elif engine == "reference":
        output, _ = reference.attend(call_of(module, *tensors, positions))
        compare([output, *torch.autograd.grad((output * weight).sum(), leaves)], [expected, *wanted], 1e-5)
    else:
        compare(results(engine, module, positions, tensors, None, weight), [expected, *wanted], 1e-5)


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


def test_what_all_keys_have_in_common_does_not_widen_windows():
    """Softmax does not see it; trained models have much of it, and large single coordinates that queries avoid."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, 8, 512, HEAD_DIM, generator=generator) for _ in range(2))
    slopes = torch.tensor([2.0**-n for n in range(1, 9)])
    needed = banded.windows(q, k, slopes, SCALING, 64)
    shifted = banded.windows(q, HARD["in common"](k), slopes, SCALING, 64)
    assert (shifted - needed).abs().max() <= 0.02 * needed.max()
    q[..., 0] *= 0.01
    large = banded.windows(q, HARD["one large coordinate"](k), slopes, SCALING, 64)
    product = (q.norm(dim=-1) * HARD["one large coordinate"](k).norm(dim=-1).amax() * SCALING).amax()
    assert (large[:, -1] * slopes).max() < 0.7 * product


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


@pytest.mark.rows(default=4)
@pytest.mark.parametrize(("engine", "case"), ROWS)
def test_nothing_grows_with_the_square_of_the_length(engine, case):
    def largest(length):
        positions, module = Positions.causal(length), MODULES[case](4)
        tensors = inputs(positions, 4, 1, torch.float32, batch=1)
        with Largest() as probe:
            results(engine, module, positions, tensors, None, torch.ones(()))
        return probe.numel

    assert largest(512) <= 2.2 * largest(256)
    if engine == "chunked":
        positions, tensors = Positions.causal(512), inputs(Positions.causal(512), 4, 1, torch.float32, batch=1)
        with Largest() as probe:
            results("reference", MODULES[case](4), positions, tensors, None, torch.ones(()))
        assert probe.numel >= 4 * 512 * 512  # what the probe would see


@pytest.mark.parametrize("where", [lambda n: windowed(n, 9), lambda n: left_padded(n, 13)], ids=["window", "padding"])
def test_masks_of_attention_without_positions_do_not_grow_with_the_square_of_the_length(where, monkeypatch):
    monkeypatch.undo()  # the sizes as they are

    def largest(length):
        positions, shown = where(length)
        tensors = inputs(positions, 4, 1, torch.float32)
        with Largest() as probe:
            results("sdpa", WithoutPositions(), positions, tensors, shown, torch.ones(()))
        return probe.numel

    assert largest(2048) <= 2.2 * largest(1024)


@pytest.mark.parametrize(("engine", "case"), [row for row in ROWS if row[0] != "chunked"])
def test_a_second_derivative_is_refused(engine, case):
    module, tensors = MODULES[case](4), inputs(Positions.causal(40), 4, 1, torch.float32)
    output, _ = dispatch.attend(call_of(module, *tensors, Positions.causal(40)), engine)
    (gradient,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# ------------------------------------------------------------------------------------------------------------ the choice


def call(case="alibi", length=40, dtype=torch.float32, **options):
    positions = Positions.causal(length)
    return call_of(MODULES[case](4), *inputs(positions, 4, 1, dtype), positions, **options)


@pytest.mark.parametrize(
    ("given", "engine", "reason"),
    [
        (call(), "banded", "the fastest"),
        (call("shaw"), "clipped", "no linear bias"),
        (call("da_transformer"), "rescaled", "no vectors of clipped distances"),
        (call("transformer_xl"), "skewed", "does not rescale scores"),
        (call("cope"), "chunked", "does not rescale scores"),
        (call("fire"), "chunked", "does not rescale scores"),
        (call(dtype=torch.float64), "chunked", "float32 and bfloat16"),
        (call(softcap=5.0), "chunked", "soft cap"),
        (call(dropout=0.1), "chunked", "dropout"),
        (call(weights=True), "reference", "weights were asked for"),
        (call(dtype=torch.bfloat16), "banded", "the fastest"),
    ],
)
def test_the_choice_and_its_reason(given, engine, reason):
    chosen = choose("auto", given)
    assert chosen.engine == engine
    assert reason in str(chosen)


@pytest.mark.parametrize(
    ("case", "length", "dtype", "engine"),
    [
        ("alibi", 100, torch.float32, "reference"),
        ("alibi", 300, torch.float32, "toeplitz"),
        ("alibi", 1100, torch.float32, "banded"),
        ("alibi", 1000, torch.bfloat16, "toeplitz"),
        ("alibi", 4200, torch.bfloat16, "banded"),
        ("shaw", 100, torch.float32, "reference"),
        ("shaw", 300, torch.float32, "clipped"),
        ("da_transformer", 100, torch.float32, "reference"),
        ("da_transformer", 300, torch.float32, "rescaled"),
        ("transformer_xl", 300, torch.float32, "skewed"),
    ],
)
def test_short_calls_go_to_simpler_engines(case, length, dtype, engine, monkeypatch):
    for engine_, floors in FLOORS.items():
        monkeypatch.setattr(engine_, "floors", floors)
    chosen = choose("auto", call(case, length, dtype))
    assert chosen.engine == engine


def test_an_engine_that_was_asked_for_is_taken_or_refused():
    assert choose("toeplitz", call()).engine == "toeplitz"
    for engine in ("banded", "toeplitz"):
        with pytest.raises(ValueError, match=f"attention='{engine}' cannot compute this call: .*'auto'"):
            choose(engine, call("shaw"))
    assert find_engine("reference").why_not(call("shaw", weights=True)) is None


def test_the_table_of_engines_is_that_of_their_classes():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", engines.__doc__, re.MULTILINE)
    assert [name for name, _ in rows] == list(dispatch.NAMES)
    for (_, listed), engine in zip(rows, dispatch.ENGINES, strict=True):
        assert set(re.findall(r"\b[A-Z]\w+", listed)) == {each.__name__ for each in engine.forms or ()}


@torch.no_grad()
@pytest.mark.parametrize(("queries", "engine"), [(10, "decode"), (20, "chunked")])
def test_padding_in_a_filled_cache_is_for_engines_with_masks(queries, engine):
    positions, valid = left_padded(40, 5)
    later = positions.cut(slice(40 - queries, 40), slice(0, 40))
    tensors = inputs(later, 4, 1, torch.float32)
    assert choose("auto", call_of(MODULES["alibi"](4), *tensors, later)).engine == engine
    assert not valid.all()


def test_which_engine_of_a_model_without_weights():
    with torch.device("meta"):
        model = type(tiny("llama"))(tiny("llama").config)
    with pytest.raises(ValueError, match="on the meta device, where nothing computes attention"):
        which_engine(patch_model(model, "alibi"), 128)


def test_a_model_whose_embeddings_ask_for_gradients_is_patched():
    """As transformers has it for adapters with activation checkpointing; torch warns of what is not detached."""
    model = tiny("llama")
    model.enable_input_require_grads()
    patch_model(model, "sinusoidal")


def test_which_engine(monkeypatch):
    for engine_, floors in FLOORS.items():
        monkeypatch.setattr(engine_, "floors", floors)
    model = patch_model(tiny("llama"), "alibi")
    assert which_engine(model, 4096).engine == "banded"
    assert which_engine(model, 1, keys=4096).engine == "decode"
    assert which_engine(model, 1, keys=512).engine == "reference"
    assert which_engine(patch_model(tiny("llama"), "transformer_xl"), 1, keys=512).engine == "decode"
    assert which_engine(model, 1, keys=4096, weights=True).engine == "decode"
    assert which_engine(model, 4096, weights=True).engine == "reference"
    assert which_engine(patch_model(tiny("llama"), "shaw"), 4096).engine == "clipped"
    assert which_engine(patch_model(tiny("llama"), "shaw", share_layers=True), 4096).engine == "clipped"
    assert which_engine(patch_model(tiny("llama"), "transformer_xl"), 4096).engine == "skewed"
    assert which_engine(patch_model(tiny("llama"), "da_transformer"), 4096).engine == "rescaled"
    assert which_engine(patch_model(tiny("gemma2"), "alibi"), 4096).engine == "chunked"  # it caps its scores
    assert which_engine(patch_model(tiny("llama"), "rope"), 4096).engine == "sdpa"
    with pytest.raises(NotPatchedError):
        which_engine(tiny("llama"), 4096)
    forced = patch_model(tiny("llama"), "shaw", attention="banded")
    with pytest.raises(ValueError, match="cannot compute this call"):
        which_engine(forced, 4096)


KINDS = {
    f"far_rope {kind}": ("far_rope", {"kind": kind}) for kind in ("rerope", "self_extend", "dual_chunk", "dynamic")
}
OTHERS = KINDS | {"rope_by_head": ("rope_by_head", {}), "rope_by_head [0]": ("rope_by_head", {"pairs": [0]})}


@torch.no_grad()
@pytest.mark.rows(default=8)
@matrix(case=[*SCORE_SCHEMES, *OTHERS], length=[16, 40, 700])
def test_which_engine_names_the_engine_that_runs(case, length, monkeypatch):
    """Also where the scheme rotates queries and keys itself, and hands on what has a simpler formula, or none."""
    scheme, options = OTHERS.get(case, (case, {}))
    model = patch_model(tiny("llama", max_position_embeddings=64), scheme, seed=0, **options).eval()
    said, ran = which_engine(model, length).engine, []
    monkeypatch.setattr(dispatch, "choose", lambda *given: ran.append(choose(*given)) or ran[-1])
    model(torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    assert said == ran[0].engine


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", SCORE_SCHEMES)
def test_every_family_by_its_engine_equals_the_reference(case, family):
    model = patched_model(case, family)
    ids = tokens(2, 50)
    fast = model(ids, use_cache=False).logits
    for module in model.modules():
        if isinstance(getattr(module, STATE, None), OnAttention):
            use_engine(module, "reference")
    assert_same(fast, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("case", SCORE_CASES)
def test_dropout_is_not_ignored(case):
    model = patched_model(case, "llama", attention_dropout=0.5).train()
    ids = tokens(2, 50)
    torch.manual_seed(0)
    first = model(ids, use_cache=False).logits
    second = model(ids, use_cache=False).logits
    assert (first - second).abs().max() > 1e-2
    torch.manual_seed(0)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()  # recomputed with the same dropped weights, or the gradients would be of another function
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_model_by_a_forced_engine():
    ids = tokens(2, 50)
    expected = randomize(patch_model(tiny("llama"), "alibi", attention="reference"))(ids).logits
    for engine in ("banded", "toeplitz", "chunked"):
        assert_same(randomize(patch_model(tiny("llama"), "alibi", attention=engine))(ids).logits, expected)


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
