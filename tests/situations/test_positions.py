"""The position channel: pair by pair what it must be, what transformers' own masks say, and never of size T x T."""

import itertools

import pytest
import torch
from decoders import decoder
from families import tiny, tokens
from matrix import matrix
from situations import SCORE_SCHEMES, in_turn, patched_model
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    create_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

from hf_posenc import patch_model
from hf_posenc.core import positions
from hf_posenc.core.positions import DensePositions, Positions
from hf_posenc.transformers_glue.masks import describe_mask, position_channel

LENGTH = 12
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 12], dtype=torch.bool)
RIGHT = LEFT.flip(-1)
HOLES = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1]], dtype=torch.bool)
SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3]])


def sliding(window):
    return and_masks(sliding_window_overlay(window), causal_mask_function)


def packed(segments=SEGMENTS):
    return and_masks(causal_mask_function, packed_sequence_mask_function(segments))


def call(**changes):
    """Arguments of a mask function: a full forward unless changed."""
    return {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "mask_function": causal_mask_function, **changes}


# name -> (arguments of the mask function, 2-D mask, segments, window)
CASES = {
    "causal": (call(), None, None, None),
    "left-padded": (call(attention_mask=LEFT), LEFT, None, None),
    "right-padded": (call(attention_mask=RIGHT), RIGHT, None, None),
    "holes": (call(attention_mask=HOLES), HOLES, None, None),
    "packed": (call(mask_function=packed()), None, SEGMENTS, None),
    "sliding": (call(mask_function=sliding(4)), None, None, 4),
    "sliding-padded": (call(mask_function=sliding(4), attention_mask=LEFT), LEFT, None, 4),
    "sliding-holes": (call(mask_function=sliding(4), attention_mask=HOLES), HOLES, None, 4),
    "packed-sliding": (
        call(mask_function=and_masks(packed_sequence_mask_function(SEGMENTS), sliding(3))), None, SEGMENTS, 3,
    ),
    "sliding-packed": (
        call(mask_function=and_masks(sliding(3), packed_sequence_mask_function(SEGMENTS))), None, SEGMENTS, 3,
    ),
    "packed-padded": (call(mask_function=packed(), attention_mask=RIGHT), RIGHT, SEGMENTS, None),
    "decoding": (call(q_length=1, q_offset=LENGTH - 1), None, None, None),
    "decoding-padded": (call(q_length=1, q_offset=LENGTH - 1, attention_mask=LEFT), LEFT, None, None),
    "chunked-prefill": (call(q_length=5, kv_length=9, q_offset=4), None, None, None),
    "as-many-queries-as-keys": (call(q_length=5, kv_length=5, q_offset=4), None, None, None),
    "chunked-prefill-padded": (call(q_length=5, q_offset=7, attention_mask=LEFT), LEFT, None, None),
    "chunked-prefill-holes": (call(q_length=5, q_offset=7, attention_mask=HOLES), HOLES, None, None),
    "sliding-cache": (
        call(q_length=1, kv_length=4, q_offset=9, kv_offset=6, mask_function=sliding(4)), None, None, 4,
    ),
    "sliding-cache-padded": (
        call(q_length=2, kv_length=5, q_offset=9, kv_offset=6, mask_function=sliding(4), attention_mask=LEFT), LEFT, None, 4,
    ),
    "static-cache": (call(q_length=3, q_offset=torch.tensor(2)), None, None, None),
    # A static cache is longer than the tokens so far, and so is the 2-D mask then.
    "static-cache-padded": (
        call(q_length=3, kv_length=LENGTH + 4, q_offset=torch.tensor(9), attention_mask=LEFT), LEFT, None, None,
    ),
    "static-cache-sliding": (
        call(q_length=1, kv_length=LENGTH, q_offset=torch.tensor(6), mask_function=sliding(4)), None, None, 4,
    ),
}  # fmt: skip


