"""Saved models load as what they are, or not at all: round trips, ways to load, bad checkpoints, kills, stock export."""

import json
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
from multimodal import multimodal
from situations import CASES, JOINING, SCHEMES, assert_same, distance, patched_model, randomize
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import hf_posenc
from hf_posenc import CheckpointError, UnknownSchemeError, describe, export_stock, from_pretrained, inspect, patch_model
from hf_posenc.checkpoints.class_names import STUB
from hf_posenc.checkpoints.export import engines_that_run
from hf_posenc.checkpoints.files import PENDING, complete
from hf_posenc.core.modules import PositionModule

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
    change(config)
    path.write_text(json.dumps(config))


def python(code, *arguments, check=True, **environment):
    """Run code in a new process, which has imported nothing of ours."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
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
    loaded = from_pretrained(tmp_path)  # in the dtype that the config says
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
    assert configs[0] == configs[1]


PLACES = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"], "cpu")
PLACES["model.layers.1"] = "disk"


@pytest.mark.parametrize("case", ["rope", "shaw-shared", "learned"])
@pytest.mark.parametrize("place", ["auto", "disk"])
def test_device_maps(case, place, tmp_path):
    model = patched_model(case, "llama")
    model.save_pretrained(tmp_path)
    options = {"device_map": place}
    if place == "disk":
        places = PLACES | ({"model.posenc": "cpu"} if case == "shaw-shared" else {})
        options = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    assert_same(logits(from_pretrained(tmp_path, **options)), logits(model))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_stock_checkpoint_is_patched_while_loading(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, scheme="shaw", max_distance=5, seed=3)
    assert logits(loaded).equal(logits(patch_model(tiny(family), "shaw", max_distance=5, seed=3)))
    hf_posenc.unpatch_model(loaded)
    assert logits(loaded).equal(logits(tiny(family)))
    low = from_pretrained(tmp_path, scheme=hf_posenc.core.registry.scheme_class("alibi")(), dtype=torch.bfloat16)
    assert low.dtype == torch.bfloat16


def test_a_stock_checkpoint_is_patched_and_dispatched(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    options = {"device_map": PLACES, "offload_folder": str(tmp_path / "offloaded")}
    loaded = from_pretrained(tmp_path, scheme="shaw", seed=3, **options)
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


EQUAL = {
    "hf_posenc.from_pretrained": from_pretrained,
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained,
    "AutoModelForCausalLM, trust_remote_code": lambda f: AutoModelForCausalLM.from_pretrained(
        f, trust_remote_code=True
    ),
    "our concrete class": lambda f: getattr(
        hf_posenc.classes, json.loads((f / "config.json").read_text())["architectures"][0]
    ).from_pretrained(f),
    "from_config, then the state dict": from_config,
    "a newer minor version": lambda f: from_pretrained(edited_version(f, "0.99.0")),
    "pickle": lambda f: __import__("pickle").loads(__import__("pickle").dumps(from_pretrained(f))),
}

REFUSED = {
    "the stock class": lambda f: stock_class_of(f).from_pretrained(f),
    "the stock class, eager attention": lambda f: stock_class_of(f).from_pretrained(f, attn_implementation="eager"),
    "the stock bare class": lambda f: type(tiny_of(f).base_model).from_pretrained(f, attn_implementation="eager"),
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


@matrix(way=EQUAL, case=["alibi", "shaw-shared", "rope", "learned"], family=["gpt2", "llama"])
def test_ways_that_load_the_same_model(way, case, family, tmp_path):
    model = patched_model(case, family)
    model.save_pretrained(tmp_path)
    loaded = EQUAL[way](tmp_path)
    assert logits(loaded.eval()).equal(logits(model))
    assert hf_posenc.verify(loaded).ok


@matrix(way=REFUSED, case=["alibi", "shaw-shared", "rope", "learned"], family=["gpt2", "opt"])
def test_ways_that_are_refused(way, case, family, tmp_path):
    patched_model(case, family).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="posenc") as caught:  # KeyError, ValueError, RuntimeError
        REFUSED[way](tmp_path)
    assert not isinstance(caught.value, (AttributeError, AssertionError))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_attention_implementation_at_loading_does_not_drop_the_scheme(implementation, tmp_path):
    for case in ("t5", "rope"):
        model = patched_model(case, "llama")
        model.save_pretrained(tmp_path / case)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / case, attn_implementation=implementation)
        assert_same(logits(loaded), logits(model))
    with pytest.raises(ValueError, match="would drop t5"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "t5", attn_implementation="flash_attention_2")


LOAD = """
    import torch, sys
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained({folder!r}, {options})
    torch.save(model(torch.load({ids!r}), use_cache=False).logits, {out!r})
    assert ("hf_posenc" in sys.modules) == {imported}
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
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


