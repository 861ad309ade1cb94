"""What scripts measure is what the functions of the package say, and what is committed is of that kind."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import choose_pairs, patch_model, patched, theory
from hf_posenc.evaluation import (
    long_perplexity,
    measure_recurrence,
    non_overlapping_perplexity,
    repeat_gain,
    sliding_window_perplexity,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    """`(name, *arguments)`: run scripts/name.py on a command line, and return its module."""

    def run(name, *arguments):
        monkeypatch.syspath_prepend(ROOT / "scripts")
        specification = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        assert module.main() == 0
        return module

    return run


def shape_of(value):
    """Keys of dictionaries, down to what is in a list or no dictionary."""
    return {key: shape_of(each) for key, each in value.items()} if isinstance(value, dict) else None


@pytest.mark.slow
def test_calibrations_are_checked(script, tiny_checkpoints, capsys):
    """Losses of the script are those of the model that calibrate leaves; a row that is there is not made again."""
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("\n\n".join("It was a bright cold day in April, and the clocks were striking." for _ in range(40)))
    arguments = (text, "--length", 24, "--windows", 12, "--unseen", 3, "--steps", 1, "--json", found, "--schemes", "t5")
    script("check_calibration", tiny_checkpoints / "llama", *arguments)
    (row,) = json.loads(found.read_text())["rows"].values()
    model = patch_model(AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama"), "t5", seed=0).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")
    ids = [i for part in text.read_text().split("\n\n") for i in tokenizer(part).input_ids]
    windows = torch.tensor(ids[: 15 * 24]).view(15, 24)
    with torch.no_grad():
        swapped = [model(each, labels=each).loss.item() for each in (windows[4:12], windows[12:])]
    assert [row["held_out"]["swapped"], row["unseen"]["swapped"]] == pytest.approx(swapped, abs=1e-3)
    committed = json.loads((ROOT / "docs/measured/check_stories260K.json").read_text())
    assert shape_of(row) == shape_of(committed["rows"]["t5"]) | {"put_back": shape_of(row["put_back"])}
    capsys.readouterr()
    script("check_calibration", tiny_checkpoints / "llama", *arguments)
    assert f"| t5 | {row['held_out']['swapped']:.3f} |" in capsys.readouterr().out


def test_long_texts_are_read_with_and_without_sinks(script, tiny_checkpoints):
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 30)
    sizes = ("--tokens", 96, "--window", 8, "--chunk", 12, "--sections", 2)
    script("measure_sinks", tiny_checkpoints / "llama", text, *sizes, "--json", found)
    measured = json.loads(found.read_text())
    assert shape_of(measured) == shape_of(json.loads((ROOT / "docs/measured/sinks_stories260K.json").read_text()))
    ids = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")(text.read_text(), return_tensors="pt").input_ids
    for sinks, rows in measured["sinks"].items():
        model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama").eval()
        patch_model(model, "rope", window=8, sinks=int(sinks) or None)
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids[:, :96]).logits[0], ids[0, 1:97], reduction="none")
        assert [row["loss"] for row in rows] == pytest.approx(losses.view(2, 48).mean(-1).tolist(), abs=1e-4)
        assert [row["keys"] for row in rows] == [int(sinks) + 7] * 2


def test_rotations_are_measured_beyond_the_trained_length(script, tiny_checkpoints):
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 30)
    arguments = ("--tokens", 64, "--multiples", 1, 2, "--json", found)
    script("measure_far_rope", tiny_checkpoints / "llama", text, *arguments)
    tuned = ("--fine-tune", 256, "--seeds", 0, "--rate", 0.01, "--fine-tuned", "base", "far_rope, rerope")
    script("measure_far_rope", tiny_checkpoints / "llama", text, *arguments, *tuned)
    measured = json.loads(found.read_text())
    assert set(measured["fine_tuned"]) == {"base, seed 0", "far_rope, rerope, seed 0"}
    for row, after in measured["fine_tuned"].items():
        assert after["1"]["fresh"] < measured["rows"][row.removesuffix(", seed 0")]["1"]["fresh"] - 0.1
    committed = json.loads((ROOT / "docs/measured/far_rope_stories260K.json").read_text())
    assert measured.keys() == committed.keys()
    assert measured["rows"].keys() == committed["rows"].keys()
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama").eval()
    ids = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")(text.read_text(), return_tensors="pt").input_ids
    ids = ids[:, :64]  # one window of twice the trained length
    for name, arguments in {"base": None, "far_rope, rerope": {}, "far_rope, dynamic": {"kind": "dynamic"}}.items():
        with patched(model, "far_rope", **arguments) if arguments is not None else nullcontext(), torch.no_grad():
            expected = model(ids, labels=ids).loss.item()
        assert measured["rows"][name]["2"]["fresh"] == pytest.approx(expected, abs=1e-4), name


@pytest.mark.slow
def test_pairs_stop_until_the_loss_is_above_the_thresholds(script, tiny_checkpoints):
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 30)
    sizes = ("--tokens", 64, "--choose-windows", 2, "--calibrate-windows", 12, "--steps", 1, "--parts", 4)
    choices = ("--choices", "contribution, layer", "divergence, whole heads", "--thresholds", 1e-4, 9)
    script("measure_pairs", tiny_checkpoints / "llama", text, *sizes, *choices, "--json", found)
    measured = json.loads(found.read_text())
    committed = json.loads((ROOT / "docs/measured/pairs_stories260K.json").read_text())
    assert measured.keys() == committed.keys()
    rows, stops = measured["rows"]["contribution, layer"], measured["can_stop"]["contribution, layer"]
    assert rows[0].keys() == committed["rows"]["contribution, layer"][0].keys()
    assert [row["share"] for row in rows] == [0.25, 0.5, 0.75]  # none is 9 nats worse
    assert {way: limits["9.0"] for way, limits in stops.items()} == dict.fromkeys(stops, 0.75)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama").eval()
    ids = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")(text.read_text(), return_tensors="pt").input_ids[0]
    scheme = choose_pairs(model, ids[:64].view(2, 32), by="contribution").scheme(0.5, among="layer")
    held = ids[-64:].view(2, 32)
    with torch.no_grad():
        base = model(held, labels=held).loss.item()
        with patched(model, scheme):
            assert rows[1]["plain"] == pytest.approx(model(held, labels=held).loss.item() - base, abs=1e-4)
    assert rows[1]["plain"] > 1e-3
    # Four heads: one, two and three of them stop, those with the smallest divergence first.
    numbers = choose_pairs(model, ids[:64].view(2, 32)).numbers
    order = sorted(
        itertools.product(*map(range, (len(numbers), len(numbers[0])))), key=lambda h: sum(numbers[h[0]][h[1]])
    )
    whole = measured["rows"]["divergence, whole heads"]
    assert [row["share"] for row in whole] == [0.25, 0.5, 0.75]
    every = range(len(numbers[0][0]))
    for count, row in enumerate(whole, 1):
        still = set(order[:count])
        pairs = [[[] if (place, head) in still else [*every] for head in range(2)] for place in range(2)]
        with patched(model, "rope_by_head", pairs=pairs), torch.no_grad():
            assert row["plain"] == pytest.approx(model(held, labels=held).loss.item() - base, abs=1e-4)


def test_chosen_layers_are_compared_with_even_ones(script, tiny_checkpoints):
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 30)
    arguments = (text, "--length", 24, "--windows", 12, "--unseen", 3, "--counts", 1, "--json", found)
    script("measure_layer_choice", tiny_checkpoints / "llama", *arguments)
    measured = json.loads(found.read_text())
    assert shape_of(measured) == shape_of(json.loads((ROOT / "docs/measured/layers_stories260K.json").read_text()))
    chosen, even = measured["rows"]
    assert (chosen["how"], chosen["layers"]) == ("chosen", [measured["choice"]["costs"][0]["layer"]])
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama").eval()
    assert (even["how"], even["layers"]) == ("even", [model.config.num_hidden_layers - 1])
    ids = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")(text.read_text())["input_ids"]
    unseen = torch.tensor(ids[: 15 * 24]).view(15, 24)[12:]
    with torch.no_grad():
        assert measured["base"] == pytest.approx(model(unseen, labels=unseen).loss.item(), abs=1e-4)
        patch_model(model, "nope", layers=even["layers"])
        assert even["plain"] == pytest.approx(model(unseen, labels=unseen).loss.item(), abs=1e-4)


def test_searched_frequencies_are_measured_on_text_that_no_search_read(script, tiny_checkpoints):
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 40)
    sizes = ("--search", 80, "--lengths", 24, 80, "--measured", 100, "--windows", 2, "--held-out", 1)
    few = ("--population", 5, "--iterations", 1, "--increments", 2)
    script("measure_frequency_search", tiny_checkpoints / "llama", text, *sizes, *few, "--json", found)
    measured = json.loads(found.read_text())
    assert shape_of(measured) == shape_of(json.loads((ROOT / "docs/measured/frequencies_stories260K.json").read_text()))
    ids = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")(text.read_text(), return_tensors="pt").input_ids[0]
    row = measured["rows"][0]
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama").eval()
    patch_model(model, "rope", frequencies=row["search"]["frequencies"])
    expected = non_overlapping_perplexity(model, ids[:100], length=80).perplexity
    assert row["perplexities"]["80"] == pytest.approx(expected, rel=1e-5)
    assert [each["search"]["strategy"].split("(")[0] for each in measured["rows"]] == ["DivideAndConquer", "Evolution"]


def test_decay(script, tiny_checkpoints):
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 20)
    arguments = ("--text", text, "--length", 24, "--windows", 3, "--json", found)
    script("measure_decay", f"tiny={tiny_checkpoints / 'llama'}", *arguments)
    measured = json.loads(found.read_text())["tiny"]
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    ids = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")(text.read_text())["input_ids"]
    expected = theory.rotary_weights(model, torch.tensor(ids[:72]).view(3, 24)).decay(measured["distances"]).scores
    torch.testing.assert_close(torch.tensor(measured["sum"]).double(), expected, rtol=1e-3, atol=1e-5)
    assert measured["mean"] == pytest.approx(expected.mean((0, 1)).tolist(), rel=1e-3, abs=1e-5)
    assert measured["heads"] == 4
    assert torch.tensor(measured["integral"]).shape == expected.shape
    committed = json.loads((ROOT / "docs/measured/rotary_decay.json").read_text())
    assert {name: each["heads_lower_at_128_than_at_0"] for name, each in committed.items()} == {
        name: sum(head[13] < head[5] for layer in each["sum"] for head in layer) for name, each in committed.items()
    }
    for each in committed.values():
        assert shape_of(each) == shape_of(measured)
    with pytest.raises(SystemExit):
        script(
            "measure_decay", f"tiny={tiny_checkpoints / 'llama'}", *arguments[:-4], "--windows", 900, *arguments[-2:]
        )


def test_embeddings(script, tiny_checkpoints, monkeypatch):
    found, table = tiny_checkpoints / "found.json", tiny_checkpoints / "table.safetensors"
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "gpt2")
    positions = model.transformer.wpe.weight.detach()
    save_file({"rows": positions.clone()}, table)
    sources = [f"gpt2={tiny_checkpoints / 'gpt2'}", f"llama={tiny_checkpoints / 'llama'}", f"table={table}:rows"]
    script("measure_embeddings", *sources, "--json", found)
    measured = json.loads(found.read_text())
    assert measured["gpt2"]["norms"]["16"] == pytest.approx(positions[16].norm().item(), rel=1e-4)
    steps = (positions[1:] - positions[:-1]).norm(dim=-1)
    assert measured["gpt2"]["neighbour_distances"]["largest"] == [
        pytest.approx(steps.max().item(), rel=1e-4),
        int(steps.argmax()),
    ]
    of_table = {"positions", "distance_share", "norms", "neighbour_distances"}
    assert measured["table"] == {key: measured["gpt2"][key] for key in of_table}
    assert measured["llama"]["positions"] is None
    monkeypatch.setattr("hf_posenc.recipes.embedded.standard_library", lambda: [ROOT / "CONTRIBUTING.md"])
    script("measure_embeddings", "--steps", 1, "--json", found)
    trained = json.loads(found.read_text())
    assert set(trained) == {*measured, "embedded GPT-2", "embedded GPT-2, as it starts"}
    assert trained["embedded GPT-2"]["positions"]["count"] == 256
    assert trained["embedded GPT-2"] != trained["embedded GPT-2, as it starts"]


def test_the_table_of_residuals_is_what_was_measured():
    page = (ROOT / "docs/theory_terms.md").read_text()
    measured = json.loads((ROOT / "docs/measured/theory_embedded.json").read_text())["expansion"]
    by_size = measured["residual over mixed, by size"]
    cells = re.search(r"^\| median \| (.*) \|$", page, flags=re.MULTILINE)[1].split(" | ")
    assert len(cells) == len(by_size)
    for cell, each in zip(cells, by_size.values(), strict=True):
        assert float(cell) == pytest.approx(each["median"], rel=0.1)


def test_the_table_of_statistics_is_what_was_measured():
    page = (ROOT / "docs/theory_measured.md").read_text()
    measured = json.loads((ROOT / "docs/measured/embeddings.json").read_text())
    rows = 0
    for name, each in measured.items():
        for what in ("tokens", "positions"):
            if (found := each.get(what)) is None:
                continue
            positions = what == "positions"
            cells = (
                name if name.endswith(what) else f"{name}, {what}",
                f"{found['count']:,}",
                f"{found['mean_norm']:.2f}",
                f"{each['ratio']:.2f}" if positions and each.get("ratio") else "",
                f"{found['diagonal_share']:.2f} ({found['independent_share']:.2f})",
                f"{found['correlation']:.2f}",
                f"{found['dimensions']:.1f}",
                f"{each['distance_share']:.2f}" if positions else "",
            )
            assert "| " + " | ".join(cells) + " |" in page
            rows += 1
    assert rows == 9


@pytest.mark.slow
def test_recurrence(script, tiny_checkpoints):
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("It was a bright cold day in April.\n\nAnd the clocks were striking thirteen. " * 20)
    arguments = ("--train", text, "--windows", 9, "--length", 16, "--tokens", 70, "--segments", 8, "--spans", 16)
    run = (tiny_checkpoints / "llama", text, *arguments, "--json", found)
    module = script("measure_recurrence", *run, "--schemes")
    measured = json.loads(found.read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    tokens = module.document(AutoTokenizer.from_pretrained(tiny_checkpoints / "llama"), [text], 70)
    plain, kept = measured["found"]["stock"]
    assert (plain["memory"], kept["memory"]) == (0, 8)
    for row in (plain, kept):
        expected = measure_recurrence(model, [tokens], segment=8, memory=row["memory"])
        assert row["loss"] == pytest.approx(expected.perplexity.loss, abs=1e-4)
    sliding = sliding_window_perplexity(model, tokens, length=16, stride=8)
    assert kept["sliding"]["loss"] == pytest.approx(sliding.loss, abs=1e-4)
    script("measure_recurrence", *run, "--schemes", "transformer_xl", "--steps", 2, "--batch-size", 2)
    trained = json.loads(found.read_text())
    assert trained["found"]["stock"][0]["loss"] < plain["loss"] - 0.01
    committed = json.loads((ROOT / "docs/measured/recurrence_books.json").read_text())
    assert committed.keys() == trained.keys()
    assert committed["found"].keys() == trained["found"].keys()
    assert {row.keys() == kept.keys() for rows in committed["found"].values() for row in rows} == {True}
    with pytest.raises(ValueError, match="were asked for"):
        script("measure_recurrence", *run, "--tokens", 10**6)


@pytest.mark.slow
def test_training(tmp_path):
    """A run that is there is not made again, and runs of other settings stay apart."""
    text, found = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 20)
    few = ["--steps", 2, "--batch", 512, "--width", 16, "--layers", 1, "--measured", 600, "--seeds", 0]
    command = [sys.executable, ROOT / "scripts/measure_training.py", text, "--held-out", text, "--json", found, *few]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*more):
        words = [str(word) for word in (*command, *more)]
        return subprocess.run(words, capture_output=True, text=True, env=environment)

    done = run("--claims", "factors multiply")
    assert done.returncode == 0, done.stderr
    runs = json.loads(found.read_text())["runs"]
    assert set(runs) == {f"{name}, seed 0" for name in ("multiplied, relu", "multiplied, no relu", "added")}
    for each in runs.values():
        assert set(each["loss"]) == {"128", "512"}
        assert 0 < each["negative_products"] < 1
        assert each["tokens_per_cpu_second"] > 0
    assert "seed" not in run("--claims", "factors multiply").stderr
    assert "other settings" in run("--width", 32).stderr
    assert json.loads(found.read_text())["runs"] == runs


@pytest.mark.slow
def test_fine_tuning_after_a_calibration_has_two_targets_and_a_control(script, tiny_checkpoints):
    """The control is the base before it is trained, the base's predictions change what is learned, nothing runs twice."""
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("\n\n".join("It was a bright cold day in April, and the clocks were striking." for _ in range(150)))
    few = ("--length", 16, "--lengths", 16, 32, "--calibrate-length", 16, "--calibrate-windows", 12, "--steps", 1)
    few += ("--tokens", 2048, 20480, "--held-out-tokens", 128, "--json", found)
    arguments = (tiny_checkpoints / "llama", text, "--schemes", "t5", *few)
    script("measure_fine_tuning", *arguments)
    runs = json.loads(found.read_text())["runs"]
    ways = [f"{name}, {how}" for name in ("control", "t5") for how in ("text", "text and base")]
    assert set(runs) == {f"{name}, seed 0" for name in (*ways, "t5, plain swap")}
    assert set(runs["t5, plain swap, seed 0"]["losses_of_rates"]) == {"0.0001", "0.0003", "0.001", "0.003", "0.01"}
    plain = patch_model(
        AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama"), "t5", share_layers=False, seed=0
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")
    ids = [i for part in text.read_text().split("\n\n")[135:] for i in tokenizer(part).input_ids][16 * 16 :]
    windows = torch.tensor(ids[: 8 * 16]).view(-1, 16)
    with torch.no_grad():
        expected, swapped = (each.eval()(windows, labels=windows).loss.item() for each in (model, plain))
    assert runs["t5, plain swap, seed 0"]["before"]["16"] == pytest.approx(swapped, abs=1e-3)
    assert swapped > runs["t5, text, seed 0"]["before"]["16"] + 1e-3
    for target in ("text", "text and base"):
        run = runs[f"control, {target}, seed 0"]
        assert run["before"]["16"] == pytest.approx(expected, abs=1e-3)
        assert run["after"]["20480"]["16"] < run["before"]["16"]
        losses = run["losses_of_rates"]
        assert losses[str(run["rate"])] == min(losses.values())
    assert runs["control, text, seed 0"]["after"] != runs["control, text and base, seed 0"]["after"]
    assert runs["t5, text, seed 0"]["before"] == runs["t5, text and base, seed 0"]["before"]
    script("measure_fine_tuning", *arguments)
    assert json.loads(found.read_text())["runs"] == runs


@pytest.mark.slow
def test_far_text(script, tiny_checkpoints):
    """Rows of the base are those of the functions, on the last tenth of the documents; the swap has rows of its own."""
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("\n\n".join("It was a bright cold day in April, and the clocks were striking." for _ in range(150)))
    few = ("--length", 16, "--calibrate-windows", 12, "--distances", 64, "--trials", 3, "--lengths", 16, 32)
    few += ("--tokens", 200, "--json", found, "--other", text, "--scheme", "t5")
    script("measure_far_text", tiny_checkpoints / "llama", text, *few)
    measured = json.loads(found.read_text())
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama").eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")
    held = torch.tensor([i for part in text.read_text().split("\n\n")[135:] for i in tokenizer(part).input_ids])
    (gain,) = repeat_gain(model, held, distances=[64], trials=3)
    (row,), (swapped,) = (measured["found"][name]["repeat_gain"] for name in ("base", "t5"))
    assert row["second"] == pytest.approx(gain.second, rel=1e-3)
    assert abs(swapped["second"] - row["second"]) > 1e-3
    far = long_perplexity(model, model, held[:200], judge_length=16, lengths=[16, 32])
    for one, other in zip(measured["found"]["base"]["long_perplexity"], far, strict=True):
        assert one["loss"] == pytest.approx(other.loss, rel=1e-3)
    committed = json.loads((ROOT / "docs/measured/far_text_stories260K.json").read_text())
    assert shape_of(committed["settings"]) == shape_of(measured["settings"])


