"""The CUDA engine: what it does to scores and which pairs it shows, on a CPU; its kernels where there is a GPU."""

import copy
import dataclasses
import math

import pytest
import torch
from calls import HEAD_DIM, MODULES, SCALING, SITUATIONS, call_of, compare, inputs, seeded
from families import tiny, tokens
from matrix import matrix
from situations import randomize
from torch.nn.attention import flex_attention as upstream

from hf_posenc import patch_model
from hf_posenc.engines import dispatch, flex, reference, selftest
from hf_posenc.engines.dispatch import choose, find_engine
from hf_posenc.positions import Positions, pack, unpack

CASES = ("alibi", "alibi-trainable", "t5", "kerple", "kerple-power", "shaw-keys-only", "da_transformer")
pytestmark = [
    # What compiling itself gives rise to: torch looks at gradients of captured tensors, and uses what it deprecates.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
no_gpu = not torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(no_gpu, reason="there is no CUDA device")
SITUATIONS = {
    **{name: make for name, make in SITUATIONS.items() if not name.endswith("first keys kept")},  # refused
    "long": lambda: (Positions.causal(300), None),
    "padded in the middle": lambda: holed(150, 40, 70),
    "gapped": lambda: (Positions.causal(60).follow(torch.arange(60)[None] * 3), None),
}


def holed(length, start, stop):
    index, valid = torch.arange(length)[None], torch.ones(2, length, dtype=torch.bool)
    valid[1, start:stop] = False
    place = valid.cumsum(-1) - 1
    channel = pack(
        index, index, query_positions=place, key_positions=place, query_valid=valid, key_valid=valid, window=100
    )
    return unpack(channel, length), valid


@pytest.fixture
def dense(monkeypatch):
    """FlexAttention uncompiled: Q x L numbers, with its backward, which upstream only keeps from CPUs."""
    monkeypatch.setattr(upstream, "_validate_device", lambda q, k, v: None)

    return upstream.flex_attention


def by_flex(module, positions, tensors, shown, weight, kernel, softcap=None):
    output = flex.attend(
        module.form(tensors[0]), *tensors, positions, scaling=SCALING, softcap=softcap, kernel=kernel
    ).transpose(1, 2)
    return _with_gradients(module, output, tensors, shown, weight)


def by_reference(module, positions, tensors, shown, weight, softcap=None):
    module = copy.deepcopy(module).double()
    tensors = [t.detach().double().requires_grad_() for t in tensors]
    output, _ = reference.attend(call_of(module, *tensors, positions, softcap=softcap))
    return _with_gradients(module, output, tensors, shown, weight)


def _with_gradients(module, output, tensors, shown, weight):
    output = output if shown is None else output * shown[:, :, None, None]
    leaves = [*tensors, *module.parameters()]
    return [output, *torch.autograd.grad((output.double() * weight).sum(), leaves)]


@pytest.mark.rows(default=2, slow=20)
@matrix(case=CASES, situation=SITUATIONS)  # each is traced anew
def test_against_the_reference(case, situation, dense):
    groups = 1 if situation in ("causal", "packed") else 2
    positions, shown = SITUATIONS[situation]()
    module, tensors = MODULES[case](4), inputs(positions, 4, groups, torch.float32)
    weight = seeded(2, tensors[0].shape[2], 4, HEAD_DIM)
    given = (module, positions, tensors, shown, weight)
    compare(by_flex(*given, dense), by_reference(*given), 2e-5)


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("case", CASES)
def test_soft_cap(case, dense):
    positions = Positions.causal(60)
    module, tensors = MODULES[case](4), inputs(positions, 4, 1, torch.float32)
    given = (module, positions, tensors, None, seeded(2, 60, 4, HEAD_DIM))
    capped = by_flex(*given, dense, softcap=0.5)
    compare(capped, by_reference(*given, softcap=0.5), 2e-5)
    assert (capped[0] - by_flex(*given, dense)[0]).abs().max() > 1e-3


# ---------------------------------------------------------------------------------------------------------------- blocks


def blocks_of(mask, queries, keys):
    """Return which pairs are in kept blocks and which in blocks without a mask, (B, H, Q, L) bool."""

    def dense_of(counts, indices):
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        out = torch.zeros(indices.shape, dtype=torch.bool).scatter_(-1, indices.long(), listed)
        return out.repeat_interleave(128, -1).repeat_interleave(128, -2)[..., :queries, :keys]

    partial = dense_of(mask.kv_num_blocks, mask.kv_indices)
    full = dense_of(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    return partial | full, full


def large(name):
    index = torch.arange(700)[None]
    if name == "causal":
        return Positions.causal(700)
    if name == "prefill":
        return Positions.causal(200, 700)
    if name == "static":
        return unpack(pack(index[:, 300:500], torch.arange(1024)[None]), 200)
    if name == "window":
        return unpack(pack(index, index, window=150), 700)
    if name == "packed":
        segment = torch.cat([torch.full((n,), i) for i, n in enumerate([128, 300, 17, 255])])[None]
        return unpack(pack(index, index, query_segment=segment, key_segment=segment), 700)
    valid = torch.stack([index[0] >= 300, index[0] >= 0, (index[0] < 130) | (index[0] > 400)])
    place = valid.cumsum(-1) - 1
    channel = pack(index, index, query_positions=place, key_positions=place, query_valid=valid, key_valid=valid)
    return unpack(channel, 700)


@pytest.mark.parametrize(
    ("name", "share"),  # of all blocks of keys, those that need to be kept at most
    [
        ("causal", 21 / 36),
        ("prefill", 11 / 12),
        ("static", 0.5),
        ("window", 15 / 36),
        ("packed", 0.4),
        ("padded", 0.5),
    ],
)
def test_blocks_show_what_is_visible(name, share):
    positions = large(name)
    visible = positions.visible()
    batch, _, queries, keys = visible.shape
    mask = flex.block_mask(positions, batch)
    kept, full = blocks_of(mask, queries, keys)
    assert not (visible & ~kept).any()
    assert not (full & ~visible).any()
    assert mask.kv_num_blocks.add(mask.full_kv_num_blocks).float().mean() <= share * mask.kv_indices.shape[-1] + 1e-3
    assert full.any() or name in ("window",)
    b, q, k = torch.meshgrid(torch.arange(batch), torch.arange(queries), torch.arange(keys), indexing="ij")
    assert torch.equal(mask.mask_mod(b, 0, q, k), visible[:, 0])


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("name", ["causal", "packed", "padded"])
def test_blocks_out_of_reach_weigh_nothing(name, scale):
    positions, heads = large(name), 4
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, h, 700, HEAD_DIM, generator=generator) * scale for h in (heads, 2))
    slopes = torch.tensor([4.0, 0.5, 0.1, -0.1])
    reach = flex.reaches(q, k, slopes, positions, SCALING)
    assert reach[3].isinf().all()
    kept, _ = blocks_of(flex.block_mask(positions, 3, reach), 700, 700)
    logits = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * SCALING
    logits = logits - slopes.double()[:, None, None] * positions.distance()
    weights = logits.masked_fill(~positions.visible(), -math.inf).softmax(-1).nan_to_num(0)
    weights = weights * positions.query_valid[:, None, :, None]
    assert weights.masked_fill(kept, 0).sum(-1).max() <= 2.0**-24
    everything, _ = blocks_of(flex.block_mask(positions, 3), 700, 700)
    assert kept[:, 0].sum() < everything[:, 0].sum() or name == "packed" or scale == 4.0
    assert torch.equal(kept[:, 3], everything[:, 0].expand_as(kept[:, 3]))


