"""The fine-tuning loop: equal on any number of processes, exact to resume, safe to interrupt."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from recipe_runs import assert_same_weights, in_process, metrics, options, stopped_at
from rows import ROWS
from transformers import AutoModelForCausalLM

import hf_posenc

ZERO = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="pip install deepspeed, which is no dependency, runs these",
    ),
]


@pytest.fixture
def training(recipes):
    return importlib.import_module("hf_posenc.recipes.training")


@pytest.mark.parametrize(
    ("family", "scheme", "options", "position_parameters"),
    [
        ("gpt2", "learned", {"num_positions": 64}, {"transformer.wpe.table"}),
        ("llama", "learned", {"num_positions": 64}, {"model.layers.0.posenc.table"}),
        ("gpt2", "transformer_xl", {}, None),
        ("gpt2", None, {}, {"transformer.wpe.weight"}),
        ("llama", None, {}, set()),
    ],
)
def test_position_parameters_get_no_weight_decay(
    training, tiny_checkpoints, family, scheme, options, position_parameters
):
    """Wherever a scheme keeps them, and a base's own table too; every other matrix gets some."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / family)
    stock = {name for name, weight in model.named_parameters() if weight.dim() > 1}
    if scheme:
        hf_posenc.patch_model(model, scheme, seed=0, **options)
    with_decay, without = training.parameter_groups(model)
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.01, 0.0)
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, others = ({names[id(weight)] for weight in group["params"]} for group in (with_decay, without))
    assert not decayed & others
    assert decayed | others == set(names.values())
    if position_parameters is None:
        position_parameters = {name for name in names.values() if "posenc" in name}
        assert len(position_parameters) > 2
    matrices = {name for name, weight in model.named_parameters() if weight.dim() > 1}
    assert position_parameters <= others
    assert decayed == matrices - position_parameters
    assert decayed == stock - {"transformer.wpe.weight"}


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="plain", marks=pytest.mark.slow),
        pytest.param({"distill": 1}, id="distill", marks=pytest.mark.slow),
        pytest.param({"lora_rank": 2}, id="lora"),
    ],
)
def test_resuming_is_exact(recipe, training, tiny_checkpoints, text, monkeypatch, extra):
    """Stopped at any step and started again: the same losses, curve, metrics and weights to the last bit."""
    folder = tiny_checkpoints
    common = extra | {"save_every": 2, "eval_every": 2}
    whole = recipe.main(options(folder, text, folder / "whole", **common))
    stopped_at(5, monkeypatch, recipe.main, options(folder, text, folder / "cut", **common))
    assert not (folder / "cut" / "results.json").exists()
    assert [state.name for state in training.states(folder / "cut")] == ["state-000004"]
    torch.manual_seed(99)  # the state brings its own
    resumed = recipe.main([*options(folder, text, folder / "cut", **common), "--resume"])
    assert metrics(resumed) == metrics(whole)
    assert_same_weights(folder / "whole", folder / "cut")
    assert not training.states(folder / "cut")
    assert not (folder / "cut" / "progress.json").exists()


def test_resuming_needs_the_same_arguments(recipe, training, tiny_checkpoints, text, monkeypatch, capsys):
    folder = tiny_checkpoints
    stopped_at(0, monkeypatch, recipe.main, options(folder, text, folder / "out"))
    with pytest.raises(SystemExit):
        recipe.main(options(folder, text, folder / "out"))
    assert "is not empty: choose another folder, or --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        recipe.main([*options(folder, text, folder / "out", learning_rate=1), "--resume"])
    assert "--learning-rate was 0.001, is 1.0" in capsys.readouterr().err
    said = text.read_text()
    text.write_text(said + "more")
    with pytest.raises(SystemExit):
        recipe.main([*options(folder, text, folder / "out"), "--resume"])
    assert "had other arguments: another text" in " ".join(capsys.readouterr().err.split())
    text.write_text(said)
    with pytest.raises(SystemExit):
        recipe.main([*options(folder, text, folder / "elsewhere"), "--resume"])
    assert "there is no interrupted run in" in " ".join(capsys.readouterr().err.split())
    recipe.main([*options(folder, text, folder / "out"), "--resume"])
    with pytest.raises(SystemExit):
        recipe.main([*options(folder, text, folder / "out"), "--resume"])
    assert "has ended" in capsys.readouterr().err


