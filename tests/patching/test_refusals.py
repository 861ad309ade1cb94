"""What cannot be done is refused: before anything is touched, with the reason, and with what to do instead."""

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import accelerate.big_modeling
import accelerate.hooks
import peft
import pytest
import torch
import torch.distributed
import transformers
from families import FAMILIES as ALL_FAMILIES
from families import LENGTH, tiny, tokens
from rows import ACTS, ROWS
from situations import ROTARY_SCHEMES
from snapshots import assert_same, logits, snapshot
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc import (
    AlreadyPatchedError,
    Scheme,
    UnknownSchemeError,
    UnsupportedModelError,
    available_schemes,
    calibrate,
    check,
    describe,
    from_pretrained,
    patch_model,
    patched,
    unpatch_model,
    verify,
)
from hf_posenc.calibration.observe import observe
from hf_posenc.core.forms import Slopes
from hf_posenc.core.registry import family_for, scheme_class
from hf_posenc.families.base import resolve
from hf_posenc.schemes.alibi import LinearBias
from hf_posenc.schemes.base import ScoreScheme
from hf_posenc.schemes.cope import ContextualPositions
from hf_posenc.schemes.forgetting import LogGates
from hf_posenc.schemes.sinusoidal import Waves

SCORES = tuple(
    name for name in available_schemes() if issubclass(scheme_class(name), ScoreScheme) or scheme_class(name)().joins
)
"""Schemes that attend by our function."""
OWN_ENGINES = tuple(name for name in SCORES if not scheme_class(name)().keeps_kernel())
"""Schemes that no other kernel can compute."""
STOCK_ATTENTION = tuple(name for name in available_schemes() if name not in SCORES)
FAMILIES = ("gpt2", "llama")


def refused(model, scheme, error, *words, **arguments):
    """Patching raises this error with these words in its message, and changes nothing."""
    before = snapshot(model, run=False)
    with pytest.raises(error) as raised:
        patch_model(model, scheme, **arguments)
    assert_same(snapshot(model, run=False), before)
    for word in words:
        assert word in str(raised.value)
    return str(raised.value)


# --------------------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["rotary", "ALiBi", "", "alibi "])
def test_an_unknown_scheme(family, name):
    refused(tiny(family), name, UnknownSchemeError, *available_schemes())


@pytest.mark.parametrize(
    "scheme", [None, 3, nn.Linear, scheme_class("alibi")], ids=["None", "number", "class", "scheme-class"]
)
def test_what_is_no_scheme(scheme):
    refused(tiny("gpt2"), scheme, TypeError, *available_schemes())


