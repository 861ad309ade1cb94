"""The folder of a checkpoint is untrusted, and others use it at the same time: attacks, edits, savers, readers, kills."""

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from families import tiny, tokens
from situations import patched_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_posenc
from hf_posenc import CheckpointError, HfPosencError, from_pretrained, inspect, patch_model
from hf_posenc.checkpoints import files

ROOT = Path(__file__).parents[2]
IDS = tokens(1, 12)
PENDING = ".hf_posenc-saved"
STAGING = ".hf_posenc-saving"


@torch.no_grad()
def logits(model):
    output = model(IDS, use_cache=False)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def our_class(folder):
    return hf_posenc.classes.PosEncLlamaForCausalLM.from_pretrained(folder)


LOADERS = {
    "hf_posenc.from_pretrained": from_pretrained,
    "inspect": inspect,
    "our class": our_class,
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained,
    "AutoModelForCausalLM, trust_remote_code": lambda f: AutoModelForCausalLM.from_pretrained(
        f, trust_remote_code=True
    ),
    "AutoModel": AutoModel.from_pretrained,
    "AutoConfig": AutoConfig.from_pretrained,
    "the stock class": transformers.LlamaForCausalLM.from_pretrained,
}


def contents(folder):
    """Every file below a folder with its bytes, every link with its target."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


# ------------------------------------------------------------------------------------------------- an interrupted save


LISTS = {
    "a path upwards": ["../victim.txt"],
    "an absolute path": "absolute",
    "another file of the folder": ["config.json"],
    "no list": {"model.safetensors": 1},
    "no names": [1, None],
    "a path inside": ["model/../../victim.txt"],
}


@pytest.mark.parametrize("loader", [name for name in LOADERS if name not in ("AutoConfig", "the stock class")])
@pytest.mark.parametrize("what", LISTS)
def test_a_list_of_files_to_remove_is_not_obeyed(what, loader, tmp_path):
    folder, victim = tmp_path / "model", tmp_path / "victim.txt"
    patched_model("shaw", "llama").save_pretrained(folder)
    victim.write_text("precious")
    (folder / PENDING).mkdir()
    names = [str(victim)] if LISTS[what] == "absolute" else LISTS[what]
    (folder / PENDING / "remove.json").write_text(json.dumps(names))
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="no save of this package left it"):
        LOADERS[loader](folder)
    assert contents(tmp_path) == before
    with pytest.raises(CheckpointError, match="no save of this package left it"):
        patched_model("shaw", "llama").save_pretrained(folder)
    assert contents(tmp_path) == before


def strange_entries():
    def malformed(pending):
        (pending / "remove.json").write_text("{not json")

    def folder_for_list(pending):
        (pending / "remove.json").mkdir()

    def link(pending):
        (pending / "config.json").symlink_to("/etc/passwd")

    def link_to_folder(pending):
        (pending / "extra").symlink_to(pending.parents[1], target_is_directory=True)

    return [malformed, folder_for_list, link, link_to_folder]


@pytest.mark.parametrize("strange", strange_entries(), ids=lambda strange: strange.__name__)
@pytest.mark.parametrize("loader", ["hf_posenc.from_pretrained", "inspect", "AutoModelForCausalLM"])
def test_a_strange_interrupted_save_is_refused_or_harmless(strange, loader, tmp_path):
    folder = tmp_path / "model"
    model = patched_model("shaw", "llama")
    model.save_pretrained(folder)
    (folder / PENDING).mkdir()
    strange(folder / PENDING)
    before = contents(tmp_path)
    try:
        LOADERS[loader](folder)
    except CheckpointError:
        pass
    assert contents(tmp_path) == before


def test_an_interrupted_save_is_not_moved_through_a_link(tmp_path):
    folder, outside = tmp_path / "model", tmp_path / "outside"
    model = patched_model("shaw", "llama")
    model.save_pretrained(folder)
    outside.mkdir()
    (folder / "additional_chat_templates").symlink_to(outside, target_is_directory=True)
    (folder / PENDING / "additional_chat_templates").mkdir(parents=True)
    (folder / PENDING / "additional_chat_templates" / "tool.jinja").write_text("{{ evil }}")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        model.save_pretrained(folder)
    assert not list(outside.iterdir())


def test_a_link_for_a_lock_is_not_written_through(tmp_path):
    folder, victim = tmp_path / "model", tmp_path / "victim.txt"
    folder.mkdir()
    (folder / ".hf_posenc-lock").symlink_to(victim)
    with pytest.raises(OSError, match="lock"):
        patched_model("shaw", "llama").save_pretrained(folder)
    assert not victim.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; runs as any other user")
def test_a_folder_that_may_only_be_read(tmp_path):
    model = patched_model("shaw", "llama")
    model.save_pretrained(tmp_path / "model")
    os.chmod(tmp_path / "model", 0o500)
    assert logits(from_pretrained(tmp_path / "model")).equal(logits(model))


def test_reading_changes_nothing(tmp_path):
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / f"{STAGING}-1").mkdir()
    before, times = contents(tmp_path), {p: p.stat().st_mtime_ns for p in [tmp_path, *tmp_path.rglob("*")]}
    for name, loader in LOADERS.items():
        if name != "the stock class":
            loader(tmp_path)
    assert contents(tmp_path) == before
    assert {p: p.stat().st_mtime_ns for p in [tmp_path, *tmp_path.rglob("*")]} == times


# --------------------------------------------------------------------------------------------------- names and contents


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "pytorch_model.bin", 5, None])
def test_an_index_names_only_weights_beside_it(name, tmp_path):
    folder = tmp_path / "model"
    patched_model("alibi", "llama").save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    key, shard = next(iter(json.loads(index.read_text())["weight_map"].items()))
    shutil.copy(folder / shard, tmp_path / "outside.safetensors")
    edit(index, lambda content: content["weight_map"].update({key: name}))
    edit(folder / "config.json", lambda config: config.pop("hf_posenc_digests", None))
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(
            CheckpointError, match=r"index\.json names a file that is no model\*\.safetensors beside it"
        ):
            loader(folder)


@pytest.mark.parametrize("architecture", ["pipeline", "AutoTokenizer", "GPT2LMHeadModel", "Trainer", {"a": 1}, 3])
def test_only_model_classes_of_the_family_are_called(architecture, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(architectures=[architecture]))
    assert type(from_pretrained(tmp_path, scheme="alibi")).__name__ == "PosEncLlamaForCausalLM"


def test_an_attention_implementation_in_the_config_is_refused(tmp_path):
    patched_model("rope", "llama").save_pretrained(tmp_path)

    def change(config):
        config.pop("hf_posenc_digests", None)
        config["attn_implementation"] = "somebody/kernel"

    edit(tmp_path / "config.json", change)
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match="attn_implementation='somebody/kernel'"):
            loader(tmp_path)
    assert "somebody/kernel" in inspect(tmp_path).problem


def test_weights_of_another_format_are_not_unpickled(tmp_path):
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            loader(tmp_path)


def test_an_adapter_in_the_folder_does_not_choose_the_base(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path / "model")
    tiny("llama").save_pretrained(tmp_path / "other")
    adapter = {"base_model_name_or_path": str(tmp_path / "other"), "peft_type": "LORA"}
    (tmp_path / "model/adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(CheckpointError, match="a whole model and an adapter"):
        from_pretrained(tmp_path / "model")


def test_an_edited_config_is_noticed_and_can_be_meant(tmp_path):
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(rms_norm_eps=0.1))
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained, AutoConfig.from_pretrained, our_class):
        with pytest.raises(CheckpointError, match="was changed after it was saved"):
            loader(tmp_path)
    assert "was changed" in inspect(tmp_path).problem
    edit(tmp_path / "config.json", lambda config: config.pop("hf_posenc_digests"))
    changed = from_pretrained(tmp_path)
    assert changed.config.rms_norm_eps == 0.1
    assert not logits(changed).equal(logits(model))
    changed.config.save_pretrained(tmp_path)  # by transformers' own function, as tools do
    assert logits(from_pretrained(tmp_path)).equal(logits(changed))


def test_weights_of_another_save_are_noticed(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path / "model")
    patched_model("alibi", "llama").to(torch.bfloat16).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path / "model")
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match="not what was saved with its config"):
            loader(tmp_path / "model")
    edit(tmp_path / "model/config.json", lambda config: config.pop("hf_posenc_digests"))
    from_pretrained(tmp_path / "model")


def test_a_shard_of_another_training_step_is_noticed(tmp_path):
    """Names, shapes and dtypes are the same in every step of a training."""
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path / "later", max_shard_size="20KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shards = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2
    shutil.copy(tmp_path / "later" / shards[1], tmp_path / "model")
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=f"{shards[1]} in .*: not what was saved with its config"):
            loader(tmp_path / "model")


def test_a_file_in_front_of_the_shards_is_noticed(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    patched_model("alibi", "llama", seed=3).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model\.safetensors in .* not what was saved"):
        from_pretrained(tmp_path / "model")


def test_a_variant_beside_the_default(tmp_path):
    model = patched_model("alibi", "llama")
    model.save_pretrained(tmp_path)
    other = patched_model("alibi", "llama", seed=3)
    other.save_pretrained(tmp_path, variant="other")
    assert logits(from_pretrained(tmp_path)).equal(logits(model))
    assert logits(from_pretrained(tmp_path, variant="other")).equal(logits(other))


def test_overrides_of_the_config(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path)
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert loader(tmp_path).config.use_cache
        assert not loader(tmp_path, use_cache=False).config.use_cache


def test_a_subfolder(tmp_path):
    model = patched_model("shaw", "llama")
    model.save_pretrained(tmp_path / "inside")
    for loader in (from_pretrained, AutoModelForCausalLM.from_pretrained):
        assert logits(loader(tmp_path, subfolder="inside")).equal(logits(model))
    assert inspect(tmp_path, subfolder="inside").scheme == "shaw"
    with pytest.raises(TypeError, match="inspect takes revision"):
        inspect(tmp_path, subfolders="inside")


def test_the_engine_that_is_asked_for_at_loading_computes(tmp_path):
    patched_model("alibi", "llama").save_pretrained(tmp_path / "alibi")
    model = from_pretrained(tmp_path / "alibi", attention="reference")
    assert hf_posenc.which_engine(model, 4096).engine == "reference"
    assert {layer.self_attn.posenc_state.engine for layer in model.model.layers} == {"reference"}
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
        assert folder.name == target.name
        patch_model(tiny("llama"), "alibi").save_pretrained(folder)
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["where"]
    assert hf_posenc.is_patched(from_pretrained(target))
    with pytest.raises(OSError, match="where"), files.new_folder(target) as folder:
        folder.mkdir()
    assert (target / "config.json").is_file()


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


# ----------------------------------------------------------------------------------------------------------------- fuzz


def values(content, path=()):
    """Every path to a value in a JSON object."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from values(value, (*path, key))


