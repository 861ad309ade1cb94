"""What transformers asks of every model class, asked of patched models."""

import pytest
import torch
from families import FAMILIES, tiny, tokens
from situations import BASES, SCHEMES, SCORE_SCHEMES, assert_same, patched_model
from transformers import AutoModel, AutoModelForCausalLM

from hf_posenc import from_pretrained, patch_model

# ------------------------------------------------------------------------------------------------------ new weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_starts_as_a_stock_one_does(family):
    """Its stock part, drawn from the same seed. GPT-2, for one, scales some projections as a whole model only."""
    stock = tiny(family).base_model
    config = patch_model(
        tiny(family), "learned"
    ).config  # keeps the length, so that tables of positions take as many draws
    torch.manual_seed(3)
    expected = type(stock)(stock.config).state_dict()
    torch.manual_seed(3)
    actual = AutoModel.from_config(config).state_dict()
    common = [name for name in expected if name in actual]
    assert len(common) > 10
    assert all(actual[name].equal(expected[name]) for name in common)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_everything_is_initialized_that_had_no_memory(scheme):
    config = patched_model(scheme, "gpt2").config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(7)
    model.init_weights()
    assert not [name for name, tensor in model.state_dict().items() if tensor.numel() and bool((tensor == 7).all())]


@pytest.mark.parametrize("family", BASES)
def test_what_cannot_be_measured_on_the_meta_device_asks_for_a_number(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(family).config)
    with pytest.raises(ValueError, match=r"scale='match' needs embeddings .* pass a number"):
        patch_model(model, "sinusoidal")
    assert patch_model(model, "sinusoidal", scale=0.5).config.position_encoding["scale"] == 0.5


# ------------------------------------------------------------------------------------------------- attention weights


@pytest.mark.parametrize("case", SCORE_SCHEMES)
@pytest.mark.parametrize("family", BASES)
def test_attention_weights_asked_for_in_the_config(tmp_path, family, case):
    model, ids = patched_model(case, family), tokens()
    asked = model(ids, output_attentions=True).attentions
    model.config.output_attentions = True
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert loaded.config.output_attentions
    for each in (model, loaded):
        found = each(ids).attentions
        assert len(found) == model.config.num_hidden_layers
        for weights, expected in zip(found, asked, strict=True):
            assert_same(weights, expected)
            assert_same(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_a_stock_backend_without_weights_is_still_refused():
    with pytest.raises(ValueError, match="not supported"):
        patched_model("nope", "llama").config.output_attentions = True


# ------------------------------------------------------------------------------------------------------- generation


def generated(model, ids, **options):
    """Tokens and logits of a greedy generation, (B, T) and (steps, B, V)."""
    defaults = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, **{**defaults, **options})
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("case", SCORE_SCHEMES)
@pytest.mark.parametrize("family", [*BASES, "mistral"])
def test_prompts_that_end_in_padding(family, case, cache):
    """Padded on the right by a mask or by the pad id alone, and between other tokens; beyond Mistral's window of 8."""
    model, ids = patched_model(case, family), tokens(4, 10)
    ids[0, 7:] = ids[1, 9:] = model.config.pad_token_id
    mask = torch.ones_like(ids)
    mask[0, 7:] = mask[1, 9:] = mask[2, 3:5] = mask[2, 8:] = 0
    for given in ({"attention_mask": mask}, {}):
        sequences, logits = generated(model, ids, use_cache=False, **given)
        found, cached = generated(model, ids, cache_implementation=cache, **given)
        assert found.equal(sequences)
        assert_same(cached, logits)
