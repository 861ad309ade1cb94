"""LoRA on patched models: the scheme keeps working, is trained where asked for, and survives merging."""

import copy

import pytest
import torch
from families import FAMILIES, tiny, tokens
from matrix import matrix
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from situations import BASES, CASES, DIFFERENT, SCHEMES, assert_same, distance, patched_model

from hf_posenc import (
    NotPatchedError,
    UnsupportedModelError,
    describe,
    patch_model,
    unpatch_model,
    verify,
    which_engine,
)

# peft 0.21 asks for it by the name that transformers 5.23 renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # Plain adapters on models that are patched and not trained: what they warn of is tested in test_lora.py.
    pytest.mark.filterwarnings("ignore:this adapter neither trains nor saves the position parameters:UserWarning"),
]

LENGTH = 20
# The projections that make queries and keys: what a scheme on queries and keys must see the update of.
PROJECTIONS = {"gpt2": ["c_attn"], "opt": ["q_proj", "k_proj"], "gpt_neox": ["query_key_value"], "phi3": ["qkv_proj"]}


def adapted(model, family, **options):
    """Wrap a model in LoRA whose update is not zero, as if it had been trained."""
    options["fan_in_fan_out"] = family == "gpt2"  # whose projections are stored transposed
    config = LoraConfig(
        r=4, target_modules=PROJECTIONS.get(family, ["q_proj", "k_proj"]), task_type="CAUSAL_LM", **options
    )
    wrapped = get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def full(model, ids):
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
@matrix(case=SCHEMES, family=FAMILIES)
def test_the_update_goes_through_the_scheme(case, family):
    """The merged weights run through the plain patched model: they must give what the wrapped model gave.

    RoPE put on GPT-2 by a hook on its projection would fail here: PEFT wraps the projection and adds its update after.
    """
    ids = tokens(2, LENGTH)
    wrapped = adapted(patched_model(case, family), family)
    before = full(wrapped, ids)
    assert distance(before, full(patched_model(case, family), ids)) > DIFFERENT  # the update does something
    merged = wrapped.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert_same(full(merged, ids), before)


@torch.no_grad()
@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("case", CASES)
def test_generation_with_an_adapter(case, family):
    wrapped = adapted(patched_model(case, family), family)
    ids = tokens(2, 8)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    actual = wrapped.generate(input_ids=ids, **options)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, full(wrapped, expected)[:, -1:].argmax(-1)], 1)
    assert actual.equal(expected)


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.split("-")[0] in ("shaw", "transformer_xl", "learned")]
)
def test_position_parameters_are_trained_where_asked_for(case, family):
    def step(**options):
        wrapped = adapted(patched_model(case, family), family, **options).train()
        full(wrapped, tokens(2, LENGTH)).square().mean().backward()
        return {name for name, p in wrapped.named_parameters() if p.grad is not None and "lora_" not in name}

    assert step() == set()
    # GPT-2's learned table stands where its own was, under its own name
    name = "wpe" if case == "learned" and family == "gpt2" else "posenc"
    trained = step(modules_to_save=[name])
    assert trained
    assert all(name in parameter for parameter in trained)


@torch.no_grad()
@pytest.mark.parametrize("family", BASES)
def test_a_wrapped_model_is_refused(family):
    wrapped = adapted(tiny(family), family)
    with pytest.raises(UnsupportedModelError, match="patch the base model first"):
        patch_model(wrapped, "alibi")


@torch.no_grad()
@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("case", SCHEMES)
def test_unpatch_after_merging_keeps_the_update(case, family):
    ids = tokens(2, LENGTH)
    model = patched_model(case, family)
    merged = unpatch_model(adapted(model, family).merge_and_unload())
    expected = adapted(copy.deepcopy(tiny(family)), family).merge_and_unload()
    assert_same(full(merged, ids), full(expected, ids))


KINDS = {
    "lora": lambda: LoraConfig(target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM", modules_to_save=["posenc"]),
    "ia3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prefix": lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt": lambda: PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("mixed", [False, True], ids=["", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["alibi-trainable", "shaw", "rope", "learned-every_layer"])
def test_a_wrapped_model_is_looked_through(case, kind, mixed):
    if mixed and kind != "lora":
        pytest.skip("PEFT mixes LoRA and its kin only")
    model = patched_model(case, "llama")
    said, engine = str(describe(model)), which_engine(model, 16)
    parameters = [line for line in said.splitlines() if "parameters" in line]
    wrapped = get_peft_model(model, KINDS[kind](), mixed=mixed)
    assert verify(wrapped).ok
    assert which_engine(wrapped, 16) == engine
    assert str(describe(wrapped)).splitlines()[0] == said.splitlines()[0]
    if kind != "lora":  # which holds a copy of each position parameter beside it
        assert parameters[0] in str(describe(wrapped))
    before = logits_of(wrapped)
    with pytest.raises(UnsupportedModelError, match=r"unpatch what model\.merge_and_unload\(\) returns"):
        unpatch_model(wrapped)
    assert logits_of(wrapped).equal(before)


def test_a_wrapped_stock_model_is_not_patched():
    wrapped = get_peft_model(tiny("llama"), KINDS["lora"]())
    with pytest.raises(NotPatchedError, match="not patched"):
        verify(wrapped)
    with pytest.raises(NotPatchedError, match="not patched"):
        which_engine(wrapped, 16)
    assert "stock positions" in str(describe(wrapped))


@torch.no_grad()
def logits_of(wrapped):
    return wrapped(input_ids=tokens(2, LENGTH)).logits
