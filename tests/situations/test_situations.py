"""A patched model computes one function, whatever way it is run.

The full forward without a cache is the yardstick: what it computes is held against slow formulas elsewhere. Here every
other way to run the same tokens (caches, chunks, padding, packing, generation, checkpointing, copies) must agree with
it. At the end the guard: what would be found if the scheme did nothing.
"""

import copy
import itertools
import pickle

import pytest
import torch
from calls import never_short
from families import FAMILIES, WINDOWED, tiny, tokens
from matrix import matrix
from situations import (
    BASES,
    BFLOAT16,
    CASES,
    DIFFERENT,
    EMBEDDING_SCHEMES,
    JOINING,
    ORDER_ONLY,
    OWN_ATTENTION,
    ROTARY_SCHEMES,
    SCHEMES,
    SCORE_CASES,
    SCORE_SCHEMES,
    WITHOUT_POSITIONS,
    assert_same,
    distance,
    patched_model,
    position_gradients,
)
from torch import nn
from transformers import DynamicCache, StaticCache

from hf_posenc import patch_model, unpatch_model, verify
from hf_posenc.live.patch_record import patch_of
from hf_posenc.modules import PositionEmbedding, PositionModule, ScoreModule
from hf_posenc.upstream.rotary import IdentityRotary

LENGTH = 20
PADDING = 5
CHUNKS = (7, 6, 1, 6)
GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}

each_case = pytest.mark.parametrize("case", CASES)
each_score_case = pytest.mark.parametrize("case", SCORE_CASES)
each_scheme = pytest.mark.parametrize("case", SCHEMES)
each_score_scheme = pytest.mark.parametrize("case", SCORE_SCHEMES)
each_base = pytest.mark.parametrize("family", BASES)
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def engines(request, monkeypatch):
    """Engines as they are chosen for calls as short as these, or every call by the fastest that can carry it."""
    if getattr(request, "param", "chosen") == "fastest":
        never_short(monkeypatch)


def by_engines(**axes):
    """Parametrize a test by axes and engines; to schemes that have no engines both would be the same test."""
    names = [*axes, "engines"]
    rows = [
        row
        for row in itertools.product(*axes.values(), ["chosen", "fastest"])
        if row[-1] == "chosen" or row[names.index("case")] in SCORE_CASES
    ]
    return matrix(rows, indirect=["engines"], **dict.fromkeys(names))


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
RAGGED = (0, 5)
"""Padding of the two rows of a batch whose prompts differ in length."""


def skip_if_stock_does_otherwise(way, case, family):
    adds_vectors = CASES[case][0] in EMBEDDING_SCHEMES or (CASES[case][0] in JOINING and family == "gpt2")
    if way == "left_padded_without_position_ids" and adds_vectors and family != "opt":
        pytest.skip(
            "without position_ids transformers counts the padding (all but OPT): the vectors of other positions"
        )


@torch.no_grad()
@by_engines(way=WAYS, case=CASES, family=BASES)
def test_every_way_equals_the_full_forward(case, family, way):
    skip_if_stock_does_otherwise(way, case, family)
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    assert_same(WAYS[way](model, ids), full(model, ids))


@pytest.mark.rows(default=10)
@torch.no_grad()
@each_base
@each_scheme
def test_ways_agree_to_the_last_digits_in_float64(case, family):
    model, ids = patched_model(case, family).double(), tokens(2, LENGTH)
    expected = full(model, ids)
    for way in (token_by_token, chunked, static, left_padded, right_padded):
        assert_same(way(model, ids), expected, way.__name__)


@torch.no_grad()
@by_engines(case=SCHEMES, family=FAMILIES)
def test_every_family(case, family):
    # Twenty tokens: families with a window of eight have keys outside of it, and their caches drop them.
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    expected = full(model, ids)
    for way in (token_by_token, chunked, static, left_padded, left_padded_in_chunks):
        assert_same(way(model, ids), expected, way.__name__)


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


def packed(ids):
    """Return two documents, of 12 and 8 tokens, in one row, and their position ids."""
    row = torch.cat([ids[0, :12], ids[1, :8]])[None]
    return row, torch.cat([torch.arange(12), torch.arange(8)])[None]


