"""Registries: one file per scheme, one name per file, no duplicates, and docstrings that say what they must."""

import inspect
import pkgutil
from dataclasses import dataclass, fields, is_dataclass
from typing import ClassVar

import pytest
from asked import lacks

import hf_posenc
from hf_posenc import Scheme, available_schemes, schemes
from hf_posenc.core import registry
from hf_posenc.core.registry import register_scheme, scheme_class
from hf_posenc.schemes.base import EVERY_SCHEME

FILES = sorted(module.name for module in pkgutil.iter_modules(schemes.__path__) if module.name != "base")


def test_every_file_is_one_scheme_of_its_name():
    assert tuple(FILES) == available_schemes()


@pytest.mark.parametrize("name", available_schemes())
def test_a_scheme_lacks_nothing(name):
    assert lacks(name) == []


def test_a_model_type_lacks_nothing():
    assert [*lacks("llama"), *lacks("falcon")] == []


@pytest.mark.parametrize("name", available_schemes())
def test_a_scheme_is_a_frozen_keyword_only_dataclass_with_defaults(name):
    cls = scheme_class(name)
    assert is_dataclass(cls)
    scheme = cls()
    assert set(scheme.hyperparameters()) == {field.name for field in fields(cls)}
    assert cls.parse(scheme.hyperparameters()) == scheme
    assert hash(cls()) == hash(scheme) or name == "rope"
    with pytest.raises(AttributeError):
        scheme.name = "other"
    if fields(cls):
        with pytest.raises((TypeError, ValueError)):  # ValueError of the only field that may be positional
            cls(1)
    assert scheme.place


@pytest.mark.parametrize("name", available_schemes())
def test_a_docstring_explains_every_hyperparameter(name):
    text = inspect.getdoc(scheme_class(name))
    explained = {line.strip().partition(":")[0] for line in text.partition("Args:")[2].splitlines() if ":" in line}
    assert {field.name for field in fields(scheme_class(name))} - set(EVERY_SCHEME) <= explained


def test_what_every_scheme_has_is_explained_once():
    text = inspect.getdoc(Scheme).partition("Attributes:")[2]
    assert {field.name for field in fields(Scheme)} == set(EVERY_SCHEME)
    assert all(f"{name}: " in text for name in EVERY_SCHEME)


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))


def scheme_named(scheme_name):
    @dataclass(frozen=True, kw_only=True)
    class Another(Scheme):
        name: ClassVar[str] = scheme_name

    return Another


def test_a_duplicate_is_refused(own_registry):
    with pytest.raises(ValueError, match=r"taken by hf_posenc.schemes.alibi.Alibi"):
        register_scheme(scheme_named("alibi"))
    assert scheme_class("alibi").__name__ == "Alibi"


def test_a_cell_that_runs_again_replaces_its_own_class_only(own_registry):
    source = """
@register_scheme
@dataclass(frozen=True, kw_only=True)
class Cell(Scheme):
    name: ClassVar[str] = "cell"
    size: int = SIZE
"""
    names = {"__name__": "notebook", **{each.__name__: each for each in (register_scheme, dataclass, Scheme)}}
    for size in (1, 2):
        exec(source, {**names, "ClassVar": ClassVar, "SIZE": size})
        assert scheme_class("cell")().size == size
    with pytest.raises(ValueError, match=r"'cell' of elsewhere.Cell is taken by notebook.Cell"):
        exec(source, {**names, "ClassVar": ClassVar, "SIZE": 3, "__name__": "elsewhere"})
    one, other = scheme_named("local"), scheme_named("local")
    register_scheme(one)
    with pytest.raises(ValueError, match="rename one of them"):  # two classes that a function made are two
        register_scheme(other)


def test_public_names_exist():
    assert all(hasattr(hf_posenc, name) for name in hf_posenc.__all__)
    assert len(set(hf_posenc.__all__)) == len(hf_posenc.__all__)
