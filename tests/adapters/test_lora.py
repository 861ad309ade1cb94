"""lora_config: what it trains, that it comes back by every way PEFT has, and onto which bases an adapter does not go."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers
from families import FAMILIES, LEARNED, tiny, tokens
from matrix import matrix
from packaging.version import Version
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from situations import CASES, EMBEDDING_SCHEMES, JOINING, SCHEMES, assert_same, distance, patched_model

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
from hf_posenc.modules import PositionModule

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
    merged.save_pretrained(tmp_path / "merged")
    assert_same(logits(from_pretrained(tmp_path / "merged")), expected)
    assert hf_posenc.verify(merged).ok


def test_a_config_is_made_before_the_first_adapter():
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


def test_tied_embeddings_stay_tied(tmp_path):
    wrapped, _ = trained("alibi", "gemma2", tmp_path)
    merged = wrapped.merge_and_unload()
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight


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


@pytest.mark.rows(default=4)
@matrix(family=LEARNED, case=[case for case in SCHEMES if case not in JOINING])
def test_peft_itself_refuses_a_stock_base_that_has_a_table(case, family, tmp_path):
    """GPT-2 and OPT: the adapter names their table, and has nothing (or another table) for it. Joining schemes leave it."""
    trained(case, family, tmp_path)
    with pytest.raises((KeyError, RuntimeError), match=r"wpe|embed_positions"):
        PeftModel.from_pretrained(tiny(family), tmp_path / "adapter")


@pytest.mark.parametrize(("case", "family"), [("alibi", "llama"), ("qk_norm", "gpt2")])
def test_peft_alone_cannot_tell_on_bases_without_a_lost_table(case, family, tmp_path):
    """A known hole, measured: PEFT compares neither the base's class nor its config. `load_adapter` does."""
    trained(case, family, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(tiny(family), tmp_path / "adapter")
    assert not hasattr(loaded.get_base_model().config, "position_encoding")


@pytest.mark.filterwarnings("error:this adapter neither trains nor saves the position parameters:UserWarning")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("case", ["t5", "shaw", "learned"])
def test_a_plain_adapter_warns_of_position_parameters_that_nothing_trains(case, family, tmp_path):
    plain = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", "fan_in_fan_out": family == "gpt2"}

    def fresh():
        return hf_posenc.patch_model(tiny(family), case, seed=0)

    name = "wpe" if (case, family) == ("learned", "gpt2") else "posenc"
    message = rf"position parameters of {case} .*which nothing has trained.*modules_to_save=\['{name}'\]"
    with pytest.warns(UserWarning, match=message):
        get_peft_model(fresh(), peft.LoraConfig(**plain))
    with pytest.warns(UserWarning, match=message):
        fresh().add_adapter(peft.LoraConfig(**plain))
    # Trained with the adapter, left out on purpose, only used, trained before, calibrated before, without parameters:
    get_peft_model(fresh(), peft.LoraConfig(**plain, modules_to_save=[name]))
    model = fresh()
    get_peft_model(model, lora_config(model, positions=False))
    get_peft_model(fresh(), peft.LoraConfig(**plain, inference_mode=True))
    model = fresh()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, PositionModule):
                for parameter in module.parameters():
                    parameter.add_(0.1)
    get_peft_model(model, peft.LoraConfig(**plain))
    model = fresh()
    model.config.position_encoding["calibration"] = {"stage": "attention", "tokens": 3}
    get_peft_model(model, peft.LoraConfig(**plain))
    get_peft_model(patched_model("alibi", family), peft.LoraConfig(**plain))
    fresh().save_pretrained(tmp_path)
    get_peft_model(from_pretrained(tmp_path), peft.LoraConfig(**plain))


def test_target_modules_are_found_by_model_type():
    from peft import LoraConfig

    model = patched_model("alibi", "llama")
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    assert any("q_proj.lora_A" in name for name, _ in wrapped.named_parameters())


def test_a_stock_model_is_refused():
    with pytest.raises(NotPatchedError, match=r"peft\.LoraConfig"):
        lora_config(tiny("llama"))


# ---------------------------------------------------------------------------------------------- every kind that PEFT has

