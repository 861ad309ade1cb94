"""Saved models load as what they are, or not at all: round trips, ways to load, bad checkpoints, kills, stock export."""

import copy
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from decoders import decoder
from families import FAMILIES, LEARNED, ROTARY, tiny, tokens
from huggingface_hub.errors import StrictDataclassFieldValidationError
from matrix import matrix
from situations import CASES, JOINING, SCHEMES, assert_same, distance, patched_model, randomize
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    pipeline,
)

import hf_posenc
from hf_posenc import CheckpointError, UnknownSchemeError, describe, export_stock, from_pretrained, inspect, patch_model
from hf_posenc.checkpoints.digests import DIGESTS, check_saved_config
from hf_posenc.checkpoints.files import PENDING, STAGING, complete
from hf_posenc.checkpoints.folder_lock import LOCK
from hf_posenc.modules import PositionModule

SAVED = ("gpt2", "llama", "opt", "gemma2", "gpt_neox")
ROOT = Path(__file__).parents[2]
IDS = tokens(2, 20)


@torch.no_grad()
def logits(model, ids=IDS):
    output = model(ids, use_cache=False)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop(DIGESTS, None)  # as the message about an edited config asks
    change(config)
    path.write_text(json.dumps(config))


def python(code, *, check=True, **environment):
    """Run code in a new process, which has imported nothing of ours."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
    )
    if check:
        assert done.returncode == 0, done.stderr[-2000:]
    return done


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.rows(slow=170)
@matrix(case=CASES, family=SAVED, dtype=[torch.float32, torch.bfloat16], shards=["one file", "shards"])
def test_round_trip(case, family, dtype, shards, tmp_path):
    patched_model(case, family).save_pretrained(tmp_path / "first")
    model = from_pretrained(tmp_path / "first", dtype=dtype)  # .to(dtype) would round the frequencies of rotations too
    expected = logits(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "shards" else "50GB")
    assert (tmp_path / "model.safetensors").exists() == (shards == "one file")
    loaded = from_pretrained(tmp_path, dtype=dtype)
    assert type(loaded) is type(model)
    assert logits(loaded).equal(expected)
    state, again = model.state_dict(), loaded.state_dict()
    assert state.keys() == again.keys()
    assert all(state[key].equal(again[key]) for key in state)
    # one object where it was one: parameters shared by layers, tied embeddings
    shared = {id(p) for _, p in model.named_parameters(remove_duplicate=False)}
    assert len({id(p) for _, p in loaded.named_parameters(remove_duplicate=False)}) == len(shared)
    loaded.save_pretrained(tmp_path / "again", max_shard_size="20KB" if shards == "shards" else "50GB")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "again")]
    marks = [config.pop(DIGESTS).pop("config.json") for config in configs]  # those of weights differ with each save
    assert configs[0] == configs[1]
    assert marks[0] == marks[1]


@pytest.mark.rows(default=11)
@matrix(case=SCHEMES, family=[family for family in FAMILIES if family not in SAVED])
def test_round_trip_of_every_family(case, family, tmp_path):
    model = patched_model(case, family)
    model.save_pretrained(tmp_path)
    assert logits(from_pretrained(tmp_path)).equal(logits(model))
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path)).equal(logits(model))


@pytest.mark.parametrize("case", ["rope", "shaw-shared", "learned"])
@pytest.mark.parametrize("place", ["cpu", "auto", "disk"])
def test_device_maps(case, place, tmp_path):
    model = patched_model(case, "llama")
    model.save_pretrained(tmp_path)
    options = {"device_map": place}
    if place == "disk":
        places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
        if case == "shaw-shared":
            places["model.posenc"] = "cpu"
        options = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    assert_same(logits(from_pretrained(tmp_path, **options)), logits(model))


@pytest.mark.parametrize("family", SAVED)
def test_a_stock_checkpoint_is_patched_while_loading(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, scheme="shaw", max_distance=5, seed=3)
    assert logits(loaded).equal(logits(patch_model(tiny(family), "shaw", max_distance=5, seed=3)))
    hf_posenc.unpatch_model(loaded)
    assert logits(loaded).equal(logits(tiny(family)))
    low = from_pretrained(tmp_path, scheme=hf_posenc.registry.scheme_class("alibi")(), dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16


def test_a_fresh_swap_says_once_that_it_is_not_calibrated(tmp_path, monkeypatch):
    """By transformers' logger, as of weights that are new; a checkpoint that was patched before says nothing."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    monkeypatch.setattr(hf_posenc.loading, "logger", logger := logging.getLogger("transformers.hf_posenc.fresh"))
    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.WARNING)
    logger.addHandler(handler)
    tiny("llama").save_pretrained(tmp_path / "stock")
    from_pretrained(tmp_path / "stock", scheme="t5").save_pretrained(tmp_path / "patched")
    from_pretrained(tmp_path / "stock", scheme="alibi")
    from_pretrained(tmp_path / "patched")
    assert len(said) == 1
    assert "hf_posenc.calibrate(model, windows)" in said[0]