STRANGE = (
    None, True, 0, -1, 3, 10**30, 0.1, -2.5, "", "x", "../../canary.txt", "/etc/passwd", [], ["model"], {}, {"a": []},
    "llama", "gelu", "shaw", "posenc_gpt2", "PosEncGPT2LMHeadModel", "F16", "I32", [1], [0, 8],
)  # fmt: skip


def edited_json(content, generator):
    """Change, drop, add or swap a value of a JSON object."""
    paths = list(values(content))
    path = generator.choice(paths)
    owner = content
    for key in path[:-1]:
        owner = owner[key]
    kind = generator.choice(("set", "set", "set", "drop", "add", "swap"))
    if kind == "drop":
        del owner[path[-1]]
    elif kind == "add" and isinstance(owner, dict):
        owner[generator.choice(("extra", "transformers_weights", "quantization_config", "head_dim", "attn_bias"))] = (
            generator.choice(STRANGE)
        )
    elif kind == "swap" and isinstance(owner, dict) and len(owner) > 1:
        other = generator.choice(sorted(owner, key=str))
        owner[path[-1]], owner[other] = owner[other], owner[path[-1]]
    else:
        owner[path[-1]] = generator.choice(STRANGE)


def edited_bytes(content, generator):
    """Flip, drop, double or insert a few bytes."""
    content = bytearray(content)
    for _ in range(generator.choice((1, 1, 1, 2, 5))):
        at = generator.randrange(len(content))
        kind = generator.choice(("flip", "flip", "drop", "double", "insert", "cut"))
        if kind == "flip":
            content[at] ^= 1 << generator.randrange(8)
        elif kind == "drop":
            del content[at]
        elif kind == "double":
            content[at:at] = content[at : at + 9]
        elif kind == "insert":
            content[at:at] = generator.choice((b"../", b'"', b"0", b"\x00", b"}", b"NaN"))
        else:
            del content[at + 1 :]
        if not content:
            break
    return bytes(content)


