"""The recipes as their users start them: from arguments to tables, cards, checkpoints; every way to start them wrongly."""

import gc
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from families import tiny
from recipe_runs import options, stopped_at
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import hf_posenc
from hf_posenc.evaluation import measure_context


def small(checkpoint, text, output, **changes):
    """Command line of a run of a second; None drops an option."""
    given = {"model": checkpoint, "batch_size": 2, "gradient_accumulation": 1, "steps": 3, "recovery_steps": None}
    return options(output.parent, text, output, **given | changes)


def test_end_to_end(recipe, tiny_checkpoints, text, capsys):
    output = tiny_checkpoints / "out"
    given = {"gradient_accumulation": 2, "trials": 1, "lengths": "32 64", "eval_every": 2}
    results = recipe.main(small(tiny_checkpoints / "gpt2", text, output, **given))
    written = json.loads((output / "results.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert sorted(path.name for path in output.iterdir()) == ["model", "results.json"]
    assert written["arguments"]["scheme"] == "transformer_xl"
    assert written["arguments"]["recovery_steps"] == 1  # half of them, as the base was trained at less
    assert written["versions"]["hf_posenc"] == hf_posenc.__version__
    assert {"torch", "transformers", "accelerate", "datasets", "peft", "python"} < set(written["versions"])
    assert written["git"] is None or len(written["git"].removesuffix("-dirty")) == 40
    assert written["seed"] == 0
    assert written["training"]["tokens"] == 3 * 2 * 2 * 48
    assert len(written["training"]["loss"]) == 3
    assert [point["tokens"] for point in written["training"]["curve"]] == [0, 2 * 2 * 2 * 48, 3 * 2 * 2 * 48]
    assert written["base"]["trained_length"] == 32

    assert [row["length"] for row in written["before"]] == [32, 64]
    assert "sliding" in written["before"][0]
    assert written["before"][1] == {"length": 64, "impossible": "its table ends at 32 positions"}
    assert all({"sliding", "non_overlapping", "by_position", "bits_per_byte"} < set(row) for row in written["after"])
    assert {cell["length"] for cell in written["measures_before"]["induction_copy"]} == {32}
    assert {cell["length"] for cell in written["measures_after"]["induction_copy"]} == {32, 64}

    # The checkpoint is the model that was measured, on text that was not trained on.
    model = hf_posenc.from_pretrained(output / "model")
    arguments = recipe.Arguments(**written["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    corpus = importlib.import_module("hf_posenc.recipes.corpus")
    documents = corpus.documents(tokenizer, arguments)
    _, held_out = corpus.split(documents, tokenizer, eval_tokens=200)
    whole = corpus.stream(held_out)
    assert len(whole.tokens) == written["data"]["held_out_tokens"] == 200
    (again,) = measure_context(model, [whole.tokens], lengths=[64], byte_counts=[whole.bytes])
    assert again.to_dict() == written["after"][1]

    printed = capsys.readouterr().out
    assert "the base cannot run at that length: its table ends at 32 positions" in printed
    assert {"before", "training", "after"} <= set(written["seconds"])
    assert f"{written['after'][1]['sliding']['perplexity']:.3f}" in printed
    right = [cell["accuracy"] for cell in written["measures_before"]["induction_copy"]]
    assert f"induction_copy, before, by length: 32: {sum(right) / len(right):.2f}, 64: -\n" in printed
    assert str(output) in printed


MEASURE = """
def words(model, tokenizer, tokens, *, lengths, trials, distributed, progress):
    return [{"length": length, "score": trials + len(tokens) / 1000, "why": "mine"} for length in lengths]

def wrong(*arguments, **options):
    return [{"length": 32}]

def breaks(model, *arguments, lengths, **options):
    return [{"length": length, "score": 1 / (64 - length)} for length in lengths]

number = 3
"""


def test_a_measure_of_a_users_own(recipe, tiny_checkpoints, text, capsys):
    output, file = tiny_checkpoints / "out", tiny_checkpoints / "mine.py"
    file.write_text("import lies_beside\n" + MEASURE)
    (tiny_checkpoints / "lies_beside.py").touch()
    given = {"scheme": "alibi", "trials": 3, "lengths": "32 64", "measures": f"repeat_gain {file}:words"}
    results = recipe.main(small(tiny_checkpoints / "llama", text, output, **given))
    name, score = "mine.py:words", 3 + results["data"]["held_out_tokens"] / 1000
    rows = [{"length": length, "score": score, "why": "mine"} for length in (32, 64)]
    assert results["measures_before"][name] == results["measures_after"][name] == rows
    gains = {row["length"]: row["score"] for row in results["measures_after"]["repeat_gain"]}
    shown = f"| {gains[32]:.2f} | {gains[64]:.2f} |"
    card = (output / "model" / "README.md").read_text()
    assert f"| repeat_gain, after {shown}" in card
    assert f"mine.py:words, before | {score:.2f} | {score:.2f} |" in card
    assert f"{name}, after, by length: 32: {score:.2f}, 64: {score:.2f}" in capsys.readouterr().out
    assert str(tiny_checkpoints) not in card


def test_a_measure_that_fails_in_the_end_loses_no_weights(recipe, tiny_checkpoints, text, capsys):
    """The base, whose table is shorter, was not asked at the length at which it fails."""
    output, file = tiny_checkpoints / "out", tiny_checkpoints / "mine.py"
    file.write_text(MEASURE)
    given = {"scheme": "alibi", "trials": 1, "lengths": "32 64", "measures": f"{file}:breaks"}
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "gpt2", text, output, **given))
    assert "mine.py:breaks: ZeroDivisionError: division by zero" in capsys.readouterr().err
    assert hf_posenc.verify(hf_posenc.from_pretrained(output / "model")).ok


def test_what_the_models_write(recipe, tiny_checkpoints, text, capsys):
    output = tiny_checkpoints / "out"
    given = {"scheme": "alibi", "trials": 0, "lengths": "32 64", "prompt": "cat"}
    results = recipe.main(small(tiny_checkpoints / "llama", text, output, **given))
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    for folder, when in ((tiny_checkpoints / "llama", "before"), (output / "model", "after")):
        model, ids = AutoModelForCausalLM.from_pretrained(folder), tokenizer("cat", return_tensors="pt").input_ids
        for _ in range(40):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert results[f"writes_{when}"] == tokenizer.decode(ids[0])
    assert f"writes, after: {results['writes_after']}" in capsys.readouterr().out
    assert results["writes_after"] != results["writes_before"]
    with pytest.raises(SystemExit):
        recipe.main([*small(tiny_checkpoints / "llama", text, tiny_checkpoints / "other"), "--prompt", ""])
    assert "--prompt is empty: give the begin of a text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ("inductioncopy", "vt, repeat_gain, FILE.py:NAME or MODULE:NAME. Did you mean induction_copy?"),
        ("MINE:none", "mine.py:none cannot be loaded: KeyError: 'none'"),
        ("MINE:number", "mine.py:number cannot be loaded: TypeError: the first argument must be callable"),
        ("json:none", "--measures json:none cannot be loaded: AttributeError"),
        ("MINE:wrong", "must return dicts with `length` and `score`, not [{'length': 32}]"),
        ("passkey", "--measures passkey: ValueError: length 32 is too short for needle and question"),
    ],
)
def test_wrong_measures(recipe, tiny_checkpoints, text, capsys, measure, message):
    file = tiny_checkpoints / "mine.py"
    file.write_text(MEASURE)
    given = {"trials": 1, "lengths": "32 64", "measures": measure.replace("MINE", str(file))}
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "out", **given))
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_card_says_what_was_measured(recipe, tiny_checkpoints, text):
    from hf_posenc.recipes import model_card as cards

    output = tiny_checkpoints / "out"
    given = {"scheme": "alibi", "trials": 1, "lengths": "32 64"}
    results = recipe.main(small(tiny_checkpoints / "llama", text, output, **given))
    card = (output / "model" / "README.md").read_text()
    for row in results["before"] + results["after"]:
        for method in ("sliding", "non_overlapping"):
            assert f"{row[method]['perplexity']:.3f}" in card
    assert results["verify"].splitlines()[0] in card
    assert (output / "model" / "loss_by_position.png").read_bytes()[:4] == b"\x89PNG"
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "hf_posenc"
    assert "alibi" in head["tags"]
    values = [metric["value"] for result in head["model-index"][0]["results"] for metric in result["metrics"]]
    assert values == [
        round(row[method]["perplexity"], 4) for row in results["after"] for method in ("sliding", "non_overlapping")
    ]
    del results["after"][0]["sliding"]["perplexity"]
    with pytest.raises(KeyError, match="perplexity"):  # a number that was not measured cannot appear
        cards.card(results)


