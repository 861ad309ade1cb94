"""The CUDA engine: what it does to scores and which pairs it shows, on a CPU; its kernels where there is a GPU."""

import copy
import dataclasses
import gc
import math
import warnings
import weakref

import pytest
import torch
from calls import HEAD_DIM, MODULES, SITUATIONS, call_of, compare, inputs, seeded
from decoders import decoder
from families import tiny, tokens
from matrix import matrix
from situations import randomize
from torch.nn.attention import flex_attention as upstream

from hf_posenc import patch_model
from hf_posenc.core.positions import Positions, pack, unpack
from hf_posenc.engines import flex, near_far, reference, selftest
from hf_posenc.engines.dispatch import choose, find_engine

TABLES = ("alibi", "alibi-trainable", "t5", "kerple", "da_transformer")
RANGES = ("far_rope", "far_rope-dual-chunk")
CASES = (*TABLES, *(name for name in MODULES if name.startswith("shaw")), *RANGES)
NO_BAND = ("padded in the middle", "gapped", "distances beyond the number of keys")
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
    "packed, aligned": lambda: aligned(*SITUATIONS["packed"]()),
    "sliding window, aligned": lambda: aligned(*SITUATIONS["sliding window"]()),
    "gapped": lambda: (Positions.causal(60).follow(torch.arange(60)[None] * 3), None),
}


def aligned(positions, shown):
    return dataclasses.replace(positions, aligned=True), shown


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
    monkeypatch.setattr(flex, "compiled", lambda: upstream.flex_attention)
    return upstream.flex_attention


def attend(given):
    return find_engine("near_far" if type(given.form) in near_far.PARTS else "flex").attend(given)


def by_flex(module, positions, tensors, shown, weight, softcap=None):
    output, _ = module(call_of(module, *tensors, positions, softcap=softcap), attend)
    return _with_gradients(module, output, tensors, shown, weight)


def by_reference(module, positions, tensors, shown, weight, softcap=None):
    module = copy.deepcopy(module).double()
    tensors = [t.detach().double().requires_grad_() for t in tensors]
    output, _ = module(call_of(module, *tensors, positions, softcap=softcap), reference.attend)
    return _with_gradients(module, output, tensors, shown, weight)


def _with_gradients(module, output, tensors, shown, weight):
    output = output if shown is None else output * shown[:, :, None, None]
    leaves = [*tensors, *module.parameters()]
    return [output, *torch.autograd.grad((output.double() * weight).sum(), leaves)]


@pytest.mark.rows(default=8, slow=48)
@matrix(case=CASES, situation=SITUATIONS)  # each is traced anew
def test_against_the_reference(case, situation, dense):
    groups = 1 if situation in ("causal", "packed") else 2
    positions, shown = SITUATIONS[situation]()
    module, tensors = MODULES[case](4), inputs(positions, 4, groups, torch.float32)
    weight = seeded(2, tensors[0].shape[2], 4, HEAD_DIM)
    given = (module, positions, tensors, shown, weight)
    if case.startswith("shaw") and situation in NO_BAND:
        reason = near_far._why_no_band(call_of(module, *tensors, positions))
        assert "padding inside a document, or gaps" in reason
        return
    compare(by_flex(*given), by_reference(*given), 2e-5)


