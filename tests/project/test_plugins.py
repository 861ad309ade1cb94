"""Schemes and families of other packages: found by their entry points, imported when they are used, and in nobody's way."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from pathlib import Path

import pytest
import transformers
from families import tiny

from hf_posenc import PluginError, UnknownSchemeError, UnsupportedModelError, available_schemes, classes, registry
from hf_posenc.checkpoints import auto_classes as announce
from hf_posenc.cli import main
from hf_posenc.registry import FAMILIES, SCHEMES, family_for, scheme_class, supported_model_types

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
    for file in ("pyproject.toml", "posenc_example.py"):  # building leaves folders behind
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


@pytest.mark.slow
def test_without_the_package_the_error_says_what_is_missing(saved):
    code = f"""
    import hf_posenc
    from hf_posenc import Family, UnknownSchemeError, UnsupportedModelError, register_family
    folder = {str(saved / "hyperclovax")!r}
    try:
        hf_posenc.from_pretrained(folder)
    except UnsupportedModelError as error:
        print("\\nSAID", error)
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        print("\\nSAID", ascii(str(error)))
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except UnsupportedModelError as error:
        print("\\nSAID", error)
    register_family(Family(model_types=("hyperclovax",)))  # by hand, after the import
    for load in (hf_posenc.from_pretrained, AutoModelForCausalLM.from_pretrained):
        try:
            load(folder)
        except UnknownSchemeError as error:
            print("\\nSAID", error)
    """
    family, auto, trusted, *scheme = [line for line in python(code).splitlines() if line.startswith("SAID")]
    assert "model type 'hyperclovax' cannot be patched: nobody has yet described" in family
    assert "install or import the package that brings its family" in family
    assert trusted == family
    assert "custom code" in auto  # transformers knows no posenc_hyperclovax, and says what it has to say to that
    assert len(scheme) == 2
    for said in scheme:
        assert "unknown scheme 'root_penalty'; choose from alibi" in said


# -------------------------------------------------------------------------------------------- what can go wrong with names


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
    monkeypatch.setattr(registry, "_BROKEN", {})
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

            @dataclass(frozen=True, kw_only=True)
            class Twin(Scheme):
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

    (tmp_path / "exits.py").write_text("raise SystemExit(1)")
    (tmp_path / "registers.py").write_text(
        "from dataclasses import dataclass\nimport hf_posenc\n"
        "@hf_posenc.register_scheme\n@dataclass(frozen=True, kw_only=True)\n"
        "class Faulty(hf_posenc.Scheme):\n    name = 'faulty'\n"
        "    def __post_init__(self):\n        raise RuntimeError('no licence')\n"
    )

    def install(*rows):
        found = EntryPoints(EntryPoint(name, value, group)._for(Fake(of)) for group, name, value, of in rows)
        monkeypatch.setattr(registry, "entry_points", lambda: found)
        registry._ENTRY_POINTS.clear()
        registry.available_schemes()
        registry.supported_model_types()

    yield install
    for name in ("offered", "registers"):
        sys.modules.pop(name, None)


def test_an_undecorated_class_is_registered_by_its_entry_point(offers):
    offers((SCHEMES, "fine", "offered:Fine", "one"))
    assert "fine" in available_schemes()
    assert "offered" not in sys.modules
    assert scheme_class("fine").__module__ == "offered"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gone", "no_such_module:Fine", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("gone", "offered:Gone", "cannot be loaded: AttributeError"),
        ("gone", "offered", "must register a scheme named 'gone'"),
        ("gone", "offered:Fine", "must register a scheme named 'gone'"),
        ("gone", "offered:number", "must lead to a scheme class"),
        ("loose", "offered:Loose", "must be a frozen dataclass"),
        ("faulty", "offered:Faulty", "cannot be made without arguments: RuntimeError: no licence"),
        ("faulty", "registers", "cannot be made without arguments: RuntimeError: no licence"),
        ("gone", "exits:Fine", "cannot be loaded: SystemExit: 1"),
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


def test_the_command_lists_the_others_beside_a_broken_one(offers, capsys):
    offers((SCHEMES, "gone", "no_such_module:Gone", "broken-package"), (SCHEMES, "fine", "offered:Fine", "one"))
    assert main(["schemes"]) == 0
    lines = capsys.readouterr().out
    assert "gone\n    cannot be used: hf_posenc.schemes entry point 'gone'" in lines
    assert "fine()" in lines
    assert "alibi(" in lines


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


def test_a_family_of_two_model_types_has_two_entry_points(offers):
    offers((FAMILIES, "hyperclovax", "offered:TWO", "one"), (FAMILIES, "diffllama", "offered:TWO", "one"))
    assert {"hyperclovax", "diffllama"} <= set(supported_model_types())
    assert family_for("diffllama") is family_for("hyperclovax")


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


def test_a_class_of_somebody_else_cannot_take_an_offered_name(offers):
    offers((SCHEMES, "fine", "offered:Fine", "one"))
    import offered

    offered.Fine.__module__ = "somebody"
    with pytest.raises(ValueError, match=r"'fine' of somebody.Fine is taken by .* of one 7.0"):
        registry.register_scheme(offered.Fine)
    scheme_class_of = registry.register_scheme(offered.Twin)  # the package itself, imported before its name was used
    assert scheme_class("fine") is scheme_class_of


def test_a_model_type_that_transformers_lacks_is_a_warning(offers):
    offers((FAMILIES, "lama", "offered:ROW", "one"))
    with pytest.warns(
        UserWarning, match=r"'lama' = .* of one 7.0 cannot be used: the installed transformers has no such model type"
    ):
        announce.announce_all()


def test_names_of_classes_that_are_none():
    with pytest.raises(AttributeError, match="PosEncNothing"):
        classes.PosEncNothing  # noqa: B018
    with pytest.raises(UnsupportedModelError, match="model type 'bert' cannot be patched: it is an encoder"):
        classes.PosEncBertModel  # noqa: B018


@pytest.mark.parametrize("name", ["base", "two words", "dotted.name", ""])
def test_a_name_that_no_buffer_could_have_is_refused(offers, name):
    offers()
    import offered

    offered.Fine.name = name
    with pytest.raises(ValueError, match="must be an identifier"):
        registry.register_scheme(offered.Fine)


def test_the_examples_model_type_is_served_by_nobody_else():
    """Or the test of the package from outside would test a family of this one."""
    assert "hyperclovax" not in supported_model_types()
    assert "hyperclovax" in transformers.CONFIG_MAPPING
    with pytest.raises(UnsupportedModelError):
        family_for("hyperclovax")
    assert tiny("llama").config.model_type in supported_model_types()