@torch.no_grad()
@by_engines(case=SCHEMES, family=FAMILIES)
def test_packed_documents_equal_separate_ones(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    row, position_ids = packed(ids)
    logits = model(row, position_ids=position_ids, use_cache=False).logits
    first, second = full(model, ids[:1, :12]), full(model, ids[1:, :8])
    assert_same(logits[:, :12], first)
    if family == "opt":
        # OPT does not hand its position ids to the mask, so that transformers never detects packing, patched or not.
        # The second document sees the first; when that changes this line will say so.
        assert distance(logits[:, 12:], second) > DIFFERENT
    else:
        assert_same(logits[:, 12:], second)


@torch.no_grad()
def test_stock_opt_does_not_detect_packing_either():
    model, ids = tiny("opt"), tokens(2, LENGTH)
    row, position_ids = packed(ids)
    logits = model(row, position_ids=position_ids, use_cache=False).logits
    assert distance(logits[:, 12:], full(model, ids[1:, :8])) > DIFFERENT


@torch.no_grad()
@by_engines(case=SCHEMES, family=[*BASES, "opt"])
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
@matrix(how=GENERATIONS, case=CASES, family=BASES)
def test_greedy_generation(case, family, how):
    model, ids = patched_model(case, family), tokens(2, 10)
    assert generate(model, ids, **GENERATIONS[how]).equal(by_hand(model, ids))


@pytest.mark.rows(default=16)
@torch.no_grad()
@by_engines(how=["dynamic", "static"], case=CASES, family=BASES)
def test_generation_of_prompts_of_different_lengths(case, family, how):
    model, ids = patched_model(case, family), tokens(2, 10)
    padded = torch.stack([ids[0], torch.cat([torch.zeros(4, dtype=torch.long), ids[1, :6]])])
    mask = torch.stack([torch.ones(10), (torch.arange(10) >= 4).float()]).long()
    together = generate(model, padded, attention_mask=mask, **GENERATIONS[how])
    assert together[0].equal(by_hand(model, ids[:1])[0])
    assert together[1, 4:].equal(by_hand(model, ids[1:, :6])[0])


@pytest.mark.rows(default=10)
@torch.no_grad()
@each_base
@each_scheme
def test_beam_search(case, family):
    model, ids = patched_model(case, family), tokens(2, 8)
    expected = generate(model, ids, num_beams=3, use_cache=False)
    assert generate(model, ids, num_beams=3).equal(expected)
    assert generate(model, ids, num_beams=3, cache_implementation="static", disable_compile=True).equal(expected)
    padded, mask, _ = pad_left(ids)
    assert generate(model, padded, num_beams=3, attention_mask=mask)[:, PADDING:].equal(expected)


@pytest.mark.rows(default=7)
@torch.no_grad()
@each_base
@each_scheme
def test_speculative_generation(case, family):
    model = patched_model(case, family)
    ids = tokens(1, 4).repeat(1, 2)  # repeats itself: the prompt look-up finds candidates
    expected = by_hand(model, ids)
    assert generate(model, ids, prompt_lookup_num_tokens=3).equal(expected)
    for assistant in (patched_model("alibi", family), tiny(family), patched_model(case, family)):
        assistant.generation_config.eos_token_id = None
        assert generate(model, ids, assistant_model=assistant).equal(expected)


@torch.no_grad()
@matrix(case=SCORE_SCHEMES, family=FAMILIES)
def test_generation_of_every_family(case, family):
    model, ids = patched_model(case, family), tokens(2, 10)
    expected = by_hand(model, ids)
    assert generate(model, ids).equal(expected)
    padded, mask, _ = pad_left(ids)
    assert generate(model, padded, attention_mask=mask)[:, PADDING:].equal(expected)


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


@by_engines(case=SCHEMES, family=FAMILIES)
def test_gradient_checkpointing(case, family):
    model, ids = patched_model(case, family).train(), tokens(2, LENGTH)
    expected = gradients(model, ids)
    trained = [name for name, _ in model.named_parameters() if "posenc" in name]
    assert expected.keys() >= set(trained)
    for reentrant in (False, True):
        enable_checkpointing(model, use_reentrant=reentrant)
        assert_same_gradients(gradients(model, ids), expected)


@each_base
@each_case
def test_every_position_parameter_has_a_gradient(case, family):
    model = patched_model(case, family).train()
    gradients(model, tokens(2, LENGTH))
    owned = [p for m in model.modules() if isinstance(m, PositionModule) for p in m.parameters(recurse=False)]
    found = position_gradients(model)
    assert len(found) == len(owned)
    assert all(gradient.abs().max() > 1e-6 for gradient in found.values())


@by_engines(case=SCHEMES, family=BASES)
def test_gradients_of_a_padded_batch(case, family):
    model, ids = patched_model(case, family).train(), tokens(2, LENGTH)
    expected = gradients(model, ids)
    padded, mask, position_ids = pad_left(ids)
    model.zero_grad()
    labels = padded.masked_fill(mask == 0, -100)
    labels[:, PADDING] = -100  # the first token is predicted by nothing in the batch without padding
    arguments = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
    model(padded, labels=labels, **arguments).loss.backward()
    assert_same_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)