TARGETS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
INSIDE = {
    "lora": lambda: peft.LoraConfig(**TARGETS),
    "posenc": lambda: peft.LoraConfig(**TARGETS, modules_to_save=["posenc"]),
    "dora": lambda: peft.LoraConfig(**TARGETS, use_dora=True),
    "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    "vera": lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=4),
    "loha": lambda: peft.LoHaConfig(**TARGETS, r=2),
    "lokr": lambda: peft.LoKrConfig(**TARGETS, r=2),
    "oft": lambda: peft.OFTConfig(**TARGETS, oft_block_size=4),
    "adalora": lambda: peft.AdaLoraConfig(**TARGETS, total_step=10),
}
PROMPTS = {
    "prefix": lambda: peft.PrefixTuningConfig(**VIRTUAL),
    "prompt": lambda: peft.PromptTuningConfig(**VIRTUAL),
    "p_tuning": lambda: peft.PromptEncoderConfig(**VIRTUAL, encoder_hidden_size=8),
}
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
    wrapped = drawn(model, hf_posenc.lora.name_base(model, config) if live and kind in PROMPTS else config)
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


@pytest.mark.parametrize("kind", ["lora", "ia3", "prompt"])
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


def test_an_adapter_that_says_nothing_of_its_base(tmp_path):
    drawn(patched_model("shaw", "llama"), PROMPTS["prompt"]()).save_pretrained(tmp_path / "prompt")
    with pytest.raises(
        CheckpointError,
        match=r"names no base: it cannot be told.*the config that \S*name_base.* returns.*loads it unchecked",
    ):
        load_adapter(patched_model("shaw", "llama"), tmp_path / "prompt")
    # Without a task type PEFT writes the class of the base, and nothing else.
    config = peft.LoraConfig(target_modules=["q_proj"])
    drawn(patched_model("shaw", "llama"), config).save_pretrained(tmp_path / "lora")
    with pytest.raises(
        CheckpointError, match=r"names no base, and only that it was a PosEncLlamaForCausalLM.*task_type"
    ):
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

    monkeypatch.setattr(hf_posenc.checkpoints.adapters, "hf_hub_download", download)
    options = {"subfolder": "sub", "revision": "v1", "token": "hf_x", "cache_dir": "/tmp/x", "local_files_only": True}
    with pytest.raises(CheckpointError, match="was trained on"):
        load_adapter(tiny("llama"), "me/adapter", **options)
    assert asked == [("me/adapter", options)]
    with pytest.raises(TypeError, match="have no option adaptr_name"):
        load_adapter(tiny("llama"), "me/adapter", adaptr_name="x")


@pytest.mark.parametrize("kind", ["lora", "posenc", "ia3"])
def test_transformers_own_load_adapter_refuses_another_base(kind, tmp_path):
    wrapped = drawn(patched_model("shaw", "llama"), INSIDE[kind]())
    wrapped.save_pretrained(tmp_path / "here/adapter")
    for other in ("alibi", "nope"):
        model = patched_model(other, "llama")
        before = logits(model)
        with pytest.raises(CheckpointError, match=rf"was trained on .*'shaw'.*, this model has .*'{other}'"):
            model.load_adapter(tmp_path / "here/adapter")
        with pytest.raises(CheckpointError, match="was trained on"):
            model.load_adapter(str(tmp_path / "here"), "second", adapter_kwargs={"subfolder": "adapter"})
        with pytest.raises(CheckpointError, match="was trained on"):
            model.load_adapter(peft_config=wrapped.peft_config["default"], adapter_state_dict={})
        assert logits(model).equal(before)
    same = patched_model("shaw", "llama")
    said = refusal(lambda: same.load_adapter(tmp_path / "here/adapter"))
    if said is None:
        assert logits(same).equal(logits(wrapped))
    else:  # 5.17, and perhaps some after it, leave out what an adapter saves whole
        assert kind == "posenc"
        assert Version(transformers.__version__) < Version("5.23")
        assert "weights of this adapter at the values that they started with" in said


def refusal(load):
    """The words with which an adapter is refused, or None."""
    try:
        load()
    except CheckpointError as error:
        return str(error)


