"""`check`: wrong models made on purpose are named, stock models are silent, and a model is left as it was."""

import copy
import json
import math
import os
from functools import partial
from pathlib import Path

import pytest
import snapshots
import torch
from decoders import decoder
from families import FAMILIES, tiny
from matrix import matrix
from situations import SCHEMES, patched_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from hf_posenc import UnsupportedModelError, check, patch_model
from hf_posenc.checking.fingerprint import fingerprint, fit_turning
from hf_posenc.checking.runner import Runner
from hf_posenc.cli import main
from hf_posenc.core.modules import WithoutPositions
from hf_posenc.core.registry import family_for, supported_model_types
from hf_posenc.families.refused import missing_release

SERVED = tuple(t for t in supported_model_types() if t in CONFIG_MAPPING and missing_release(t) is None)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64} | FACTORS
LONG = {"max_position_embeddings": 256}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMOLLM2 = os.environ.get("HF_POSENC_SMOLLM2", "")
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
"""Of Hunyuan's checkpoints: `alpha` multiplies the base, once and for all, whatever the type is called."""
FLOAT32_ANGLE = 1e-6  # radians per token: roundings of cosines and sines, divided by some tens of tokens
FLOAT64_ANGLE = 1e-12


def findings(model):
    """Return what is found, by question."""
    return {outcome.about: outcome for outcome in check(model).findings}


# ------------------------------------------------------------------------------------------------------ wrong models


def with_rotary(model, **parameters):
    """Give a LLaMA, or a model like it, a rotary module of another config than its own."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0} | parameters
    owner = model.base_model
    owner.rotary_emb = type(owner.rotary_emb)(config)
    return model


def with_wrong_base():
    return with_rotary(tiny("llama"), rope_theta=500000.0)


def turning(change, **config):
    """A LLaMA whose attention changes its queries and keys after LLaMA's rotation."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = change(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    model = tiny("llama", num_key_value_heads=4, **config)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Changing", (LlamaAttention,), {"forward": forward})
    return model


def interleave(query, key, cos, sin):
    """The cosines and sines and products of neighbouring dimensions."""
    first = [x[..., ::2] for x in (query, key)]
    second = [x[..., 1::2] for x in (query, key)]
    cos, sin = (each[:, None, :, :4] for each in (cos, sin))
    pairs = zip(first, second, strict=True)
    return tuple(torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2) for a, b in pairs)


def turn_queries_only(query, key, cos, sin):
    return apply_rotary_pos_emb(query, key, cos, sin)[0], key


class Joining(LlamaModel):
    """A LLaMA that loses position ids on the way to its masks."""

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        if attention_mask is None and kwargs.get("past_key_values") is None:
            attention_mask = torch.ones_like(input_ids)  # with a mask, nobody looks for documents
        return super().forward(input_ids, attention_mask, **kwargs)


def leaking_packer():
    model = tiny("llama")
    model.model.__class__ = Joining
    return model


def with_stale_keys():
    return tiny("llama", rope_parameters=DYNAMIC)


def turning_everywhere():
    model = tiny("smollm3")
    for layer in model.model.layers:
        layer.self_attn.use_rope = 1
    return model


def without_mask():
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
        layer.self_attn.register_forward_pre_hook(drop_mask, with_kwargs=True)
    return model


def drop_mask(attention, args, kwargs):
    return args, {**kwargs, "attention_mask": None}


def with_masks(model, change):
    """Let `change(mask)` change the masks (B, 1, Q, K) of a model's attentions."""
    model.set_attn_implementation("eager")

    def see(attention, args, kwargs):
        return args, {**kwargs, "attention_mask": change(kwargs["attention_mask"])}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(see, with_kwargs=True)
    return model


def seeing_blocks():
    """Four tokens that see each other, of which the first block ends before the twelfth token."""
    block = torch.arange(128) // 4
    same = block[:, None] == block

    def see(mask):
        queries, keys = mask.shape[-2:]
        return mask.masked_fill(same[keys - queries : keys, :keys], 0)

    return with_masks(tiny("llama"), see)


def hiding_far_tokens():
    """A window of 12 tokens that the config does not name."""
    far = torch.ones(128, 128, dtype=torch.bool).tril(-12)

    def hide(mask):
        queries, keys = mask.shape[-2:]
        return mask.masked_fill(far[keys - queries : keys, :keys], torch.finfo(mask.dtype).min)

    return with_masks(tiny("llama"), hide)