def at(table, row, slot, default):
    """Entry of a 2-D table, or what stands beyond it."""
    return default if table is None or slot >= table.shape[1] else table[row, slot].item()


def literal(arguments, padding, segments, window):
    """Visibility and distance of every pair, (B, Q, L), by the words of the definition, one pair at a time."""
    queries, keys = arguments["q_length"], arguments["kv_length"]
    first_query, first_key = int(arguments.get("q_offset", 0)), int(arguments.get("kv_offset", 0))
    visible = torch.zeros(2, queries, keys, dtype=torch.bool)
    distance = torch.zeros(2, queries, keys, dtype=torch.int64)
    for b, q, k in itertools.product(range(2), range(queries), range(keys)):
        i, j = q + first_query, k + first_key
        if j > i or not at(padding, b, j, padding is None) or at(segments, b, i, 0) != at(segments, b, j, 0):
            continue
        if window is not None and i - j >= window:
            continue
        visible[b, q, k] = True
        # Distance counts the real tokens passed on the way from the key to the query.
        distance[b, q, k] = sum(at(padding, b, slot, padding is None) for slot in range(j + 1, i + 1))
    return visible, distance


def unpacked(arguments):
    channel = position_channel(**arguments)
    return positions.read(channel, arguments["q_length"], arguments["kv_length"])


def is_compact(arguments, channel):
    return positions.is_compact(channel) and channel.shape[-1] == arguments["q_length"] + arguments["kv_length"]


@pytest.mark.parametrize("case", CASES)
def test_channel_is_the_literal_definition(case):
    """And what transformers' own mask shows; scores of what is hidden are the smallest number."""
    arguments, padding, segments, window = CASES[case]
    channel = position_channel(**arguments)
    assert channel.dtype == torch.int32
    assert channel.ndim == 4
    assert is_compact(arguments, channel), "a dense form where the compact one would do"
    where = unpacked(arguments)
    assert isinstance(where, Positions)
    visible, distance = literal(arguments, padding, segments, window)
    assert where.visible().expand(2, 1, -1, -1)[:, 0].equal(visible)
    visible &= where.query_valid[:, :, None]  # what padding sees has no meaning
    assert where.distance().expand(2, 1, -1, -1)[:, 0][visible].long().equal(distance[visible])
    assert visible.any(), "an empty case shows nothing"
    square = arguments["q_length"] == arguments["kv_length"]
    assert not where.cut(slice(1), slice(None)).plain
    assert where.plain == (square and bool(where.visible().equal(torch.ones_like(where.visible()).tril())))
    theirs = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert where.visible().expand(theirs.shape).equal(theirs)
    logits = torch.randn(2, 3, arguments["q_length"], arguments["kv_length"])
    masked, seen = where.mask(logits), where.visible().expand_as(logits)
    assert masked[seen].equal(logits[seen])
    assert (masked[~seen] == torch.finfo(torch.float32).min).all()


# ---------------------------------------------------------------------------------------- masks without a compact description


def every_second_key(batch, head, query, key):
    return (query - key) % 2 == 0


UNKNOWN = {
    "overlay-and": and_masks(causal_mask_function, every_second_key),
    "overlay-or": and_masks(causal_mask_function, or_masks(sliding(3), every_second_key)),
    "two-windows": and_masks(sliding(3), sliding_window_overlay(5)),
    "not-ours": lambda batch, head, query, key: key <= query,
}


@pytest.mark.rows(slow=6)
@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("padding", [None, LEFT, HOLES], ids=["unpadded", "left-padded", "holes"])
def test_an_unknown_mask_function_travels_densely(name, padding):
    shape = describe_mask(UNKNOWN[name])
    assert shape is None or "causal" not in shape
    arguments = call(mask_function=UNKNOWN[name], attention_mask=padding)
    channel = position_channel(**arguments)
    assert channel.shape[-2:] == (LENGTH + 1, LENGTH + 1)
    where = unpacked(arguments)
    assert isinstance(where, DensePositions)
    theirs = sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert where.visible().expand_as(theirs).equal(theirs)
    counted = (torch.ones(1, LENGTH, dtype=torch.long) if padding is None else padding.long()).cumsum(-1)
    expected = (counted[:, :, None] - counted[:, None, :])[:, None]
    assert where.distance().expand_as(theirs)[theirs].long().equal(expected.expand_as(theirs)[theirs])
    assert (where.query_positions + 1).equal(counted.to(torch.int32).expand(where.query_positions.shape))


