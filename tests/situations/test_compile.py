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
from matrix import matrix
from situations import (
    CASES,
    DIFFERENT,
    ORDER_ONLY,
    SCHEMES,
    SCORE_SCHEMES,
    TOLERANCE,
    assert_same,
    distance,
    patched_model,
)
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import StaticCache

from hf_posenc import patch_model
from hf_posenc.forms import RelativeKeys

LENGTH = 20
PROMPT = 8
# A sliding-window cache counts its tokens in a Python integer: every step is another graph, of the stock model as well.
COMPILES_ONCE = tuple(family for family in FAMILIES if family not in WINDOWED)


def slower(cases, first):
    """Return all cases, marked as slow but for the first ones."""
    return [case if case in first else pytest.param(case, marks=pytest.mark.slow) for case in cases]


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
@pytest.mark.rows(default=1, slow=8)
@matrix(case=SCHEMES, family=FAMILIES)
def test_trains_in_one_graph(case, family):
    check_training(case, family)


@pytest.mark.rows(slow=8)
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in (*SCHEMES, "far_rope-dynamic")])
def test_every_option_trains_in_one_graph(case):
    check_training(case, "llama", num_hidden_layers=1)


def test_lengths_that_queries_have_of_their_own_are_no_one_graph():
    """`far_rope` of the kind `dynamic` makes a call for each length: it leaves the graph, and one graph is refused."""
    model = patched_model("far_rope-dynamic", "llama", num_hidden_layers=1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside_of_graphs"):
        torch.compile(model, fullgraph=True, backend="eager")(tokens(2, LENGTH), use_cache=False)


def decode(model, step, ids, positions_of_steps=True):
    """Return the logits of the tokens after the prompt, each by one call of `step`."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(ids[:, :PROMPT], past_key_values=cache)
    parts = []
    for t in range(PROMPT, LENGTH):
        extra = {"position_ids": torch.tensor([[t]])} if positions_of_steps else {}
        parts.append(step(ids[:, t : t + 1], past_key_values=cache, **extra).logits)
    return torch.cat(parts, 1)


@pytest.mark.rows(default=1, slow=10)
@torch.no_grad()
@matrix(case=SCHEMES, family=COMPILES_ONCE)
def test_decoding_is_one_graph(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter, dynamic=False)
    assert_same(decode(model, step, ids), model(ids, use_cache=False).logits[:, PROMPT:])
    assert counter.frame_count == 1


@pytest.mark.rows(default=1, slow=7)
@torch.no_grad()
@pytest.mark.parametrize("case", slower(SCHEMES, ("rope", "alibi")))
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


KEY_PER_DISTANCE = tuple(case for case in SCORE_SCHEMES if FORMS[case] is RelativeKeys)


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


@pytest.mark.rows(default=1, slow=7)
@pytest.mark.parametrize(
    "case", slower([case for case in SCORE_SCHEMES if case not in KEY_PER_DISTANCE], ("alibi", "cope"))
)
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


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("case", KEY_PER_DISTANCE)
def test_gapped_position_ids_with_a_key_for_each_distance(case):
    model, batch = patched_model(case, "llama"), gapped(tokens(2, LENGTH))
    model(**batch)  # uncompiled they run
    with pytest.raises(RuntimeError, match="a key for each distance"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(**batch)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("case", slower(["alibi", "transformer_xl"], ("alibi",)))
def test_lengths_may_vary_without_a_graph_for_each(case):
    model = patched_model(case, "llama", num_hidden_layers=1)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (9, 12, 15, 21, 33):
        ids = tokens(2, length)
        assert_same(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert counter.frame_count <= 2  # one for the first length, one for any other


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("case", slower(["alibi", "rope"], ("alibi",)))
def test_generate_compiles_by_itself(case):
    """With a static cache `generate` compiles the decoding step where it thinks it pays (not on a CPU): forced here."""
    from transformers import CompileConfig

    model, ids = patched_model(case, "llama"), tokens(2, 10)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    expected = model.generate(ids, **options)
    config = CompileConfig(backend="aot_eager", fullgraph=True, dynamic=False, mode=None)
    config._compile_all_devices = True
    actual = model.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert actual.equal(expected)


@pytest.mark.rows(slow=4)
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
@torch.no_grad()
def test_a_model_is_not_run_by_the_graph_of_another():
    """Models of one class, which differ in what is put beside their modules only, compiled one after the other."""
    for window in (None, 3, 6):
        model = patch_model(tiny("llama"), "alibi", window=window)
        expected = model(tokens(), use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert distance(compiled(tokens(), use_cache=False).logits, expected) <= TOLERANCE[torch.float32], window


@pytest.mark.slow
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
