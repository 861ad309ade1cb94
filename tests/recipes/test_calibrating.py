"""The recipes calibrate between the swap and the fine-tuning: with what, when not, once, and all of it is said."""

import dataclasses
import functools
import importlib
import json
import statistics

import pytest
import torch
from recipe_runs import assert_same_weights, in_process, metrics, options, stopped_at
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import hf_posenc

SWAP = {"scheme": "kerple", "scheme_args": "share_layers=false"}
SWAP |= {"calibrate": "matching", "calibrate_steps": 2, "calibrate_windows": 12}


@pytest.fixture
def calls(monkeypatch):
    """What `hf_posenc.calibrate` was called with, and what it returned."""
    found, calibrate = [], hf_posenc.calibrate

    def call(model, tokens, **keywords):
        report = calibrate(model, tokens, **keywords)
        found.append((tokens, keywords, report))
        return report

    monkeypatch.setattr(hf_posenc, "calibrate", call)
    return found


@pytest.mark.slow
def test_windows_are_of_the_training_text_and_the_numbers_those_of_the_report(
    recipe, tiny_checkpoints, text, trained_tokens, calls, monkeypatch
):
    folder = tiny_checkpoints
    # The loss of a random model hardly depends on its attention: whether it falls is chance, so attention itself judges.
    monkeypatch.setattr(hf_posenc, "calibrate", functools.partial(hf_posenc.calibrate, judge="attention"))
    results = recipe.main(options(folder, text, folder / "out", **SWAP | {"calibrate_windows": 30}))
    ((tokens, keywords, report),) = calls
    possible = {tuple(trained_tokens[start : start + 32]) for start in range(0, len(trained_tokens) - 31, 32)}
    drawn = [tuple(row) for row in tokens.tolist()]
    assert len(set(drawn)) == len(drawn) == 30
    assert set(drawn) <= possible
    assert (keywords["matching"].steps, keywords["matching"].seed) == (2, 0)

    said = results["calibration"]
    assert said["method"] == "matching"
    assert said["tokens"] == 30 * 32
    for name in ("before", "closed", "after"):
        by_layer = [statistics.fmean(getattr(layer, name).tolist()) for layer in report.layers]
        assert [layer[name] for layer in said["layers"]] == pytest.approx(by_layer, rel=1e-6)
        assert said["divergence"][name] == pytest.approx(statistics.fmean(by_layer), rel=1e-6)
    assert said["divergence"]["after"] < said["divergence"]["before"]
    losses = said["held_out_loss"]
    assert losses["base"] == pytest.approx(results["before"][1]["non_overlapping"]["loss"], rel=1e-6)
    card = (folder / "out" / "model" / "README.md").read_text()
    for value in (losses["calibrated"], said["divergence"]["after"]):
        assert f"{value:.3f}" in card
    assert results["arguments"]["learning_rate"] == 3e-4
    assert results["identity"]["calibrate"] == "matching"


