"""Calibration on bases whose attention a scheme can have exactly, and closed forms against sums over all pairs."""

import math

import pytest
import torch
from families import tiny, tokens
from positioned import positioned

from hf_posenc import Matching, calibrate, patch_model
from hf_posenc.calibration.closed_forms import target_of
from hf_posenc.calibration.fitting import fit
from hf_posenc.calibration.pair import Pair
from hf_posenc.model.patch_record import patch_of
from hf_posenc.schemes.alibi import Alibi
from hf_posenc.schemes.kerple import Kerple
from hf_posenc.schemes.t5 import T5

LENGTH = 16
EACH_DISTANCE = {"num_buckets": 2 * LENGTH, "max_distance": 8 * LENGTH, "share_layers": False}
"""T5 with a bucket for each distance of a window."""


def windows(count=12, length=LENGTH):
    return tokens(count, length, seed=3)


def logits(model):
    with torch.no_grad():
        return model(windows(2), use_cache=False).logits


def recovered(model, expected, base=None):
    """Calibrate, and hold that the attention and the logits are the base's, and were not before."""
    assert (logits(model) - expected).norm() > 0.02 * expected.norm()
    report = calibrate(model, windows(), matching=None, base=base, judge="attention")
    assert all(each.before.mean() > 1e-3 for each in report.layers)
    assert max(each.closed.max() for each in report.layers) <= 1e-10  # KL, the square of what scores are off by
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()


# ------------------------------------------------------------------------------------------- schemes in place of others


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rotation_in_place_of_the_same_rotation_stays(family, dtype):
    """Gradients are rounding errors there, which Adam would make steps of full size of."""
    model = tiny(family).to(dtype)
    expected = logits(model)
    patch_model(model, "rope")
    report = calibrate(model, windows(), matching=Matching(steps=10))
    for layer in report.layers:
        assert layer.chosen == ("as it was",) * 4
        assert max(part.abs().max() for part in (layer.before, layer.closed, layer.after)) <= 1e-6
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()


SLOPES = (0.7, 0.31, 0.05, 0.0)


@pytest.mark.parametrize(
    ("of_base", "scheme"),
    [
        (Alibi(slopes=SLOPES), T5(**EACH_DISTANCE)),
        (Alibi(slopes=SLOPES), Alibi(trainable=True)),
        (Kerple(share_layers=False), Kerple(share_layers=False)),
    ],
    ids=lambda scheme: scheme.name,
)
def test_biases_by_distance_are_recovered(of_base, scheme):
    base = patch_model(tiny("llama").double(), of_base, seed=5)
    recovered(patch_model(tiny("llama").double(), scheme, seed=6), logits(base), base)


# ---------------------------------------------------------------------------------------------------- learned positions


@pytest.mark.parametrize(
    ("scheme", "biases"),
    [
        (T5(**EACH_DISTANCE), torch.randn(2, 2, LENGTH, generator=torch.Generator().manual_seed(1))),
        (Alibi(trainable=True), -torch.tensor([[0.9, 0.1], [0.4, 0.02]])[..., None] * torch.arange(LENGTH)),
        (
            Kerple(share_layers=False),
            -torch.tensor([[1.5, 0.6], [2.0, 0.3]])[..., None] * torch.log1p(0.7 * torch.arange(LENGTH)),
        ),
    ],
    ids=["t5", "alibi", "kerple"],
)
def test_positions_that_a_table_adds_by_distance_are_recovered(scheme, biases):
    model = positioned(biases)
    expected = logits(model)
    recovered(patch_model(model, scheme, seed=0), expected)


# ----------------------------------------------------------------------------------------------------------- brute force