QUICKSTART = Path(__file__).parents[2] / "docs/measured/quickstart.json"
NASTY = "a|b `c` ``` <script>alert(1)</script> *d* _e_ [f](g) # h\n---\n```\n<img src=x>"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({32: 5.0, 64: 5.5}, {32: 6.0, 64: 6.0}, "got worse than its base there: train it longer"),
        ({32: 5.0}, {32: 5.05, 64: 5.1}, "5.05 after. At 64 tokens it has 5.10, the base cannot run."),
        ({32: 5.0, 64: 9.0}, {32: 4.0, 64: 7.0}, "At 64 tokens it has 7.00, the base 9.00: that is worse."),
        ({32: 5.0}, {32: 4.0}, "The model is better than its base there"),
        ({}, {64: 4.0}, "there is no base to compare with"),
    ],
)
def test_the_last_sentence_is_honest(recipes, before, after, message):
    from hf_posenc.recipes.run_report import verdict

    rows = [[{"length": n, "sliding": {"perplexity": p}} for n, p in each.items()] for each in (before, after)]
    assert message in verdict({"base": {"trained_length": 48}, "before": rows[0], "after": rows[1]})


def test_a_card_shows_values_and_obeys_none(recipe, tiny_checkpoints, text):
    """What stands in a name, a path or a hyper-parameter is no markup, no HTML, no cell and no YAML."""
    from hf_posenc.recipes import model_card as cards

    results = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "out", scheme="shaw"))
    plain = cards.card(results)
    results["data"] |= {"description": NASTY, "kind": "hub"}
    results["arguments"]["data"] = [NASTY]
    results["scheme"]["max_distance"] = NASTY
    results["base"]["name"] = NASTY.replace("/", "-")
    results["command"] = ["recipe.py", NASTY]
    results["verify"] += "\n" + NASTY
    card = cards.card(results)
    _, head, body = re.split(r"^---$", card, maxsplit=2, flags=re.MULTILINE)
    said = yaml.safe_load(head)
    assert said["datasets"] == [NASTY]
    assert said["model-index"][0]["results"][0]["dataset"]["name"] == NASTY
    shown = without_code(body)
    assert "<script" not in shown
    assert "<img" not in shown
    assert "](g)" not in shown.replace("\\[f\\](g)", "")
    assert [line for line in shown.splitlines() if line.startswith("#")] == [
        line.replace("llama with shaw", shown.splitlines()[2][2:])
        for line in without_code(plain.partition("\n---\n")[2]).splitlines()
        if line.startswith("#")
    ]
    table = [line for line in body.splitlines() if line.startswith("| `max_distance` ")]
    assert len(table) == 1
    assert len(re.findall(r"(?<!\\)\|", table[0])) == 3
    # A sweep's table too.
    summaries = importlib.import_module("hf_posenc.recipes.compare_schemes")
    summary = {
        "title": NASTY,
        "base": {"name": NASTY, "parameters": 1, "trained_length": 2},
        "variants": {},
        "before": {"sliding": {}, "non_overlapping": {}},
    }
    assert "<script" not in summaries.markdown(summary)


