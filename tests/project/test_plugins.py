"""Schemes and families of other packages: found by their entry points, imported when they are used, and in nobody's way."""

import importlib
import os
import pickle
import subprocess
import sys
import textwrap
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from pathlib import Path

import peft
import pytest
import torch
import transformers
from transformers.models.auto import configuration_auto

import hf_posenc
from hf_posenc import PluginError, UnknownSchemeError, UnsupportedModelError, available_schemes, classes, patch_model
from hf_posenc.checkpoints import auto_classes as announce
from hf_posenc.core import registry
from hf_posenc.core.registry import FAMILIES, SCHEMES, family_for, scheme_class

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests/project/plugin"

PREPARE = """
import warnings, torch
from transformers import HyperCLOVAXConfig, HyperCLOVAXForCausalLM, AutoModelForCausalLM
warnings.simplefilter("error")
tokens = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(0))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that pip has installed the example package into."""
    folder = tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source")
    for file in ("pyproject.toml", "posenc_example.py", "posenc_own_classes.py"):  # building leaves folders behind
        (source / file).write_bytes((PLUGIN / file).read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", folder, source], check=True)
    return folder


def python(code, *paths):
    """Run code in a new process that finds these folders; return what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths))), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", PREPARE + textwrap.dedent(code)],
        env=environment,
        stdin=subprocess.DEVNULL,  # transformers asks whether custom code may run
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def saved(installed, tmp_path_factory):
    """A checkpoint of the example's family with the example's scheme, trained a step; with its logits beside it."""
    folder = tmp_path_factory.mktemp("saved")
    code = f"""
    import sys, hf_posenc
    assert "root_penalty" in hf_posenc.available_schemes()
    assert "posenc_example" not in sys.modules  # names are known before anything is imported
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = HyperCLOVAXConfig(vocab_size=97, num_key_value_heads=2, initializer_range=0.2, **sizes)
    model = hf_posenc.patch_model(HyperCLOVAXForCausalLM(config), "root_penalty", start=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.model.layers[0].self_attn.posenc.slopes.detach().clone()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert not model.model.layers[0].self_attn.posenc.slopes.equal(before)
    model.eval()
    assert hf_posenc.verify(model), hf_posenc.verify(model)
    assert hf_posenc.which_engine(model, 4096).engine == "toeplitz"
    model.save_pretrained({str(folder / "hyperclovax")!r})
    torch.save(model(tokens).logits.detach(), {str(folder / "logits")!r})
    """
    python(code, installed)
    return folder


@pytest.mark.slow
def test_a_new_process_loads_what_was_saved(installed, saved):
    """First as one who knows nothing of hf_posenc: the file beside the checkpoint imports it."""
    code = f"""
    def check(model):
        assert type(model).__name__ == "PosEncHyperCLOVAXForCausalLM"
        assert torch.equal(model(tokens).logits, torch.load({str(saved / "logits")!r}))

    folder = {str(saved / "hyperclovax")!r}
    check(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))
    import hf_posenc
    check(hf_posenc.from_pretrained(folder))
    check(AutoModelForCausalLM.from_pretrained(folder))
    print(hf_posenc.inspect(folder))
    """
    assert "root_penalty(start=0.25)" in python(code, installed)


SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def stranger(monkeypatch):
    """The module with the classes, imported; transformers and the registries forget them afterwards."""
    autos = (transformers.AutoModel, transformers.AutoModelForCausalLM)
    for mapping in (transformers.CONFIG_MAPPING, *(auto._model_mapping for auto in autos)):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    monkeypatch.setitem(configuration_auto.CONFIG_MAPPING_NAMES, "posenc_stranger", "")
    monkeypatch.syspath_prepend(str(PLUGIN))
    yield importlib.import_module("posenc_own_classes")
    del sys.modules["posenc_own_classes"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("scheme", ["alibi", "rope"])
def test_classes_of_ones_own_are_found_by_every_loader(scheme, stranger, tmp_path):
    config = stranger.StrangerConfig(**SIZES, initializer_range=0.2)
    hf_posenc.register_family(stranger.STRANGER)
    model = patch_model(stranger.StrangerForCausalLM(config).eval(), scheme)
    ids = torch.arange(3, 20)[None]
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "model")
    adapted = peft.get_peft_model(
        hf_posenc.from_pretrained(tmp_path / "model"), peft.LoraConfig(target_modules="all-linear")
    )
    adapted.save_pretrained(tmp_path / "adapter")
    loaders = {
        "ours": lambda: hf_posenc.from_pretrained(tmp_path / "model"),
        "auto": lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        "class": lambda: classes.PosEncStrangerForCausalLM.from_pretrained(tmp_path / "model"),
        "adapter": lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
    }
    for name, load in loaders.items():
        assert load().eval()(ids).logits.equal(expected), name
    body = transformers.AutoModel.from_pretrained(tmp_path / "model").eval()
    assert model.lm_head(body(ids).last_hidden_state).equal(expected)
    with pytest.raises(UnsupportedModelError, match=f"no stock class computes {scheme} on stranger"):
        hf_posenc.export_stock(model, tmp_path / "export")  # the stock model would have both positions again


class Fake(Distribution):
    """A distribution that has entry points and nothing else."""

    def __init__(self, name):
        self.title = name

    def read_text(self, filename):
        return f"Metadata-Version: 2.1\nName: {self.title}\nVersion: 7.0\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


@pytest.fixture
def offers(monkeypatch, tmp_path):
    """`(group, name, value, distribution)`... -> as if these were installed; the registries are put back afterwards."""
    monkeypatch.setattr(registry, "_ENTRY_POINTS", {})
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "offered.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            from typing import ClassVar
            from hf_posenc import Family, Scheme

            @dataclass(frozen=True, kw_only=True)
            class Fine(Scheme):
                name: ClassVar[str] = "fine"

            class Loose(Scheme):
                name = "loose"

            @dataclass(frozen=True, kw_only=True)
            class Faulty(Scheme):
                name: ClassVar[str] = "faulty"
                def __post_init__(self):
                    raise RuntimeError("no licence")

            ROW = Family(model_types=("hyperclovax",))
            TWO = Family(model_types=("hyperclovax", "diffllama"))
            number = 3
            """
        ),
        encoding="utf-8",
    )

    def install(*rows):
        found = EntryPoints(EntryPoint(name, value, group)._for(Fake(of)) for group, name, value, of in rows)
        monkeypatch.setattr(registry, "entry_points", lambda: found)
        registry._ENTRY_POINTS.clear()
        registry.available_schemes()
        registry.supported_model_types()

    yield install
    sys.modules.pop("offered", None)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gone", "no_such_module:Fine", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("gone", "offered:Fine", "must lead to a scheme class named 'gone'"),
        ("gone", "offered:number", "must lead to a scheme class"),
        ("loose", "offered:Loose", "must be a frozen dataclass"),
        ("faulty", "offered:Faulty", "cannot be made without arguments: RuntimeError: no licence"),
    ],
)
def test_a_broken_scheme_breaks_its_own_name_only(offers, name, value, said):
    offers((SCHEMES, name, value, "broken-package"), (SCHEMES, "fine", "offered:Fine", "one"))
    for _ in range(2):  # it does not become usable by being asked for
        with pytest.raises(PluginError, match=said) as error:
            scheme_class(name)
    assert f"{SCHEMES} entry point {name!r} = {value!r} of broken-package 7.0" in str(error.value)
    assert {"fine", "alibi", name} <= set(available_schemes())
    assert scheme_class("fine")
    assert scheme_class("alibi")
    with pytest.raises(UnknownSchemeError, match=r"choose from alibi, .*fine"):
        scheme_class("nobody")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:ROW", "cannot be loaded: ModuleNotFoundError"),
        ("offered:number", "must lead to a Family with 'hyperclovax' among its model_types"),
        ("offered:TWO", "serves diffllama too: give each an entry point"),
    ],
)
def test_a_broken_family_breaks_its_own_name_only(offers, value, said):
    offers((FAMILIES, "hyperclovax", value, "broken-package"))
    announce.announce_all()  # as the import does: nothing is loaded, so nothing can fail
    with pytest.raises(PluginError, match=rf"'hyperclovax' = '{value}' of broken-package 7.0 {said}"):
        family_for("hyperclovax")
    assert family_for("llama")
    with pytest.raises(UnsupportedModelError, match="Did you mean hyperclovax"):
        family_for("hyperclova")


@pytest.mark.parametrize("group", [SCHEMES, FAMILIES])
def test_a_name_of_two_packages_is_nobodys(offers, group):
    name, value = ("fine", "offered:Fine") if group == SCHEMES else ("hyperclovax", "offered:ROW")
    offers((group, name, value, "one"), (group, name, value, "two"))
    with pytest.raises(PluginError, match=r"of one 7.0 and .* of two 7.0 offer the same name"):
        (scheme_class if group == SCHEMES else family_for)(name)


@pytest.mark.parametrize(("group", "name"), [(SCHEMES, "alibi"), (FAMILIES, "llama")])
def test_nobody_replaces_what_the_package_has(offers, group, name):
    before = scheme_class("alibi"), family_for("llama")
    with pytest.warns(UserWarning, match=rf"{name!r} = 'offered:Fine' of one 7.0 is ignored: hf_posenc has a"):
        offers((group, name, "offered:Fine", "one"))
    assert (scheme_class("alibi"), family_for("llama")) == before