@pytest.mark.parametrize(
    "signum",
    [pytest.param(signal.SIGINT, id="ctrl-c", marks=pytest.mark.slow), pytest.param(signal.SIGTERM, id="sigterm")],
)
def test_a_signal_saves_first(recipe, training, tiny_checkpoints, text, monkeypatch, capsys, signum):
    folder = tiny_checkpoints
    whole = recipe.main(options(folder, text, folder / "whole"))
    words = options(folder, text, folder / "cut")
    with pytest.raises(SystemExit) as stop:
        stopped_at(3, monkeypatch, recipe.main, words, act=lambda: os.kill(os.getpid(), signum))
    assert stop.value.code == 128 + signum
    said = capsys.readouterr().err
    assert f"the state is in {folder}/cut/state-000004. What is finished is kept" in said
    assert "the same command with --resume goes on" in said
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed = recipe.main([*options(folder, text, folder / "cut"), "--resume"])
    assert metrics(resumed) == metrics(whole)
    assert_same_weights(folder / "whole", folder / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, id="all"), pytest.param(2, id="lora", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_ctrl_c_outside_the_training_says_what_is_kept(
    recipe, training, tiny_checkpoints, text, monkeypatch, capsys, rank
):
    """And that is then not made again: measurements of the base, the fine-tuning. The numbers are those of one go."""
    folder = tiny_checkpoints
    common = {
        "model": None,
        "lora_rank": rank,
        "steps": 2,
        "recovery_steps": 0,
        "eval_every": 1,
    }
    common |= {"eval_tokens": 300}
    whole = recipe.main(options(folder, text, folder / "whole", **common))
    words, out = options(folder, text, folder / "cut", **common), folder / "cut"
    made, stop_at = [], None

    def counted(name, function):
        def call(*arguments, **keywords):
            made.append(name)
            if name == stop_at:
                raise KeyboardInterrupt
            return function(*arguments, **keywords)

        return call

    measurements = importlib.import_module("hf_posenc.recipes.measurements")
    monkeypatch.setattr(measurements, "perplexities", counted("measurement", measurements.perplexities))
    monkeypatch.setattr(training, "one_step", counted("step", training.one_step))
    for where, expected in (
        ("measurement", ["measurement"]),
        ("step", ["measurement", "step"]),
        ("measurement", ["step", "step", "measurement"]),
    ):
        stop_at = where
        with pytest.raises(SystemExit) as stop:
            recipe.main(words)
        assert stop.value.code == 130
        assert f"What is finished is kept in {out}: the same command with --resume" in capsys.readouterr().err
        assert made == expected
        made.clear()
        words = [*options(folder, text, out, **common), "--resume"]
    stop_at = None
    resumed = recipe.main(words)
    assert made == ["measurement"]
    assert metrics(resumed) == metrics(whole)
    assert_same_weights(folder / "whole", out)


def test_quickstart_chooses_the_folder(tmp_path):
    """A fresh one for each run; with --resume the newest whose run has not ended; or what the user says, in a file too."""
    project, work = tmp_path / "project", tmp_path / "work"
    (project / "scripts").mkdir(parents=True)
    work.mkdir()
    source = Path(__file__).parents[2] / "scripts" / "quickstart.sh"
    (project / "scripts" / "quickstart.sh").write_text(source.read_text())
    # Instead of an environment: a Python that says what it was to run.
    (project / "scripts" / "setup_env.sh").write_text(
        f'say() {{ printf "%s\n" "$*" >&2; }}\nsetup_env() {{ ENV_PYTHON="{project}/python"; }}\n'
    )
    python = project / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$OMP_NUM_THREADS threads ran $@" >&2\n'
    )
    python.chmod(0o755)

    def quickstart(*words, threads="7"):
        command = ["bash", str(project / "scripts" / "quickstart.sh"), *map(str, words)]
        given = os.environ | {"OMP_NUM_THREADS": threads}
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, env=given)
        return done.returncode, done.stderr

    status, said = quickstart("--resume")
    assert status == 2
    assert "there is no interrupted run in runs/quickstart*" in said
    for number, name in enumerate(
        ("quickstart/progress.json", "quickstart-3/progress.json", "quickstart-4/results.json")
    ):
        file = work / "runs" / name
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (number, number))
    assert quickstart("--resume", "--steps", "3")[1].endswith("--resume --steps 3 --output runs/quickstart-3\n")
    assert quickstart("--steps", "3")[1].endswith("--steps 3 --output runs/quickstart-2\n")
    assert "7 threads ran" in quickstart()[1]
    assert quickstart("--resume", "--output", "mine")[1].endswith("--resume --output mine\n")
    file = work / "run.yaml"
    file.write_text("output: elsewhere\n")
    assert quickstart("--config", file)[1].endswith(f"--config {file}\n")
    file.write_text("resume: true\n")
    assert quickstart("--config", file)[1].endswith(f"--config {file} --output runs/quickstart-3\n")