def test_a_bidirectional_mask_is_refused():
    with pytest.raises(ValueError, match=r"Set config.is_causal back to True"):
        position_channel(**call(mask_function=bidirectional_mask_function))


@pytest.mark.parametrize("function", [sliding_window_overlay(3), or_masks(sliding(3), every_second_key)])
@pytest.mark.parametrize("cached", [0, 5])
def test_a_mask_function_that_shows_the_future_is_refused(function, cached):
    assert describe_mask(function) is None or "causal" not in describe_mask(function)
    with pytest.raises(ValueError, match="keys that come after it"):
        position_channel(**call(mask_function=function, q_length=LENGTH - cached, q_offset=cached))


# ------------------------------------------------------------------------------------------------------ a user's own 4-D mask


def as_float(mask, dtype=torch.float32, hidden=None):
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


FORMS = {
    "bool": lambda mask: mask,
    "float": as_float,
    "float-inf": lambda mask: as_float(mask, hidden=-torch.inf),
    "bfloat16": lambda mask: as_float(mask, torch.bfloat16),
}


@pytest.mark.rows(slow=6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("queries", [LENGTH, 1, 4])
def test_a_users_own_mask(form, queries):
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[-queries:]
    mask = (causal & (torch.arange(LENGTH) % 5 != 3) | (causal & ~causal.roll(1, -1) & causal))[None, None]
    own = torch.arange(LENGTH - queries, LENGTH)
    mask[..., torch.arange(queries), own] = True  # every query sees itself, and so says where it sits
    where = positions.read(FORMS[form](mask), queries, LENGTH)
    assert where.visible().equal(mask)
    expected = (own[:, None] - torch.arange(LENGTH))[None, None]
    assert where.distance()[mask].long().equal(expected[mask])
    logits = torch.randn(1, 2, queries, LENGTH)
    weights = where.mask(logits).softmax(-1)
    assert weights.equal(logits.masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1))


def test_a_float_mask_is_added():
    mask = as_float(torch.ones(4, 4, dtype=torch.bool).tril())[None, None]
    mask[..., 3, 1] = -2.5
    where = positions.read(mask, 4, 4)
    logits = torch.randn(1, 1, 4, 4)
    assert where.mask(logits)[0, 0, 3, 1] == logits[0, 0, 3, 1] - 2.5
    assert where.visible()[0, 0, 3, 1]


@matrix(in_turn(SCORE_SCHEMES, FORMS, ["gpt2", "llama", "llama"]), scheme=None, form=None, family=None)
def test_a_users_own_causal_mask_gives_the_same_logits(family, scheme, form):
    model = patch_model(tiny(family), scheme, seed=0)
    ids = tokens(2, LENGTH)
    mask = as_float(torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril())
    with torch.no_grad():
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, model(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 12, dtype=torch.bool), torch.ones(2, 1, 12, 11, dtype=torch.bool), torch.ones(2, 1, 12, 12).long()],
)
def test_what_fits_nothing_is_refused(mask):
    with pytest.raises(ValueError, match=r"12 queries and 12 keys: pass a 2-D mask"):
        positions.read(mask, 12, 12)


def cached_call(model, cache, length=6):
    """A cache with some tokens, and what comes next."""
    past = StaticCache(config=model.config, max_cache_len=16) if cache == "static" else DynamicCache()
    with torch.no_grad():
        model(tokens(1, length), past_key_values=past)
    return past, tokens(1, 4, seed=2)