def edited(path, generator):
    """Edit a config, an index, a list of files to remove, or the header of weights."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        header, data = content[8 : 8 + size], content[8 + size :]
        if generator.random() < 0.5:
            fields = json.loads(header)
            edited_json(fields, generator)
            new = json.dumps(fields).encode()
        else:
            new = edited_bytes(header, generator)
        length = len(new) if generator.random() < 0.9 else generator.randrange(2**40)
        path.write_bytes(length.to_bytes(8, "little") + new + data)
    elif generator.random() < 0.5:
        parsed = json.loads(content)
        edited_json(parsed, generator)
        path.write_text(json.dumps(parsed))
    else:
        path.write_bytes(edited_bytes(content, generator))


# What the docs say that loading may raise: ours, what cannot be opened or parsed (OSError), and transformers' own words
# about a model type or attention that it does not know (ValueError, KeyError), once the config no longer says it is ours.
DOCUMENTED = (HfPosencError, OSError, ValueError, KeyError)


def fuzz(count, tmp_path, monkeypatch):
    """Edit checkpoints and load them in every way; return what happened."""
    generator = random.Random(0)
    canary = tmp_path / "canary.txt"
    canary.write_text("alive")
    # The mark of a save is part of what is edited: the same marks each time.
    monkeypatch.setattr(secrets, "token_hex", lambda size: generator.randbytes(size).hex())
    trace = tmp_path / "executed"
    models = {}
    for case, size in (("shaw", "50GB"), ("alibi", "20KB"), ("rope", "50GB")):
        model = patched_model(case, "llama")
        model.save_pretrained(tmp_path / f"whole-{case}", max_shard_size=size)
        stub = tmp_path / f"whole-{case}" / "modeling_hf_posenc.py"
        stub.write_text(f"open({str(trace)!r}, 'w')\n" + stub.read_text())
        models[case] = logits(model)
    bare = {case: logits(from_pretrained(tmp_path / f"whole-{case}").model) for case in models}
    outcomes = {"refused": 0, "same": 0}
    for number in range(count):
        case = generator.choice(list(models))
        folder = tmp_path / "edited"
        shutil.copytree(tmp_path / f"whole-{case}", folder)
        if generator.random() < 0.15:  # as after a kill
            (folder / PENDING).mkdir()
            shutil.copy(folder / "config.json", folder / PENDING)
            (folder / PENDING / "remove.json").write_text('["model-00009-of-00009.safetensors"]')
        files = [p for p in folder.rglob("*") if p.suffix in (".json", ".safetensors")]
        files = [p for p in files if p.name != "generation_config.json"]
        path = generator.choice(files)
        edited(path, generator)
        before = contents(tmp_path)
        name = generator.choice([name for name in LOADERS if name != "AutoConfig"])
        try:
            loaded, error = LOADERS[name](folder), None
        except Exception as raised:
            loaded, error = None, raised
        if error is not None:
            # What a stock class says of a config that is not its own is its own affair, as long as it loads nothing.
            ours = name != "the stock class" and b'"posenc_' in (folder / "config.json").read_bytes()
            if ours and not isinstance(error, DOCUMENTED):  # an Auto class, which reads the config before we see it
                assert name.startswith("Auto"), (number, name, path, error)
                try:
                    assert logits(from_pretrained(folder)).equal(models[case]), (number, name, path)
                except DOCUMENTED:
                    pass
            outcomes["refused"] += 1
        else:
            if name == "inspect":
                assert isinstance(str(loaded), str)
            else:
                expected = bare[case] if name == "AutoModel" else models[case]
                assert logits(loaded.eval()).equal(expected), (number, name, path)
            outcomes["same"] += 1
        if "trust_remote_code" in name and b'"model_type": "posenc_' not in (folder / "config.json").read_bytes():
            trace.unlink(missing_ok=True)  # who trusts the code of a folder runs it, once its config is not ours
        assert contents(tmp_path) == before, (number, name, path)
        shutil.rmtree(folder)
    assert canary.read_text() == "alive"
    assert not trace.exists()
    return outcomes


@pytest.mark.filterwarnings("ignore")  # of transformers and of versions, about what was edited
def test_edited_checkpoints(tmp_path, monkeypatch):
    outcomes = fuzz(150, tmp_path, monkeypatch)
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers and of versions, about what was edited
def test_edited_checkpoints_at_length(tmp_path, monkeypatch):
    outcomes = fuzz(2000, tmp_path, monkeypatch)
    assert min(outcomes.values()) > 100, outcomes


# --------------------------------------------------------------------------------------------------- savers and readers

# Saves three models in turn, of two schemes and one or several files each, until it is told to stop.
WRITER = """
    import sys, time, os
    from folder_models import states
    folder, seconds = sys.argv[1], float(sys.argv[2])
    models = states()
    end, count = time.monotonic() + seconds, 0
    print("ready", flush=True)
    while time.monotonic() < end:
        model, size = models[count % len(models)]
        model.save_pretrained(folder, max_shard_size=size)
        count += 1
    print(count)
