"""The recipes as their users start them: from arguments to tables, reports, tiny_checkpoints; every way to start them wrongly."""

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from families import tiny
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import hf_posenc
from hf_posenc import available_schemes
from hf_posenc.evaluation import measure_context


class Stop(Exception):
    pass


def small(checkpoint, text, output, **changes):
    """Command line of a run of a second; None drops an option."""
    options = {
        "--model": checkpoint,
        "--data": text,
        "--separator": r"\f",
        "--output": output,
        "--lengths": "16 32 48",
        "--eval-tokens": 200,
        "--train-length": 48,
        "--batch-size": 2,
        "--gradient-accumulation": 1,
        "--steps": 3,
        "--retrieval-trials": 0,
        "--calibrate": "none",
    }
    options |= {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return [
        word for name, value in options.items() if value is not None for word in (name, *str(value).split(" ")) if word
    ]


def test_end_to_end(recipe, tiny_checkpoints, text, capsys):
    output = tiny_checkpoints / "out"
    results = recipe.main(
        small(
            tiny_checkpoints / "gpt2",
            text,
            output,
            gradient_accumulation=2,
            retrieval_trials=1,
            lengths="32 64",
            eval_every=2,
        )
    )

    written = json.loads((output / "results.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert sorted(path.name for path in output.iterdir()) == ["model", "report.html", "results.json"]
    assert written["arguments"]["scheme"] == "transformer_xl"
    assert written["arguments"]["recovery_steps"] == 1  # half of them, as the base was trained at less
    assert written["versions"]["hf_posenc"] == hf_posenc.__version__
    assert {"torch", "transformers", "accelerate", "datasets", "peft", "python"} < set(written["versions"])
    assert "commit" in written["git"]
    assert written["seed"] == 0
    assert written["training"]["tokens"] == 3 * 2 * 2 * 48
    assert len(written["training"]["loss"]) == 3
    assert [point["tokens"] for point in written["training"]["curve"]] == [0, 2 * 2 * 2 * 48, 3 * 2 * 2 * 48]
    assert written["base"]["trained_length"] == 32

    assert [row["length"] for row in written["before"]] == [32, 64]
    assert "sliding" in written["before"][0]
    assert written["before"][1] == {"length": 64, "impossible": "its table ends at 32 positions"}
    assert all({"sliding", "non_overlapping", "by_position", "bits_per_byte"} < set(row) for row in written["after"])
    assert {cell["length"] for cell in written["retrieval_before"]} == {32}
    assert {cell["length"] for cell in written["retrieval_after"]} == {32, 64}

    # The checkpoint is the model that was measured, on text that was not trained on.
    model = hf_posenc.from_pretrained(output / "model")
    arguments = recipe.Arguments(**written["arguments"])
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    corpus = importlib.import_module("hf_posenc.recipes.corpus")
    documents = corpus.documents(tokenizer, arguments, None, 0)
    _, held_out = corpus.split(documents, tokenizer, eval_tokens=200, seed=0)
    whole = corpus.stream(held_out)
    assert len(whole.tokens) == written["data"]["held_out_tokens"] == 200
    (again,) = measure_context(model, [whole.tokens], lengths=[64], byte_counts=[whole.bytes])
    assert again.to_dict() == written["after"][1]

    printed = capsys.readouterr().out
    assert "the base cannot run at that length: its table ends at 32 positions" in printed
    for name in ("before", "training", "after"):
        assert f"  That took {written['seconds'][name]:.1f} s. Most memory so far: " in printed
    assert f"{written['after'][1]['sliding']['perplexity']:.3f}" in printed
    assert str(output / "model") in printed
    assert str(output / "report.html") in printed


@pytest.mark.slow
def test_the_report_and_the_card_say_what_was_measured(recipe, tiny_checkpoints, text):
    output = tiny_checkpoints / "out"
    given = {"scheme": "alibi", "retrieval_trials": 1, "lengths": "32 64"}
    results = recipe.main(small(tiny_checkpoints / "llama", text, output, **given))
    page = (output / "report.html").read_text()
    card = (output / "model" / "README.md").read_text()
    for row in results["before"] + results["after"]:
        for method in ("sliding", "non_overlapping"):
            shown = f"{row[method]['perplexity']:.3f}"
            assert shown in page
            assert shown in card
    assert results["verify"].splitlines()[0] in page
    assert page.count("data:image/png;base64,") == 4
    folded = page.partition("<details>")[2].partition("</details>")[0]  # forty rows, below everything that is a result
    assert "recovery_steps" in folded
    assert page.count("recovery_steps") == 1
    text_of_page = re.sub(r"base64,[^\"]*", "", page)
    assert "http" not in text_of_page.replace("http-equiv", "")  # nothing to load from elsewhere
    assert (output / "model" / "loss_by_position.png").read_bytes()[:4] == b"\x89PNG"
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "hf_posenc"
    assert "alibi" in head["tags"]
    assert "license" not in head  # nobody said one
    values = [metric["value"] for result in head["model-index"][0]["results"] for metric in result["metrics"]]
    assert values == [
        round(row[method]["perplexity"], 4) for row in results["after"] for method in ("sliding", "non_overlapping")
    ]
    # A number that was not measured cannot appear.
    from hf_posenc.recipes import model_card as cards

    del results["after"][0]["sliding"]["perplexity"]
    with pytest.raises(KeyError):
        cards.card(results, "me/name")


QUICKSTART = Path(__file__).parents[2] / "docs/measured/quickstart.json"
NASTY = "a|b `c` ``` <script>alert(1)</script> *d* _e_ [f](g) # h\n---\n```\n<img src=x>"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({32: 5.0, 64: 5.5}, {32: 6.0, 64: 6.0}, "got worse than its base there: train it longer"),
        (
            {32: 5.0},
            {32: 5.05, 64: 5.1},
            "as good as its base there. It holds to 64 tokens, where it has 5.10, and the base cannot run.",
        ),
        (
            {32: 5.0, 64: 9.0},
            {32: 4.0, 64: 7.0},
            "It holds to 32 tokens and gets worse beyond: at 64 it has 7.00, the base 9.00.",
        ),
        ({32: 5.0}, {32: 4.0}, "The model is better than its base there"),
        ({}, {64: 4.0}, "there is no base to compare with"),
    ],
)
def test_the_last_sentence_is_honest(recipes, before, after, message):
    from hf_posenc.recipes.run_report import verdict

    rows = [[{"length": n, "sliding": {"perplexity": p}} for n, p in each.items()] for each in (before, after)]
    rows[0] += [{"length": n, "impossible": "its table ends"} for n in after if n not in before]
    assert message in verdict({"base": {"trained_length": 48}, "before": rows[0], "after": rows[1]})


def test_a_card_shows_values_and_obeys_none(recipe, tiny_checkpoints, text):
    """What stands in a name, a path or a hyper-parameter is no markup, no HTML, no cell and no YAML."""
    from hf_posenc.recipes import model_card as cards

    results = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "out", scheme="shaw"))
    plain = cards.card(results, "me/x")
    results["data"] |= {"description": NASTY, "kind": "hub"}
    results["arguments"]["data"] = [NASTY]
    results["scheme"]["max_distance"] = NASTY
    results["base"]["name"] = NASTY.replace("/", "-")
    results["command"] = ["recipe.py", NASTY]
    results["verify"] += "\n" + NASTY
    card = cards.card(results, NASTY)
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
    summaries = importlib.import_module("hf_posenc.recipes.sweep_report")
    summary = {"title": NASTY, "base": {"name": NASTY, "parameters": 1, "trained_length": 2}, "variants": {}}
    assert "<script" not in summaries.markdown(summary)


