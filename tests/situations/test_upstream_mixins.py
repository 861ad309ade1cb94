"""What transformers asks of every model class (its `ModelTesterMixin` and `GenerationTesterMixin`), asked of patched models."""

import pytest
import torch
from families import tokens
from matrix import matrix
from situations import BASES, SCHEMES, SCORE_SCHEMES, assert_same, in_turn, patched_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import from_pretrained


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


def generated(model, ids, **options):
    """Tokens and logits of a greedy generation, (B, T) and (steps, B, V)."""
    defaults = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, **{**defaults, **options})
    return out.sequences, torch.stack(out.logits)


@pytest.mark.rows(default=6)
@matrix(
    in_turn(SCORE_SCHEMES, [*BASES, "mistral"], ["dynamic", "static", "static", "dynamic"]),
    case=None,
    family=None,
    cache=None,
)
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


@pytest.mark.parametrize("scheme", ["alibi", "shaw", "rope"])
def test_generation_stops_at_a_string(tiny_checkpoints, scheme):
    """The tokenizer that `generate` needs for it goes through every forward; a server passes one always."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoints / "llama")
    model = from_pretrained(tiny_checkpoints / "llama", scheme=scheme)
    prompt = tokenizer("Call me Ishmael.", return_tensors="pt")
    letters = {tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefgh"}
    others = [token for token in range(model.config.vocab_size) if token not in letters]
    options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": others}
    whole = model.generate(**prompt, **options)
    start = prompt["input_ids"].shape[1]
    assert torch.equal(model.generate(**prompt, **options, tokenizer=tokenizer), whole)
    word = tokenizer.decode(whole[0, start + 2 : start + 4])
    first = next(end for end in range(start, whole.shape[1] + 1) if word in tokenizer.decode(whole[0, start:end]))
    stopped = model.generate(**prompt, **options, tokenizer=tokenizer, stop_strings=[word])
    assert torch.equal(stopped, whole[:, :first])