def turning_values():
    """A LLaMA that turns its values, too, so that what a token returns depends on where it is."""
    model = tiny("llama")
    for layer in model.model.layers:
        attention = layer.self_attn

        def turn(projection, args, values, attention=attention):
            heads = values.unflatten(-1, (-1, 8)).transpose(1, 2)
            return apply_rotary_pos_emb(heads, heads, *attention.angles)[0].transpose(1, 2).flatten(-2)

        attention.register_forward_pre_hook(
            lambda attention, args, kwargs: setattr(attention, "angles", kwargs["position_embeddings"]),
            with_kwargs=True,
        )
        attention.v_proj.register_forward_hook(turn)
    return model


def with_arguments(model, change):
    """Let `change(arguments, past)` change the arguments of a model's calls, where `past` counts the cached tokens."""

    def see(model, args, kwargs):
        cache = kwargs.get("past_key_values")
        change(kwargs, 0 if cache is None else cache.get_seq_length(), args[0].shape[1])
        return args, kwargs

    model.register_forward_pre_hook(see, with_kwargs=True)
    return model


def with_positions(change):
    """A LLaMA trained at 64 tokens that changes its position ids."""

    def see(given, past, count):
        if given.get("position_ids") is not None:
            given["position_ids"] = change(given["position_ids"])

    return with_arguments(tiny("llama", max_position_embeddings=64), see)


def with_a_short_table():
    model = tiny("gpt2")
    table = model.transformer.wpe
    table.forward = lambda ids, read=table.forward: read(ids + 2)  # OPT's offset
    return model


def with_config(model, during, **settings):
    """Let a model's decoder run with other settings than the config has, in calls with `during(past)`."""
    decoder, forward = model.base_model, model.base_model.forward

    def run(*args, past_key_values=None, **kwargs):
        own = {name: getattr(decoder.config, name) for name in settings}
        if during(0 if past_key_values is None else past_key_values.get_seq_length()):
            vars(decoder.config).update(settings)
        try:
            return forward(*args, past_key_values=past_key_values, **kwargs)
        finally:
            vars(decoder.config).update(own)

    decoder.forward = run
    return model


def ignoring_the_window():
    return with_config(decoder("mistral", sliding_window=8), lambda past: True, sliding_window=None)


def ignoring_the_window_with_a_cache():
    return with_config(decoder("mistral", sliding_window=8), lambda past: past > 0, sliding_window=None)


def with_masks_of_other_layers():
    types = ["full_attention", "sliding_attention"]
    return with_config(decoder("gemma2", sliding_window=8), lambda past: True, layer_types=types)


def starting_chunks_at_zero():
    def change(given, past, count):
        if past and count > 1:
            given["position_ids"] = torch.arange(count)[None]

    return with_arguments(tiny("llama"), change)


def with_one_row_for_all(name):
    def change(given, past, count):
        if given.get(name) is not None:
            given[name] = given[name][:1].expand_as(given[name])

    return with_arguments(tiny("llama"), change)


def seeing_padding_in_steps():
    def change(given, past, count):
        if past and given.get("attention_mask") is not None:
            given["attention_mask"] = torch.ones_like(given["attention_mask"])

    return with_arguments(tiny("llama"), change)


def seeing_padding_in_the_prompt():
    """Position ids alone part the padding from the tokens, but only where no cache is made."""
    return with_arguments(tiny("llama"), lambda given, past, count: given.update(attention_mask=None))


def counting_by_itself():
    seen = [0]

    def change(given, past, count):
        seen[0] = seen[0] if past else 0
        if given.get("position_ids") is None:
            given["position_ids"] = torch.arange(seen[0], seen[0] + count)[None]
        seen[0] += count

    return with_arguments(tiny("llama"), change)


def restarting_without_ids():
    def change(given, past, count):
        if given.get("position_ids") is None:
            given["position_ids"] = torch.arange(count)[None]

    return with_arguments(tiny("llama"), change)


def queries_ahead(query, key, cos, sin):
    angles = (10000.0 ** -(torch.arange(0, 8, 2) / 8)).repeat(2)
    ahead = (cos * angles.cos() - sin * angles.sin(), sin * angles.cos() + cos * angles.sin())
    return apply_rotary_pos_emb(query, key, *ahead)[0], apply_rotary_pos_emb(query, key, cos, sin)[1]


