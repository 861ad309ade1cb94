"""Nothing that a caller passes is ignored: each keyword of each public function changes something, or is refused.

A function, a keyword or a hyper-parameter that is new fails here until it has an entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import itertools
from dataclasses import dataclass, fields, replace

import peft
import pytest
import torch
import transformers
from families import tiny, tokens
from rows import ACTS, ROWS
from situations import randomize

import hf_posenc
from hf_posenc import patch_model, registry
from hf_posenc.families import Names
from hf_posenc.registry import scheme_class

# -------------------------------------------------------------------------------------------------------- hyper-parameters

VALUES = {scheme: row.values for scheme, row in ROWS.items()}


def made(family, scheme, **hyperparameters):
    model = tiny(family)
    try:
        patch_model(model, scheme, seed=0, **hyperparameters)
    except (TypeError, ValueError):
        return None
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(tokens(1, 20), use_cache=False).logits
        trained = randomize(model)(tokens(1, 20), use_cache=False).logits  # of a scheme that starts neutral
    tensors = {**parameters, "logits": logits, "trained": trained}
    # Adding zero makes one of the two zeros, which are equal and differ in a bit.
    return {name: (t.shape, hashlib.sha256((t + 0.0).numpy().tobytes()).digest()) for name, t in tensors.items()}


OWN_ROTATION = ("llama", "rope", "layers", "")
"""`rope` without hyper-parameters is what this base does by itself, in every layer: naming some changes nothing."""


@pytest.mark.rows(default=2)
@pytest.mark.parametrize("paired", [("gpt2",), pytest.param(("gpt2", "llama"), marks=pytest.mark.slow)], ids="+".join)
@pytest.mark.parametrize("scheme", VALUES)
def test_each_hyperparameter_counts_whatever_the_others_are(scheme, paired):
    """Alone and, on `paired`, beside the other value of each other one it changes the model or is refused."""
    values, results, silent, counted = VALUES[scheme], {}, [], set()

    def outcome(family, name, **hyperparameters):
        hyperparameters = {**ROWS[scheme].beside.get(name, ACTS[scheme]), **hyperparameters}
        key = (family, repr(sorted(hyperparameters.items())))
        if key not in results:
            results[key] = made(family, scheme, **hyperparameters)
        return results[key]

    for family, name, other in itertools.product(("gpt2", "llama"), values, ("", *values)):
        if other == name or (other and family not in paired) or (family, scheme, name, other) == OWN_ROTATION:
            continue
        beside = {other: values[other][1]} if other else {}
        first, second = (outcome(family, name, **beside, **{name: value}) for value in values[name])
        if first is not None and second is not None:
            (silent.append((family, name, other)) if first == second else counted.add(name))
    assert silent == []
    assert counted == set(values)


@pytest.mark.parametrize(
    ("scheme", "hyperparameters"),
    [
        ("sinusoidal", {"alpha": 3.0}),
        ("sinusoidal", {"frequencies": "power", "base": 50.0}),
        ("learned", {"share_layers": False}),
    ],
)
def test_a_hyperparameter_that_another_makes_useless(scheme, hyperparameters):
    model = tiny("gpt2")
    with pytest.raises(ValueError, match=next(reversed(hyperparameters))):
        patch_model(model, scheme, **hyperparameters)


# ------------------------------------------------------------------------------------------------------- public functions

ENTRIES = {}


def shows(function, *keywords):
    """Enter a test of a function's keywords; `**` stands for those that it hands on."""

    def enter(test):
        for keyword in keywords:
            ENTRIES[function, keyword] = test
        return test

    return enter


def refuses(error, function, *arguments, **keywords):
    with pytest.raises(error):
        function(*arguments, **keywords)


@shows("patch_model", "model")
def _(folder):
    refuses(hf_posenc.UnsupportedModelError, patch_model, torch.nn.Linear(2, 2), "alibi")