def test_a_stock_checkpoint_is_patched_and_dispatched(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.rotary_emb": "cpu", "model.layers.1": "disk", "model.layers.0": "cpu"}
    del places["model.layers"]
    loaded = from_pretrained(
        tmp_path, scheme="shaw", seed=3, device_map=places, offload_folder=str(tmp_path / "offloaded")
    )
    assert next(loaded.model.layers[1].parameters()).is_meta
    assert_same(logits(loaded), logits(patch_model(tiny("llama"), "shaw", seed=3)))


@pytest.mark.parametrize("case", ["alibi", "learned", "shaw-shared"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_resized_embeddings_and_other_heads(case, family, tmp_path):
    model = patched_model(case, family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the new rows' initialisation is transformers' business
        model.resize_token_embeddings(110)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.config.vocab_size == 110
    assert logits(loaded).equal(logits(model))
    bare = AutoModel.from_pretrained(tmp_path)
    assert logits(bare).equal(logits(model.base_model))
    bare.save_pretrained(tmp_path / "bare")
    assert logits(from_pretrained(tmp_path / "bare")).equal(logits(bare))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert hf_posenc.verify(classifier.base_model).ok
    classifier.save_pretrained(tmp_path / "classifier")
    again = from_pretrained(tmp_path / "classifier")
    assert type(again) is type(classifier)
    assert logits(again).equal(logits(classifier))


def test_every_head_of_every_family_has_a_class():
    found = 0
    for family in FAMILIES:
        config = hf_posenc.checkpoints.model_classes.config_class(type(tiny(family).config))
        config()  # the Auto classes learn of a family's heads when one of its configs is made
        for auto, name in hf_posenc.checkpoints.class_names.heads_of(config).items():
            cls = getattr(transformers, auto)._model_mapping[config]
            assert cls is getattr(hf_posenc.classes, f"PosEnc{name}")
            assert issubclass(cls, getattr(transformers, name))
            found += 1
    assert found > 3 * len(FAMILIES)


def test_the_tokenizer_learns_the_new_length(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), model_max_length=64)
    model = patched_model("alibi", "gpt2")
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == model.config.max_position_embeddings > 64
    assert tokenizer.model_max_length == 64


# ----------------------------------------------------------------------------------------------------- ways to load it

# Each way gets the folder and returns a model. What follows `-> ` is what must happen.


def by_hand(folder):
    family = json.loads((folder / "config.json").read_text())["model_type"].removeprefix("posenc_")
    stock, state = tiny(family), safetensors.torch.load_file(folder / "model.safetensors")
    if stock.config.tie_word_embeddings:
        embeddings = next(name for name, p in stock.named_parameters() if p is stock.get_input_embeddings().weight)
        state["lm_head.weight"] = state[embeddings]
    stock.load_state_dict(state)
    return stock


def stock_class_of(folder):
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name.removeprefix("PosEnc"))


def from_config(folder):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    state = safetensors.torch.load_file(folder / "model.safetensors")
    model.load_state_dict(state, strict=not model.config.tie_word_embeddings)
    model.tie_weights()
    return model.eval()


def edited_version(folder, version):
    edit_config(folder, lambda config: config["position_encoding"].update(hf_posenc_version=version))
    return folder


def newer_version(folder):
    with pytest.warns(UserWarning, match=r"saved by hf_posenc 0\.99\.0, newer"):
        return from_pretrained(edited_version(folder, "0.99.0"))


EQUAL = {
    "hf_posenc.from_pretrained": from_pretrained,
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained,
    "AutoModelForCausalLM, trust_remote_code": lambda f: AutoModelForCausalLM.from_pretrained(
        f, trust_remote_code=True
    ),
    "AutoModelForCausalLM, its own attention": lambda f: AutoModelForCausalLM.from_pretrained(
        f, attn_implementation=None
    ),
    "our concrete class": lambda f: getattr(
        hf_posenc.classes, json.loads((f / "config.json").read_text())["architectures"][0]
    ).from_pretrained(f),
    "from_config, then the state dict": from_config,
    "an older version": lambda f: from_pretrained(edited_version(f, "0.0.9")),
    "a newer minor version": newer_version,
    "pickle": lambda f: __import__("pickle").loads(__import__("pickle").dumps(from_pretrained(f))),
}

REFUSED = {
    "the stock class": lambda f: stock_class_of(f).from_pretrained(f),
    "the stock class, eager attention": lambda f: stock_class_of(f).from_pretrained(f, attn_implementation="eager"),
    "the stock class, sdpa": lambda f: stock_class_of(f).from_pretrained(f, attn_implementation="sdpa"),
    "the stock bare class": lambda f: (
        stock_class_of(f)._from_config.__self__.base_model_class.from_pretrained(f)
        if hasattr(stock_class_of(f), "base_model_class")
        else getattr(transformers, type(tiny_of(f).base_model).__name__).from_pretrained(f, attn_implementation="eager")
    ),
    "a stock config, eager attention": lambda f: stock_class_of(f).from_pretrained(
        f, config=stock_class_of(f).config_class.from_pretrained(f), attn_implementation="eager"
    ),
    "a stock config from the dict": lambda f: stock_class_of(f)(
        stock_class_of(f).config_class.from_dict(
            {**from_pretrained(f).config.to_dict(), "attn_implementation": "eager"}
        )
    ),
    "safetensors by hand": by_hand,
    "a newer major version": lambda f: from_pretrained(edited_version(f, "1.0.0")),
    "no version": lambda f: from_pretrained(edited_version(f, None)),
}


def tiny_of(folder):
    return tiny(json.loads((folder / "config.json").read_text())["model_type"].removeprefix("posenc_"))


@matrix(way=EQUAL, case=SCHEMES, family=["gpt2", "llama", "opt"])
def test_ways_that_load_the_same_model(way, case, family, tmp_path):
    model = patched_model(case, family)
    model.save_pretrained(tmp_path)
    loaded = EQUAL[way](tmp_path)
    assert logits(loaded.eval()).equal(logits(model))
    assert hf_posenc.verify(loaded).ok


@matrix(way=REFUSED, case=SCHEMES, family=["gpt2", "llama", "opt"])
def test_ways_that_are_refused(way, case, family, tmp_path):
    patched_model(case, family).save_pretrained(tmp_path)
    with pytest.raises(
        Exception, match="posenc"
    ) as caught:  # KeyError, ValueError, RuntimeError: whoever notices first
        REFUSED[way](tmp_path)
    assert not isinstance(caught.value, (AttributeError, AssertionError))


def test_two_ways_are_silent_and_name_the_marker(tmp_path, caplog):
    """They bypass the config, so no guard is read: docs/checkpoints.md warns of them."""
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path)
    marker = "hf_posenc_alibi"
    read = tiny("llama").load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"), strict=False)
    assert [name.rpartition(".")[2] for name in read.unexpected_keys] == [marker] * 2
    with caplog.at_level("WARNING", logger="transformers"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=tiny("llama").config)
    assert type(loaded) is type(tiny("llama"))
    assert marker in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_lets_its_stock_class_in(family, tmp_path):
    patched_model("alibi", family).save_pretrained(tmp_path)
    for options in ({}, {"attn_implementation": "eager"}):
        with pytest.raises(StrictDataclassFieldValidationError, match="hf_posenc:"):
            type(tiny(family)).from_pretrained(tmp_path, **options)
        with pytest.raises(StrictDataclassFieldValidationError, match="hf_posenc:"):
            type(tiny(family).base_model).from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_attention_implementation_at_loading_does_not_drop_the_scheme(implementation, tmp_path):
    for case in ("alibi", "rope"):
        model = patched_model(case, "llama")
        model.save_pretrained(tmp_path / case)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / case, attn_implementation=implementation)
        assert_same(logits(loaded), logits(model))
    with pytest.raises(ValueError, match="would drop alibi"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "alibi", attn_implementation="flash_attention_2")


