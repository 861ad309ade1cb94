"""Vectors by distance are solved for: the equations hold, a search finds nothing better, and heads and layers share."""

import copy
import dataclasses
import itertools

import pytest
import torch
from families import tiny

from hf_posenc import patch_model
from hf_posenc.calibration import fitting
from hf_posenc.calibration.closed_forms import Target, coefficients
from hf_posenc.calibration.fitting import fit

LENGTH, HEADS, SIZE = 24, 4, 8
LIKE = torch.empty(0, dtype=torch.float64)


def module_of(scheme, layer=0, **options):
    return patch_model(tiny("llama").double(), scheme, seed=0, **options).model.layers[layer].self_attn.posenc


def targets(count=1, *, weights=None):
    """Random coefficients at each distance, with the weights of a causal window."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        root = torch.randn(HEADS, SIZE + 1, SIZE + 1, generator=draw, dtype=torch.float64)
        metric = root @ root.mT + torch.eye(SIZE + 1, dtype=torch.float64)
        values = torch.randn(HEADS, LENGTH, SIZE + 1, generator=draw, dtype=torch.float64)
        pairs = torch.arange(LENGTH, 0, -1, dtype=torch.float64) if weights is None else weights
        found.append(Target(values, pairs.expand(HEADS, -1), metric))
    return found


def cost(module, wanted, distances=LENGTH):
    """The weighted squares of what the softmax sees, at the distances of the windows."""
    total = 0.0
    for target in wanted:
        share = (target.weights / target.weights.sum(-1, keepdim=True))[..., None]
        off = coefficients(module, LIKE, torch.arange(distances), HEADS) - target.values
        off = off - (share * off).sum(1, keepdim=True)
        total = total + (share[..., 0] * ((off @ target.metric) * off).sum(-1)).sum()
    return total


@pytest.mark.parametrize("share_heads", [False, True])
def test_rows_of_a_table_are_at_the_least_cost(share_heads, monkeypatch):
    """Its gradient is zero, where the initial one is not; without the tail, whose weight is small but not zero."""
    monkeypatch.setattr(fitting, "TAIL_WEIGHT", 1e-12)
    module, wanted = module_of("shaw", max_distance=6, share_heads=share_heads), targets()

    def slope():
        return torch.autograd.grad(cost(module, wanted), module.key_embeddings)[0].norm().item()

    before = slope()
    fit(module, LIKE, wanted)
    assert slope() < 1e-5 * before
    assert not module.value_embeddings.any()


def test_rows_that_nothing_determines_stay():
    """Rows for distances beyond the tail."""
    module = module_of("shaw", max_distance=200, share_heads=False)
    before = module.key_embeddings.detach().clone()
    fit(module, LIKE, targets())
    reached = fitting.TAIL * LENGTH
    assert torch.allclose(module.key_embeddings[:, reached:], before[:, reached:], atol=1e-12)
    moved = (module.key_embeddings - before)[:, :reached]
    assert moved.abs().max() > 0.1


def test_vectors_of_waves_are_at_the_least_cost_with_a_ridge(monkeypatch):
    """With `v` held fixed: the gradient of the cost and of the ridge on what `W` has moved is zero."""
    module, (target,) = module_of("transformer_xl", longest=10000), targets()
    with torch.no_grad():
        module.position_bias.normal_(generator=torch.Generator().manual_seed(2))
    module.position_bias.requires_grad_(False)
    before = module.position_projection.detach().clone()
    fit(module, LIKE, [target])
    distances = torch.cat([torch.arange(LENGTH), torch.tensor([d for d, _ in tail()])])
    weights = torch.cat([target.weights[0], torch.tensor([n for _, n in tail()]) * 1e-3 * target.weights[0].mean()])
    weights = (weights / weights.sum())[:, None]
    end = target.values[:, -LENGTH // 4 :].mean(1, keepdim=True).expand(-1, len(tail()), -1)
    wanted = torch.cat([target.values, end], 1)
    frequencies = 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    waves = torch.cat([f(distances[:, None] * frequencies) for f in (torch.sin, torch.cos)], -1)
    waves = waves - (weights * waves).sum(0)
    ridge = 1e-2 * (weights * waves**2).sum(0).mean()
    off = coefficients(module, LIKE, distances, HEADS) - wanted
    off = off - (weights * off).sum(1, keepdim=True)
    loss = (weights[:, 0] * ((off @ target.metric) * off).sum(-1)).sum()
    moved = (module.position_projection - before).view(HEADS, SIZE, -1)
    moved = torch.cat([moved, (module.position_bias[:, None] @ moved)], 1)  # as coefficients
    loss = loss + ridge * ((target.metric @ moved) * moved).sum()
    gradient = torch.autograd.grad(loss, module.position_projection)[0]
    assert gradient.norm() < 1e-8 * (target.metric.norm() * wanted.norm())


def tail():
    """Pairs of a distance beyond the windows, up to 16 times as far, and how many distances it stands for."""
    ends = sorted({round(LENGTH * 16 ** (i / LENGTH)) for i in range(LENGTH + 1)})
    return [(first, float(last - first)) for first, last in itertools.pairwise(ends)]


def test_layers_share_a_table_also_with_other_windows():
    """Layers that see the same distances are solved for together; those with other windows are searched for."""
    equal = targets(2)
    narrow = torch.cat([torch.full((8,), 10.0), torch.full((LENGTH - 8,), 1e-6)]).double()
    other = [equal[0], dataclasses.replace(equal[1], weights=narrow.expand(HEADS, -1))]
    for wanted in (equal, other):
        module = module_of("shaw", max_distance=6)
        before = torch.autograd.grad(cost(module, wanted), module.key_embeddings)[0].norm().item()
        fit(module, LIKE, wanted)
        assert torch.autograd.grad(cost(module, wanted), module.key_embeddings)[0].norm().item() < 0.02 * before


def biases(count=1):
    """Random biases at each distance, and a weight of each head, with the weights of causal windows."""
    draw = torch.Generator().manual_seed(3)
    pairs = torch.arange(LENGTH, 0, -1, dtype=torch.float64).expand(HEADS, -1)
    values = torch.randn(count, HEADS, LENGTH, 1, generator=draw, dtype=torch.float64)
    return [Target(each, pairs, torch.rand(HEADS, 1, 1, generator=draw, dtype=torch.float64) + 0.5) for each in values]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_bias_is_at_the_least_cost_and_where_a_search_ends(layers, monkeypatch):
    solved, wanted = module_of("t5", num_buckets=8, max_distance=20, share_layers=False), biases(layers)
    searched, before = copy.deepcopy(solved), cost(solved, wanted)
    fit(solved, LIKE, wanted)
    least = cost(solved, wanted)
    assert torch.autograd.grad(least, solved.biases)[0].abs().max() < 1e-12
    assert least < 0.9 * before
    monkeypatch.setattr(type(searched), "linear_vectors", lambda *_: None)
    fit(searched, LIKE, wanted)
    assert (searched.biases - solved.biases).abs().max() < 1e-6 < 0.1 < solved.biases.abs().max()


def test_buckets_beyond_the_windows_take_the_tail():
    """The mean of the last quarter of the windows' distances, as the other buckets count them; those beyond it stay."""
    module, (target,) = module_of("t5", num_buckets=48, max_distance=24 * 40, share_layers=False), biases()
    with torch.no_grad():
        module.biases.fill_(0.25)
    fit(module, LIKE, [target])
    fitted, share = module.biases.detach().T, target.weights / target.weights.sum(-1, keepdim=True)  # (H, buckets)
    ends = LENGTH * 40 ** (torch.arange(24) / 24)  # each of the wide buckets begins here
    beyond, unseen = ends >= LENGTH * 1.2, ends.ceil() >= LENGTH * fitting.TAIL
    assert (fitted[:, 24:][:, unseen] == 0.25).all()
    tail = target.values[:, -LENGTH // 4 :, 0].mean(1, keepdim=True) - (share * target.values[..., 0]).sum(-1)[:, None]
    level = (share * fitted[:, :24]).sum(-1)[:, None]  # the first 24 buckets hold one distance each
    assert (fitted[:, 24:][:, beyond & ~unseen] - level - tail).abs().max() < 1e-10 < 0.3 < tail.abs().max()