@shows("patch_model", "scheme", "attention", "**")
def _(folder):
    model = tiny("llama")
    refuses(hf_posenc.UnknownSchemeError, patch_model, model, "albi")
    refuses(ValueError, patch_model, model, "alibi", attention="fast")
    refuses(ValueError, patch_model, model, "nope", attention="chunked")
    refuses(TypeError, patch_model, model, "shaw", max_distnce=3)
    assert hf_posenc.which_engine(patch_model(model, "alibi", attention="chunked"), 8).engine == "chunked"


@shows("patch_model", "seed")
def _(folder):
    one, two = (outcome_of_seed(seed) for seed in (1, 2))
    assert not one.equal(two)
    refuses(TypeError, patch_model, tiny("llama"), "shaw", seed="1")


def outcome_of_seed(seed):
    return patch_model(tiny("llama"), "shaw", seed=seed).model.layers[0].self_attn.posenc.key_embeddings


@shows("is_patched", "model")
def _(folder):
    model = tiny("llama")
    assert not hf_posenc.is_patched(model)
    assert hf_posenc.is_patched(patch_model(model, "alibi"))


@shows("schemes_of", "model")
def _(folder):
    model = tiny("llama")
    assert hf_posenc.schemes_of(model) == ()
    assert hf_posenc.schemes_of(patch_model(model, "shaw", max_distance=3))[0].max_distance == 3


@shows("which_engine", "layer")
def _(folder):
    model = patch_model(tiny("llama"), "alibi", layers=[1])
    engines = [hf_posenc.which_engine(model, 8, layer=layer).engine for layer in (None, 0, 1, -1)]
    assert engines == ["reference", "sdpa", "reference", "reference"]
    refuses(ValueError, hf_posenc.which_engine, model, 8, layer=2)


@shows("patched", "model", "scheme", "**")
def _(folder):
    model = tiny("llama")
    with hf_posenc.patched(model, "shaw", max_distance=3, seed=1, attention="reference"):
        assert model.model.layers[0].self_attn.posenc.key_embeddings.shape[0] == 4
        assert hf_posenc.which_engine(model, 4096).engine == "reference"
    with pytest.raises(TypeError, match="max_distnce"), hf_posenc.patched(model, "shaw", max_distnce=3):
        pass


@shows("unpatch_model", "model")
def _(folder):
    refuses(hf_posenc.NotPatchedError, hf_posenc.unpatch_model, tiny("llama"))


@shows("describe", "model")
def _(folder):
    model = tiny("llama")
    stock = hf_posenc.describe(model)
    assert hf_posenc.describe(patch_model(model, "alibi")) != stock


@shows("which_engine", "model", "length", "keys", "dtype", "dropout", "weights")
def _(folder):
    model = patch_model(tiny("llama"), "alibi")
    engine = {
        "short": hf_posenc.which_engine(model, 16),
        "long": hf_posenc.which_engine(model, 4096),
        "step": hf_posenc.which_engine(model, 1, keys=4096),
        "double": hf_posenc.which_engine(model, 4096, dtype=torch.float64),
        "dropout": hf_posenc.which_engine(model, 4096, dropout=0.1),
        "weights": hf_posenc.which_engine(model, 4096, weights=True),
        "model": hf_posenc.which_engine(patch_model(tiny("llama"), "shaw"), 4096),
    }
    names = {key: choice.engine for key, choice in engine.items()}
    assert names.pop("long") not in names.values()
    for wrong in (
        {"length": 0},
        {"length": 8, "keys": 7},
        {"length": 8, "dropout": 1.0},
        {"length": 8, "dropout": -0.1},
    ):
        refuses(ValueError, hf_posenc.which_engine, model, **wrong)
        refuses(ValueError, hf_posenc.which_engine, patch_model(tiny("llama"), "nope"), **wrong)


@shows("verify", "model", "length", "seed")
def _(folder):
    model = patch_model(tiny("gpt2"), "learned", num_positions=12)
    report = hf_posenc.verify(model)
    assert hf_posenc.verify(model, length=8) != report
    assert hf_posenc.verify(model, seed=1) != report
    assert hf_posenc.verify(patch_model(tiny("gpt2"), "nope")) != report
    for length in (3, 13):
        refuses(ValueError, hf_posenc.verify, model, length=length)


