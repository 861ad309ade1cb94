"""lora_config: what it trains, that it comes back by every way PEFT has, and onto which bases an adapter does not go."""

import json

import peft
import pytest
import torch
import transformers
from families import FAMILIES, LEARNED, tiny, tokens
from matrix import matrix
from packaging.version import Version
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from situations import CASES, EMBEDDING_SCHEMES, JOINING, SCHEMES, assert_same, distance, patched_model, randomize
from transformers import Trainer, TrainingArguments

import hf_posenc
from hf_posenc import (
    CheckpointError,
    NotPatchedError,
    UnsupportedModelError,
    from_pretrained,
    load_adapter,
    lora_config,
    unpatch_model,
)
from hf_posenc.core.modules import PositionModule

IDS = tokens(2, 20)
SAVED = ("gpt2", "llama", "opt", "gemma2", "gpt_neox")

pytestmark = [
    # Adapters of any kind on models that are patched and not trained; test_a_plain_adapter_warns has the warning.
    pytest.mark.filterwarnings("ignore:this adapter neither trains nor saves the position parameters:UserWarning"),
    # peft 0.21 asks for it by the name that transformers 5.23 renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # Merging embeddings of their own into a model whose output embeddings stay (GPT-2): PEFT says so.
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def trained(case, family, folder, **options):
    """Save a patched base, load it, train an adapter on it for a few steps and save that: wrapped model, its start."""
    patched_model(case, family).save_pretrained(folder / "base")
    base = from_pretrained(folder / "base")
    before = logits(base)
    wrapped = get_peft_model(base, lora_config(base, r=4, **options)).train()
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        wrapped(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped.eval().save_pretrained(folder / "adapter")
    return wrapped, before


@pytest.mark.rows(default=4, slow=30)
@matrix(case=CASES, family=SAVED)
def test_an_adapter_comes_back(case, family, tmp_path):
    wrapped, before = trained(case, family, tmp_path)
    expected = logits(wrapped)
    assert distance(expected, before) > 1e-3
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    assert logits(load_adapter(from_pretrained(base), adapter)).equal(expected)
    assert logits(PeftModel.from_pretrained(from_pretrained(base), adapter)).equal(expected)
    auto = AutoPeftModelForCausalLM.from_pretrained(adapter)
    assert logits(auto).equal(expected)
    merged = auto.merge_and_unload()
    assert_same(logits(merged), expected)
    if family == "gemma2":  # its embeddings are tied
        assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    merged.save_pretrained(tmp_path / "merged")
    assert_same(logits(from_pretrained(tmp_path / "merged")), expected)
    assert hf_posenc.verify(merged).ok


@pytest.mark.filterwarnings("error:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_names_the_folder_of_its_base(tmp_path):
    """Not the stock checkpoint, which computes something else; and before the patched model is saved, nothing."""
    tiny("llama").save_pretrained(tmp_path / "stock")
    for saved, name in ((False, None), (True, str(tmp_path / "base"))):
        model = from_pretrained(tmp_path / "stock", scheme="t5")
        if saved:
            model.save_pretrained(tmp_path / "base")
        arguments = TrainingArguments(str(tmp_path / "runs"), use_cpu=True, report_to=[])
        wrapped = get_peft_model(model, lora_config(model, r=2))
        Trainer(wrapped, arguments).save_model(tmp_path / "adapter")
        written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"]
        assert (written or None) == name  # peft 0.20 writes an empty name
    assert logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")).equal(logits(wrapped.eval()))


def test_a_config_is_made_before_the_first_adapter():
    with pytest.raises(NotPatchedError, match=r"peft\.LoraConfig"):
        lora_config(tiny("llama"))
    model = patched_model("t5", "llama")
    config = lora_config(model, r=2)
    wrapped = get_peft_model(model, config)
    wrapped.add_adapter("second", config)
    for adapted in (wrapped, wrapped.get_base_model()):
        with pytest.raises(UnsupportedModelError, match="call lora_config before the first adapter is"):
            lora_config(adapted)


@pytest.mark.rows(default=6)
@matrix(case=SCHEMES, family=FAMILIES)
def test_what_is_trained(case, family):
    model = patched_model(case, family)
    owned = sum(
        p.numel() for m in model.modules() if isinstance(m, PositionModule) for p in m.parameters(recurse=False)
    )
    norms = sum(
        p.numel()
        for m in model.modules()
        if type(m).__name__.endswith("Norm") and not isinstance(m, PositionModule)
        for p in m.parameters(recurse=False)
    )
    embeddings = model.get_input_embeddings().weight.numel()
    # A table is taken from the input, or vectors are new there: gpt2, opt, and the two schemes that add some.
    needed = (family in LEARNED and case not in JOINING) or CASES[case][0] in EMBEDDING_SCHEMES

    def whole(**options):
        model = patched_model(case, family)
        wrapped = get_peft_model(model, lora_config(model, r=4, **options))
        names = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
        assert any("lora_" in name for name in names)
        return sum(p.numel() for name, p in names.items() if "lora_" not in name)

    assert whole() == owned + norms + (embeddings if needed else 0)
    assert whole(embeddings=True) == owned + norms + embeddings
    assert whole(norms=False, embeddings=False) == owned
    assert whole(norms=False, embeddings=False, positions=False) == 0


@pytest.mark.rows(default=6)
@matrix(case=SCHEMES, family=["gpt2", "llama"])
def test_an_adapter_refuses_another_base(case, family, tmp_path):
    trained(case, family, tmp_path)
    other = "alibi" if case != "alibi" else "nope"
    for base in (tiny(family), patched_model(other, family), unpatch_model(patched_model(case, family))):
        with pytest.raises(CheckpointError, match=f"was trained on .*'scheme': '{case}'"):
            load_adapter(base, tmp_path / "adapter")
        assert not isinstance(base, PeftModel)
    entry = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["auto_mapping"]
    assert entry["position_encoding"]["schemes"][0]["scheme"] == case


@pytest.mark.filterwarnings("error:this adapter neither trains nor saves the position parameters:UserWarning")
@pytest.mark.parametrize(("case", "family"), [("t5", "llama"), ("learned", "gpt2")])
def test_a_plain_adapter_warns_of_position_parameters_that_nothing_trains(case, family, tmp_path):
    plain = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", "fan_in_fan_out": family == "gpt2"}

    def fresh():
        return hf_posenc.patch_model(tiny(family), case, seed=0)

    name = "wpe" if case == "learned" else "posenc"
    message = rf"position parameters of {case} \(.*{name}.*which nothing has trained.*use hf_posenc.lora_config"
    with pytest.warns(UserWarning, match=message):
        get_peft_model(fresh(), peft.LoraConfig(**plain))
    with pytest.warns(UserWarning, match=message):
        fresh().add_adapter(peft.LoraConfig(**plain))
    # Trained with the adapter, left out on purpose, only used, trained before, calibrated before, without parameters:
    get_peft_model(fresh(), peft.LoraConfig(**plain, modules_to_save=[name]))
    model = fresh()
    get_peft_model(model, lora_config(model, positions=False))
    get_peft_model(fresh(), peft.LoraConfig(**plain, inference_mode=True))
    get_peft_model(randomize(fresh()), peft.LoraConfig(**plain))
    model = fresh()
    model.config.position_encoding["calibration"] = {"stage": "matching", "tokens": 3}
    get_peft_model(model, peft.LoraConfig(**plain))
    get_peft_model(patched_model("alibi", family), peft.LoraConfig(**plain))
    fresh().save_pretrained(tmp_path)
    get_peft_model(from_pretrained(tmp_path), peft.LoraConfig(**plain))


def test_target_modules_are_found_by_model_type():
    wrapped = get_peft_model(patched_model("alibi", "llama"), LoraConfig(task_type="CAUSAL_LM"))
    assert any("q_proj.lora_A" in name for name, _ in wrapped.named_parameters())


# ---------------------------------------------------------------------------------------------- every kind that PEFT has

TARGETS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
INSIDE = {
    "lora": lambda: peft.LoraConfig(**TARGETS),
    "posenc": lambda: peft.LoraConfig(**TARGETS, modules_to_save=["posenc"]),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    "oft": lambda: peft.OFTConfig(**TARGETS, oft_block_size=4),
}
PROMPTS = {"prefix": lambda: peft.PrefixTuningConfig(**VIRTUAL), "prompt": lambda: peft.PromptTuningConfig(**VIRTUAL)}
KINDS = {**INSIDE, **PROMPTS}


def drawn(model, config):
    """Wrap a model in an adapter that does something."""
    wrapped = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted((n, p) for n, p in wrapped.named_parameters() if p.requires_grad):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return wrapped


@pytest.mark.rows(default=6)
@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live", [True, False], ids=["live", "loaded"])
def test_an_adapter_of_any_kind_knows_its_base(kind, live, tmp_path):
    """Of a model that was patched in memory, or loaded from a checkpoint, which the adapter then names."""
    patched_model("shaw", "llama").save_pretrained(tmp_path / "base")

    def base():
        return patched_model("shaw", "llama") if live else from_pretrained(tmp_path / "base")

    model, config = base(), KINDS[kind]()
    given = {**vars(config)}
    wrapped = drawn(model, hf_posenc.checkpoints.lora.name_base(model, config) if live and kind in PROMPTS else config)
    assert config.auto_mapping is given["auto_mapping"] is None  # a config of the user's stays what it is
    wrapped.save_pretrained(tmp_path / "here/adapter")
    expected = logits(wrapped)
    adapter = tmp_path / "here/adapter"
    assert distance(expected[:, -20:], logits(base())) > 1e-3  # prompts come before the tokens
    assert logits(load_adapter(base(), adapter)).equal(expected)
    assert logits(load_adapter(base(), tmp_path / "here", subfolder="adapter")).equal(expected)
    for other in (tiny("llama"), patched_model("alibi", "llama"), patched_model("shaw-shared", "llama")):
        with pytest.raises(CheckpointError, match=r"was trained on .*'scheme': 'shaw'"):
            load_adapter(other, adapter)


def test_gates_beside_the_keys_take_prompts_but_no_prefix():
    def gated(kind):
        return get_peft_model(patched_model("forgetting", "llama"), PROMPTS[kind]()).eval()

    assert logits(gated("prompt")).isfinite().all()
    with pytest.raises(ValueError, match=r"PEFT's prefix tuning .* take prompt tuning or LoRA instead"):
        logits(gated("prefix"))


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_an_adapter_of_a_stock_base(kind, tmp_path):
    tiny("llama").save_pretrained(tmp_path / "base")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = drawn(base, KINDS[kind]())
    wrapped.save_pretrained(tmp_path / "adapter")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"was trained on stock positions, this model has .*'scheme': 'alibi'"):
        load_adapter(hf_posenc.patch_model(again, "alibi"), tmp_path / "adapter")
    unpatch_model(again)
    assert logits(load_adapter(again, tmp_path / "adapter")).equal(logits(wrapped))


def stretched(factor):
    return hf_posenc.patch_model(tiny("llama"), "rope", scaling={"rope_type": "yarn", "factor": factor})


def test_peft_itself_refuses_a_patched_base_with_other_numbers(tmp_path):
    wrapped = drawn(stretched(8.0), KINDS["lora"]())
    wrapped.save_pretrained(tmp_path)
    assert logits(PeftModel.from_pretrained(stretched(8.0), tmp_path)).equal(logits(wrapped))
    with pytest.raises(CheckpointError, match=r"was trained on .*'factor': 8.0.*this model has .*'factor': 4.0"):
        PeftModel.from_pretrained(stretched(4.0), tmp_path)
    with pytest.raises(CheckpointError, match=r"config of its own: hf_posenc.lora_config"):
        get_peft_model(stretched(4.0), lora_config(stretched(8.0)))


def test_an_adapter_that_says_nothing_of_its_base(tmp_path):
    drawn(patched_model("shaw", "llama"), PROMPTS["prompt"]()).save_pretrained(tmp_path / "prompt")
    with pytest.raises(CheckpointError, match=r"names no base: it cannot be told.*with what \S*name_base.* returns"):
        load_adapter(patched_model("shaw", "llama"), tmp_path / "prompt")
    # Without a task type PEFT writes the class of the base, and nothing else.
    config = peft.LoraConfig(target_modules=["q_proj"])
    drawn(patched_model("shaw", "llama"), config).save_pretrained(tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"names no base.*task_type"):
        load_adapter(patched_model("shaw", "llama"), tmp_path / "lora")
    drawn(tiny("llama"), config).save_pretrained(tmp_path / "stock")
    with pytest.raises(CheckpointError, match="was trained on stock positions"):
        load_adapter(patched_model("shaw", "llama"), tmp_path / "stock")
    edit(tmp_path / "prompt", base_model_name_or_path="someone/elsewhere")
    with pytest.raises(CheckpointError, match="names the base 'someone/elsewhere', which is not on this machine"):
        load_adapter(patched_model("shaw", "llama"), tmp_path / "prompt")
    same = patched_model("shaw", "llama")
    same.name_or_path = "someone/elsewhere"  # as of a model that was loaded by that name
    load_adapter(same, tmp_path / "prompt")


def test_where_the_adapter_is_reaches_the_check(tmp_path, monkeypatch):
    drawn(patched_model("shaw", "llama"), INSIDE["lora"]()).save_pretrained(tmp_path)
    asked = []

    def download(repo_id, filename, **where):
        asked.append((repo_id, where))
        return str(tmp_path / filename)

    monkeypatch.setattr(hf_posenc.checkpoints.lora, "hf_hub_download", download)
    options = {"subfolder": "sub", "revision": "v1", "token": "hf_x", "cache_dir": "/tmp/x", "local_files_only": True}
    with pytest.raises(CheckpointError, match="was trained on"):
        load_adapter(tiny("llama"), "me/adapter", **options)
    assert asked == [("me/adapter", options)]


@pytest.mark.parametrize("kind", ["lora", "posenc"])
def test_transformers_own_load_adapter_refuses_another_base(kind, tmp_path):
    wrapped = drawn(patched_model("shaw", "llama"), INSIDE[kind]())
    wrapped.save_pretrained(tmp_path / "here/adapter")
    model = patched_model("alibi", "llama")
    before = logits(model)
    with pytest.raises(CheckpointError, match=r"was trained on .*'shaw'.*, this model has .*'alibi'"):
        model.load_adapter(tmp_path / "here/adapter")
    with pytest.raises(CheckpointError, match="was trained on"):
        model.load_adapter(str(tmp_path / "here"), "second", adapter_kwargs={"subfolder": "adapter"})
    with pytest.raises(CheckpointError, match="was trained on"):
        model.load_adapter(peft_config=wrapped.peft_config["default"], adapter_state_dict={})
    assert logits(model).equal(before)
    same = patched_model("shaw", "llama")
    if kind == "posenc" and Version(transformers.__version__) < Version("5.23"):  # leaves out what is saved whole
        with pytest.raises(CheckpointError, match="weights of this adapter at the values that they started with"):
            same.load_adapter(tmp_path / "here/adapter")
    else:
        same.load_adapter(tmp_path / "here/adapter")
        assert logits(same).equal(logits(wrapped))


def edit(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_second_adapter(tmp_path):
    wrapped = drawn(patched_model("shaw", "llama"), INSIDE["lora"]())
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"check_adapter\(model\.get_base_model\(\), folder\)"):
        load_adapter(wrapped, tmp_path)
    hf_posenc.checkpoints.lora.check_adapter(wrapped.get_base_model(), tmp_path)
    wrapped.load_adapter(tmp_path, "second")


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # PEFT warns of every second adapter
def test_an_adapter_of_tensors_is_loaded_whole_beside_another_and_swapped(tmp_path):
    model = patched_model("t5", "llama")
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    wrapped.save_pretrained(tmp_path)
    config, tensors = LoraConfig.from_pretrained(tmp_path), load_file(tmp_path / "adapter_model.safetensors")
    lora = {name.removeprefix("base_model.model."): torch.randn_like(each) for name, each in tensors.items()}
    model = patched_model("t5", "llama")
    model.load_adapter(peft_config=config, adapter_state_dict=dict(lora), adapter_name="one")
    first = logits(model)
    other = {name: 2 * tensor for name, tensor in lora.items()}
    model.load_adapter(peft_config=config, adapter_state_dict=other, adapter_name="two")
    model.set_adapter("two")
    assert distance(logits(model), first) > 1e-3
    model.load_adapter(peft_config=config, adapter_state_dict=dict(lora), adapter_name="two", hotswap=True)
    assert_same(logits(model), first)
    part = {name: 3 * tensor for name, tensor in lora.items() if "layers.0" not in name}
    with pytest.raises(CheckpointError, match=r"at the values that they started with.*load the model again"):
        patched_model("t5", "llama").load_adapter(peft_config=config, adapter_state_dict=part)


def test_an_adapter_that_is_loaded_in_part_is_an_error(tmp_path):
    """As tensors, by the names that transformers takes: half of the layers would keep the start values."""
    wrapped = get_peft_model(patched_model("t5", "llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    wrapped.save_pretrained(tmp_path)
    config, tensors = LoraConfig.from_pretrained(tmp_path), load_file(tmp_path / "adapter_model.safetensors")
    whole = {name.removeprefix("base_model.model."): torch.randn_like(each) for name, each in tensors.items()}
    part = {name: each for name, each in whole.items() if "layers.0" not in name}
    with pytest.raises(CheckpointError, match=r"at the values that they started with.*load the model again"):
        patched_model("t5", "llama").load_adapter(peft_config=config, adapter_state_dict=part)
    patched_model("t5", "llama").load_adapter(peft_config=config, adapter_state_dict=whole)