def test_a_card_says_layers_and_calibration(tmp_path):
    """From the JSON of a run that is committed; the numbers are those that it holds."""
    from hf_posenc.recipes import model_card as cards
    from hf_posenc.recipes import run_report

    results = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    card = cards.card(results)
    assert "base_model" not in card  # trained on the spot, or a folder, which nobody else has
    for line in (
        "`transformer_xl` is for every layer.",
        "| stages | closed forms, then 100 steps that match it to the base |",
        "| tokens read | 66,304 |",
        "| held-out loss at 256 tokens, in nats per token | base 1.573, swapped 3.228, calibrated 1.574 |",
        "Before the fine-tuning the scheme took over what the base's positions did.",
    ):
        assert line in card
    results["calibration"]["advice"] = "calibration won nothing: 9.016 nats. Patch again with another scheme"
    assert run_report.calibration_line(results["calibration"]).startswith(results["calibration"]["advice"])
    assert "took over" not in cards.card(results)
    # A file's name need not be text, and what a run took hours for is written all the same.
    results["data"]["description"] = results["base"]["name"] = "\udcff.txt"
    results["command"] = ["extend", "--data", "\udcff.txt", "two words"]
    results["arguments"]["model"], results["base"]["on_hub"] = "gpt2", True
    results["scheme"]["layers"] = [1, 3]
    results["calibration"] = {"method": "none", "why": "--calibrate none"}
    cards.write(tmp_path, results)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "\nbase_model: gpt2\n" in card
    assert "`transformer_xl` is for layers `1, 3`. Layers that are not named keep the positions of the base." in card
    assert "The swap was not calibrated: --calibrate none." in card
    assert "extend --data '\\udcff.txt' 'two words'" in card