@by_engines(case=SCHEMES, family=BASES)
def test_two_forwards_before_one_backward(case, family):
    model, ids = patched_model(case, family).train(), tokens(2, LENGTH)
    padded, mask, position_ids = pad_left(tokens(2, 9, seed=4), 3)
    other = {"attention_mask": mask, "position_ids": position_ids}
    first, second = gradients(model, ids), gradients(model, padded, **other)
    model.zero_grad()
    a = model(ids, labels=ids, use_cache=False).loss
    b = model(padded, labels=padded, use_cache=False, **other).loss
    (a + b).backward()
    both = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(both, {name: first[name] + second[name] for name in first})


# -------------------------------------------------------------------------------------------------- attention weights


@torch.no_grad()
@by_engines(case=CASES, family=BASES)
def test_output_attentions(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    if case not in OWN_ATTENTION:  # sdpa has no weights to return; the schemes that keep the stock attention have eager
        model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True, use_cache=False)
    assert len(output.attentions) == 2
    for weights in output.attentions:
        assert weights.shape == (2, 4, LENGTH, LENGTH)
        assert_same(weights.sum(-1), torch.ones(2, 4, LENGTH))
        assert weights.triu(1).eq(0).all()
    assert_same(output.logits, full(model, ids))
    padded, mask, position_ids = pad_left(ids)
    arguments = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
    for weights, expected in zip(
        model(padded, output_attentions=True, **arguments).attentions, output.attentions, strict=True
    ):
        assert_same(weights[..., PADDING:, PADDING:], expected)


# -------------------------------------------------------------------------------------------------------------- copies


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@torch.no_grad()
@matrix(copied=[copy.deepcopy, pickled], case=SCHEMES, family=FAMILIES)
def test_a_copy_lives_its_own_life(case, family, copied):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    stock, expected = full(tiny(family), ids), full(model, ids)
    twin = copied(model)
    assert full(twin, ids).equal(expected)
    for parameter in twin.parameters():
        parameter.mul_(1.5)
    assert full(model, ids).equal(expected)
    twin.load_state_dict(model.state_dict())
    assert full(unpatch_model(twin), ids).equal(stock)
    assert full(model, ids).equal(expected)
    assert full(unpatch_model(model), ids).equal(stock)


@torch.no_grad()
@each_base
@each_scheme
def test_the_original_can_be_unpatched_before_its_copy(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    expected, twin = full(model, ids), copy.deepcopy(model)
    unpatch_model(model)
    assert full(twin, ids).equal(expected)
    assert full(unpatch_model(twin), ids).equal(full(model, ids))


@torch.no_grad()
@each_base
def test_models_with_different_schemes_side_by_side(family):
    ids = tokens(2, LENGTH)
    alone = {case: full(patched_model(case, family), ids) for case in CASES}
    together = {case: patched_model(case, family) for case in CASES}
    for _ in range(2):
        for case, model in together.items():
            assert full(model, ids).equal(alone[case])
    for case in list(together)[::2]:
        unpatch_model(together.pop(case))
    for case, model in together.items():
        assert full(model, ids).equal(alone[case])


@each_base
@each_scheme
def test_a_stock_teacher_beside_a_patched_student(case, family):
    ids = tokens(2, LENGTH)
    teacher = tiny(family)
    with torch.no_grad():
        before = full(teacher, ids)
    student = patched_model(case, family).train()
    with torch.no_grad():
        target = full(teacher, ids)
    assert target.equal(before)
    nn.functional.mse_loss(full(student, ids), target).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in student.parameters())
    assert patch_of(teacher) is None
    with torch.no_grad():
        assert full(teacher, ids).equal(before)
        patch_model(teacher, "nope")  # a class-level change by the student would show here
        assert full(unpatch_model(teacher), ids).equal(before)


# -------------------------------------------------------------------------------------------------------------- dtypes


@torch.no_grad()
@by_engines(case=CASES, family=BASES)
def test_bfloat16_is_close_to_float32(case, family):
    model, ids = patched_model(case, family).bfloat16(), tokens(2, LENGTH)
    low = full(model, ids)
    assert low.dtype == torch.bfloat16
    exact = full(model.float(), ids)  # the same rounded weights: what differs is the computation
    assert (low.float() - exact).norm() / exact.norm() < BFLOAT16


