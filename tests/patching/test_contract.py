"""What this package assumes of transformers, stated where an upgrade breaks it first.

Nothing here runs code of ours but the adapters. Every test states one assumption; where the supported versions differ,
both forms are listed. Passes on the oldest and the newest supported version of transformers.
"""

import inspect
import logging

import pytest
import torch
import transformers
from families import FAMILIES, LEARNED, LENGTH, ROTARY, WINDOW, WINDOWED, tiny, tokens
from torch import nn
from transformers import AttentionInterface, DynamicCache, GPT2Config, LlamaConfig, StaticCache, masking_utils
from transformers import initialization as init
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posenc.families.base import resolve
from hf_posenc.registry import family_for

NAME = "contract_probe"
PARTIAL = ("gpt_neox", "phi", "phi3")
FULL_ROTATION = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}

MASK_KEYWORDS = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask"}
MASK_KEYWORDS |= {"allow_is_causal_skip", "dtype", "config", "use_vmap", "device"}


class Probe:
    """An attention and a mask function that note their calls and compute nothing."""

    def __init__(self):
        self.attention_calls = []
        self.mask_calls = []
        self.masks = []

    def attention(self, module, query, key, value, attention_mask, **kwargs):
        self.attention_calls.append((module, query, key, value, attention_mask, kwargs))
        groups = query.shape[1] // value.shape[1]
        return value[:, :, -query.shape[2] :].repeat_interleave(groups, 1).transpose(1, 2), None

    def mask(self, **kwargs):
        self.mask_calls.append(kwargs)
        width = kwargs["q_length"] + kwargs["kv_length"]
        self.masks.append(torch.full((1, 1, 5, width), len(self.masks), dtype=torch.int32))
        return self.masks[-1]


@pytest.fixture
def probe(monkeypatch):
    # Registered as the package registers its own; removed again through the mappings that hold the registrations.
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", dict(AttentionMaskInterface._global_mapping))
    probe = Probe()
    AttentionInterface.register(NAME, probe.attention)
    AttentionMaskInterface.register(NAME, probe.mask)
    return probe


def probed(family, **config):
    """A tiny model that dispatches to the probe, and its resolved modules."""
    model = tiny(family, **config)
    model.config._attn_implementation = NAME
    return model, found_in(model)


def found_in(model):
    return resolve(family_for(model.config.model_type), model)


def ids(batch=2, length=12):
    return tokens(batch, length)


def calls_of(module):
    """The positional and keyword arguments of every later call of a module."""
    calls = []
    module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    return calls


def same_everywhere(states):
    """Whether states (B, H, T, D) of one repeated token carry no position."""
    return torch.equal(states, states[:, :, :1].expand_as(states))


def enable_checkpointing(model):
    # Renamed within the supported versions; the old name warns.
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")({"use_reentrant": False})