def test_a_pipeline(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(97)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0"))
    write = pipeline("text-generation", model=str(tmp_path))
    text = write("w5 w6 w7", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert [f"w{n}" for n in expected[0].tolist()] == text.replace("w", " w").split()


LOAD = """
    import torch, sys
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained({folder!r}, {options})
    torch.save(model(torch.load({ids!r}), use_cache=False).logits, {out!r})
    assert ("hf_posenc" in sys.modules) == {imported}
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_a_process_that_never_imported_us(family, tmp_path):
    model = patched_model("alibi", family)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    torch.save(IDS, tmp_path / "ids")
    names = {"folder": str(folder), "ids": str(tmp_path / "ids"), "out": str(tmp_path / "out")}
    code = textwrap.dedent(LOAD).format(**names, options="trust_remote_code=True", imported=True)
    python(code, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert torch.load(tmp_path / "out").equal(logits(model))
    # Without trust, and without us: an error, not another model.
    code = textwrap.dedent(LOAD).format(**names, options="trust_remote_code=False", imported=False)
    done = python(code, check=False)
    assert done.returncode != 0
    assert f"posenc_{family}" in done.stderr or "trust_remote_code" in done.stderr
    # With trust, but not installed: transformers names the package that is missing.
    hidden = f"import sys; sys.modules['hf_posenc'] = None\n{textwrap.dedent(LOAD)}"
    code = hidden.format(**names, options="trust_remote_code=True", imported=True)
    done = python(code, check=False, HF_MODULES_CACHE=str(tmp_path / "modules2"))
    assert done.returncode != 0
    assert "hf_posenc" in done.stderr


@pytest.mark.skipif("internlm3" not in transformers.CONFIG_MAPPING, reason="of a newer transformers")
@pytest.mark.parametrize("model_type", ["internlm3", "iquestcoder"])
def test_a_model_type_whose_models_are_those_of_another(model_type, tmp_path):
    """Its config class is its own, its model classes are LLaMA's, and what is loaded is still of its type."""
    model = patch_model(decoder(model_type), "alibi")
    ours = f"PosEnc{type(decoder(model_type).config).__name__.removesuffix('Config')}AsLlamaForCausalLM"
    assert type(model).__name__ == ours
    assert getattr(hf_posenc.classes, ours) is type(model)
    folder = tmp_path / "model"
    for way, load in EQUAL.items():  # some edit the folder
        model.save_pretrained(folder)
        loaded = load(folder).eval()
        assert (way, type(loaded), loaded.config.model_type) == (way, type(model), f"posenc_{model_type}")
        assert logits(loaded).equal(logits(model)), way
    model.save_pretrained(folder)
    assert inspect(folder).base == model_type
    bare = AutoModel.from_pretrained(folder)
    bare.save_pretrained(tmp_path / "bare")
    assert type(from_pretrained(tmp_path / "bare")) is type(bare) is type(model.model)
    for stock in (transformers.LlamaForCausalLM, transformers.LlamaConfig, transformers.CONFIG_MAPPING[model_type]):
        with pytest.raises(StrictDataclassFieldValidationError, match="hf_posenc:"):
            stock.from_pretrained(folder, attn_implementation="eager")
    edit_config(folder, lambda config: config.update(architectures=["PosEncLlamaForCausalLM"]))
    with pytest.raises(CheckpointError, match=f"which names no hf_posenc class for {model_type}"):
        from_pretrained(folder)

    decoder(model_type).save_pretrained(tmp_path / "stock")
    loaded = from_pretrained(tmp_path / "stock", scheme="alibi")
    assert (type(loaded), loaded.config.model_type) == (type(model), f"posenc_{model_type}")
    assert logits(loaded).equal(logits(model))
    export_stock(patch_model(decoder(model_type), "rope", rope_theta=50.0), tmp_path / "exported")
    assert AutoConfig.from_pretrained(tmp_path / "exported").model_type == model_type


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_a_type_whose_checkpoints_have_other_names_than_its_models(model_type, tmp_path):
    """transformers renames and joins weights of such a checkpoint when it is loaded, and undoes that when it is saved."""
    decoder(model_type).save_pretrained(tmp_path / "stock")
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "stock"), "alibi")
    model.save_pretrained(tmp_path / "patched")
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert logits(loader(tmp_path / "patched")).equal(logits(model))


