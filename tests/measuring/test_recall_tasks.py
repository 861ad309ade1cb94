"""Recall tasks against their published definitions, written as loops, on a model that looks up and one that guesses."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from hf_posenc.evaluation import TASKS, TaskTokens, measure_recall, recall_examples

WORDS = tuple((number, number + 1, number + 2) for number in range(0, 90, 3))
TOKENS = TaskTokens(first=90, words=WORDS)
KEYS, VALUES, NOISE = set(TOKENS.key_ids), set(TOKENS.value_ids), set(TOKENS.noise_ids)
CELLS = [(task, items, length) for task in TASKS for items, length in ((4, 64), (8, 128), (4, 257))]


def draw(task, items=4, length=64, count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, answers = recall_examples(task, TOKENS, count=count, items=items, length=length, generator=generator)
    assert rows.shape == answers.shape == (count, length)
    assert rows.dtype == torch.int64
    assert (rows[:, 0] == TOKENS.start_of(task)).all()
    return rows.tolist(), answers.tolist()


@pytest.mark.parametrize(("items", "length"), [(4, 64), (8, 128), (16, 65), (128, 2048)])
def test_multi_query_recall_asks_for_each_pair_once(items, length):
    for row, answers in zip(*draw("multi_query_recall", items, length, count=8), strict=True):
        pairs, rest = row[1 : 2 * items + 1], row[2 * items + 1 :]
        value_of = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(value_of) == len(set(value_of.values())) == items
        assert value_of.keys() <= KEYS
        assert set(value_of.values()) <= VALUES
        asked = [place for place in range(length) if answers[place]]
        assert sorted(row[place - 1] for place in asked) == sorted(value_of)
        assert all(row[place] == value_of[row[place - 1]] for place in asked)
        assert all(place % 2 == 0 and place > 2 * items for place in asked)  # in slots of two
        assert sum(token in NOISE for token in rest) == len(rest) - 2 * items


def test_places_of_queries_follow_the_power_law():
    """The mean slot of one query is the mean of the law: the middle for 1, near the pairs for Zoology's 0.01."""
    for power in (1.0, 0.01):
        generator = torch.Generator().manual_seed(0)
        _, answers = TASKS["multi_query_recall"](TOKENS, 4000, 1, 203, generator, power=power)
        slots = (answers.long().argmax(-1) - 4) / 2
        odds = [(slot + 1) ** (power - 1) for slot in range(100)]
        expected = sum(slot * odd for slot, odd in enumerate(odds)) / sum(odds)
        assert slots.double().mean().item() == pytest.approx(expected, rel=0.06)


def test_noisy_recall_asks_for_keys_that_were_there():
    noise = slots = 0
    for row, answers in zip(*draw("noisy_recall", items=8, length=129, count=200), strict=True):
        value_of = {}
        for place in range(1, 129, 2):
            key, value = row[place : place + 2]
            assert not answers[place]
            slots += 1
            if key in NOISE:
                assert value in NOISE
                assert not answers[place + 1]
                noise += 1
                continue
            assert key in KEYS
            assert value in VALUES
            assert answers[place + 1] == (key in value_of)
            assert value_of.setdefault(key, value) == value
        assert len(value_of) <= 8
        assert answers[-1]  # the last slot always asks
    assert noise / slots == pytest.approx(0.2, abs=0.02)


def test_selective_copies_are_the_scattered_tokens_in_their_order():
    for row, answers in zip(*draw("selective_copy", items=16, length=256), strict=True):
        end = 256 - 16
        assert row[end - 1] == TOKENS.copy
        assert [token for token in row[1 : end - 1] if token != TOKENS.noise_ids[0]] == row[end:]
        assert set(row[end:]) <= set(TOKENS.key_ids[:14])
        assert answers == [False] * end + [True] * 16


@pytest.mark.parametrize("length", [42, 100])
def test_a_string_is_copied_whole(length):
    for row, answers in zip(*draw("string_copy", items=20, length=length), strict=True):
        end = length - 20
        assert row[1:21] == row[end:]
        assert set(row[end:]) <= set(TOKENS.key_ids[:26])
        assert set(row[21 : end - 1]) <= NOISE
        assert row[end - 1] == TOKENS.copy
        assert answers == [False] * end + [True] * 20


