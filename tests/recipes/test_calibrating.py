"""The recipes calibrate between the swap and the fine-tuning: with what, when not, once, and all of it is said."""

import dataclasses
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch
from recipe_runs import Stop, assert_same_weights, in_process, metrics, options
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import hf_posenc

# peft 0.21 asks for it by the name that transformers 5.23 renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SWAP = {"scheme": "kerple", "scheme_args": "share_layers=false"}
SWAP |= {"calibrate": "attention", "calibrate_steps": 2, "calibrate_windows": 12}


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
    recipe, tiny_checkpoints, text, trained_tokens, calls
):
    folder = tiny_checkpoints
    results = recipe.main(options(folder, text, folder / "out", **SWAP | {"calibrate_windows": 30}))
    ((tokens, keywords, report),) = calls
    possible = {tuple(trained_tokens[start : start + 32]) for start in range(0, len(trained_tokens) - 31, 32)}
    drawn = [tuple(row) for row in tokens.tolist()]
    assert len(set(drawn)) == len(drawn) == 30
    assert set(drawn) <= possible
    assert (keywords["matching"].steps, keywords["matching"].seed) == (2, 0)

    said = results["calibration"]
    assert said["method"] == "attention"
    assert said["tokens"] == 30 * 32
    for name in ("before", "closed", "after"):
        by_layer = [statistics.fmean(getattr(layer, name).tolist()) for layer in report.layers]
        assert [layer[name] for layer in said["layers"]] == pytest.approx(by_layer, rel=1e-6)
        assert said["divergence"][name] == pytest.approx(statistics.fmean(by_layer), rel=1e-6)
    assert said["divergence"]["after"] < said["divergence"]["before"]
    losses = said["held_out_loss"]
    assert losses["base"] == pytest.approx(results["before"][1]["non_overlapping"]["loss"], rel=1e-6)
    shown = (folder / "out" / "report.html").read_text() + (folder / "out" / "model" / "README.md").read_text()
    for value in (losses["calibrated"], said["divergence"]["after"]):
        assert shown.count(f"{value:.3f}") >= 2  # on the page and on the card
    assert results["arguments"]["learning_rate"] == 3e-4
    assert results["identity"]["calibrate"] == "attention"


def test_the_default_rate_depends_on_the_start(recipe, tiny_checkpoints, text):
    one_run = importlib.import_module("hf_posenc.recipes.one_run")
    for given, expected in (
        ({}, 3e-4),
        ({"calibrate": "closed_form"}, 3e-4),
        ({"calibrate": "none"}, 1e-3),
        ({"learning_rate": 0.5}, 0.5),
        ({"calibrate": "none", "learning_rate": 3e-4}, 3e-4),
    ):
        arguments = recipe.Arguments(output=str(tiny_checkpoints / "out"), **given)
        one_run.check_arguments(arguments)
        assert arguments.learning_rate == expected
    assert recipe.Arguments().calibrate == "attention"


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [pytest.param({}, marks=pytest.mark.slow), {"lora_rank": 2, "distill": 1}],
    ids=["plain", "adapter and teacher"],
)
def test_a_resumed_run_does_not_calibrate_again(recipe, training, tiny_checkpoints, text, monkeypatch, calls, extra):
    """Stopped in the middle of the calibration, and before the first step: the same numbers and weights as in one go."""
    folder = tiny_checkpoints
    calibrating = importlib.import_module("hf_posenc.recipes.calibration_stage")
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
    assert (folder / "cut" / "calibration.state.safetensors").exists()
    calls.clear()
    made = []
    with monkeypatch.context() as patch:
        advance = calibrating.InterruptibleSteps.step_done
        patch.setattr(
            calibrating.InterruptibleSteps,
            "step_done",
            lambda self, *step: (made.append(step[0]), advance(self, *step)),
        )
        patch.setattr(training, "one_step", lambda *_: (_ for _ in ()).throw(Stop))
        for _ in range(2):
            with pytest.raises(Stop):
                recipe.main([*words, "--resume"])
    assert len(calls) == 1
    assert made == [2]
    assert not (folder / "cut" / "calibration.state.safetensors").exists()
    torch.manual_seed(99)
    resumed = recipe.main([*words, "--resume"])
    assert len(calls) == 1
    assert metrics(resumed) == metrics(whole)
    assert resumed["calibration"]["layers"] == whole["calibration"]["layers"]
    assert_same_weights(folder / "whole", folder / "cut")
    if not extra:
        said = [hf_posenc.inspect(folder / name / "model").calibration for name in ("whole", "cut")]
        losses = {name: round(loss, 6) for name, loss in whole["calibration"]["windows_loss"].items()}
        expected = {"stage": "attention", "tokens": whole["calibration"]["tokens"], "held_out_loss": losses}
        assert said[0] == said[1] == expected
    assert not (folder / "cut" / "calibrated.safetensors").exists()


