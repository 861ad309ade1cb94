"""The learning rate that is found: what is tried, that nothing of it stays, and that it is tried once."""

import importlib
import json
import random

import pytest
import torch
import torch.nn.functional as F
from recipe_runs import Stop, assert_same_weights, in_process, metrics, options
from transformers import GPT2LMHeadModel

import hf_posenc

RATES = "1e-4 1e-2 10"
RUN = {"scheme": "alibi", "recovery_steps": 0, "steps": 4, "eval_every": 2}


def words(folder, text, output, **changes):
    """A run of the model that has dropout, so that random numbers matter."""
    return options(folder, text, output, **{"model": folder / "gpt2"} | RUN | changes)


@pytest.mark.slow
def test_the_rate_with_the_lowest_loss_is_taken_and_nothing_else_stays(recipe, tiny_checkpoints, text, capsys):
    """To the last bit what a run at that rate is."""
    folder = tiny_checkpoints
    found = recipe.main(words(folder, text, folder / "found", find_learning_rate=RATES))
    tried = found["learning_rates"]["tried"]
    assert [each["rate"] for each in tried] == [1e-4, 1e-2, 10]
    assert min(tried, key=lambda each: each["loss"])["rate"] == found["learning_rates"]["chosen"] == 1e-2
    given = recipe.main(words(folder, text, folder / "given", learning_rate=1e-2))
    assert metrics(found) == metrics(given)
    assert_same_weights(folder / "found", folder / "given")
    printed = capsys.readouterr().out
    page = (folder / "found" / "report.html").read_text()
    for each in tried:
        assert f"loss {each['loss']:.4f}" in printed
        assert f"{each['loss']:.4f}" in page
    assert "learning rate 0.01" in (folder / "found" / "model" / "README.md").read_text()


@pytest.mark.slow
def test_a_trial_is_a_few_steps_of_the_training(recipe, tiny_checkpoints, text, trained_tokens):
    """Against the same steps written out, without the recipe's loop."""
    folder = tiny_checkpoints
    path = folder / "gpt2" / "config.json"
    path.write_text(path.read_text().replace('_pdrop": 0.1', '_pdrop": 0.0'))
    given = {"find_learning_rate": "1e-3 1e-2", "weight_decay": 0, "max_grad_norm": 1e9}
    results = recipe.main(words(folder, text, folder / "out", **given))
    windows = torch.tensor(trained_tokens[: len(trained_tokens) // 48 * 48]).view(-1, 48)
    order = list(range(len(windows)))
    random.Random("0 0").shuffle(order)
    for each in results["learning_rates"]["tried"]:
        model = hf_posenc.patch_model(GPT2LMHeadModel.from_pretrained(folder / "gpt2"), "alibi", seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = each["rate"] * min(1, (step + 1) / 3)
            batch = windows[order[2 * step : 2 * step + 2]]
            logits = model(batch).logits[:, :-1]
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = windows[order[-(len(windows) // 10) :]]
        with torch.no_grad():
            logits = model(kept).logits[:, :-1]
        expected = F.cross_entropy(logits.flatten(0, 1), kept[:, 1:].flatten()).item()
        assert each["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_tries_nothing_again(recipe, recipes, tiny_checkpoints, text, monkeypatch):
    """Neither before its first step nor after a state."""
    folder = tiny_checkpoints
    rates, training = (
        importlib.import_module("hf_posenc.recipes.learning_rate_search"),
        importlib.import_module("hf_posenc.recipes.training"),
    )
    given = {"find_learning_rate": "1e-3 1e-2", "save_every": 1}
    whole = recipe.main(words(folder, text, folder / "whole", **given))
    calls, find, one_step = [], rates.find, training.one_step

    def counted(*arguments):
        calls.append(arguments)
        return find(*arguments)

    def stopping(last):
        def call(*arguments):
            if "learning_rates" in (folder / "cut" / "progress.json").read_text() and arguments[4] == last:
                raise Stop
            return one_step(*arguments)

        return call

    monkeypatch.setattr(rates, "find", counted)
    for last, more in ((0, []), (2, ["--resume"])):
        with monkeypatch.context() as patch:
            patch.setattr(training, "one_step", stopping(last))
            with pytest.raises(Stop):
                recipe.main([*words(folder, text, folder / "cut", **given), *more])
    resumed = recipe.main([*words(folder, text, folder / "cut", **given), "--resume"])
    assert len(calls) == 1
    assert resumed["learning_rates"] == whole["learning_rates"]
    assert metrics(resumed) == metrics(whole)
    assert_same_weights(folder / "whole", folder / "cut")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"find_learning_rate": "1e-3"}, "--find-learning-rate takes two or more positive rates, not 0.001"),
        ({"find_learning_rate": "1e-3 -1"}, "--find-learning-rate takes two or more positive rates, not 0.001 -1"),
        ({"find_learning_rate": "1e-3 1e-3"}, "--find-learning-rate must name each only once, not 0.001 0.001"),
        (
            {"find_learning_rate": "1e-3 1e-2", "learning_rate": 1},
            "--find-learning-rate chooses --learning-rate: give only one of them",
        ),
        (
            {"find_learning_rate": "1e-3 1e-2", "gradient_accumulation": 20},
            "--find-learning-rate needs 4,128 tokens of training text, but there are 3,311",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused(recipe, tiny_checkpoints, text, capsys, changes, message):
    folder = tiny_checkpoints
    with pytest.raises(SystemExit) as stop:
        recipe.main(words(folder, text, folder / "out", **changes))
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (folder / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("file", [None, "fsdp2"])
def test_two_processes_find_as_one(recipe, recipes, tiny_checkpoints, text, file):
    folder = tiny_checkpoints
    given = {"model": folder / "llama", "find_learning_rate": "1e-3 1e-2"}
    one = recipe.main(words(folder, text, folder / "one", **given))
    run = in_process(
        recipes, words(folder, text, folder / "two", **given, gradient_accumulation=1), processes=2, launch_file=file
    )
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    two = json.loads((folder / "two" / "results.json").read_text())
    for each, other in zip(one["learning_rates"]["tried"], two["learning_rates"]["tried"], strict=True):
        assert other["loss"] == pytest.approx(each["loss"], abs=1e-4)
    assert two["training"]["loss"] == pytest.approx(one["training"]["loss"], abs=1e-4)