def test_induction_repeats_words_and_no_others():
    for row, answers in zip(*draw("induction", items=5, length=100), strict=True):
        passage = row[1:16]  # five words of three tokens
        words = {tuple(passage[start : start + 3]) for start in range(0, 15, 3)}
        assert len(words) == 5
        assert words <= set(WORDS)
        assert row[-15:] == passage
        assert not set(row[16:-15]) & set(passage)
        assert answers == [False] * 88 + [True] * 12


def test_a_passage_that_does_not_fit_twice_has_fewer_words():
    rows, answers = draw("induction", items=8, length=40)  # 19 tokens of 39: six words
    assert all(row[1:19] == row[-18:] and sum(asked) == 15 for row, asked in zip(rows, answers, strict=True))


class LookUp(nn.Module):
    """Predicts what followed the longest earlier text that ends like the text so far; copies count their tokens."""

    def __init__(self, sure=20.0):
        super().__init__()
        self.embedding = nn.Embedding(len(TOKENS), 2)
        self.sure = sure

    def forward(self, input_ids, use_cache=None):
        logits = torch.zeros(*input_ids.shape, len(TOKENS))
        for row, tokens in enumerate(input_ids.tolist()):
            for place in range(1, len(tokens)):
                logits[row, place, self.next(tokens[: place + 1])] = self.sure
        return CausalLMOutput(logits=logits)

    def next(self, text):
        if TOKENS.copy in text:
            end = text.index(TOKENS.copy)
            copied = [token for token in text[1:end] if token not in NOISE]
            return copied[min(len(text) - 1 - end, len(copied) - 1)]
        best, longest = 0, 0
        for place in range(1, len(text) - 1):
            size = 0
            while size < place and text[place - size] == text[-1 - size]:
                size += 1
            if size > longest:
                best, longest = text[place + 1], size
        return best


def test_a_model_that_looks_up_is_right_everywhere():
    results = measure_recall(LookUp(), TOKENS, cells=[cell for cell in CELLS if cell[2] <= 128], examples=6)
    assert [(each.task, each.items, each.length) for each in results] == [cell for cell in CELLS if cell[2] <= 128]
    for each in results:
        assert (each.accuracy, each.exact, each.examples) == (1, 1, 6), each
        assert each.loss < 1e-5


def test_an_untrained_model_guesses():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    results = measure_recall(LlamaForCausalLM(config), TOKENS, cells=CELLS, examples=8)
    assert all(each.accuracy < 0.05 and each.exact == 0 for each in results)
    uniform = torch.tensor(len(TOKENS)).log().item()
    assert all(each.loss == pytest.approx(uniform, abs=0.1) for each in results)


def test_equal_logits_are_not_right():
    assert all(each.accuracy == 0 for each in measure_recall(LookUp(sure=0.0), TOKENS, cells=CELLS[:2], examples=2))


def test_examples_depend_on_the_seed_and_their_cell_alone():
    rows = []

    class Recording(LookUp):
        def next(self, text):
            rows.append(tuple(text))
            return 0

    def read(cells, seed):
        rows.clear()
        measure_recall(Recording(), TOKENS, cells=cells, examples=3, seed=seed)
        return {row for row in rows if len(row) == 63}  # the answers begin somewhere; the last token predicts nothing

    alone = read(CELLS[:1], 0)
    assert alone == read([CELLS[0]], 0)
    assert alone <= read([CELLS[3], CELLS[0]], 0)
    assert not alone & read(CELLS[:1], 1)


@pytest.mark.parametrize(
    ("task", "items", "length", "message"),
    [
        ("string_kopy", 4, 64, r"no task 'string_kopy'\. Did you mean string_copy"),
        ("multi_query_recall", 16, 64, "needs 1 items or more, and 65 tokens, not 64"),
        ("selective_copy", 0, 64, "needs 1 items or more"),
        ("induction", 1, 64, "needs 2 items or more"),
        ("induction", 4, 12, "13 tokens, not 12"),
        ("noisy_recall", 129, 4096, "as many keys and values, not 128, 128"),
        ("induction", 30, 4096, "needs more words than 30"),
    ],
)
def test_what_does_not_fit_is_refused(task, items, length, message):
    with pytest.raises(ValueError, match=message):
        measure_recall(LookUp(), TOKENS, cells=[(task, items, length)])