class TestAttentionDispatch:
    """One registered function serves every family: attention.py."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_layer_calls_the_registered_function_once(self, family, probe):
        model, found = probed(family)
        positions = torch.arange(12)[None].expand(2, -1).contiguous()
        model(ids(), position_ids=positions)
        assert [call[0] for call in probe.attention_calls] == found.attentions
        heads, key_heads = model.config.num_attention_heads, getattr(model.config, "num_key_value_heads", None)
        for _, query, key, value, mask, kwargs in probe.attention_calls:
            assert query.shape[:3] == (2, heads, 12)
            assert key.shape == value.shape
            assert key.shape[:3] == (2, key_heads or heads, 12)
            assert any(mask is made for made in probe.masks)  # the very tensor that the mask function returned
            assert torch.equal(kwargs["position_ids"], positions)
            assert kwargs["dropout"] == 0.0
            assert "is_causal" not in kwargs
            assert "cache_position" not in kwargs

    @pytest.mark.parametrize("family", FAMILIES)
    def test_position_ids_arrive_when_the_caller_gave_none(self, family, probe):
        model, _ = probed(family)
        model(ids())
        assert all(torch.equal(call[5]["position_ids"][0], torch.arange(12)) for call in probe.attention_calls)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_scaling(self, family, probe):
        """`attention.scaling` is what scores are multiplied by; OPT multiplies its queries instead and passes 1."""
        model, _ = probed(family)
        model(ids())
        for module, query, *_, kwargs in probe.attention_calls:
            assert module.scaling == query.shape[-1] ** -0.5
            assert kwargs["scaling"] == (1.0 if family == "opt" else module.scaling)

    def test_scaling_differs_by_layer_or_config(self, probe):
        model, _ = probed("gpt2", scale_attn_by_inverse_layer_idx=True)
        model(ids())
        assert [call[5]["scaling"] for call in probe.attention_calls] == [8**-0.5, 8**-0.5 / 2]
        probe.attention_calls.clear()
        model, _ = probed("gemma2", query_pre_attn_scalar=32)
        model(ids())
        assert [call[5]["scaling"] for call in probe.attention_calls] == [32**-0.5] * 2

    @pytest.mark.parametrize("family", FAMILIES)
    def test_no_other_keyword_reaches_the_function(self, family, probe):
        """A keyword we do not know could change what attention computes (as `softcap` does)."""
        model, _ = probed(family)
        model(ids())
        known = {"position_ids", "dropout", "scaling", "use_cache", "sliding_window", "softcap"}
        for *_, kwargs in probe.attention_calls:
            assert set(kwargs) <= known
            assert ("softcap" in kwargs) == (family == "gemma2")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_keys_arrive_with_the_cached_ones(self, family, probe):
        model, _ = probed(family)
        cache = model(ids(), use_cache=True).past_key_values
        probe.attention_calls.clear()
        model(ids(length=1), past_key_values=cache, use_cache=True)
        lengths = {(call[1].shape[2], call[2].shape[2]) for call in probe.attention_calls}
        # A sliding-window cache gives the `WINDOW - 1` keys it kept and the new one.
        assert lengths <= {(1, 13), (1, WINDOW)}
        assert all(torch.equal(call[5]["position_ids"].unique(), torch.tensor([12])) for call in probe.attention_calls)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_name_is_read_at_every_forward(self, family, probe):
        """Patching sets it on the config alone; nothing caches the function."""
        model = tiny(family)
        model(ids())
        model.config._attn_implementation = NAME
        model(ids())
        assert len(probe.attention_calls) == 2
        model.config._attn_implementation = "eager"
        model(ids())
        assert len(probe.attention_calls) == 2

    def test_rotary_attention_can_dispatch_like_upstream(self):
        parameters = inspect.signature(ALL_ATTENTION_FUNCTIONS.get_interface).parameters
        assert list(parameters) == ["attn_implementation", "default"]
        assert {"sdpa", "flex_attention", "flash_attention_2"} <= set(ALL_ATTENTION_FUNCTIONS.valid_keys())
        assert "eager" not in ALL_ATTENTION_FUNCTIONS.valid_keys()  # each family brings its own

    @pytest.mark.parametrize("family", LEARNED)
    def test_eager_is_the_modules_own_function(self, family):
        """A subclass of the attention finds the family's eager function in the module that defines its parent."""
        attention = found_in(tiny(family)).attentions[0]
        assert callable(inspect.getmodule(type(attention)).eager_attention_forward)

    def test_cache_update(self):
        for cache in (DynamicCache, StaticCache):
            first = list(inspect.signature(cache.update).parameters)[:4]
            assert first == ["self", "key_states", "value_states", "layer_idx"]