@pytest.mark.slow
def test_mixtures_are_fine_tuned_with_several_seeds(script, tiny_checkpoints):
    """Losses before are the base's own, differences are paired, and runs that are there are not made again."""
    text, found = tiny_checkpoints / "text.txt", tiny_checkpoints / "found.json"
    text.write_text("\n\n".join("It was a bright cold day in April, and the clocks were striking." for _ in range(150)))
    few = ("--tokens", 600, "--steps", 1, "--calibrate-windows", 12, "--seeds", 0, 1, "--json", found)
    arguments = (tiny_checkpoints / "llama", text, *few, "--variants", "base", "forgetting")
    script("measure_mixtures", *arguments)
    measured = json.loads(found.read_text())
    assert set(measured["runs"]) == {f"{name}, seed {seed}" for name in ("base", "forgetting") for seed in (0, 1)}
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoints / "llama")
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")
    ids = [i for part in text.read_text().split("\n\n")[135:] for i in tokenizer(part).input_ids]
    length = model.config.max_position_embeddings
    with torch.no_grad():
        windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
        expected = model(windows, labels=windows).loss.item()
    runs = [measured["runs"][f"base, seed {seed}"] for seed in (0, 1)]
    assert [run["before"][str(length)] for run in runs] == [pytest.approx(expected, abs=1e-3)] * 2
    assert runs[0]["after"] != runs[1]["after"]
    when = f"after, {length}"
    less = [
        measured["runs"][f"forgetting, seed {s}"]["after"][str(length)] - runs[s]["after"][str(length)] for s in (0, 1)
    ]
    assert measured["differences"]["forgetting less base"][when]["mean"] == pytest.approx(sum(less) / 2, abs=1e-4)

    script("measure_mixtures", *arguments)
    assert json.loads(found.read_text()) == measured