@shows("lora_config", "model", "norms", "embeddings", "positions", "**")
def _(folder):
    model = patch_model(tiny("llama"), "shaw")

    def whole(**options):
        return set(hf_posenc.lora_config(model, **options).modules_to_save or ())

    everything = whole(embeddings=True)
    assert all(whole(**{"embeddings": True, name: False}) < everything for name in ("norms", "embeddings", "positions"))
    assert whole() == whole(embeddings=False)  # LLaMA has no table of positions at its input
    assert hf_posenc.lora_config(model, r=3).r == 3
    assert "mlp" in whole(modules_to_save=["mlp"])
    refuses(TypeError, hf_posenc.lora_config, model, rank=3)
    refuses(hf_posenc.NotPatchedError, hf_posenc.lora_config, tiny("llama"))


@shows("load_adapter", "model", "adapter", "**")
def _(folder):
    model = patch_model(tiny("llama"), "alibi")
    peft.get_peft_model(model, hf_posenc.lora_config(model)).save_pretrained(folder / "adapter")
    refuses(hf_posenc.CheckpointError, hf_posenc.load_adapter, tiny("llama"), folder / "adapter")
    refuses(OSError, hf_posenc.load_adapter, patch_model(tiny("llama"), "alibi"), folder)
    refuses(TypeError, hf_posenc.load_adapter, patch_model(tiny("llama"), "alibi"), folder / "adapter", nam="x")
    base = patch_model(tiny("llama"), "alibi")
    wrapped = hf_posenc.load_adapter(base, folder, subfolder="adapter", adapter_name="mine", is_trainable=True)
    assert list(wrapped.peft_config) == ["mine"]
    assert any(parameter.requires_grad for parameter in wrapped.parameters())


# What calibrate takes.


def calibrated(text=3, scheme="nope", **options):
    """What a calibration of a small model comes to: all of its weights, and its report."""
    model = patch_model(tiny("llama"), scheme, seed=0)
    # Random weights predict nothing that could judge; outputs: a little nearer or further, the steps are not put back.
    second = {"steps": 2, "batch_size": 2, "loss": "outputs"}
    second |= {field.name: options.pop(field.name) for field in fields(hf_posenc.Matching) if field.name in options}
    options = {"held_out": 2, "judge": "attention", "matching": hf_posenc.Matching(**second)} | options
    report = hf_posenc.calibrate(model, tokens(9, 24, seed=text), **options)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), report


@shows("calibrate", "model", "tokens", "base")
def _(folder):
    refuses(hf_posenc.NotPatchedError, hf_posenc.calibrate, tiny("llama"), tokens(9, 24))
    default, _ = calibrated()
    assert not calibrated(text=4)[0].equal(default)
    assert not calibrated(base=patch_model(tiny("llama"), "alibi"))[0].equal(default)


for keyword, value in {
    "matching": None,
    "steps": 3,
    "batch_size": 1,
    "rate": 0.1,
    "weight_rate": 0.1,
    "closed_windows": 1,
    "judge": "loss",
    "loss": "attention",
    "lengths": (12, 24),
    "seed": 1,
}.items():

    @shows("calibrate", keyword)
    def _(folder, keyword=keyword, value=value):
        scheme = "kerple" if keyword == "rate" else "nope"  # which has no parameters, whose rate it is
        assert not calibrated(scheme=scheme, **{keyword: value})[0].equal(calibrated(scheme=scheme)[0])
        if keyword != "seed":
            refuses(ValueError, calibrated, **{keyword: (0,) if keyword == "lengths" else 0})


@shows("calibrate", "labels")
def _(folder):
    windows = tokens(9, 24, seed=3)  # those of `calibrated`
    labels = windows.clone()
    labels[:, 12:] = -100
    losses = {given is None: calibrated(labels=given)[1].held_out_loss.base for given in (None, labels)}
    assert losses[True] != losses[False]
    refuses(ValueError, calibrated, labels=windows + 1)


