"""recipes/examples: each runs as a reader would start it, and leaves what it says."""

import importlib
import importlib.util
import re
import runpy
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from families import tiny
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc.recipes.embedded import byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
"""What docs/trainers.md shows: Trainer, TRL, QLoRA, and how to ask whether a patch still works."""

# What trl, bitsandbytes and torchao say of themselves while they are imported and run.
noisy = pytest.mark.filterwarnings("ignore")


def needs(*packages):
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing),
        reason=f"pip install -e '.[trl,qlora]', or 'transformers[serving]', which has {missing}, runs this",
    )


@pytest.fixture
def example(recipes, monkeypatch):
    monkeypatch.syspath_prepend(str(recipes / "examples"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return importlib.import_module


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def at_home(tiny_checkpoints, text, monkeypatch):
    """A working folder in which a checkpoint `gpt2` and a text `book.txt` lie."""
    monkeypatch.chdir(tiny_checkpoints)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    shutil.copy(text, "book.txt")
    return tiny_checkpoints


def test_the_page_shows_the_trainer_script(recipes):
    docstring, _, code = (recipes / "trainer_example.py").read_text(encoding="utf-8").partition('\n"""\n\n')
    assert docstring.startswith('"""')
    assert code == BLOCKS[0]


CALIBRATED = ": calibrated with "
"""The report says it, whatever it has kept: on a random base that need be nothing."""


@pytest.mark.slow
@noisy
def test_trainer_script(at_home, recipes, capsys):
    """It calibrates before it trains, its checkpoints go on exactly, and what it saves is the patched model."""
    source = (recipes / "trainer_example.py").read_text(encoding="utf-8")
    steps = "max_steps=100, save_steps=50, logging_steps=10"
    assert steps in source
    Path("script.py").write_text(source.replace(steps, "max_steps=12, save_steps=6, logging_steps=3"))
    made = runpy.run_path("script.py")
    trainer, model = made["trainer"], made["model"]
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert max(entry.get("learning_rate", 0) for entry in trainer.state.log_history) <= 3e-4
    saved = hf_posenc.inspect("runs/trainer/model")
    assert saved.scheme == "transformer_xl"
    assert CALIBRATED in capsys.readouterr().out
    tokens = torch.randint(256, (1, 50))
    assert hf_posenc.from_pretrained("runs/trainer/model")(tokens).logits.equal(model.eval()(tokens).logits)

    shutil.rmtree("runs/trainer/checkpoint-12")
    fresh = hf_posenc.from_pretrained("gpt2", scheme="transformer_xl", seed=1)
    resumed = type(trainer)(fresh, made["settings"], train_dataset=trainer.train_dataset)
    resumed.train(resume_from_checkpoint=True)
    for (name, one), (_, other) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.slow
@noisy
@pytest.mark.parametrize(
    ("block", "folder"),
    [
        pytest.param(BLOCKS[1], "runs/sft/model", marks=needs("trl"), id="TRL"),
        pytest.param(BLOCKS[2], "runs/qlora/model", marks=needs("trl", "bitsandbytes"), id="QLoRA"),
    ],
)
def test_what_the_page_shows_of_trl(block, folder, at_home, capsys):
    names = {"__name__": "__main__"}
    exec(compile(block, "trainers.md", "exec"), names)
    assert losses(names["trainer"])[-1] < losses(names["trainer"])[0]
    assert names["trainer"].args.learning_rate == 3e-4
    saved = hf_posenc.inspect(folder)
    assert saved.scheme == "transformer_xl"
    assert CALIBRATED in capsys.readouterr().out
    assert hf_posenc.verify(hf_posenc.from_pretrained(folder))


@pytest.mark.slow
@noisy
@needs("trl")
def test_packed_documents_see_only_themselves(example, tmp_path):
    """As each of them alone computes: TRL says where they begin by positions, and there is a mask for none of it."""
    trainer = example("sft_trainer").main(
        ["--scheme", "t5", "--packing", "--steps", "1", "--output", str(tmp_path / "out")]
    )
    model = trainer.model.eval()
    with torch.no_grad():
        model.model.posenc.biases.normal_(std=2.0)
        (batch,) = [next(iter(trainer.get_train_dataloader()))]
        positions = batch["position_ids"][0].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        assert len(starts) > 2
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        packed = model(**inputs, use_cache=False).logits[0]
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            alone = model(batch["input_ids"][:, start:end], use_cache=False).logits[0]
            assert torch.allclose(packed[start:end], alone, atol=1e-5)
        together = model(batch["input_ids"], use_cache=False).logits[0]
        assert not torch.allclose(packed, together, atol=1e-2)


@pytest.mark.slow
@noisy
@pytest.mark.parametrize(
    "bits", [pytest.param(4, marks=needs("trl", "bitsandbytes")), pytest.param(8, marks=needs("trl", "torchao"))]
)
def test_qlora_trains_an_adapter_beside_packed_weights(example, tmp_path, capsys, bits):
    words = ["--scheme", "t5", "--bits", str(bits), "--steps", "25", "--learning-rate", "1e-2"]
    trainer = example("qlora").main([*words, "--output", str(tmp_path / "out")])
    assert losses(trainer)[-1] < 0.9 * losses(trainer)[0]
    model = trainer.model
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any("posenc" in name for name in trained)
    assert any("lora_A" in name for name in trained)
    assert not any("base_layer" in name for name in trained)
    packed = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.base_layer").weight
    assert type(packed) is not torch.nn.Parameter

    assert CALIBRATED in capsys.readouterr().out
    merged = hf_posenc.from_pretrained(tmp_path / "out" / "model")
    biases = next(weight for name, weight in model.named_parameters() if "modules_to_save" in name and "biases" in name)
    assert torch.equal(merged.model.posenc.biases, biases)


@pytest.mark.slow
def test_the_axolotl_plugin_calibrates_what_it_is_given(example, at_home, monkeypatch, capsys):
    """Against the names that axolotl's plugin interface has, where axolotl is not installed."""
    monkeypatch.delitem(sys.modules, "axolotl_plugin", raising=False)
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    monkeypatch.setitem(sys.modules, "axolotl", types.ModuleType("axolotl"))
    monkeypatch.setitem(sys.modules, "axolotl.integrations", types.ModuleType("axolotl.integrations"))
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    module = example("axolotl_plugin")
    plugin = module.PositionEncoding()
    where, _, name = plugin.get_input_args().rpartition(".")
    assert getattr(importlib.import_module(where), name)(position_encoding="alibi").position_encoding == "alibi"
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    plugin.post_model_build(types.SimpleNamespace(position_encoding=None), model)
    assert not hf_posenc.is_patched(model)
    asked = {"position_encoding": "kerple", "base_model": "gpt2", "tokenizer_config": None}
    with pytest.raises(ValueError, match="position_encoding_text is missing"):
        plugin.post_model_build(types.SimpleNamespace(**asked, position_encoding_text=None), model)
    assert not hf_posenc.is_patched(model)
    settings = types.SimpleNamespace(**asked, position_encoding_text="book.txt")
    plugin.post_model_build(settings, model)
    assert hf_posenc.verify(model)
    assert CALIBRATED in capsys.readouterr().out
    plugin.post_model_load(settings, model)
    monkeypatch.setattr(hf_posenc, "verify", lambda model: "")
    with pytest.raises(RuntimeError):
        plugin.post_model_load(settings, model)


@pytest.mark.slow
@noisy
@needs("fastapi", "uvicorn")
def test_a_patched_checkpoint_is_served(example, tmp_path):
    """By transformers' own server, which answers with what `generate` writes."""
    import json
    import socket
    import time
    import urllib.error
    import urllib.request

    import transformers

    tokenizer, model = byte_tokenizer(), tiny("gpt2", vocab_size=257)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    hf_posenc.patch_model(model, "alibi").save_pretrained(tmp_path, tokenizer=tokenizer)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = example("serve").main([str(tmp_path), "--port", str(port)], non_blocking=True, device="cpu")
    asked = {"model": str(tmp_path), "messages": [{"role": "user", "content": "def main("}], "max_tokens": 6}
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/chat/completions",
        json.dumps({**asked, "temperature": 0, "stream": False}).encode(),
        {"content-type": "application/json"},
    )
    try:
        for _ in range(60):
            try:
                answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
                break
            except urllib.error.URLError:
                time.sleep(1)
    finally:
        server.kill_server()
        delattr(transformers, "PosEncGPT2LMHeadModel")
    prompt = tokenizer("def main(", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(written, skip_special_tokens=True)
