"""What transformers asks of every model class, asked of patched models.

Its wheel holds no tests. So here is what matters most of its `ModelTesterMixin` and `GenerationTesterMixin`, in words
of our own, on every family and every scheme; training and gradient checkpointing are in `test_situations.py`. The
mixins themselves run too, on patched and on stock models, if the environment variable `TRANSFORMERS_SOURCE` names the
unpacked source distribution of the installed release, or a checkout, and the package `parameterized` is installed. Their
markers are not ours: `pytest -o addopts= tests/situations/test_upstream_mixins.py -k Test_`, half a minute a pair.
"""

import copy
import os
import sys
import unittest
import warnings
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from decoders import decoder
from families import FAMILIES, tiny, tokens
from matrix import matrix
from safetensors.torch import load_file
from situations import BASES, CASES, SCHEMES, SCORE_SCHEMES, assert_same, patched_model
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.auto import modeling_auto

from hf_posenc import from_pretrained, patch_model
from hf_posenc.checkpoints.model_classes import model_class

PAIRS = [*zip(FAMILIES, cycle(SCHEMES), strict=False), ("llama", "shaw"), ("gpt2", "alibi"), ("opt", "transformer_xl")]
each_pair = pytest.mark.parametrize(("family", "case"), PAIRS)

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
    assert patch_model(model, "sinusoidal", scale=0.5).config.position_encoding["schemes"][0]["scale"] == 0.5


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
    defaults = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, **{**defaults, **options})
    return out.sequences, torch.stack(out.logits)


@matrix(family=[*BASES, "mistral"], case=SCORE_SCHEMES, cache=["dynamic", "static"])
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


@pytest.mark.rows(default=8)
@torch.no_grad()
@each_pair
def test_ways_to_generate(family, case):
    model, ids = patched_model(case, family), tokens(2, 10)
    mask = torch.ones_like(ids)
    sequences, logits = generated(model, ids, use_cache=False, attention_mask=mask)
    for way in (
        {},
        {"cache_implementation": "static", "disable_compile": True},
        {"prefill_chunk_size": 4},
    ):
        found, scores = generated(model, ids, attention_mask=mask, **way)
        assert found.equal(sequences), way
        assert_same(scores, logits, str(way))
    found, scores = generated(model, None, inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    assert found.equal(sequences[:, 10:])
    assert_same(scores, logits)
    for helper in ({"prompt_lookup_num_tokens": 2}, {"assistant_model": model}):
        assert generated(model, ids[:1], attention_mask=mask[:1], **helper)[0].equal(sequences[:1]), helper
    beams = {"num_beams": 2, "attention_mask": mask}
    assert generated(model, ids, **beams)[0].equal(generated(model, ids, use_cache=False, **beams)[0])


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


@torch.no_grad()
@each_pair
def test_generation_goes_on_from_a_cache(family, case):
    model, ids = patched_model(case, family), tokens(2, 10)
    expected, _ = generated(model, ids, attention_mask=torch.ones_like(ids))
    cache = DynamicCache(config=model.config)
    half, _ = generated(model, ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3)
    rest, _ = generated(model, half, attention_mask=torch.ones_like(half), past_key_values=cache, max_new_tokens=3)
    assert rest.equal(expected)


@torch.no_grad()
@each_pair
def test_padding_on_the_left_changes_nothing(family, case):
    model, ids = patched_model(case, family), tokens(2, 10)
    padded, mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1), torch.ones(2, 13, dtype=torch.long)
    mask[:, :3] = 0
    sequences, logits = generated(model, ids, attention_mask=mask[:, 3:])
    found, scores = generated(model, padded, attention_mask=mask)
    assert found[:, 3:].equal(sequences)
    assert_same(scores, logits)


# ----------------------------------------------------------------------------------------------------------- saving


@torch.no_grad()
@each_pair
def test_resized_saved_loaded_and_saved_again(tmp_path, family, case):
    model, ids = patched_model(case, family), tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how new rows are drawn is transformers' business
        model.resize_token_embeddings(model.config.vocab_size + 5)
    assert model(ids).logits.shape[-1] == model.config.vocab_size
    for folder in ("first", "second"):
        model.save_pretrained(tmp_path / folder)
        loaded = from_pretrained(tmp_path / folder)
        assert loaded(ids).logits.equal(model(ids).logits)
        model = loaded
    saved = [load_file(tmp_path / folder / "model.safetensors") for folder in ("first", "second")]
    assert saved[0].keys() == saved[1].keys()
    assert all(tensor.equal(saved[1][name]) for name, tensor in saved[0].items())


