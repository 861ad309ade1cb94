"""Retrieval tests, on a model that finds everything, on one that guesses, and on one that only looks nearby."""

import math
import re

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from hf_posenc.evaluation import induction_copy, retrieve

VOCABULARY = 300


class Oracle(nn.Module):
    """Predicts what followed the last occurrence of the last two tokens (or of one), at most `reach` tokens back."""

    def __init__(self, reach=10**9, sure=20.0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 2)
        self.reach, self.sure = reach, sure

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, use_cache=None):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, tokens in enumerate(input_ids.tolist()):
            for place in range(len(tokens)):
                for size in (3, 2, 1):
                    tail = tokens[place - size + 1 : place + 1]
                    before = [
                        end
                        for end in range(size - 1, place)
                        if tokens[end - size + 1 : end + 1] == tail and place - end <= self.reach
                    ]
                    if len(tail) == size and before:
                        logits[row, place, tokens[before[-1] + 1]] = self.sure
                        break
        return CausalLMOutput(logits=logits)


class Guessing(Oracle):
    def forward(self, input_ids, use_cache=None):
        return CausalLMOutput(logits=torch.zeros(*input_ids.shape, VOCABULARY))


class Digits:
    """A tokenizer of characters."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [min(ord(character), VOCABULARY - 1) for character in text]
        return type("Encoding", (), {"input_ids": ids})


TESTS = {
    "induction": lambda model, **options: induction_copy(model, passage=6, **options),
    "passkey": lambda model, **options: retrieve(model, Digits(), **options),
    "multikey": lambda model, **options: retrieve(model, Digits(), "niah_multikey", **options),
    "needle": lambda model, **options: retrieve(model, Digits(), text="Call me Ishmael. ", **options),
}
LENGTHS = {"induction": [16, 40], "passkey": [140, 180], "needle": [140, 150], "multikey": [700]}


def test_an_oracle_finds_everything():
    cells = TESTS["induction"](Oracle(), lengths=[16, 40], depths=(0.0, 0.5, 1.0), trials=4)
    assert [(cell.length, cell.depth) for cell in cells] == [(n, d) for n in (16, 40) for d in (0.0, 0.5, 1.0)]
    assert all(cell.accuracy == cell.exact == 1 for cell in cells)
    assert all(cell.loss < 1e-4 for cell in cells)
    assert all(cell.tokens == cell.trials * 4 for cell in cells)


@pytest.mark.parametrize("name", ["passkey", "needle"])
def test_a_number_in_a_text_is_found_from_the_words_before_it(name):
    """`... is 12345`: the oracle copies what followed `is ` before; all but the first digit are sure."""
    cells = TESTS[name](Oracle(), lengths=LENGTHS[name], depths=(0.0, 1.0), trials=3)
    assert all(cell.accuracy >= 5 / 6 for cell in cells)
    blind = TESTS[name](Oracle(reach=12), lengths=LENGTHS[name], depths=(0.0,), trials=3)
    assert all(cell.accuracy < 0.7 for cell in blind)


@pytest.mark.parametrize("name", TESTS)
def test_a_model_that_guesses_gets_nothing(name):
    """Equal scores are no first choice: argmax would call the lowest id one."""
    for cell in TESTS[name](Guessing(), lengths=LENGTHS[name], depths=(0.0,), trials=4):
        assert cell.accuracy == cell.exact == 0
        assert cell.loss == pytest.approx(math.log(VOCABULARY), rel=1e-5)
        assert 0 < cell.chance <= 0.1


class Perfect(Oracle):
    """Knows every token before it comes, and keeps the texts that it reads."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def forward(self, input_ids, use_cache=None):
        self.texts += ["".join(map(chr, row)) for row in input_ids.tolist()]
        logits = nn.functional.one_hot(input_ids.roll(-1, 1), VOCABULARY) * self.sure
        return CausalLMOutput(logits=logits)


@pytest.mark.parametrize(("task", "hidden"), [("niah_single", 1), ("niah_multikey", 4), ("vt", 5)])
def test_a_reader_of_ruler_finds_the_answer_in_the_text(task, hidden):
    """The answer is worked out again from the sentences that stand in the text."""
    model = Perfect()
    cells = retrieve(model, Digits(), task, lengths=[900], depths=(0.0, 0.4, 1.0), trials=2)
    assert all(cell.exact == 1 and cell.length == 900 for cell in cells)
    assert len(set(model.texts)) == 6
    for index, text in enumerate(model.texts):
        assert len(text) == 900
        if task == "vt":
            found = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.MULTILINE)
            asked = re.search(r"assigned the value (\d+) in the text", text)[1]
            values = {}
            for name, value in found:
                values[name] = values.get(value, value)
            answer = " ".join(name for name, value in values.items() if value == asked)
        else:
            found = re.findall(r"^One of the special magic numbers for (\S+) is: (\d+)\.$", text, re.MULTILINE)
            answer = dict(found)[re.search(r"special magic number for (\S+) mentioned", text)[1]]
        assert len(found) == hidden
        assert text.endswith(f" {answer}")
        needle = text.index(f"VAR {answer[:5]} =" if task == "vt" else f": {answer}.")
        assert needle > (0, 0.15, 0.35)[index // 2] * len(text)  # the words of the question are long here


def test_contexts_depend_on_the_seed_alone():
    options = {"lengths": [16, 40], "trials": 4, "depths": (0.0, 0.5)}
    model = Oracle(reach=12, sure=1.0)
    first = induction_copy(model, passage=6, seed=3, **options)
    torch.manual_seed(99)
    assert induction_copy(model, passage=6, seed=3, **options) == first
    assert induction_copy(model, passage=6, seed=3, **options | {"lengths": [40]}) == first[2:]
    assert induction_copy(model, passage=6, seed=4, **options) != first


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: induction_copy(model, lengths=[31]), "passage must be at least 3 tokens, and fit twice into 31"),
        (lambda model: induction_copy(model, lengths=[40], passage=2), "passage must be at least 3"),
        (lambda model: induction_copy(model, lengths=[40], depths=(1.5,)), "between 0 and 1"),
        (lambda model: induction_copy(model, lengths=[40], trials=0), "trials must be at least 1"),
        (lambda model: retrieve(model, Digits(), lengths=[200, 60]), "length 60 is too short"),
        (lambda model: retrieve(model, Digits(), "niah", lengths=[900]), "unknown task 'niah'; choose from passkey"),
        (lambda model: retrieve(model, Digits(), text="", lengths=[200]), "filler text is empty"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(Oracle())