@pytest.mark.parametrize("shape", [(4, 10), (5, 10), (positions.ROWS, 14), (4, 16)], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_users_own_mask_of_integers_is_never_taken_for_ours(cache, shape):
    """Whatever its shape: the second and the third are those of our dense and our compact form."""
    model = patch_model(tiny("llama"), "alibi")
    past, ids = cached_call(model, cache)
    for dtype in (torch.int32, torch.int64, torch.uint8):
        with pytest.raises(ValueError, match=r"bool .*mask"):
            model(ids, past_key_values=past, attention_mask=torch.ones(1, 1, *shape, dtype=dtype).tril(6))


VIEWS = {
    "bidirectional": lambda mask: mask.logical_or(torch.ones_like(mask)),
    "one key": lambda mask: mask.logical_or(torch.zeros_like(mask).index_fill(-1, torch.tensor([8]), 1)),
}


@pytest.mark.rows(slow=9)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
def test_a_users_own_mask_that_shows_the_future_is_refused(cache, view, form):
    model = patch_model(tiny("llama"), "alibi")
    past, ids = (None, tokens(1, 10)) if cache is None else cached_call(model, cache)
    queries, keys = ids.shape[1], 16 if cache == "static" else 10
    causal = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(10 - queries)
    with pytest.raises(ValueError, match="keys that come after it"):
        model(ids, past_key_values=past, attention_mask=FORMS[form](VIEWS[view](causal)))
    with torch.no_grad():
        found = model(ids, past_key_values=past, attention_mask=FORMS[form](causal)).logits
        past, ids = (None, ids) if cache is None else cached_call(model, cache)
        torch.testing.assert_close(found, model(ids, past_key_values=past).logits, atol=1e-5, rtol=0)


def test_a_mask_by_kind_of_layer_is_checked_too():
    model = patch_model(tiny("gemma2"), "alibi")
    masks = {kind: torch.ones(1, 1, 6, 6, dtype=torch.bool) for kind in ("full_attention", "sliding_attention")}
    with pytest.raises(ValueError, match="keys that come after it"):
        model.model(tokens(1, 6), attention_mask=masks)


@pytest.mark.rows(default=0)
@pytest.mark.parametrize("mask", [torch.ones(1, 1, 6, 6, dtype=torch.bool), torch.ones(1, 1, 6, 6, dtype=torch.int32)])
def test_a_compiled_model_refuses_them_too(mask):
    model = torch.compile(patch_model(tiny("llama"), "alibi"), fullgraph=True, backend="aot_eager")
    ids = tokens(1, 6)
    with torch.no_grad():
        model(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), use_cache=False)
        with pytest.raises((RuntimeError, ValueError), match=r"come after it|bool or float mask"):
            model(ids, attention_mask=mask, use_cache=False)


# ------------------------------------------------------------------------------------------------------- chosen position ids


@pytest.mark.parametrize("scheme", ["rope", "alibi", "sinusoidal"])
@pytest.mark.parametrize("mask", [None, torch.ones(1, 8, dtype=torch.long)], ids=["no mask", "mask"])
def test_tensors_without_numbers_pass_the_checks(scheme, mask):
    """As in tools that predict memory: no check can read a value."""
    model = patch_model(tiny("llama"), scheme)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(tokens(1, 8))
        mask = None if mask is None else mode.from_tensor(mask)
        assert model(ids, attention_mask=mask).logits.shape[:2] == (1, 8)