def test_a_card_says_layers_calibration_and_the_repository(tmp_path):
    """From the JSON of a run that is committed; the numbers are those that it holds."""
    from hf_posenc.recipes import model_card as cards
    from hf_posenc.recipes import run_report

    results = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    cards.write(tmp_path, results, "me/long-gpt2")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert 'model = hf_posenc.from_pretrained("me/long-gpt2")' in card
    assert "`transformer_xl` is for every layer." in card
    assert "base_model" not in card  # trained on the spot, or a folder, which nobody else has
    for line in (
        "| stages | closed forms, then 50 steps that match each layer to the base |",
        "| fitted | the scheme, queries and keys, and values if the base adds positions to its inputs |",
        "| layers | 0, 1, 2, 3 |",
        "| tokens read | 45,824 |",
        "| divergence from the base's attention, in nats per query | 0.318 as swapped, 0.034 after the closed forms, "
        "0.430 at the end |",
        "| held-out loss at 256 tokens, in nats per token | base 1.573, swapped 3.223, calibrated 1.588 |",
    ):
        assert line in card
    # A file's name need not be text, and what a run took hours for is written all the same.
    results["data"]["description"] = results["base"]["name"] = "\udcff.txt"
    results["command"] = ["extend", "--data", "\udcff.txt", "two words"]
    results["arguments"]["model"], results["base"]["on_hub"] = "gpt2", True
    results["scheme"]["layers"] = [1, 3]
    results["calibration"] = {"method": "none", "why": "--calibrate none"}
    cards.write(tmp_path, results, "me/long-gpt2")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "\nbase_model: gpt2\n" in card
    assert "held-out tokens of \\\\udcff.txt." in card
    assert "`transformer_xl` is for layers 1, 3. Layers that are not named keep the positions of the base." in card
    assert "The swap was not calibrated: --calibrate none." in card
    run_report.write(tmp_path / "report.html", results)
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "extend --data &#39;\\udcff.txt&#39; &#39;two words&#39;" in report


def test_a_card_a_report_and_a_table_name_no_folder_of_this_machine(tmp_path):
    """The run's own results.json keeps them: a run goes on by it."""
    from hf_posenc.recipes import model_card as cards
    from hf_posenc.recipes import run_report
    from hf_posenc.recipes.results import without_paths

    results = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    base, texts, windows = "/home/me/bases/tiny", ["/home/me/some texts/emma.txt", "~/b.txt"], "C:\\Users\\me\\c.txt"
    results["base"]["name"] = results["arguments"]["model"] = base
    results["arguments"] |= {"data": texts, "output": "/home/me/runs/x", "calibrate_data": [windows]}
    results["data"]["description"] = " and ".join([*texts, windows])
    results["command"] = ["/home/me/.venv/bin/hf-posenc", "extend", f"--model={base}", "--data", *texts, "-c", "me/y/z"]
    kept = json.dumps(results)
    cards.write(tmp_path, results)
    run_report.write(tmp_path / "report.html", results)
    shared = without_paths(results)
    assert json.dumps(results) == kept
    card, report = ((tmp_path / name).read_text(encoding="utf-8") for name in ("README.md", "report.html"))
    for text in (card, report, json.dumps(shared)):
        assert not re.search(r"home|Users|~/|some texts|\.venv|bases", text.replace("at home", "")), text
        assert "tiny with transformer" in text.replace("\\", "") or text == json.dumps(shared)
        assert "emma.txt" in text
    assert "hf-posenc extend --model=tiny --data emma.txt b.txt -c me/y/z" in card
    assert "of emma.txt and b.txt and c.txt." in card
    assert str(tmp_path) not in card
    assert 'from_pretrained("FOLDER_OR_HUB_ID")' in card