"""

READER = """
    import sys, time, threading, warnings
    import torch
    import hf_posenc
    from folder_models import states, logits
    from hf_posenc import from_pretrained
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()   # tqdm deadlocks now and then where threads make bars of their own
    folder, seconds, threads = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    known = [logits(model) for model, _ in states()]
    end, failures, loads = time.monotonic() + seconds, [], []
    def read(loader):
        while time.monotonic() < end:
            try:
                model = loader(folder)
                if not any(logits(model).equal(each) for each in known):
                    failures.append("a mix")
                loads.append(type(hf_posenc.schemes_of(model)[0]).__name__)
            except BaseException as error:
                failures.append(repr(error)[:300])
    print("ready", flush=True)
    own = [threading.Thread(target=read, args=(AutoModelForCausalLM.from_pretrained,)) for _ in range(threads)]
    for each in own: each.start()
    read(from_pretrained)
    for each in own: each.join()
    print(len(loads), len(set(loads)), len(failures), failures[:3])
"""


def start(code, *arguments):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process):
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-2000:]
    return output.splitlines()[-1]


def save_and_read_together(folder, seconds, threads):
    from folder_models import states

    states()[0][0].save_pretrained(folder)
    writers = [start(WRITER, folder, seconds) for _ in range(2)]
    readers = [start(READER, folder, seconds, threads) for _ in range(2)]
    saves = [int(finished(writer)) for writer in writers]
    read = [finished(reader) for reader in readers]
    return saves, read


def check_together(saves, read, least):
    assert min(saves) >= least, saves
    for line in read:
        loads, kinds, failures, which = line.split(maxsplit=3)
        assert (int(failures), which) == (0, "[]")
        assert int(loads) >= least
        assert int(kinds) == 2  # both schemes were met


@pytest.mark.slow
def test_savers_and_readers_together_for_a_minute(tmp_path):
    check_together(*save_and_read_together(tmp_path, 60, 2), least=20)


def test_threads_that_save_into_one_folder(tmp_path):
    model = patched_model("alibi", "llama")
    errors = []

    def save():
        try:
            for _ in range(5):
                model.save_pretrained(tmp_path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
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


def test_a_config_that_was_read_before_another_model_was_saved(tmp_path):
    """What an Auto class does: it reads the config first, and the model later."""
    old, new = patched_model("alibi", "llama"), patched_model("alibi", "llama", num_hidden_layers=3, rms_norm_eps=0.1)
    old.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, use_cache=False)
    new.save_pretrained(tmp_path)
    loaded = hf_posenc.classes.PosEncLlamaForCausalLM.from_pretrained(tmp_path, config=config)
    assert logits(loaded).equal(logits(new))
    assert not loaded.config.use_cache
    config.rms_norm_eps = 0.5
    with pytest.raises(CheckpointError, match="read the config again"):
        hf_posenc.classes.PosEncLlamaForCausalLM.from_pretrained(tmp_path, config=config)


def killed_while_saving(folder, count, generator):
    """Kill a process that saves again and again at a random moment; what is loaded is one of its models, whole."""
    from folder_models import states

    known = [logits(model) for model, _ in states()]
    met = set()
    for _ in range(count):
        with start(WRITER, folder, 60) as writer:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(generator.uniform(0.0, 0.25))
            writer.send_signal(signal.SIGKILL)
        interrupted = (folder / PENDING).exists()
        loader = generator.choice([from_pretrained, AutoModelForCausalLM.from_pretrained])
        found = logits(loader(folder))
        matches = [index for index, each in enumerate(known) if each.equal(found)]
        assert matches, (interrupted, sorted(path.name for path in folder.iterdir()))
        met.add((matches[0], interrupted))
    return met


@pytest.mark.slow
def test_saving_killed_at_random(tmp_path):
    from folder_models import states

    states()[0][0].save_pretrained(tmp_path)
    killed_while_saving(tmp_path, 2, random.Random(0))


@pytest.mark.exhaustive
def test_saving_killed_a_hundred_times(tmp_path):
    from folder_models import states

    states()[0][0].save_pretrained(tmp_path)
    assert len(killed_while_saving(tmp_path, 100, random.Random(1))) > 2


def test_the_original_is_what_is_pushed_after_an_interrupted_save(tmp_path):
    """One view of a folder: `inspect`, loading and the files that are uploaded agree."""
    patched_model("shaw", "llama").save_pretrained(tmp_path)
    patched_model("alibi", "llama").save_pretrained(tmp_path / PENDING)
    seen = hf_posenc.checkpoints.files.read(tmp_path, lambda folder: json.loads((folder / "config.json").read_text()))
    assert seen["position_encoding"]["schemes"][0]["scheme"] == inspect(tmp_path).scheme == "alibi"


def test_a_patched_model_saved_over_a_stock_one_never_loads_as_stock(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    patch_model(tiny("llama"), "alibi").save_pretrained(tmp_path / PENDING)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not any("posenc" in key for key in state)
    assert type(from_pretrained(tmp_path)).__name__ == "PosEncLlamaForCausalLM"