def test_reach_is_unknown_with_other_keys_or_bad_numbers():
    q = torch.randn(1, 2, 200, HEAD_DIM)
    slopes = torch.tensor([1.0, 0.5])
    shifted = unpack(pack(torch.arange(100, 300)[None], torch.arange(200)[None]), 200)
    assert flex.reaches(q, q, slopes, shifted, SCALING).isinf().all()
    q[0, 0, 150] = math.nan
    reach = flex.reaches(q, q, slopes, Positions.causal(200), SCALING)
    assert reach[0].isinf().tolist() == [False, True]
    assert reach[1].isfinite().all()


# ------------------------------------------------------------------------------------------------------------ the choice


def call(case, **options):
    tensors = inputs(Positions.causal(40), 4, 1, torch.float32)
    return call_of(MODULES[case](4), *tensors, Positions.causal(40), **options)


class Elsewhere(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda")


def elsewhere(case, **options):
    given = call(case, **options)
    return dataclasses.replace(given, query=given.query.as_subclass(Elsewhere))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call("shaw"), "products of queries with labels"),
        (elsewhere("shaw"), "vectors for values"),
        (call("transformer_xl"), "neither a table of distances"),
        (call("alibi", dropout=0.1), "dropout"),
        (call("alibi", weights=True), "weights were asked for"),
        (dataclasses.replace(call("alibi"), positions=Positions.causal(40).within(9, 3)), "near keys only"),
    ],
)
@torch.no_grad()
def test_refusals(given, reason):
    assert reason in find_engine("flex").why_not(given)
    with pytest.raises(ValueError, match="attention='flex' cannot compute this call"):
        choose("flex", given)