def test_a_card_has_the_license_and_the_language_of_its_base(tmp_path):
    from hf_posenc.recipes import model_card as cards

    results = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: en\n---\n# Base\n", encoding="utf-8")
    results["arguments"]["model"] = str(tmp_path)
    head = yaml.safe_load(cards.card(results, "me/x").split("---")[1])
    assert (head["license"], head["language"]) == ("mit", "en")
    (tmp_path / "README.md").unlink()
    assert not {"license", "language"} & set(yaml.safe_load(cards.card(results, "me/x").split("---")[1]))


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
    options = {"steps": 30, "scheme": "shaw", "scheme_args": "max_distance=8 values=false", "learning_rate": 1e-2}
    first = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "a", **options))
    again = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "b", **options))
    assert first["training"]["loss"] == again["training"]["loss"]
    assert first["training"]["loss"][-1] < first["training"]["loss"][0] - 0.5
    assert all(
        after["sliding"]["loss"] < before["sliding"]["loss"]
        for before, after in zip(first["before"], first["after"], strict=True)
    )


@pytest.mark.rows(default=1, slow=10)
@pytest.mark.parametrize(
    "scheme",
    [
        "sinusoidal",
        *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in available_schemes() if scheme != "sinusoidal"),
    ],
)
def test_other_schemes(recipe, tiny_checkpoints, text, scheme):
    table = any(field.name == "num_positions" for field in dataclasses.fields(hf_posenc.registry.scheme_class(scheme)))
    options = {"scheme": scheme, "scheme_args": "num_positions=48" if table else None}
    results = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "out", **options))
    assert (
        hf_posenc.from_pretrained(tiny_checkpoints / "out" / "model").config.position_encoding["schemes"][0]["scheme"]
        == scheme
    )
    assert all("sliding" in row for row in results["before"] + results["after"])


def test_a_failed_write_leaves_the_old_json(recipes, tmp_path):
    results = importlib.import_module("hf_posenc.recipes.results")
    path = tmp_path / "results.json"
    results.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        results.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