class TestMask:
    """The mask function is the source of the position channel: positions.py, attention.py."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_keywords(self, family, probe):
        model, _ = probed(family)
        model(ids())
        for call in probe.mask_calls:
            assert set(call) - {"local_size"} == MASK_KEYWORDS  # `local_size` comes with sliding windows only
            assert call["q_length"] == call["kv_length"] == 12
            assert call["q_offset"] == call["kv_offset"] == 0
            assert call["batch_size"] == 2
            assert call["config"] is model.config

    @pytest.mark.parametrize("family", FAMILIES)
    def test_no_padding_is_none_or_all_ones(self, family, probe):
        """None, except that older versions of OPT make a mask of ones; `generate` drops masks of ones itself."""
        model, _ = probed(family)
        model(ids())
        for call in probe.mask_calls:
            assert call["attention_mask"] is None or (family == "opt" and call["attention_mask"].all())

    @pytest.mark.parametrize("family", FAMILIES)
    def test_two_dimensional_masks_arrive_as_bool(self, family, probe):
        model, _ = probed(family)
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :4] = 0
        model(ids(), attention_mask=mask)
        assert all(torch.equal(call["attention_mask"], mask.bool()) for call in probe.mask_calls)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_one_mask_per_layer_type(self, family, probe):
        model, _ = probed(family)
        model(ids())
        types = set(getattr(model.config, "layer_types", None) or ["one"])
        assert len(probe.mask_calls) == len(types) == (2 if family in ("qwen2", "qwen3", "gemma2", "gemma3") else 1)
        layers = getattr(model.config, "layer_types", None) or ["one"] * 2
        masks = dict(zip(layers, (call[4] for call in probe.attention_calls), strict=True))
        assert len({id(mask) for mask in masks.values()}) == len(types)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_an_unregistered_name_gives_no_mask(self, family, probe):
        """Why both functions are registered under one name: without its mask a decoder would see the future."""
        del AttentionMaskInterface._global_mapping[NAME]
        model, _ = probed(family)
        model(ids())
        assert len(probe.attention_calls) == 2
        assert all(call[4] is None for call in probe.attention_calls)

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float32])
    def test_a_four_dimensional_mask_passes_untouched(self, family, dtype, probe):
        """`generate` builds our channel beforehand, and users bring their own masks (OPT then needs position_ids)."""
        model, _ = probed(family)
        mask = torch.ones(2, 1, 12, 12, dtype=dtype)
        model(ids(), attention_mask=mask, position_ids=torch.arange(12)[None])
        assert not probe.mask_calls
        assert all(call[4] is mask for call in probe.attention_calls)

    def test_offsets_with_a_dynamic_cache(self, probe):
        model, _ = probed("llama")
        cache = model(ids(), use_cache=True).past_key_values
        model(ids(length=3), past_key_values=cache, use_cache=True)
        call = probe.mask_calls[-1]
        assert (call["q_length"], call["kv_length"], call["q_offset"], call["kv_offset"]) == (3, 15, 12, 0)

    def test_offsets_with_a_static_cache_are_live_tensors(self, probe):
        """Whoever keeps `q_offset` past the forward must clone it: the cache goes on counting in the same tensor."""
        model, _ = probed("llama")
        cache = StaticCache(config=model.config, max_cache_len=32)
        for length in (12, 3, 4):
            model(ids(length=length), past_key_values=cache, use_cache=True)
        first, second, third = probe.mask_calls
        # An int as long as nothing is allocated.
        assert type(first["q_offset"]) is int
        assert first["q_offset"] == 0
        assert (second["q_length"], second["kv_length"], second["kv_offset"]) == (3, 32, 0)
        assert second["q_offset"].shape == ()
        assert second["q_offset"] is third["q_offset"]
        assert int(second["q_offset"]) == 12 + 3 + 4

    @pytest.mark.parametrize("family", WINDOWED)
    def test_offsets_with_a_sliding_window_cache(self, family, probe):
        model, _ = probed(family)
        cache = DynamicCache(config=model.config)
        model(ids(), past_key_values=cache, use_cache=True)
        probe.mask_calls.clear()
        model(ids(length=3), past_key_values=cache, use_cache=True)
        call = next(call for call in probe.mask_calls if "local_size" in call)
        # Of 12 seen tokens a window of 8 keeps the last 7; the 3 new ones join them.
        offsets = (call["q_offset"], call["kv_offset"], call["kv_length"], call["local_size"])
        assert offsets == (12, 12 - (WINDOW - 1), WINDOW - 1 + 3, WINDOW)

    def test_generate_makes_one_mask_per_step(self, probe):
        model, _ = probed("llama")
        model.generate(ids(), max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert [(call["q_length"], call["kv_length"]) for call in probe.mask_calls] == [(12, 12), (1, 13), (1, 14)]


class TestMaskFunctions:
    """Compact positions recognise upstream's mask functions by their code and read their closures: positions.py."""

    @staticmethod
    def received(probe, family, position_ids=None, **config):
        model, _ = probed(family, **config)
        model(ids(1), position_ids=position_ids, use_cache=False)
        return [call["mask_function"] for call in probe.mask_calls]

    def test_plain_causal_is_the_one_function(self, probe):
        assert self.received(probe, "llama") == [masking_utils.causal_mask_function]

    def test_padding_is_not_part_of_the_function(self, probe):
        model, _ = probed("llama")
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :4] = 0
        model(ids(), attention_mask=mask)
        assert probe.mask_calls[0]["mask_function"] is masking_utils.causal_mask_function

    @pytest.mark.parametrize(("factory", "variables", "arguments"), [
        ("sliding_window_overlay", ("sliding_window",), [(5,), (7,)]),
        ("packed_sequence_mask_function", ("packed_sequence_mask",), [(torch.zeros(1, 2),), (torch.ones(1, 2),)]),
        ("and_masks", ("mask_functions",), [(masking_utils.causal_mask_function,)] * 2),
        ("or_masks", ("mask_functions",), [(masking_utils.causal_mask_function,)] * 2),
    ])  # fmt: skip
    def test_closures(self, factory, variables, arguments):
        first, second = (getattr(masking_utils, factory)(*given) for given in arguments)
        assert first.__code__ is second.__code__
        assert first.__code__.co_freevars == variables
        contents = first.__closure__[0].cell_contents
        assert contents is arguments[0][0] or contents == arguments[0] or contents == arguments[0][0]

    def test_remapping_closure(self):
        remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
        if remap is None:
            assert transformers.__version__ < "5.18"  # the older supported versions only intersect
            return
        positions = torch.arange(3)[None]
        function = remap(masking_utils.causal_mask_function, positions)
        closure = inspect.getclosurevars(function).nonlocals
        assert closure["mask_function"] is masking_utils.causal_mask_function
        assert closure["position_ids"] is positions
        assert function.__code__ is remap(masking_utils.causal_mask_function, positions).__code__

    def test_the_factories_have_different_code(self):
        functions = [
            masking_utils.sliding_window_overlay(4),
            masking_utils.sliding_window_bidirectional_overlay(4),
            masking_utils.chunked_overlay(4, torch.zeros(1)),
            masking_utils.packed_sequence_mask_function(torch.zeros(1, 4)),
            masking_utils.blockwise_overlay(torch.zeros(1, 4)),
            masking_utils.padding_mask_function(torch.ones(1, 4)),
            masking_utils.and_masks(masking_utils.causal_mask_function),
            masking_utils.or_masks(masking_utils.causal_mask_function),
            masking_utils.causal_mask_function,
            masking_utils.bidirectional_mask_function,
        ]
        assert len({function.__code__ for function in functions}) == len(functions)

    def test_sliding_window_is_overlay_and_causal(self, probe):
        (function,) = self.received(probe, "mistral")
        overlay, causal = function.__closure__[0].cell_contents
        assert overlay.__code__ is masking_utils.sliding_window_overlay(1).__code__
        assert overlay.__closure__[0].cell_contents == WINDOW
        assert causal is masking_utils.causal_mask_function
        # A window of w shows the query itself and the w - 1 tokens before it.
        query, keys = torch.tensor(WINDOW + 1), torch.arange(WINDOW + 2)
        assert overlay(0, 0, query, keys).tolist() == [False, False] + [True] * WINDOW

    @pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
    def test_packed_sequences(self, family, probe):
        """Both forms forbid pairs of different segments; the newer one counts positions inside a segment."""
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
        segments = torch.tensor([[0] * 5 + [1] * 7])
        packed_code = masking_utils.packed_sequence_mask_function(segments).__code__
        for function in self.received(probe, family, positions):
            assert function.__code__ is masking_utils.and_masks(function).__code__
            parts = function.__closure__[0].cell_contents
            assert len(parts) == 2
            packed, inner = sorted(parts, key=lambda part: part.__code__ is not packed_code)
            assert torch.equal(packed.__closure__[0].cell_contents, segments)
            if inner.__code__.co_freevars == ("mask_function", "position_ids"):
                remapped = inspect.getclosurevars(inner).nonlocals
                assert torch.equal(remapped["position_ids"], positions)
                inner = remapped["mask_function"]
            sliding = masking_utils.sliding_window_causal_mask_function(WINDOW).__code__
            assert inner is masking_utils.causal_mask_function or inner.__code__ is sliding

    def test_opt_never_sees_packing(self, probe):
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
        assert self.received(probe, "opt", positions) == [masking_utils.causal_mask_function]

    def test_a_cache_hides_packing(self, probe):
        """Upstream drops the segments silently when there is a cache, which `use_cache=True` makes by default."""
        model, _ = probed("llama")
        model(ids(1), position_ids=torch.cat([torch.arange(5), torch.arange(7)])[None])
        assert probe.mask_calls[0]["mask_function"] is masking_utils.causal_mask_function

    def test_gapped_positions_are_taken_for_segments(self, probe):
        """Without mask and cache a step other than 1 starts a segment: randomised positions need a mask or a cache."""
        positions = torch.tensor([[0, 1, 2, 5, 6, 7, 9, 10, 11, 12, 13, 14]])
        (function,) = self.received(probe, "llama", positions)
        packed_code = masking_utils.packed_sequence_mask_function(positions).__code__
        (packed,) = [part for part in function.__closure__[0].cell_contents if part.__code__ is packed_code]
        assert packed.__closure__[0].cell_contents.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2]]


