"""Several schemes as one option: read from JSON and YAML, refused where they mean nothing, named in folders and cards."""

import importlib
import json

import pytest
import torch
from recipe_runs import Stop, assert_same_weights, metrics, options, weights

import hf_posenc
from hf_posenc.schemes import Nope, Rope, Shaw, Temperature

MIXTURE = '{"1::2": "nope", "_default": ["rope", {"scheme": "temperature", "kind": "llama4"}]}'


@pytest.fixture
def models(recipes):
    return importlib.import_module("hf_posenc.recipes.models")


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("shaw", [Shaw()]),
        (MIXTURE, [Nope(layers="1::2"), Rope(layers="rest"), Temperature("llama4", layers="rest")]),
        ('["nope", "temperature"]', [Nope(), Temperature()]),
        ('{"scheme": "shaw", "max_distance": 3, "layers": [0]}', [Shaw(max_distance=3, layers=(0,))]),
        ('{"0": "shaw", "-1": "nope"}', [Shaw(layers=(0,)), Nope(layers=(-1,))]),
        (
            ' [{"scheme": "temperature", "strength": [1, 2]}, "rope"]',
            [Temperature(strength=(1.0, 2.0)), Rope()],
        ),
    ],
)
def test_json_says_what_patch_model_takes(models, said, meant):
    assert list(models.read_schemes("scheme", said, {})) == meant


@pytest.mark.parametrize(
    ("said", "keywords", "message"),
    [
        (MIXTURE, {"rope_theta": 3}, "--scheme-args rope_theta cannot go with JSON: write hyper-parameters into it"),
        ('{"1::2": "nope"', {}, "this is no JSON, Expecting ',' delimiter"),
        ('{"1::2": "nope", "1::2": "rope"}', {}, "a key is there twice"),
        ('{"1::2": "nop"}', {}, "unknown scheme 'nop'; choose from alibi"),
        ('{"1::2": 3}', {}, "scheme must be one of the names"),
        ('{"1::2": {"scheme": "shaw", "distance": 3}}', {}, "shaw has no hyper-parameter distance"),
        ('{"1::2": {"scheme": "shaw", "layers": [1]}}', {}, "shaw names layers itself, and is the value of '1::2'"),
        ("[]", {}, "scheme must be one of the names"),
    ],
)
def test_json_that_means_nothing_is_refused(models, said, keywords, message):
    with pytest.raises(importlib.import_module("hf_posenc.recipes.options").UsageError) as refused:
        models.read_schemes("scheme", said, keywords)
    assert str(refused.value).startswith(f"--scheme {said}: ")
    assert message in str(refused.value)


def test_a_file_says_a_mixture_as_a_mapping_or_a_list(recipes, models, tmp_path):
    options_of = importlib.import_module("hf_posenc.recipes.options")
    file = tmp_path / "run.yaml"
    for recipe, content, expected in (
        ("extend_context", "scheme: {1::2: nope, _default: [rope, {scheme: temperature, kind: llama4}]}", [MIXTURE]),
        ("extend_context", "scheme: [nope, temperature]", ['["nope", "temperature"]']),
        ("pretrain", "schemes: [rope, {1::2: nope}, [nope, temperature]]", ["rope", '{"1::2": "nope"}', None]),
        ("compare_schemes", "variants: [rope+distill, {1: nope}]", ["rope+distill", '{"1": "nope"}']),
    ):
        module = importlib.import_module(f"hf_posenc.recipes.{recipe}")
        file.write_text(content)
        read, _ = options_of.parse(module.Arguments, ["--config", str(file)], "test")
        value = getattr(read, content.partition(":")[0])
        for said, wanted in zip(value if isinstance(value, list) else [value], expected, strict=True):
            assert said == (wanted or '["nope", "temperature"]')


def test_labels_name_runs_and_tell_mixtures_apart(models):
    labels = [
        models.label_of(models.read_schemes("schemes", said, {}))
        for said in (
            MIXTURE,
            '["nope", "temperature"]',
            '{"0": "shaw", "_default": {"scheme": "shaw", "values": false}}',
        )
    ]
    assert labels == [
        "nope@1::2,rope@rest,temperature(kind=llama4)@rest",
        "nope,temperature",
        "shaw@0,shaw(values=False)@rest",
    ]


def test_a_mixture_is_run_described_and_resumed(recipes, tiny_checkpoints, text, monkeypatch, capsys):
    """Report, card, checkpoint and identity name all schemes; a run of another mixture is not continued."""
    recipe, training = (importlib.import_module(f"hf_posenc.recipes.{name}") for name in ("extend_context", "training"))
    folder, common = (
        tiny_checkpoints,
        {"scheme": MIXTURE.replace(" ", ""), "steps": 2, "recovery_steps": 0, "lengths": 16},
    )
    results = recipe.main(options(folder, text, folder / "out", **common))
    assert results["scheme"]["name"] == "nope + rope + temperature"
    assert [scheme["layers"] for scheme in results["scheme"]["schemes"]] == [[1], [0], [0]]
    loaded = hf_posenc.schemes_of(hf_posenc.from_pretrained(folder / "out" / "model"))
    assert [scheme.name for scheme in loaded] == ["nope", "rope", "temperature"]
    card = (folder / "out" / "model" / "README.md").read_text()
    assert "`temperature` is for layer 0" in card
    assert "| `kind` | `'llama4'` |" in card
    assert "A factor on the queries" in card
    assert "- temperature\n" in card
    assert "nope + rope + temperature" in (folder / "out" / "report.html").read_text()

    def stop(*_):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(training, "one_step", stop)
        with pytest.raises(Stop):
            recipe.main(options(folder, text, folder / "cut", **common))
    other = {**common, "scheme": '{"1::2":"nope"}'}
    with pytest.raises(SystemExit):
        recipe.main([*options(folder, text, folder / "cut", **other), "--resume"])
    assert "--scheme was" in capsys.readouterr().err
    resumed = recipe.main([*options(folder, text, folder / "cut", **common), "--resume"])
    assert metrics(resumed) == metrics(results)
    assert_same_weights(folder / "out", folder / "cut")