def edit(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"text"', "[" * 100_000, "\ud800", "{}"],
    ids=["empty", "cut", "list", "null", "text", "deep", "surrogate", "nothing"],
)
def test_an_adapter_config_that_is_none(text, tmp_path):
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    base = from_pretrained(tmp_path)
    drawn(base, INSIDE["lora"]()).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match="hf_posenc: "):
        load_adapter(from_pretrained(tmp_path), tmp_path / "adapter")


WRONG = {
    "auto_mapping": ["x", 5, {"position_encoding": "alibi"}, {"position_encoding": [1]}, {"position_encoding": {}}],
    "base_model_name_or_path": [5, ["x"], {"a": 1}],
    "peft_type": [None, 5, "NO_SUCH", ["LORA"], {}],
    "task_type": [5, "NO_SUCH", ["CAUSAL_LM"]],
    "megatron_config": [{"x": 1}, "x"],
    "layers_to_transform": ["x"],
    "target_modules": [5, [5], {"a": 1}],
    "r": ["x", 1.5, True, [4], None],
    "modules_to_save": ["posenc", 3],
    "rank_pattern": [[], {"q_proj": "x"}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_wrong_values_in_an_adapter_config(key, value, tmp_path):
    """Nothing that an adapter's config names is imported."""
    base = patched_model("shaw", "llama")
    drawn(base, INSIDE["lora"]()).save_pretrained(tmp_path)
    modules = set(sys.modules)
    edit(tmp_path, **{key: value, "megatron_core": "antigravity"})
    with pytest.raises(CheckpointError, match="hf_posenc: "):
        load_adapter(patched_model("shaw", "llama"), tmp_path)
    assert "antigravity" not in set(sys.modules) - modules


def test_a_folder_without_an_adapter(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        load_adapter(patched_model("shaw", "llama"), tmp_path)


def test_a_second_adapter(tmp_path):
    wrapped = drawn(patched_model("shaw", "llama"), INSIDE["lora"]())
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"check_adapter\(model\.get_base_model\(\), folder\)"):
        load_adapter(wrapped, tmp_path)
    hf_posenc.lora.check_adapter(wrapped.get_base_model(), tmp_path)
    wrapped.load_adapter(tmp_path, "second")


OLD_ROPE = {"scheme": "rope", "rope_theta": None, "layout": "half", "partial_rotary_factor": None, "scaling": None}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_adapter_of_0_1_0_on_rope(family, tmp_path):
    """It holds null where the base's own was meant, and null for no scaling."""
    wrapped = drawn(hf_posenc.patch_model(tiny(family), "rope", rope_theta=50.0), INSIDE["lora"]())
    wrapped.save_pretrained(tmp_path)
    for entry in ({**OLD_ROPE, "rope_theta": 50.0}, OLD_ROPE):
        edit(tmp_path, auto_mapping={"position_encoding": {**entry, "hf_posenc_version": "0.1.0"}})
        load_adapter(hf_posenc.patch_model(tiny(family), "rope", rope_theta=50.0), tmp_path)
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(CheckpointError, match="was trained on"):
        load_adapter(hf_posenc.patch_model(tiny(family), "rope", scaling=linear), tmp_path)
    edit(tmp_path, auto_mapping={"position_encoding": {**OLD_ROPE, "scaling": linear, "hf_posenc_version": "0.1.0"}})
    load_adapter(hf_posenc.patch_model(tiny(family), "rope", scaling=linear), tmp_path)
    with pytest.raises(CheckpointError, match="was trained on"):
        load_adapter(hf_posenc.patch_model(tiny(family), "rope", scaling={**linear, "factor": 3.0}), tmp_path)


def test_an_adapter_of_0_1_0_on_trained_frequencies(tmp_path):
    """Version 0.1.0 trained them in radians per token, and called that `true`."""
    in_radians = drawn(hf_posenc.patch_model(tiny("llama"), "sinusoidal", trainable="radians"), INSIDE["lora"]())
    in_radians.save_pretrained(tmp_path)
    (entry,) = in_radians.get_base_model().config.position_encoding["schemes"]
    old = {key: value for key, value in entry.items() if key not in ("layers", "window")}
    edit(tmp_path, auto_mapping={"position_encoding": {**old, "trainable": True, "hf_posenc_version": "0.1.0"}})
    load_adapter(hf_posenc.patch_model(tiny("llama"), "sinusoidal", trainable="radians"), tmp_path)
    with pytest.raises(CheckpointError, match="was trained on"):
        load_adapter(hf_posenc.patch_model(tiny("llama"), "sinusoidal", trainable=True), tmp_path)


DISTRIBUTED_CASES = ("alibi", "shaw", "shaw-shared", "learned")
DISTRIBUTED = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from families import tokens
    from situations import patched_model
    from hf_posenc import from_pretrained
    folder, *cases = sys.argv[1:]
    dist.init_process_group("gloo")
    for case in cases:
        model = patched_model(case, "llama").train()
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(3):
            ids = tokens(4, 20, seed=step)[2 * dist.get_rank():][:2]
            wrapped(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapped.module.save_pretrained(f"{folder}/{case}", is_main_process=dist.get_rank() == 0)
        dist.barrier()
        loaded = from_pretrained(f"{folder}/{case}")
        for key, value in wrapped.module.state_dict().items():
            assert loaded.state_dict()[key].equal(value), (case, key)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_and_save(tmp_path):
    """Under DDP, without unused parameters, and what is saved is what one process gets from the whole batch."""
    root = Path(__file__).parents[2]
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(DISTRIBUTED))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path), *DISTRIBUTED_CASES],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests/helpers")]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case in DISTRIBUTED_CASES:
        model = patched_model(case, "llama").train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            ids = tokens(4, 20, seed=step)
            model(ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(logits(from_pretrained(tmp_path / case)), logits(model.eval()), case)


def lora_of_tensors(folder):
    """The config of a LoRA adapter, and its tensors by the names that transformers takes."""
    model = patched_model("t5", "llama")
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    wrapped.save_pretrained(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model."): torch.randn_like(each) for name, each in tensors.items()}
    return LoraConfig.from_pretrained(folder), named


# PEFT warns of every second adapter.
loads_tensors = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


@loads_tensors
def test_a_whole_adapter_of_tensors_is_loaded_beside_another_and_swapped(tmp_path):
    config, lora = lora_of_tensors(tmp_path)
    model = patched_model("t5", "llama")
    model.load_adapter(peft_config=config, adapter_state_dict=dict(lora), adapter_name="one")
    first = logits(model)
    other = {name: 2 * tensor for name, tensor in lora.items()}
    model.load_adapter(peft_config=config, adapter_state_dict=other, adapter_name="two")
    model.set_adapter("two")
    assert distance(logits(model), first) > 1e-3
    model.load_adapter(peft_config=config, adapter_state_dict=dict(lora), adapter_name="two", hotswap=True)
    assert_same(logits(model), first)


@loads_tensors
@pytest.mark.parametrize("how", ["first", "second", "hotswap"])
def test_an_adapter_that_is_loaded_in_part_leaves_the_model_as_it_was(how, tmp_path):
    config, lora = lora_of_tensors(tmp_path)
    model = patched_model("t5", "llama")
    if how != "first":
        model.load_adapter(peft_config=config, adapter_state_dict=dict(lora), adapter_name="one")
    state = {name: tensor.clone() for name, tensor in model.train().state_dict().items()}
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    part = {name: 3 * tensor for name, tensor in lora.items() if "layers.0" not in name}
    options = {"adapter_name": "two" if how == "second" else "one", "hotswap": how == "hotswap"}
    with pytest.raises(CheckpointError, match="at the values that they started with"):
        model.load_adapter(peft_config=config, adapter_state_dict=part, **options)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert all(module.training for module in model.modules())
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(now[name].equal(tensor) for name, tensor in state.items())
    assert list(getattr(model, "peft_config", {})) == ([] if how == "first" else ["one"])
    model.load_adapter(peft_config=config, adapter_state_dict=dict(lora), adapter_name="three")
    assert logits(model).isfinite().all()