class TestLayers:
    """Embeddings at every layer go through a pre-hook on decoder layers, which reads `position_ids`: patching/changes.py."""

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_arguments(self, family, checkpointing):
        model = tiny(family)
        if checkpointing:
            enable_checkpointing(model.train())
        calls = [calls_of(layer) for layer in found_in(model).layers]
        positions = torch.arange(12)[None].expand(2, -1) + 3
        model(ids(), position_ids=positions, use_cache=False)
        for (args, kwargs), *more in calls:
            assert not more
            assert args[0].shape == (2, 12, model.config.hidden_size)
            assert torch.equal(kwargs["position_ids"], positions)
            if family == "gpt2":  # cache, mask and encoder states are positional
                assert len(args) == 4
                assert "attention_mask" not in kwargs
            else:
                assert len(args) == 1
                assert "attention_mask" in kwargs
            assert ("position_embeddings" in kwargs) == (family in ROTARY)
            assert ("layer_past" in kwargs) == (family == "gpt_neox")
            assert ("past_key_values" in kwargs) == (family not in ("gpt2", "gpt_neox"))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_layer_receives_what_its_pre_hook_returns(self, family):
        model = tiny(family)
        before = model(ids()).logits
        layer = found_in(model).layers[1]
        handle = layer.register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] + 1.0, *args[1:]), kwargs), with_kwargs=True
        )
        assert not torch.allclose(model(ids()).logits, before)
        handle.remove()
        assert torch.equal(model(ids()).logits, before)

    @pytest.mark.parametrize("family", LEARNED)
    def test_attention_arguments_without_rotary(self, family, probe):
        """The rotating attention of these families takes and passes on exactly these."""
        model, found = probed(family)
        calls = calls_of(found.attentions[0])
        model(ids(), use_cache=True)
        ((args, kwargs),) = calls
        assert len(args) == (1 if family == "gpt2" else 0)
        named = {"past_key_values", "attention_mask", "position_ids"}
        if family == "gpt2":
            assert set(kwargs) == named | {"use_cache"}
        else:
            assert set(kwargs) - {"output_attentions"} == named | {"hidden_states"}
        output = found.attentions[0](*args, **kwargs)
        assert len(output) == 2
        assert output[0].shape == (2, 12, model.config.hidden_size)


