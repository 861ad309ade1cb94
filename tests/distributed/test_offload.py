"""Offloaded and dispatched models: patched before, they compute what they should; afterwards, patching is refused."""

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from families import tiny, tokens
from matrix import matrix
from situations import BASES, CASES, randomize
from snapshots import assert_same, snapshot

from hf_posenc import UnsupportedModelError, from_pretrained, patch_model, unpatch_model, which_engine

FIRST = {"gpt2": "transformer.h.0", "llama": "model.layers.0"}
LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}


def on_cpu(model, folder):
    accelerate.cpu_offload(model, "cpu")


def on_disk(model, folder):
    accelerate.disk_offload(model, folder / "offloaded", execution_device="cpu")


def dispatched(place):
    """Some layers here, the rest in a file or under the care of accelerate."""

    def dispatch(model, folder):
        family = model.config.model_type.removeprefix("posenc_")
        names = [name for name, child in model.named_children() for name in parts(name, child, family)]
        places = {name: place if name.startswith(LAYERS[family]) else "cpu" for name in names}
        places[FIRST[family]] = "cpu"
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder / "offloaded")
        assert any(parameter.is_meta for parameter in model.parameters())

    return dispatch


def parts(name, module, family):
    """Names down to the layers, each of which is placed as a whole."""
    if name == LAYERS[family] or LAYERS[family].startswith(name):
        return [part for key, child in module.named_children() for part in parts(f"{name}.{key}", child, family)]
    return [name]


WAYS = {"cpu_offload": on_cpu, "disk_offload": on_disk, "dispatch_disk": dispatched("disk")}
every_base = pytest.mark.parametrize("family", BASES)
every_row = matrix(way=WAYS, case=CASES, family=BASES)


@torch.no_grad()
def logits(model):
    return model(tokens(), use_cache=False).logits


def made(case, family):
    scheme, hyperparameters = CASES[case]
    return randomize(patch_model(tiny(family), scheme, seed=0, **hyperparameters))


# transformers 5.17 compares with where the weights wait.
@pytest.mark.rows(default=6, slow=20)
@pytest.mark.filterwarnings(
    "ignore:You are calling .generate.. with the `input_ids` being on a device type:UserWarning"
)
@every_row
def test_patched_before(family, case, way, tmp_path):
    expected = logits(made(case, family))
    model = made(case, family)
    WAYS[way](model, tmp_path)
    with pytest.raises(UnsupportedModelError, match="ask for the engine before dispatching"):
        which_engine(model, 4096)
    assert logits(model).equal(expected)
    ids = tokens(2, 6)
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    assert model.generate(ids, **options).equal(made(case, family).generate(ids, **options))


@pytest.mark.rows(default=3, slow=9)
@every_row
def test_patched_after(family, case, way, tmp_path):
    """What is put in then has no hook: it stays on the meta device, or beside layers that are elsewhere."""
    scheme, hyperparameters = CASES[case]
    model = tiny(family)
    expected = logits(model)
    WAYS[way](model, tmp_path)
    before = snapshot(model, run=False)
    with pytest.raises(
        UnsupportedModelError, match=r"patch the model before dispatching.*from_pretrained\(.*device_map="
    ):
        patch_model(model, scheme, **hyperparameters)
    assert_meta_same(snapshot(model, run=False), before)
    assert logits(model).equal(expected)


def assert_meta_same(after, before):
    """As `assert_same`; of tensors that are on the meta device there is no value to compare."""
    for each in (after, before):
        for key in [key for key, value in each.values.items() if value.is_meta]:
            del each.values[key]
    assert_same(after, before)


@pytest.mark.rows(default=3, slow=9)
@every_row
def test_unpatching_afterwards(family, case, way, tmp_path):
    stock = logits(tiny(family))
    model = made(case, family)
    WAYS[way](model, tmp_path)
    expected = logits(model)
    with pytest.raises(UnsupportedModelError, match="unpatch the model before dispatching"):
        unpatch_model(model)
    assert logits(model).equal(expected)
    if way == "cpu_offload":  # what accelerate kept in memory it brings back
        remove_hook_from_module(model, recurse=True)
        assert logits(model).equal(expected)
        assert logits(unpatch_model(model)).equal(stock)


@every_base
def test_a_model_spread_over_devices_is_refused(family):
    """Hooks that move inputs and outputs are enough: there is no second device here, and none is needed."""
    model = tiny(family)
    for device, layer in zip(("cpu", "cuda:1"), model.get_submodule(LAYERS[family]), strict=True):
        hook = AlignDevicesHook(device)
        hook.init_hook = lambda module: module  # which would move the weights
        add_hook_to_module(layer, hook, append=True)
    with pytest.raises(UnsupportedModelError, match="spread over cpu, cuda:1: patch the model before dispatching"):
        patch_model(model, "alibi")


@every_base
def test_what_the_message_says_to_do_works(family, tmp_path):
    tiny(family).save_pretrained(tmp_path / "stock")
    expected = logits(patch_model(tiny(family), "shaw", seed=0))
    places = {"transformer" if family == "gpt2" else "model": "disk", "lm_head": "cpu"}
    if family == "gpt2":  # whose output embeddings are its input embeddings
        places = {
            "transformer.wte": "cpu",
            "transformer.wpe": "cpu",
            "transformer.drop": "cpu",
            "transformer.h": "disk",
        }
        places |= {"transformer.ln_f": "cpu", "lm_head": "cpu"}
    options = {"device_map": places, "offload_folder": str(tmp_path / "offloaded")}
    model = from_pretrained(tmp_path / "stock", scheme="shaw", seed=0, **options)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert logits(model).equal(expected)
