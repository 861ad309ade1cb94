"""A patched model computes one function, whatever way it is run.

The full forward without a cache is the yardstick: what it computes is held against slow formulas elsewhere. Here every
other way to run the same tokens (caches, chunks, padding, packing, generation, checkpointing, copies) must agree with
it. At the end the guard: what would be found if the scheme did nothing.
"""

import itertools

import pytest
import torch
from calls import never_short
from families import FAMILIES, WINDOWED, tiny, tokens
from matrix import matrix
from rows import ROWS
from situations import (
    BASES,
    BFLOAT16,
    CASES,
    DIFFERENT,
    EMBEDDING_SCHEMES,
    JOINING,
    ORDER_ONLY,
    OWN_ATTENTION,
    SCHEMES,
    WITHOUT_POSITIONS,
    assert_same,
    crossed,
    distance,
    in_turn,
    patched_model,
    position_gradients,
)
from transformers import DynamicCache, StaticCache

from hf_posenc import patch_model, unpatch_model
from hf_posenc.core.modules import PositionModule
from hf_posenc.model.patch_record import patch_of

LENGTH = 20
PADDING = 5
CHUNKS = (7, 6, 1, 6)
GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}

each_case = matrix(in_turn(CASES, BASES), case=None, family=None)
each_scheme = matrix(in_turn(SCHEMES, BASES), case=None, family=None)


@pytest.fixture(autouse=True)
def engines(request, monkeypatch):
    """Engines as they are chosen for calls as short as these, or every call by the fastest that can carry it."""
    if getattr(request, "param", "chosen") == "fastest":
        never_short(monkeypatch)


def by_engines(rows, *names):
    """Parametrize a test by rows, and by engines in turn."""
    made = [(*row, each) for row, each in in_turn(rows, ["fastest", "chosen", "fastest"])]
    return matrix(made, indirect=["engines"], **dict.fromkeys([*names, "engines"]))


each_scheme_by_engines = by_engines(in_turn(SCHEMES, BASES), "case", "family")
each_case_by_engines = by_engines(in_turn(CASES, BASES), "case", "family")
in_every_family = by_engines(crossed(SCHEMES, FAMILIES), "case", "family")


# ----------------------------------------------------------------------------------------------------- ways to run it


def full(model, ids):
    return model(ids, use_cache=False).logits


def in_chunks(model, ids, cache, sizes):
    parts, start = [], 0
    for size in sizes:
        parts.append(model(ids[:, start : start + size], past_key_values=cache, use_cache=True).logits)
        start += size
    assert start == ids.shape[1]
    return torch.cat(parts, 1)


def token_by_token(model, ids):
    return in_chunks(model, ids, DynamicCache(config=model.config), [1] * LENGTH)


def chunked(model, ids):
    return in_chunks(model, ids, DynamicCache(config=model.config), CHUNKS)


def static(model, ids):
    return in_chunks(model, ids, StaticCache(config=model.config, max_cache_len=32), (5, 1, 1, 9, 1, 3))


def prompt_then_tokens(model, ids):
    return in_chunks(model, ids, DynamicCache(config=model.config), [12] + [1] * 8)