@shows("calibrate", "state_file", "save_every")
def _(folder):
    written = []
    path = folder / "state.safetensors"
    calibrated(
        steps=4, state_file=path, save_every=3, on_step=lambda step, value: written.append(path.stat().st_mtime_ns)
    )
    assert len(set(written)) == 2  # before the first step and after the third
    seen = []
    calibrated(steps=4, state_file=path, save_every=3, on_step=lambda step, value: seen.append(step))
    assert seen == []
    refuses(ValueError, calibrated, save_every=3)


@shows("calibrate", "**")
def _(folder):
    refuses(TypeError, calibrated, stage="closed_form")


@shows("calibrate", "progress")
def _(folder):
    def shown(**given):
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            calibrated(**given)
        return errors.getvalue()

    assert shown() == ""
    assert "closed forms" in shown(progress=True)


@shows("calibrate", "weights", "held_out", "on_step")
def _(folder):
    refuses(ValueError, calibrated, weights="scheme")
    seen = []
    _, report = calibrated(on_step=lambda step, value: seen.append(step))
    assert seen == [1, 2]
    assert not calibrated(held_out=1)[1].layers[0].before.equal(report.layers[0].before)


# What choose_layers takes.


def costs(scheme="t5", text=3, **options):
    """What swaps of each layer of a small model cost, in layer order."""
    chosen = hf_posenc.choose_layers(tiny("llama"), tokens(9, 24, seed=text), scheme, **{"held_out": 2} | options)
    ranked = sorted(chosen.costs, key=lambda cost: cost.layer)
    return [number for cost in ranked for number in (cost.loss, cost.recall, cost.divergence)]


@shows("choose_layers", "model", "tokens", "scheme", "held_out", "**")
def _(folder):
    refuses(hf_posenc.AlreadyPatchedError, hf_posenc.choose_layers, patch_model(tiny("llama"), "nope"), tokens(9, 24))
    assert costs() != costs(text=4)
    assert costs() != costs("nope")
    assert costs() != costs(held_out=3)
    assert costs() != costs(num_buckets=4)


@shows("choose_layers", "closed_windows", "matching", "seed", "progress")
def _(folder):
    matching = hf_posenc.Matching(steps=2, batch_size=2)
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        assert costs() != costs(closed_windows=1, progress=True)
    assert "layer" in shown.getvalue()
    assert costs() != costs(matching=matching)
    assert costs("kerple") != costs("kerple", seed=1)
    refuses(ValueError, costs, matching="attention")


# What choose_pairs takes.


@shows("choose_pairs", "model", "tokens", "by", "progress")
def _(folder):
    model, shown = tiny("llama"), io.StringIO()
    refuses(hf_posenc.UnsupportedModelError, hf_posenc.choose_pairs, tiny("gpt2"), tokens(2, 24))
    with contextlib.redirect_stderr(shown):
        usual = hf_posenc.choose_pairs(model, tokens(2, 24), progress=True)
    assert "window" in shown.getvalue()
    assert hf_posenc.choose_pairs(model, tokens(2, 24, seed=5)) != usual
    assert hf_posenc.choose_pairs(model, tokens(2, 24), by="contribution").numbers != usual.numbers


# What check takes.


@shows("check", "model", "other", "seed")
def _(folder):
    model, other = tiny("llama"), patch_model(tiny("llama"), "alibi")
    usual = hf_posenc.check(model)
    assert hf_posenc.check(other).model != usual.model
    assert [each.about for each in hf_posenc.check(model, other).findings] == ["agreement"]
    assert hf_posenc.check(model, seed=1).to_dict() != usual.to_dict()
    refuses(hf_posenc.UnsupportedModelError, hf_posenc.check, torch.nn.Linear(2, 2))


# What fit_temperature takes.


def fitted(text=3, **options):
    """The fit of a temperature that is too low at the start."""
    model = patch_model(tiny("llama"), "temperature", kind="constant", strength=0.5, trainable=True)
    return hf_posenc.fit_temperature(model, tokens(9, 24, seed=text), **{"steps": 2} | options)