class TestPositionModules:
    """Rotary modules and learned tables are replaced by modules that are called the same way: patching/changes.py."""

    @pytest.mark.parametrize("family", ROTARY)
    def test_rotary_calls(self, family):
        model = tiny(family)
        calls = calls_of(found_in(model).rotary)
        positions = torch.arange(12)[None].expand(2, -1) + 3
        model(ids(), position_ids=positions)
        for args, kwargs in calls:
            bound = dict(zip(("hidden_states", "position_ids", "layer_type"), args, strict=False)) | kwargs
            assert bound["hidden_states"].shape == (2, 12, model.config.hidden_size)
            assert torch.equal(bound["position_ids"], positions)
        layer_types = {args[2] for args, _ in calls if len(args) == 3}
        assert layer_types == ({"full_attention", "sliding_attention"} if family == "gemma3" else set())
        assert len(calls) == (2 if family == "gemma3" else 1)
        # Positional or by keyword, a replacement must take both.
        by_position = all(len(args) >= 2 and not kwargs for args, kwargs in calls)
        assert by_position == (family in ("qwen2", "qwen3", "gemma2", "gemma3", "smollm3"))

    @pytest.mark.parametrize("family", ROTARY)
    def test_every_layer_gets_the_rotary_modules_tensors(self, family, probe):
        model, found = probed(family)
        made = []
        found.rotary.register_forward_hook(lambda _, args, output: made.append(output))
        calls = [calls_of(layer) for layer in found.layers]
        model(ids())
        for ((_, kwargs),) in calls:
            assert any(kwargs["position_embeddings"] is pair for pair in made)

    @pytest.mark.parametrize("family", ROTARY)
    def test_rotation_is_only_what_cos_and_sin_say(self, family, probe):
        """cos 1 and sin 0 leave queries and keys alone, whatever their positions: identity rotation is no positions."""
        model, found = probed(family)
        found.rotary.register_forward_hook(lambda _, args, pair: (torch.ones_like(pair[0]), torch.zeros_like(pair[1])))
        same = torch.full((1, 12), 7)
        model(same)
        for _, query, key, *_ in probe.attention_calls:
            assert same_everywhere(query)
            assert same_everywhere(key)

    @pytest.mark.parametrize("family", ROTARY)
    def test_width_of_cos(self, family, probe):
        """Which families rotate the first `cos.shape[-1]` dimensions; elsewhere another width is a shape error.

        Phi slices as well, but by a number of its attention.
        """
        model, found = probed(family, **({"rope_parameters": FULL_ROTATION} if family in PARTIAL else {}))
        found.rotary.register_forward_hook(lambda _, args, pair: (pair[0][..., :4], pair[1][..., :4]))
        facts = family_for(model.config.model_type).rotation
        if facts.slices_rotary and facts.attention_size is None:
            model(torch.full((1, 12), 7))
            _, query, *_ = probe.attention_calls[0]
            assert same_everywhere(query[..., 4:])
            assert not same_everywhere(query[..., :4])
        else:
            with pytest.raises(RuntimeError, match="size of tensor"):
                model(ids())

    def test_partial_rotation_of_phi_is_the_attentions_own(self, probe):
        model, found = probed("phi", rope_parameters={**FULL_ROTATION, "partial_rotary_factor": 0.5})
        assert [attention.rotary_ndims for attention in found.attentions] == [4, 4]
        for attention in found.attentions:
            setattr(attention, family_for("phi").rotation.attention_size, 2)
        found.rotary.register_forward_hook(lambda _, args, pair: (pair[0][..., :2], pair[1][..., :2]))
        model(torch.full((1, 12), 7))
        _, query, *_ = probe.attention_calls[0]
        assert same_everywhere(query[..., 2:])
        assert not same_everywhere(query[..., :2])

    def test_smollm3_switches_rotation_per_layer(self, probe):
        model, found = probed("smollm3", no_rope_layers=[1, 0])
        assert [bool(attention.use_rope) for attention in found.attentions] == [True, False]

        def rotated():
            probe.attention_calls.clear()
            model(torch.full((1, 12), 7))
            return [not same_everywhere(call[1]) for call in probe.attention_calls]

        assert rotated() == [True, False]
        for attention in found.attentions:
            attention.use_rope = 1
        assert rotated()[1]

    @pytest.mark.parametrize("family", LEARNED)
    def test_table_calls(self, family):
        model = tiny(family)
        calls = calls_of(found_in(model).position_table)
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :4] = 0
        model(ids(), attention_mask=mask)
        model(ids(), position_ids=torch.arange(12)[None] + 3)
        (first_args, first_kwargs), (second_args, second_kwargs) = calls
        if family == "gpt2":
            assert len(first_args) == 1
            assert not first_kwargs
            assert torch.equal(second_args[0], torch.arange(12)[None] + 3)
        else:
            # (attention mask, cached length, position_ids=): positions count the visible tokens, padding is -1.
            assert len(first_args) == 2
            assert set(first_kwargs) == {"position_ids"}
            assert first_kwargs["position_ids"][0].tolist() == [-1] * 4 + list(range(8))
            assert torch.equal(second_kwargs["position_ids"], torch.arange(12)[None] + 3)

    def test_offset_of_opt(self):
        table = found_in(tiny("opt")).position_table
        assert table.offset == family_for("opt").table_offset == 2
        output = table(torch.ones(1, 3), 0, position_ids=torch.tensor([[0, 1, 2]]))
        assert torch.equal(output[0], table.weight[2:5])

    def test_nothing_else_of_opt_is_sized_by_positions(self):
        model = tiny("opt")
        sized = [name for name, parameter in model.named_parameters() if {LENGTH, LENGTH + 2} & set(parameter.shape)]
        assert sized == ["model.decoder.embed_positions.weight"]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_no_buffer_grows_with_the_context(self, family):
        """Else raising `max_position_embeddings`, or running past it, would break: GPT-2 once had a causal mask."""
        for config in ({}, {"max_position_embeddings": 4096}):
            model = tiny(family, **config)
            assert all(buffer.numel() <= model.config.hidden_size for buffer in model.buffers())
        if family in LEARNED:
            assert not list(model.buffers())