def norm_after(query, key, cos, sin):
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    return query, key * torch.linspace(0.9, 1.1, 8)


def interleaved_in_half_the_heads(query, key, cos, sin):
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # neighbours, as halves
    halves = apply_rotary_pos_emb(query, key, cos, sin)
    others = apply_rotary_pos_emb(query[..., order], key[..., order], cos, sin)
    return tuple(torch.cat([a[:, :2], b[:, 2:, :, order.argsort()]], 1) for a, b in zip(halves, others, strict=True))


def keys_backwards(query, key, cos, sin):
    return apply_rotary_pos_emb(query, key, cos, sin)[0], apply_rotary_pos_emb(query, key, cos, -sin)[1]


def turn_last(query, key, cos, sin):
    turned = apply_rotary_pos_emb(query[..., 4:], key[..., 4:], cos[..., ::2], sin[..., ::2])
    return tuple(torch.cat([both[0][..., :4], both[1]], -1) for both in zip((query, key), turned, strict=True))


def turning_backwards():
    model = tiny("llama")
    model.model.rotary_emb.register_forward_hook(lambda rotary, args, angles: (angles[0], -angles[1]))
    return model


def without_attention_factor():
    """YaRN's factor is `0.1 ln 4 + 1` on cosines and sines, and its square on scores."""
    model = tiny("llama", rope_parameters=YARN, max_position_embeddings=256)
    model.model.rotary_emb.attention_scaling = 1.0
    return model


def with_a_layer_that_stands():
    model = tiny("smollm3", no_rope_layers=[1, 1])
    model.model.layers[1].self_attn.use_rope = 0
    return model


def with_another_alpha():
    model = decoder("hunyuan_v1_dense", rope_parameters=dict(ALPHA))
    model.config.rope_parameters["alpha"] = 100.0
    return model


HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
clamping = partial(with_positions, lambda ids: ids.clamp(max=63))
wrapping = partial(with_positions, lambda ids: ids % 50)
WRONG = {
    # Within the original length a dynamic scaling changes nothing, so that only a longer run tells.
    lambda: with_rotary(tiny("llama", rope_parameters=DYNAMIC)): (
        "scaling",
        "at 128 tokens, beyond the original length",
    ),
    lambda: with_rotary(tiny("llama", rope_parameters=YARN, **LONG)): ("scaling", "yarn, has no effect"),
    lambda: with_rotary(tiny("gpt_neox"), partial_rotary_factor=1.0): (
        "share",
        "4 pairs of each head turn, the config",
    ),
    partial(turning, turn_last, rope_parameters=HALF): (
        "share",
        "the first pair that turns is of the dimensions (4, 6)",
    ),
    partial(turning, interleave): ("layout", "interleaved, the model type's are half"),
    turning_backwards: ("direction", "pairs turn backwards"),
    with_wrong_base: ("base", "base 500,000, the config says rope_theta 10,000"),
    with_another_alpha: ("frequencies", "the frequencies are not those of the config (dynamic"),
    without_attention_factor: ("scaling", f"scores should be {(0.1 * math.log(4) + 1) ** 2:.3g} times as large"),
    with_stale_keys: ("stale keys", "at positions 60 to 67"),
    turning_everywhere: ("unrotated layer", "the config says that this layer is not rotated, but 4 of 4 pairs"),
    with_a_layer_that_stands: ("rotation", "layer 1: the config asks for 4 turning pairs, but no pair turns"),
    partial(turning, turn_queries_only): ("rotation", "queries and keys turn differently"),
    partial(turning, keys_backwards): (
        "rotation",
        "Keys: 4 of 4 pairs of each head turn (100 %), layout half, backwards",
    ),
    partial(turning, interleaved_in_half_the_heads): (
        "rotation",
        "change with the position, but not as pairs that turn",
    ),
    partial(turning, queries_ahead): ("offset", "queries turn as if they were 1 token ahead of the keys"),
    partial(turning, norm_after): ("norm", "multiply the dimensions of the keys after they turn"),
    without_mask: ("causal mask", "other tokens of the future"),
    seeing_blocks: ("causal mask", "other tokens of the future"),
    leaking_packer: ("packing", "another first document"),
    hiding_far_tokens: ("window", "though the config has a window of no limit there"),
    with_masks_of_other_layers: ("window", "though the config has a window of no limit there"),
    ignoring_the_window: ("window", "layers 0, 1: tokens before the sliding window of 8 change"),
    ignoring_the_window_with_a_cache: ("chunk", "steps of 4 behind 12 cached tokens"),
    starting_chunks_at_zero: ("chunk", "steps of 4 behind 12 cached tokens"),
    turning_values: ("positions", "a shift of all positions by 1 changes logits by"),
    clamping: ("positions", "positions 54 to 73 act as 63 or less would"),
    wrapping: ("positions", "a shift of all positions by 44 changes logits by"),
    with_a_short_table: ("positions", "raises IndexError at positions 44 to 63, and its trained length is 64"),
    partial(with_one_row_for_all, "position_ids"): ("batch", "two rows, one with 4 padding tokens, in one run"),
    partial(with_one_row_for_all, "attention_mask"): ("batch", "two rows, one with 4 padding tokens, in one run"),
    seeing_padding_in_steps: ("padded cache", "in cached steps"),
    seeing_padding_in_the_prompt: ("padded cache", "in cached steps"),
    counting_by_itself: ("crop", "after removing 2 of 6 tokens"),
    restarting_without_ids: ("default ids", "logits of cached steps differ"),
}
"""Function that makes a wrong model -> the question under which it is found, and words of the finding."""