def test_an_instance_of_a_class_that_is_not_registered():
    """It would patch and train, and fail when the model is saved."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(Scheme):
        name: ClassVar[str] = "mine"
        kind: ClassVar = "none"

    @dataclass(frozen=True, kw_only=True)
    class MyAlibi(scheme_class("alibi")):
        pass

    for family in FAMILIES:
        refused(tiny(family), Mine(), UnknownSchemeError, "Mine", "@hf_posenc.register_scheme", "alibi")
        refused(tiny(family), MyAlibi(), UnknownSchemeError, "MyAlibi", "register_scheme")


WRONG = [(scheme, *wrong) for scheme, row in ROWS.items() for wrong in row.wrong]


@pytest.mark.parametrize("row", WRONG, ids=[f"{scheme}-{name}={value}" for scheme, name, value, *_ in WRONG])
def test_a_wrong_hyperparameter(row):
    scheme, name, value, error, words = row
    for family in FAMILIES:
        refused(tiny(family), scheme, error, scheme, name if error is TypeError else "", *words, **{name: value})


@pytest.mark.parametrize("scheme", STOCK_ATTENTION)
def test_an_engine_for_a_scheme_that_keeps_the_models_attention(scheme):
    refused(tiny("llama"), scheme, ValueError, scheme, "keeps the model's own attention", attention="reference")


# ---------------------------------------------------------------------------------------------- what the base does not allow


def test_rotation_of_odd_heads():
    model = tiny("gpt2", hidden_size=36, num_attention_heads=4)
    refused(model, "rope", ValueError, "9", "pairs")


def test_a_learned_table_from_a_base_without_one():
    words = ("native", "this base has none", "sinusoidal or normal")
    refused(tiny("llama"), "learned", ValueError, *words, initialization="native")


@pytest.mark.parametrize(
    "call",
    [
        lambda thing: patch_model(thing, "alibi"),
        unpatch_model,
        verify,
        describe,
        check,
        lambda thing: calibrate(thing, tokens()),
    ],
    ids=["patch_model", "unpatch_model", "verify", "describe", "check", "calibrate"],
)
def test_what_is_no_model(call):
    model = tiny("llama")
    things = [
        (nn.Linear(2, 2), "$"),
        (None, "$"),
        ("gpt2", ": load 'gpt2' first, with AutoModelForCausalLM.from_pretrained, or with hf_posenc.from_pretrained"),
        (Path("gpt2"), ": load 'gpt2' first"),
        (
            SimpleNamespace(model=model),
            r": .* first, wrap it afterwards \(the model itself is its .model",
        ),  # a pipeline, a Trainer
    ]
    for thing, instead in things:
        with pytest.raises(
            UnsupportedModelError, match=f"PreTrainedModel is needed, not {type(thing).__name__}{instead}"
        ):
            call(thing)


# ------------------------------------------------------------------------------------------------------- twice, or not at all


@pytest.mark.parametrize("scheme", available_schemes())
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_twice(family, scheme):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme])
    for other in (scheme, "nope"):
        refused(model, other, AlreadyPatchedError, scheme, "unpatch_model(model) first")
        refused(model.base_model, other, AlreadyPatchedError, "unpatch_model(model) first")
    before = snapshot(model)
    with pytest.raises(AlreadyPatchedError), patched(model, "nope"):
        pass
    assert_same(snapshot(model), before)  # the failed `with` did not undo the first patch


# ---------------------------------------------------------------------------------------------------------- wrapped models


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_wrapped_by_distributed_data_parallel(one_process):
    wrapped = nn.parallel.DistributedDataParallel(tiny("llama"))
    refused_inside(wrapped, "DistributedDataParallel", "patch the model first, wrap it afterwards")


def test_a_model_sharded_by_fsdp(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(tiny("llama"), mesh=init_device_mesh("cpu", (1,)))
    kept = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(UnsupportedModelError, match="patch the model before fully_shard"):
        patch_model(model, "alibi")
    assert kept == [(name, type(module)) for name, module in model.named_modules()]


# peft asks the model for an attribute that transformers 5.23 has renamed
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_wrapped_by_peft():
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    wrapped = peft.get_peft_model(tiny("llama"), config)
    refused_inside(wrapped, "Peft", "patch the base model first", 'modules_to_save=["posenc"]')


# torch's own modules warn on the first import of its compiler
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model():
    instead = "patch the model first, wrap it afterwards (the model itself is its ._orig_mod)"
    refused_inside(torch.compile(tiny("llama")), "OptimizedModule", instead)
    patched_first = torch.compile(patch_model(tiny("llama"), "alibi"))
    assert verify(patched_first)
    assert describe(patched_first).model == "PosEncLlamaForCausalLM"


def refused_inside(wrapped, *words):
    model = next(module for module in wrapped.modules() if isinstance(module, transformers.PreTrainedModel))
    before = snapshot(model, run=False)
    with pytest.raises(UnsupportedModelError) as raised:
        patch_model(wrapped, "alibi")
    assert_same(snapshot(model, run=False), before)
    for word in words:
        assert word in str(raised.value)


# ------------------------------------------------------------------------------------------------------- attention backends


@pytest.mark.parametrize(
    "backend", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn", "paged|sdpa"]
)
@pytest.mark.parametrize("scheme", OWN_ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_flash_and_paged_attention_cannot_carry_scores(family, scheme, backend):
    model = tiny(family)
    model.config._attn_implementation_internal = backend  # loading with it needs a GPU
    refused(model, scheme, UnsupportedModelError, scheme, backend, 'attn_implementation="sdpa"', **ACTS[scheme])


@pytest.fixture
def halved(monkeypatch):
    """An attention function of somebody's own: sdpa with half of each score."""

    def attend(module, query, *others, scaling=None, **options):
        return sdpa_attention_forward(module, query, *others, scaling=query.shape[-1] ** -0.5 / 2, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "halved", attend)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "halved", sdpa_mask)
    return attend


