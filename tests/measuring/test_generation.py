"""Ends and repetition of generated texts, where both are known, and against transformers' own generation."""

from types import SimpleNamespace

import pytest
import torch
from families import tiny
from processes import Processes, among
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from hf_posenc import patch_model
from hf_posenc.evaluation import measure_generation, repeat_gain, repeated_ngrams


class Bigram(nn.Module):
    """Logits by the last token alone: token `t` is followed by `following[t]`, or drawn from `probabilities[t]`."""

    def __init__(self, probabilities):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(probabilities, dtype=torch.float64).clamp(min=1e-30).log())
        self.generation_config = SimpleNamespace(eos_token_id=0)

    def forward(self, input_ids, use_cache=None):
        return CausalLMOutput(logits=self.table[input_ids])


def walks(following):
    return Bigram([[float(after == token) for token in range(len(following))] for after in following])


def prompts(*lists):
    return [torch.tensor(each) for each in lists]


def test_cycles_and_ends_are_counted():
    """1 -> 2 -> 3 -> 1 never ends and has three different 4-grams; 4 -> 5 -> 6 -> 7 -> 8 -> 0 ends after 5 tokens."""
    model = walks([0, 2, 3, 1, 5, 6, 7, 8, 0])
    rows = measure_generation(model, prompts([0, 1], [4], [5, 2, 1]), lengths=[3, 4, 5, 20])
    assert [row.ended for row in rows] == [0, 0, 1 / 3, 1 / 3]
    # [4] continues as 5 6 7 8 and ends: one 4-gram, which is not repeated.
    cycle = 1 - 3 / 17
    assert [row.repetition for row in rows] == [None, 0, 0, pytest.approx((cycle + 0 + cycle) / 3)]
    assert [row.ended for row in measure_generation(model, prompts([4]), lengths=[9], ends=[6])] == [1]
    assert [row.ended for row in measure_generation(model, prompts([4]), lengths=[9], ends=[])] == [0]


def test_drawn_texts_end_as_often_as_the_probability_says():
    """Each token is the end with probability q: a text ends within N tokens with 1 - (1 - q)^N."""
    model = Bigram([[0.0, 1.0], [0.04, 0.96]])
    starts, options = prompts([1]) * 200, {"lengths": [3, 12], "temperature": 2.0}
    q = 0.04**0.5 / (0.04**0.5 + 0.96**0.5)  # a temperature of 2 takes the square root
    rows = measure_generation(model, starts, **options)
    for row in rows:
        expected = 1 - (1 - q) ** row.length
        assert abs(row.ended - expected) < 4 * (expected * (1 - expected) / 200) ** 0.5
    assert measure_generation(model, starts, batch_size=7, **options) == rows
    assert measure_generation(model, starts, seed=1, **options) != rows


@pytest.mark.parametrize("scheme", [None, "alibi"])
def test_the_likeliest_text_is_that_of_transformers(scheme):
    model = tiny("llama").eval()
    model = model if scheme is None else patch_model(model, scheme)
    starts = [torch.randint(60, (length,), generator=torch.Generator().manual_seed(length)) for length in (3, 7, 3)]
    shares = []
    for start in starts:
        made = model.generate(start[None], do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None)
        text = made[0, len(start) :].tolist()
        shares.append(1 - len({tuple(text[place : place + 2]) for place in range(23)}) / 23)
    (row,) = measure_generation(model, starts, lengths=[24], ends=[], ngram=2)
    assert row.repetition == pytest.approx(sum(shares) / 3)
    assert 0 < row.repetition


def test_repeated_ngrams():
    assert repeated_ngrams([7] * 10) == 1 - 1 / 7
    assert repeated_ngrams([1, 2, 1, 2, 1], ngram=2) == 0.5
    assert repeated_ngrams([1, 2, 3]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [0]}, "at least 1"),
        ({"lengths": [4], "temperature": -1}, "temperature at least 0"),
        ({"lengths": [4], "prompts": []}, "one or more sequences"),
        ({"lengths": [4], "prompts": [torch.tensor([], dtype=torch.long)]}, "each with a token"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        measure_generation(walks([0, 1]), **({"prompts": prompts([1])} | options))
    unnamed = walks([0, 1])
    unnamed.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="names no end-of-text token"):
        measure_generation(unnamed, prompts([1]), lengths=[4])


def measured():
    model = Bigram([[0.0, 1.0], [0.04, 0.96]])
    rows = measure_generation(model, prompts([1]) * 5, lengths=[9], temperature=2.0, batch_size=2, distributed=True)
    gains = repeat_gain(model, torch.arange(40) % 2, distances=[4, 9], passage=3, trials=3, distributed=True)
    return [row.to_dict() for row in [*rows, *gains]]


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(tmp_path):
    processes = Processes(2)
    one, two, three = [
        answer
        for number in (1, 2)
        for answer in processes.run(among, number, str(tmp_path / str(number)), measured)
        if answer
    ]
    processes.stop()
    assert one == two == three