SMALL = {name: 16 for name in ("hidden_size", "projector_input_dim", "projector_output_dim", "vision_output_dim")}
SMALL |= {"depth": 1, "num_hidden_layers": 1, "intermediate_size": 32, "num_heads": 2, "num_attention_heads": 2}
SMALL |= {"out_hidden_size": 32, "image_size": 28, "patch_size": 14, "num_position_embeddings": 16}


def multimodal(model_type):
    """A tiny multimodal model around a tiny language model."""
    config = transformers.CONFIG_MAPPING[model_type](text_config=decoder(f"{model_type}_text").config.to_dict())
    for name, value in SMALL.items():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, value)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return getattr(transformers, names[model_type])(config).eval()


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe", "llama4"])
def test_the_language_model_of_a_multimodal_checkpoint_is_patched(model_type, tmp_path):
    multimodal(model_type).save_pretrained(tmp_path / "stock")
    assert inspect(tmp_path / "stock").problem is None
    model = from_pretrained(tmp_path / "stock", scheme="alibi")
    assert model.config.model_type == f"posenc_{model_type}_text"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert logits(model).equal(logits(patch_model(stock, "alibi")))
    model.save_pretrained(tmp_path / "patched")
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert logits(loader(tmp_path / "patched")).equal(logits(model))


@pytest.mark.parametrize("whole", ["multimodal", "head"])
def test_a_stock_model_around_a_patched_one_is_not_saved(whole, tmp_path):
    model = multimodal("qwen3_5") if whole == "multimodal" else tiny("llama")
    model.save_pretrained(tmp_path / "stock")
    before = {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()}
    inner = patch_model(model.base_model.language_model if whole == "multimodal" else model.model, "alibi")
    for around in (model, copy.deepcopy(model)):
        with pytest.raises(
            hf_posenc.UnsupportedModelError,
            match=r"patched with alibi.*save_pretrained on the patched part.* unpatch_model",
        ):
            around.save_pretrained(tmp_path / "stock")
    assert {path.name: path.read_bytes() for path in (tmp_path / "stock").iterdir()} == before
    inner.save_pretrained(tmp_path / "part")
    assert logits(from_pretrained(tmp_path / "part")).equal(logits(inner))
    hf_posenc.unpatch_model(inner)
    model.save_pretrained(tmp_path / "again")
    assert "save_pretrained" not in vars(model)
    assert "posenc" not in (tmp_path / "again/config.json").read_text()


def test_another_name_of_a_model_type(tmp_path):
    """GPT-SW3 is GPT-2: transformers has one config class for both, which says so."""
    stock = decoder("gpt-sw3")
    stock.save_pretrained(tmp_path)
    edit_config(tmp_path, lambda config: config.update(model_type="gpt-sw3"))
    assert inspect(tmp_path).problem is None
    loaded = from_pretrained(tmp_path, scheme="nope")
    assert loaded.config.model_type == "posenc_gpt2"
    loaded.save_pretrained(tmp_path / "patched")
    assert logits(from_pretrained(tmp_path / "patched")).equal(logits(patch_model(decoder("gpt-sw3"), "nope")))


def test_the_folder_holds_no_source_but_the_stub(tmp_path):
    for number in range(2):  # saved, loaded by trust_remote_code, saved again
        folder = tmp_path / str(number)
        model = (
            patched_model("shaw", "llama")
            if number == 0
            else AutoModelForCausalLM.from_pretrained(tmp_path / "0", trust_remote_code=True)
        )
        model.save_pretrained(folder)
        assert sorted(path.name for path in folder.iterdir()) == [
            LOCK,
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "modeling_hf_posenc.py",
        ]
        lines = (folder / "modeling_hf_posenc.py").read_text().splitlines()
        assert len(lines) == 2
        assert lines[0].startswith("#")
        assert lines[1].startswith("from hf_posenc.classes import PosEncLlama")