@pytest.mark.slow
def test_ctrl_c_in_the_calibration_and_resume(recipes, tiny_checkpoints, text):
    """A real signal to the command: its last words are the recipe's own; what is resumed is bit for bit what was not stopped."""
    folder = tiny_checkpoints
    common = SWAP | {"calibrate_steps": 300, "steps": 3}
    program = [sys.executable, "-c", "import sys; from hf_posenc.cli import main; sys.exit(main())", "extend"]
    environment = {**os.environ, "PYTHONPATH": str(recipes.parent), "OMP_NUM_THREADS": "1"}
    environment["HF_DATASETS_CACHE"] = str(folder / "datasets_cache")

    def command(name, *more):
        words = [*program, *options(folder, text, folder / name, **common), *more]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with command("whole") as run:
        _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    run, state = command("cut"), folder / "cut" / "calibration.state.safetensors"
    deadline = time.monotonic() + 120
    while not state.exists() and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 130, said
    assert "Traceback" not in said
    kept = f"The calibration is kept in {state}: the same command with --resume goes on from there."
    assert said.splitlines()[-1] == f"Interrupted. {kept}"
    with safe_open(state, "pt") as file:
        assert 0 < json.loads(file.metadata()["hf_posenc_calibration"])["step"] < 300
    with command("cut", "--resume") as run:
        _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    whole, cut = (json.loads((folder / name / "results.json").read_text()) for name in ("whole", "cut"))
    assert metrics(cut) == metrics(whole)
    assert cut["calibration"]["layers"] == whole["calibration"]["layers"]
    assert_same_weights(folder / "whole", folder / "cut")


@pytest.fixture
def training(recipes):
    return importlib.import_module("hf_posenc.recipes.training")


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_an_adapter_holds_all_that_was_calibrated(recipe, tiny_checkpoints, text, calls):
    """On the stock base it gives the model that was measured; with weights of the base moved it would not."""
    folder = tiny_checkpoints
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
    given = {"calibrate": "attention", "steps": 1, "recovery_steps": 0} | changes
    results = recipe.main(options(folder, text, folder / "out", **given))
    assert not calls
    assert results["calibration"]["method"] == "none"
    assert results["calibration"]["why"] == why
    assert f"not calibrated: {why}" in capsys.readouterr().out
    assert f"not calibrated: {why}." in (folder / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calibrate": "slopes"}, "--calibrate must be one of attention, closed_form, none, not slopes"),
        ({"calibrate_windows": 8}, "--calibrate-windows must be at least 9, not 8"),
        ({"calibrate_length": 1}, "--calibrate-length must be at least 2, not 1"),
        ({"calibrate_length": 1000}, "--calibrate-length 1000: the base was trained at"),
        ({"calibrate": "none", "calibrate_length": 9}, "--calibrate-length has no effect with --calibrate none"),
        ({"calibrate_steps": 0}, "--calibrate-steps must be at least 1, not 0"),
        (
            {"calibrate": "none", "calibrate_windows": 9},
            "--calibrate-windows has no effect with --calibrate none",
        ),
        ({"calibrate": "closed_form", "calibrate_steps": 9}, "--calibrate-steps has no effect with --calibrate"),
        ({"data": "short"}, "the training text has 251 tokens, but 9 windows of 32 are needed: give more text, or"),
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
        importlib.import_module("hf_posenc.recipes.one_run"),
        "measure_model",
        lambda *_, **__: pytest.fail("measured"),
    )
    with pytest.raises(SystemExit) as stop:
        recipe.main(options(folder, text, folder / "out", **{"calibrate": "attention"} | changes))
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_a_comparison_has_plain_swaps_beside_calibrated_ones(recipes, tiny_checkpoints, text, calls):
    """At the rate of a plain swap."""
    compare = importlib.import_module("hf_posenc.recipes.compare_schemes")
    folder = tiny_checkpoints
    words = options(folder, text, folder / "out", calibrate="attention", calibrate_steps=2, steps=1, recovery_steps=0)
    compare.main([*words, "--variants", "nope", "nope+uncalibrated", "--seeds", "0"])
    (_, keywords, _), *others = calls
    assert not others
    assert keywords["matching"].steps == 2
    for name, method, rate in (("nope", "attention", 3e-4), ("nope+uncalibrated", "none", 1e-3)):
        results = json.loads((folder / "out" / "runs" / name / "seed-0" / "results.json").read_text())
        assert results["calibration"]["method"] == method
        assert results["arguments"]["learning_rate"] == rate


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