def test_no_backward_on_a_cpu():
    assert "no backward on a CPU" in find_engine("flex").why_not(call("alibi"))
    with torch.no_grad():
        assert find_engine("flex").why_not(call("alibi")) is None
        assert choose("auto", call("alibi")).engine != "flex"


def test_short_calls_are_not_worth_compiling(monkeypatch):
    monkeypatch.setattr(flex, "why_not", lambda form, query: None)
    assert choose("flex", elsewhere("alibi")).engine == "flex"
    assert choose("auto", elsewhere("alibi")).engine == "reference"


# ------------------------------------------------------------------------------------------------------------- the trial


@pytest.fixture
def untried(monkeypatch):
    """Nothing was tried yet, and no call is too short."""
    selftest.tried.cache_clear()
    for engine in dispatch.ENGINES:
        monkeypatch.setattr(engine, "floors", {})
    yield
    selftest.tried.cache_clear()


def fault(kind):
    """What the engine's self-test finds of a kind of call, or has found before."""
    return selftest.fault(kind, find_engine("flex").attend)


def kind(form, **options):
    given = {"dtype": torch.float32, "size": 16, "grouped": True, "capped": False, "gradients": True}
    return selftest.Kind(form, **(given | options), device=torch.device("cpu"))


FORMS = ("linear", "added", "rescaled", "rescaled relu", "labelled")