def test_a_card_and_a_table_name_no_folder_of_this_machine(tmp_path):
    """The run's own results.json keeps them: a run goes on by it."""
    from hf_posenc.recipes import model_card as cards
    from hf_posenc.recipes.results import without_paths

    results = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    base, texts, windows = "/home/me/bases/tiny", ["/home/me/some texts/emma.txt", "~/b.txt"], "C:\\Users\\me\\c.txt"
    results["base"]["name"] = results["arguments"]["model"] = base
    results["arguments"] |= {"data": texts, "output": "/home/me/runs/x", "calibrate_data": [windows]}
    results["data"]["description"] = ", ".join([*texts, windows])
    results["command"] = ["/home/me/.venv/bin/hf-posenc", "extend", f"--model={base}", "--data", *texts, "-c", "me/y/z"]
    kept = json.dumps(results)
    cards.write(tmp_path, results)
    shared = without_paths(results)
    assert json.dumps(results) == kept
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for text in (card, json.dumps(shared)):
        assert not re.search(r"home|Users|~/|some texts|\.venv|bases", text.replace("at home", "")), text
        assert "tiny with transformer" in text.replace("\\", "") or text == json.dumps(shared)
        assert "emma.txt" in text
    assert "hf-posenc extend --model=tiny --data emma.txt b.txt -c me/y/z" in card
    assert "of emma.txt, b.txt, c.txt." in card
    assert str(tmp_path) not in card
    assert 'from_pretrained("FOLDER_OR_HUB_ID")' in card


def test_a_card_has_the_license_and_the_language_of_its_base(tmp_path):
    from hf_posenc.recipes import model_card as cards

    results = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# Base\n", encoding="utf-8")
    results["arguments"]["model"] = str(tmp_path)
    head = yaml.safe_load(cards.card(results).split("---")[1])
    assert (head["license"], head["language"]) == ("mit", "en")
    (tmp_path / "README.md").unlink()
    assert not {"license", "language"} & set(yaml.safe_load(cards.card(results).split("---")[1]))


def without_code(markdown):
    """Without code blocks and spans, which show what they hold as it is (CommonMark 4.5 and 6.1)."""
    lines, fence = [], None
    for line in markdown.splitlines():
        ticks = re.match("`*", line)[0]
        if fence is None and len(ticks) >= 3 and "`" not in line[len(ticks) :]:
            fence = ticks
        elif fence is not None and line.strip("`") == "" and len(ticks) >= len(fence):
            fence = None
        elif fence is None:
            lines.append(re.sub(r"(?<![\\`])(`+)(?!`).+?(?<!`)\1(?!`)", "", line))
    assert fence is None
    return "\n".join(lines)