@pytest.mark.slow
def test_sweeps_take_mixtures(recipes, tiny_checkpoints, text, capsys):
    """Each in a folder of its name; the same sweep again makes nothing new, in whatever way the JSON is written."""
    compare, pretrain = (
        importlib.import_module(f"hf_posenc.recipes.{name}") for name in ("compare_schemes", "pretrain")
    )
    folder, common = tiny_checkpoints, {"seeds": 0, "steps": 1, "lengths": 16}
    sweep = {
        **common,
        "recovery_steps": None,
        "model": folder / "llama",
        "variants": '{"1::2":"nope"}+uncalibrated nope',
    }
    sweep["calibrate"] = "closed_form"
    sweep["calibrate_windows"], sweep["calibrate_length"] = 10, 16
    made = compare.main(options(folder, text, folder / "sweep", **sweep))
    assert set(made["variants"]) == {"nope@1::2+uncalibrated", "nope"}
    (file,) = (folder / "sweep").glob("runs/nope@1::2+uncalibrated/seed-0/results.json")
    before = file.stat().st_mtime_ns
    sweep["variants"] = '{"1::2":["nope"]}+uncalibrated nope'
    compare.main(options(folder, text, folder / "sweep", **sweep))
    assert file.stat().st_mtime_ns == before
    for wrong, message in (
        ('{"1::2":"nope"} {"1::2":["nope"]}', "--variants names nope@1::2 twice"),
        ('{"1::2":"kerple"}+trainable', "write trainable into the JSON"),
    ):
        with pytest.raises(SystemExit) as stop:
            compare.main(options(folder, text, folder / "wrong", **{**sweep, "variants": wrong}))
        assert stop.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())
    words = {**common, "schemes": 'rope {"0":"nope","_default":"alibi"}', "layers": 2, "width": 16, "heads": 2}
    words |= dict.fromkeys(("model", "calibrate", "recovery_steps"))
    made = pretrain.main(options(folder, text, folder / "pretrained", **words))
    assert set(made["variants"]) == {"rope", "nope@0,alibi@rest"}
    results = json.loads((folder / "pretrained/runs/nope@0,alibi@rest/seed-0/results.json").read_text())
    assert results["scheme"]["name"] == "nope + alibi"


@pytest.mark.slow
def test_drope_fits_its_temperature_after_the_training(recipes, tiny_checkpoints, text):
    """One strength for longer contexts; every other weight is that of the run without the fit."""
    recipe, folder = importlib.import_module("hf_posenc.recipes.extend_context"), tiny_checkpoints
    temperature = '{"scheme":"temperature","strength":20,"trainable":true,"share_heads":true,"share_layers":true}'
    norm = '{"scheme":"qk_norm","exponent":1.0}'
    common = {
        "scheme": f'["nope",{norm},{temperature}]',
        "steps": 2,
        "train_length": 32,
        "recovery_steps": 0,
        "lengths": 16,
    }
    recipe.main(options(folder, text, folder / "plain", **common))
    results = recipe.main(options(folder, text, folder / "fitted", **common, fit_temperature="40 48"))
    plain, fitted = weights(folder / "plain"), weights(folder / "fitted")
    changed = {name for name in fitted if not torch.equal(plain[name], fitted[name])}
    assert len(changed) == 1, changed
    (strength,) = changed
    assert strength.endswith("posenc.strength")
    assert plain[strength].item() == 20  # within the base's length it does nothing, so training does not move it
    assert [fitted[strength].item()] in results["temperature"]["strengths"].values()
    assert list(results["temperature"]["lengths"]) == [40, 48]
    assert sum(results["temperature"]["after"]) < sum(results["temperature"]["before"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scheme": '["nope","temperature"]'}, "needs a trainable temperature"),
        ({"fit_temperature": 1}, "--fit-temperature takes lengths from 2 to 3"),
        ({"fit_temperature": 400}, "--fit-temperature takes lengths from 2 to 3"),
        ({"lora_rank": 2}, "--fit-temperature cannot be combined with --lora-rank"),
    ],
)
def test_a_temperature_that_cannot_be_fitted_is_refused(recipes, tiny_checkpoints, text, capsys, wrong, message):
    recipe = importlib.import_module("hf_posenc.recipes.extend_context")
    common = {"scheme": '["nope",{"scheme":"temperature","trainable":true}]', "fit_temperature": 48, **wrong}
    with pytest.raises(SystemExit) as stop:
        recipe.main(options(tiny_checkpoints, text, tiny_checkpoints / "out", **common))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