@pytest.mark.rows(default=3)
@pytest.mark.parametrize("options", [{}, {"capped": True, "dtype": torch.bfloat16}, {"gradients": False}], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("error:FlexAttention failed")
def test_right_kernels_pass(form, options, dense, untried, monkeypatch):
    monkeypatch.setattr(flex, "compiled", lambda device: dense)
    assert fault(kind(form, **options)) is None


def failing(*args, **kwargs):
    raise RuntimeError("no such compiler\nand more")


def corrupt(what, dense):
    def kernel(q, k, v, *, score_mod, block_mask, **options):
        if what == "scores":
            return dense(q, k, v, score_mod=None, block_mask=block_mask, **options)
        if what == "mask":
            return dense(q, k, v, score_mod=score_mod, **options)
        output = dense(q, k, v, score_mod=score_mod, block_mask=block_mask, **options)
        return output * math.nan if what == "numbers" else output.detach() + q * 0 + (k.sum() + v.sum()) * 0

    return kernel


@pytest.mark.parametrize(
    ("what", "gradients", "finding"),
    [
        ("scores", False, "the output is off by"),
        ("mask", False, "the output is off by"),
        ("numbers", False, "the output is off by nan"),
        ("gradients", True, "differentiated Tensor"),  # which torch words in two ways
        (None, False, "RuntimeError: no such compiler"),
    ],
)
def test_wrong_kernels_fail(what, gradients, finding, dense, untried, monkeypatch):
    monkeypatch.setattr(flex, "compiled", lambda device: corrupt(what, dense) if what else failing)
    with pytest.warns(UserWarning, match="FlexAttention failed its self-test on cpu") as caught:
        found = [fault(kind("added", gradients=gradients)) for _ in range(2)]
    assert all(finding in each for each in found)
    # Once for the same kind; of the whole process it may be the first that runs FlexAttention without compiling, which torch warns of.
    (said,) = [
        str(each.message) for each in caught if not str(each.message).startswith("flex_attention called without")
    ]
    assert finding in said


def test_wrong_gradients_fail(dense, untried, monkeypatch):
    class Doubled(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, g: g * 2)

    def kernel(q, k, v, **options):
        return dense(q, Doubled.apply(k), v, **options)

    monkeypatch.setattr(flex, "compiled", lambda device: kernel)
    with pytest.warns(UserWarning, match="the gradient of the key is off by"):
        assert fault(kind("linear")) is not None
    assert fault(kind("linear", gradients=False)) is None


@pytest.mark.parametrize(("found", "engine"), [(None, "flex"), ("it failed", "chunked")])
@pytest.mark.parametrize("form", FORMS)
def test_auto_takes_what_passed(form, found, engine, untried, monkeypatch):
    asked = []
    monkeypatch.setattr(selftest, "fault", lambda kind, attend: asked.append(kind) or found)
    example = selftest.EXAMPLES[form].form(torch.rand(4, HEAD_DIM))
    chosen = choose("auto", dataclasses.replace(elsewhere("alibi"), form=example))
    assert chosen.engine == engine
    assert found is None or "not flex: it failed" in chosen.reason
    assert [each.form for each in asked] == [form]


@pytest.mark.parametrize("case", CASES)
def test_the_kind_of_a_call(case):
    positions = Positions.causal(40)
    q, k, v = inputs(positions, 4, 2, torch.bfloat16)
    learning = flex.kind_of(call_of(MODULES[case](4), q, k, v, positions))
    forms = {"alibi": "linear", "shaw-keys-only": "labelled"}
    forms |= dict.fromkeys(("alibi-trainable", "t5", "kerple", "kerple-power"), "added")
    expected = kind(forms.get(case, "rescaled relu"), dtype=torch.bfloat16, size=HEAD_DIM)
    assert learning == expected
    with torch.no_grad():
        k, v = (each[:, :1].expand(-1, 4, -1, -1) for each in (k, v))
        reading = flex.kind_of(call_of(MODULES[case](4), q, k, v, positions, softcap=30.0))
    form = "linear" if case == "alibi-trainable" else expected.form  # what no gradient is needed of need be no table
    assert reading == dataclasses.replace(expected, form=form, grouped=False, capped=True, gradients=False)


def test_each_engine_tries_once(untried, monkeypatch):
    asked = []
    monkeypatch.setattr(selftest, "_compare", lambda *given: asked.append(given))
    engine, other, given = find_engine("flex"), flex.Flex(), call("alibi")
    assert [each.distrust(given) for each in (engine, engine, other)] == [None] * 3
    assert asked == [(flex.kind_of(given), each.attend) for each in (engine, other)]


def test_on_a_cpu_nothing_is_tried(untried, monkeypatch):
    monkeypatch.setattr(selftest, "fault", lambda kind, attend: pytest.fail("tried"))
    with torch.no_grad():
        assert choose("auto", call("alibi")).engine == "banded"


def test_what_passed_is_used_while_a_graph_is_captured(dense, untried, monkeypatch):
    capturing = dataclasses.replace(kind("linear"), device=torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "had not run before" in fault(capturing)
    monkeypatch.setattr(selftest, "_compare", lambda kind, attend: None)
    with monkeypatch.context() as before:
        before.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert fault(capturing) is None
    assert fault(capturing) is None


def test_checkpointing_does_not_see_the_trial(dense, untried, monkeypatch):
    monkeypatch.setattr(flex, "compiled", lambda device: dense)
    x = torch.ones(3, requires_grad=True)

    def block(x):  # tried in the first pass only
        assert fault(kind("added")) is None
        return x.exp()

    with torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng():
        state = torch.get_rng_state()
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.grad, x.exp())


# --------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "shaw-keys-only"])
@torch.no_grad()
def test_compiled_on_a_cpu(case):
    module = MODULES[case](4)
    for name in ("causal", "packed", "padded", "prefill"):
        positions = large(name)
        tensors = [t.detach() for t in inputs(positions, 4, 2, torch.float32, batch=3)]
        actual, _ = dispatch.attend(call_of(module, *tensors, positions), "flex")
        expected, _ = reference.attend(call_of(module.double(), *(t.double() for t in tensors), positions))
        module.float()
        shown = positions.query_valid[:, :, None, None]
        assert ((actual - expected) * shown).abs().max() <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMS if form != "labelled"])
