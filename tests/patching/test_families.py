"""Families name modules that exist, refuse what they must, and say precisely what is wrong when they do not fit."""

from dataclasses import replace

import pytest
import torch
from decoders import decoder
from families import FAMILIES, LEARNED, ROTARY, tiny
from torch import nn

from hf_posenc import patch_model
from hf_posenc.core import errors, registry
from hf_posenc.core.errors import UnsupportedModelError
from hf_posenc.core.registry import family_for
from hf_posenc.families import Family, refused, table
from hf_posenc.families.base import resolve


def family_of(model):
    return family_for(model.config.model_type)


def renamed(family, part="names", **names):
    """A family with other names."""
    return replace(family, **{part: replace(getattr(family, part), **names)})


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
    makers = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
    assert makers == ([] if found.rotary is None else [found.rotary])  # one serves all layers
    assert found.token_embedding is model.get_input_embeddings()
    assert (found.rotary is None) == (family in LEARNED)
    assert (found.position_table is None) == (family in ROTARY)
    if found.position_table is not None:
        rows = model.config.max_position_embeddings + family_of(model).table_offset
        assert isinstance(found.position_table, nn.Embedding)
        assert found.position_table.weight.shape == (rows, model.config.hidden_size)
    assert before == [(name, type(module)) for name, module in model.named_modules()]


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


@pytest.mark.parametrize("wrong", ["nowhere", "config.hidden_size", "norm.nowhere"])
@pytest.mark.parametrize(
    ("family", "name_of_field", "parent"),
    [
        ("opt", "decoder", "OPTModel"),
        ("llama", "attention", "LlamaDecoderLayer"),
        ("llama", "rotary", "LlamaModel"),
        ("gpt2", "position_table", "GPT2Model"),
    ],
)
def test_a_wrong_name_is_reported_with_field_name_and_parent(family, name_of_field, parent, wrong):
    model = tiny(family)
    part = "rotation" if name_of_field == "rotary" else "names"
    broken = renamed(family_of(model), part, **{name_of_field: wrong})
    with pytest.raises(UnsupportedModelError) as error:
        resolve(broken, model)
    for needed in (f"{name_of_field}='{wrong}'", parent, *broken.model_types):
        assert needed in str(error.value)


def test_what_does_not_fit_a_family_is_said():
    model = tiny("llama")
    with pytest.raises(UnsupportedModelError, match=r"layers='layer' is no module of LlamaModel"):
        resolve(renamed(family_of(model), layers="layer"), model)
    with pytest.raises(UnsupportedModelError, match=r"attention='mlp' is a LlamaMLP, which has no attribute 'scaling'"):
        resolve(renamed(family_of(model), attention="mlp"), model)
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention, which has no attribute 'use_rope'"):
        resolve(renamed(family_of(model), "rotation", attention_switch="use_rope"), model)
    del model.model.layers[1].self_attn
    with pytest.raises(UnsupportedModelError, match=r"attention='self_attn' is no module of LlamaDecoderLayer"):
        resolve(family_of(model), model)


@pytest.mark.parametrize(
    ("family", "option", "wrong", "reason"),
    [
        ("gpt2", "reorder_and_upcast_attn", True, "bypasses the attention interface"),
        ("gpt2", "add_cross_attention", True, "only decoder-only models"),
        ("gemma", "use_bidirectional_attention", True, "at or before the query"),
        ("gemma2", "use_bidirectional_attention", True, "at or before the query"),
        ("gemma3", "use_bidirectional_attention", True, "at or before the query"),
        ("llama", "is_causal", False, "set it to True"),
    ],
)
def test_refused_settings(family, option, wrong, reason):
    model = tiny(family)
    setattr(model.config, option, wrong)
    with pytest.raises(UnsupportedModelError, match=rf"config\.{option} = {wrong}; .*{reason}"):
        resolve(family_of(model), model)


def test_an_unknown_model_type_says_what_lists_the_known_ones():
    with pytest.raises(
        UnsupportedModelError, match=r"'clip' is not supported \(`hf-posenc families` lists the supported ones"
    ):
        family_for("clip")


def test_a_model_type_has_one_family(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", {})
    monkeypatch.setattr(registry, "_ENTRY_POINTS", {})
    first = registry.register_family(Family(model_types=("a", "b")))
    assert registry.register_family(Family(model_types=("a", "b"))) == first
    with pytest.raises(ValueError, match=r"'b' is already served by the family for a, b"):
        registry.register_family(Family(model_types=("c", "b")))
    assert registry.supported_model_types() == ("a", "b")
    assert registry.family_for("a") == registry.family_for("b") == first
    with pytest.raises(ValueError, match="names no model type"):
        registry.register_family(Family(model_types=()))


def test_errors_are_also_the_built_in_ones():
    built_in = {
        errors.UnknownSchemeError: ValueError,
        errors.UnsupportedModelError: TypeError,
        errors.AlreadyPatchedError: RuntimeError,
        errors.NotPatchedError: RuntimeError,
    }
    assert all(issubclass(error, errors.HfPosencError) and issubclass(error, built_in[error]) for error in built_in)


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
