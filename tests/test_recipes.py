"""The recipe as its users start it: from arguments to a table, a checkpoint, a JSON; every way to start it wrongly."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc.evaluation import non_overlapping_perplexity, sliding_window_perplexity

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "extend_context.py"


@pytest.fixture
def recipe(monkeypatch):
    """The recipe as a module; accelerate keeps its state in the process, so each test gets a fresh one."""
    from accelerate.state import AcceleratorState

    monkeypatch.syspath_prepend(str(RECIPE.parent))
    module = importlib.import_module("extend_context")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def checkpoints(tmp_path, recipe):
    """A tiny byte-level GPT-2 (32 positions in its table) and a tiny LLaMA."""
    tokenizer = recipe.byte_tokenizer()
    shape = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "bos_token_id": 256, "eos_token_id": 256}
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **shape))
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **shape)
    )
    for name, model in (("gpt2", gpt2), ("llama", llama)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


@pytest.fixture
def text(tmp_path):
    """Twelve documents of this project's own sources, 300 bytes each."""
    source = RECIPE.read_text(encoding="utf-8")
    path = tmp_path / "text.txt"
    path.write_text("\f".join(source[start : start + 300] for start in range(0, 3600, 300)), encoding="utf-8")
    return path


def small(checkpoint, text, output, **changes):
    """Command line of a run of a second; None drops an option."""
    options = {
        "--model": checkpoint,
        "--data": text,
        "--separator": r"\f",
        "--output": output,
        "--eval-lengths": "16 32 48",
        "--eval-tokens": 200,
        "--train-length": 48,
        "--batch-size": 2,
        "--gradient-accumulation": 1,
        "--steps": 3,
    }
    options |= {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return [
        word for name, value in options.items() if value is not None for word in (name, *str(value).split(" ")) if word
    ]


def test_end_to_end(recipe, checkpoints, text, capsys):
    output = checkpoints / "out"
    results = recipe.main(small(checkpoints / "gpt2", text, output, gradient_accumulation=2))

    written = json.loads((output / "results.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert [path.name for path in output.iterdir() if path.suffix == ".partial"] == []
    assert written["arguments"]["scheme"] == "alibi"
    assert written["arguments"]["steps"] == 3
    assert written["versions"]["hf_posenc"] == hf_posenc.__version__
    assert {"torch", "transformers", "accelerate", "python"} < set(written["versions"])
    assert "commit" in written["git"]
    assert written["seed"] == 0
    assert written["training"]["tokens"] == 3 * 2 * 2 * 48
    assert len(written["training"]["loss"]) == 3

    assert [row["length"] for row in written["before"]] == [16, 32, 48]
    assert "sliding" in written["before"][1]
    assert written["before"][2] == {"length": 48, "impossible": "its table ends at 32 positions"}
    assert all({"sliding", "non_overlapping"} < set(row) for row in written["after"])

    # The checkpoint is the model that was measured.
    model = hf_posenc.from_pretrained(output / "model")
    arguments = recipe.Arguments(**written["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    _, held_out = recipe.split(recipe.encode(tokenizer, recipe.read_documents(arguments)), arguments)
    assert len(held_out) == written["data"]["held_out_tokens"] == 200
    row = written["after"][2]
    measured = sliding_window_perplexity(model, held_out, length=48, stride=12)
    assert (measured.tokens, measured.windows, measured.stride) == (199, row["sliding"]["windows"], 12)
    assert measured.nll == pytest.approx(row["sliding"]["nll"])
    assert non_overlapping_perplexity(model, held_out, length=48).nll == pytest.approx(row["non_overlapping"]["nll"])

    printed = capsys.readouterr().out
    assert "the model before cannot run there: its table ends at 32 positions" in printed
    assert f"{row['sliding']['perplexity']:.3f}" in printed
    assert str(output / "model") in printed


def test_fine_tuning_learns_and_repeats(recipe, checkpoints, text):
    options = {"steps": 30, "scheme": "shaw", "scheme_args": "max_distance=8 values=false", "learning_rate": 1e-2}
    first = recipe.main(small(checkpoints / "llama", text, checkpoints / "a", **options))
    again = recipe.main(small(checkpoints / "llama", text, checkpoints / "b", **options))
    assert first["training"]["loss"] == again["training"]["loss"]
    assert first["training"]["loss"][-1] < first["training"]["loss"][0] - 0.5
    assert all(
        after["sliding"]["loss"] < before["sliding"]["loss"]
        for before, after in zip(first["before"], first["after"], strict=True)
    )


@pytest.mark.parametrize("scheme", ["nope", "sinusoidal", "rope", "transformer_xl", "da_transformer"])
def test_other_schemes(recipe, checkpoints, text, scheme):
    results = recipe.main(small(checkpoints / "llama", text, checkpoints / "out", scheme=scheme))
    assert hf_posenc.from_pretrained(checkpoints / "out" / "model").config.position_encoding["scheme"] == scheme
    assert all("sliding" in row for row in results["before"] + results["after"])


def test_held_out_text_is_never_trained_on(recipe):
    documents = [torch.full((10 + index,), index) for index in range(20)]
    for seed in range(5):
        training, held_out = recipe.split(documents, recipe.Arguments(eval_tokens=45, seed=seed))
        assert not set(training.tolist()) & set(held_out.tolist())
        assert len(held_out) == 45
    training, held_out = recipe.split([torch.arange(100)], recipe.Arguments(eval_tokens=30))
    assert training.tolist() == list(range(70))
    assert held_out.tolist() == list(range(70, 100))


def test_repeated_documents_count_once(recipe, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\none\n\n\n\n")
    (tmp_path / "b.txt").write_text("two\n\nthree")
    arguments = recipe.Arguments(data=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], separator=r"\n\n")
    assert recipe.read_documents(arguments) == ["one", "two", "three"]


def test_interrupt_keeps_the_weights(recipe, checkpoints, text, monkeypatch, capsys):
    def interrupted(loader):
        batches = iter(loader)
        yield next(batches)
        yield next(batches)
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "endless", interrupted)
    with pytest.raises(SystemExit) as stop:
        recipe.main(small(checkpoints / "gpt2", text, checkpoints / "out"))
    assert stop.value.code == 130
    assert "out/interrupted" in capsys.readouterr().out.replace(os.sep, "/")
    saved = hf_posenc.from_pretrained(checkpoints / "out" / "interrupted")
    stock = GPT2LMHeadModel.from_pretrained(checkpoints / "gpt2")
    assert not torch.equal(saved.transformer.h[0].mlp.c_fc.weight, stock.transformer.h[0].mlp.c_fc.weight)


def test_a_failed_write_leaves_the_old_json(recipe, tmp_path):
    path = tmp_path / "results.json"
    recipe.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        recipe.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


WRONG = {
    "unknown option": ({"stepz": 3}, "--stepz"),
    "abbreviation": ({"grad": 3}, "--grad"),
    "no number": ({"steps": "many"}, "invalid int value"),
    "zero steps": ({"steps": 0}, "--steps must be at least 1, not 0"),
    "negative rate": ({"learning_rate": -1}, "--learning-rate must be positive, not -1.0"),
    "negative warm-up": ({"warmup_steps": -1}, "--warmup-steps must not be negative, not -1"),
    "precision": ({"mixed_precision": "int4"}, "no, bf16 or fp16, not int4"),
    "length of one": ({"eval_lengths": "1 16"}, "at least 2"),
    "stride": ({"stride": 16}, "--stride 16 must be at least 1 and below the shortest of --eval-lengths, 16"),
    "few eval tokens": ({"eval_tokens": 40}, "--eval-tokens 40 is less than the longest of --eval-lengths, 48"),
    "scheme": ({"scheme": "albi"}, "alibi, da_transformer, learned, nope, rope, shaw, sinusoidal, transformer_xl"),
    "hyper-parameter": ({"scheme": "shaw", "scheme_args": "distance=3"}, "distance"),
    "its value": ({"scheme": "shaw", "scheme_args": "max_distance=0"}, "max_distance"),
    "no value": ({"scheme": "shaw", "scheme_args": "max_distance"}, "--scheme-args takes name=value, not max_distance"),
    "a table too short": ({"scheme": "learned", "scheme_args": "num_positions=40"}, "ends at 40 positions"),
    "no such file": ({"data": "nowhere.txt"}, "--data nowhere.txt: no such file"),
    "no data": ({"data": None}, "--model needs --data"),
    "no such model": ({"model": "./nowhere"}, "--model ./nowhere"),
    "text too short to measure": (
        {"eval_lengths": 4000, "eval_tokens": 4000, "train_length": 48},
        "the held-out text has 3,611 tokens, the longest of --eval-lengths needs 4,000",
    ),
    "text too short to train": (
        {"train_length": 2000, "batch_size": 3},
        "one batch needs 6,000 (1 x --batch-size 3 x --train-length 2000)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_stop_before_anything_runs(recipe, checkpoints, text, monkeypatch, capsys, case):
    changes, message = WRONG[case]
    monkeypatch.setattr(recipe, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stop:
        recipe.main(small(checkpoints / "gpt2", text, checkpoints / "out", **changes))
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (checkpoints / "out").exists()


def test_an_output_folder_in_use_is_refused(recipe, checkpoints, text, capsys):
    (checkpoints / "out").mkdir()
    (checkpoints / "out" / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        recipe.main(small(checkpoints / "gpt2", text, checkpoints / "out"))
    assert "is not empty: choose another folder, or --overwrite" in capsys.readouterr().err
    recipe.main([*small(checkpoints / "gpt2", text, checkpoints / "out"), "--overwrite"])
    assert (checkpoints / "out" / "thesis.tex").exists()


def test_unsupported_and_patched_checkpoints_are_refused(recipe, checkpoints, text, capsys):
    config = json.loads((checkpoints / "gpt2" / "config.json").read_text())
    (checkpoints / "gpt2" / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(SystemExit):
        recipe.main(small(checkpoints / "gpt2", text, checkpoints / "out"))
    assert "'bert' is not supported" in capsys.readouterr().err

    hf_posenc.patch_model(LlamaForCausalLM.from_pretrained(checkpoints / "llama"), "nope").save_pretrained(
        checkpoints / "llama"
    )
    with pytest.raises(SystemExit):
        recipe.main(small(checkpoints / "llama", text, checkpoints / "out"))
    assert "is patched already" in capsys.readouterr().err


def test_incomplete_checkpoints_are_named(recipe, checkpoints, text, capsys):
    config = json.loads((checkpoints / "gpt2" / "config.json").read_text())
    (checkpoints / "gpt2" / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    small_model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    small_model.save_pretrained(checkpoints / "gpt2")
    with pytest.raises(SystemExit):
        recipe.main(small(checkpoints / "gpt2", text, checkpoints / "out"))
    assert "the model embeds 100: they do not belong together" in capsys.readouterr().err
    for name in ("model.safetensors", "tokenizer.json"):
        (checkpoints / "gpt2" / name).unlink()
        with pytest.raises(SystemExit):
            recipe.main(small(checkpoints / "gpt2", text, checkpoints / "out"))
        assert f"--model {checkpoints / 'gpt2'}" in capsys.readouterr().err


def test_unreadable_text_is_named(recipe, checkpoints, text, capsys):
    text.write_bytes(b"caf\xe9 " * 1000)
    with pytest.raises(SystemExit):
        recipe.main(small(checkpoints / "gpt2", text, checkpoints / "out"))
    assert f"--data {text}: not readable as UTF-8" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_embedded_default_under_accelerate_launch(tmp_path):
    """The default, with fewer steps: base trained on the spot, its table's end reported, patched and reloaded."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--cpu", str(RECIPE)]
    command += ["--base-steps", "20", "--steps", "4", "--batch-size", "1", "--train-length", "512"]
    command += ["--eval-lengths", "256", "512", "--eval-tokens", "1024", "--output", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "fine-tuning: 100%" in run.stderr
    assert "its table ends at 256 positions" in run.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    # It has learnt something: 257 symbols are 5.5 nats at random.
    assert results["before"][0]["sliding"]["loss"] < 4
    model = hf_posenc.from_pretrained(tmp_path / "out" / "model")
    assert model.config.position_encoding["scheme"] == "alibi"
    model.generate(torch.arange(300)[None] % 256, max_new_tokens=3, do_sample=False)
