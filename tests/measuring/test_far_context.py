"""Repeat gain, on models whose predictions a float64 loop writes out; effective length by hand."""

import math

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from hf_posenc.evaluation import repeat_gain

VOCABULARY = 30
# Losses of float32 logits against float64 ones: a few round-offs of 6e-8 on numbers below 10.
TOLERANCE = 1e-5


class Copying(nn.Module):
    """A bigram table, and `sure` more for what followed the last two tokens before, at most `reach` tokens back."""

    def __init__(self, sure=0.0, reach=10**9):
        super().__init__()
        table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.table, self.sure, self.reach = nn.Parameter(table), sure, reach

    def row(self, tokens):
        """Logits after these tokens."""
        row = self.table[tokens[-1]].clone()
        places = [end for end in range(1, len(tokens) - 1) if tokens[end - 1 : end + 1] == tokens[-2:]]
        if places and len(tokens) - 1 - places[-1] <= self.reach:
            row[tokens[places[-1] + 1]] += self.sure
        return row

    def forward(self, input_ids, use_cache=None):
        rows = [[self.row(row[: end + 1]) for end in range(len(row))] for row in input_ids.tolist()]
        return CausalLMOutput(logits=torch.stack([torch.stack(row) for row in rows]))

    def loss(self, tokens, index):
        """-log P(tokens[index] | tokens before it), in float64."""
        row = self.row(tokens[:index]).detach().double()
        return (row.exp().sum().log() - row[tokens[index]]).item()


def text(count, seed=0):
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def error(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def test_repeat_gain_is_that_of_a_loop():
    passage, trials, distances = 5, 4, [5, 9, 16]
    tokens = text(max(distances) + passage + trials - 1)  # so that every place is taken once
    words, model = tokens.tolist(), Copying(sure=4.0, reach=12)
    rows = repeat_gain(model, tokens, distances=distances, passage=passage, trials=trials, batch_size=3)
    for row, distance in zip(rows, distances, strict=True):
        losses = []
        for place in range(trials):
            again = words[place : place + passage]
            context = words[place : place + distance] + again
            other = words[place + distance : place + distance + passage]
            without = other + words[place + passage : place + distance] + again
            scored = range(distance + 1, distance + passage)  # nothing repeats before the second token of a passage
            losses.append(
                [sum(model.loss(words, index) for index in scored) / (passage - 1) for words in (context, without)]
            )
        second, unseen = (sum(column) / trials for column in zip(*losses, strict=True))
        assert (row.second, row.unseen) == pytest.approx((second, unseen), rel=TOLERANCE)
        assert row.gain == pytest.approx(unseen - second, abs=TOLERANCE)
        assert row.error == pytest.approx(error([two - one for one, two in losses]), rel=1e-4)
        assert (row.gain > 0.3) == (distance <= model.reach)  # 3 of 4 tokens can be copied, within reach


def test_what_reads_no_context_gains_nothing():
    for row in repeat_gain(Copying(), text(400), distances=[32, 64], passage=16, trials=3):
        assert row.gain == pytest.approx(0, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: repeat_gain(model, text(99), distances=[63]), "at least the passage, 64 tokens"),
        (lambda model: repeat_gain(model, text(158), distances=[64]), "a text of at least 159 tokens"),
        (lambda model: repeat_gain(model, text(99), distances=[64], trials=1), "must be at least 2, not 64 and 1"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(Copying())