def scores_by_hand(model, ids):
    """Scores of each layer of a GPT-2 with its positions and without, in float64: two of (layers, B, H, T, T)."""
    found = ([], [])
    with torch.no_grad():
        entering = model(ids, output_hidden_states=True).hidden_states
        table = model.transformer.wpe.weight[: ids.shape[1]]
        for block, hidden in zip(model.transformer.h, entering, strict=False):
            for scores, x in zip(found, (hidden, hidden - table), strict=True):
                q, k, _ = (
                    part.view(*ids.shape, 4, -1).transpose(1, 2)
                    for part in block.attn.c_attn(block.ln_1(x)).chunk(3, -1)
                )
                scores.append(q @ k.mT * q.shape[-1] ** -0.5)
    return torch.stack(found[0]), torch.stack(found[1])


LAG = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)


@pytest.mark.parametrize("scheme", ["t5", "da_transformer"])
def test_averages_of_learned_positions_are_those_over_all_pairs(scheme):
    """In every layer: what the table adds runs through the whole model, and is taken off before each layer."""
    model, ids = tiny("gpt2").double(), windows(4)
    with_table, without = scores_by_hand(model, ids)
    clipped = without.clamp(min=0) * (scheme == "da_transformer")  # what only factors ask for
    patch_model(model, scheme)
    averages = Pair(model, patch_of(model), None, windows(6), 2).averages(4)
    for layer, found in averages.items():
        assert not found.mass.any()  # only a rotation asks for it
        for distance in range(LENGTH):
            here = LAG == distance
            for sums, values in (
                (found.difference, with_table - without),
                (found.product, with_table * clipped),
                (found.square, clipped * clipped),
            ):
                expected = values[layer][:, :, here].sum((0, 2))
                assert (sums[:, distance] - expected).abs().max() <= 1e-10 * max(1.0, expected.abs().max())


def test_the_divergence_is_that_of_the_two_attentions():
    model, ids = tiny("gpt2").double(), windows(6)[-2:]
    with_table, without = (each.masked_fill(LAG < 0, -torch.inf) for each in scores_by_hand(model, ids))
    slopes = torch.tensor(SLOPES).double()
    patch_model(model, Alibi(slopes=SLOPES))
    ours = without - slopes[:, None, None] * LAG
    p, q = with_table.softmax(-1), ours.softmax(-1)
    expected = torch.where(LAG >= 0, p * (p.log() - q.log()), 0.0).sum(-1).mean((1, 3))
    found = Pair(model, patch_of(model), None, windows(6), 2).divergence()
    for layer, each in found.items():
        assert (each - expected[layer]).abs().max() <= 1e-6 * expected[layer].max()  # it is kept in float32


SEARCHED = 1e-6
"""A search for the least sum of squares ends where float64 does not tell sums apart: at the square root of its digits."""


def fitted(scheme):
    """The target of a scheme's first layer on a base with learned positions, and its curve after the fit."""
    model = patch_model(tiny("gpt2").double(), scheme, seed=0)
    pair = Pair(model, patch_of(model), None, windows(6), 2)
    averages, module = pair.averages(4)[0], pair.modules()[0]
    fit(module, pair.like(0), [target_of(module, pair.like(0), averages)])
    return averages, module


def test_fitted_buckets_are_means_over_pairs():
    averages, module = fitted(T5(num_buckets=8, max_distance=LENGTH, share_layers=False))
    bucket = torch.tensor([*range(4), *(4 + int(math.log(d / 4) / math.log(LENGTH / 4) * 4) for d in range(4, LENGTH))])
    assert bucket.tolist() == sorted(bucket.tolist())
    assert set(bucket.tolist()) == set(range(8))
    means = torch.stack(
        [averages.difference[:, bucket == b].sum(-1) / averages.pairs[bucket == b].sum() for b in range(8)]
    )
    assert ((module.biases - module.biases[0]) - (means - means[0])).abs().max() <= SEARCHED * means.abs().max()


def test_fitted_slopes_are_those_of_linear_regression():
    averages, module = fitted(Alibi(trainable=True))
    share, distance = averages.pairs / averages.pairs.sum(), torch.arange(LENGTH).double()
    middle = (share * distance).sum()
    slopes = (share * (distance - middle) * averages.mean_difference).sum(-1) / (share * (distance - middle) ** 2).sum()
    assert (module.slopes + slopes).abs().max() <= SEARCHED * slopes.abs().max()