def with_attention(family, name):
    model = tiny(family)
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_of_ones_own_cannot_carry_scores(family, scheme, halved, monkeypatch):
    stock, model = logits(tiny(family)), with_attention(family, "halved")
    assert (logits(model) - stock).abs().max() > 1e-3
    instead = 'attn_implementation="sdpa"', "nope, sinusoidal, learned, rope"
    refused(model, scheme, UnsupportedModelError, scheme, "halved", *instead, **ACTS[scheme])
    one_layer = tiny(family)
    attention = resolve(family_for(family), one_layer).attentions[1]
    attention.config = copy.deepcopy(one_layer.config)
    attention.config._attn_implementation_internal = "halved"
    refused(one_layer, scheme, UnsupportedModelError, "halved", **ACTS[scheme])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", halved)
    refused(tiny(family), scheme, UnsupportedModelError, "which sdpa cannot carry", **ACTS[scheme])


def test_a_function_of_ones_own_under_a_patched_model(halved, tmp_path):
    kept = with_attention("llama", "halved")
    expected = logits(kept)
    assert logits(patch_model(kept, "rope")).equal(expected)
    assert describe(kept).attention == "halved"
    for scheme, error in (("t5", ValueError), ("temperature", UnsupportedModelError)):
        patch_model(tiny("llama"), scheme).save_pretrained(tmp_path / scheme)
        with pytest.raises(error, match="halved"):
            from_pretrained(tmp_path / scheme, attn_implementation="halved")
    with pytest.raises(UnsupportedModelError, match=r'attends by halved, .*attn_implementation="sdpa"'):
        observe(kept, tokens(), [0])


@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex_attention", "flash_attention_2", "no such"])
@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_backend_on_a_scheme_that_changes_scores(family, scheme, backend):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme])
    before = snapshot(model)
    with pytest.raises(ValueError, match="would drop") as raised:
        model.set_attn_implementation(backend)
    assert scheme in str(raised.value)
    assert "unpatch the model first" in str(raised.value)
    assert_same(snapshot(model), before)
    model.set_attn_implementation("hf_posenc")  # what it has
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_backend_set_behind_the_patch(family, scheme, backend):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme])
    expected = logits(model)
    model.config._attn_implementation = backend
    with pytest.raises(ValueError, match=f"{backend}.*would be ignored.*unpatch the model"):
        logits(model)
    model.config._attn_implementation = "hf_posenc"
    assert logits(model).equal(expected)


@pytest.mark.parametrize("scheme", SCORES)
def test_paged_keys_without_positions(scheme):
    from hf_posenc.transformers_glue.attention import scheme_attention

    attention = patch_model(tiny("llama"), scheme, seed=0, **ACTS[scheme]).model.layers[0].self_attn
    heads = torch.zeros(1, 4, 3, 8)
    with pytest.raises(NotImplementedError, match=r"use generate\(\)"):
        scheme_attention(attention, heads, heads[:, :2], heads[:, :2], None, cache=object())


# -------------------------------------------------------------------------------------------------------- inside a forward