# ------------------------------------------------------------------------------------------------ the mixins themselves

if SOURCE := os.environ.get("TRANSFORMERS_SOURCE"):
    sys.path.insert(0, SOURCE)
    sys.modules.pop("tests", None)  # ours is a folder of this name
    # The source distribution lacks these two; a checkout has them.
    for missing, mixin in (
        ("generation.test_utils", "GenerationTesterMixin"),
        ("exporters.test_export", "ExportTesterMixin"),
    ):
        if not (Path(SOURCE) / "tests" / f"{missing.replace('.', '/')}.py").exists():
            sys.modules[f"tests.{missing}"] = SimpleNamespace(**{mixin: type(mixin, (), {})})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.generation.test_utils import GenerationTesterMixin
        from tests.test_modeling_common import ModelTesterMixin

    PASSED_OVER = {  # start of the name of a test -> why
        "test_can_set_attention_dynamically": "another attention would drop the scheme",
        "test_sdpa_can_dispatch_non_composite_models": "the same",
        "test_assisted_decoding_matches_greedy_search": "sets eager attention behind the patch",
        "test_model_weights_reload_no_missing_tied_weights": "loads a checkpoint without any of its weights",
        "test_model_rope_scaling": "of the base's own rotary embedding, at 1.5 times a length without limit",
        "test_inherits_generation_mixin": "looks for the mixin among the direct bases; ours has it one step further up",
    }
    HEADS = (
        "MODEL_MAPPING_NAMES",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    )

    class Sizes:
        """What the mixins ask of the tester of a model: a config, inputs, sizes."""

        is_training, batch_size, seq_length, encoder_seq_length, key_length = True, 3, 7, 7, 7

        def __init__(self, family, case):
            stock = tiny(family) if family in FAMILIES else decoder(family)
            self.config, names = (
                stock.config,
                [vars(modeling_auto)[head].get(stock.config.model_type) for head in HEADS],
            )
            self.classes = tuple(getattr(transformers, name) for name in names if name is not None)
            if case is not None:
                scheme, hyperparameters = CASES[case]
                scale = (
                    {"scale": 0.5} if scheme == "sinusoidal" else {}
                )  # so that configs of any size are the same scheme
                self.config = patch_model(stock, scheme, **{**hyperparameters, **scale}).config
                self.classes = tuple(model_class(each) for each in self.classes)
                for head, each in zip(HEADS, self.classes, strict=False):
                    vars(modeling_auto)[head][self.config.model_type] = each.__name__
                if case not in SCORE_SCHEMES:  # as a config that belongs to no model yet
                    self.config._attn_implementation_internal = None
            self.hidden_size, self.num_hidden_layers = self.config.hidden_size, self.config.num_hidden_layers
            self.num_attention_heads = self.config.num_attention_heads

        def prepare_config_and_inputs_for_common(self):
            ids = torch.randint(3, self.config.vocab_size, (self.batch_size, self.seq_length))
            return copy.deepcopy(self.config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def mixins_on(family, case):
        """A test case with all tests of the mixins, on one patched family; on the stock one where `case` is None."""

        def set_up(self):
            for name, reason in PASSED_OVER.items():
                if case is not None and self._testMethodName.startswith(name):
                    self.skipTest(reason)
            if family == "opt" and "padding_free" in self._testMethodName:
                self.skipTest("OPT does not detect packed documents; transformers leaves it out, too")
            self.model_tester = Sizes(family, case)
            self.all_model_classes = self.model_tester.classes

        name, bases = f"Test_{family}_{case or 'stock'}", (ModelTesterMixin, GenerationTesterMixin, unittest.TestCase)
        made = type(name, bases, {"setUp": set_up, "__module__": __name__, "all_model_classes": ()})
        return pytest.mark.filterwarnings("ignore")(pytest.mark.slow(made))

    MORE = [
        ("mixtral", "t5"),
        ("gpt_oss", "alibi"),
        *((family, None) for family, _ in PAIRS),
        ("mixtral", None),
        ("gpt_oss", None),
    ]
    globals().update({f"Test_{family}_{case or 'stock'}": mixins_on(family, case) for family, case in (*PAIRS, *MORE)})
