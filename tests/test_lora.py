"""lora_config: what it trains, that it comes back by every way PEFT has, and onto which bases an adapter does not go."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from families import FAMILIES, tiny, tokens
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from situations import CASES, SCHEMES, assert_same, distance, patched_model
from torch.nn.parallel import DistributedDataParallel

import hf_posenc
from hf_posenc import CheckpointError, NotPatchedError, from_pretrained, load_adapter, lora_config, unpatch_model
from hf_posenc.schemes.base import PositionModule

IDS = tokens(2, 20)
SAVED = ("gpt2", "llama", "opt", "gemma2", "gpt_neox")

pytestmark = [
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


@pytest.mark.parametrize("family", SAVED)
@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", SCHEMES)
def test_what_is_trained(case, family):
    model = patched_model(case, family)
    owned = sum(
        p.numel() for m in model.modules() if isinstance(m, PositionModule) for p in m.parameters(recurse=False)
    )
    norms = sum(
        p.numel() for m in model.modules() if type(m).__name__.endswith("Norm") for p in m.parameters(recurse=False)
    )
    embeddings = model.get_input_embeddings().weight.numel()

    def whole(**options):
        model = patched_model(case, family)
        wrapped = get_peft_model(model, lora_config(model, r=4, **options))
        names = {n: p for n, p in wrapped.named_parameters() if p.requires_grad}
        assert any("lora_" in name for name in names)
        return sum(p.numel() for name, p in names.items() if "lora_" not in name)

    assert whole() == owned + norms + embeddings
    assert whole(norms=False, embeddings=False) == owned
    assert whole(norms=False, embeddings=False, positions=False) == 0


def test_tied_embeddings_stay_tied(tmp_path):
    wrapped, _ = trained("alibi", "gemma2", tmp_path)
    merged = wrapped.merge_and_unload()
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("case", ["nope", "alibi", "rope", "shaw"])
def test_an_adapter_refuses_another_base(case, family, tmp_path):
    trained(case, family, tmp_path)
    other = "alibi" if case != "alibi" else "nope"
    for base in (tiny(family), patched_model(other, family), unpatch_model(patched_model(case, family))):
        with pytest.raises(CheckpointError, match=f"was trained on .*'scheme': '{case}'"):
            load_adapter(base, tmp_path / "adapter")
        assert not isinstance(base, PeftModel)
    entry = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["auto_mapping"]
    assert entry["position_encoding"]["scheme"] == case


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize("case", SCHEMES)
def test_peft_itself_refuses_a_stock_base_that_has_a_table(case, family, tmp_path):
    """GPT-2 and OPT: the adapter names their table, and has nothing (or another table) for it."""
    trained(case, family, tmp_path)
    with pytest.raises((KeyError, RuntimeError), match=r"wpe|embed_positions"):
        PeftModel.from_pretrained(tiny(family), tmp_path / "adapter")


def test_peft_alone_cannot_tell_on_bases_that_rotate(tmp_path):
    """A known hole, measured: PEFT compares neither the base's class nor its config. `load_adapter` does."""
    trained("alibi", "llama", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(tiny("llama"), tmp_path / "adapter")
    assert not hasattr(loaded.get_base_model().config, "position_encoding")


def test_target_modules_are_found_by_model_type():
    from peft import LoraConfig

    model = patched_model("alibi", "llama")
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    assert any("q_proj.lora_A" in name for name, _ in wrapped.named_parameters())


def test_a_stock_model_is_refused():
    with pytest.raises(NotPatchedError, match=r"peft\.LoraConfig"):
        lora_config(tiny("llama"))


DISTRIBUTED = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from families import tokens
    from situations import patched_model
    from hf_posenc import from_pretrained
    folder, case = sys.argv[1:]
    dist.init_process_group("gloo")
    model = patched_model(case, "llama").train()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        ids = tokens(4, 20, seed=step)[2 * dist.get_rank():][:2]
        wrapped(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped.module.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    loaded = from_pretrained(folder)
    for key, value in wrapped.module.state_dict().items():
        assert loaded.state_dict()[key].equal(value), key
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("case", ["alibi", "shaw", "shaw-shared", "learned"])
def test_two_processes_train_and_save(case, tmp_path):
    """Under DDP, without unused parameters, and what is saved is what one process gets from the whole batch."""
    root = Path(__file__).parents[1]
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(DISTRIBUTED))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(script), str(tmp_path / "model"), case],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model = patched_model(case, "llama").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        ids = tokens(4, 20, seed=step)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(logits(from_pretrained(tmp_path / "model")), logits(model.eval()))
    assert not isinstance(model, DistributedDataParallel)