def test_trainer_resumes(tmp_path):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in tokens(8, 16)]

    def train(steps, resume=None):
        options = {"max_steps": steps, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "seed": 1}
        arguments = TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            lr_scheduler_type="constant",
            disable_tqdm=True,
            save_strategy="steps",
            **options,
        )
        trainer = Trainer(model=patched_model("shaw", "llama").train(), args=arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.eval()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pinned memory and the like
        whole = logits(train(4))
        shutil.rmtree(tmp_path / "checkpoint-4")
        resumed = train(4, str(tmp_path / "checkpoint-2"))
    assert distance(whole, logits(patched_model("shaw", "llama"))) > 1e-3
    assert_same(logits(resumed), whole)
    assert logits(from_pretrained(tmp_path / "checkpoint-4")).equal(logits(resumed))


# -------------------------------------------------------------------------------------------------------- bad checkpoints


def without(key):
    return lambda config: config["position_encoding"]["schemes"][0].pop(key)


def with_entry(**values):
    return lambda config: config["position_encoding"]["schemes"][0].update(values)


BAD_CONFIGS = {
    "no entry": (lambda config: config.pop("position_encoding"), "no position_encoding"),
    "no scheme": (without("scheme"), "no position_encoding.schemes"),
    "a typo in the scheme": (with_entry(scheme="shav"), "unknown scheme 'shav'; choose from alibi"),
    "an unknown key": (with_entry(max_distanse=3), "no hyper-parameter max_distanse"),
    "a missing key": (without("max_distance"), "lacks max_distance of shaw"),
    "a value out of range": (with_entry(max_distance=-1), "max_distance"),
    "an entry that is no dict": (
        lambda config: config.update(position_encoding="shaw"),
        "no position_encoding.schemes",
    ),
}


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained], ids=["ours", "auto"])
@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_bad_configs(what, loader, tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    change, message = BAD_CONFIGS[what]
    edit_config(tmp_path, change)
    with pytest.raises((CheckpointError, UnknownSchemeError), match=message) as caught:
        loader(tmp_path)
    assert "hf_posenc" in str(caught.value)
    found = inspect(tmp_path)
    assert found.problem is not None
    assert message in found.problem


def overlap(config):
    config["position_encoding"]["schemes"] = [
        {**config["position_encoding"]["schemes"][0], "layers": layers} for layers in ([0, 1], [1])
    ]


HUGE = 2 * 10**12
WITHOUT_DIGESTS = {
    "overlapping layers": ("t5", "llama", overlap, "both name layer 1"),
    "a layer that is not there": ("t5", "llama", with_entry(layers=[7]), "there is no layer 7"),
    "layer types that are too few": (
        "t5",
        "gemma2",
        lambda config: config.update(layer_types=["full_attention"]),
        "IndexError",
    ),
    "more layers": ("t5", "llama", lambda config: config.update(num_hidden_layers=3), "3 layers|model.layers.2"),
    "a table beyond any memory": (
        "t5",
        "llama",
        with_entry(num_buckets=HUGE, max_distance=2 * HUGE),
        f"model.posenc.bias.*{HUGE}",
    ),
    "embeddings beyond any memory": ("t5", "llama", lambda config: config.update(vocab_size=HUGE), f"{HUGE}, 32"),
    "no activation": ("t5", "llama", lambda config: config.update(hidden_act="hf_posenc:none"), "KeyError: 'none'"),
    "an unknown stage": (
        "t5",
        "llama",
        lambda config: config["position_encoding"].update(calibration={"stage": "x\x1b[2J", "tokens": 3}),
        "stage must be one of closed_form, attention",
    ),
}


@pytest.mark.parametrize("what", WITHOUT_DIGESTS)
def test_loading_and_inspecting_give_the_same_verdict(what, tmp_path):
    case, family, change, message = WITHOUT_DIGESTS[what]
    patched_model(case, family).save_pretrained(tmp_path)
    edit_config(tmp_path, change)
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            loader(tmp_path)
    found = inspect(tmp_path)
    assert found.problem is not None
    assert re.search(message, found.problem)


def test_inspecting_notices_weights_of_another_save(tmp_path):
    patched_model("t5", "llama").save_pretrained(tmp_path)
    patched_model("t5", "llama").save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path)
    assert "model.safetensors in " in inspect(tmp_path).problem


CALIBRATIONS = {
    "no stage": {"tokens": 3},
    "an unknown key": {"stage": "attention", "tokens": 3, "x": 1},
    "a strange stage": {"stage": ["attention"], "tokens": 3},
    "text for tokens": {"stage": "attention", "tokens": "<b>"},
    "fewer than no tokens": {"stage": "attention", "tokens": -5},
    "true for tokens": {"stage": "attention", "tokens": True},
    "a list": ["attention", 3],
    "another loss": {"stage": "attention", "tokens": 3, "held_out_loss": {"after": 1.0}},
    "a loss that is text": {"stage": "attention", "tokens": 3, "held_out_loss": {"base": "1.0"}},
    "a loss that is not finite": {"stage": "attention", "tokens": 3, "held_out_loss": {"base": float("inf")}},
}


@pytest.mark.parametrize("what", CALIBRATIONS)
def test_what_a_config_says_of_a_calibration_is_checked(what, tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path)
    edit_config(tmp_path, lambda config: config["position_encoding"].update(calibration=CALIBRATIONS[what]))
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=r"position_encoding\.calibration"):
            loader(tmp_path)
    assert "position_encoding.calibration" in inspect(tmp_path).problem
    assert inspect(tmp_path).calibration is None


def test_losses_of_a_calibration_are_kept_and_shown(tmp_path):
    found = {
        "stage": "attention",
        "tokens": 81234,
        "held_out_loss": {"base": 1.34, "swapped": 2.81, "calibrated": 1.93},
    }
    model = patched_model("alibi", "llama")
    model.config.position_encoding["calibration"] = found
    model.save_pretrained(tmp_path)
    from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        assert inspect(folder).calibration == found
        losses = "held-out loss 2.81 -> 1.93 nats per token (base 1.34)"
        assert f"\n  calibrated  with 81,234 tokens, stage attention; {losses}\n" in str(inspect(folder))
        assert losses.replace("->", "-&gt;") in (folder / "README.md").read_text()


def test_inspect_prints_nothing_that_a_terminal_obeys(tmp_path):
    nasty = "x\x1b[2J\n  loadable    yes\u202e"
    patched_model("shaw", "llama").save_pretrained(tmp_path)

    def spoil(config):
        config["architectures"] = [nasty]
        config["position_encoding"]["hf_posenc_version"] = nasty
        config["position_encoding"]["calibration"] = {"stage": nasty, "tokens": 3}
        config["position_encoding"]["schemes"][0].update({"scheme": nasty, nasty: nasty})

    edit_config(tmp_path, spoil)
    lines = str(inspect(tmp_path)).split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line[:14] for line in lines[1:]] == ["  base        ", "  calibrated  ", "  saved by    ", "  loadable    "]
    assert lines[4].startswith("  loadable    no: ")