def test_fine_tuning_learns_and_repeats(recipe, tiny_checkpoints, text):
    given = {"steps": 30, "scheme": "shaw", "scheme_args": "max_distance=8 values=false", "learning_rate": 1e-2}
    first = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "a", **given))
    again = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "b", **given))
    assert first["training"]["loss"] == again["training"]["loss"]
    assert first["training"]["loss"][-1] < first["training"]["loss"][0] - 0.5
    assert all(
        after["sliding"]["loss"] < before["sliding"]["loss"]
        for before, after in zip(first["before"], first["after"], strict=True)
    )


WRONG = {
    "zero steps": ({"steps": 0}, "--steps: must be at least 1, not 0"),
    "recovery": ({"recovery_steps": 9}, "--recovery-steps 9 are the first of all --steps 3"),
    "control with options": ({"scheme": "unpatched", "lora_rank": 4}, "takes neither --scheme-args nor --lora-rank"),
    "control beyond the table": ({"scheme": "unpatched"}, "--scheme unpatched ends at 32 positions"),
    "too short for retrieval": (
        {"trials": 1, "lengths": "16 32"},
        "--measures need --lengths of at least 32 tokens, not 16",
    ),
    "few eval tokens": ({"eval_tokens": 40}, "--eval-tokens 40 is less than the longest of --lengths, 48"),
    "scheme": ({"scheme": "albi"}, ", ".join(hf_posenc.available_schemes())),
    "a table too short": ({"scheme": "learned", "scheme_args": "num_positions=40"}, "ends at 40 positions"),
    "no data": ({"data": None}, "--model needs --data"),
    "text too short to measure": (
        {"lengths": 4000, "eval_tokens": 4000, "train_length": 48},
        "the held-out text has 3,612 tokens, the longest of --lengths needs 4,000",
    ),
    "text too short for the curve": (
        {"eval_every": 1, "lengths": 16, "eval_tokens": 20},
        "the held-out text has 20 tokens, --eval-every needs 32",
    ),
    "text too short to train": (
        {"train_length": 2000, "batch_size": 3, "recovery_steps": 0},
        "one batch needs 6,000 (1 x 3 x 2000)",
    ),
}


@pytest.mark.parametrize(
    ("recipe", "words", "lengths", "eval_tokens"),
    [
        ("extend_context", "", [256, 512, 1024, 2048], 16384),  # the embedded base has 256 positions
        ("extend_context", "--train-length 16384", [256, 4096, 8192, 16384, 32768], 32768),
        ("extend_context", "--model llama --data text.txt --train-length 32", [32, 64], 16384),
        ("compare_schemes", "--model llama --data text.txt --train-length 128", [32, 64, 128, 256], 16384),
    ],
)
def test_what_is_measured_follows_the_training(
    recipes, tiny_checkpoints, text, monkeypatch, recipe, words, lengths, eval_tokens
):
    monkeypatch.chdir(tiny_checkpoints)
    module = importlib.import_module(f"hf_posenc.recipes.{recipe}")
    arguments, _ = importlib.import_module("hf_posenc.recipes.options").parse(module.Arguments, words.split(), "")
    checker = importlib.import_module("hf_posenc.recipes.one_run") if recipe == "extend_context" else module
    checker.check_arguments(arguments)
    assert (arguments.lengths, arguments.eval_tokens) == (lengths, eval_tokens)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_stop_before_anything_runs(recipe, tiny_checkpoints, text, monkeypatch, capsys, case):
    changes, message = WRONG[case]
    monkeypatch.setattr(
        importlib.import_module("hf_posenc.recipes.measurements"),
        "perplexities",
        lambda *_, **__: pytest.fail("measured"),
    )
    with pytest.raises(SystemExit) as stop:
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out", **changes))
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tiny_checkpoints / "out").exists()