class TestLimits:
    """Patching writes the new length into the config: patching.py."""

    @pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
    def test_generate_caps_its_default_length_by_the_config(self):
        """Twenty new tokens by default, but none past `max_position_embeddings`."""
        model = tiny("llama")
        model.generation_config.eos_token_id = None
        prompt = ids(1, LENGTH - 4)
        assert model.generate(prompt, do_sample=False).shape[1] == LENGTH
        model.config.max_position_embeddings = 2 * LENGTH
        assert model.generate(prompt, do_sample=False).shape[1] == LENGTH - 4 + 20

    def test_gpt2_calls_it_n_positions(self):
        config = GPT2Config(n_positions=LENGTH)
        config.max_position_embeddings = 2 * LENGTH
        assert config.n_positions == config.to_dict()["n_positions"] == 2 * LENGTH

    def test_gpt2_runs_past_its_table_when_the_table_is_replaced(self):
        model = tiny("gpt2")
        with pytest.raises(IndexError):
            model(ids(1, LENGTH + 1))

        class Nothing(nn.Module):
            def forward(self, position_ids):
                return torch.zeros(*position_ids.shape, 32)

        model.transformer.wpe = Nothing()
        assert model(ids(1, 300)).logits.shape[1] == 300

    def test_phi3_drops_the_cache_past_its_original_length(self):
        """Rotation with LongRoPE changes there; other schemes must take `original_max_position_embeddings` away."""
        factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        model = tiny(
            "phi3",
            rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **factors},
            original_max_position_embeddings=16,
        )
        cache = DynamicCache(config=model.config)
        cache.update(torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8), 0)
        arguments = dict(past_key_values=cache, use_cache=True, attention_mask=torch.ones(1, 17, dtype=torch.long))
        assert model.prepare_inputs_for_generation(ids(1, 17), **arguments).get("past_key_values") is None
        model.config.original_max_position_embeddings = 10**6
        assert model.prepare_inputs_for_generation(ids(1, 17), **arguments)["past_key_values"] is cache


