"""The command: what it prints, what it returns, and that it says what is wrong without a traceback."""

import json

import pytest
import torch
from families import tiny, tokens
from situations import patched_model
from transformers import AutoTokenizer, LlamaForCausalLM

import hf_posenc
from hf_posenc.cli import main
from hf_posenc.evaluation import sliding_window_perplexity


@pytest.fixture
def stock(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "stock")
    return str(tmp_path / "stock")


@pytest.fixture
def ours(tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path / "ours")
    return str(tmp_path / "ours")


def test_schemes(capsys):
    assert main(["schemes"]) == 0
    out = capsys.readouterr().out
    for name in hf_posenc.available_schemes():
        assert f"\n{name}(" in "\n" + out


def test_inspect(ours, stock, tmp_path, capsys):
    assert main(["inspect", ours]) == 0
    assert "shaw(max_distance=5" in capsys.readouterr().out
    assert main(["inspect", stock]) == 0
    assert "stock positions" in capsys.readouterr().out
    config = tmp_path / "ours/config.json"
    config.write_text(config.read_text().replace('"shaw"', '"shav"'))
    assert main(["inspect", ours]) == 1
    assert "no: hf_posenc:" in capsys.readouterr().out


def test_patch_then_verify(stock, tmp_path, capsys):
    output = tmp_path / "output"
    arguments = ["patch", stock, "shaw", str(output), "--set", "max_distance=7", "--set", "values=False", "--seed", "3"]
    assert main(arguments) == 0
    assert "shaw(max_distance=7" in capsys.readouterr().out
    model = hf_posenc.from_pretrained(output)
    expected = hf_posenc.patch_model(tiny("llama"), "shaw", max_distance=7, values=False, seed=3)
    assert model(tokens()).logits.equal(expected(tokens()).logits)
    assert main(["verify", str(output)]) == 0
    assert "2/2 layers answer to positions" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err


def test_evaluate(tmp_path, capsys, tiny_checkpoints):
    """A stock and a patched checkpoint on the same text: the numbers of measure_context."""
    text = tmp_path / "a.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail.")
    stock = tiny_checkpoints / "llama"
    assert main(["patch", str(stock), "alibi", str(tmp_path / "patched")]) == 0
    printed = []
    for folder in (stock, tmp_path / "patched"):
        words = ["evaluate", str(folder), str(text), "--lengths", "16", "32", "--json", str(tmp_path / "out.json")]
        capsys.readouterr()
        assert main(words) == 0
        rows = json.loads((tmp_path / "out.json").read_text())
        assert [row["length"] for row in rows] == [16, 32]
        tokens = torch.tensor(list(AutoTokenizer.from_pretrained(folder)(text.read_text()).input_ids))
        model = hf_posenc.from_pretrained(folder) if folder != stock else LlamaForCausalLM.from_pretrained(folder)
        expected = sliding_window_perplexity(model, tokens, length=32, stride=8)
        assert rows[1]["sliding"]["nll"] == pytest.approx(expected.nll, rel=1e-5)
        printed.append(capsys.readouterr().out)
        assert f"{expected.perplexity:.3f}" in printed[-1]
    assert printed[0] != printed[1]
    assert main(["evaluate", str(stock), str(tmp_path / "nowhere.txt")]) == 2
    assert "nowhere.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["patch", "STOCK", "shav", "OUT"], "choose from alibi"),
        (["patch", "STOCK", "shaw", "OUT", "--set", "max_distance=0"], "max_distance must be positive"),
        (["patch", "STOCK", "shaw", "OUT", "--set", "max_distance"], "NAME=VALUE"),
        (["patch", "OURS", "alibi", "OUT"], "patched already"),
        (["verify", "STOCK"], "say which scheme"),
        (["push", "STOCK", "me/stock"], "is a stock llama checkpoint"),
        (["inspect", "./nowhere"], "nowhere"),
    ],
)
def test_wrong_calls(arguments, message, stock, ours, tmp_path, capsys):
    places = {"STOCK": stock, "OURS": ours, "OUT": str(tmp_path / "out")}
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith(f"hf-posenc {arguments[0]}: ")
    assert not (tmp_path / "out").exists()