@pytest.mark.rows(default=2)
@pytest.mark.parametrize("case", ["shaw", *RANGES])
def test_parts_in_bfloat16(case, dense):
    """Vectors are gathered in float32; the norm counts, because single entries are noise."""
    positions, shown = SITUATIONS["left-padded"]()
    module, tensors = MODULES[case](4), inputs(positions, 4, 2, torch.bfloat16)
    given = (module, positions, tensors, shown, seeded(2, 90, 4, HEAD_DIM))
    for actual, expected in zip(by_flex(*given), by_reference(*given), strict=True):
        assert (actual.double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.rows(default=2, slow=4)
@pytest.mark.parametrize("case", [*TABLES, *RANGES])
def test_soft_cap(case, dense):
    positions = Positions.causal(60)
    module, tensors = MODULES[case](4), inputs(positions, 4, 1, torch.float32)
    given = (module, positions, tensors, None, seeded(2, 60, 4, HEAD_DIM))
    capped = by_flex(*given, softcap=0.5)
    compare(capped, by_reference(*given, softcap=0.5), 2e-5)
    assert (capped[0] - by_flex(*given)[0]).abs().max() > 1e-3


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
    if name.endswith("aligned"):
        found = large(name.removesuffix(", aligned"))
        return dataclasses.replace(found, aligned=True)
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
        ("packed, aligned", 0.4),
        ("window, aligned", 15 / 36),
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
    assert full.any() or "window" in name
    b, q, k = torch.meshgrid(torch.arange(batch), torch.arange(queries), torch.arange(keys), indexing="ij")
    assert torch.equal(mask.mask_mod(b, 0, q, k), visible[:, 0])
    for within in (flex.Range(high=150), flex.Range(150, 300), flex.Range(low=300), flex.Range(1, 2, unit=100)):
        i, j = (each.clamp(min=0) // within.unit for each in (positions.query_positions, positions.key_positions))
        difference = i[:, None, :, None] - j[:, None, None]
        shown = visible & (difference >= within.low) & (difference < within.high)
        mask = flex.block_mask(positions, batch, within)
        kept, full = blocks_of(mask, queries, keys)
        assert not (shown & ~kept).any()
        assert not (full & ~shown).any()
        assert torch.equal(mask.mask_mod(b, 0, q, k), shown[:, 0])
        if name == "causal" and within.low == 300:
            assert mask.kv_num_blocks.add(mask.full_kv_num_blocks).sum() == 4 + 3 + 2 + 1


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
        (call("alibi"), "written for CUDA"),
        (elsewhere("shaw"), "no table of distances"),
        (elsewhere("transformer_xl"), "no table of distances"),
        (call("alibi", weights=True), "weights were asked for"),
        (elsewhere("alibi", dropout=0.1), "dropout"),
        (dataclasses.replace(call("alibi"), positions=Positions.causal(40).within(9, 3)), "near keys only"),
    ],
)
@torch.no_grad()
def test_refusals(given, reason):
    assert reason in find_engine("flex").why_not(given)
    with pytest.raises(ValueError, match="attention='flex' cannot compute this call"):
        choose("flex", given)


def test_short_calls_are_not_worth_compiling():
    assert choose("flex", elsewhere("alibi")).engine == "flex"
    assert choose("auto", elsewhere("t5")).engine == "reference"


@pytest.fixture
def untried(monkeypatch):
    """Nothing was tried yet."""
    monkeypatch.setattr(selftest, "FOUND", {})


def fault(change, **options):
    """What the engine's self-test finds of a kind of call, or has found before."""
    given = {"dtype": torch.float32, "size": 16, "grouped": True, "capped": False, "gradients": True}
    given |= {"values": options.get("size", 16), "aligned": False}
    kind = selftest.Kind(change, **(given | {"device": torch.device("cpu")} | options))
    return selftest.fault(kind, find_engine("near_far" if change in ("turned", "clipped") else "flex").compute)