def test_unsupported_and_patched_tiny_checkpoints_are_refused(recipe, tiny_checkpoints, text, capsys):
    config = json.loads((tiny_checkpoints / "gpt2" / "config.json").read_text())
    (tiny_checkpoints / "gpt2" / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out"))
    assert "'bert' cannot be patched: it is an encoder" in capsys.readouterr().err

    hf_posenc.patch_model(LlamaForCausalLM.from_pretrained(tiny_checkpoints / "llama"), "nope").save_pretrained(
        tiny_checkpoints / "llama"
    )
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "out"))
    assert "is patched already" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(recipe, tiny_checkpoints, text, capsys):
    shape = GPT2Config(vocab_size=100, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    GPT2LMHeadModel(shape).save_pretrained(tiny_checkpoints / "gpt2")
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out"))
    assert "the model embeds 100: they do not belong together" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "apart"), [("gpt2", True), ("llama", True), ("opt", False)])
@pytest.mark.parametrize("scheme", [None, "alibi"])
def test_whether_packed_documents_are_kept_apart(recipes, family, apart, scheme):
    model = tiny(family).eval()
    if scheme:
        hf_posenc.patch_model(model, scheme)
    assert importlib.import_module("hf_posenc.recipes.models").keeps_documents_apart(model) is apart


