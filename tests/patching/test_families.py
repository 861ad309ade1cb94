"""Families name modules that exist, refuse what they must, and say precisely what is wrong when they do not fit."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch
from decoders import decoder
from families import FAMILIES, LEARNED, ROTARY, build, tiny
from torch import nn

from hf_posenc import errors, patch_model, registry
from hf_posenc.errors import UnknownSchemeError, UnsupportedModelError
from hf_posenc.families import Family, Names, refused, table
from hf_posenc.families.base import resolve
from hf_posenc.registry import family_for


def family_of(model):
    return family_for(model.config.model_type)


def renamed(family, part="names", **names):
    """A family with other names."""
    return replace(family, **{part: replace(getattr(family, part), **names)})


def facts(model):
    """What can be said of a model without naming an object: structure, plain attributes, values, what is shared."""
    plain = (bool, int, float, str, type(None), torch.dtype)
    seen = {}
    parts = [("config", model.config), ("generation_config", model.generation_config), *model.named_modules()]
    for name, part in parts:
        attributes = {
            key: value if isinstance(value, plain) else (type(value), len(value) if hasattr(value, "__len__") else None)
            for key, value in vars(part).items()
        }
        objects = [
            (key, seen.setdefault(id(value), (name, key))) for key, value in vars(part).items() if key == "config"
        ]
        yield name, type(part), list(attributes.items()), objects
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, seen.setdefault(id(parameter), name), parameter.requires_grad, vars(parameter), parameter.tolist()
    yield [(name, buffer.dtype, buffer.tolist()) for name, buffer in model.named_buffers()]
    yield model.config.to_dict(), model.generation_config.to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_a_tiny_model_is_one(family):
    """Tests get copies of one that was built: they are the same in all that can be said, and share nothing."""
    built, first, second = build(family), tiny(family), tiny(family)
    assert list(facts(first)) == list(facts(second)) == list(facts(built))
    for one, other in ((first, second), (second, built)):
        assert one.config is not other.config
        assert not set(map(id, one.modules())) & set(map(id, other.modules()))
        held = {tensor.data_ptr() for tensor in (*one.parameters(), *one.buffers())}
        assert not held & {tensor.data_ptr() for tensor in (*other.parameters(), *other.buffers())}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bare", [False, True], ids=["causal-lm", "bare"])
def test_every_name_resolves(family, bare):
    model = tiny(family)
    before = [(name, type(module)) for name, module in model.named_modules()]
    found = resolve(family_of(model), model.base_model if bare else model)

    assert len(found.layers) == len(found.attentions) == model.config.num_hidden_layers
    pairs = zip(found.layers, found.attentions, strict=True)
    assert all(attention in set(layer.modules()) for layer, attention in pairs)
    assert [attention.layer_idx for attention in found.attentions] == list(range(len(found.layers)))
    assert found.token_embedding is model.get_input_embeddings()
    assert (found.rotary is None) == (family in LEARNED)
    assert (found.position_table is None) == (family in ROTARY)
    if found.position_table is not None:
        rows = model.config.max_position_embeddings + family_of(model).table_offset
        assert isinstance(found.position_table, nn.Embedding)
        assert found.position_table.weight.shape == (rows, model.config.hidden_size)
    assert before == [(name, type(module)) for name, module in model.named_modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_one_rotary_module_serves_all_layers(family):
    model = tiny(family)
    found = resolve(family_of(model), model)
    makers = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
    assert makers == ([] if found.rotary is None else [found.rotary])


def test_every_family_is_registered_under_its_own_types():
    served = {family_for(model_type).model_types for model_type in registry.supported_model_types()}
    assert sorted(name for types in served for name in types) == sorted(registry.supported_model_types())
    assert {each.model_types for each in table.FAMILIES} < served  # others have files of their own
    assert {tiny(family).config.model_type for family in FAMILIES} <= set(registry.supported_model_types())


@pytest.mark.parametrize("family", LEARNED)
def test_split_and_merge_heads_are_the_familys_own(family):
    """Causal attention built from the family's pieces, in plain torch, is the family's attention module."""
    model = tiny(family)
    served = family_of(model)
    attention = resolve(served, model).attentions[1]
    hidden = torch.randn(2, 7, model.config.hidden_size)

    query, key, value = served.attention.split_heads(attention, hidden)
    assert query.shape == key.shape == value.shape == (2, attention.num_heads, 7, attention.head_dim)
    scores = query @ key.transpose(-1, -2) * (1.0 if served.attention.query_is_scaled else attention.scaling)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    merged = served.attention.merge_heads(attention, (weights @ value).transpose(1, 2), {})

    mask = torch.zeros(7, 7).masked_fill(future, torch.finfo(torch.float32).min)[None, None]
    torch.testing.assert_close(merged, attention(hidden, attention_mask=mask)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("family", "option"), [("gpt2", "attn_pdrop"), ("opt", "attention_dropout")])
def test_attention_dropout_is_the_configs(family, option):
    model = tiny(family, **{option: 0.25})
    served = family_of(model)
    assert [served.attention.dropout(a) for a in resolve(served, model).attentions] == [0.25, 0.25]


def test_merge_heads_of_gpt2_has_the_residual_dropout():
    model = tiny("gpt2", resid_pdrop=0.5).train()
    served = family_of(model)
    attention = resolve(served, model).attentions[0]
    merged = served.attention.merge_heads(attention, torch.randn(2, 5, attention.num_heads, attention.head_dim), {})
    assert 0 < (merged == 0).float().mean() < 1


@pytest.mark.parametrize(
    ("family", "name_of_field", "parent"),
    [
        ("llama", "decoder", "LlamaModel"),
        ("llama", "layers", "LlamaModel"),
        ("llama", "attention", "LlamaDecoderLayer"),
        ("llama", "token_embedding", "LlamaModel"),
        ("llama", "rotary", "LlamaModel"),
        ("opt", "decoder", "OPTModel"),
        ("opt", "position_table", "OPTDecoder"),
        ("gpt2", "position_table", "GPT2Model"),
    ],
)
@pytest.mark.parametrize("wrong", ["nowhere", "config.hidden_size", "norm.nowhere"])
def test_a_wrong_name_is_reported_with_field_name_and_parent(family, name_of_field, parent, wrong):
    model = tiny(family)
    part = "rotation" if name_of_field == "rotary" else "names"
    broken = renamed(family_of(model), part, **{name_of_field: wrong})
    with pytest.raises(UnsupportedModelError) as error:
        resolve(broken, model)
    for needed in (f"{name_of_field}='{wrong}'", parent, *broken.model_types):
        assert needed in str(error.value)


def test_layers_must_be_a_filled_module_list():
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match=r"layers='norm' of LlamaModel is no ModuleList"):
        resolve(renamed(family_of(model), layers="norm"), model)
    model.model.layers = nn.ModuleList()
    with pytest.raises(UnsupportedModelError, match=r"layers='layers' of LlamaModel is no ModuleList with at least"):
        resolve(family_of(model), model)


def test_one_odd_layer_is_found():
    model = tiny("llama")
    del model.model.layers[1].self_attn
    with pytest.raises(UnsupportedModelError, match=r"attention='self_attn' is no module of LlamaDecoderLayer"):
        resolve(family_of(model), model)


def test_an_attention_without_what_we_read_is_refused():
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match=r"attention='mlp' is a LlamaMLP, which has no attribute 'scaling'"):
        resolve(renamed(family_of(model), attention="mlp"), model)
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention, which has no attribute 'use_rope'"):
        resolve(renamed(family_of(model), "rotation", attention_switch="use_rope"), model)


@pytest.mark.parametrize(
    ("family", "option", "reason"),
    [
        ("gpt2", "reorder_and_upcast_attn", "bypasses the attention interface"),
        ("gpt2", "add_cross_attention", "only decoder-only models"),
        ("gemma", "use_bidirectional_attention", "at or before the query"),
        ("gemma2", "use_bidirectional_attention", "at or before the query"),
        ("gemma3", "use_bidirectional_attention", "at or before the query"),
    ],
)
def test_refused_settings(family, option, reason):
    model = tiny(family, **{option: True})
    with pytest.raises(UnsupportedModelError, match=rf"config\.{option} = True; .*{reason}"):
        resolve(family_of(model), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_turned_encoder_is_refused(family):
    model = tiny(family)
    model.config.is_causal = False
    with pytest.raises(UnsupportedModelError, match=r"config\.is_causal = False"):
        resolve(family_of(model), model)


def test_an_unknown_model_type_says_what_lists_the_known_ones():
    with pytest.raises(
        UnsupportedModelError, match=r"'clip' is not supported \(`hf-posenc families` lists the supported ones"
    ):
        family_for("clip")


def test_families_are_frozen_and_survive_copying():
    for model_type in registry.supported_model_types():
        served = family_for(model_type)
        assert copy.deepcopy(served) == served == pickle.loads(pickle.dumps(served))
        with pytest.raises(FrozenInstanceError):
            served.names = Names()


def scheme(title, name):
    return dataclass(frozen=True, kw_only=True)(type(title, (), {"name": name, "known_as": {}}))


class TestRegistry:
    """Both registries refuse duplicates and list the choices; each test works on empty ones."""

    @pytest.fixture(autouse=True)
    def empty(self, monkeypatch):
        monkeypatch.setattr(registry, "_FAMILIES", {})
        monkeypatch.setattr(registry, "_SCHEMES", {})
        monkeypatch.setattr(registry, "_ENTRY_POINTS", {})

    def test_a_model_type_has_one_adapter(self):
        first = registry.register_family(Family(model_types=("a", "b")))
        assert registry.register_family(Family(model_types=("a", "b"))) == first
        with pytest.raises(ValueError, match=r"'b' is already served by the family for a, b"):
            registry.register_family(Family(model_types=("c", "b")))
        assert registry.supported_model_types() == ("a", "b")
        assert registry.family_for("a") == registry.family_for("b") == first

    def test_an_adapter_for_nothing_is_refused(self):
        with pytest.raises(ValueError, match="names no model type"):
            registry.register_family(Family(model_types=()))

    def test_a_scheme_name_is_used_once(self):
        first, second = scheme("First", "x"), scheme("Second", "x")
        assert registry.register_scheme(first) is registry.register_scheme(first) is first
        with pytest.raises(ValueError, match=r"'x' of .*Second is taken by .*First"):
            registry.register_scheme(second)
        assert registry.scheme_class("x") is first

    def test_an_unknown_scheme_lists_the_choices(self):
        for name in ("b", "a"):
            registry.register_scheme(scheme("S", name))
        assert registry.available_schemes() == ("a", "b")
        with pytest.raises(UnknownSchemeError, match="unknown scheme 'c'; choose from a, b"):
            registry.scheme_class("c")


def test_errors_are_also_the_built_in_ones():
    built_in = {
        errors.UnknownSchemeError: ValueError,
        errors.UnsupportedModelError: TypeError,
        errors.AlreadyPatchedError: RuntimeError,
        errors.NotPatchedError: RuntimeError,
    }
    for error, base in built_in.items():
        assert issubclass(error, errors.HfPosencError)
        assert issubclass(error, base)


def test_a_family_without_pieces_of_its_attention_says_so():
    family = Family(model_types=("opaque", "veiled"))
    with pytest.raises(UnsupportedModelError, match="for opaque, veiled names no pieces of its attention"):
        family.own_attention()


def test_a_type_that_needs_a_newer_transformers_says_which(monkeypatch):
    monkeypatch.setattr(refused, "version", lambda _: "5.22.1")
    with pytest.raises(UnsupportedModelError, match=r"'dbrx' cannot be patched .* install transformers 5\.23 or newer"):
        patch_model(decoder("dbrx"), "alibi")
    monkeypatch.setattr(refused, "version", lambda _: "5.23.0.dev0")
    assert refused.missing_release("dbrx") is None