@pytest.mark.skipif("internlm3" not in transformers.CONFIG_MAPPING, reason="of a newer transformers")
def test_a_model_type_whose_models_are_those_of_another(tmp_path):
    """Its config class is its own, its model classes are LLaMA's, and what is loaded is still of its type."""
    model_type = "internlm3"
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


@pytest.mark.parametrize("model_type", ["qwen3_5", "llama4"])
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
def test_a_patched_part_of_a_stock_model_is_saved(whole, tmp_path):
    model = multimodal("qwen3_5") if whole == "multimodal" else tiny("llama")
    inner = patch_model(model.base_model.language_model if whole == "multimodal" else model.model, "alibi")
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
    """Also of a model that was loaded by `trust_remote_code=True`, whose code transformers would save again."""
    patched_model("shaw", "llama").save_pretrained(tmp_path / "0")
    AutoModelForCausalLM.from_pretrained(tmp_path / "0", trust_remote_code=True).save_pretrained(tmp_path / "1")
    for folder in (tmp_path / "0", tmp_path / "1"):
        files = {path.name for path in folder.iterdir()}
        assert files - {"README.md", "config.json", "generation_config.json"} == {f"{STUB}.py", "model.safetensors"}
        comment, line = (folder / f"{STUB}.py").read_text().splitlines()
        assert (comment[0], line.startswith("from hf_posenc.classes import PosEncLlama")) == ("#", True)


def test_trainer_resumes(tmp_path):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in tokens(8, 16)]

    def train(steps, resume=None):
        options = {"max_steps": steps, "save_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "seed": 1}
        options |= {"lr_scheduler_type": "constant", "disable_tqdm": True, "save_strategy": "steps"}
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, **options)
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


def with_setting(**values):
    return lambda config: config.update(values)


def calibrated(**record):
    return lambda config: config["position_encoding"].update(calibration=record)


BAD_CONFIGS = {
    "no entry": ("shaw", "llama", lambda config: config.pop("position_encoding"), "no position_encoding"),
    "a typo in the scheme": ("shaw", "llama", with_entry(scheme="shav"), "unknown scheme 'shav'; choose from alibi"),
    "an unknown key": ("shaw", "llama", with_entry(max_distanse=3), "no hyper-parameter max_distanse"),
    "a missing key": ("shaw", "llama", without("max_distance"), "lacks max_distance of shaw"),
    "a value out of range": ("shaw", "llama", with_entry(max_distance=-1), "max_distance"),
    "an entry that is no dict": ("shaw", "llama", with_setting(position_encoding="shaw"), "no position_encoding"),
    "too few layer types": ("t5", "gemma2", with_setting(layer_types=["full_attention"]), "index out of range"),
    "an unknown stage": ("t5", "llama", calibrated(stage="x", tokens=3), "calibration must hold a stage"),
}


@pytest.mark.parametrize("what", BAD_CONFIGS)
def test_bad_configs(what, tmp_path):
    case, family, change, message = BAD_CONFIGS[what]
    patched_model(case, family).save_pretrained(tmp_path)
    edit_config(tmp_path, change)
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises((ValueError, LookupError), match=message):
            loader(tmp_path)
    assert re.search(message, str(inspect(tmp_path).problem))


def test_losses_of_a_calibration_are_kept_and_shown(tmp_path):
    losses = {"base": 1.34, "swapped": 2.81, "calibrated": 1.93}
    found = {"stage": "matching", "tokens": 81234, "held_out_loss": losses}
    model = patched_model("alibi", "llama")
    model.config.position_encoding["calibration"] = found
    model.save_pretrained(tmp_path)
    from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert inspect(tmp_path / "again").calibration == found
    shown = "held-out loss 2.81 -> 1.93 nats per token (base 1.34)"
    assert f"\n  calibrated  with 81,234 tokens, stage matching; {shown}\n" in str(inspect(tmp_path / "again"))
    assert shown.replace("->", "-&gt;") in (tmp_path / "again/README.md").read_text()


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
    assert [line[:14] for line in lines[1:]] == ["  base        ", "  saved by    ", "  loadable    "]
    assert lines[3].startswith("  loadable    no: ")


def change_weights(folder, change):
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    change(state)
    safetensors.torch.save_file(state, path, metadata={"format": "pt"})


TABLE = "model.layers.1.self_attn.posenc.key_embeddings"


def shorten(state):
    state[TABLE] = state[TABLE][:-1].clone()