@pytest.mark.rows(default=5, slow=10)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capped": True, "dtype": torch.bfloat16},
        {"aligned": True, "size": 24, "values": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("change", selftest.FORMS)
@pytest.mark.filterwarnings("error:FlexAttention on")
def test_right_kernels_pass(change, options, dense, untried):
    assert fault(change, **options) is None


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
    monkeypatch.setattr(flex, "compiled", lambda: corrupt(what, dense) if what else failing)
    with pytest.warns(UserWarning, match="FlexAttention on cpu failed its self-test"):
        assert finding in fault("added", gradients=gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert finding in fault("added", gradients=gradients)  # which warns no second time


def test_an_interrupted_trial_was_none(dense, untried, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(flex, "compiled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fault("added")
    monkeypatch.setattr(flex, "compiled", lambda: failing)
    with pytest.warns(UserWarning, match="failed its self-test"):
        assert fault("added") is not None


def test_a_mask_does_not_keep_its_positions(dense):
    """Or a forward pass would leave its tensors on the device until Python looks for circles."""
    positions = dataclasses.replace(Positions.causal(150), memo={})
    tensors = inputs(positions, 4, 2, torch.float32)
    find_engine("flex").attend(call_of(MODULES["alibi"](4), *tensors, positions))
    (mask,) = (weakref.ref(each) for key, each in positions.memo.items() if key[0] == "block mask")
    gc.disable()
    try:
        del positions, tensors
        assert mask() is None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.rows(slow=3)
@pytest.mark.parametrize("case", TABLES)  # of parts torch cannot compile the log-sum-exps
@torch.no_grad()
def test_compiled_on_a_cpu(case, monkeypatch):
    # With more than ten sizes that are symbols torch writes C++ that does not compile.
    kernel = torch.compile(upstream.flex_attention, fullgraph=True, dynamic=False)
    monkeypatch.setattr(flex, "compiled", lambda: kernel)
    module = MODULES[case](4)
    for name in ("causal", "packed", "padded", "prefill"):
        positions = large(name)
        tensors = [t.detach() for t in inputs(positions, 4, 2, torch.float32, batch=3)]
        actual, _ = find_engine("flex").attend(call_of(module, *tensors, positions))
        expected, _ = reference.attend(call_of(module.double(), *(t.double() for t in tensors), positions))
        module.float()
        shown = positions.query_valid[:, :, None, None]
        assert ((actual - expected) * shown).abs().max() <= 1e-5


@pytest.mark.rows(default=20, slow=24)
@pytest.mark.parametrize("ids", ["counted", "gapped", "packed"])
@pytest.mark.parametrize("scheme", ["alibi", "t5", "shaw", "far_rope"])
@pytest.mark.parametrize("family", ["llama", "bloom"])  # attention gets the ids; or only the mask that holds them
@torch.no_grad()
def test_a_model_by_its_position_ids(family, scheme, ids, dense, monkeypatch):
    """Where they are the slots, distances are computed of slots; where they are the caller's own, they are not."""
    monkeypatch.setattr(flex, "DEVICE", "cpu")
    monkeypatch.setattr(flex, "SMALLEST_HEAD", 1)
    places = {"counted": torch.arange(60), "gapped": torch.arange(60) * 3, "packed": torch.arange(60) % 25}[ids]
    given = {"input_ids": tokens(2, 60), "position_ids": places[None].expand(2, -1), "use_cache": False}
    options, engine = {"far_rope": ({"near": 9}, "near_far"), "shaw": ({}, "near_far")}.get(scheme, ({}, "flex"))
    fast, exact = (
        randomize(patch_model(decoder(family), scheme, attention=each, **options)) for each in (engine, "reference")
    )
    if (scheme, ids) == ("shaw", "gapped"):
        with pytest.raises(ValueError, match="padding inside a document, or gaps"):
            fast(**given)
        return
    assert (fast(**given).logits - exact(**given).logits).abs().max() <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["t5", "kerple", "shaw", "far_rope"])
@torch.no_grad()
def test_tables_are_in_the_graph_of_a_compiled_model(scheme, monkeypatch):
    """Traced on a CPU, for one length and for any, and computed by what FlexAttention is uncompiled."""
    monkeypatch.setattr(flex, "DEVICE", "cpu")
    sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    options = {"near": 50} if scheme == "far_rope" else {}
    model, graphs = randomize(patch_model(tiny("llama", **sizes), scheme, **options)), []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (200, 333, 420):
        given = {"input_ids": tokens(2, length), "use_cache": False}
        assert (compiled(**given).logits - model(**given).logits).abs().max() <= 1e-3
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][0, :50] = 0
        shown = given["attention_mask"].bool()
        assert (compiled(**given).logits - model(**given).logits)[shown].abs().max() <= 1e-3
    assert len(graphs) <= 4
    assert all("flex_attention" in graph for graph in graphs)
    if scheme == "shaw":  # its near keys are those of slots
        given["attention_mask"].fill_(1)
        with pytest.raises(RuntimeError, match="position_ids with gaps"):
            compiled(**given, position_ids=2 * torch.arange(420)[None])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.rows(slow=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_against_the_reference(case, situation, dtype):
    positions, shown = SITUATIONS[situation]()
    if case.startswith("shaw") and situation in NO_BAND:
        pytest.skip("it is refused")
    fields = {name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in vars(positions).items()}
    positions, shown = Positions(**fields), shown if shown is None else shown.cuda()
    module = MODULES[case](4).cuda()
    tensors = [t.detach().cuda().requires_grad_() for t in inputs(positions, 4, 2, dtype)]
    given = (module, positions, tensors, shown, seeded(2, tensors[0].shape[2], 4, HEAD_DIM).cuda())
    # bfloat16: 8 bits in the inputs of each product, accumulated over up to 300 keys in gradients.
    compare(by_flex(*given), by_reference(*given), 1e-4 if dtype == torch.float32 else 3e-2)
