"""Several schemes as one option: read from JSON and YAML, refused where they mean nothing, named in folders and cards."""

import importlib
import json

import pytest
from recipe_runs import assert_same_weights, metrics, options, stopped_at

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
    assert list(models.read_schemes("scheme", said)) == meant


@pytest.mark.parametrize(
    ("said", "keywords", "message"),
    [
        (MIXTURE, ["rope_theta=3"], "--scheme-args rope_theta=3 cannot go with JSON: write hyper-parameters into it"),
        ('{"1::2": "nope"', (), "Expecting ',' delimiter"),
        ('{"1::2": "nop"}', (), "unknown scheme 'nop'; choose from alibi"),
        ('{"1::2": 3}', (), "scheme must be one of the names"),
        ('{"1::2": {"scheme": "shaw", "distance": 3}}', (), "shaw has no hyper-parameter distance"),
        ('{"1::2": {"scheme": "shaw", "layers": [1]}}', (), "shaw names layers itself, and is the value of '1::2'"),
        ("[]", (), "scheme must be one of the names"),
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
        ("compare_schemes", "variants: [rope, {1::2: nope}, [nope, temperature]]", ["rope", '{"1::2": "nope"}', None]),
    ):
        module = importlib.import_module(f"hf_posenc.recipes.{recipe}")
        file.write_text(content)
        model = ["--model", "none"] if recipe == "compare_schemes" else []
        read, _ = options_of.parse(module.Arguments, ["--config", str(file), *model], "test")
        value = getattr(read, content.partition(":")[0])
        for said, wanted in zip(value if isinstance(value, list) else [value], expected, strict=True):
            assert said == (wanted or '["nope", "temperature"]')


def test_a_mixture_is_run_described_and_resumed(recipes, tiny_checkpoints, text, monkeypatch, capsys):
    """Card, checkpoint and identity name all schemes; a run of another mixture is not continued."""
    recipe = importlib.import_module("hf_posenc.recipes.extend_context")
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
    assert "`temperature` is for layers `0`" in card
    assert "| `kind` | `'llama4'` |" in card
    assert "A factor on the queries" in card
    assert "- temperature\n" in card
    assert "with nope + rope + temperature" in card

    stopped_at(0, monkeypatch, recipe.main, options(folder, text, folder / "cut", **common))
    other = {**common, "scheme": '{"1::2":"nope"}'}
    with pytest.raises(SystemExit):
        recipe.main([*options(folder, text, folder / "cut", **other), "--resume"])
    assert "--scheme was" in capsys.readouterr().err
    resumed = recipe.main([*options(folder, text, folder / "cut", **common), "--resume"])
    assert metrics(resumed) == metrics(results)
    assert_same_weights(folder / "out", folder / "cut")


@pytest.mark.slow
def test_sweeps_take_mixtures(recipes, tiny_checkpoints, text):
    """Each in a folder of its JSON; the same sweep again makes nothing new."""
    compare = importlib.import_module("hf_posenc.recipes.compare_schemes")
    folder, mixture = tiny_checkpoints, '{"1::2":"nope"}'
    common = {"seeds": 0, "steps": 1, "lengths": 16, "calibrate_windows": 10, "calibrate_length": 16}
    sweep = common | {"recovery_steps": None, "variants": f"{mixture}+uncalibrated nope", "calibrate": "closed_form"}
    for _ in range(2):
        made = compare.main(options(folder, text, folder / "sweep", **sweep))
        assert set(made["variants"]) == {f"{mixture}+uncalibrated", "nope"}
    (file,) = (folder / "sweep").glob(f"runs/{mixture}+uncalibrated/seed-0/results.json")
    assert json.loads(file.read_text())["scheme"]["layers"] == [1]