@shows("fit_temperature", "model", "tokens", "lengths", "held_out", "steps", "learning_rate", "progress")
def _(folder):
    refuses(hf_posenc.NotPatchedError, hf_posenc.fit_temperature, tiny("llama"), tokens(9, 24))
    usual, shown = fitted(), io.StringIO()
    assert fitted(text=4).before != usual.before
    assert fitted(lengths=(8, 24)).lengths == (8, 24)
    assert fitted(held_out=3).before != usual.before
    assert fitted(steps=1).strengths != usual.strengths
    assert fitted(learning_rate=0.01).strengths != usual.strengths
    with contextlib.redirect_stderr(shown):
        fitted(progress=True)
    assert "temperature" in shown.getvalue()


# What search_frequencies takes.


def searched(model="llama", text=3, length=80, **options):
    """The result of a search on random text; models are trained at 64 tokens."""
    strategy = hf_posenc.Evolution(population=5, iterations=1, mutations=1, crossovers=0)
    return hf_posenc.search_frequencies(
        tiny(model), tokens(3, 90, seed=text), length, **{"strategy": strategy} | options
    )


@shows(
    "search_frequencies", "model", "tokens", "length", "strategy", "layer_type", "held_out", "state_file", "progress"
)
def _(folder):
    refuses(hf_posenc.UnsupportedModelError, searched, "gpt2")
    usual, shown = searched(), io.StringIO()
    assert searched(text=4).before != usual.before
    assert searched(length=70).before != usual.before
    assert searched(strategy=hf_posenc.DivideAndConquer(increments=2)).strategy != usual.strategy
    assert list(searched("gemma3", layer_type="full_attention").frequencies) == ["full_attention"]
    refuses(ValueError, searched, layer_type="full_attention")
    assert searched(held_out=2).before != usual.before
    with contextlib.redirect_stderr(shown):
        assert searched(state_file=folder / "state.json", progress=True) == usual
    assert (folder / "state.json").exists()
    assert "frequencies" in shown.getvalue()


# What from_pretrained, inspect and export_stock take.