TURNS = [wrong for wrong in WRONG if getattr(wrong, "func", None) is turning]


def is_named(wrong, model):
    about, words = WRONG[wrong]
    found = findings(model)
    assert set(found) - ({"rotation"} if wrong is wrapping else set()) == {about}  # seen within the trained length, too
    assert words in found[about].found
    assert found[about].measured is not None
    assert found[about].advice


@pytest.mark.parametrize("wrong", WRONG, ids=[f"{about}: {words}" for about, words in WRONG.values()])
def test_a_wrong_model_is_named(wrong):
    is_named(wrong, wrong())


HARD = [TURNS[1], leaking_packer, with_stale_keys, without_mask, seeing_blocks, hiding_far_tokens, clamping]


@pytest.mark.parametrize("wrong", [*HARD, ignoring_the_window_with_a_cache])
def test_it_is_named_in_half_precision_under_eager_attention(wrong):
    """Whose roundings would hide a window of which one token is seen."""
    model = wrong().bfloat16()
    model.set_attn_implementation("eager")
    is_named(wrong, model)


@pytest.mark.parametrize("wrong", TURNS, ids=lambda wrong: wrong.args[0].__name__)
def test_what_happens_beside_the_rotation_of_long_models_is_named(wrong):
    model = wrong()
    model.config.max_position_embeddings = 131072
    is_named(wrong, model)


def test_a_token_is_shown_to_a_layer_with_both_signs():
    """Of a single head, whose scores saturate, a loud token gets all attention or none."""
    model = tiny("mistral", num_attention_heads=1, num_key_value_heads=1, head_dim=8, initializer_range=1.0)
    for seed in range(4):
        report = check(model, seed=seed)
        assert report.ok, report


@pytest.mark.parametrize("damage", ["weight", "logits"])
def test_nan_is_reported_as_such(damage):
    model = tiny("llama")
    if damage == "weight":
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    else:  # of an overflow
        model.lm_head.register_forward_hook(lambda head, args, logits: logits * torch.nan)
    report = check(model)
    found = [outcome.about for outcome in report.findings]
    assert found == (["weights", "logits"] if damage == "weight" else ["logits"])
    assert {"causal mask", "cache", "rotation"} <= {outcome.about for outcome in report.not_measured}
    assert ("model.layers.1.mlp.up_proj.weight" in str(report)) == (damage == "weight")


# --------------------------------------------------------------------------------------------------------- silence

CLAIMS_NO_PACKING = {
    model_type for model_type in SERVED if (family := family_for(model_type)).hybrid or family.joins_documents
}


CACHED = {"chunk", "padded cache", "crop"}
UNMEASURED = {
    "granite4_vision_text": {"cache", *CACHED},  # makes no cache
    "openai-gpt": {"cache", *CACHED},
    "inkling_text": {"left padding", "batch", "padded cache", "crop"},  # counts padding as tokens
    "llama4_text": {"left padding", "batch", "padded cache"},
    "minimax": {"crop"},
    "jamba": {"crop", "chunk"},  # its state does not go on by several tokens
}
"""Model type -> what it cannot do in stock transformers, besides to crop a state."""


