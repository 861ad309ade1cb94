"""torch.compile: one graph without breaks for training, one for all decoding steps, and the same numbers.

``aot_eager`` traces forward and backward as the real backend does and then runs the operations one by one: what is
tested is that tracing sees all of it. The last test compiles for real, with the default backend.
"""

import logging
import shutil

import pytest
import torch
from calls import FORMS
from families import FAMILIES, WINDOWED, tiny, tokens
from functorch.compile import make_boxed_func
from matrix import matrix
from situations import DIFFERENT, ORDER_ONLY, SCHEMES, SCORE_SCHEMES, TOLERANCE, assert_same, distance, patched_model
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import StaticCache

LENGTH = 20
PROMPT = 8
# A sliding-window cache counts its tokens in a Python integer: every step is another graph, of the stock model as well.
COMPILES_ONCE = tuple(family for family in FAMILIES if family not in WINDOWED)


@pytest.fixture(autouse=True)
def quiet_compiler():
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = max(1.0, gradient.abs().max().item())
        assert distance(found[name] / scale, gradient / scale) <= TOLERANCE[torch.float32], name


def check_training(case, family, **sizes):
    model, ids = patched_model(case, family, **sizes).train(), tokens(2, LENGTH)
    labels = ids.clone()  # one tensor given twice is guarded as such, and the next batch would be another graph
    expected = model(ids, labels=labels, use_cache=False)
    expected.loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    actual = compiled(ids, labels=labels, use_cache=False)
    actual.loss.backward()
    assert_same(actual.logits, expected.logits)
    assert_same_gradients(gradients(model), wanted)
    compiled(tokens(2, LENGTH, seed=3), labels=labels, use_cache=False)
    assert counter.frame_count == 1


# Compiling takes seconds each: by default every scheme and every family is compiled once.
@pytest.mark.rows(default=0, slow=8)
@matrix(case=SCHEMES, family=FAMILIES)
def test_trains_in_one_graph(case, family):
    check_training(case, family)


def decode(model, step, ids, positions_of_steps=True):
    """Return the logits of the tokens after the prompt, each by one call of `step`."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :PROMPT], past_key_values=cache)
    parts = []
    for t in range(PROMPT, LENGTH):
        extra = {"position_ids": torch.tensor([[t]])} if positions_of_steps else {}
        parts.append(step(ids[:, t : t + 1], past_key_values=cache, **extra).logits)
    return torch.cat(parts, 1)


@pytest.mark.rows(default=1, slow=7)
@torch.no_grad()
@matrix(case=SCHEMES, family=COMPILES_ONCE)
def test_decoding_is_one_graph(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter, dynamic=False)
    assert_same(decode(model, step, ids), model(ids, use_cache=False).logits[:, PROMPT:])
    assert counter.frame_count == 1


@pytest.mark.rows(default=0, slow=6)
@torch.no_grad()
@pytest.mark.parametrize("case", SCHEMES)
def test_padded_and_packed_batches(case):
    model, ids = patched_model(case, "llama", num_hidden_layers=1), tokens(2, LENGTH)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    shown = mask.bool()
    assert_same(compiled(ids, **padded).logits[shown], model(ids, **padded).logits[shown])
    packed = {"position_ids": torch.cat([torch.arange(12), torch.arange(8)])[None], "use_cache": False}
    eager = model(ids[:1], **packed).logits
    # The second document starts anew: a compiled graph that lost the packing would agree with the plain forward.
    assert distance(eager, model(ids[:1], use_cache=False).logits) > 1e-2
    assert_same(compiled(ids[:1], **packed).logits, eager)


def gapped(ids):
    """Ten tokens at positions up to three times as far apart as there are keys."""
    places = torch.tensor([[0, 1, 2, 6, 7, 11, 12, 13, 20, 29]])
    few = ids[:, : places.shape[1]]
    return {
        "input_ids": few,
        "labels": few.clone(),
        "attention_mask": torch.ones_like(few),  # without it the gaps would be borders between documents
        "position_ids": places,
        "use_cache": False,
    }


@pytest.mark.rows(default=0, slow=5)
@pytest.mark.parametrize("case", SCORE_SCHEMES)
def test_gapped_position_ids(case):
    model = patched_model(case, "llama", num_hidden_layers=1).train()
    batch = gapped(tokens(2, LENGTH))
    expected = model(**batch)
    expected.loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    actual = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch)
    actual.loss.backward()
    assert_same(actual.logits, expected.logits)
    assert_same_gradients(gradients(model), wanted)
    with torch.no_grad():  # a distance cut off at the number of keys would be another result
        nearer = model(**(batch | {"position_ids": batch["position_ids"].clamp(max=15)})).logits
    assert case in ORDER_ONLY or distance(nearer, expected.logits) > DIFFERENT


@pytest.mark.rows(slow=4)
@pytest.mark.parametrize("case", ["transformer_xl", "alibi", "forgetting", "none"])
def test_plainly_causal_attention_makes_no_square(case):
    """No graph, forward or backward, has a tensor of T x T, because the channel's shape says plainly causal."""
    length, squares, graphs = 37, [], []

    def record(graph, inputs):
        graphs.append(graph)
        for node in graph.graph.nodes:
            found = node.meta.get("val")
            for each in found if isinstance(found, (tuple, list)) else [found]:
                if isinstance(each, torch.Tensor) and list(each.shape).count(length) > 1:
                    squares.append((node.target, tuple(each.shape)))
        return make_boxed_func(graph)

    model = tiny("llama") if case == "none" else patched_model(case, "llama")
    ids, model = tokens(2, length), model.train()
    expected = model(ids, use_cache=True).logits
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    logits = compiled(ids, use_cache=True).logits
    logits.sum().backward()
    assert_same(logits, expected)
    assert len(graphs) == 2
    assert squares == []
    compiled(ids, use_cache=True, attention_mask=torch.ones_like(ids))  # a mask may hide tokens, so it is made
    assert squares


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend compiles C++: install g++ to run this")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("case", {FORMS.get(case): case for case in SCHEMES}.values())  # one of each form
def test_the_default_backend(case):
    model, ids = patched_model(case, "llama", num_hidden_layers=1).train(), tokens(2, LENGTH)
    expected = model(ids, labels=ids, use_cache=False)
    expected.loss.backward()
    wanted = gradients(model)
    model.zero_grad()
    actual = torch.compile(model, fullgraph=True)(ids, labels=ids, use_cache=False)
    actual.loss.backward()
    assert_same(actual.logits, expected.logits)
    assert_same_gradients(gradients(model), wanted)


@pytest.mark.slow
@pytest.mark.rows(slow=6)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_exported_program_computes_every_length(scheme):
    """torch.export with an open length, then a batch of another size and length."""
    model = patched_model(scheme, "llama")
    shapes = {"input_ids": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, "use_cache": None}
    inputs = {"input_ids": tokens(2, LENGTH), "use_cache": False}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()
    longer = tokens(3, LENGTH + PROMPT)
    with torch.no_grad():
        written, expected = program(input_ids=longer, use_cache=False).logits, model(longer, use_cache=False).logits
    assert_same(written, expected)