@shows("from_pretrained", "name_or_path", "scheme", "**")
def _(folder):
    tiny("llama").save_pretrained(folder / "stock")
    refuses(OSError, hf_posenc.from_pretrained, folder / "nowhere", scheme="shaw")
    refuses(hf_posenc.CheckpointError, hf_posenc.from_pretrained, folder / "stock")
    model = hf_posenc.from_pretrained(folder / "stock", scheme="shaw", max_distance=3, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.config.position_encoding["schemes"][0]["max_distance"] == 3
    refuses(TypeError, hf_posenc.from_pretrained, folder / "stock", scheme="shaw", max_distnce=3)
    refuses(TypeError, hf_posenc.from_pretrained, folder / "stock", scheme="alibi", max_distance=3)
    model.save_pretrained(folder / "patched")
    refuses(hf_posenc.CheckpointError, hf_posenc.from_pretrained, folder / "patched", scheme="shaw")
    refuses(TypeError, hf_posenc.from_pretrained, folder / "patched", max_distance=3)


@shows("from_pretrained", "attention", "seed")
def _(folder):
    tiny("llama").save_pretrained(folder / "stock")
    one, two = (hf_posenc.from_pretrained(folder / "stock", scheme="shaw", seed=seed) for seed in (1, 2))
    assert not one.model.layers[0].self_attn.posenc.key_embeddings.equal(
        two.model.layers[0].self_attn.posenc.key_embeddings
    )
    one.save_pretrained(folder / "patched")
    for where, options in ((folder / "stock", {"scheme": "shaw"}), (folder / "patched", {})):
        model = hf_posenc.from_pretrained(where, attention="reference", **options)
        assert hf_posenc.which_engine(model, 4096).engine == "reference"
        assert {layer.self_attn.posenc_state.engine for layer in model.model.layers} == {"reference"}
        refuses(ValueError, hf_posenc.from_pretrained, where, attention="fast", **options)
    refuses(hf_posenc.CheckpointError, hf_posenc.from_pretrained, folder / "patched", seed=3)


@shows("inspect", "name_or_path")
def _(folder):
    patch_model(tiny("llama"), "alibi").save_pretrained(folder / "some/where")
    refuses(OSError, hf_posenc.inspect, folder)
    assert hf_posenc.inspect(folder / "some/where").scheme == "alibi"


@shows("inspect", "**")
def _(folder):
    patch_model(tiny("llama"), "alibi").save_pretrained(folder / "some/where")
    assert hf_posenc.inspect(folder / "some", subfolder="where").scheme == "alibi"
    refuses(TypeError, hf_posenc.inspect, folder / "some/where", revison="main")


@shows("export_stock", "num_positions")
def _(folder):
    refuses(ValueError, hf_posenc.export_stock, patch_model(tiny("llama"), "rope"), folder / "rope", num_positions=5)


@shows("export_stock", "model", "directory", "**")
def _(folder):
    refuses(hf_posenc.NotPatchedError, hf_posenc.export_stock, tiny("llama"), folder / "stock")
    model = patch_model(tiny("gpt2"), "sinusoidal")
    for count in (40, 50):
        hf_posenc.export_stock(model, folder / str(count), num_positions=count, max_shard_size="20KB")
        assert transformers.GPT2Config.from_pretrained(folder / str(count)).n_positions == count
        assert len(list((folder / str(count)).glob("*.safetensors"))) > 1


@shows("export_gguf", "model", "path", "tokenizer", "dtype")
def _(folder):
    pytest.importorskip("gguf", reason="pip install gguf runs this")
    refuses(hf_posenc.NotPatchedError, hf_posenc.export_gguf, tiny("llama"), folder / "model.gguf")
    model = patch_model(tiny("llama"), "alibi")
    refuses(ValueError, hf_posenc.export_gguf, model, folder / "model.gguf", dtype="q4_0")
    refuses(hf_posenc.UnsupportedModelError, hf_posenc.export_gguf, model, folder / "model.gguf", tokenizer=object())
    assert not folder.exists() or not list(folder.iterdir())
    with pytest.warns(UserWarning, match="gets no tokenizer"):
        hf_posenc.export_gguf(model, folder / "model.gguf")
    assert (folder / "model.gguf").is_file()


@shows("register_scheme", "cls")
def _(folder):
    alibi = scheme_class("alibi")
    assert hf_posenc.register_scheme(alibi) is alibi
    refuses(TypeError, hf_posenc.register_scheme, int)
    refuses(ValueError, hf_posenc.register_scheme, dataclass(frozen=True)(type("Other", (), {"name": "alibi"})))


@shows("register_family", "family")
def _(folder):
    served = registry.family_for("llama")
    assert hf_posenc.register_family(served) is served
    refuses(ValueError, hf_posenc.register_family, replace(served, names=Names(layers="h")))
    refuses(ValueError, hf_posenc.register_family, hf_posenc.Family(model_types=()))
    refuses(hf_posenc.UnsupportedModelError, hf_posenc.register_family, hf_posenc.Family(model_types=("lama",)))


ELSEWHERE = {
    ("context_group", "size"): "test_distributed",
    ("context_parallel", "model"): "test_distributed",
    ("context_parallel", "group"): "test_distributed",
    ("shard_sequence", "batch"): "test_distributed",
    ("shard_sequence", "group"): "test_distributed",
    ("shard_sequence", "balanced"): "test_distributed",
}
"""What takes several processes, and the file that starts them."""


def public_keywords():
    """Every keyword of every public function, and the fields of what calibrate takes."""
    yield from (("calibrate", field.name) for field in fields(hf_posenc.Matching))
    for name in hf_posenc.__all__:
        function = getattr(hf_posenc, name)
        if inspect.isfunction(function):
            for keyword, parameter in inspect.signature(function).parameters.items():
                yield name, "**" if parameter.kind is parameter.VAR_KEYWORD else keyword


def test_every_keyword_is_here():
    assert set(public_keywords()) == set(ENTRIES) | set(ELSEWHERE)


@pytest.mark.rows(default=4)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("entry", {test: entry for entry, test in ENTRIES.items()}.values(), ids="-".join)
def test_keywords_count(entry, tmp_path):
    ENTRIES[entry](tmp_path)
