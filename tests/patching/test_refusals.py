"""What cannot be done is refused: before anything is touched, with the reason, and with what to do instead."""

from dataclasses import dataclass, fields
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
from matrix import matrix
from rows import ACTS, ROWS
from situations import ROTARY_SCHEMES
from snapshots import assert_same, logits, snapshot
from torch import nn

import hf_posenc
from hf_posenc import (
    AlreadyPatchedError,
    HfPosencError,
    NotPatchedError,
    Scheme,
    UnknownSchemeError,
    UnsupportedModelError,
    available_schemes,
    from_pretrained,
    patch_model,
    patched,
    unpatch_model,
)
from hf_posenc.registry import scheme_class
from hf_posenc.schemes.base import ScoreScheme

SCORES = tuple(
    name
    for name in available_schemes()
    if issubclass(scheme_class(name), ScoreScheme) or scheme_class(name)().acts_on.joins()
)
"""Schemes that attend by our function."""
OWN_ENGINES = tuple(name for name in SCORES if not scheme_class(name)().acts_on.keeps_kernel(scheme_class(name)()))
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


def test_hyperparameters_beside_an_instance():
    refused(tiny("gpt2"), scheme_class("shaw")(max_distance=4), TypeError, "values", "instance", values=False)


def test_an_instance_of_a_class_that_is_not_registered():
    """It would patch and train, and fail when the model is saved."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(Scheme):
        name: ClassVar[str] = "mine"
        kind: ClassVar = "none"

    @dataclass(frozen=True, kw_only=True)
    class MyAlibi(scheme_class("alibi")):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Nameless(Scheme):
        kind: ClassVar = "none"

    for family in FAMILIES:
        refused(tiny(family), Mine(), UnknownSchemeError, "Mine", "@hf_posenc.register_scheme", "alibi")
        refused(
            tiny(family), MyAlibi(), UnknownSchemeError, "MyAlibi", "hf_posenc.schemes.alibi.Alibi is named 'alibi'"
        )
        refused(tiny(family), Nameless(), UnknownSchemeError, "Nameless", "register_scheme")


@pytest.mark.parametrize("scheme", available_schemes())
def test_an_unknown_hyperparameter(scheme):
    known = [field.name for field in fields(scheme_class(scheme))] or ["none"]
    refused(tiny("gpt2"), scheme, TypeError, scheme, "max_dist", *known, max_dist=3)


WRONG = [(scheme, *wrong) for scheme, row in ROWS.items() for wrong in row.wrong]


@pytest.mark.parametrize("row", WRONG, ids=[f"{scheme}-{name}={value}" for scheme, name, value, *_ in WRONG])
def test_a_wrong_hyperparameter(row):
    scheme, name, value, error, words = row
    for family in FAMILIES:
        refused(tiny(family), scheme, error, scheme, name if error is TypeError else "", *words, **{name: value})


@pytest.mark.parametrize("scheme", SCORES)
def test_an_unknown_engine(scheme):
    refused(tiny("llama"), scheme, ValueError, "'fast'", "auto", "reference", attention="fast")


@pytest.mark.parametrize("scheme", STOCK_ATTENTION)
def test_an_engine_for_a_scheme_that_keeps_the_models_attention(scheme):
    refused(tiny("llama"), scheme, ValueError, scheme, "keeps the model's own attention", attention="reference")


@pytest.mark.parametrize("seed", [1.5, "7"])
def test_a_seed_that_is_no_integer(seed):
    refused(tiny("llama"), "shaw", TypeError, "seed", "integer", seed=seed)


# ---------------------------------------------------------------------------------------------- what the base does not allow


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_interleaved_rotation_where_the_base_rotates_by_halves(family):
    refused(tiny(family), "rope", UnsupportedModelError, "interleaved", "by halves", layout="interleaved")


def test_rotation_of_odd_heads():
    model = tiny("gpt2", hidden_size=36, num_attention_heads=4)
    refused(model, "rope", ValueError, "9", "pairs")


@pytest.mark.parametrize("initialization", ["native", "interpolated", "hierarchical"])
def test_a_learned_table_from_a_base_without_one(initialization):
    words = (initialization, "this base has none", "sinusoidal or normal")
    refused(tiny("llama"), "learned", ValueError, *words, initialization=initialization)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_native_table_that_is_too_short(family):
    words = (str(LENGTH), str(LENGTH + 1), "interpolated or hierarchical")
    refused(tiny(family), "learned", ValueError, *words, initialization="native", num_positions=LENGTH + 1)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_hierarchy_beyond_its_square(family):
    words = (str(LENGTH), str(LENGTH**2), str(LENGTH**2 + 1))
    refused(tiny(family), "learned", ValueError, *words, initialization="hierarchical", num_positions=LENGTH**2 + 1)


@pytest.mark.parametrize("scheme", available_schemes())
@pytest.mark.parametrize("setting", ["reorder_and_upcast_attn", "add_cross_attention"])
def test_gpt2_settings_that_bypass_the_attention(setting, scheme):
    words = {"reorder_and_upcast_attn": "set it to False", "add_cross_attention": "decoder-only"}
    refused(tiny("gpt2", **{setting: True}), scheme, UnsupportedModelError, setting, words[setting])


def unsupported(name):
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "diffllama":
        return transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**small, intermediate_size=16))
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(**small, intermediate_size=16))
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


SAID = {
    "diffllama": ("difference of two softmaxes",),
    "bert": ("it is an encoder",),
    "t5": ("it is an encoder-decoder",),
}


@pytest.mark.parametrize("scheme", available_schemes())
@pytest.mark.parametrize("name", SAID)
def test_an_unsupported_model(name, scheme):
    refused(unsupported(name), scheme, UnsupportedModelError, repr(name), *SAID[name])
    with pytest.raises(UnsupportedModelError, match=repr(name)):
        hf_posenc.describe(unsupported(name))


def test_what_is_no_model():
    for thing in (nn.Linear(2, 2), None, "gpt2"):
        with pytest.raises(UnsupportedModelError, match=f"PreTrainedModel is needed, not {type(thing).__name__}"):
            patch_model(thing, "alibi")


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


def test_two_models_of_one_config():
    """The first patch renames the config, and the second model has the same one."""
    first = tiny("llama")
    second = type(first)(first.config)
    assert second.config is first.config
    patch_model(first, "alibi")
    with pytest.raises(AlreadyPatchedError, match=r"make each model from a config of its own, copy\.deepcopy"):
        patch_model(second, "alibi")
    unpatch_model(first)
    patch_model(second, "alibi")


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatching_what_is_not_patched(family):
    model = tiny(family)
    before = snapshot(model)
    with pytest.raises(NotPatchedError, match="not patched"):
        unpatch_model(model)
    assert_same(snapshot(model), before)
    patch_model(model, "alibi")
    unpatch_model(model)
    with pytest.raises(NotPatchedError, match="not patched"):
        unpatch_model(model)


@pytest.mark.parametrize("scheme", available_schemes())
def test_unpatching_a_loaded_model(tmp_path, scheme):
    patch_model(tiny("llama"), scheme, seed=0, **ACTS[scheme]).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    before = snapshot(model)
    with pytest.raises(NotPatchedError, match="load the stock checkpoint"):
        unpatch_model(model)
    assert_same(snapshot(model), before)


def test_loading_with_and_without_a_scheme(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "stock")
    patch_model(tiny("llama"), "shaw", seed=0).save_pretrained(tmp_path / "patched")
    with pytest.raises(ValueError, match="say which scheme"):
        from_pretrained(tmp_path / "stock")
    with pytest.raises(ValueError, match="load it without scheme"):
        from_pretrained(tmp_path / "patched", scheme="shaw")
    with pytest.raises(UnknownSchemeError, match="alibi"):
        from_pretrained(tmp_path / "stock", scheme="rotary")


def test_errors_are_what_a_caller_expects():
    for error, builtin in [
        (UnknownSchemeError, ValueError),
        (UnsupportedModelError, TypeError),
        (AlreadyPatchedError, RuntimeError),
        (NotPatchedError, RuntimeError),
    ]:
        assert issubclass(error, HfPosencError)
        assert issubclass(error, builtin)


# ---------------------------------------------------------------------------------------------------------- wrapped models


def test_a_model_wrapped_by_data_parallel():
    refused_inside(nn.DataParallel(tiny("llama")), "DataParallel", "patch the model first, wrap it afterwards")


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
    refused_inside(torch.compile(tiny("llama")), "OptimizedModule", "PreTrainedModel is needed")


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


@pytest.mark.parametrize("scheme", STOCK_ATTENTION)
def test_flash_attention_is_kept_by_schemes_that_do_not_touch_it(scheme):
    model = tiny("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    patch_model(model, scheme)
    assert model.config._attn_implementation == "flash_attention_2"


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


@pytest.mark.parametrize("scheme", STOCK_ATTENTION)
def test_another_backend_on_a_scheme_that_keeps_the_attention(scheme):
    model = patch_model(tiny("llama"), scheme)
    expected = logits(model)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits(model)[1], expected[1], atol=1e-4, rtol=0)
    unpatch_model(model)
    assert logits(model).shape == expected.shape


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


@pytest.mark.parametrize("family", FAMILIES)
def test_our_attention_on_a_stock_model(family):
    model = tiny(family)
    model.set_attn_implementation("hf_posenc")
    with pytest.raises(ValueError, match=r"call hf_posenc\.patch_model"):
        logits(model)


@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_continuous_batching(family, scheme):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme])
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"hf_posenc.*not supported for continuous batching|would drop"):
        model.init_continuous_batching()
    for backend in ("paged|eager", "paged|sdpa"):  # what transformers advises
        with pytest.raises(ValueError, match="would drop"):
            model.set_attn_implementation(backend)
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("scheme", SCORES)
def test_paged_keys_without_positions(scheme):
    from hf_posenc.upstream.attention import scheme_attention

    attention = patch_model(tiny("llama"), scheme, seed=0, **ACTS[scheme]).model.layers[0].self_attn
    heads = torch.zeros(1, 4, 3, 8)
    with pytest.raises(NotImplementedError, match=r"use generate\(\)"):
        scheme_attention(attention, heads, heads[:, :2], heads[:, :2], None, cache=object())


# -------------------------------------------------------------------------------------------------------- inside a forward


@pytest.mark.parametrize("scheme", SCORES)
def test_context_parallelism_drops_the_mask(scheme):
    model = patch_model(tiny("llama"), scheme, seed=0, **ACTS[scheme])
    accelerate.big_modeling._attach_context_parallel_hooks(model)
    with pytest.raises(ValueError, match=r"carries the positions, did not arrive.*hf_posenc.context_parallel"):
        model(tokens())


@pytest.mark.parametrize("scheme", SCORES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gapped_position_ids_with_a_filled_cache(family, scheme):
    model = patch_model(tiny(family), scheme, seed=0, **ACTS[scheme])
    ids = tokens(1, 10)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    for gapped in ([[8, 20]], [[3, 4]]):
        with pytest.raises(ValueError, match=r"do not continue.*run the whole sequence in one forward without a cache"):
            model(ids[:, 8:], past_key_values=cache, position_ids=torch.tensor(gapped))
    fresh = model(ids[:, :8], use_cache=True).past_key_values
    model(ids[:, 8:], past_key_values=fresh, position_ids=torch.tensor([[8, 9]]))


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


@pytest.mark.parametrize("scheme", SCORES)
def test_a_bidirectional_config(scheme):
    model = patch_model(tiny("llama"), scheme, seed=0, **ACTS[scheme])
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"Set config\.is_causal back to True"):
        model(tokens())


@pytest.mark.parametrize("scheme", SCORES)
def test_a_mask_of_the_wrong_shape(scheme):
    model = patch_model(tiny("llama"), scheme, seed=0, **ACTS[scheme])
    with pytest.raises(ValueError, match="pass a 2-D mask"):
        model(tokens(2, 12), attention_mask=torch.ones(2, 1, 7, 12, dtype=torch.bool).tril())


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


@COMPILER
@pytest.mark.parametrize("replace", [wrap, compiled])
@pytest.mark.parametrize("scheme", SCORES)
def test_scores_where_the_forward_was_replaced(scheme, replace):
    model = tiny("llama")
    replace(attentions(model)[0])
    refused(model, scheme, UnsupportedModelError, "layer 0", "forward of its own", "del attention.forward")


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


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_hook_that_was_taken_off_leaves_nothing_in_the_way(family):
    """accelerate then leaves the bound method of the old class on the instance."""
    model = tiny(family)
    stock, expected = logits(model), logits(patch_model(tiny(family), "rope"))
    for attention in attentions(model):
        hook(attention)
        accelerate.hooks.remove_hook_from_module(attention)
        assert "forward" in vars(attention)
    before = snapshot(model)
    patch_model(model, "rope")
    assert logits(model).equal(expected)
    unpatch_model(model)
    assert {key: value.tolist() for key, value in before.values.items()} == {
        key: value.tolist() for key, value in model.state_dict().items()
    }
    assert logits(model).equal(stock)


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


@pytest.mark.rows(default=1, slow=8)
@COMPILER
@matrix(
    family=FAMILIES,
    variant=["sinusoidal", "every_layer", "alibi", "nope", "rope"],
    replace=[wrap, compiled, compiled_in_place],
)
def test_layers_and_decoders_may_have_forwards_of_their_own(family, variant, replace):
    """Our hooks there run in `__call__`, before any forward, and a compiled one notices them."""
    scheme, options = {
        "every_layer": ("sinusoidal", {"placement": "every_layer"}),
        "rope": ("rope", {"rope_theta": 7.0}),
    }.get(variant, (variant, {}))
    model, expected = tiny(family), logits(patch_model(tiny(family), scheme, **options))
    for module in (model.base_model, *(model.transformer.h if family == "gpt2" else model.model.layers)):
        replace(module)
    stock = logits(model)
    patch_model(model, scheme, **options)
    assert logits(model).equal(expected)
    assert logits(unpatch_model(model)).equal(stock)


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