BAD_WEIGHTS = {
    "a missing parameter": (lambda state: state.pop(TABLE), r"missing: (model\.)?layers.1.self_attn.posenc"),
    "a missing stock weight": (lambda state: state.pop("model.norm.weight"), r"missing: (model\.)?norm\.weight"),
    "a table one row short": (shorten, r"of another shape: (model\.)?layers.1.self_attn.posenc.key_embeddings"),
    "an unexpected parameter": (
        lambda state: state.update({"model.layers.0.self_attn.posenc.slopes": torch.zeros(4)}),
        r"unexpected: (model\.)?layers.0.self_attn.posenc.slopes",
    ),
    "another scheme's weights": (
        lambda state: state.update({"model.layers.0.hf_posenc_alibi": state.pop("model.layers.0.hf_posenc_shaw")}),
        r"missing: (model\.)?layers.0.hf_posenc_shaw; unexpected: (model\.)?layers.0.hf_posenc_alibi",
    ),
}


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_bad_weights(what, tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    change, message = BAD_WEIGHTS[what]
    change_weights(tmp_path, change)
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained, AutoModel.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            loader(tmp_path)


def test_broken_files(tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(safetensors.SafetensorError, match="not fully covered"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "posenc_llama", ')
    with pytest.raises(CheckpointError, match="is no valid JSON"):
        from_pretrained(tmp_path)
    # A table of another shape is not ignored where transformers is told to ignore shapes.
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    change_weights(tmp_path, shorten)
    with pytest.raises(CheckpointError, match=f"of another shape: {TABLE}"):
        AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


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
    with pytest.raises(CheckpointError, match="without scheme and seed"):
        from_pretrained(tmp_path / "ours", seed=3)
    with pytest.raises(ValueError, match="unknown attention 'fast'; choose from auto, sdpa"):
        from_pretrained(tmp_path / "ours", attention="fast")
    with pytest.raises(OSError, match="nowhere"):
        from_pretrained(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_reads_no_weights(tmp_path):
    model = patched_model("shaw", "gpt2")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = inspect(tmp_path)
    assert (found.base, found.architecture, found.scheme) == ("gpt2", "PosEncGPT2LMHeadModel", "shaw")
    assert (found.schemes[0]["max_distance"], found.version) == (5, hf_posenc.__version__)
    assert found.problem is None
    inspected, described = (str(text).splitlines()[0].split(": ", 1)[1] for text in (found, describe(model)))
    assert inspected == described
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
        model = patched_model("alibi", "llama", seed=1)   # another scheme, other weights, shards instead of one file
        for name in ("mkdir", "link", "replace", "rename", "remove", "unlink", "rmdir", "fsync"):
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


def run_killed(saves):
    """Save over each folder in a process that is killed at that step; return what each printed and how it ended."""
    return python(KILLED, *(f"{folder}:{step}" for folder, step in saves.items())).stdout.split()


def saved_before(folder):
    model = patched_model("shaw", "llama")
    model.save_pretrained(folder)
    (folder / "mine.txt").write_text("kept")
    return logits(model)


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_or_the_new_model(tmp_path):
    """Exactly the old model or exactly the new one, once it is the new one it stays that, and the next save works."""
    saved_before(tmp_path / "whole")
    word, count, *ended = run_killed({tmp_path / "whole": 0})
    assert [word, *ended] == ["calls", "ended", "0"]
    new = logits(patched_model("alibi", "llama", seed=1))
    assert logits(from_pretrained(tmp_path / "whole")).equal(new)
    saves = {tmp_path / str(step): step for step in range(1, int(count) + 1)}
    olds = [saved_before(folder) for folder in saves]
    assert run_killed(saves) == ["ended", "-9"] * len(saves)
    outcomes = []
    for folder, old in zip(saves, olds, strict=True):
        found = logits(from_pretrained(folder))
        assert found.equal(old) or found.equal(new), folder
        outcomes.append(found.equal(new))
        model = patched_model("nope", "llama")
        model.save_pretrained(folder)
        assert logits(from_pretrained(folder)).equal(logits(model))
        assert (folder / "mine.txt").read_text() == "kept"
        assert not list(folder.glob(".hf_posenc*"))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_an_interrupted_save_is_read_as_complete_and_left_as_it_is(tmp_path):
    """Also where the config is still that of a stock model. Auto classes read that config themselves, and are stopped."""
    for old in (patched_model("alibi", "llama"), tiny("llama")):
        folder = tmp_path / type(old).__name__
        old.save_pretrained(folder)
        model = randomize(patched_model("shaw", "llama"), seed=9)
        model.save_pretrained(folder / PENDING)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        loaded = from_pretrained(folder)
        assert logits(loaded).equal(logits(model))
        assert loaded.name_or_path == str(folder)
        assert inspect(folder).scheme == "shaw"
        if hf_posenc.is_patched(old):
            with pytest.raises(CheckpointError, match=r"was interrupted.*hf_posenc\.from_pretrained"):
                AutoModelForCausalLM.from_pretrained(folder)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        complete(folder)
        assert not (folder / PENDING).exists()
        assert logits(AutoModelForCausalLM.from_pretrained(folder)).equal(logits(model))


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


def test_a_state_dict_of_another_model_is_refused_before_the_folder_is_touched(tmp_path):
    saved_before(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = patched_model("shaw", "llama")
    state = model.state_dict()
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    partial = {name: tensor for name, tensor in state.items() if "layers.1" not in name}
    for other in (wrapped, partial, patched_model("alibi", "llama").state_dict(), {}):
        with pytest.raises(hf_posenc.UnsupportedModelError, match=r"state_dict is not of this PosEncLlama.* it lacks "):
            model.save_pretrained(tmp_path, state_dict=other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


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
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == tiny(family).config.model_type
    assert config.pop("rope_parameters") == stock.config.rope_parameters
    # Without it, transformers 5 reads the config as one of transformers 4, by code of its own for each type.
    assert type(stock.config).from_dict(config).rope_parameters == stock.config.rope_parameters


@pytest.mark.parametrize(
    ("hyperparameters", "expected"),
    [
        ({"rope_theta": 4e5}, {"rope_theta": 4e5, "rope_scaling": None}),
        ({"scaling": SCALED}, {"rope_theta": 1e4, "rope_scaling": SCALED}),
        (
            {"frequencies": {"name": "soft_clip", "pairs": 2}},
            {"rope_theta": 1e4, "original_max_position_embeddings": 64},
        ),
    ],
    ids=["theta", "linear", "soft_clip"],
)
def test_an_export_says_its_rotation_to_transformers_4(hyperparameters, expected, tmp_path):
    """That reads these keys alone, and without them turns by a base of 10,000."""
    export_stock(patch_model(tiny("llama"), "rope", **hyperparameters), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert expected.items() <= config.items()
    if "frequencies" in hyperparameters:
        assert config["rope_scaling"] == {k: v for k, v in config["rope_parameters"].items() if k != "rope_theta"}


def test_an_export_that_transformers_4_would_read_wrong_says_so(tmp_path):
    model = patch_model(tiny("gemma3"), "rope", rope_theta=4e5)
    export_stock(model, tmp_path / "theta")
    config = json.loads((tmp_path / "theta" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_local_base_freq"], config["rope_scaling"]) == (4e5, 4e5, None)
    model = patch_model(tiny("gemma3"), "rope", scaling=SCALED)  # also in the layers with a window
    with pytest.warns(UserWarning, match="transformers 4 cannot read the rotation of gemma3_text"):
        export_stock(model, tmp_path / "linear")
    assert "rope_scaling" not in json.loads((tmp_path / "linear" / "config.json").read_text())
    assert_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "linear")), logits(model))
    # The rotary modules of its decoder are both made from `config.rope_theta`, which is the global one.
    with pytest.warns(UserWarning, match="transformers 4 cannot read the rotation of modernbert-decoder"):
        export_stock(patch_model(decoder("modernbert-decoder"), "rope"), tmp_path / "two")


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_nope_is_exported_as_smollm3(family, tmp_path):
    model = patched_model("nope", family)
    export_stock(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock) is transformers.SmolLM3ForCausalLM
    assert_same(logits(stock), logits(model))


def test_heads_of_any_size_are_exported_as_smollm3(tmp_path):
    model = patch_model(tiny("llama", head_dim=32), "nope", layers=[1])
    export_stock(model, tmp_path)
    assert_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize(
    ("schemes", "model_type"),
    [
        ([hf_posenc.schemes.rope.Rope(window=5)], "mistral"),
        ([hf_posenc.schemes.rope.Rope(window=5, layers=[0])], "smollm3"),
        ([hf_posenc.schemes.rope.Rope(window=5, layers=[0]), hf_posenc.schemes.nope.Nope(layers=[1])], "smollm3"),
    ],
    ids=["everywhere", "some layers", "beside nope"],
)
def test_a_window_is_exported(schemes, model_type, tmp_path):
    model = patch_model(tiny("llama"), schemes)
    export_stock(model, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config.model_type == model_type
    assert_same(logits(stock), logits(model))
    assert distance(logits(stock), logits(tiny("llama"))) > 1e-2


def test_windows_that_no_stock_class_has(tmp_path):
    several = [hf_posenc.schemes.rope.Rope(window=5, layers=[0]), hf_posenc.schemes.rope.Rope(window=6, layers=[1])]
    for schemes in (several, [hf_posenc.schemes.rope.Rope(window=5, sinks=1)]):
        with pytest.raises(hf_posenc.UnsupportedModelError, match="both also with one window"):
            export_stock(patch_model(tiny("llama"), schemes), tmp_path)


def test_yarn_says_how_long_texts_may_be_and_what_runs_it(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for scaling, length, runs in (
        (yarn, 256, "runs in transformers 4 and 5 and, if it has llama, vLLM"),
        ({"rope_type": "dynamic", "factor": 2.0}, 64, "not in vLLM: its dynamic scaling gives NaN"),
    ):
        model = patch_model(tiny("llama"), "rope", scaling=scaling)
        export_stock(model, tmp_path / scaling["rope_type"])
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / scaling["rope_type"])
        assert_same(logits(stock), logits(model))
        assert stock.config.max_position_embeddings == length
        assert runs in engines_that_run(stock.config)
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "attention_factor": 1.0}
    config = transformers.LlamaConfig(max_position_embeddings=256, rope_parameters={"rope_theta": 1e4, **factors,
        "original_max_position_embeddings": 64})  # fmt: skip
    assert "an attention factor of 1.155, not 1" in engines_that_run(config)
    for size, advice in ((96, "head_dim=128 is for all"), (160, "head_dim=256 is for all"), (288, "FlashInfer)")):
        config = transformers.LlamaConfig(head_dim=size)
        assert advice in engines_that_run(config)


@pytest.mark.parametrize("family", LEARNED)
@pytest.mark.parametrize("case", ["learned", "sinusoidal"])
def test_tables_are_baked(case, family, tmp_path):
    model = patched_model(case, family)
    export_stock(model, tmp_path, num_positions=40)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stock) is type(tiny(family))
    assert_same(logits(stock), logits(model))
    assert stock.config.max_position_embeddings == 40


NO_STOCK_CLASS = [("kerple", "llama"), ("nope", "gpt2"), ("rope", "opt"), ("learned", "llama")]


@pytest.mark.parametrize(("case", "family"), NO_STOCK_CLASS)
def test_what_no_stock_class_computes(case, family, tmp_path):
    model = patched_model(case, family)
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no stock class computes"):
        export_stock(model, tmp_path)
    assert not list(tmp_path.iterdir())
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
    stock, loaded, asked = python(code).stdout.split()
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


READ = """
import sys, torch
from transformers import AutoModelForCausalLM, __version__
assert __version__.startswith("4."), __version__
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.save(model(torch.load(f"{folder}/tokens.pt")).logits, f"{folder}/logits.pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "HF_POSENC_TRANSFORMERS4" not in os.environ,
    reason="HF_POSENC_TRANSFORMERS4=/path/to/python, one that has transformers 4.57 and torch, runs this",
)
def test_transformers_4_computes_what_was_exported(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    clip = {"name": "soft_clip", "pairs": 2}
    rotations = {"theta": {"rope_theta": 4e5}, "yarn": {"scaling": yarn}, "clip": {"frequencies": clip}}
    unread = {"gemma3-yarn", "gemma3-clip"}  # with a warning
    # Refused by transformers 4 itself: its classes of these types take no other scaling. GPT-NeoX turns one pair here.
    unread |= {"olmo2-yarn", "olmo2-clip", "phi3-yarn", "phi3-clip", "gpt_neox-clip"}
    expected = {}
    for family in ROTARY:
        for name, rotation in rotations.items():
            if f"{family}-{name}" not in unread:
                model = patch_model(tiny(family), "rope", **rotation)
                expected[tmp_path / f"{family}-{name}"] = model
    expected[tmp_path / "llama-nope"] = patch_model(tiny("llama", rope_theta=4e5), "nope", layers=[1])
    expected[tmp_path / "llama-wide"] = patch_model(tiny("llama"), "transformer_xl", seed=0)
    ids = tokens(2, 200)
    for folder, model in expected.items():
        export_stock(model, folder)
        torch.save(ids, folder / "tokens.pt")
    python = os.environ["HF_POSENC_TRANSFORMERS4"]
    subprocess.run([python, "-c", READ, *expected], check=True, env=os.environ | {"PYTHONPATH": ""})
    for folder in expected:
        stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        assert_same(torch.load(folder / "logits.pt"), stock(ids).logits)
