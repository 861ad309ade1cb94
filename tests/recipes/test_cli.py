"""The command: what it prints, what it returns, and that it says what is wrong without a traceback."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import tiny, tokens
from situations import patched_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import hf_posenc
from hf_posenc import commands
from hf_posenc.calibration.matching import WEIGHTS, Matching
from hf_posenc.cli import RECIPES, main
from hf_posenc.evaluation import sliding_window_perplexity
from hf_posenc.recipes import calibrate, corpus, measurements, options


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


def test_schemes_explained(capsys):
    """Equation, source, and every hyper-parameter with its default and what it means."""
    for name in hf_posenc.available_schemes():
        assert main(["schemes", name]) == 0
        said = " ".join(capsys.readouterr().out.split())
        for part in (
            "Equation",
            "Beyond the training length:",
            "Deviations:",
            "Source:",
            "layers=None: the decoder layers",
        ):
            assert part in said, (name, part)
        for field in dataclasses.fields(hf_posenc.registry.scheme_class(name)):
            meaning = said.partition(f"{field.name}={field.default!r}: ")[2]
            assert len(meaning.split(":")[0]) > 10, (name, field.name)
    assert main(["schemes", "shaw"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "max_distance=32: clipping distance, the paper's `k`." in said
    assert "arXiv:1803.02155" in said
    assert main(["schemes", "shav"]) == 2
    assert "choose from alibi" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_help_of_a_recipe(name, recipes, capsys):
    """Grouped, each option once, by one spelling, what is used most first, with examples at the end."""
    assert main([name, "--help-all"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: hf-posenc {name} [options]\n")
    options = re.findall(r"^  (?:-h, )?(--[\w-]+)", out, re.MULTILINE)
    assert len(set(options)) == len(options)
    assert not re.search(r"--\w+_", out)
    groups = re.findall(r"^([a-z].*):$", out, re.MULTILINE | re.IGNORECASE)
    assert groups[0] == "most used"
    assert groups[-1] == "examples"
    assert len(groups) > 4
    assert out.count(f"  hf-posenc {name} ") >= 2


@pytest.mark.parametrize("name", RECIPES)
def test_help_fits_on_a_screen(name, recipes, capsys, monkeypatch):
    """What is used most; it names the groups of the other options, and the option that lists them."""
    monkeypatch.setenv("COLUMNS", "80")
    main([name, "--help"])
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 45
    main([name, "--help-all"])
    whole = capsys.readouterr().out
    listed = [set(re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)) for text in (short, whole)]
    assert {"--data", "--help-all"} <= listed[0] < listed[1]
    titles = re.findall(r"^([a-z].*):$", whole, re.MULTILINE | re.IGNORECASE)[1:-2]
    said = " ".join(short.split())
    assert all(title.lower() in said for title in titles)


def test_the_bare_command_prints_its_help(capsys):
    with pytest.raises(SystemExit) as asked:
        main(["--help"])
    expected = capsys.readouterr()
    assert "\n  hf-posenc calibrate " in expected.out
    with pytest.raises(SystemExit) as bare:
        main([])
    assert (capsys.readouterr(), bare.value.code) == (expected, asked.value.code)


@pytest.mark.parametrize("name", RECIPES)
def test_help_is_about_this_recipe_and_says_every_default(name, recipes, capsys):
    main([name, "--help-all"])
    listed = {said.split()[0]: " ".join(said.split()) for said in re.split(r"\n  (?=-)", capsys.readouterr().out)}
    assert not [said for said in listed.values() if "where a recipe allows it" in said]
    module = importlib.import_module(f"hf_posenc.recipes.{RECIPES[name][0]}")
    for field in dataclasses.fields(module.Arguments):
        if type(field.default) in (int, float):
            assert f"(default: {field.default:g})" in listed[options.option(field.name)]


def test_names_of_0_1_0_are_read(recipes):
    from hf_posenc.recipes import evaluate, one_run

    words = ["--eval_lengths", "8", "16", "--train_length", "9", "--batch-size", "3"]
    read, _ = options.parse(one_run.Arguments, words, "")
    assert (read.lengths, read.train_length, read.batch_size) == ([8, 16], 9, 3)
    words = evaluate.with_option_names(["model", "a.txt", "b.txt", "--eval-lengths", "16", "--output", "a.json"])
    read, _ = options.parse(evaluate.Arguments, words, "")
    assert (read.model, read.data, read.lengths, read.json) == ("model", ["a.txt", "b.txt"], [16], "a.json")


def test_completion_knows_commands_and_their_options(recipes, capsys):
    pytest.importorskip("shtab", reason="pip install shtab runs this")
    assert main(["completion", "bash"]) == 0
    out = capsys.readouterr().out
    for word in ("extend", "--train-length", "--scheme-args", "--dry-run"):
        assert word in out
    assert "--eval-lengths" not in out


def test_completion_without_shtab_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


def test_verify_says_how_to_read_it(ours, capsys):
    assert main(["verify", ours]) == 0
    out = capsys.readouterr().out
    for word in ("response", "live", "order"):
        assert f"`{word}`" in out


def test_a_dry_run_says_what_push_would_send(ours, capsys, monkeypatch):
    """Names and sizes of the folder, and nobody is asked."""
    monkeypatch.setattr(hf_posenc.checkpoints.hub, "HfApi", lambda **_: pytest.fail("asked"))
    assert main(["push", ours, "me/x", "--dry-run", "--revision", "trial"]) == 0
    out = capsys.readouterr().out
    assert "to me/x, branch trial, in one commit:" in out
    for name in ("config.json", "model.safetensors", "modeling_hf_posenc.py"):
        assert f"{(Path(ours) / name).stat().st_size:,}  {name}" in out


def test_families(capsys):
    assert main(["families"]) == 0
    out = capsys.readouterr().out
    assert "\nllama\n    rotation of whole heads\n" in out
    for model_type in (*hf_posenc.registry.supported_model_types(), *hf_posenc.registry.refusals()):
        assert re.search(rf"(^|\n|, ){model_type}(,| \(|\n)", out), model_type
    assert main(["families", "kimi_linear", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"cannot carry [a-z, ]*rope", out)
    assert "refused where its config sets add_cross_attention: positions" in out
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
    assert "no: hf_posenc:" in capsys.readouterr().out


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


def test_patch_says_how_to_calibrate(tiny_checkpoints, text, tmp_path, capsys):
    """By a command that works as it is printed, for the same scheme on the same base."""
    words = [
        "patch",
        str(tiny_checkpoints / "llama"),
        "kerple",
        str(tmp_path / "out"),
        "--scheme-args",
        'variant="power"',
    ]
    assert main(words) == 0
    *_, said, command = capsys.readouterr().out.splitlines()
    assert said.startswith("It is not calibrated")
    places = {"TEXT": str(text), "FOLDER": str(tmp_path / "calibrated")}
    program, name, *given = [places.get(word, word) for word in shlex.split(command)]
    assert (program, name) == ("hf-posenc", "calibrate")
    arguments, _ = options.parse(calibrate.Arguments, given, "")
    (patched,) = hf_posenc.schemes_of(hf_posenc.from_pretrained(tmp_path / "out"))
    assert calibrate.check_arguments(arguments) == (patched,)


def test_export(tmp_path, capsys):
    """A GGUF file by its suffix, otherwise a stock checkpoint, and nothing where neither can be had."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf runs this")
    checkpoint, file, folder = (str(tmp_path / name) for name in ("ours", "model.gguf", "stock"))
    model = patched_model("nope", "llama")
    model.save_pretrained(checkpoint)
    assert main(["export", checkpoint, file]) == 0
    assert f"saved in {file}, without a tokenizer" in capsys.readouterr().out
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
    given = ["--scheme-args", "share_layers=False", "--held-out", "3", "--seed", "2", "--weight-rate", "0.01"]
    assert main([*readable, *given, "--json", str(report)]) == 0
    captured = capsys.readouterr()
    assert "Calibrating with 9 windows of 32 tokens, and 3 held out, on cpu" in captured.out
    assert captured.err.index("closed forms") < captured.err.index("calibrating")
    assert " 4/4 [" in captured.err
    stock, text = readable[2], Path(readable[6]).read_text()
    tokens = torch.tensor(AutoTokenizer.from_pretrained(saved)(text, verbose=False).input_ids)[: 12 * 32].view(12, 32)
    model = hf_posenc.from_pretrained(stock, scheme="t5", share_layers=False, seed=2)
    expected = hf_posenc.calibrate(model, tokens, held_out=3, matching=Matching(steps=4, seed=2, weight_rate=0.01))
    assert json.loads(report.read_text()) == expected.to_dict()
    assert str(expected) in captured.out
    found = hf_posenc.from_pretrained(saved).state_dict()
    assert all(value.equal(found[name]) for name, value in model.state_dict().items())
    assert main([*readable, *given]) == 2
    assert "exists already" in capsys.readouterr().err