def test_the_default_rate_depends_on_the_start(recipe, tiny_checkpoints, text):
    one_run = importlib.import_module("hf_posenc.recipes.one_run")
    for given, expected in (
        ({}, 3e-4),
        ({"calibrate": "none"}, 1e-3),
        ({"learning_rate": 0.5}, 0.5),
    ):
        arguments = recipe.Arguments(output=str(tiny_checkpoints / "out"), **given)
        one_run.check_arguments(arguments)
        assert arguments.learning_rate == expected
    assert recipe.Arguments().calibrate == "matching"


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [pytest.param({}, marks=pytest.mark.slow), {"lora_rank": 2, "distill": 1}],
    ids=["plain", "adapter and teacher"],
)
def test_a_resumed_run_does_not_calibrate_again(recipe, tiny_checkpoints, text, monkeypatch, calls, extra):
    """Stopped in the middle of the calibration, and before the first step: the same numbers and weights as in one go."""
    folder = tiny_checkpoints
    common = extra | SWAP | {"steps": 3}
    whole = recipe.main(options(folder, text, folder / "whole", **common))
    words = options(folder, text, folder / "cut", **common)
    calibrate = hf_posenc.calibrate

    def interrupted(model, tokens, **keywords):
        def on_step(step, _):
            raise KeyboardInterrupt

        matching = dataclasses.replace(keywords["matching"], on_step=on_step)
        return calibrate(model, tokens, **keywords | {"matching": matching})

    with monkeypatch.context() as patch:
        patch.setattr(hf_posenc, "calibrate", interrupted)
        with pytest.raises(SystemExit) as stop:
            recipe.main(words)
    assert stop.value.code == 130
    assert (folder / "cut" / "calibration.state.pt").exists()
    calls.clear()
    for _ in range(2):
        stopped_at(0, monkeypatch, recipe.main, [*words, "--resume"])
    assert len(calls) == 1
    torch.manual_seed(99)
    resumed = recipe.main([*words, "--resume"])
    assert len(calls) == 1
    assert metrics(resumed) == metrics(whole)
    assert resumed["calibration"]["layers"] == whole["calibration"]["layers"]
    assert_same_weights(folder / "whole", folder / "cut")
    if not extra:
        said = [hf_posenc.inspect(folder / name / "model").calibration for name in ("whole", "cut")]
        losses = {name: round(loss, 6) for name, loss in whole["calibration"]["windows_loss"].items()}
        kept = whole["calibration"]["kept"]
        stage = "closed_form" if kept == "closed_form" else "matching"
        expected = {"stage": stage, "tokens": whole["calibration"]["tokens"], "held_out_loss": losses}
        assert said[0] == said[1] == (None if kept == "nothing" else expected)
    assert not {"calibrated.safetensors", "calibration.state.pt"} & {path.name for path in (folder / "cut").iterdir()}


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_an_adapter_holds_all_that_was_calibrated(recipe, tiny_checkpoints, text, monkeypatch, calls):
    """On the stock base it gives the model that was measured; with weights of the base moved it would not."""
    folder = tiny_checkpoints
    # Of random weights it is chance which calibration predicts better: closer attention is kept.
    monkeypatch.setattr(hf_posenc, "calibrate", functools.partial(hf_posenc.calibrate, judge="attention"))
    recipe.main(options(folder, text, folder / "out", **SWAP, lora_rank=2))
    assert calls[0][2].layers[0].after.mean() < calls[0][2].layers[0].before.mean()
    merged = hf_posenc.from_pretrained(folder / "out" / "model").eval()
    base = LlamaForCausalLM.from_pretrained(folder / "llama")
    swapped = hf_posenc.patch_model(base, "kerple", share_layers=False)
    adapted = hf_posenc.load_adapter(swapped, folder / "out" / "adapter").eval()
    tokens = torch.arange(40)[None]
    assert torch.allclose(merged(tokens).logits, adapted(tokens).logits, atol=1e-5)


@pytest.mark.rows(default=2)
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scheme": "unpatched"}, "the base keeps its positions"),
        ({"scheme": "rope"}, "the model predicts what the base predicts"),
        ({"scheme": "alibi", "calibrate": "none"}, "--calibrate none"),
    ],
)
def test_nothing_is_calibrated_where_nothing_is_lost(recipe, tiny_checkpoints, text, calls, capsys, changes, why):
    folder = tiny_checkpoints
    given = {"calibrate": "matching", "steps": 1, "recovery_steps": 0} | changes
    results = recipe.main(options(folder, text, folder / "out", **given))
    assert not calls
    assert results["calibration"]["method"] == "none"
    assert results["calibration"]["why"] == why
    assert f"not calibrated: {why}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibrate_windows": 8}, "9 windows of 32 are needed: give more text, shorter or more windows, or"),
        ({"calibrate_length": 1000}, "--calibrate-length 1000: the base was trained at"),
        ({"data": "short"}, "the training text has 251 tokens, but 9 windows of 32 are needed: give more text"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_what_cannot_be_calibrated_stops_before_anything_runs(
    recipe, tiny_checkpoints, text, monkeypatch, capsys, changes, message
):
    folder = tiny_checkpoints
    if changes.get("data"):
        text.write_text(text.read_text().replace("\f", " ")[:450])  # of one document the end is held out
        changes = {}
    monkeypatch.setattr(
        importlib.import_module("hf_posenc.recipes.measurements"),
        "perplexities",
        lambda *_, **__: pytest.fail("measured"),
    )
    with pytest.raises(SystemExit) as stop:
        recipe.main(options(folder, text, folder / "out", **{"calibrate": "matching"} | changes))
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (folder / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("file", [None, "fsdp2"])
def test_two_processes_calibrate_as_one(recipe, recipes, tiny_checkpoints, text, file):
    folder = tiny_checkpoints
    one = recipe.main(options(folder, text, folder / "one", **SWAP))
    run = in_process(
        recipes, options(folder, text, folder / "two", **SWAP, gradient_accumulation=1), processes=2, launch_file=file
    )
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    two = json.loads((folder / "two" / "results.json").read_text())
    for each, other in zip(one["calibration"]["layers"], two["calibration"]["layers"], strict=True):
        assert other["after"] == pytest.approx(each["after"], rel=1e-4)
    assert two["training"]["loss"] == pytest.approx(one["training"]["loss"], abs=1e-4)
    weights = [load_file(folder / name / "model" / "model.safetensors") for name in ("one", "two")]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-3 for name in weights[0])