def pad_left(ids, padding=PADDING):
    padded = torch.cat([torch.zeros(ids.shape[0], padding, dtype=torch.long), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :padding] = 0
    return padded, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def left_padded(model, ids):
    padded, mask, position_ids = pad_left(ids)
    return model(padded, attention_mask=mask, position_ids=position_ids, use_cache=False).logits[:, PADDING:]


def left_padded_in_chunks(model, ids):
    padded, mask, position_ids = pad_left(ids)
    cache, parts, start = DynamicCache(config=model.config), [], 0
    for size in (PADDING + 7, 6, 1, 1, 5):
        here = slice(start, start + size)
        parts.append(
            model(
                padded[:, here],
                attention_mask=mask[:, : here.stop],
                position_ids=position_ids[:, here],
                past_key_values=cache,
                use_cache=True,
            ).logits
        )
        start += size
    return torch.cat(parts, 1)[:, PADDING:]


def left_padded_without_position_ids(model, ids):
    padded, mask, _ = pad_left(ids)
    return model(padded, attention_mask=mask, use_cache=False).logits[:, PADDING:]


def right_padded(model, ids):
    padded = torch.cat([ids, torch.zeros(ids.shape[0], PADDING, dtype=torch.long)], 1)
    mask = (torch.arange(LENGTH + PADDING) < LENGTH).long().expand_as(padded)
    return model(padded, attention_mask=mask, use_cache=False).logits[:, :LENGTH]


WAYS = {
    way.__name__: way
    for way in (
        token_by_token,
        chunked,
        prompt_then_tokens,
        static,
        left_padded,
        left_padded_in_chunks,
        left_padded_without_position_ids,
        right_padded,
    )
}


def skip_if_stock_does_otherwise(way, case, family):
    adds_vectors = CASES[case][0] in EMBEDDING_SCHEMES or (CASES[case][0] in JOINING and family == "gpt2")
    if way == "left_padded_without_position_ids" and adds_vectors and family != "opt":
        pytest.skip(
            "without position_ids transformers counts the padding (all but OPT): the vectors of other positions"
        )


IN_WAYS = [(case, family, way) for (case, way), family in in_turn(itertools.product(SCHEMES, WAYS), [*BASES, "llama"])]
IN_WAYS += [(case, "llama", way) for case, way in in_turn([case for case in CASES if case not in SCHEMES], WAYS)]


@torch.no_grad()
@by_engines(sorted(IN_WAYS), "case", "family", "way")
def test_every_way_equals_the_full_forward(case, family, way):
    skip_if_stock_does_otherwise(way, case, family)
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    assert_same(WAYS[way](model, ids), full(model, ids))


@pytest.mark.rows(default=8)
@torch.no_grad()
@each_scheme
def test_ways_agree_to_the_last_digits_in_float64(case, family):
    model, ids = patched_model(case, family).double(), tokens(2, LENGTH)
    expected = full(model, ids)
    for way in (token_by_token, chunked, static, left_padded, right_padded):
        assert_same(way(model, ids), expected, way.__name__)


def packed(ids):
    """Return two documents, of 12 and 8 tokens, in one row, and their position ids."""
    row = torch.cat([ids[0, :12], ids[1, :8]])[None]
    return row, torch.cat([torch.arange(12), torch.arange(8)])[None]


@torch.no_grad()
@in_every_family
def test_every_family(case, family):
    # Twenty tokens: families with a window of eight have keys outside of it, and their caches drop them.
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    expected = full(model, ids)
    for way in (token_by_token, chunked, static, left_padded, left_padded_in_chunks):
        assert_same(way(model, ids), expected, way.__name__)
    row, position_ids = packed(ids)
    if family == "opt" and case in OWN_ATTENTION:
        with pytest.raises(ValueError, match="or pass a 4-D mask that parts the documents"):
            model(row, position_ids=position_ids, use_cache=False)
        return
    logits = model(row, position_ids=position_ids, use_cache=False).logits
    assert_same(logits[:, :12], full(model, ids[:1, :12]))
    second = full(model, ids[1:, :8])
    if family == "opt":
        # OPT does not hand its position ids to the mask, so that transformers never detects packing, patched or not.
        # The second document sees the first; when that changes this line will say so.
        assert distance(logits[:, 12:], second) > DIFFERENT
    else:
        assert_same(logits[:, 12:], second)


@torch.no_grad()
@pytest.mark.parametrize("family", WINDOWED)
def test_the_window_is_felt(family):
    # Otherwise the sliding-window caches above would prove nothing.
    narrow, wide = patched_model("alibi", family), patched_model("alibi", family, sliding_window=64)
    ids = tokens(2, LENGTH)
    assert distance(full(narrow, ids)[:, :8], full(wide, ids)[:, :8]) == 0
    assert distance(full(narrow, ids), full(wide, ids)) > DIFFERENT
    layers = DynamicCache(config=narrow.config).layers
    assert any(getattr(layer, "sliding_window", None) == 8 for layer in layers)


# ------------------------------------------------------------------------------------------------------------- packing


@torch.no_grad()
@by_engines(in_turn(SCHEMES, [*BASES, "opt"]), "case", "family")
def test_packed_by_a_mask_of_the_users(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    row, position_ids = packed(ids)
    document = torch.tensor([0] * 12 + [1] * 8)
    mask = (document[:, None] == document) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for own in (mask[None, None], torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]):
        logits = model(row, position_ids=position_ids, attention_mask=own, use_cache=False).logits
        assert_same(logits[:, :12], full(model, ids[:1, :12]))
        assert_same(logits[:, 12:], full(model, ids[1:, :8]))


# ---------------------------------------------------------------------------------------------------------- generation


def generate(model, ids, **options):
    return model.generate(ids, attention_mask=options.pop("attention_mask", torch.ones_like(ids)), **GREEDY | options)


def by_hand(model, ids):
    """Return the greedy continuation, by full forwards without a cache."""
    for _ in range(GREEDY["max_new_tokens"]):
        ids = torch.cat([ids, full(model, ids)[:, -1:].argmax(-1)], 1)
    return ids


GENERATIONS = {
    "dynamic": {},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@torch.no_grad()
@matrix(in_turn(in_turn(sorted([*CASES] * 2), BASES), GENERATIONS), row=None, how=None)
def test_greedy_generation(row, how):
    case, family = row
    model, ids = patched_model(case, family), tokens(2, 10)
    assert generate(model, ids, **GENERATIONS[how]).equal(by_hand(model, ids))


@pytest.mark.rows(default=16)
@torch.no_grad()
@matrix(in_turn(CASES, BASES, ["static", "dynamic", "static"]), case=None, family=None, how=None)
def test_generation_of_prompts_of_different_lengths(case, family, how):
    model, ids = patched_model(case, family), tokens(2, 10)
    padded = torch.stack([ids[0], torch.cat([torch.zeros(4, dtype=torch.long), ids[1, :6]])])
    mask = torch.stack([torch.ones(10), (torch.arange(10) >= 4).float()]).long()
    together = generate(model, padded, attention_mask=mask, **GENERATIONS[how])
    assert together[0].equal(by_hand(model, ids[:1])[0])
    assert together[1, 4:].equal(by_hand(model, ids[1:, :6])[0])


@pytest.mark.rows(default=4, slow=10)
@torch.no_grad()
@each_scheme
def test_beam_search(case, family):
    model, ids = patched_model(case, family), tokens(2, 8)
    expected = generate(model, ids, num_beams=3, use_cache=False)
    assert generate(model, ids, num_beams=3).equal(expected)
    assert generate(model, ids, num_beams=3, cache_implementation="static", disable_compile=True).equal(expected)
    padded, mask, _ = pad_left(ids)
    assert generate(model, padded, num_beams=3, attention_mask=mask)[:, PADDING:].equal(expected)


@pytest.mark.rows(default=4, slow=10)
@torch.no_grad()
@each_scheme
def test_speculative_generation(case, family):
    model = patched_model(case, family)
    ids = tokens(1, 4).repeat(1, 2)  # repeats itself: the prompt look-up finds candidates
    expected = by_hand(model, ids)
    assert generate(model, ids, prompt_lookup_num_tokens=3).equal(expected)
    for assistant in (patched_model("alibi", family), tiny(family), patched_model(case, family)):
        assistant.generation_config.eos_token_id = None
        assert generate(model, ids, assistant_model=assistant).equal(expected)


# ------------------------------------------------------------------------------------------------------------ training


def gradients(model, ids, **arguments):
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **arguments).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        # Gradients of tables are sums over positions; relative to the largest entry they are as exact as logits.
        scale = max(1.0, expected[name].abs().max().item())
        assert_same(actual[name] / scale, expected[name] / scale, name)


def enable_checkpointing(model, **options):
    # transformers 5.23 renamed it; the oldest supported version knows the old name only
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


@pytest.mark.rows(slow=45)
@in_every_family
def test_gradient_checkpointing(case, family):
    model, ids = patched_model(case, family).train(), tokens(2, LENGTH)
    expected = gradients(model, ids)
    trained = [name for name, _ in model.named_parameters() if "posenc" in name]
    assert expected.keys() >= set(trained)
    for reentrant in (False, True):
        enable_checkpointing(model, use_reentrant=reentrant)
        assert_same_gradients(gradients(model, ids), expected)


@each_case
def test_every_position_parameter_has_a_gradient(case, family):
    model = patched_model(case, family).train()
    gradients(model, tokens(2, LENGTH))
    owned = [p for m in model.modules() if isinstance(m, PositionModule) for p in m.parameters(recurse=False)]
    found = position_gradients(model)
    assert len(found) == len(owned)
    assert all(gradient.abs().max() > 1e-6 for gradient in found.values())


@each_scheme_by_engines
def test_gradients_of_a_padded_batch_and_of_two_forwards_before_one_backward(case, family):
    model, ids = patched_model(case, family).train(), tokens(2, LENGTH)
    expected = gradients(model, ids)
    padded, mask, position_ids = pad_left(ids)
    labels = padded.masked_fill(mask == 0, -100)
    labels[:, PADDING] = -100  # the first token is predicted by nothing in the batch without padding
    arguments = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
    model.zero_grad()
    model(padded, labels=labels, **arguments).loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(found, expected)
    model.zero_grad()
    first, second = model(ids, labels=ids, use_cache=False).loss, model(padded, labels=labels, **arguments).loss
    (first + second).backward()
    both = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(both, {n: 2 * gradient for n, gradient in expected.items()})


# -------------------------------------------------------------------------------------------------- attention weights


@torch.no_grad()
@each_case_by_engines
def test_output_attentions(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    if case not in OWN_ATTENTION:  # sdpa has no weights to return; the schemes that keep the stock attention have eager
        model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True, use_cache=False)
    assert len(output.attentions) == 2
    for weights in output.attentions:
        assert weights.shape == (2, 4, LENGTH, LENGTH)
        if ROWS[case.partition("-")[0]].distribution:
            assert_same(weights.sum(-1), torch.ones(2, 4, LENGTH))
        assert weights.triu(1).eq(0).all()
    assert_same(output.logits, full(model, ids))
    padded, mask, position_ids = pad_left(ids)
    arguments = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
    for weights, expected in zip(
        model(padded, output_attentions=True, **arguments).attentions, output.attentions, strict=True
    ):
        assert_same(weights[..., PADDING:, PADDING:], expected)


@each_scheme
def test_a_stock_model_beside_a_patched_one(case, family):
    ids, stock = tokens(2, LENGTH), tiny(family)
    with torch.no_grad():
        before = full(stock, ids)
        patched_model(case, family)
        assert full(stock, ids).equal(before)
        patch_model(stock, "nope")  # a class-level change by the other would show here
        assert full(unpatch_model(stock), ids).equal(before)


# -------------------------------------------------------------------------------------------------------------- dtypes


@torch.no_grad()
@each_case_by_engines
def test_half_precision_is_close_to_float32(case, family):
    model, ids = patched_model(case, family).bfloat16(), tokens(2, LENGTH)
    low = full(model, ids)
    assert low.dtype == torch.bfloat16
    exact = full(model.float(), ids)  # the same rounded weights: what differs is the computation
    assert (low.float() - exact).norm() / exact.norm() < BFLOAT16
    with torch.autocast("cpu", torch.bfloat16):
        low = full(model, ids)
    assert (low.float() - exact).norm() / exact.norm() < BFLOAT16


# ------------------------------------------------------------------------------------------------------ chosen positions

GAPPED = torch.tensor([0, 1, 2, 6, 7, 11, 12, 13, 20, 29])


@torch.no_grad()
@each_case_by_engines
def test_gapped_position_ids_are_honoured(case, family):
    model, ids = patched_model(case, family), tokens(2, 30)
    # The same tokens among others that nobody can see: the mask says so, and positions are those of the slots.
    shown = torch.zeros(30, dtype=torch.bool)
    shown[GAPPED] = True
    mask = torch.ones(30, 30, dtype=torch.bool).tril() & (shown | torch.eye(30, dtype=torch.bool))
    expected = model(ids, attention_mask=mask[None, None], use_cache=False).logits[:, GAPPED]
    few = ids[:, GAPPED]
    ones = torch.ones_like(few)  # without a 2-D mask transformers would take the gaps for borders between documents
    actual = model(few, attention_mask=ones, position_ids=GAPPED[None], use_cache=False).logits
    assert_same(actual, expected)
    if case not in ORDER_ONLY:
        assert distance(actual, full(model, few)) > DIFFERENT


# ---------------------------------------------------------------------------------------------- guard against no-ops


def assert_acts(model, family):
    """Fail unless the model computes something else than the stock one, and than one without positions."""
    ids = tokens(2, LENGTH)
    assert distance(full(model, ids), full(tiny(family), ids)) > DIFFERENT, "stock"
    if patch_of(model) is None or patch_of(model).name not in WITHOUT_POSITIONS:
        assert distance(full(model, ids), full(patch_model(tiny(family), "nope"), ids)) > DIFFERENT, "nope"


@torch.no_grad()
@each_case
def test_a_scheme_changes_the_result(case, family):
    assert_acts(patched_model(case, family), family)


def test_that_assertion_fails_without_a_patch():
    with pytest.raises(AssertionError, match="stock"):
        assert_acts(tiny("llama"), "llama")


@torch.no_grad()
def test_schemes_differ_from_each_other():
    ids = tokens(2, LENGTH)
    results = {case: full(patched_model(case, "llama"), ids) for case in SCHEMES}
    for a in SCHEMES:
        assert all(distance(results[a], results[b]) > DIFFERENT for b in SCHEMES if b != a)