def test_calibrate_draws(readable, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")
    assert main([*readable, "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert f"picture in {tmp_path / 'a.png'}" in capsys.readouterr().out


def test_calibrate_says_at_once_that_it_cannot_draw(readable, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hf_posenc, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*readable, "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_calibrate_has_the_defaults_and_choices_of_the_function():
    parameters = inspect.signature(hf_posenc.calibrate).parameters
    defaults = {name: parameters[name].default for name in parameters} | dataclasses.asdict(Matching())
    ours = {field.name: field.default for field in dataclasses.fields(calibrate.Arguments)}
    assert (ours["stage"], ours["weights"]) == ("attention", "query_key")
    assert defaults["matching"] == Matching()
    same = ("judge", "steps", "rate", "weight_rate", "loss", "held_out", "seed")
    assert {name: defaults[name] for name in same} == {name: ours[name] for name in same}
    assert set(calibrate.TRAINED) == set(WEIGHTS) - {"adapter"}  # the command puts no adapter on


def there(folder):
    """What is in a folder, but for the cache of texts."""
    return {path for path in folder.iterdir() if path.name != "datasets_cache"}


@pytest.mark.parametrize("moment", ["calibrate", "save"])
def test_ctrl_c_leaves_no_folder(moment, readable, tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, **_):
        if moment == "save":
            (arguments[1].parent / "half").write_text("written")
        raise KeyboardInterrupt

    before = there(tmp_path)
    if moment == "save":
        monkeypatch.setattr("hf_posenc.checkpoints.model_classes.PosEncMixin.save_pretrained", interrupted)
    else:
        monkeypatch.setattr(hf_posenc, "calibrate", interrupted)
    assert main(readable) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("Interrupted. ")
    assert ("out.state.safetensors has what was done so far" in said) is (moment == "save")
    left = [tmp_path / "out.state.safetensors"] if moment == "save" else []  # from which it can be saved after all
    assert there(tmp_path) == {*before, *left}


def test_ctrl_c_leaves_a_state_to_resume_from(readable, tmp_path, capsys, monkeypatch):
    """Ctrl-C in step 2 waits for its end; what is saved after --resume is what one run would have saved."""
    from hf_posenc.calibration import matching

    steps = iter(range(1, 100))

    def gradients(*arguments, plain=matching.add_output_gradients):
        if next(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        return plain(*arguments)

    readable[readable.index("t5")] = "nope"
    before, handler = there(tmp_path), signal.getsignal(signal.SIGINT)
    state = tmp_path / "out.state.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(matching, "add_output_gradients", gradients)
        assert main(readable) == 130
    said = capsys.readouterr().err
    assert "Stopping after this step" in said
    assert f"{state} has what was done so far: the same command with --resume goes on from there" in said
    assert signal.getsignal(signal.SIGINT) is handler
    assert there(tmp_path) == {*before, state}
    assert main(readable) == 2
    assert "is left over from an interrupted calibration: give --resume, or remove it" in capsys.readouterr().err
    assert main([*readable, "--resume", "--steps", "5"]) == 2
    assert "is the state of another calibration: steps was 4 and is 5" in capsys.readouterr().err
    assert main([*readable, "--resume"]) == 0
    said = capsys.readouterr().err
    assert re.findall(r"calibrating: .*?(\d/4) \[", said)[0] == "2/4"
    assert " 4/4 [" in said
    assert "closed forms" not in said
    assert there(tmp_path) == {*before, tmp_path / "out"}
    readable[readable.index("--output") + 1] = str(tmp_path / "whole")
    assert main(readable) == 0
    resumed, whole = (hf_posenc.from_pretrained(tmp_path / name).state_dict() for name in ("out", "whole"))
    assert all(value.equal(whole[name]) for name, value in resumed.items())


def test_a_second_stage_is_said_only_where_there_is_one(readable, tmp_path, capsys):
    assert main([*readable[:-2], "--stage", "closed_form"]) == 0
    captured = capsys.readouterr()
    assert "closed forms" in captured.err
    assert "calibrating" not in captured.err
    assert hf_posenc.verify(hf_posenc.from_pretrained(tmp_path / "out")).ok


def test_evaluate(tmp_path, capsys, tiny_checkpoints):
    """A stock and a patched checkpoint on the same text: the numbers of measure_context."""
    text = tmp_path / "a.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail.")
    stock = tiny_checkpoints / "llama"
    assert main(["patch", str(stock), "alibi", str(tmp_path / "patched")]) == 0
    printed = []
    for folder in (stock, tmp_path / "patched"):
        words = [
            "evaluate",
            str(folder),
            str(text),
            "--lengths",
            "16",
            "32",
            "--json",
            str(tmp_path / "out.json"),
        ]  # as in 0.1.0
        words += ["--eval-tokens", "87", "--retrieval-trials", "0"]
        capsys.readouterr()
        assert main(words) == 0
        rows = json.loads((tmp_path / "out.json").read_text())["measured"]
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
        (["patch", "STOCK", "shaw", "OUT", "--scheme-args", "max_distance=-1"], "max_distance must be 0 or more"),
        (["patch", "STOCK", "shaw", "OUT", "--scheme-args", "max_distance"], "takes name=value, not max_distance"),
        (["patch", "STOCK", "shaw", "OUT", "--set", "max_distance=3", "--set", "max_distance=4"], "max_distance twice"),
        ([*CALIBRATE, "--held-out", "0"], "--held-out must be at least 1, not 0"),
        ([*CALIBRATE, "--steps", "-1"], "--steps must be at least 1, not -1"),
        ([*CALIBRATE, "--windows", "0"], "--windows must be at least 1, not 0"),
        ([*CALIBRATE, "--rate", "0"], "--rate must be positive, not 0"),
        ([*CALIBRATE, "--length", "1"], "--length must be at least 2, not 1"),
        ([*CALIBRATE, "--stage", "closed_form", "--steps", "3"], "--steps changes nothing with --stage closed_form"),
        ([*CALIBRATE, "--weights", "scheme", "--weight-rate", "1"], "--weight-rate changes nothing with --weights"),
        ([*CALIBRATE, "--stage", "closed_form", "--resume"], "--resume changes nothing with --stage closed_form"),
        (
            [*CALIBRATE, "--step-lengths", "100"],
            "tokens cannot be cut into windows of 100: lengths must divide",
        ),
        (
            [*CALIBRATE, "--step-lengths", "8", "16", "--steps", "1"],
            "--steps 1 cannot be divided among 2 --step-lengths",
        ),
        ([*CALIBRATE, "--resume"], "--resume: there is no"),
        ([*CALIBRATE, "--json", "NOWHERE/a.json"], "there is no folder"),
        ([*CALIBRATE, "--plot", "NOWHERE/a.png"], "there is no folder"),
        ([*CALIBRATE, "--plot", "HERE/a.bmp"], "a figure is saved as"),
        ([*CALIBRATE, "--scheme", "shav"], "choose from alibi"),
        ([*CALIBRATE, "--scheme-args", "buckets=3"], "t5 has no hyper-parameter buckets; it has"),
        ([*CALIBRATE, "--data", "NOWHERE"], "no such file"),
        ([*CALIBRATE, "--output", "HERE"], "exists already"),
        ([*CALIBRATE, "--device", "toaster"], "--device toaster cannot be used here"),
        ([*CALIBRATE, "--model", "NOWHERE"], "there is no folder"),
        ([*CALIBRATE, "--model", "OURS"], "is patched already: give the stock checkpoint"),
        (CALIBRATE[:-2], "--output DIR is missing"),
        ([*CALIBRATE, "--revision", "main"], "--revision needs a checkpoint on the Hub"),
        (["calibrate", "--lenght", "3"], "unknown option or stray value: --lenght 3"),
        (["push", "NOWHERE", "me/x"], "there is no folder"),
        (["push", "HERE", "me/x"], "it has no config.json"),
        (["inspect", "NOWHERE"], "there is no folder"),
        (["inspect", "STOCK", "--revision", "main"], "--revision needs a checkpoint on the Hub"),
        (["verify", "./nowhere"], "there is no folder ./nowhere"),
        (["verify", "STOCK/config.json"], "is a file: name the folder"),
        (["patch", "~/nowhere", "alibi", "OUT"], "there is no folder ~/nowhere"),
        (["evaluate", "a/b/c", "TEXT"], "there is no folder a/b/c"),
        (["evaluate", "STOCK", "NOWHERE"], "no such file"),
        (["evaluate", "STOCK", "HERE"], "is a folder"),
        (["evaluate", "STOCK", "TEXT", "--device", "toaster"], "--device toaster cannot be used here: "),
        (["evaluate", "STOCK", "TEXT", "--device", "meta"], "--device meta cannot be used here: "),
        (["evaluate", "STOCK", "TEXT", "--json", "HERE"], "is a folder, name a file"),
        (
            ["evaluate", "STOCK", "TEXT", "--lengths", "32", "48", "--stride", "32"],
            "must divide every one of --lengths",
        ),
        (
            ["plot", "wavelengths", "HERE/a.png", "rope", "--length", "9"],
            "--length has no effect on wavelengths of rope",
        ),
        (["plot", "decay", "HERE/a.png", "rope", "--text", "TEXT"], "--data has no effect on decay of rope"),
        (["plot", "precision", "HERE/a.png", "alibi", "--trained-length", "9"], "--trained-length has no effect"),
        (["plot", "order", "HERE/a.png", "STOCK", "--scheme-args", "a=1"], "--scheme-args has no effect on order of"),
        (["plot", "decay", "HERE/a.bmp", "rope"], "a figure is saved as"),
        (["plot", "decay", "NOWHERE/a.png", "rope"], "there is no folder"),
        (
            ["plot", "decay", "HERE/a.png", "rope", "--scheme-args", "seed=1"],
            "rope has no hyper-parameter seed; it has",
        ),
        (["patch", "OURS", "alibi", "OUT"], "patched already"),
        (["verify", "STOCK"], "is a stock llama checkpoint, so there is no patch to verify: `hf-posenc patch"),
        (["patch", "STOCK", "shaw"], "the following arguments are required: output"),
        (["push", "STOCK", "me/stock", "--dry-run"], "is a stock llama checkpoint"),
        (["push", "STOCK", "me/stock"], "is a stock llama checkpoint"),
        (["inspect", "./nowhere"], "nowhere"),
        (["inspect", "nowhere"], "there is no folder nowhere, and the Hub has not answered: "),
        (["plot", "biases", "HERE/a.png", "nosuch"], "there is no folder nosuch, and the Hub has not answered: "),
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


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("extnd", "extend"),
        ("schemes ALiBi", "alibi"),
        ("schemes transformer-xl", "transformer_xl"),
        ("schemes yarn", 'rope with scaling={"rope_type": "yarn", "factor": 2.0}'),
        ("patch STOCK albi OUT", "alibi"),
        ("patch STOCK t5 OUT --scheme-args num_bucket=9", "num_buckets"),
        ("patch STOCK kerple OUT --scheme-args variant=Log", "log"),
        ("patch STOCK rope OUT --scheme-args scaling=yarn", 'scaling={"rope_type": "yarn", "factor": 2.0}'),
        ("""patch STOCK rope OUT --scheme-args scaling={"rope_type":"yran","factor":2}""", "yarn"),
        ("patch STOCK alibi OUT --dtype BFloat16", "bfloat16"),
        ("families lama", "llama"),
        ("families kimi-linear", "kimi_linear"),
        ("inspect STOCK --revison v1", "--revision"),
        ("plot bias HERE/a.png alibi", "biases"),
        ("plot biases HERE/a.png albi", "alibi"),
        ("calibrate --stage closed-form --model STOCK --scheme t5 --data HERE/a.yaml --output OUT", "closed_form"),
        ("calibrate --train-lenght 9", "--length"),
        ("compare --schemes alibi t5", "--variants"),
        ("compare --model STOCK --data HERE/a.yaml --variants yarn", "rope-yarn"),
        ("compare --model STOCK --data HERE/a.yaml --variants rope-liner", "rope-linear"),
        ("compare --model STOCK --data HERE/a.yaml --variants nope+destil", "distill"),
        ("pretrain --variants alibi", "--schemes"),
        ("extend --shceme t5", "--scheme"),
        ("extend --Learning_Rate 1e-4", "--learning-rate"),
        ("extend --data HERE/a.yaml --tracker tensorbord", "tensorboard"),
        ("extend --config HERE/a.yaml", "steps"),
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
    assert status == (1 if given[0] == "families" else 2)
    captured = capsys.readouterr()
    assert (captured.out + captured.err).endswith(f". Did you mean {meant}?\n")


def test_what_is_close_to_no_name_gets_no_guess(capsys):
    assert main(["schemes", "fourier"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_a_checkpoint_is_no_model_type(stock, capsys):
    for name in ("meta-llama/Llama-3.2-1B", stock):
        assert main(["families", name]) == 2
        assert f"`hf-posenc inspect {name}` says whether it can be patched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--windows", "200"], "windows of 32 tokens, 200 were asked for"),
        (["--held-out", "12"], "12 windows of 32 tokens from TEXT are too few: --held-out takes 12"),
    ],
)
def test_calibrate_needs_enough_text(more, message, readable, capsys, monkeypatch):
    monkeypatch.setattr(hf_posenc, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert main([*readable, *more]) == 2
    assert message.replace("TEXT", readable[6]) in capsys.readouterr().err


def test_windows_longer_than_the_base_was_made_for(readable, tmp_path, capsys, monkeypatch):
    """The config says so: no text is read, no weights."""
    monkeypatch.setattr(corpus, "documents", lambda *_: pytest.fail("read"))
    assert main([*readable, "--length", "33"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        f"hf-posenc calibrate: --length 33: {readable[2]} was trained at 32 tokens, and can be imitated up to that length: "
        "give --length 32 or less\n"
    )
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("longest", "length"), [(48, 48), (1024, 512)])
def test_windows_are_as_long_as_the_base_was_made_for(longest, length, readable, tiny_checkpoints, tmp_path):
    """By default, and no longer than 512 tokens, which cost memory."""
    base = shutil.copytree(tiny_checkpoints / "llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": longest}
    (base / "config.json").write_text(json.dumps(config))
    words = readable[: readable.index("--length")]
    words[words.index("--model") + 1] = str(base)
    arguments, _ = options.parse(calibrate.Arguments, words[1:], "")
    calibrate.check_arguments(arguments)
    assert arguments.length == length


@pytest.mark.parametrize("setting", ["trust_remote_code=True", "dtype=bfloat16", "device_map=auto", "max_distanc=3"])
def test_patch_sets_only_hyperparameters(setting, stock, tmp_path, capsys, monkeypatch):
    """Nothing reaches transformers' own loader, which is not even called."""
    monkeypatch.setattr(commands, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert main(["patch", stock, "shaw", str(tmp_path / "out"), "--scheme-args", setting]) == 2
    name = setting.partition("=")[0]
    expected = (
        f"hf-posenc patch: shaw has no hyper-parameter {name}; it has max_distance, share_heads, share_layers, values, "
        "layers, window, sinks"
    )
    meant = ". Did you mean max_distance?" if name == "max_distanc" else ""
    assert capsys.readouterr().err == f"{expected}{meant}\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without CUDA")
def test_a_missing_gpu_is_one_line(stock, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Call me Ishmael.")
    assert main(["evaluate", stock, str(tmp_path / "text.txt"), "--device", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-posenc evaluate: --device cuda cannot be used here: ")


def test_evaluate_says_what_it_does(tmp_path, capsys, tiny_checkpoints, monkeypatch):
    """Before the first number, and each row as soon as it is measured."""
    text = tmp_path / "a.txt"
    text.write_text("Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail.")
    printed, measure = [], measurements.measure_context

    def measured(*arguments, **keywords):
        printed.append(capsys.readouterr())
        assert keywords["progress"]
        return measure(*arguments, **keywords)

    monkeypatch.setattr(measurements, "measure_context", measured)
    words = ["--lengths", "32", "64", "--json", str(tmp_path / "a.json")]
    assert main(["evaluate", "--model", str(tiny_checkpoints / "llama"), "--data", str(text), *words]) == 0
    assert "Measuring 88 tokens at every length, on cpu" in printed[0].out
    assert printed[1].out.split()[0] == "32"


def test_ctrl_c_is_no_traceback(ours, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "from_pretrained", interrupted)
    assert main(["verify", ours]) == 130
    assert capsys.readouterr().err.endswith("\nhf-posenc verify: interrupted\n")
