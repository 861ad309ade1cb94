"""Nothing that a caller passes is ignored: each keyword of each public function changes something, or is refused.

A function, a keyword or a hyper-parameter that is new fails here until it has an entry.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import transformers
from families import tiny, tokens
from rows import ACTS, ROWS
from situations import randomize

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.core import registry
from hf_posenc.core.registry import scheme_class
from hf_posenc.families import Names
from hf_posenc.recipes.embedded import byte_tokenizer

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
        ("sinusoidal", {"frequencies": [0.1] * 16, "base": 50.0}),
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


@shows("which_engine", "model", "length", "keys", "dtype")
def _(folder):
    model = patch_model(tiny("llama"), "alibi")
    engine = {
        "short": hf_posenc.which_engine(model, 16),
        "long": hf_posenc.which_engine(model, 4096),
        "step": hf_posenc.which_engine(model, 1, keys=4096),
        "double": hf_posenc.which_engine(model, 4096, dtype=torch.float64),
        "model": hf_posenc.which_engine(patch_model(tiny("llama"), "shaw"), 4096),
    }
    names = {key: choice.engine for key, choice in engine.items()}
    assert names.pop("long") not in names.values()
    for wrong in ({"length": 0}, {"length": 8, "keys": 7}):
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


@shows("export_stock", "head_dim", "length")
def _(folder):
    model = patch_model(tiny("llama"), "transformer_xl", frequencies=4)
    hf_posenc.export_stock(model, folder / "wide", head_dim=40, length=300)
    config = transformers.LlamaConfig.from_pretrained(folder / "wide")
    assert (config.head_dim, config.max_position_embeddings) == (40, 300)
    refuses(ValueError, hf_posenc.export_stock, model, folder / "narrow", head_dim=8)
    refuses(ValueError, hf_posenc.export_stock, model, folder / "short", length=0)


@shows("export_stock", "model", "directory", "tokenizer", "**")
def _(folder):
    refuses(hf_posenc.NotPatchedError, hf_posenc.export_stock, tiny("llama"), folder / "stock")
    model = patch_model(tiny("gpt2"), "sinusoidal")
    for count in (40, 50):
        tokenizer = byte_tokenizer() if count == 50 else None
        hf_posenc.export_stock(
            model, folder / str(count), tokenizer=tokenizer, num_positions=count, max_shard_size="20KB"
        )
        assert (folder / str(count) / "tokenizer.json").exists() == (tokenizer is not None)
        assert transformers.GPT2Config.from_pretrained(folder / str(count)).n_positions == count
        assert len(list((folder / str(count)).glob("*.safetensors"))) > 1


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
    "calibrate": "test_calibration",
    "check": "test_check",
    "choose_layers": "test_layer_choice",
    "context_group": "test_distributed",
    "context_parallel": "test_distributed",
    "export_gguf": "test_gguf",
    "load_adapter": "test_lora",
    "lora_config": "test_lora",
    "shard_sequence": "test_distributed",
}
"""Function -> the file whose tests give each of its keywords."""


def public_keywords():
    """Every keyword of every public function that is tested here."""
    for name in set(hf_posenc.__all__) - set(ELSEWHERE):
        function = getattr(hf_posenc, name)
        if inspect.isfunction(function):
            for keyword, parameter in inspect.signature(function).parameters.items():
                yield name, "**" if parameter.kind is parameter.VAR_KEYWORD else keyword


def test_every_keyword_is_here():
    assert set(public_keywords()) == set(ENTRIES)


@pytest.mark.rows(default=4)
@pytest.mark.parametrize("entry", {test: entry for entry, test in ENTRIES.items()}.values(), ids="-".join)
def test_keywords_count(entry, tmp_path):
    ENTRIES[entry](tmp_path)