class TestModelMachinery:
    """Class swaps, backends, initialisation: patching.py, classes.py, checkpoint.py."""

    def test_what_may_be_recorded_is_looked_up_by_the_classs_name(self):
        """After a class swap the new class must be entered, or `output_attentions` gives nothing."""
        model = tiny("llama")
        assert str(type(model.model)) in set(dict.keys(_CAN_RECORD_REGISTRY))
        swapped = type("Swapped", (type(model.model),), {})
        model.model.__class__ = swapped
        assert model(ids(), output_hidden_states=True).hidden_states is None
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(swapped), swapped._can_record_outputs)
        try:
            assert len(model(ids(), output_hidden_states=True).hidden_states) == 3
        finally:
            dict.__delitem__(_CAN_RECORD_REGISTRY, str(swapped))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_attention_weights_are_recorded_from_the_attention_class(self, family, probe):
        """By `isinstance`, so that a subclass in its place is recorded too."""
        model = tiny(family)
        model.set_attn_implementation("eager")
        attention = found_in(model).attentions[0]
        attention.__class__ = type("Swapped", (type(attention),), {})
        weights = model(ids(), output_attentions=True).attentions
        assert [tuple(w.shape) for w in weights] == [(2, 4, 12, 12)] * 2

    def test_the_setter_of_the_backend_can_be_overridden(self):
        for family in ("llama", "gpt2"):
            checker = type(tiny(family))._check_and_adjust_attn_implementation
            assert list(inspect.signature(checker).parameters) == [
                "self", "attn_implementation", "is_init_check", "allow_all_kernels",
            ]  # fmt: skip

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_registered_name_can_be_set(self, family, probe, caplog):
        model = tiny(family)
        with caplog.at_level(logging.WARNING):
            model.set_attn_implementation(NAME)
        assert model.config._attn_implementation == NAME
        assert not caplog.records
        model(ids())
        assert len(probe.attention_calls) == 2

    def test_an_unknown_backend_in_a_config_is_an_error(self):
        """The trip-wire of saved checkpoints: a stock class refuses to load them."""
        shape = dict(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        config = LlamaConfig.from_dict({**shape, "attn_implementation": "no_such_name"})
        with pytest.raises(ValueError, match="no_such_name"):
            transformers.LlamaForCausalLM(config)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_backend_is_not_saved(self, family):
        model = tiny(family)
        before = model.config.to_dict()
        model.config._attn_implementation = NAME
        assert model.config.to_dict() == before

    def test_initialisation_respects_loaded_parameters(self):
        for function, arguments in {
            "normal_": (0.0, 1.0),
            "uniform_": (-1.0, 1.0),
            "constant_": (3.0,),
            "zeros_": (),
            "ones_": (),
            "copy_": (torch.full((4,), 5.0),),
        }.items():
            fresh, loaded = nn.Parameter(torch.full((4,), 7.0)), nn.Parameter(torch.full((4,), 7.0))
            loaded._is_hf_initialized = True
            getattr(init, function)(fresh, *arguments)
            getattr(init, function)(loaded, *arguments)
            assert not (fresh == 7).any()
            assert (loaded == 7).all()

    def test_rope_scalings(self):
        assert {"linear", "dynamic", "yarn", "longrope", "llama3"} <= set(ROPE_INIT_FUNCTIONS)
        assert "default" not in ROPE_INIT_FUNCTIONS  # each rotary module brings its own
        for function in ROPE_INIT_FUNCTIONS.values():
            first, *others = inspect.signature(function).parameters.values()
            assert first.name == "config"
            assert all(other.default is not other.empty or other.kind is other.VAR_KEYWORD for other in others)

    def test_gpt2_configs_carry_rope_parameters(self):
        parameters = {"rope_type": "default", "rope_theta": 500.0}
        config = GPT2Config(rope_parameters=parameters)
        assert GPT2Config.from_dict(config.to_dict()).rope_parameters == parameters


def test_auto_config_asks_a_module_for_a_class_by_its_name(monkeypatch):
    """Model types are announced by name, so that no family's code is imported before it is needed: auto_classes.py."""
    from types import SimpleNamespace

    from transformers.models.auto import configuration_auto

    mapping = configuration_auto.CONFIG_MAPPING
    assert mapping._mapping is configuration_auto.CONFIG_MAPPING_NAMES
    monkeypatch.setitem(configuration_auto.CONFIG_MAPPING_NAMES, "some_type", "SomeConfig")
    monkeypatch.setitem(mapping._modules, "some_type", SimpleNamespace(SomeConfig=int))
    assert mapping["some_type"] is int
    assert "some_type" in mapping