RESUMED = {  # mask, what generate counts, positions
    "right-padded": ([1, 1, 1, 0, 0, 1, 1], [0, 1, 2, 0, 0, 1, 2], [0, 1, 2, 2, 2, 3, 4]),
    "holes": ([0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 0, 2, 3, 4], [-1, 0, 1, 1, 2, 3, 4]),
    "holes, right-padded": ([1, 1, 0, 1, 1, 0, 1], [0, 1, 0, 2, 3, 0, 1], [0, 1, 1, 2, 3, 3, 4]),
}


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("queries", [7, 2, 1])
def test_what_generate_counts_behind_padding_is_none_of_the_callers_choice(case, queries):
    mask, ids, expected = (torch.tensor([row]) for row in RESUMED[case])
    where = unpacked(
        call(batch_size=1, q_length=queries, kv_length=7, q_offset=7 - queries, attention_mask=mask.bool())
    )
    after = where.follow(ids[:, -queries:])
    assert after.query_positions.tolist() == expected[:, -queries:].tolist()
    assert after.key_positions.tolist() == expected.tolist()


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "shaw", "far_rope", "temperature"])
def test_ids_that_fall_where_a_query_sees_the_key_are_refused(scheme):
    """Packed documents in a call whose mask shows both: as a rule by a mask of ones, or since a cache is begun."""
    model, ids = patched_model(scheme, "llama"), tokens(1, 8)
    document = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    apart = ((document[:, None] == document) & torch.ones(8, 8, dtype=torch.bool).tril())[None, None]
    ones, causal, hole = torch.ones_like(ids), torch.ones_like(apart).tril(), (torch.arange(8) != 4).long()[None]
    restarting = {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])}
    for mask, use_cache in ((ones, False), (ones, True), (None, True), (causal, False), (hole, False)):
        with pytest.raises(ValueError, match="position_ids fall inside a document"):
            model(ids, attention_mask=mask, use_cache=use_cache, **restarting)
    wanted = model(ids[:, 5:], use_cache=False).logits
    for mask in (None, apart):
        found = model(ids, attention_mask=mask, use_cache=False, **restarting).logits[:, 5:]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_ids_of_padding_may_fall():
    model, ids = patch_model(tiny("llama"), "alibi"), tokens(1, 8)
    mask = (torch.arange(8) > 2).long()[None]
    expected = model(ids[:, 3:], position_ids=2 * torch.arange(5)[None] + 1).logits
    for padding in ([0, 0, 0], [1, 1, 1], [9, 8, 7]):
        position_ids = torch.tensor([[*padding, 1, 3, 5, 7, 9]])
        for use_cache in (False, True):
            found = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=use_cache).logits[:, 3:]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-alibi", "llama-rope", "bloom-sinusoidal"])
def test_a_mask_that_numbers_documents_is_refused(case):
    """transformers makes it a mask of ones."""
    family, scheme = case.split("-")
    base, ids = decoder(family) if family == "bloom" else tiny(family), tokens(1, 8)
    with pytest.raises(ValueError, match="attention_mask numbers documents"):
        patch_model(base, scheme)(ids, attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2, 3, 3]]))


PIECEWISE = [0, 1, 2, 3, 7, 8, 9, 10]
"""Chosen positions of which each, behind three tokens of padding, is the counted position or the slot."""


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["alibi", "shaw", "t5"])
def test_chosen_ids_that_change_from_counted_positions_to_slots_are_chosen(scheme, family):
    model, ids = patch_model(tiny(family), scheme, seed=0), tokens(1, 8)
    # The same tokens among others that nobody can see: the mask says so, and positions are those of the slots.
    shown = torch.zeros(11, dtype=torch.bool)
    shown[PIECEWISE] = True
    mask = torch.ones(11, 11, dtype=torch.bool).tril() & (shown | torch.eye(11, dtype=torch.bool))
    among = torch.zeros(1, 11, dtype=torch.long)
    among[:, PIECEWISE] = ids
    expected = model(among, attention_mask=mask[None, None], use_cache=False).logits[:, PIECEWISE]

    padded = torch.nn.functional.pad(ids, (3, 0))
    attention_mask = (torch.arange(11) > 2).long()[None]
    position_ids = torch.tensor([[0, 0, 0, *PIECEWISE]])
    arguments = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
    actual = model(padded, **arguments).logits[:, 3:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    cache = DynamicCache(config=model.config)
    model(padded[:, :6], attention_mask=attention_mask[:, :6], past_key_values=cache, use_cache=True)
    rest = {"attention_mask": attention_mask, "position_ids": position_ids[:, 6:], "use_cache": True}
    with pytest.raises(ValueError, match="position_ids do not continue"):
        model(padded[:, 6:], past_key_values=cache, **rest)


@torch.no_grad()
@pytest.mark.rows(default=7, slow=19)
@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()], ids=["compact", "dense"])
@pytest.mark.parametrize("scheme", ["alibi", "rope", "sinusoidal"])
def test_position_ids_that_are_no_numbers_of_enough_digits_are_refused(scheme, mask):
    model, ids = patched_model(scheme, "llama"), tokens(1, 8)
    with pytest.raises(ValueError, match="must be integers, or real numbers in float32 or float64, not torch"):
        model(ids, attention_mask=mask, position_ids=torch.arange(8)[None].bfloat16(), use_cache=False)


