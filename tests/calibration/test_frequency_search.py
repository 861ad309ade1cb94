"""`search_frequencies` finds better tables of frequencies, measures what a patch does, and leaves the model as it was."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from families import tiny
from snapshots import assert_same, snapshot
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import (
    AlreadyPatchedError,
    CheckpointError,
    DivideAndConquer,
    Evolution,
    UnsupportedModelError,
    patch_model,
    search_frequencies,
    unpatch_model,
)
from hf_posenc.calibration.factor_search import start_factors
from hf_posenc.calibration.frequency_search import _Trials

LENGTH = 96
"""Of the windows; tiny models are trained at 64 tokens."""

SHARE = 0.5
"""Of the loss that the planted table saves, a short search finds more than this."""

SHORT = Evolution(population=6, iterations=1, parents=2, mutations=1, crossovers=1)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 3.0, 2.5]}
LONG |= {"original_max_position_embeddings": 16, "factor": 4.0}


def windows(count=3):
    return torch.randint(3, 97, (count, LENGTH + 4), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def cross_entropy(model, rows):
    """Mean negative logarithm of the probability of each next token, in float64."""
    logits = model(rows, use_cache=False).logits[:, :-1].double()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def written_with(frequencies):
    """Windows that a model writes whose pairs turn by these frequencies."""
    writer = patch_model(
        tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 100.0}), "rope", frequencies=frequencies
    )
    writer.generation_config.eos_token_id = None
    start = torch.randint(3, 97, (6, 1), generator=torch.Generator().manual_seed(3))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return writer.generate(start, max_new_tokens=LENGTH - 1, do_sample=True, top_k=0, pad_token_id=0)


LONGER = Evolution(population=20, iterations=3, parents=6, mutations=8, crossovers=8)


@pytest.mark.parametrize(
    "strategy",
    [DivideAndConquer(increments=4), pytest.param(LONGER, marks=pytest.mark.slow)],
    ids=["divide", "evolution"],
)
def test_a_planted_table_is_found(strategy):
    """The text was written with other frequencies than those of the model or of any of the methods it starts with."""
    planted = [w / factor for w, factor in zip((1.0, 100**-0.25, 0.1, 100**-0.75), (1.0, 1.8, 1.8, 1.8), strict=True)]
    tokens, model = written_with(planted), tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    base = cross_entropy(model, tokens[:-1])
    goal = cross_entropy(patch_model(model, "rope", frequencies=planted), tokens[:-1])
    found = search_frequencies(unpatch_model(model), tokens, LENGTH, strategy=strategy)
    lowest = found.history[-1].loss
    assert lowest < goal + SHARE * (base - goal)
    assert lowest < min(found.starts.values()) - 0.01
    assert found.after < found.before


BASES = {
    "default": ("llama", {}, None),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}, None),
    "yarn": ("llama", {"rope_parameters": YARN}, None),
    "longrope": ("llama", {"rope_parameters": LONG}, None),
    "part of a head": ("gpt_neox", {}, None),
    "layer types": ("gemma3", {}, "full_attention"),
}


@pytest.mark.parametrize(("family", "config", "layer_type"), BASES.values(), ids=BASES)
def test_losses_are_those_of_the_base_and_of_the_patched_model(family, config, layer_type, tmp_path):
    model, rows = tiny(family, **config).train(), windows()
    held = rows[-1:, :LENGTH]
    expected = cross_entropy(tiny(family, **config), held)
    snapshot(model)  # a forward pass, after which some scalings keep a table
    before, state = snapshot(model), torch.get_rng_state()
    found = search_frequencies(
        model, rows, LENGTH, strategy=SHORT, layer_type=layer_type, state_file=tmp_path / "a.json"
    )
    assert_same(snapshot(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert found.before == pytest.approx(expected, abs=2e-6)
    assert found.after == pytest.approx(cross_entropy(patch_model(model.eval(), found.scheme), held), abs=2e-6)
    assert len(json.loads((tmp_path / "a.json").read_text())["trials"]) == found.trials
    assert json.loads(json.dumps(found.to_dict()))["after"] == found.after
    assert f"{found.after:.4f}" in str(found)
    losses = [each.loss for each in found.history]
    assert losses == sorted(losses, reverse=True)
    last = found.history[-1]
    assert last.trials <= found.trials
    other = tiny(family, **config)
    if family == "llama" and config:
        return
    assert cross_entropy(patch_model(other, "rope", frequencies=found.frequencies), held) == pytest.approx(
        found.after, abs=2e-6
    )


def test_yarn_keeps_its_factor_on_cosines_and_sines():
    model = tiny("llama", rope_parameters=YARN)
    found = search_frequencies(model, windows(), LENGTH, strategy=SHORT)
    assert found.scale == LENGTH / 16
    patch_model(model, found.scheme)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([[1]]))
    factor = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close(cos[0, 0, :4] ** 2 + sin[0, 0, :4] ** 2, torch.full((4,), factor**2))
    torch.testing.assert_close(torch.atan2(sin, cos)[0, 0, :4].tolist(), [*found.frequencies], rtol=1e-5, atol=0)


class Interrupted(BaseException):
    """As Ctrl-C."""


def test_an_interrupted_search_goes_on_with_the_same_result(tmp_path, monkeypatch):
    strategy, model, rows, path = SHORT, tiny("llama"), windows(), tmp_path / "state.json"
    whole = search_frequencies(model, rows, LENGTH, strategy=strategy)
    before, measure, count = snapshot(model), _Trials.measure, 0

    def stops(trials, factors, windows):
        nonlocal count
        count += 1
        if count == 7:
            trials.logits_of = interrupted
        return measure(trials, factors, windows)

    def interrupted(*_):
        raise Interrupted

    monkeypatch.setattr(_Trials, "measure", stops)
    with pytest.raises(Interrupted):
        search_frequencies(model, rows, LENGTH, strategy=strategy, state_file=path)
    assert_same(snapshot(model), before)
    done = len(json.loads(path.read_text())["trials"])
    assert 0 < done < whole.trials
    count = -1000
    assert search_frequencies(model, rows, LENGTH, strategy=strategy, state_file=path) == whole
    assert count + 1000 == whole.trials - done + len(whole.history)
    count = -1000  # a finished search is read, and another one uses its trials
    search_frequencies(model, rows, LENGTH, strategy=strategy, state_file=path)
    assert count + 1000 == len(whole.history)
    for other, length in ((tiny("llama", seed=1), LENGTH), (model, LENGTH - 1)):
        with pytest.raises(CheckpointError, match="another search"):
            search_frequencies(other, rows, length, strategy=strategy, state_file=path)
    for wrong in ("{}", "[]", path.read_text().replace("[[", '[["a", ', 1)):
        path.write_text(wrong)
        with pytest.raises(CheckpointError, match="not the"):
            search_frequencies(model, rows, LENGTH, strategy=strategy, state_file=path)


def test_factors_to_start_with_are_those_of_transformers():
    """Peers: YaRN and linear of ROPE_INIT_FUNCTIONS, and NTK as `dynamic` at one length."""
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=512)
    common = {"rope_theta": 10000.0, "original_max_position_embeddings": 512}
    unscaled = [10000 ** (-u / 32) for u in range(32)]
    made = start_factors(unscaled, 512, 4.0)
    for name, kind, factor, length in (
        ("pi", "linear", 4.0, None),
        ("yarn 2", "yarn", 2.0, None),
        ("yarn 4", "yarn", 4.0, None),
        ("ntk 4", "dynamic", 4.0, 896),
    ):
        config.rope_parameters = {"rope_type": kind, "factor": factor, **common}
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)  # (4 * 896 / 512 - 3) is 4
        actual = torch.tensor(unscaled, dtype=torch.float64) / torch.tensor(made[name], dtype=torch.float64)
        torch.testing.assert_close(actual.float(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("pairs", [1, 3, 8])
def test_strategies_keep_their_promises(pairs):
    """On a loss whose lowest point is known: tables rise, stay in range and are new; segments find each factor."""
    starts, goal = [(1.0,) * pairs, (4.0,) * pairs], [1 + 3 * (u + 1) / pairs for u in range(pairs)]
    tried = []

    def loss(factors):
        tried.append(factors)
        return sum((a - b) ** 2 for a, b in zip(factors, goal, strict=True))

    strategy = Evolution(population=20, iterations=20)
    strategy.search(starts, 4.0, (0.3,) * pairs, loss)
    assert len(set(tried)) == len(tried) <= strategy.trials(pairs, len(starts))
    assert all(list(each) == sorted(each) and 1 <= each[0] and each[-1] <= 5 for each in tried)
    assert pairs == 1 or min(map(loss, list(tried))) < 0.2 * min(map(loss, starts))
    tried.clear()
    again = Evolution(population=20, iterations=20)
    again.search(starts, 4.0, (0.3,) * pairs, loss)
    first = list(tried)
    tried.clear()
    again.search(starts, 4.0, (0.3,) * pairs, loss)
    assert tried == first

    tried.clear()
    falling, strategy = list(reversed(goal)), DivideAndConquer(refinements=2)
    goal[:] = falling
    strategy.search(starts, 4.0, (0.3,) * pairs, loss)
    assert len(set(tried)) <= strategy.trials(pairs, len(starts))
    best = min(set(tried), key=loss)
    assert all(abs(a - b) < 0.05 for a, b in zip(best, goal, strict=True))


def test_wrong_arguments_change_nothing(tmp_path):
    model, rows = tiny("llama"), windows()
    before = snapshot(model)
    for arguments, error, words in (
        ({"length": 64}, ValueError, "above 64"),
        ({"length": LENGTH + 5}, ValueError, "fewer than length"),
        ({"length": 96.0}, ValueError, "length must be an integer"),
        ({"held_out": 3}, ValueError, "windows are too few"),
        ({"layer_type": "full_attention"}, ValueError, "all its layers rotate alike"),
        ({"strategy": "evolution"}, TypeError, "an Evolution"),
        ({"tokens": rows.float()}, ValueError, "tokens must be integers"),
        ({"state_file": tmp_path / "no" / "a.json"}, FileNotFoundError, "there is no folder"),
    ):
        with pytest.raises(error, match=words):
            search_frequencies(model, **{"tokens": rows, "length": LENGTH, "strategy": SHORT} | arguments)
    with pytest.raises(ValueError, match="it has sliding_attention, full_attention"):
        search_frequencies(tiny("gemma3"), rows, LENGTH)
    with pytest.raises(UnsupportedModelError, match="rotates nothing"):
        search_frequencies(tiny("gpt2"), rows, LENGTH)
    for wrong in ({"step": 0}, {"probability": 1.5}, {"mutations": 0, "crossovers": 0}, {"parents": 0}, {"seed": "1"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Evolution(**wrong)
    for wrong in ({"increments": 1}, {"refinements": -1}, {"reach": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DivideAndConquer(**wrong)
    assert_same(snapshot(model), before)
    with pytest.raises(AlreadyPatchedError):
        search_frequencies(patch_model(model, "rope", rope_theta=50.0), rows, LENGTH)