def test_a_loss_that_is_no_number_keeps_the_last_good_state(recipe, training, tiny_checkpoints, text, monkeypatch):
    folder = tiny_checkpoints
    one_step = training.one_step
    monkeypatch.setattr(
        training,
        "one_step",
        lambda *words: float("nan") if words[4] == 4 else one_step(*words),
    )
    with pytest.raises(SystemExit, match=r"the loss became nan at step 5: .*state-000003 is from before"):
        recipe.main(options(folder, text, folder / "out", save_every=3))
    assert (folder / "out" / "state-000003").is_dir()


def test_a_weight_that_is_no_number_is_neither_kept_nor_measured(recipe, training, tiny_checkpoints, text, monkeypatch):
    """The loss of a step is from before the step: it is finite where the step itself ruins the weights."""
    folder, one_step = tiny_checkpoints, training.one_step

    def ruined(accelerator, wrapped, optimizer, phase, step, *rest):
        loss = one_step(accelerator, wrapped, optimizer, phase, step, *rest)
        if step == ruined.at:
            next(wrapped.parameters()).data[0] = float("nan")
        return loss

    monkeypatch.setattr(training, "one_step", ruined)
    for name, ruined.at, last in (("middle", 3, 2), ("end", 5, 4)):
        with pytest.raises(SystemExit, match=rf"no numbers any more at step {ruined.at + 1}: .*state-00000{last} is f"):
            recipe.main(options(folder, text, folder / name, save_every=2))
        assert {path.name for path in (folder / name).iterdir()} == {"progress.json", f"state-00000{last}"}


def test_a_base_with_a_weight_that_is_no_number_is_refused(recipe, training, tiny_checkpoints, text):
    folder = tiny_checkpoints
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    model.lm_head.weight.data[0] = float("nan")
    model.save_pretrained(folder / "llama")
    with pytest.raises(SystemExit, match="the loss at 16 tokens is not finite"):
        recipe.main(options(folder, text, folder / "out"))
    evaluate = importlib.import_module("hf_posenc.recipes.evaluate")
    words = ["--model", str(folder / "llama"), "--data", str(text), "--lengths", "16", "--eval-tokens", "64"]
    with pytest.raises(SystemExit, match="the loss at 16 tokens is not finite"):
        evaluate.main([*words, "--trials", "0", "--json", str(folder / "found.json")])
    assert not (folder / "found.json").exists()


