"""`search_frequencies` finds better tables of frequencies, measures what a patch does, and leaves the model as it was."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from decoders import decoder
from families import tiny
from snapshots import assert_same, snapshot
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import (
    AlreadyPatchedError,
    CheckpointError,
    UnsupportedModelError,
    patch_model,
    search_frequencies,
    unpatch_model,
)
from hf_posenc.calibration import frequency_search
from hf_posenc.calibration.frequency_search import start_factors

LENGTH = 96
"""Of the windows; tiny models are trained at 64 tokens."""

SHARE = 0.5
"""Of the loss that the planted table saves, a short search finds more than this."""

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


def test_a_planted_table_is_found():
    """The text was written with other frequencies than those of the model or of any of the methods it starts with."""
    planted = [w / factor for w, factor in zip((1.0, 100**-0.25, 0.1, 100**-0.75), (1.0, 1.8, 1.8, 1.8), strict=True)]
    tokens, model = written_with(planted), tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    base = cross_entropy(model, tokens[:-1])
    goal = cross_entropy(patch_model(model, "rope", frequencies=planted), tokens[:-1])
    found = search_frequencies(unpatch_model(model), tokens, LENGTH, increments=4)
    assert found.lowest < goal + SHARE * (base - goal)
    assert found.lowest < min(found.starts.values()) - 0.01
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
def test_losses_are_those_of_the_base_and_of_the_patched_model(family, config, layer_type):
    model, rows = tiny(family, **config).train(), windows()
    held = rows[-1:, :LENGTH]
    expected = cross_entropy(tiny(family, **config), held)
    snapshot(model)  # a forward pass, after which some scalings keep a table
    before, state = snapshot(model), torch.get_rng_state()
    found = search_frequencies(model, rows, LENGTH, increments=3, layer_type=layer_type)
    assert_same(snapshot(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert found.before == pytest.approx(expected, abs=2e-6)
    assert found.after == pytest.approx(cross_entropy(patch_model(model.eval(), found.scheme), held), abs=2e-6)
    assert json.loads(json.dumps(found.to_dict()))["after"] == found.after
    assert f"{found.after:.4f}" in str(found)


def test_what_the_attention_reads_of_a_scaling_stays():
    """DeepSeek's `mscale_all_dim` is a factor on scores: `(0.1 ln 4 + 1)^2 / sqrt(12)` for heads of 12."""
    scaled = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = decoder("deepseek_v3", rope_parameters=scaled)
    found = search_frequencies(model, windows(), LENGTH, increments=3)
    assert found.before == pytest.approx(cross_entropy(model, windows()[-1:, :LENGTH]), abs=2e-6)
    patch_model(model, found.scheme)
    assert found.after == pytest.approx(cross_entropy(model, windows()[-1:, :LENGTH]), abs=2e-6)
    for layer in model.model.layers:
        assert layer.self_attn.scaling == pytest.approx((0.1 * math.log(4.0) + 1) ** 2 / math.sqrt(12))


def test_an_interrupted_search_goes_on_with_the_same_result(tmp_path, monkeypatch):
    model, rows, path, calls = tiny("llama"), windows(), tmp_path / "state", []

    def search(model=model, length=LENGTH, state_file=path):
        calls.clear()
        return search_frequencies(model, rows, length, increments=3, state_file=state_file)

    def counted(*arguments, plain=frequency_search.mean_loss):
        calls.append(arguments)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return plain(*arguments)

    stop = 0
    monkeypatch.setattr(frequency_search, "mean_loss", counted)
    whole, before = search(state_file=None), snapshot(model)
    wanted, stop = len(calls), 7
    with pytest.raises(KeyboardInterrupt):
        search()
    assert_same(snapshot(model), before)
    stop = 0
    assert search() == whole
    resumed = len(calls)
    assert wanted - 7 < resumed < wanted
    assert search() == whole  # a finished search is read
    assert len(calls) < resumed
    for other, length in ((tiny("llama", seed=1), LENGTH), (model, LENGTH - 1)):
        with pytest.raises(CheckpointError, match="another run"):
            search(other, length)
    path.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="not a state"):
        search()


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


@pytest.mark.parametrize("pairs", [1, 8])
def test_segments_find_each_factor(pairs):
    """On a loss whose lowest point is known."""
    goal = [4 - 3 * u / pairs for u in range(pairs)]
    tried = []

    def loss(factors):
        tried.append(factors)
        return sum((a - b) ** 2 for a, b in zip(factors, goal, strict=True))

    frequency_search._divide_and_conquer((2.5,) * pairs, (0.3,) * pairs, 2.0, 10, loss)
    best = min(set(tried), key=loss)
    assert all(abs(a - b) < 0.4 for a, b in zip(best, goal, strict=True))


def test_wrong_arguments_change_nothing(tmp_path):
    model, rows = tiny("llama"), windows()
    before = snapshot(model)
    for arguments, error, words in (
        ({"length": 64}, ValueError, "above 64"),
        ({"length": LENGTH + 5}, ValueError, "fewer than length"),
        ({"layer_type": "full_attention"}, ValueError, "all its layers rotate alike"),
        ({"increments": 1}, ValueError, "increments"),
        ({"reach": 0}, ValueError, "reach"),
        ({"state_file": tmp_path / "no" / "a.json"}, FileNotFoundError, "there is no folder"),
    ):
        with pytest.raises(error, match=words):
            search_frequencies(model, **{"tokens": rows, "length": LENGTH} | arguments)
    with pytest.raises(ValueError, match="it has sliding_attention, full_attention"):
        search_frequencies(tiny("gemma3"), rows, LENGTH)
    with pytest.raises(UnsupportedModelError, match="rotates nothing"):
        search_frequencies(tiny("gpt2"), rows, LENGTH)
    assert_same(snapshot(model), before)
    with pytest.raises(AlreadyPatchedError):
        search_frequencies(patch_model(model, "rope", rope_theta=50.0), rows, LENGTH)