@pytest.mark.parametrize("placement", ["input", "every_layer"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("rows", [16, None], ids=["own-length", "native-length"])
def test_learned_past_its_table(family, placement, rows):
    model = patch_model(tiny(family), "learned", placement=placement, num_positions=rows)
    rows = rows or LENGTH
    with torch.no_grad():
        model(tokens(1, rows))
        with pytest.raises(ValueError, match=f"position {rows + 2} .* {rows} positions.*num_positions={rows + 3}"):
            model(tokens(1, rows + 3))
        cache = model(tokens(1, rows), use_cache=True).past_key_values
        with pytest.raises(ValueError, match=f"position {rows} .* {rows} positions"):
            model(tokens(1, 1), past_key_values=cache)


# ----------------------------------------------------------------------------------------- forwards that somebody replaced


def attentions(model):
    return [layer.attn for layer in model.transformer.h] if hasattr(model, "transformer") else attentions_of_opt(model)


def attentions_of_opt(model):
    decoder = getattr(model.model, "decoder", model.model)
    return [layer.self_attn for layer in decoder.layers]


def hook(module):
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())


def wrap(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def compiled(module):
    module.forward = torch.compile(module.forward, backend="eager")


def compiled_in_place(module):
    module.compile(backend="eager")


REPLACED = pytest.mark.parametrize("replace", [hook, wrap, compiled])
# torch's own modules warn on the first import of its compiler
COMPILER = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@COMPILER
@REPLACED
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_rotation_where_the_forward_was_replaced(family, replace):
    """It would go on calling the stock forward, without any positions."""
    model = tiny(family)
    replace(attentions(model)[1])
    words = ("layer 1", "forward of its own", "remove_hook_from_module", "del attention.forward", "put it on again")
    refused(model, "rope", UnsupportedModelError, *words)


@pytest.mark.parametrize("scheme", available_schemes())
@pytest.mark.parametrize("family", FAMILIES)
def test_what_only_calls_the_forward_through_is_no_obstacle(family, scheme):
    """accelerate's hooks on a model that is all in one place (bitsandbytes has them), on everything but a changed class."""
    expected = logits(patch_model(tiny(family), scheme, seed=0, **ACTS[scheme]))
    model = tiny(family)
    stock = logits(model)
    changed = family == "gpt2" and scheme in ROTARY_SCHEMES
    for module in model.modules():
        if not (changed and module in attentions(model)):
            hook(module)
    patch_model(model, scheme, seed=0, **ACTS[scheme])
    assert logits(model).equal(expected)
    assert logits(unpatch_model(model)).equal(stock)


@COMPILER
@REPLACED
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_unpatching_below_a_forward_that_was_put_on_later(family, replace):
    """In either order all comes off, or unpatching says what to take off first."""
    model = tiny(family)
    stock = logits(model)
    patch_model(model, "rope")
    expected = logits(model)
    replace(attentions(model)[0])
    before = snapshot(model)
    with pytest.raises(
        UnsupportedModelError, match=r"forward of its own after the model was patched.*remove_hook_from"
    ):
        unpatch_model(model)
    assert_same(snapshot(model), before)
    assert logits(model).equal(expected)
    if replace is hook:
        accelerate.hooks.remove_hook_from_module(attentions(model)[0])
    else:
        del attentions(model)[0].forward
    unpatch_model(model)
    assert logits(model).equal(stock)
    assert not any("forward" in vars(attention) for attention in attentions(model))


@pytest.mark.rows(default=1)
@COMPILER
@pytest.mark.parametrize("replace", [compiled, compiled_in_place])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_graph_compiled_for_one_patch_does_not_run_for_another(family, replace):
    """torch.compile does not guard hooks: without something that it guards, the graph without vectors would run on."""
    for scheme, options in [("nope", {}), ("sinusoidal", {"placement": "every_layer"}), ("nope", {})]:
        model = patch_model(tiny(family), scheme, **options)
        expected = logits(model)
        for module in (model.base_model, *(model.transformer.h if family == "gpt2" else model.model.layers)):
            replace(module)
        assert logits(model).equal(expected)


# ---------------------------------------------------------------------------------------- arguments that reach attention


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_an_argument_that_attention_does_not_know(family):
    model, ids = patch_model(tiny(family), "alibi"), tokens(2, 12)
    with pytest.raises(TypeError, match="hands future_feature, s_aux to its attention"):
        model(ids, s_aux=torch.zeros(4), future_feature=True, another=None)


# What transformers, accelerate and TRL are seen to hand down.
HANDED_DOWN = {
    "cache_position": torch.arange(12),
    "token_type_ids": torch.zeros(2, 12, dtype=torch.long),
    "labels": tokens(2, 12),
    "num_items_in_batch": torch.tensor(20),
    "shift_labels": tokens(2, 12),
    "ignore_index": 7,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": False,
    "use_cache": False,
    "is_causal": True,
    "return_dict": True,
    "seq_idx": torch.zeros(2, 12, dtype=torch.int32),
}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_arguments_that_attention_may_pass_over(family):
    model, ids = patch_model(tiny(family), "alibi"), tokens(2, 12)
    with torch.no_grad():
        expected = model(ids).logits
        for name, value in HANDED_DOWN.items():
            labels = {} if name not in ("shift_labels", "ignore_index") else {"labels": ids}
            if (family, name) == ("gpt2", "token_type_ids"):
                continue  # GPT-2 embeds them
            torch.testing.assert_close(model(ids, **{name: value}, **labels).logits, expected, atol=1e-5, rtol=0)


def test_bidirectional_attention_by_an_argument():
    with pytest.raises(ValueError, match="is_causal"):
        patch_model(tiny("llama"), "alibi")(tokens(), is_causal=False)


def test_documents_that_only_flash_attention_would_see():
    """Lengths of packed documents, as DataCollatorWithFlattening makes them, with position ids and without."""
    model, ids = patch_model(tiny("llama"), "alibi"), tokens(1, 12)
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
    flash = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 7, "max_length_k": 7}
    restarting = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=restarting, use_cache=False, **flash).logits
        torch.testing.assert_close(packed[:, 5:], model(ids[:, 5:]).logits, atol=1e-5, rtol=0)
        whole = torch.tensor([0, 12], dtype=torch.int32)
        model(ids, **{**flash, "cu_seq_lens_q": whole})
        for missing in ({}, {"position_ids": restarting, "use_cache": True}):
            with pytest.raises(ValueError, match="documents"):
                model(ids, **flash, **missing)


def one_row_of_slopes(module, like):
    return Slopes(torch.ones(1))


@pytest.mark.parametrize(
    ("scheme", "module", "method", "wrong", "message"),
    [
        ("alibi", LinearBias, "form", one_row_of_slopes, r"slopes of LinearBias, .* \(4\), not \(1,\)"),
        (
            "cope",
            ContextualPositions,
            "scores",
            lambda module, call: call.query[:, :1] @ call.key[:, :1].mT,
            "scores of Con",
        ),
        (
            "sinusoidal",
            Waves,
            "embed",
            lambda module, ids: torch.zeros(ids.shape[1], 32),
            r"vectors of Waves, \(B\|1, T, E\)",
        ),
        (
            "forgetting",
            LogGates,
            "forward",
            lambda module, x: x[..., :4],
            r"numbers of tokens of forgetting, .*, not \(2, 24, 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_shapes_of_what_a_module_computes(scheme, module, method, wrong, message, monkeypatch):
    """Broadcasting would make something of most of them."""
    model = patch_model(tiny("llama"), scheme, seed=0)
    model(tokens())
    monkeypatch.setattr(module, method, wrong)
    with pytest.raises(ValueError, match=message):
        model(tokens())