@torch.no_grad()
@each_base
@each_case
def test_float64_is_close_to_float32(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    single = full(model, ids)
    double = full(model.double(), ids)
    assert double.dtype == torch.float64
    assert_same(single, double.float())


@torch.no_grad()
@by_engines(case=SCORE_SCHEMES, family=BASES)
def test_autocast(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    exact = full(model, ids)
    with torch.autocast("cpu", torch.bfloat16):
        low = full(model, ids)
    assert (low.float() - exact).norm() / exact.norm() < BFLOAT16


# ------------------------------------------------------------------------------------------------------ chosen positions

GAPPED = torch.tensor([0, 1, 2, 6, 7, 11, 12, 13, 20, 29])


@torch.no_grad()
@by_engines(case=CASES, family=BASES)
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


@torch.no_grad()
@each_base
@each_score_case
def test_gapped_position_ids_with_a_filled_cache_are_refused(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    cache = DynamicCache(config=model.config)
    model(ids[:, :8], past_key_values=cache, use_cache=True)
    for chosen in ([9, 10], [8, 10], [3, 4]):
        with pytest.raises(ValueError, match="position_ids do not continue"):
            model(
                ids[:, 8:10],
                attention_mask=torch.ones(2, 10, dtype=torch.long),
                position_ids=torch.tensor([chosen]),
                past_key_values=copy.deepcopy(cache),
                use_cache=True,
            )


# ---------------------------------------------------------------------------------------------- guard against no-ops


def silence(model):
    """Replace a patched model's scheme by one that is installed and does nothing."""

    class Silent(PositionEmbedding):
        def embed(self, position_ids):
            return torch.zeros(*position_ids.shape, model.config.hidden_size)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name == "rotary_emb" and patch_of(model).name in ROTARY_SCHEMES:
                base = parent.rotary_emb if hasattr(parent.rotary_emb, "inv_freq") else parent.rotary_emb.rotary
                silent = IdentityRotary(base)
            elif isinstance(child, PositionEmbedding) and any(True for _ in child.modules()):
                silent = Silent()
                silent.like = child.like
            elif name == "posenc" and isinstance(child, ScoreModule):
                silent = ScoreModule()  # scores are plain q.k, values are plain values
            else:
                continue
            setattr(parent, name, silent)
            for module in model.modules():  # attentions of bases without rotation refer to the module
                if "posenc_rotary" in module.__dict__:
                    object.__setattr__(module, "posenc_rotary", silent)


def assert_acts(model, family):
    """Fail unless the model computes something else than the stock one, and than one without positions."""
    ids = tokens(2, LENGTH)
    assert distance(full(model, ids), full(tiny(family), ids)) > DIFFERENT, "stock"
    if patch_of(model) is None or patch_of(model).name not in WITHOUT_POSITIONS:
        assert distance(full(model, ids), full(patch_model(tiny(family), "nope"), ids)) > DIFFERENT, "nope"


@torch.no_grad()
@each_base
@each_case
def test_a_scheme_changes_the_result(case, family):
    assert_acts(patched_model(case, family), family)


@torch.no_grad()
@each_base
def test_that_assertion_fails_without_a_patch(family):
    with pytest.raises(AssertionError, match="stock"):
        assert_acts(tiny(family), family)


@torch.no_grad()
def test_schemes_differ_from_each_other():
    ids = tokens(2, LENGTH)
    results = {case: full(patched_model(case, "llama"), ids) for case in SCHEMES}
    for a in SCHEMES:
        assert all(distance(results[a], results[b]) > DIFFERENT for b in SCHEMES if b != a)


@torch.no_grad()
@each_base
@pytest.mark.parametrize("case", [case for case in SCHEMES if case not in WITHOUT_POSITIONS + JOINING])
def test_a_silent_scheme_is_found(case, family):
    model, ids = patched_model(case, family), tokens(2, LENGTH)
    assert verify(model).ok
    silence(model)
    with pytest.raises(AssertionError, match="nope"):
        assert_acts(model, family)
    # What is left is exactly `nope` ...
    assert_same(full(model, ids), full(patch_model(tiny(family), "nope"), ids))
    # ... and verify, which has nothing to compare with, sees it as well.
    report = verify(model)
    assert not report.ok
    assert report.answers_through == "mask"
