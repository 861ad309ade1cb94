"""The command: what it prints, what it returns, and that it says what is wrong without a traceback."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import tiny, tokens
from situations import patched_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc import commands
from hf_posenc.calibration.matching import Matching
from hf_posenc.cli import COMMANDS, RECIPES, main
from hf_posenc.core.command_arguments import option, parser_of
from hf_posenc.recipes.embedded import byte_tokenizer


@pytest.fixture
def stock(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "stock")
    return str(tmp_path / "stock")


@pytest.fixture
def ours(tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path / "ours")
    return str(tmp_path / "ours")


def test_schemes(capsys):
    """All are listed; one is explained: equation, source, and every hyper-parameter with default and meaning."""
    assert main(["schemes"]) == 0
    out = capsys.readouterr().out
    for name in hf_posenc.available_schemes():
        assert f"\n{name}(" in "\n" + out
        assert main(["schemes", name]) == 0
        said = " ".join(capsys.readouterr().out.split())
        for part in ("Equation", "Beyond the training length:", "Source:", "layers=None: the decoder layers"):
            assert part in said, (name, part)
        for field in dataclasses.fields(hf_posenc.core.registry.scheme_class(name)):
            meaning = said.partition(f"{field.name}={field.default!r}: ")[2]
            assert len(meaning.split(":")[0]) > 10, (name, field.name)


@pytest.mark.parametrize("name", RECIPES)
def test_help_of_a_recipe(name, recipes, capsys):
    """Grouped, each option once, by one spelling, with its default, and examples."""
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    listed = {said.split()[0]: " ".join(said.split()) for said in re.split(r"\n  (?=--)", out)}
    module = importlib.import_module(f"hf_posenc.recipes.{RECIPES[name][0]}")
    for field in dataclasses.fields(module.Arguments):
        said = listed[option(field.name)]
        assert type(field.default) not in (int, float) or f"(default: {field.default:g})" in said
    assert len(re.findall(r"^([a-z].*):$", out, re.MULTILINE)) > 4
    assert out.count(f"  hf-posenc {name} ") >= 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys):
    """Every argument is explained, and there are examples."""
    parser = parser_of(getattr(commands, name), f"hf-posenc {name}")
    assert all(action.help for action in parser._actions)
    assert f"  hf-posenc {name}" in parser.description


def test_python_runs_the_package():
    words = [sys.executable, "-m", "hf_posenc", "--version"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.startswith("hf_posenc ")


def test_the_bare_command_prints_its_help(capsys):
    with pytest.raises(SystemExit) as asked:
        main(["--help"])
    expected = capsys.readouterr()
    assert "\n  hf-posenc calibrate " in expected.out
    with pytest.raises(SystemExit) as bare:
        main([])
    assert (capsys.readouterr(), bare.value.code) == (expected, asked.value.code)


def test_families(capsys):
    assert main(["families"]) == 0
    out = capsys.readouterr().out
    assert "\nllama\n    rotation of whole heads\n" in out
    for model_type in (*hf_posenc.core.registry.supported_model_types(), *hf_posenc.core.registry.refusals()):
        assert re.search(rf"(^|\n|, ){model_type}(,| \(|\n)", out), model_type
    assert main(["families", "gemma3"]) == 0
    assert "the language model inside is patched, as a rule a gemma3_text:\n    rotation" in capsys.readouterr().out
    assert main(["families", "llama", "mamba", "nothing"]) == 1
    out = capsys.readouterr().out
    assert "'mamba' cannot be patched: it has no attention" in out
    assert "'nothing' is not supported" in out


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error():
    """As in `hf-posenc families | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from hf_posenc.cli import main; sys.exit(main(['families']))"
    ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_inspect(ours, stock, tmp_path, capsys):
    assert main(["inspect", ours]) == 0
    assert "shaw(max_distance=5" in capsys.readouterr().out
    assert main(["inspect", stock]) == 0
    assert "stock positions" in capsys.readouterr().out
    config = tmp_path / "ours/config.json"
    config.write_text(config.read_text().replace('"shaw"', '"shav"'))
    assert main(["inspect", ours]) == 1
    assert "no: unknown scheme 'shav'; choose from alibi, " in capsys.readouterr().out


def test_patch_then_verify(stock, tmp_path, capsys):
    output = tmp_path / "output"
    arguments = ["patch", stock, "shaw", str(output), "--scheme-args", "max_distance=7", "values=False", "--seed", "3"]
    assert main(arguments) == 0
    assert "shaw(max_distance=7" in capsys.readouterr().out
    model = hf_posenc.from_pretrained(output)
    expected = hf_posenc.patch_model(tiny("llama"), "shaw", max_distance=7, values=False, seed=3)
    assert model(tokens()).logits.equal(expected(tokens()).logits)
    assert main(["verify", str(output)]) == 0
    assert "2/2 layers answer to positions" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rope --scheme-args rope_theta=77", "It is not calibrated"),  # another rotation
        ("far_rope", "It keeps the positions of its base"),
        ('["rope",{"scheme":"temperature","length":8}]', "It keeps the positions of its base"),
        ('{"1":"alibi"}', "It is not calibrated"),
    ],
)
def test_patch_says_whether_to_calibrate(words, said, stock, tmp_path, capsys):
    name, *more = words.split()
    assert main(["patch", stock, name, str(tmp_path / "out"), *more]) == 0
    assert f"\n{said}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:hf_posenc:UserWarning")
def test_export(tmp_path, capsys):
    """A GGUF file by its suffix, otherwise a stock checkpoint, and nothing where neither can be had."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf runs this")
    checkpoint, file, folder = (str(tmp_path / name) for name in ("ours", "model.gguf", "stock"))
    model = patched_model("nope", "llama")
    model.save_pretrained(checkpoint)
    with pytest.warns(UserWarning, match="would compute a plain rotation"):
        assert main(["export", checkpoint, file]) == 0
    said = capsys.readouterr().out
    assert f"saved in {file}, without a tokenizer: the checkpoint has none" in said
    assert gguf.GGUFReader(file).fields["general.architecture"].contents() == "llama"
    assert main(["export", checkpoint, folder]) == 0
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert not hf_posenc.is_patched(stock)
    torch.testing.assert_close(stock(tokens()).logits, model(tokens()).logits)
    capsys.readouterr()
    assert main(["export", checkpoint, file]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", checkpoint, str(tmp_path / "other"), "--dtype", "float16"]) == 2
    assert "--dtype is for GGUF files" in capsys.readouterr().err
    assert main(["export", folder, str(tmp_path / "other.gguf")]) == 2
    assert "is a stock checkpoint already" in capsys.readouterr().err
    model.save_pretrained(checkpoint, tokenizer=byte_tokenizer())  # it has no merges
    assert main(["export", checkpoint, str(tmp_path / "other.gguf")]) == 2
    assert "--no-tokenizer" in capsys.readouterr().err
    assert main(["export", checkpoint, str(tmp_path / "other.gguf"), "--no-tokenizer"]) == 0
    assert "other.gguf, without a tokenizer\nit runs in llama.cpp" in capsys.readouterr().out
    assert main(["export", checkpoint, str(tmp_path / "with")]) == 0
    assert (tmp_path / "with" / "tokenizer.json").exists()
    patched_model("transformer_xl", "llama").save_pretrained(tmp_path / "wide")
    assert main(["export", str(tmp_path / "wide"), str(tmp_path / "served"), "--length", "300"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "served").config.max_position_embeddings == 300
    assert main(["export", str(tmp_path / "wide"), str(tmp_path / "wide.gguf"), "--length", "300"]) == 2
    assert "llama.cpp takes -c" in capsys.readouterr().err


def test_export_says_what_can_be_exported(ours, tmp_path, capsys):
    pytest.importorskip("gguf", reason="pip install gguf runs this")
    assert main(["export", ours, str(tmp_path / "out.gguf")]) == 2
    assert "These can be exported:" in capsys.readouterr().err
    assert main(["export", ours, str(tmp_path / "out")]) == 2
    assert "no stock class computes shaw on llama" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


CALIBRATE = ["calibrate", "--model", "STOCK", "--scheme", "t5", "--data", "TEXT", "--output", "OUT"]


@pytest.fixture
def readable(tmp_path, tiny_checkpoints, text):
    """Arguments of `calibrate`, with a tiny LLaMA that has a tokenizer."""
    places = {"STOCK": tiny_checkpoints / "llama", "TEXT": text, "OUT": tmp_path / "out"}
    return [str(places.get(word, word)) for word in [*CALIBRATE, "--length", "32", "--windows", "12", "--steps", "4"]]


def test_calibrate(readable, tmp_path, capsys):
    """What calibrate does in Python, saved with the tokenizer, and in numbers."""
    report, saved = tmp_path / "report.json", tmp_path / "out"
    given = ["--scheme-args", "share_layers=False", "--seed", "2"]
    assert main([*readable, *given, "--json", str(report)]) == 0
    captured = capsys.readouterr()
    assert "Calibrating with 12 windows of 32 tokens, on cpu" in captured.out
    assert captured.err.index("windows:") < captured.err.index("calibrating")
    assert " 4/4 [" in captured.err
    stock, text = readable[2], Path(readable[6]).read_text()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(saved)(text, verbose=False).input_ids)[: 12 * 32].view(12, 32)
    model = hf_posenc.from_pretrained(stock, scheme="t5", share_layers=False, seed=2)
    expected = hf_posenc.calibrate(model, tokens, matching=Matching(steps=4, seed=2))
    assert json.loads(report.read_text()) == expected.to_dict()
    assert str(expected) in captured.out
    found = hf_posenc.from_pretrained(saved).state_dict()
    assert all(value.equal(found[name]) for name, value in model.state_dict().items())
    assert main([*readable, *given]) == 2
    assert "exists already" in capsys.readouterr().err


def there(folder):
    """What is in a folder, but for the cache of texts."""
    return {path for path in folder.iterdir() if path.name != "datasets_cache"}


def test_ctrl_c_leaves_a_state_to_resume_from(readable, tmp_path, capsys, monkeypatch):
    """Ctrl-C in step 2: what is saved after --resume is what one run would have saved."""
    from hf_posenc.calibration import matching

    steps = iter(range(1, 100))

    def gradients(*arguments, plain=matching.add_output_gradients):
        if next(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return plain(*arguments)

    readable[readable.index("t5")] = "nope"
    before, state = there(tmp_path), tmp_path / "out.state.pt"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with monkeypatch.context() as patch:
        patch.setattr(matching, "add_output_gradients", gradients)
        assert main(readable) == 130
    signal.signal(signal.SIGINT, handler)
    assert f"If there is a {state}, the same command with --resume goes on from there" in capsys.readouterr().err
    assert there(tmp_path) == {*before, state}
    assert main(readable) == 2
    assert "is left over from an interrupted calibration: give --resume, or remove it" in capsys.readouterr().err
    assert main([*readable, "--resume", "--steps", "5"]) == 2
    assert "is the state of another run: steps was 4 and is 5" in capsys.readouterr().err
    assert main([*readable, "--resume"]) == 0
    assert there(tmp_path) == {*before, tmp_path / "out"}
    readable[readable.index("--output") + 1] = str(tmp_path / "whole")
    assert main(readable) == 0
    resumed, whole = (hf_posenc.from_pretrained(tmp_path / name).state_dict() for name in ("out", "whole"))
    assert all(value.equal(whole[name]) for name, value in resumed.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["patch", "STOCK", "shav", "OUT"], "choose from alibi"),
        (["patch", "STOCK", "shaw", "OUT", "--scheme-args", "max_distance=-1"], "max_distance must be 0 or more"),
        (["patch", "STOCK", "shaw", "OUT", "--scheme-args", "max_distance"], "takes name=value, not max_distance"),
        (["patch", "OURS", "alibi", "OUT"], "patched already"),
        (["patch", "STOCK", '{"1":', "OUT"], "Expecting value: line 1 column 6"),
        (["patch", "STOCK", "shaw"], "the following arguments are required: output"),
        ([*CALIBRATE, "--length", "16k"], "--length: invalid int value: '16k'"),
        ([*CALIBRATE, "--resume"], "--resume: there is no"),
        ([*CALIBRATE, "--output", "HERE"], "exists already"),
        (
            [*CALIBRATE, "--data", "TEXT"],
            'stock has no tokenizer: AutoTokenizer.from_pretrained("BASE").save_pretrained(',
        ),
        ([*CALIBRATE, "--model", "OURS"], "is patched already: give the stock checkpoint"),
        (["calibrate", "--lenght", "3", *CALIBRATE[1:]], "unknown option or stray value: --lenght 3"),
        (["push", "STOCK", "me/stock"], "is a stock llama checkpoint"),
        (["inspect", "no/such/folder"], "there is no folder no/such/folder"),
        (["verify", "STOCK"], "is a stock llama checkpoint, so there is no patch to verify: `hf-posenc patch"),
        (["evaluate", "--model", "a/b/c", "--data", "TEXT"], "there is no folder a/b/c"),
        (["evaluate", "--model", "STOCK", "--data", "TEXT", "--json", "HERE"], "is a folder, name a file"),
    ],
)
def test_wrong_calls(arguments, message, stock, ours, tmp_path, capsys):
    places = {"STOCK": stock, "OURS": ours, "OUT": tmp_path / "out", "NOWHERE": tmp_path / "nowhere", "HERE": tmp_path}
    (tmp_path / "text.txt").write_text("Call me Ishmael.")
    places["TEXT"] = tmp_path / "text.txt"
    words = [re.sub(r"^[A-Z]+(?=/|$)", lambda found: str(places[found[0]]), argument) for argument in arguments]
    try:
        status = main(words)
    except SystemExit as stop:  # argparse's own
        status = stop.code
    assert status == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith(f"hf-posenc {arguments[0]}: ")
    assert not (tmp_path / "out").exists()
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("words", ["inspect nowhere", "patch nowhere t5 HERE/out"])
def test_a_name_that_is_nowhere_gets_the_words_of_transformers(words, tmp_path, capsys):
    given = words.replace("HERE", str(tmp_path)).split()
    assert main(given) == 2
    said = capsys.readouterr().err
    assert f"hf-posenc {given[0]}: nowhere: " in said
    assert "huggingface.co" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("extnd", "extend"),
        ("schemes yarn", 'rope with scaling={"rope_type": "yarn", "factor": 2.0}'),
        ("verify STOCK --dtyp float32", "--dtype"),
        ("compare --model STOCK --data HERE/a.yaml --variants nope+destil", "distill"),
        ("extend --config HERE/a.yaml", "--steps"),
    ],
)
def test_misspellings_get_the_name_that_was_meant(words, meant, stock, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("stps: 3\n")
    places = {"STOCK": stock, "OUT": str(tmp_path / "out"), "HERE": str(tmp_path)}
    given = [re.sub(r"^[A-Z]{3,}(?=/|$)", lambda found: places[found[0]], word) for word in words.split()]
    try:
        status = main(given)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    captured = capsys.readouterr()
    assert (captured.out + captured.err).endswith(f". Did you mean {meant}?\n")


@pytest.mark.parametrize(("windows", "needed"), [("200", "200"), ("2", "3")])
def test_calibrate_needs_enough_text(windows, needed, readable, capsys):
    assert main([*readable, "--windows", windows]) == 2
    assert f"windows of 32 tokens, {needed} are needed" in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(ours, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "from_pretrained", interrupted)
    assert main(["verify", ours]) == 130
    assert capsys.readouterr().err.endswith("\nhf-posenc verify: interrupted\n")