@matrix(family=FAMILIES, attention=["sdpa", "eager"], dtype=[torch.float32, torch.bfloat16])
def test_a_stock_model_is_silent(family, attention, dtype):
    model = tiny(family).to(dtype)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("transformers has no sdpa for this family")
    model.set_attn_implementation(attention)
    report = check(model)
    assert report.ok, report
    about = {outcome.about for outcome in report.not_measured}
    assert about <= {"packing", "positions", "window"}, report
    assert "positions" not in about or "IndexError" in str(report)


KNOWN = {"bamba": ["default ids"]}
"""Without position ids, transformers counts the cached steps of this type from 0."""


@pytest.mark.rows(default=7)
@pytest.mark.parametrize("model_type", SERVED)
def test_every_stock_type_is_silent(model_type):
    report = check(decoder(model_type))
    assert [outcome.about for outcome in report.findings] == KNOWN.get(model_type, []), report
    unmeasured = {outcome.about for outcome in report.not_measured} - {"packing", "layout", "positions", "window"}
    assert unmeasured <= UNMEASURED.get(model_type, {"crop"} if model_type in CLAIMS_NO_PACKING else set())
    measured = {outcome.about for outcome in report.outcomes if outcome.ok}
    assert {"rotation", "causal mask"} <= measured
    assert ("packing" in measured) == (model_type not in CLAIMS_NO_PACKING)


def default_length(model_type):
    """Return the name of a type's maximum length in its config, and its value there."""
    name = family_for(model_type).names.config_length
    return name, getattr(CONFIG_MAPPING[model_type](), name, None)


def in_dtype(model, dtype):
    """Convert a model as `from_pretrained(dtype=)` does, which leaves frequencies and some weights in float32."""
    kept = {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}
    model = model.to(dtype)
    for name, parameter in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict or ()):
            parameter.data = parameter.data.float()
    for name, buffer in kept.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer)
    return model


@matrix(model_type=["llama", "hunyuan_v1_dense", "deepseek_v3"], dtype=DTYPES, length=[8192, 131072])
def test_long_stock_models_are_silent(model_type, dtype, length):
    for seed in (0, 1):
        report = check(in_dtype(decoder(model_type, seed=seed, max_position_embeddings=length), dtype), seed=seed)
        assert report.ok, report
        assert "as the config says" in str(report)