NEGATIVE = {
    "gpt2": ("gpt2", "learned", {}),
    "gpt2-sinusoidal": ("gpt2", "sinusoidal", {}),
    "opt": ("opt", "learned", {}),
    "llama": ("llama", "sinusoidal", {}),
    "llama-every-layer": ("llama", "sinusoidal", {"placement": "every_layer"}),
    "bloom": ("bloom", "sinusoidal", {}),
}


@torch.no_grad()
@pytest.mark.parametrize("case", NEGATIVE)
def test_negative_positions_are_for_padding(case):
    family, scheme, options = NEGATIVE[case]
    base, ids = decoder(family) if family == "bloom" else tiny(family), tokens(1, 8)
    model = patch_model(base, scheme, seed=0, **options)
    expected = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    padded, mask = torch.nn.functional.pad(ids, (2, 0)), (torch.arange(10) > 1).long()[None]
    counted = mask.cumsum(-1) - 1  # -1 at the padding
    actual = model(padded, attention_mask=mask, position_ids=counted, use_cache=False).logits[:, 2:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for mask in (torch.ones_like(padded), None):
        with pytest.raises(ValueError, match="position_ids are negative"):
            model(padded, attention_mask=mask, position_ids=torch.arange(10)[None] - 1, use_cache=False)


# ----------------------------------------------------------------------------------------------------------------- no T x T


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                # What is allocated: an expanded view of one number is one number.
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def left_padding(length):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def random_holes(length):
    return torch.randint(4, (2, length), generator=torch.Generator().manual_seed(0)).clamp(max=1)


def documents(length):
    return (torch.arange(length) % 17)[None].expand(2, -1)


GROWTH = {
    "causal": lambda length: {},
    "padded": lambda length: {"attention_mask": left_padding(length)},
    "holes": lambda length: {"attention_mask": random_holes(length)},
    "packed": lambda length: {"position_ids": documents(length)},
}
LENGTHS = (64, 128, 256)


@pytest.mark.parametrize("shape", GROWTH)
@pytest.mark.parametrize(
    ("family", "make"),
    [("llama", create_causal_mask), ("mistral", create_sliding_window_causal_mask)],
    ids=["llama", "mistral-sliding"],
)
def test_nothing_larger_is_made_on_the_way(family, make, shape):
    """Neither transformers' part of mask making nor ours, nor reading the channel, forms a tensor of size T x T."""
    config = patch_model(tiny(family), "alibi").config
    sizes = []
    for length in LENGTHS:
        arguments = {"attention_mask": None, "past_key_values": None, **GROWTH[shape](length)}
        embeddings = torch.zeros(2, length, 1)
        with Largest() as largest:
            channel = make(config=config, inputs_embeds=embeddings, **arguments)
            where = positions.read(channel, length, length)
            where.follow(arguments.get("position_ids"))
        sizes.append(largest.numel)
    assert sizes[0] < LENGTHS[0] ** 2
    assert sizes[2] <= 4 * sizes[0]
    assert sizes[2] < LENGTHS[2] ** 2 // 4