@pytest.mark.slow
def test_embedded_default_under_accelerate_launch(recipes, tmp_path):
    """The default, with fewer steps: the base of the package, its table's end reported, patched and reloaded."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--cpu", "-m", "hf_posenc.recipes.extend_context"]
    command += ["--steps", "4", "--batch-size", "1", "--train-length", "512"]
    command += ["--lengths", "256", "512", "--eval-tokens", "1024", "--output", str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "fine-tuning: 100%" in run.stderr
    assert "its table ends at 256 positions" in run.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    # It was trained: 257 symbols are 5.5 nats at random.
    assert results["before"][0]["sliding"]["loss"] < 2
    model = hf_posenc.from_pretrained(tmp_path / "out" / "model")
    assert model.config.position_encoding["schemes"][0]["scheme"] == "transformer_xl"
    assert results["calibration"]["method"] == "matching"
    model.generate(torch.arange(300)[None] % 256, max_new_tokens=3, do_sample=False)


# ------------------------------------------------------------------------------------------------------- configurations


def test_a_file_and_the_command_line(recipe, tiny_checkpoints, capsys):
    """The file says, the command line wins; what is wrong in the file is named."""
    parse = importlib.import_module("hf_posenc.recipes.options").parse
    path = tiny_checkpoints / "run.yaml"
    path.write_text("scheme_args: {max_distance: 8, values: false}\nlearning_rate: 2.0e-4\ndata_name: null\n")
    arguments, _ = parse(recipe.Arguments, ["--config", str(path), "--learning-rate", "1e-3"], "test")
    assert arguments.scheme_args == ["max_distance=8", "values=false"]
    assert (arguments.learning_rate, arguments.data_name) == (1e-3, None)
    for content, message in (
        ("steps: many", "invalid int value: 'many'"),
        ("- a", "must be a mapping"),
        ("a: [", path),
    ):
        path.write_text(content)
        with pytest.raises(SystemExit):
            recipe.main(["--config", str(path)])
        assert str(message) in " ".join(capsys.readouterr().err.split())


CONFIGS = {
    "drope": "extend_context",
    "gpt2_alibi": "extend_context",
    "llama_yarn_lora": "extend_context",
    "compare_stories": "compare_schemes",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_are_valid(recipes, name, tmp_path, monkeypatch):
    """All keys are known, and everything that is checked without a checkpoint passes."""
    assert {path.stem for path in (recipes / "configs").glob("*.yaml")} == set(CONFIGS)
    monkeypatch.chdir(tmp_path)
    parse = importlib.import_module("hf_posenc.recipes.options").parse
    module = importlib.import_module(f"hf_posenc.recipes.{CONFIGS[name]}")
    path = recipes / "configs" / f"{name}.yaml"
    needed = ["--model", "none"] if CONFIGS[name] == "compare_schemes" else []
    arguments, _ = parse(module.Arguments, ["--config", str(path), *needed], "test")
    text = path.read_text()
    assert "Hardware:" in text
    assert "Time" in text
    command = {"compare_schemes": "compare", "extend_context": "extend"}[CONFIGS[name]]
    assert f"hf_posenc.recipes.{CONFIGS[name]}" in text or f"hf-posenc {command}" in text
    if CONFIGS[name] == "extend_context":
        arguments.model = None  # no hub here
        assert importlib.import_module("hf_posenc.recipes.one_run").check_arguments(arguments) is not None
    else:
        importlib.import_module("hf_posenc.recipes.one_run").check_training(arguments)


# --------------------------------------------------------------------------------------------------- the other recipes


def test_controls_and_lora(recipe, tiny_checkpoints, text):
    control = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "control", scheme="unpatched"))
    assert control["scheme"] == {"name": "unpatched"}
    assert type(LlamaForCausalLM.from_pretrained(tiny_checkpoints / "control" / "model")) is LlamaForCausalLM
    assert control["before"] != control["after"]


@pytest.mark.slow
def test_compare_schemes(recipes, tiny_checkpoints, text, capsys, monkeypatch):
    compare = importlib.import_module("hf_posenc.recipes.compare_schemes")
    folder = tiny_checkpoints / "sweep"
    words = small(tiny_checkpoints / "llama", text, folder, eval_every=1, recovery_steps=2, lengths="16 32 64")
    variants = ["unpatched", "alibi", "alibi+distill", "rope-yarn"]
    made, patched, run = [], [], compare.one_run.run

    def counted(given, *rest):
        made.append(given.output)
        patched.append(sum(type(each).__name__ == "PosEncLlamaForCausalLM" for each in gc.get_objects()))
        return run(given, *rest)

    monkeypatch.setattr(compare.one_run, "run", counted)
    gc.collect()  # models of earlier tests
    summary = compare.main([*words, "--variants", *variants, "--seeds", "0", "1"])
    assert set(summary["variants"]) == set(variants)
    assert len(set(patched)) == 1, patched  # no run holds the model of another
    for variant in variants:
        runs = [
            json.loads((folder / "runs" / variant / f"seed-{seed}" / "results.json").read_text()) for seed in (0, 1)
        ]
        assert [results["seed"] for results in runs] == [0, 1]
        assert runs[0]["training"]["loss"] != runs[1]["training"]["loss"]
        assert runs[0]["data"] == runs[1]["data"]
        entry = summary["variants"][variant]["sliding"]["64"]
        values = [run["after"][2]["sliding"]["perplexity"] for run in runs]
        assert entry["mean"] == pytest.approx(sum(values) / 2)
        assert entry["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
        assert not (folder / "runs" / variant / "seed-0" / "model").exists()
    yarn = json.loads((folder / "runs" / "rope-yarn" / "seed-0" / "results.json").read_text())
    assert yarn["scheme"]["scaling"] == {"original_max_position_embeddings": 32, "rope_type": "yarn", "factor": 1.5}
    assert json.loads((folder / "summary.json").read_text())["variants"].keys() == summary["variants"].keys()
    printed = capsys.readouterr().out
    assert "| alibi+distill | 2 |" in printed
    # Started again, it makes only what is missing, and says the same.
    (folder / "runs" / "alibi" / "seed-1" / "results.json").unlink()
    made.clear()
    again = compare.main([*words, "--variants", *variants, "--seeds", "0", "1"])
    assert made == [str(folder / "runs" / "alibi" / "seed-1")]
    assert {name: again["variants"][name]["sliding"] for name in variants} == {
        name: summary["variants"][name]["sliding"] for name in variants
    }


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("alibi+magic", "+magic is none of +trainable, +uncalibrated, +distill"),
        ("rope-ntk", "transformer_xl, rope-linear, rope-dynamic, rope-yarn. Did you mean rope-yarn?"),
    ],
)
def test_compare_schemes_refuses_before_the_first_run(recipes, tiny_checkpoints, text, capsys, variant, message):
    compare = importlib.import_module("hf_posenc.recipes.compare_schemes")
    folder = tiny_checkpoints / "sweep"
    with pytest.raises(SystemExit):
        compare.main([*small(tiny_checkpoints / "llama", text, folder), "--variants", "alibi", variant])
    assert message in " ".join(capsys.readouterr().err.split())
    assert not folder.exists()


def test_a_sweep_has_no_options_of_a_single_run(recipes, tiny_checkpoints, text, capsys):
    """Which it would overwrite for each of its runs."""
    compare = importlib.import_module("hf_posenc.recipes.compare_schemes")
    words = small(tiny_checkpoints / "llama", text, tiny_checkpoints / "sweep", calibrate=None)
    for extra, message in (
        (["--seed", "3"], "unknown option or stray value: --seed"),
        (["--resume"], "unknown option or stray value: --resume"),
        (["--variants", "alibi", "unpatched", "--lora-rank", "2"], "takes neither --scheme-args nor --lora-rank"),
    ):
        with pytest.raises(SystemExit):
            compare.main([*words, *extra])
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tiny_checkpoints / "sweep").exists()


@pytest.mark.slow
def test_a_sweep_shows_again_only_what_is_the_same(recipes, tiny_checkpoints, text, capsys, monkeypatch):
    """Runs of other arguments, of another text or another base are named and refused, finished or not."""
    compare, training = (
        importlib.import_module(f"hf_posenc.recipes.{name}") for name in ("compare_schemes", "training")
    )
    folder = tiny_checkpoints / "sweep"

    def words(**changes):
        shape = {"train_length": 16, "lengths": "16 32", "steps": 4, "learning_rate": 3e-3}
        given = shape | {"variants": "shaw", "seeds": 0} | changes
        return small(tiny_checkpoints / "llama", given.pop("data", text), folder, **given)

    def refused(message, **changes):
        with pytest.raises(SystemExit) as stop:
            compare.main(words(**changes))
        assert stop.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert message in said
        assert "choose another --output, or remove that folder" in said

    first = compare.main(words())
    with monkeypatch.context() as patch:
        patch.setattr(training, "one_step", lambda *_: pytest.fail("trained"))
        moved = text.with_name("moved.txt")
        text.rename(moved)
        assert compare.main(words(data=moved, save_every=3)) == first  # the same text; when states are written is free
        text.write_text(moved.read_text())
        refused("--batch-size was 2, is 1, --steps was 4, is 3", steps=3, batch_size=1)
        refused("--steps was 4, is 3", variants="alibi", steps=3)  # not asked for again, but it would be in the table
        refused("--learning-rate was 0.003, is 0.1", seeds="1", learning_rate=0.1)
        text.write_text(text.read_text().replace("import", "export"))
        refused("another text")
        text.write_text(moved.read_text())
    assert set(compare.main(words(variants="alibi"))["variants"]) == {"alibi", "shaw"}
    stopped_at(3, monkeypatch, compare.main, words(variants="nope", save_every=2))
    assert training.states(folder / "runs" / "nope" / "seed-0")
    refused("--warmup-steps was 10, is 2", variants="nope", warmup_steps=2)
    assert len(compare.main(words(variants="nope"))["variants"]) == 3
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    model.lm_head.weight.data[0] += 1
    model.save_pretrained(tiny_checkpoints / "llama")
    refused("another base")


def test_evaluate(recipes, recipe, tiny_checkpoints, text):
    evaluate = importlib.import_module("hf_posenc.recipes.evaluate")
    recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "out", scheme="alibi"))
    target = tiny_checkpoints / "measured.json"
    words = ["--data", str(text), "--separator", r"\f", "--lengths", "16", "48", "--json", str(target)]
    words += ["--trials", "0", "--eval-tokens", "100000"]
    patched = evaluate.main(["--model", str(tiny_checkpoints / "out" / "model"), *words])
    stock = evaluate.main(["--model", str(tiny_checkpoints / "llama"), *words])
    assert json.loads(target.read_text()) == json.loads(json.dumps(stock))
    assert patched["model"]["scheme"] == "alibi"
    assert stock["model"]["scheme"] is None
    everything = 12 * 301  # bytes, and the mark at the end of each document
    assert patched["measured"][0]["sliding"]["tokens"] == everything - 1
    assert patched["measured"][0]["sliding"]["nll"] != stock["measured"][0]["sliding"]["nll"]
    gpt2 = evaluate.main(["--model", str(tiny_checkpoints / "gpt2"), *words])
    assert gpt2["measured"][1] == {"length": 48, "impossible": "its table ends at 32 positions"}