@pytest.mark.slow
def test_a_full_disk_keeps_the_state_before(recipe, training, tiny_checkpoints, text, monkeypatch, capsys):
    folder = tiny_checkpoints
    whole = recipe.main(options(folder, text, folder / "whole", save_every=2))
    from accelerate import Accelerator

    save = Accelerator.save_state

    def full(self, target, *rest, **keywords):
        if training.states(folder / "out"):
            (folder / "out" / "state.partial").mkdir(exist_ok=True)
            (folder / "out" / "state.partial" / "half").touch()
            raise OSError(28, "No space left on device")
        return save(self, target, *rest, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", full)
        with pytest.raises(SystemExit) as stop:
            recipe.main(options(folder, text, folder / "out", save_every=2))
    assert stop.value.code == 1
    assert "No space left on device" in capsys.readouterr().err
    resumed = recipe.main([*options(folder, text, folder / "out", save_every=2), "--resume"])
    assert metrics(resumed) == metrics(whole)


@pytest.mark.slow
def test_kill_and_resume(recipe, training, recipes, tiny_checkpoints, text):
    """SIGKILL in the middle of the training; the same command with --resume ends as if nothing had happened."""
    folder = tiny_checkpoints
    common = {"save_every": 1, "steps": 40, "recovery_steps": 10}
    whole = recipe.main(options(folder, text, folder / "whole", **common))
    run = in_process(recipes, options(folder, text, folder / "cut", **common))
    deadline = time.monotonic() + 120
    while len(training.states(folder / "cut")) == 0 and time.monotonic() < deadline and run.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    run.kill()
    _, errors = run.communicate()
    assert run.returncode == -signal.SIGKILL, errors
    resumed = recipe.main([*options(folder, text, folder / "cut", **common), "--resume"])
    assert 0 < len(resumed["training"]["loss"]) == 40
    # Another process may have another number of threads, and sums of another order.
    assert resumed["training"]["loss"] == pytest.approx(whole["training"]["loss"], abs=1e-5)
    for now, then in zip(resumed["after"], whole["after"], strict=True):
        assert now["sliding"]["nll"] == pytest.approx(then["sliding"]["nll"], rel=1e-5)


ENDING = """
import atexit, os, sys
import torch.distributed as dist
from hf_posenc.recipes import program

class Left:  # as a backend's thread is, which still holds what the interpreter takes apart
    __del__ = lambda self, abort=os.abort: abort()

left = Left()
atexit.register(print, "asked for")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

def main():
    print("the work", end=" ")
    if sys.argv[2] != "nothing":
        raise SystemExit(int(sys.argv[2]) if sys.argv[2].isdigit() else sys.argv[2])

program.start(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "status", "said"), [("nothing", 0, ""), ("why", 1, "why")])
def test_a_process_of_a_group_leaves_out_the_end_of_the_interpreter(recipes, tmp_path, stop, status, said):
    """What aborts there does not; what was printed, registered and wanted as a status stays."""
    run = subprocess.run(
        [sys.executable, "-c", ENDING, tmp_path / "group", stop],
        env=os.environ | {"PYTHONPATH": str(recipes.parent)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (status, "the work asked for\n")
    assert run.stderr.strip() == said


@pytest.mark.rows(default=0, slow=5)
@pytest.mark.parametrize(
    ("scheme", "how"),
    [
        ("alibi", {"gradient_accumulation": 1}),
        pytest.param("transformer_xl", {"context_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("shaw", {"gradient_accumulation": 1}, marks=pytest.mark.slow),
        pytest.param("rope", {"context_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("learned", {"gradient_accumulation": 1, "launch_file": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param("alibi", {"context_parallel": 2, "launch_file": "context_parallel"}, marks=pytest.mark.slow),
        pytest.param("shaw", {"gradient_accumulation": 1, "launch_file": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param("alibi", {"gradient_accumulation": 1, "launch_file": "deepspeed_zero2"}, marks=ZERO),
        pytest.param("shaw", {"gradient_accumulation": 1, "launch_file": "deepspeed_zero3"}, marks=ZERO),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value.values())),
)
def test_two_processes_equal_one(recipe, recipes, tiny_checkpoints, text, scheme, how):
    """The same windows in the same steps, whoever takes them or shares them: equal losses, weights, measurements."""
    folder = tiny_checkpoints
    common = {"packing": "documents", "scheme": scheme}
    if "num_positions" in ROWS[scheme].values:
        common["scheme_args"] = "num_positions=64"
    how = dict(how)
    file = how.pop("launch_file", None)
    one = recipe.main(options(folder, text, folder / "one", **common))
    run = in_process(recipes, options(folder, text, folder / "two", **common, **how), 2, file)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    two = json.loads((folder / "two" / "results.json").read_text())
    assert two["hardware"]["processes"] == 2
    assert two["training"]["tokens"] == one["training"]["tokens"]
    assert two["training"]["loss"] == pytest.approx(one["training"]["loss"], abs=1e-5)
    # Adam divides by the gradient's own size: where it is all rounding, a step of the learning rate's order comes of it.
    assert_same_weights(folder / "one", folder / "two", 1e-4 if scheme == "transformer_xl" else 1e-5)
    for now, then in zip(two["after"], one["after"], strict=True):
        assert now["sliding"]["tokens"] == then["sliding"]["tokens"]
        assert now["sliding"]["nll"] == pytest.approx(then["sliding"]["nll"], rel=1e-5)


def test_the_teacher_is_the_base(training, tiny_checkpoints):
    """Stock, frozen, of its own weights; with LoRA of the model's, which then cost nothing."""
    tokens = torch.arange(20)[None]
    for shared in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama")
        expected = model(tokens).logits
        teacher = training.Teacher.of(model, 1.0, 32, share_weights=shared).model
        same = {id(weight) for weight in model.parameters()} & {id(weight) for weight in teacher.parameters()}
        assert bool(same) is shared
        hf_posenc.patch_model(model, "alibi")
        assert torch.equal(teacher(tokens).logits, expected)
        assert not torch.allclose(model(tokens).logits, expected, atol=1e-3)


def test_distillation_is_the_divergence_from_the_base(training, tiny_checkpoints):
    """Against the sum over the vocabulary written out in float64; only inside the window, only where there is a target."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    teacher = training.Teacher.of(model, 0.7, 8, share_weights=False)
    hf_posenc.patch_model(model, "alibi")
    torch.manual_seed(0)
    tokens = torch.randint(250, (2, 12))
    targets = torch.where(torch.rand(2, 12) < 0.3, -100, torch.randint(250, (2, 12)))
    logits = model(tokens).logits
    got = logits.double().softmax(-1)
    wanted = teacher.model(tokens[:, :8]).logits.double().softmax(-1)
    own = expected = 0.0
    for row, place in (targets != -100).nonzero().tolist():
        own -= got[row, place, targets[row, place]].log().item()
        if place < 8:
            expected += (wanted[row, place] * (wanted[row, place].log() - got[row, place].log())).sum().item()
    assert training.token_loss(logits, targets).item() == pytest.approx(own, rel=1e-5)
    divergence = teacher.divergence(logits, {"input_ids": tokens}, targets)
    assert divergence.item() == pytest.approx(0.7 * expected, rel=1e-5)


@pytest.mark.slow
def test_trackers_report_or_are_refused(recipe, training, tiny_checkpoints, text, monkeypatch, capsys):
    """accelerate itself goes on silently without one that is not installed."""
    folder = tiny_checkpoints
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SystemExit):
            recipe.main(options(folder, text, folder / "out", tracker="wandb"))
    assert "pip install wandb" in capsys.readouterr().err
    recipe.main(options(folder, text, folder / "out", tracker="tensorboard", eval_every=2))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses, curve = [], []
    for path in (folder / "out").rglob("events.out.tfevents.*"):  # one for the configuration, one for the curve
        events = EventAccumulator(str(path)).Reload()
        if "loss" in events.Tags()["scalars"]:
            losses = [event.value for event in events.Scalars("loss")]
            curve = [event.value for event in events.Scalars("held_out_loss")]
    results = json.loads((folder / "out" / "results.json").read_text())
    assert losses == pytest.approx(results["training"]["loss"])
    assert curve == pytest.approx([point["loss"] for point in results["training"]["curve"]])
    assert len(curve) > 1