def change_weights(folder, change):
    """Rewrite the weights, and say so as the message about rewritten weights asks."""
    edit_config(folder, lambda config: None)
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    change(state)
    safetensors.torch.save_file(state, path, metadata={"format": "pt"})


TABLE = "model.layers.1.self_attn.posenc.key_embeddings"


def shorten(state):
    state[TABLE] = state[TABLE][:-1].clone()


BAD_WEIGHTS = {
    "a missing parameter": (lambda state: state.pop(TABLE), f"missing: {TABLE}"),
    "a table one row short": (shorten, f"another shape than .*{TABLE}"),
    "an unexpected parameter": (
        lambda state: state.update({"model.layers.0.self_attn.posenc.slopes": torch.zeros(4)}),
        "unexpected: model.layers.0.self_attn.posenc.slopes",
    ),
    "another scheme's weights": (
        lambda state: state.update({"model.layers.0.hf_posenc_alibi": state.pop("model.layers.0.hf_posenc_shaw")}),
        "missing: model.layers.0.hf_posenc_shaw; unexpected: model.layers.0.hf_posenc_alibi",
    ),
}


@pytest.mark.parametrize("loader", [from_pretrained, AutoModelForCausalLM.from_pretrained], ids=["ours", "auto"])
@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_bad_weights(what, loader, tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    change, message = BAD_WEIGHTS[what]
    change_weights(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        loader(tmp_path)


def test_a_mismatch_is_not_ignored_where_transformers_is_told_to(tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    change_weights(tmp_path, shorten)
    with pytest.raises(CheckpointError, match=f"of another shape: {TABLE}"):
        AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    "loader",
    [from_pretrained, AutoModelForCausalLM.from_pretrained, AutoModel.from_pretrained],
    ids=["ours", "auto", "bare"],
)
def test_a_missing_stock_weight_is_an_error_of_ours(loader, tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    change_weights(tmp_path, lambda state: state.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing: (model\.)?norm\.weight"):
        loader(tmp_path)


def test_a_weight_left_over_that_belongs_to_no_scheme(tmp_path):
    """The digests refuse it. Without them, loading ignores it, as transformers does."""
    model = patched_model("shaw", "llama")
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    change_weights(tmp_path, lambda state: state.update({"extra.weight": torch.zeros(4)}))
    assert logits(from_pretrained(tmp_path)).equal(logits(model))
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"model\.safetensors in .* not what was saved"):
        from_pretrained(tmp_path)


def test_a_truncated_shard(tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        from_pretrained(tmp_path)


def test_a_corrupted_config(tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "posenc_llama", ')
    with pytest.raises(CheckpointError, match="is no valid JSON"):
        from_pretrained(tmp_path)
    with pytest.raises(OSError, match="not a valid JSON"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_changed_config_without_a_model_type_is_called_that():
    with pytest.raises(CheckpointError, match=r"config\.json without a model_type was changed"):
        check_saved_config({DIGESTS: {"config.json": "of another"}})


def test_an_edited_stub_is_not_run(tmp_path):
    model = patched_model("shaw", "llama")
    model.save_pretrained(tmp_path / "model")
    trace = tmp_path / "executed"
    (tmp_path / "model/modeling_hf_posenc.py").write_text(f"open({str(trace)!r}, 'w')\n")
    for loaded in (
        from_pretrained(tmp_path / "model"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True),
    ):
        assert logits(loaded).equal(logits(model))
    inspect(tmp_path / "model")
    assert not trace.exists()


def test_architectures_that_are_not_ours(tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    for name in ("LlamaForCausalLM", "PosEncGPT2LMHeadModel", "PosEncNothing", "PosEncTrainer"):
        edit_config(tmp_path, lambda config, name=name: config.update(architectures=[name]))
        with pytest.raises(CheckpointError, match=f"architectures is .*{name}"):
            from_pretrained(tmp_path)


def test_wrong_calls(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "stock")
    patched_model("shaw", "llama").save_pretrained(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="say which scheme"):
        from_pretrained(tmp_path / "stock")
    with pytest.raises(CheckpointError, match="is patched already"):
        from_pretrained(tmp_path / "ours", scheme="alibi")
    with pytest.raises(UnknownSchemeError, match="choose from"):
        from_pretrained(tmp_path / "stock", scheme="shav")
    with pytest.raises(CheckpointError, match="seed=3 would draw nothing"):
        from_pretrained(tmp_path / "ours", seed=3)
    with pytest.raises(ValueError, match="unknown attention 'fast'; choose from auto, sdpa"):
        from_pretrained(tmp_path / "ours", attention="fast")
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_reads_no_weights(tmp_path):
    patched_model("shaw", "gpt2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = inspect(tmp_path)
    assert (found.base, found.architecture, found.scheme) == ("gpt2", "PosEncGPT2LMHeadModel", "shaw")
    assert found.schemes[0]["max_distance"] == 5
    assert found.version == hf_posenc.__version__
    assert found.problem is None
    assert "shaw(max_distance=5" in str(found)


def first_lines(model, folder):
    """What `inspect` and `describe` print of a model's schemes."""
    model.save_pretrained(folder)
    return [str(text).splitlines()[0].split(": ", 1)[1] for text in (inspect(folder), describe(model))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inspect_and_describe_print_a_scheme_alike(scheme, tmp_path):
    inspected, described = first_lines(patched_model(scheme, "gpt2"), tmp_path)
    assert inspected == described


def test_inspect_counts_pairs_that_are_listed_by_head(tmp_path):
    model = tiny("llama")
    heads = model.config.num_key_value_heads
    pairs = [[[0, 1], *([[0]] * (heads - 1))] for _ in range(model.config.num_hidden_layers)]
    inspected, described = first_lines(patch_model(model, "rope_by_head", pairs=pairs), tmp_path)
    count = len(pairs) * (heads + 1)
    assert inspected == described == f"rope_by_head(pairs=[{count} in {len(pairs) * heads} heads])"


def test_inspect_lists_a_scheme_that_it_cannot_make(tmp_path):
    patched_model("alibi", "gpt2").save_pretrained(tmp_path)
    edit_config(tmp_path, lambda config: config["position_encoding"]["schemes"][0].update(scheme="elsewhere", slope=3))
    found = inspect(tmp_path)
    assert "elsewhere(" in str(found).splitlines()[0]
    assert "slope=3" in str(found).splitlines()[0]
    assert "unknown scheme 'elsewhere'" in found.problem


def test_inspect_of_stock_checkpoints(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    found = inspect(tmp_path / "gpt2")
    assert (found.scheme, found.version, found.problem) == (None, None, None)
    transformers.BertConfig().save_pretrained(tmp_path / "bert")
    assert "bert" in inspect(tmp_path / "bert").problem


# ------------------------------------------------------------------------------------------------------------------ kills

# Saves once more over a checkpoint and is killed at the given call of a function that touches the disk. What is killed
# is a fork, so that importing happens once; the model is made, and saved, in the fork alone.
KILLED = """
    import os, signal, sys
    import torch
    import transformers.modeling_utils as m
    from situations import patched_model
    calls = 0
    def counted(function):
        def call(*arguments, **options):
            global calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return call
    def save(folder):
        model = patched_model("alibi", "llama")   # another scheme, other weights, shards instead of one file
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        for name in ("mkdir", "link", "replace", "rename", "remove", "rmdir", "fsync"):
            setattr(os, name, counted(getattr(os, name)))
        m.safe_save_file = counted(m.safe_save_file)
        model.save_pretrained(folder, max_shard_size="20KB")
        print("calls", calls, flush=True)
    for argument in sys.argv[1:]:
        folder, step = argument.rsplit(":", 1)
        step = int(step)
        child = os.fork()
        if child == 0:
            save(folder)
            os._exit(0)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run_killed(*saves):
    """Save over each folder in a process that is killed at that step; return what each printed and how it ended."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            textwrap.dedent(KILLED),
            *(f"{folder}:{step}" for folder, step in saves),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.count("ended") == len(saves)
    return done.stdout.split(), done.stderr[-500:]


def saved_before(folder):
    model = patched_model("shaw", "llama")
    model.save_pretrained(folder)
    (folder / "mine.txt").write_text("kept")
    return logits(model)


def check_killed(folder, old, new):
    """Exactly the old model or exactly the new one, and the next save works."""
    found = logits(from_pretrained(folder))
    assert found.equal(old) or found.equal(new)
    assert (folder / "mine.txt").read_text() == "kept"
    model = patched_model("nope", "llama")
    model.save_pretrained(folder)
    assert logits(from_pretrained(folder)).equal(logits(model))
    assert not list(folder.glob(STAGING + "*"))
    assert not (folder / PENDING).exists()
    return found.equal(new)


def new_logits():
    model = patched_model("alibi", "llama")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    return logits(model)


def kill_at(steps, tmp_path):
    folders = [tmp_path / str(step) for step in steps]
    olds = [saved_before(folder) for folder in folders]
    printed, errors = run_killed(*zip(folders, steps, strict=True))
    assert printed == ["ended", "-9"] * len(folders), errors
    return [check_killed(folder, old, new_logits()) for folder, old in zip(folders, olds, strict=True)]


def calls_of_a_save(tmp_path):
    saved_before(tmp_path / "whole")
    printed, errors = run_killed((tmp_path / "whole", 0))
    assert printed[0] == "calls", errors
    assert printed[2:] == ["ended", "0"], errors
    assert logits(from_pretrained(tmp_path / "whole")).equal(new_logits())
    return int(printed[1])


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_or_the_new_model(tmp_path):
    count = calls_of_a_save(tmp_path)
    outcomes = kill_at([2, count // 3, count // 2, 2 * count // 3, count], tmp_path)
    assert not outcomes[0]
    assert outcomes[-1]
    assert outcomes == sorted(outcomes)  # once it is the new one it stays the new one


@pytest.mark.exhaustive
def test_a_save_killed_anywhere(tmp_path):
    outcomes = kill_at(range(1, calls_of_a_save(tmp_path) + 1), tmp_path)
    assert outcomes == sorted(outcomes)


def test_an_interrupted_save_is_read_as_complete_and_left_as_it_is(tmp_path):
    old = saved_before(tmp_path)
    pending = tmp_path / PENDING
    model = randomize(patched_model("shaw", "llama"), seed=9)
    model.save_pretrained(pending)
    (pending / "README.md").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = loader(tmp_path)
        assert logits(loaded).equal(logits(model))
        assert loaded.name_or_path == str(tmp_path)
    assert not logits(model).equal(old)
    assert inspect(tmp_path).scheme == "shaw"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(CheckpointError, match=r"hf_posenc\.checkpoints\.files\.complete"):
        from_pretrained(tmp_path, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path / "offloaded")
    assert complete(tmp_path)
    assert not complete(tmp_path)
    assert not pending.exists()
    assert logits(from_pretrained(tmp_path)).equal(logits(model))


def test_a_save_that_fails_changes_nothing(tmp_path, monkeypatch):
    old = saved_before(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match="No space left"):
        patched_model("alibi", "llama").save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert logits(from_pretrained(tmp_path)).equal(old)


STATES = {
    "behind a wrapper": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "partial": lambda state: {name: tensor for name, tensor in state.items() if "layers.1" not in name},
    "stock": lambda state: tiny("llama").state_dict(),
    "of another scheme": lambda state: patched_model("alibi", "llama").state_dict(),
    "empty": lambda state: {},
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_dict_of_another_model_is_refused_before_the_folder_is_touched(what, tmp_path):
    old = saved_before(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = patched_model("shaw", "llama")
    with pytest.raises(
        hf_posenc.UnsupportedModelError, match=r"state_dict is not of this PosEncLlama.* it (lacks|has) "
    ):
        model.save_pretrained(tmp_path, state_dict=STATES[what](model.state_dict()))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert logits(from_pretrained(tmp_path)).equal(old)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])  # tied, not tied, tied
def test_a_state_dict_of_this_model_is_saved(family, tmp_path):
    model = patched_model("shaw", family)
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]  # as DeepSpeed gathers it
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = from_pretrained(tmp_path)
    assert all(tensor.equal(2 * model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


# ----------------------------------------------------------------------------------------------------------- stock export

SCALED = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("family", [family for family in ROTARY if family != "gemma3"])
@pytest.mark.parametrize("scaling", [None, SCALED], ids=["plain", "linear"])
def test_rope_is_exported(family, scaling, tmp_path):
    if family == "phi3" and scaling:
        pytest.skip("Phi-3's own config takes no scaling but longrope, so that patching it by another is refused")
    model = patch_model(tiny(family), "rope", rope_theta=100.0, scaling=scaling)
    export_stock(model, tmp_path)
    stock = type(tiny(family)).from_pretrained(tmp_path)
    assert not isinstance(stock, hf_posenc.checkpoints.model_classes.PosEncMixin)
    assert_same(logits(stock), logits(model))
    if scaling:  # GPT-NeoX turns one pair here, whose frequency is 1 whatever rope_theta is
        assert distance(logits(stock), logits(tiny(family))) > 1e-2
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == tiny(family).config.model_type


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_nope_is_exported_as_smollm3(family, tmp_path):
    model = patched_model("nope", family)
    export_stock(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock) is transformers.SmolLM3ForCausalLM
    assert_same(logits(stock), logits(model))


@pytest.mark.parametrize("family", LEARNED)
@pytest.mark.parametrize("case", ["learned", "sinusoidal"])
def test_tables_are_baked(case, family, tmp_path):
    model = patched_model(case, family)
    export_stock(model, tmp_path, num_positions=40)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock) is type(tiny(family))
    assert_same(logits(stock), logits(model))
    assert stock.config.max_position_embeddings == 40


STOCK = {"rope": set(ROTARY), "nope": {"llama", "smollm3"}, "learned": set(LEARNED), "sinusoidal": set(LEARNED)}
"""Scheme -> the families of which a stock class computes it. The tests above compare them."""
NO_STOCK_CLASS = [
    (case, family) for case in SCHEMES for family in FAMILIES if family not in STOCK.get(CASES[case][0], ())
]


@matrix(NO_STOCK_CLASS, case=None, family=None)
def test_what_no_stock_class_computes(case, family, tmp_path):
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no stock class computes"):
        export_stock(patched_model(case, family), tmp_path)
    assert not list(tmp_path.iterdir())


def test_export_does_not_overwrite_a_patched_checkpoint(tmp_path):
    model = patched_model("rope", "llama")
    model.save_pretrained(tmp_path)
    with pytest.raises(FileExistsError, match="another folder"):
        export_stock(model, tmp_path)


def test_the_marker_is_the_only_buffer_we_add():
    for case in SCHEMES:
        model = patched_model(case, "llama")
        stock = {name for name, _ in tiny("llama").named_buffers()}
        added = {name for name, _ in model.named_buffers() if "rotary" not in name} - stock
        names = {CASES[case][0]} | ({"base"} if case in JOINING else set())  # a layer keeps the base's positions, too
        assert added == {f"model.layers.{layer}.hf_posenc_{name}" for layer in range(2) for name in names}
        assert all(not module._buffers for module in model.modules() if isinstance(module, PositionModule))
        assert isinstance(model, PreTrainedModel)


# ------------------------------------------------------------------------------------------------------ what loads as


@pytest.mark.rows(default=0)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_next"])
def test_experts_run_as_in_a_stock_model(tmp_path, model_type):
    """In a process that built no stock model of the class: what transformers finds out of one, its sub-classes have."""
    patch_model(decoder(model_type), "alibi").save_pretrained(tmp_path / "patched")
    decoder(model_type).save_pretrained(tmp_path / "stock")
    code = f"""
        from transformers import AutoModelForCausalLM
        from hf_posenc import from_pretrained
        loaded = from_pretrained({str(tmp_path / "patched")!r})
        asked = from_pretrained({str(tmp_path / "patched")!r}, experts_implementation="grouped_mm")
        stock = AutoModelForCausalLM.from_pretrained({str(tmp_path / "stock")!r})
        print(*(each.config._experts_implementation for each in (stock, loaded, asked)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    stock, loaded, asked = done.stdout.split()
    assert loaded == stock
    assert asked == "grouped_mm"


@pytest.mark.parametrize("scheme", ["alibi", "rope"])
@pytest.mark.parametrize("load", [from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_attention_weights_asked_for_when_loading(tmp_path, scheme, load):
    """A stock model that is asked for them is loaded with attention that has them."""
    patched_model(scheme, "llama").save_pretrained(tmp_path)
    loaded = load(tmp_path, output_attentions=True)
    weights = loaded(tokens()).attentions
    assert len(weights) == loaded.config.num_hidden_layers
    for each in weights:
        assert_same(each.sum(-1), torch.ones_like(each[..., 0]))
