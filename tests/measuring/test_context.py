"""Both perplexities, loss by position and bits per byte in one pass, against a loop that scores one window at a time."""

import math

import pytest
import torch
from processes import Processes, among
from transformers import GPT2Config, GPT2LMHeadModel

from hf_posenc import patch_model
from hf_posenc.evaluation import (
    measure_context,
    non_overlapping_perplexity,
    short_context_regression,
    sliding_window_perplexity,
)

VOCABULARY = 41


def make_model(scheme="alibi"):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.2,
        loss_type="ForCausalLM",
    )
    return patch_model(GPT2LMHeadModel(config).eval(), scheme)


def make_documents(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def window_losses(model, tokens):
    """Float64 losses of tokens 1.. of one window, from the softmax written out."""
    with torch.no_grad():
        logits = model.double()(input_ids=tokens[None]).logits[0].double()
    return [-(row - row.logsumexp(0))[token].item() for row, token in zip(logits[:-1], tokens[1:], strict=True)]


def by_hand(model, documents, length, stride):
    """(nll, tokens) of sliding and of fresh windows, and losses by place; every window on its own."""
    sliding, fresh, places = [], [], {}
    for document in documents:
        total = len(document)
        if total < 2:
            continue
        end = min(length, total)
        sliding += window_losses(model, document[:end])
        while end < total:
            step = min(stride, total - end)
            end += step
            sliding += window_losses(model, document[end - length : end])[-step:]
        for start in range(0, total, length):
            window = document[start : start + length]
            if len(window) > 1:
                losses = window_losses(model, window)
                fresh += losses
                for place, loss in enumerate(losses, start=1):
                    places.setdefault(place, []).append(loss)
    return sliding, fresh, places


@pytest.mark.parametrize("lengths", [[100], [16], [5, 40, 16, 2, 1, 33, 0, 17], [31, 48]], ids=str)
@pytest.mark.parametrize(("length", "stride"), [(16, 4), (16, 8), (16, 1), (8, 2), (2, 1)])
def test_equals_one_window_at_a_time(lengths, length, stride):
    documents = make_documents(lengths)
    (row,) = measure_context(
        make_model(), documents, lengths=[length], stride=stride, byte_counts=[3 * n for n in lengths], batch_size=3
    )
    sliding, fresh, places = by_hand(make_model(), documents, length, stride)
    assert row.sliding.tokens == len(sliding) == sum(max(0, n - 1) for n in lengths)
    assert row.non_overlapping.tokens == len(fresh) == sum(n - math.ceil(n / length) for n in lengths)
    assert row.sliding.nll == pytest.approx(sum(sliding), rel=1e-5)
    assert row.non_overlapping.nll == pytest.approx(sum(fresh), rel=1e-5)
    assert row.early_token_gap == pytest.approx(sum(fresh) / len(fresh) - sum(sliding) / len(sliding), abs=1e-4)
    assert row.bits_per_byte == pytest.approx(sum(sliding) / math.log(2) / (3 * sum(lengths)), rel=1e-5)
    assert sum(part.tokens for part in row.by_position) == len(fresh)
    for part in row.by_position:
        expected = [loss for place in range(part.first, part.last) for loss in places.get(place, [])]
        assert part.tokens == len(expected)
        assert part.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_equals_the_functions_for_one_text():
    (tokens,) = make_documents([101])
    model = make_model("nope")
    (row,) = measure_context(model, [tokens], lengths=[32], stride=8)
    sliding = sliding_window_perplexity(model, tokens, length=32, stride=8)
    fresh = non_overlapping_perplexity(model, tokens, length=32)
    for ours, theirs in ((row.sliding, sliding), (row.non_overlapping, fresh)):
        assert (ours.method, ours.length, ours.stride, ours.windows, ours.tokens) == (
            theirs.method,
            theirs.length,
            theirs.stride,
            theirs.windows,
            theirs.tokens,
        )
        assert ours.nll == pytest.approx(theirs.nll, rel=1e-6)


def test_default_stride_and_several_lengths():
    rows = measure_context(make_model(), make_documents([70]), lengths=[16, 6, 7])
    assert [(row.length, row.sliding.stride) for row in rows] == [(16, 4), (6, 3), (7, 1)]
    assert {"length", "sliding", "non_overlapping", "by_position", "early_token_gap", "bits_per_byte"} == set(
        rows[0].to_dict()
    )
    assert rows[0].bits_per_byte is None


def test_what_a_patch_costs_at_short_lengths():
    documents = make_documents([200])
    before = measure_context(make_model("nope"), documents, lengths=[8, 16, 32])
    after = measure_context(make_model("alibi"), documents, lengths=[8, 16, 32])
    cost = short_context_regression(before, after, trained_length=16)
    assert cost == {n: after[i].sliding.loss - before[i].sliding.loss for i, n in enumerate((8, 16))}
    assert all(value != 0 for value in cost.values())


def test_modes_are_given_back():
    model = make_model().train()
    model.transformer.h[0].eval()
    measure_context(model, make_documents([20]), lengths=[8])
    assert model.training
    assert not model.transformer.h[0].training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [1]}, "length must be at least 2"),
        ({"lengths": [16], "stride": 5}, "must divide the length 16"),
        ({"lengths": [16], "stride": 16}, "be less, not 16"),
        ({"lengths": [16], "batch_size": 0}, "batch_size"),
        ({"lengths": [16], "byte_counts": [1, 2]}, "1 documents and 2 byte counts"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        measure_context(make_model(), make_documents([40]), **options)
    with pytest.raises(ValueError, match="nothing to predict"):
        measure_context(make_model(), make_documents([1, 0]), lengths=[4])
    with pytest.raises(RuntimeError, match="init_process_group"):
        measure_context(make_model(), make_documents([9]), lengths=[4], distributed=True)


def measured():
    documents = make_documents([90, 7, 41])
    return [row.to_dict() for row in measure_context(make_model(), documents, lengths=[8, 32], distributed=True)]


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(tmp_path):
    """Bit for bit: the same batches, added up in the same order."""
    processes, results = Processes(3), []
    for number in (1, 2, 3):
        answers = processes.run(among, number, str(tmp_path / str(number)), measured)
        assert [answer is not None for answer in answers] == [rank < number for rank in range(3)]
        results += answers[:number]
    processes.stop()
    assert all(result == results[0] for result in results)