SQUARE_MASK = {"codegen", "gpt_bigcode", "gpt_neo", "openai-gpt"}
"""Types with a mask that grows with the square of the length."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SERVED)
def test_every_long_stock_type_is_silent(model_type):
    name, default = default_length(model_type)
    longest = default if model_type in SQUARE_MASK else 131072
    for length in {default, longest}:
        for dtype in DTYPES:
            report = check(in_dtype(decoder(model_type, **({name: length} if length else {})), dtype))
            assert [finding.about for finding in report.findings] == KNOWN.get(model_type, []), report


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason="HF_POSENC_SMOLLM2=FOLDER runs this; scripts/get_smollm2.py FOLDER brings it")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trained_model_is_silent_and_its_faults_are_not(dtype):
    model = AutoModelForCausalLM.from_pretrained(Path(SMOLLM2), dtype=dtype).eval()
    for seed in (0, 1):
        report = check(model, seed=seed)
        assert report.ok, report
    assert "layers 0 to 29: 32 of 32 pairs of each head turn" in str(report)
    assert list(findings(with_rotary(model, rope_theta=10000.0))) == ["base"]


@pytest.mark.parametrize("scaling", ["yarn", "linear", "llama3", "longrope", "proportional"])
def test_a_scaling_that_takes_effect_is_silent(scaling):
    """Phi-3's class drops a cache of stale keys; LLaMA's does not."""
    parameters = {
        "yarn": YARN,
        "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": LONGROPE,
        "proportional": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }[scaling]
    original = {"original_max_position_embeddings": 64} if scaling == "longrope" else {}
    report = check(tiny("phi3" if scaling == "longrope" else "llama", rope_parameters=parameters, **LONG, **original))
    assert report.ok, report
    beyond = {outcome.about for outcome in report.outcomes if outcome.ok} & {"scaling"}
    assert beyond == ({"scaling"} if scaling == "longrope" else set())
    assert [outcome.about for outcome in report.not_measured] == (["stale keys"] if scaling == "longrope" else [])


# ---------------------------------------------------------------------------------------------------- the fingerprint


def turned(states, frequencies, shift, pairs):
    """Turn pairs of dimensions by shift times their frequency, one after the other."""
    result = states.clone()
    for number, (a, b) in enumerate(pairs):
        for head in range(states.shape[0]):
            angle = frequencies[head, number] * shift
            x, y = states[head, :, a], states[head, :, b]
            result[head, :, a] = x * angle.cos() - y * angle.sin()
            result[head, :, b] = x * angle.sin() + y * angle.cos()
    return result


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved", "mixed"])
def test_pairs_and_frequencies_are_recovered(layout, rescaled):
    """Fast, slow and negative frequencies, others in each head, each dimension rescaled after the turn."""
    pairs = {
        "half": ((1, 4), (2, 5), (3, 6)),
        "interleaved": ((2, 3), (4, 5), (6, 7)),
        "mixed": ((0, 7), (1, 6), (2, 3)),
    }[layout]
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 11, 8, generator=generator, dtype=torch.float64)
    frequencies = torch.tensor([[2.5, -0.1, 1e-6], [3.0, 0.7, 2e-6]], dtype=torch.float64)
    weights = torch.rand(8, generator=generator, dtype=torch.float64) + 0.5 if rescaled else torch.ones(8)
    moved = {shift: turned(states, frequencies, shift, pairs) * weights for shift in (1, 16, 256)}
    turning = fit_turning(states * weights, moved, torch.finfo(torch.float64).eps, rescaled=rescaled)
    assert turning.pairs == pairs
    assert turning.layout == layout
    assert turning.odd == ()
    assert len(turning.heads) == 2
    assert (turning.frequencies - frequencies).abs().max() <= FLOAT64_ANGLE


def test_small_pairs_beside_large_ones_are_recovered():
    """In trained heads some pairs are thousands of times smaller, and tokens nearly agree in a dimension."""
    pairs = ((0, 2), (1, 3))
    states = torch.randn(1, 11, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-2 + 1.0
    states = states * torch.tensor([1.0, 1e-4, 1.0, 1e-4])
    frequencies = torch.tensor([[1.0, 0.01]], dtype=torch.float64)
    moved = {shift: turned(states, frequencies, shift, pairs).float().double() for shift in (1, 16)}
    turning = fit_turning(states.float().double(), moved, torch.finfo(torch.float32).eps)
    assert turning.pairs == pairs
    assert (turning.frequencies - frequencies).abs().max() <= FLOAT32_ANGLE


@pytest.mark.parametrize("size", [8, 64])
def test_a_pair_of_zeros_is_not_missed(size):
    """Sparse weights can silence a pair in all heads of the keys, or of both; `model.to` rounds all frequencies."""
    model, pair = tiny("llama", head_dim=size), [1, size // 2 + 1]
    for projection, heads in (("k_proj", 2), ("q_proj", 4)):
        getattr(model.model.layers[0].self_attn, projection).weight.data.view(heads, size, 32)[:, pair] = 0
        assert check(model).ok
    assert check(model.bfloat16()).ok


def test_what_does_not_turn_is_odd():
    states = torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    added = torch.zeros(8, dtype=torch.float64)
    added[2:5] = torch.tensor([0.3, -0.2, 0.5])
    turning = fit_turning(states, {1: states + added}, torch.finfo(torch.float64).eps)
    assert turning.pairs == ()
    assert turning.odd == (2, 3, 4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_turns_by_the_formula(attention):
    """`base^(-2i/D)` of LLaMA, and the dynamic base of NTK in a sequence of 128 tokens."""
    model = tiny("llama", rope_parameters=DYNAMIC)
    model.set_attn_implementation(attention)
    exponents = -torch.arange(0, 8, 2, dtype=torch.float64) / 8
    runner = Runner(model, 0)
    with torch.no_grad():
        short = fingerprint(runner, list(model.model.layers), 63, 63)
        long = fingerprint(runner, list(model.model.layers), 64, 127, start=32)
    ntk = 10000.0 * (4.0 * 128 / 64 - 3.0) ** (8 / 6)
    for turnings, base in ((short, 10000.0), (long, ntk)):
        assert sorted(turnings) == [0, 1]
        for layer in turnings.values():
            for side in (layer.queries, layer.keys):
                assert side.pairs == ((0, 4), (1, 5), (2, 6), (3, 7))
                assert (side.frequencies - base**exponents).abs().max() <= FLOAT32_ANGLE
            assert len(layer.queries.frequencies) == 4


# --------------------------------------------------------------------------------------------- patched, forked, others


@pytest.mark.rows(default=7)
@matrix(scheme=SCHEMES, base=["gpt2", "llama"])
def test_a_patched_model_is_silent(scheme, base):
    report = check(patched_model(scheme, base))
    assert report.ok, report
    assert "scheme" in {outcome.about for outcome in report.outcomes}


def test_a_patch_that_is_not_applied_is_named():
    model = patch_model(tiny("llama"), "alibi")
    model.model.layers[0].self_attn.posenc = WithoutPositions()
    assert "layer 0" in findings(model)["scheme"].found


def test_stale_keys_of_a_patched_model_are_named():
    model = patch_model(tiny("llama"), "rope", scaling={"rope_type": "dynamic", "factor": 4.0})
    assert list(findings(model)) == ["stale keys"]


def forked(model):
    """Give a model a type that no family serves."""
    model.config.__class__ = type("ForkedConfig", (type(model.config),), {"model_type": "forked"})
    return model


def test_a_fork_that_no_family_serves_is_measured():
    """Layers without rotation, and documents that see each other, may be meant so."""
    assert check(forked(tiny("smollm3"))).ok
    assert list(findings(forked(with_wrong_base()))) == ["base"]
    assert list(findings(forked(without_mask()))) == ["causal mask"]
    report = check(forked(leaking_packer()))
    assert report.ok
    assert [outcome.about for outcome in report.not_measured] == ["packing"]


def test_what_cannot_be_checked_is_refused():
    with torch.device("meta"):
        empty = tiny("llama")
    with pytest.raises(UnsupportedModelError, match="load its weights first"):
        check(empty)
    encoder = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        check(encoder)


# ---------------------------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize("make", [with_stale_keys, lambda: tiny("gpt2"), lambda: patched_model("learned", "llama")])
def test_a_model_is_left_as_it_was(make):
    model = make().train()
    before, state = snapshots.snapshot(model, run=False), torch.get_rng_state()
    check(model)
    assert torch.get_rng_state().equal(state)
    snapshots.assert_same(snapshots.snapshot(model, run=False), before)


def test_a_model_that_raises_is_left_as_it_was():
    """A cache that fails is a question that was not measured."""
    model = tiny("llama", rope_parameters=DYNAMIC)
    before = snapshots.snapshot(model, run=False)

    def fail(attention, args, kwargs):
        if kwargs.get("past_key_values") is not None:
            raise RuntimeError("no cache here")

    handles = [layer.self_attn.register_forward_pre_hook(fail, with_kwargs=True) for layer in model.model.layers]
    report = check(model)
    for handle in handles:
        handle.remove()
    snapshots.assert_same(snapshots.snapshot(model, run=False), before)
    about = [outcome.about for outcome in report.not_measured]
    assert about == ["stale keys", "cache", "chunk", "padded cache", "crop"]
    assert "no cache here" in str(report)


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command(tmp_path, capsys):
    tiny("llama").save_pretrained(tmp_path / "stock")
    assert main(["check", str(tmp_path / "stock"), "--json", str(tmp_path / "check.json")]) == 0
    assert "LlamaForCausalLM (llama), float32, sdpa: nothing found" in capsys.readouterr().out
    written = json.loads((tmp_path / "check.json").read_text())
    assert written["ok"] is True
    assert {"rotation", "cache"} <= {outcome["about"] for outcome in written["outcomes"]}
    with_stale_keys().save_pretrained(tmp_path / "stale")
    assert main(["check", str(tmp_path / "stale")]) == 1
    assert "FOUND stale keys" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    patched_model("alibi", "llama").save_pretrained(tmp_path / "ours")
    assert main(["check", str(tmp_path / "ours")]) == 0
    assert "alibi acts as it should" in capsys.readouterr().out
