"""Multimodal models: the language model inside is patched, and the whole is run, saved, loaded and undone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from decoders import SIZES
from huggingface_hub.errors import StrictDataclassFieldValidationError
from matrix import matrix
from multimodal import TOKENS, class_of, multimodal, seen_and_read
from rows import ACTS
from situations import randomize, skip_if_refused
from snapshots import assert_same, snapshot

import hf_posenc
from hf_posenc import UnsupportedModelError, patch_model, unpatch_model
from hf_posenc.checking.catalogue import language_type
from hf_posenc.checkpoints.auto_classes import multimodal_model_types
from hf_posenc.core.registry import available_schemes, supported_model_types
from hf_posenc.model.base_model import decoder_of
from hf_posenc.model.patch_record import language_model

SERVED = tuple(name for name in sorted(multimodal_model_types()) if language_type(name) in supported_model_types())
FEW = ("gemma3", "llama4", "llava", "smolvlm")
"""An Auto class for the text config, a config class of its own, a head inside, another name of the language model."""

IDS = torch.randint(3, min(TOKENS.values()), (2, 9), generator=torch.Generator().manual_seed(0))


def run(model, **inputs):
    """Return the logits of a multimodal model."""
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.rows(default=1, slow=17)
@matrix(scheme=available_schemes(), model_type=FEW)
def test_the_whole_computes_what_its_language_model_does_when_patched_by_itself(model_type, scheme):
    """What that computes is compared with the stock model's own eager attention in test_every_decoder.py."""
    whole = multimodal(model_type)
    skip_if_refused(scheme, language_model(whole))
    stock = run(whole, input_ids=IDS)
    alone = copy.deepcopy(language_model(whole))
    if scheme in ("temperature", "far_rope", "rope_by_head") and model_type == "llama4":
        with pytest.raises(UnsupportedModelError, match="itself multiplies the queries"):
            patch_model(whole, scheme, **ACTS[scheme])
        return
    for each in (whole, alone):  # at random, because some start as the base is
        randomize(patch_model(each, scheme, seed=0, **ACTS[scheme]))
    with torch.no_grad():
        expected = decoder_of(alone)(input_ids=IDS).last_hidden_state
        assert torch.equal(decoder_of(whole)(input_ids=IDS).last_hidden_state, expected)
        patched = run(whole, input_ids=IDS)
        assert torch.equal(patched, whole.get_output_embeddings()(expected))
    if scheme != "rope":
        assert not torch.allclose(patched, stock, atol=1e-3)


@pytest.mark.parametrize("model_type", FEW)
def test_undone_it_is_what_it_was(model_type):
    model = multimodal(model_type)
    before = snapshot(model)
    patch_model(model, "t5", seed=0)
    assert hf_posenc.is_patched(model)
    assert_same(snapshot(unpatch_model(model)), before)


@pytest.mark.parametrize("model_type", FEW)
def test_saved_it_loads_as_a_whole_and_as_nothing_else(model_type, tmp_path):
    model = patch_model(multimodal(model_type), "t5", seed=0)
    model.save_pretrained(tmp_path)
    expected = run(model, input_ids=IDS)
    assert hf_posenc.inspect(tmp_path).problem is None
    for loaded in (
        hf_posenc.from_pretrained(tmp_path),
        transformers.AutoModelForImageTextToText.from_pretrained(tmp_path),
        type(model).from_pretrained(tmp_path),
    ):
        assert type(loaded) is type(model)
        assert torch.equal(run(loaded, input_ids=IDS), expected)
        assert hf_posenc.schemes_of(loaded) == hf_posenc.schemes_of(model)
    with pytest.raises(StrictDataclassFieldValidationError):
        class_of(model_type).from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(run(hf_posenc.from_pretrained(tmp_path / "again"), input_ids=IDS), expected)


def test_an_attention_that_would_drop_the_scheme_is_refused_for_the_language_model_only():
    model = patch_model(multimodal("llava"), "alibi")
    expected = run(model, input_ids=IDS)
    for part in (model, language_model(model)):
        with pytest.raises(ValueError, match="would drop alibi"):
            part.set_attn_implementation("eager")
    model.set_attn_implementation({"vision_config": "eager"})
    assert model.config.vision_config._attn_implementation == "eager"
    assert torch.equal(run(model, input_ids=IDS), expected)


def test_a_language_model_that_is_not_served_is_named():
    config = transformers.LlavaConfig(text_config={"model_type": "mamba", **SIZES})
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
    with pytest.raises(UnsupportedModelError, match=r"'llava' cannot be patched: .* 'mamba' cannot be patched: it has"):
        patch_model(model, "alibi")


SEES_FORWARD = ("gemma3", "gemma4", "gemma4_unified", "shieldgemma2")
"""Types whose image tokens see each other."""


def given_to(decoder, calls):
    """Record the arguments of a decoder, copied before the call, which fills the cache."""
    return decoder.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(copy.deepcopy(kwargs)), with_kwargs=True
    )


SHORT = {"max_new_tokens": 3, "do_sample": False, "suppress_tokens": list(TOKENS.values())}
"""Options of a generation without tokens that stand for images and sounds."""


def stock_generates(model, inputs):
    """Return whether the stock model generates: one of Qwen omni's thinkers asks the config for what only the whole has."""
    try:
        model.generate(**inputs, **SHORT)
    except AttributeError:
        return False
    return True


def refused_with_images(model_type, position_ids):
    """Return what the error says of an image where it is refused, else None."""
    if model_type in SEES_FORWARD:
        return "keys that come after it"
    several = position_ids is not None and position_ids.ndim == 3 and bool((position_ids != position_ids[:1]).any())
    return "several coordinates" if several else None


@pytest.mark.rows(default=3, slow=24)
@pytest.mark.parametrize("model_type", SERVED)
def test_an_image_or_a_sound_is_attended_to_by_the_scheme(model_type):
    """Given the same embeddings, the language model inside computes what it does when it is patched by itself."""
    try:
        model = multimodal(model_type)
        inputs = seen_and_read(model)
    except Exception as error:
        pytest.skip(f"no tiny {model_type} that sees or hears: {type(error).__name__}: {error}"[:300])
    if getattr(language_model(model).config, "use_bidirectional_attention", False) is True:
        pytest.skip("its language model is no causal one, and refused")
    calls, made = [], []
    handles = [
        given_to(decoder_of(model), calls),
        decoder_of(model).register_forward_hook(lambda _, args, output: made.append(output[0].clone())),
    ]
    generates = stock_generates(model, inputs)
    stock, alone = (
        run(model, **inputs),
        patch_model(copy.deepcopy(language_model(model)), "t5", seed=0, share_layers=False),
    )
    patch_model(model, "t5", seed=0, share_layers=False)
    if (reason := refused_with_images(model_type, calls[-1].get("position_ids"))) is not None:
        with pytest.raises((ValueError, NotImplementedError), match=reason):
            run(model, **inputs)
        return
    patched = run(model, **inputs)
    for handle in handles:
        handle.remove()
    assert not torch.allclose(patched, stock, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(decoder_of(alone)(**calls[-1])[0], made[-1])
    if generates:
        assert torch.equal(model.generate(**inputs, **SHORT), model.generate(**inputs, **SHORT, use_cache=False))
