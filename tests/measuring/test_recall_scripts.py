"""The scripts that train bases that recall, and measure what a swap leaves of it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc.evaluation import TASKS

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """Both modules, on a short text, small models and one multiple of the length; bases are written to tmp_path."""
    monkeypatch.syspath_prepend(SCRIPTS)
    modules = []
    for name in ("make_recall_bases", "measure_recall"):
        specification = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        modules.append(importlib.util.module_from_spec(specification))
        monkeypatch.setitem(sys.modules, name, modules[-1])
        specification.loader.exec_module(modules[-1])
    bases, measure = modules
    text = torch.arange(20_000) % 250
    monkeypatch.setattr(bases, "library_tokens", lambda held_out=False: text)
    for name, value in {"FOLDER": tmp_path, "WIDTH": 16, "HEADS": 2, "ROWS": 8, "GATE": 0.0}.items():
        monkeypatch.setattr(bases, name, value)
    for name, value in {
        "TIMES": (2,),
        "CALIBRATED_ROWS": 12,
        "HELD_ROWS": 8,
        "BATCH": 8,
        "RATES": (1e-3, 1e-2),
    }.items():
        monkeypatch.setattr(measure, name, value)
    return bases, measure


def run(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    return module.main()


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("kind", ["rotating", "table"])
def test_a_base_is_written_if_it_passes(scripts, monkeypatch, tmp_path, kind):
    bases, _ = scripts
    monkeypatch.setattr(bases, "STAGES", ((9, 32),))
    assert run(monkeypatch, bases, kind, "--steps", 3) == 0
    made = json.loads((tmp_path / kind / "made.json").read_text())
    assert made["accuracy"].keys() == TASKS.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
    assert model.config.model_type == {"rotating": "llama", "table": "gpt2"}[kind]
    assert model.dtype == torch.float16
    monkeypatch.setattr(bases, "GATE", 0.95)
    assert run(monkeypatch, bases, kind, "--steps", 2, "--out", tmp_path / "no") == 1
    assert not (tmp_path / "no").exists()


def test_heads_of_the_rotating_base_begin_with_their_distance(scripts):
    """With biases alone, the score of a head in the first layer is largest at its number in tokens."""
    bases, _ = scripts
    torch.manual_seed(0)
    model = bases.untrained("rotating", 300)
    attention = model.model.layers[0].self_attn
    size = bases.WIDTH // bases.HEADS
    rates = bases.ROPE_THETA ** (-torch.arange(0, size, 2).double() / size)
    for head in range(bases.HEADS):
        query, key = (
            torch.complex(*each.bias.detach().double()[head * size : (head + 1) * size].chunk(2))
            for each in (attention.q_proj, attention.k_proj)
        )
        scores = [(query * torch.polar(torch.ones(()).double(), rates * d) * key.conj()).real.sum() for d in range(20)]
        assert max(range(20), key=scores.__getitem__) == head


@pytest.mark.slow
def test_killed_and_resumed_the_table_is_the_same(scripts, monkeypatch, tmp_path, capsys):
    bases, measure = scripts
    assert run(monkeypatch, bases, "table", "--steps", 2) == 0
    arguments = ("table", "--variants", "base", "alibi", "--seeds", 0, 1, "--tokens", 2048, "--examples", 4)
    assert run(monkeypatch, measure, *arguments, "--json", tmp_path / "whole.json") == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert list(whole["runs"])[:3] == ["base, plain, seed 0", "alibi, plain, seed 0", "alibi, calibrated, seed 0"]
    base, swapped = (whole["runs"][f"{name}, plain, seed 0"] for name in ("base", "alibi"))
    assert set(base["before"]["recall"]) == {"1x", "distance 2x", "items 2x"}
    assert None in base["before"]["recall"]["distance 2x"].values()  # the table has no position 128
    assert None not in swapped["before"]["recall"]["distance 2x"].values()
    assert base["before"]["loss"] != swapped["before"]["loss"] != swapped["after"]["loss"]

    real, calls = measure.one_run, []

    def killed(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(measure, "one_run", killed)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, measure, *arguments, "--json", tmp_path / "parts.json")
    assert len(json.loads((tmp_path / "parts.json").read_text())["runs"]) == 2
    assert run(monkeypatch, measure, *arguments, "--json", tmp_path / "parts.json") == 0
    parts = json.loads((tmp_path / "parts.json").read_text())
    for each in (*whole["runs"].values(), *parts["runs"].values()):
        del each["cpu_seconds"]
    assert parts == whole
    # A rate more is measured. Only if it wins are the runs made again.
    done = len(calls)
    monkeypatch.setattr(measure, "RATES", (1e-6, 1e-3, 1e-2))
    assert run(monkeypatch, measure, *arguments, "--json", tmp_path / "parts.json") == 0
    assert len(calls) == done
    monkeypatch.setattr(measure, "RATES", (1e-3, 1e-2, 3e-2))
    assert run(monkeypatch, measure, *arguments, "--json", tmp_path / "parts.json") == 0
    more = json.loads((tmp_path / "parts.json").read_text())
    won = [name for name, chosen in more["rates"].items() if chosen["rate"] == 3e-2]
    assert won
    assert len(calls) == done + 2 * len(won)
    for name, chosen in more["rates"].items():
        assert whole["rates"][name]["losses"].items() <= chosen["losses"].items()
    with pytest.raises(SystemExit):
        run(monkeypatch, measure, *arguments[:-1], 8, "--json", tmp_path / "parts.json")
    assert "runs of other settings" in capsys.readouterr().err


def test_a_summary_is_the_median_over_seeds(scripts):
    _, measure = scripts

    def state(*accuracies):
        return {"recall": {"1x": dict(zip("ab", accuracies, strict=True))}, "text_loss": sum(accuracies)}

    runs = {f"alibi, plain, seed {n}": {"before": state(*pair)} for n, pair in enumerate([(1, 0.96), (0.9, 1), (0, 0)])}
    assert measure.summary(runs) == {
        "alibi, plain": {"before": {"seeds": 3, "1x": 0.95, "solved": pytest.approx(1 / 3, abs=1e-3), "text_loss": 1.9}}
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(path.parent.name for path in SCRIPTS.glob("recall_bases/*/config.json")))
def test_committed_bases_recall(monkeypatch, kind):
    monkeypatch.syspath_prepend(SCRIPTS)
    specification = importlib.util.spec_from_file_location("make_recall_bases", SCRIPTS / "make_recall_bases.py")
    bases = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(bases)
    model = AutoModelForCausalLM.from_pretrained(bases.FOLDER / kind, dtype=torch.float32)
    found = bases.accuracies(model, bases.task_tokens(), examples=64, seed=7)
    assert min(found.values()) >= bases.GATE - 0.03, found  # the gate read four times as many examples
    torch.manual_seed(0)
    untrained = bases.accuracies(bases.untrained(kind, len(bases.task_tokens())), bases.task_tokens(), examples=8)
    assert max(untrained.values()) < 0.2
