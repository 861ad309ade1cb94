"""Skipped positions of training windows: the paper's definition, the seed, exact resuming, and what is refused."""

import importlib
import json

import pytest
import torch
from recipe_runs import assert_same_weights, in_process, metrics, options, stopped_at

import hf_posenc

POSE = {"pose_length": 100}


@pytest.fixture
def positions(recipes):
    return importlib.import_module("hf_posenc.recipes.training_positions")


def test_pose_is_the_papers(positions):
    """Zhu et al. 2023, equations (4) and (5): two chunks, the second after a skip, up to the target."""
    tokens, target = 6, 9
    drawn = positions.SkippedPositions(target, seed=0)
    seen = {tuple(drawn.draw(window, tokens)) for window in range(2000)}
    wanted = {
        tuple([*range(cut), *(token + skip for token in range(cut, tokens))])
        for cut in range(1, tokens)
        for skip in range(target - tokens + 1)
    }
    assert seen == wanted  # every cut with every skip, and nothing else


def test_the_skips_of_pose_are_uniform(positions):
    """`u` is drawn from all skips alike, and the cut from all places."""
    drawn = positions.SkippedPositions(12, seed=1)
    rows = torch.tensor([drawn.draw(window, 8) for window in range(4000)])
    skips = torch.bincount(rows[:, -1] - 7, minlength=5) / len(rows)
    assert torch.allclose(skips, torch.full((5,), 0.2), atol=0.03)
    cuts = (rows.diff() != 1).float().argmax(-1)[rows[:, -1] > 7]
    assert torch.allclose(torch.bincount(cuts, minlength=7) / len(cuts), torch.full((7,), 1 / 7), atol=0.03)


def test_positions_depend_on_seed_and_window_alone(positions):
    first, second = (positions.SkippedPositions(500, seed) for seed in (0, 1))
    whole = first.inputs(range(6), 40)
    assert whole["position_ids"].shape == whole["attention_mask"].shape == (6, 40)
    assert whole["attention_mask"].all()
    assert torch.equal(whole["position_ids"][4:], first.inputs(range(4, 6), 40)["position_ids"])
    assert len({tuple(row.tolist()) for row in whole["position_ids"]}) == 6
    assert not torch.equal(whole["position_ids"], second.inputs(range(6), 40)["position_ids"])
    assert (whole["position_ids"].diff() > 0).all()
    assert 0 <= whole["position_ids"].min() <= whole["position_ids"].max() < 500


def test_resuming_is_exact(recipe, tiny_checkpoints, text, monkeypatch):
    """A run with random positions ends with the same bits after a stop. Recovery steps have plain positions."""
    training, folder = importlib.import_module("hf_posenc.recipes.training"), tiny_checkpoints
    common = {**POSE, "scheme": "rope", "steps": 4, "recovery_steps": 1, "save_every": 2, "lengths": 16}
    seen, batch = [], training.Phase.batch
    with monkeypatch.context() as patch:
        patch.setattr(training.Phase, "batch", lambda *given: seen.append(batch(*given)) or seen[-1])
        whole = recipe.main(options(folder, text, folder / "whole", **common))
    drawn = [each["position_ids"] for each in seen if "position_ids" in each]
    assert len(seen) == 2 * 4
    assert len(drawn) == 2 * 3
    assert len({tuple(ids[0].tolist()) for ids in drawn}) == 6
    stopped_at(3, monkeypatch, recipe.main, options(folder, text, folder / "cut", **common))
    torch.manual_seed(99)
    resumed = recipe.main([*options(folder, text, folder / "cut", **common), "--resume"])
    assert metrics(resumed) == metrics(whole)
    assert_same_weights(folder / "whole", folder / "cut")


@pytest.mark.slow
def test_two_processes_equal_one(recipe, recipes, tiny_checkpoints, text):
    """They draw the same positions for the same windows."""
    folder, common = tiny_checkpoints, {**POSE, "scheme": "alibi"}
    one = recipe.main(options(folder, text, folder / "one", **common))
    run = in_process(recipes, options(folder, text, folder / "two", **common, gradient_accumulation=1), 2)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    two = json.loads((folder / "two" / "results.json").read_text())
    assert two["training"]["loss"] == pytest.approx(one["training"]["loss"], abs=1e-5)
    assert_same_weights(folder / "one", folder / "two", 1e-5)


WRONG = {
    "too short": ({"pose_length": 48}, "--pose-length 48 must be above --train-length 48"),
    "documents": ({**POSE, "packing": "documents"}, "cannot be combined with --packing documents"),
    "shared sequences": (
        {**POSE, "context_parallel": 2},
        "--pose-length cannot be combined with --context-parallel",
    ),
    "a teacher": ({**POSE, "distill": 1}, "--pose-length cannot be combined with --distill"),
    "only recovery": (
        {**POSE, "recovery_steps": 6},
        "--pose-length cannot be combined with --recovery-steps for all",
    ),
    "no positions": ({**POSE, "scheme": "nope"}, "--pose-length: this model does not look at positions"),
    "a table": (
        {**POSE, "scheme": "learned", "scheme_args": "num_positions=64"},
        "--scheme learned ends at 64 positions, --train-length, --lengths, --pose-length go to 100",
    ),
    "the base's table": (
        {**POSE, "scheme": "unpatched", "train_length": 32, "recovery_steps": 0, "model": "gpt2"},
        "--scheme unpatched ends at 32 positions",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_positions_that_do_nothing_or_cannot_be_had_are_refused(recipe, tiny_checkpoints, text, capsys, case):
    changes, message = WRONG[case]
    if "model" in changes:
        changes = {**changes, "model": tiny_checkpoints / changes["model"]}
    with pytest.raises(SystemExit) as stop:
        recipe.main(options(tiny_checkpoints, text, tiny_checkpoints / "out", **{"scheme": "rope", **changes}))
    assert stop.value.code == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed
    assert not (tiny_checkpoints / "out").exists()


def test_a_stock_model_that_ignores_ids_is_refused(positions):
    """bloom's forward takes none, a stock llama follows them; a scheme that starts neutral counts as following."""
    from decoders import decoder

    error = importlib.import_module("hf_posenc.recipes.options").UsageError
    positions.check_follows(decoder("llama"), 100)
    with pytest.raises(error, match="--pose-length"):
        positions.check_follows(decoder("bloom"), 100)
    neutral = hf_posenc.patch_model(decoder("llama"), "da_transformer", seed=0)
    positions.check_follows(neutral, 100)