WRONG = {
    "unknown option": ({"stepz": 3}, "--stepz"),
    "abbreviation": ({"grad": 3}, "--grad"),
    "no number": ({"steps": "many"}, "invalid int value"),
    "zero steps": ({"steps": 0}, "--steps must be at least 1, not 0"),
    "schedule": ({"schedule": "cosin"}, "--schedule must be one of cosine"),
    "tracker": ({"tracker": "mlflow"}, "--tracker must be one of none, tensorboard, wandb, trackio"),
    "packing": ({"packing": "tight"}, "--packing must be one of concatenate, documents"),
    "recovery": ({"recovery_steps": 9}, "--recovery-steps 9 are the first of all --steps 3"),
    "control with options": ({"scheme": "unpatched", "lora_rank": 4}, "takes neither --scheme-args nor --lora-rank"),
    "control beyond the table": ({"scheme": "unpatched"}, "the base's table ends at 32 positions"),
    "negative rate": ({"learning_rate": -1}, "--learning-rate must be positive, not -1.0"),
    "negative warm-up": ({"warmup_steps": -1}, "--warmup-steps must be at least 0, not -1"),
    "precision": ({"mixed_precision": "int4"}, "no, bf16, fp16, not int4"),
    "tiny length": ({"lengths": "4 16"}, "--lengths must be at least 8 tokens"),
    "too short for retrieval": (
        {"retrieval_trials": 1, "lengths": "16 32"},
        "--retrieval-trials: the test needs --lengths of at least 32 tokens, not 16",
    ),
    "stride": ({"stride": 16}, "--stride 16 must divide every one of --lengths and be below the shortest, 16"),
    "few eval tokens": ({"eval_tokens": 40}, "--eval-tokens 40 is less than the longest of --lengths, 48"),
    "scheme": ({"scheme": "albi"}, ", ".join(hf_posenc.available_schemes())),
    "hyper-parameter": ({"scheme": "shaw", "scheme_args": "distance=3"}, "distance"),
    "its value": ({"scheme": "shaw", "scheme_args": "max_distance=-1"}, "max_distance"),
    "no value": ({"scheme": "shaw", "scheme_args": "max_distance"}, "--scheme-args takes name=value, not max_distance"),
    "a table too short": ({"scheme": "learned", "scheme_args": "num_positions=40"}, "ends at 40 positions"),
    "recovery length of no steps": (
        {"recovery_length": 16, "recovery_steps": 0},
        "--recovery-length 16 has no effect with --recovery-steps 0",
    ),
    "recovery beyond": (
        {"recovery_length": 64, "recovery_steps": 1},
        "--recovery-length 64 is beyond --train-length 48",
    ),
    "a dataset's option": ({"data_name": "en"}, "--data-name is not for text from"),
    "a table's option": ({"text_column": "story"}, "--text-column is not for text from"),
    "another base": ({"train_base": ""}, "--train-base trains the embedded base, and the base is --model"),
    "a base that is not trained": ({"base_steps": 3}, "--base-steps has no effect without --train-base"),
    "the seed of a base": ({"model": None, "base_seed": 3}, "--base-seed has no effect without --train-base"),
    "no repository": ({"private": ""}, "--private has no effect without --push-to"),
    "a control on the Hub": (
        {"scheme": "unpatched", "push_to": "me/x", "train_length": 32},
        "--push-to uploads a patched model, and --scheme unpatched makes none",
    ),
    "workers of a stream": ({"streaming": "", "workers": 2}, "--workers has no effect with --streaming"),
    "hyper-parameter twice": (
        {"scheme": "shaw", "scheme_args": "max_distance=3 max_distance=4"},
        "--scheme-args says max_distance twice",
    ),
    "two ways to begin": ({"resume": "", "overwrite": ""}, "choose one"),
    "no such file": ({"data": "nowhere.txt"}, "--data nowhere.txt: no such file"),
    "no data": ({"data": None}, "--model needs --data"),
    "no such model": ({"model": "./nowhere"}, "--model ./nowhere"),
    "text too short to measure": (
        {"lengths": 4000, "eval_tokens": 4000, "train_length": 48},
        "the held-out text has 3,612 tokens, the longest of --lengths needs 4,000",
    ),
    "text too short for the curve": (
        {"eval_every": 1, "lengths": 16, "eval_tokens": 20},
        "--eval-every: a point of the curve needs 32 held-out tokens, but there are 20",
    ),
    "text too short to train": (
        {"train_length": 2000, "batch_size": 3, "recovery_steps": 0},
        "one batch needs 6,000 (1 x 3 x 2000)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_stop_before_anything_runs(recipe, tiny_checkpoints, text, monkeypatch, capsys, case):
    changes, message = WRONG[case]
    monkeypatch.setattr(
        importlib.import_module("hf_posenc.recipes.one_run"),
        "measure_model",
        lambda *_, **__: pytest.fail("measured"),
    )
    with pytest.raises(SystemExit) as stop:
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out", **changes))
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tiny_checkpoints / "out").exists()


def test_an_output_folder_in_use_is_refused(recipe, tiny_checkpoints, text, capsys):
    (tiny_checkpoints / "out").mkdir()
    (tiny_checkpoints / "out" / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out"))
    assert "is not empty: choose another folder, or --overwrite" in capsys.readouterr().err
    recipe.main([*small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out"), "--overwrite"])
    assert (tiny_checkpoints / "out" / "thesis.tex").exists()


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


def test_incomplete_tiny_checkpoints_are_named(recipe, tiny_checkpoints, text, capsys):
    config = json.loads((tiny_checkpoints / "gpt2" / "config.json").read_text())
    (tiny_checkpoints / "gpt2" / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    small_model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=16, n_layer=2, n_head=2, n_positions=32))
    small_model.save_pretrained(tiny_checkpoints / "gpt2")
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out"))
    assert "the model embeds 100: they do not belong together" in capsys.readouterr().err
    for name in ("model.safetensors", "tokenizer.json"):
        (tiny_checkpoints / "gpt2" / name).unlink()
        with pytest.raises(SystemExit):
            recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out"))
        assert f"--model {tiny_checkpoints / 'gpt2'}" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "apart"), [("gpt2", True), ("llama", True), ("opt", False)])
@pytest.mark.parametrize("scheme", [None, "alibi"])
def test_whether_packed_documents_are_kept_apart_is_measured(recipes, family, apart, scheme):
    model = tiny(family).eval()
    if scheme:
        hf_posenc.patch_model(model, scheme)
    assert importlib.import_module("hf_posenc.recipes.models").keeps_documents_apart(model) is apart


def test_documents_are_not_packed_where_attention_would_cross(recipe, tiny_checkpoints, text, capsys):
    tiny("opt", vocab_size=257).save_pretrained(tiny_checkpoints / "gpt2")
    with pytest.raises(SystemExit) as stop:
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out", packing="documents"))
    assert stop.value.code == 2
    assert (
        "--packing documents: the attention mask of this model does not take positions into account"
        in capsys.readouterr().err
    )
    assert not (tiny_checkpoints / "out").exists()


def test_unreadable_text_is_named(recipe, tiny_checkpoints, text, capsys):
    text.write_bytes(b"caf\xe9 " * 1000)
    with pytest.raises(SystemExit):
        recipe.main(small(tiny_checkpoints / "gpt2", text, tiny_checkpoints / "out"))
    assert f"--data {text}: not readable as UTF-8" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("nothing", ["", " \n\t\n"], ids=["no bytes", "white space"])
@pytest.mark.parametrize("name", ["extend_context", "calibrate", "evaluate", "compare_schemes", "pretrain"])
def test_text_without_words_is_refused(recipes, tiny_checkpoints, tmp_path, capsys, name, nothing):
    text, out = tmp_path / "empty.txt", tmp_path / "out"
    text.write_text(nothing)
    words = ["--data", str(text), *(["--model", str(tiny_checkpoints / "gpt2")] if name != "pretrain" else [])]
    words += ["--json" if name == "evaluate" else "--output", str(out)]
    words += ["--scheme", "shaw"] if name == "calibrate" else []
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"hf_posenc.recipes.{name}").main(words)
    assert stop.value.code == 2
    assert f": there is no text in {text}" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