@pytest.mark.filterwarnings("error:FlexAttention failed")
def test_compiled_kernels_pass_the_trial_on_a_cpu(form, untried):
    assert fault(kind(form, gradients=False)) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("error:FlexAttention failed")
def test_kernels_pass_the_trial(form, dtype, gradients, untried):
    given = {"dtype": dtype, "size": 64, "grouped": False, "capped": False, "gradients": gradients}
    assert fault(selftest.Kind(form, **given, device=torch.device("cuda", 0))) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_against_the_reference(case, situation, dtype):
    positions, shown = SITUATIONS[situation]()
    fields = {name: each.cuda() for name, each in vars(positions).items() if each is not None}
    positions, shown = Positions(**fields), shown if shown is None else shown.cuda()
    module = MODULES[case](4).cuda()
    tensors = [t.detach().cuda().requires_grad_() for t in inputs(positions, 4, 2, dtype)]
    given = (module, positions, tensors, shown, seeded(2, tensors[0].shape[2], 4, HEAD_DIM).cuda())
    # bfloat16: 8 bits in the inputs of each product, accumulated over up to 300 keys in gradients.
    compare(by_flex(*given, None), by_reference(*given), 1e-4 if dtype == torch.float32 else 3e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("scheme", ["alibi", "da_transformer"])
def test_a_model_on_a_gpu(scheme):
    ids = tokens(2, 300)
    fast = randomize(patch_model(tiny("llama", head_dim=16), scheme, attention="flex")).cuda()
    expected = randomize(patch_model(tiny("llama", head_dim=16), scheme))
    for model, batch in ((fast, ids.cuda()), (expected, ids)):
        model(batch, labels=batch).loss.backward()
    gradients = dict(expected.named_parameters())
    for name, parameter in fast.named_parameters():
        error = (parameter.grad.cpu() - gradients[name].grad).abs().max()
        assert error <= 1e-3 * max(1.0, gradients[name].grad.abs().max()), name


@pytest.mark.gpu
@needs_gpu
def test_lengths_share_kernels():
    torch._dynamo.utils.counters.clear()
    module = MODULES["alibi"](4)
    with torch.no_grad():
        for length in (130, 200, 330, 470, 700):
            positions = Positions.causal(length, device="cuda")
            q, k, v = (t.detach().cuda() for t in inputs(positions, 4, 1, torch.bfloat16))
            flex.attend(module.form(q), q, k, v, positions, scaling=SCALING)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
