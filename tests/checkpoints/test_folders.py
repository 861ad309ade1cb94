"""The folder of a checkpoint is untrusted, and others save into it at the same time: edits, savers, kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from families import tiny, tokens
from situations import patched_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_posenc
from hf_posenc import CheckpointError, from_pretrained, inspect, patch_model
from hf_posenc.checkpoints import files
from hf_posenc.checkpoints.files import PENDING, STAGING

ROOT = Path(__file__).parents[2]
IDS = tokens(1, 12)
LOADERS = (from_pretrained, AutoModelForCausalLM.from_pretrained)


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def contents(folder):
    """Every file below a folder with its bytes."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_reading_changes_nothing(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / f"{STAGING}-1").mkdir()
    before, times = contents(tmp_path), {p: p.stat().st_mtime_ns for p in [tmp_path, *tmp_path.rglob("*")]}
    for loader in (*LOADERS, inspect, AutoModel.from_pretrained, AutoConfig.from_pretrained):
        loader(tmp_path)
    assert contents(tmp_path) == before
    assert {p: p.stat().st_mtime_ns for p in [tmp_path, *tmp_path.rglob("*")]} == times


# --------------------------------------------------------------------------------------------------- names and contents


@pytest.mark.parametrize("name", ["../outside.safetensors", "pytorch_model.bin"])
def test_an_index_names_only_weights_beside_it(name, tmp_path):
    folder = tmp_path / "model"
    patched_model("alibi", "llama").save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    key, shard = next(iter(json.loads(index.read_text())["weight_map"].items()))
    shutil.copy(folder / shard, tmp_path / "outside.safetensors")
    edit(index, lambda content: content["weight_map"].update({key: name}))
    for loader in LOADERS:
        with pytest.raises(CheckpointError, match=r"names a file that is no model\*\.safetensors beside it"):
            loader(folder)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", {"a": 1}])
def test_only_model_classes_of_the_family_are_called(architecture, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(architectures=[architecture]))
    assert type(from_pretrained(tmp_path, scheme="alibi")).__name__ == "PosEncLlamaForCausalLM"


def test_an_attention_implementation_in_the_config_is_refused(tmp_path):
    patched_model("rope", "llama").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(attn_implementation="somebody/kernel"))
    for loader in LOADERS:
        with pytest.raises(CheckpointError, match="attn_implementation='somebody/kernel'"):
            loader(tmp_path)
    assert "somebody/kernel" in inspect(tmp_path).problem


def test_weights_of_another_format_are_not_unpickled(tmp_path):
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    for loader in LOADERS:
        with pytest.raises(OSError, match=r"model\.safetensors"):
            loader(tmp_path)


def test_an_adapter_in_the_folder_does_not_choose_the_base(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path / "model")
    tiny("llama").save_pretrained(tmp_path / "other")
    adapter = {"base_model_name_or_path": str(tmp_path / "other"), "peft_type": "LORA"}
    (tmp_path / "model/adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(CheckpointError, match="a whole model and an adapter"):
        from_pretrained(tmp_path / "model")


def test_a_variant_beside_the_default(tmp_path):
    models = {None: patched_model("alibi", "llama"), "other": patched_model("alibi", "llama", seed=3)}
    for variant, model in models.items():
        model.save_pretrained(tmp_path, variant=variant)
    for variant, model in models.items():
        assert logits(from_pretrained(tmp_path, variant=variant)).equal(logits(model))


def test_a_subfolder_and_settings_of_one_run(tmp_path):
    model = patched_model("shaw", "llama")
    model.save_pretrained(tmp_path / "inside")
    for loader in LOADERS:
        assert logits(loader(tmp_path, subfolder="inside")).equal(logits(model))
        assert not logits(loader(tmp_path, subfolder="inside", rms_norm_eps=0.1)).equal(logits(model))
    assert inspect(tmp_path, subfolder="inside").scheme == "shaw"


def test_the_engine_that_is_asked_for_at_loading_computes(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path / "alibi")
    model = from_pretrained(tmp_path / "alibi", attention="reference")
    assert hf_posenc.which_engine(model, 4096).engine == "reference"
    patched_model("rope", "llama").save_pretrained(tmp_path / "rope")
    with pytest.raises(ValueError, match="keeps the model's own attention"):
        from_pretrained(tmp_path / "rope", attention="reference")


def test_a_new_folder_is_whole_or_absent(tmp_path):
    target = tmp_path / "some/where"

    def interrupted():
        with files.new_folder(target) as folder:
            folder.mkdir()
            (folder / "half").write_text("written")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(target.parent.iterdir()) == []
    with files.new_folder(target) as folder:
        patch_model(tiny("llama"), "alibi").save_pretrained(folder)
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["where"]
    with pytest.raises(OSError, match="where"), files.new_folder(target) as folder:
        folder.mkdir()
    assert hf_posenc.is_patched(from_pretrained(target))


def test_parts_of_a_tokenizer_in_folders_of_their_own(tmp_path):
    class Tokenizer:
        model_max_length = 0

        def save_pretrained(self, folder):
            (Path(folder) / "additional_chat_templates").mkdir()
            (Path(folder) / "additional_chat_templates/tool.jinja").write_text("{{ tool }}")

    for _ in range(2):
        patched_model("alibi", "llama").save_pretrained(tmp_path, tokenizer=Tokenizer())
        assert (tmp_path / "additional_chat_templates/tool.jinja").read_text() == "{{ tool }}"
    assert not (tmp_path / PENDING).exists()


# ----------------------------------------------------------------------------------------------------- several savers

# Saves models in turn, of two schemes and one or several files each.
WRITER = """
    import sys
    from folder_models import states
    models = states()
    print("ready", flush=True)
    while True:
        for model, size in models:
            model.save_pretrained(sys.argv[1], max_shard_size=size)
"""


def start(code, *arguments):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_threads_that_save_into_one_folder(tmp_path):
    model = patched_model("alibi", "llama")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: model.save_pretrained(tmp_path), range(12)))
    assert logits(from_pretrained(tmp_path)).equal(logits(model))
    assert not list(tmp_path.glob(f"{STAGING}*"))


def test_what_others_are_writing_stays_and_what_was_abandoned_goes(tmp_path):
    holder = f"""
        import sys, time
        from pathlib import Path
        from hf_posenc.checkpoints.files import staged
        with staged(Path({str(tmp_path)!r})) as folder:
            (folder / "config.json").write_text("{{}}")
            print("ready", flush=True)
            time.sleep(120)
    """
    with start(holder) as living:
        with start(holder) as dead:
            living.stdout.readline(), dead.stdout.readline()
            dead.kill()
        assert len(list(tmp_path.glob(f"{STAGING}-*"))) == 2
        model = patched_model("alibi", "llama")
        model.save_pretrained(tmp_path)
        assert len(list(tmp_path.glob(f"{STAGING}-*"))) == 1
        assert logits(from_pretrained(tmp_path)).equal(logits(model))
        living.kill()


@pytest.mark.slow
def test_saving_killed_at_random(tmp_path):
    """What is loaded after a kill is one of the models that the process saved again and again, whole."""
    from folder_models import states

    states()[0][0].save_pretrained(tmp_path)
    known = [logits(model) for model, _ in states()]
    generator = random.Random(0)
    for _ in range(10):
        with start(WRITER, tmp_path) as writer:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(generator.uniform(0.0, 0.25))
            writer.send_signal(signal.SIGKILL)
        found = logits(from_pretrained(tmp_path))
        assert any(each.equal(found) for each in known), sorted(path.name for path in tmp_path.iterdir())