@pytest.mark.slow
def test_embedded_default_under_accelerate_launch(recipes, tmp_path):
    """The default, with fewer steps: the base of the package, its table's end reported, patched and reloaded."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--cpu", str(recipes / "extend_context.py")]
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
    assert results["calibration"]["method"] == "attention"
    model.generate(torch.arange(300)[None] % 256, max_new_tokens=3, do_sample=False)


# ------------------------------------------------------------------------------------------------------- configurations


def test_a_file_and_the_command_line(recipe, tiny_checkpoints, text, capsys):
    """The file says, the command line wins; what is wrong in the file is named."""
    options = importlib.import_module("hf_posenc.recipes.options")
    path = tiny_checkpoints / "run.yaml"
    path.write_text(
        "scheme: shaw\nscheme_args: {max_distance: 8, values: false}\nlearning_rate: 2.0e-4\nlengths: [16, 32]\n"
        "separator: '\\f'\noverwrite: true\nstride: null\n"
    )
    arguments, _ = options.parse(recipe.Arguments, ["--config", str(path), "--learning-rate", "1e-3"], "test")
    assert arguments.scheme == "shaw"
    assert importlib.import_module("hf_posenc.recipes.models").hyperparameters(arguments.scheme_args) == {
        "max_distance": 8,
        "values": False,
    }
    assert arguments.learning_rate == 1e-3
    assert arguments.lengths == [16, 32]
    assert arguments.separator == r"\f"
    assert arguments.overwrite is True
    assert arguments.stride is None
    for content, message in (
        ("schemes: alibi", "unknown schemes; known are"),
        ("steps: many", "invalid int value: 'many'"),
        ("- a\n- b", "must be a mapping of options, not list"),
        ("steps: 3\nsteps: 4", "steps is there twice"),
        ("steps: null", "steps has no value; leave it out for the default, 60"),
        ("lengths: []", "lengths has no value; leave it out for the default, [256, 512, 1024, 2048]"),
        ("a: [", "run.yaml:"),
    ):
        path.write_text(content)
        with pytest.raises(SystemExit):
            recipe.main(["--config", str(path)])
        assert message in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        recipe.main(["--config", str(path), f"--config={path}"])
    assert "--config is for one file, not 2" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        recipe.main(["--config", "nowhere.yaml"])
    assert "nowhere.yaml" in capsys.readouterr().err


CONFIGS = {
    "drope": "extend_context",
    "gpt2_alibi": "extend_context",
    "llama_yarn_lora": "extend_context",
    "compare_stories": "compare_schemes",
    "pretrain_books": "pretrain",
    "pretrain_gpt2_small": "pretrain",
}


def test_every_config_is_known(recipes):
    assert {path.stem for path in (recipes / "configs").glob("*.yaml")} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configs_are_valid(recipes, name, tmp_path, monkeypatch):
    """All keys are known, and everything that is checked without a checkpoint passes."""
    monkeypatch.chdir(tmp_path)
    options = importlib.import_module("hf_posenc.recipes.options")
    module = importlib.import_module(f"hf_posenc.recipes.{CONFIGS[name]}")
    path = recipes / "configs" / f"{name}.yaml"
    arguments, _ = options.parse(module.Arguments, ["--config", str(path)], "test")
    text = path.read_text()
    assert "Hardware:" in text
    assert "Time" in text
    assert f"recipes/{CONFIGS[name]}.py" in text
    if CONFIGS[name] == "extend_context":
        arguments.model = None  # no hub here
        assert importlib.import_module("hf_posenc.recipes.one_run").check_arguments(arguments) is not None
    elif CONFIGS[name] == "pretrain":
        module.check_arguments(arguments)
    else:
        importlib.import_module("hf_posenc.recipes.training").check(arguments, arguments.packing)


# --------------------------------------------------------------------------------------------------- the other recipes


def test_controls_and_lora(recipe, tiny_checkpoints, text):
    control = recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "control", scheme="unpatched"))
    assert control["scheme"] == {"name": "unpatched"}
    assert type(LlamaForCausalLM.from_pretrained(tiny_checkpoints / "control" / "model")) is LlamaForCausalLM
    assert control["before"] != control["after"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
def test_lora_saves_adapter_and_merged_model(recipe, tiny_checkpoints, text):
    output = tiny_checkpoints / "out"
    results = recipe.main(
        small(tiny_checkpoints / "llama", text, output, scheme="alibi", lora_rank=2, distill=1, learning_rate=1e-2)
    )
    merged = hf_posenc.from_pretrained(output / "model").eval()
    base = LlamaForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    adapted = hf_posenc.load_adapter(hf_posenc.patch_model(base, "alibi"), output / "adapter").eval()
    tokens = torch.arange(40)[None]
    assert torch.allclose(merged(tokens).logits, adapted(tokens).logits, atol=1e-5)
    assert results["training"]["loss"][0] != results["training"]["loss"][-1]


@pytest.mark.slow
def test_compare_schemes(recipes, tiny_checkpoints, text, capsys, monkeypatch):
    compare = importlib.import_module("hf_posenc.recipes.compare_schemes")
    folder = tiny_checkpoints / "sweep"
    words = small(tiny_checkpoints / "llama", text, folder, eval_every=1, recovery_steps=2, lengths="16 32 64")
    variants = ["unpatched", "alibi", "alibi+distill", "rope-yarn"]
    summary = compare.main([*words, "--variants", *variants, "--seeds", "0", "1"])
    assert set(summary["variants"]) == set(variants)
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
    for name in (
        "summary.json",
        "summary.md",
        "sliding.png",
        "non_overlapping.png",
        "loss_by_position.png",
        "recovery.png",
    ):
        assert (folder / name).is_file()
    printed = capsys.readouterr().out
    assert "| alibi+distill | 2 |" in printed
    # Started again, it makes only what is missing, and says the same.
    (folder / "runs" / "alibi" / "seed-1" / "results.json").unlink()
    made = []
    run = compare.one_run.run
    monkeypatch.setattr(
        compare.one_run, "run", lambda arguments, *rest: made.append(arguments.output) or run(arguments, *rest)
    )
    again = compare.main([*words, "--variants", *variants, "--seeds", "0", "1"])
    assert made == [str(folder / "runs" / "alibi" / "seed-1")]
    for name in variants:
        assert again["variants"][name]["sliding"] == summary["variants"][name]["sliding"]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("albi", "alibi, bam, cope, da_transformer"),
        ("alibi+magic", "+magic is none of +trainable, +uncalibrated, +distill"),
        ("rope-ntk", "transformer_xl, rope-linear, rope-dynamic, rope-yarn. Did you mean rope-yarn?"),
        ("alibi-yarn", "unknown 'alibi-yarn'; choose from unpatched, alibi"),
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
    """Which it would overwrite for each of its runs, or push every one of them to the same place."""
    compare, pretrain = (
        importlib.import_module(f"hf_posenc.recipes.{name}") for name in ("compare_schemes", "pretrain")
    )
    words = small(tiny_checkpoints / "llama", text, tiny_checkpoints / "sweep", calibrate=None)
    for extra in (
        ["--scheme", "shaw"],
        ["--seed", "3"],
        ["--push-to", "me/x"],
        ["--resume"],
    ):
        with pytest.raises(SystemExit):
            compare.main([*words, *extra])
        assert f"unknown option or stray value: {extra[0]}" in " ".join(capsys.readouterr().err.split())
    for extra in (["--seed", "3"], ["--distill", "1"], ["--recovery-steps", "1"]):
        with pytest.raises(SystemExit):
            pretrain.main([*words[2:], *extra])
        assert f"unknown option or stray value: {extra[0]}" in " ".join(capsys.readouterr().err.split())
    for extra, message in (
        (["--distill", "2", "--variants", "alibi"], "--distill has no effect without variants with +distill"),
        (["--variants", "alibi", "alibi"], "--variants must name each only once, not alibi alibi"),
        (["--variants", "alibi", "unpatched", "--lora-rank", "2"], "takes neither --scheme-args nor --lora-rank"),
    ):
        with pytest.raises(SystemExit):
            compare.main([*words, *extra])
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tiny_checkpoints / "sweep").exists()


def test_where_an_option_reaches_what_plain_reaches(recipes):
    """On straight lines the crossing is known."""
    summary = importlib.import_module("hf_posenc.recipes.sweep_report")
    plain = {"curve": [{"tokens": 0, "mean": 5.0}, {"tokens": 100, "mean": 3.0}]}
    better = {"curve": [{"tokens": 0, "mean": 5.0}, {"tokens": 50, "mean": 3.5}, {"tokens": 100, "mean": 2.5}]}
    variants = {"x": plain, "x+a": better, "x+b": {"curve": [{"tokens": 0, "mean": 5.0}, {"tokens": 100, "mean": 4.0}]}}
    summary.reach_plain(variants)
    assert variants["x+a"]["reaches_plain_at"] == {"tokens": 75.0, "share": 0.75}
    assert "reaches_plain_at" not in variants["x+b"]
    assert "reaches_plain_at" not in variants["x"]


def test_pretrain(recipes, tiny_checkpoints, text):
    pretrain = importlib.import_module("hf_posenc.recipes.pretrain")
    folder = tiny_checkpoints / "scratch"
    words = ["--data", str(text), "--separator", r"\f", "--eval-tokens", "200", "--output", str(folder)]
    words += ["--layers", "1", "--width", "16", "--heads", "2", "--train-length", "16", "--steps", "4"]
    words += ["--batch-size", "2", "--lengths", "16", "32", "--retrieval-trials", "0", "--eval-every", "2"]
    summary = pretrain.main([*words, "--schemes", "learned", "alibi", "--seeds", "0", "1"])
    assert set(summary["variants"]["alibi"]["sliding"]) == {"16", "32"}
    assert set(summary["variants"]["learned"]["sliding"]) == {"16"}  # its table ends there
    results = json.loads((folder / "runs" / "learned" / "seed-1" / "results.json").read_text())
    assert results["after"][1]["impossible"] == "its table ends at 16 positions"
    assert results["scheme"]["name"] == "learned"
    assert results["training"]["loss"][0] == pytest.approx(5.5, abs=0.5)  # ln 257: it knew nothing


def test_a_tokenizer_that_is_not_there_is_named_by_its_option(recipes, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("hf_posenc.recipes.pretrain").main(["--tokenizer", "./nowhere", "--schemes", "alibi"])
    assert stop.value.code == 2
    assert "--tokenizer ./nowhere: " in " ".join(capsys.readouterr().err.split())


def test_a_sweep_on_a_full_disk_says_what_is_kept(recipes, tiny_checkpoints, text, monkeypatch, capsys):
    pretrain, training = (
        importlib.import_module("hf_posenc.recipes.pretrain"),
        importlib.import_module("hf_posenc.recipes.training"),
    )

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "save_state", full)
    words = small(
        None, text, tiny_checkpoints / "out", calibrate=None, width=16, layers=1, heads=2, schemes="alibi", seeds="0"
    )
    with pytest.raises(SystemExit) as stop:
        pretrain.main(words)
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "Finished runs are kept" in said


@pytest.mark.slow
def test_a_sweep_shows_again_only_what_is_the_same(recipes, tiny_checkpoints, text, capsys, monkeypatch):
    """Runs of other arguments, of another text or another base are named and refused, finished or not."""
    pretrain, training = (
        importlib.import_module("hf_posenc.recipes.pretrain"),
        importlib.import_module("hf_posenc.recipes.training"),
    )
    folder = tiny_checkpoints / "scratch"

    def words(**changes):
        options = {"data": text, "separator": r"\f", "eval_tokens": 200, "output": folder, "layers": 1, "width": 16}
        options |= {"heads": 2, "train_length": 16, "steps": 4, "batch_size": 2, "lengths": "16 32"}
        options |= {"retrieval_trials": 0, "schemes": "shaw", "seeds": "0"} | changes
        return [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", *str(v).split(" "))]

    def refused(message, **changes):
        with pytest.raises(SystemExit) as stop:
            pretrain.main(words(**changes))
        assert stop.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert message in said
        assert "choose another --output, or remove that folder" in said

    first = pretrain.main(words())
    one_step = training.one_step
    with monkeypatch.context() as patch:
        patch.setattr(training, "one_step", lambda *_: pytest.fail("trained"))
        moved = text.with_name("moved.txt")
        text.rename(moved)
        assert (
            pretrain.main(words(data=moved, save_every=3)) == first
        )  # the same text; and when states are written is free
        text.write_text(moved.read_text())
        refused("--train-length was 16, is 8", train_length=8)
        refused("--layers was 1, is 2, --steps was 4, is 3", steps=3, layers=2)
        refused("--scheme was", scheme_args="max_distance=3")
        refused("'max_distance': 3,", scheme_args="max_distance=3")
        refused("--steps was 4, is 3", schemes="alibi", steps=3)  # not asked for again, but it would be in the table
        refused("--learning-rate was 0.003, is 0.1", seeds="1", learning_rate=0.1)
        text.write_text(text.read_text().replace("import", "export"))
        refused("another text")
        text.write_text(moved.read_text())
    assert set(pretrain.main(words(scheme_args="max_distance=32"))["variants"]) == {"shaw"}  # that is the default
    assert set(pretrain.main(words(schemes="alibi"))["variants"]) == {"alibi", "shaw"}

    def stopping(accelerator, wrapped, optimizer, phase, step, *rest):
        if step == 3:
            raise Stop
        return one_step(accelerator, wrapped, optimizer, phase, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(training, "one_step", stopping)
        with pytest.raises(Stop):
            pretrain.main(words(schemes="nope", save_every=2))
    assert training.states(folder / "runs" / "nope" / "seed-0")
    refused("--max-grad-norm was 1.0, is 2.0", schemes="nope", max_grad_norm=2)
    assert len(pretrain.main(words(schemes="nope"))["variants"]) == 3
    path = folder / "runs" / "shaw" / "seed-0" / "results.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "identity"}))
    refused("has no identity")

    compare = importlib.import_module("hf_posenc.recipes.compare_schemes")
    folder = tiny_checkpoints / "sweep"
    common = small(tiny_checkpoints / "llama", text, folder)
    compare.main([*common, "--variants", "alibi", "--seeds", "0"])
    for extra, message in (
        (["--variants", "nope", "--steps", "2"], "--steps was 3, is 2"),
        (["--variants", "alibi", "--lora-rank", "2"], "--lora-rank was 0, is 2"),
    ):
        with pytest.raises(SystemExit):
            compare.main([*common, "--seeds", "0", *extra])
        assert message in " ".join(capsys.readouterr().err.split())
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    model.lm_head.weight.data[0] += 1
    model.save_pretrained(tiny_checkpoints / "llama")
    with pytest.raises(SystemExit):
        compare.main([*common, "--variants", "alibi", "--seeds", "0"])
    assert "another base" in " ".join(capsys.readouterr().err.split())


def test_a_table_is_of_one_sweep(recipes, tmp_path):
    """Also where it is made from the results alone."""
    many_runs, summary, options = (
        importlib.import_module(f"hf_posenc.recipes.{name}") for name in ("sweep_runs", "sweep_report", "options")
    )
    for seed, steps in ((0, 10), (1, 20)):
        target = many_runs.folder_of_run(tmp_path, "alibi", seed)
        target.mkdir(parents=True)
        results = {"identity": {"variant": "alibi", "seed": seed, "steps": steps}, "before": []}
        (target / "results.json").write_text(json.dumps(results))
    with pytest.raises(options.UsageError, match="are not of one sweep: --steps was 10, is 20"):
        summary.summarize(tmp_path, "two sweeps")


def test_evaluate(recipes, recipe, tiny_checkpoints, text, capsys):
    evaluate = importlib.import_module("hf_posenc.recipes.evaluate")
    recipe.main(small(tiny_checkpoints / "llama", text, tiny_checkpoints / "out", scheme="alibi"))
    target = tiny_checkpoints / "measured.json"
    words = ["--data", str(text), "--separator", r"\f", "--lengths", "16", "48", "--output", str(target)]
    words += ["--retrieval-trials", "0", "--eval-tokens", "100000"]
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
    with pytest.raises(SystemExit):
        evaluate.main(["--data", str(text)])
    assert "--model DIR_OR_ID is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_eval_tokens_says_at_most_how_many_are_measured_everywhere(recipes, recipe, tiny_checkpoints, text):
    """Of two books the beginning of one, not a whole book."""
    text.write_text(text.read_text().replace("\f", " ")[:2000] + "\f" + "another book " * 200)
    llama, out = tiny_checkpoints / "llama", tiny_checkpoints / "out"
    words = ["--data", str(text), "--separator", r"\f", "--lengths", "16", "--eval-tokens", "100"]
    words += ["--retrieval-trials", "0"]
    training = ["--train-length", "16", "--steps", "1"]
    plain = ["--calibrate", "none"]
    compared = [*plain, "--variants", "alibi", "--seeds", "0", "--output", str(out / "compare")]
    fresh = ["--schemes", "alibi", "--seeds", "0", "--output", str(out / "pretrain"), "--width", "16"]
    importlib.import_module("hf_posenc.recipes.compare_schemes").main(
        ["--model", str(llama), *words, *training, *compared]
    )
    importlib.import_module("hf_posenc.recipes.pretrain").main([*words, *training, *fresh])
    results = [
        recipe.main(["--model", str(llama), *words, *training, *plain, "--output", str(out / "extend")])["after"],
        *(json.loads(path.read_text())["after"] for path in out.glob("*/runs/alibi/seed-0/results.json")),
        importlib.import_module("hf_posenc.recipes.evaluate").main(
            ["--model", str(llama), *words, "--output", str(out / "evaluation.json")]
        )["measured"],
    ]
    assert [rows[0]["sliding"]["tokens"] for rows in results] == [99] * 4  # the first token has nothing before it
    for module in ("extend_context", "compare_schemes", "pretrain", "evaluate"):
        names = {
            field.name for field in dataclasses.fields(importlib.import_module(f"hf_posenc.recipes.{module}").Arguments)
        }
        assert "eval_tokens" in names
        assert "max_eval_tokens" not in names


def test_a_sweeps_figures_have_six_lines_and_the_base_in_each():
    """What is drawn are the means and the deviations; no two lines of a panel look the same, though two lie on each other."""
    figures = importlib.import_module("hf_posenc.recipes.sweep_report")
    names = ["alibi", *(f"alibi+{i}" for i in range(5)), "rope", "rope-yarn", "rope-linear", "nope", "unpatched"]
    curves = {name: figures.Curve([32, 64], [5.0, 8.0], [0.0, 2.0]) for name in names}
    curves[figures.BASE] = figures.Curve([32, 64], [4.0, math.inf], [0.0, 0.0])
    shown = figures.panels(curves)
    assert sorted(name for panel in shown for name in panel[2:]) == sorted(names[:-1])
    assert all(panel[:2] == [figures.BASE, "unpatched"] and len(panel) <= figures.LINES_PER_PANEL for panel in shown)
    assert any({"rope", "rope-yarn", "rope-linear"} < set(panel) for panel in shown)
    drawn = figures.plot_by_length(curves, {"trained at": 32, "fine-tuned at": 64})
    figures.set_title(drawn, "runs/$x^$: a path, not a formula")
    drawn.canvas.draw()
    for axes, panel in zip([axes for axes in drawn.axes if axes.get_visible()], shown, strict=True):
        lines = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert len(lines) == len(panel)
        assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == len(lines)
        band = axes.collections[0].get_paths()[0].vertices  # of the first that has one
        assert {(x, y) for x, y in band} == {(32, 5), (64, 6), (64, 10)}
        assert [text.get_text() for text in axes.texts] == ["trained at 32", "fine-tuned at 64"]
        assert [list(line.get_xdata()) for line in axes.lines[-2:]] == [[32, 32], [64, 64]]
    assert figures.panels([]) == []


def test_a_sweeps_figures_are_of_what_was_measured(recipes):
    summary = importlib.import_module("hf_posenc.recipes.sweep_report")

    def rows(loss):
        return [{"length": 8}, {"length": 16, "by_position": [{"first": 1, "last": 16, "loss": loss}]}]

    assert summary.by_position([rows(2.0), rows(4.0)]) == {(1, 16): {"mean": 3.0, "std": pytest.approx(2**0.5)}}
    assert summary.by_position([[{"length": 8}]]) == {}
    control = {
        "base": {"trained_length": 8},
        "training": {"curve": [{"tokens": 0, "loss": 1.5}, {"tokens": 9, "loss": 2.0}]},
    }
    calibrated = control | {"calibration": {"held_out_loss": {"length": 8, "base": 1.25}}}
    assert summary.base_loss({"alibi": [control], "unpatched": [control]}) == 1.5
    assert summary.base_loss({"alibi": [calibrated]}) == 1.25
    assert summary.base_loss({"alibi": [control]}) is None
    short = calibrated | {"base": {"trained_length": 16}}  # measured in shorter windows: another number
    assert summary.base_loss({"alibi": [short]}) is None
