"""What this package assumes of transformers, stated where an upgrade breaks it first.

Nothing here runs code of ours but the adapters. Every test states one assumption; where the supported versions differ,
both forms are listed. Passes on the oldest and the newest supported version of transformers.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, ROTARY, tiny, tokens
from torch import nn
from transformers import AttentionInterface, DynamicCache, StaticCache, masking_utils
from transformers import initialization as init
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posenc.core.registry import family_for, supported_model_types
from hf_posenc.families.base import resolve
from hf_posenc.families.refused import missing_release

NAME = "contract_probe"

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
    def test_no_other_keyword_reaches_the_function(self, family, probe):
        """A keyword we do not know could change what attention computes (as `softcap` does)."""
        model, _ = probed(family)
        model(ids())
        known = {"position_ids", "dropout", "scaling", "use_cache", "sliding_window", "softcap"}
        for *_, kwargs in probe.attention_calls:
            assert set(kwargs) <= known
            assert ("softcap" in kwargs) == (family == "gemma2")


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
    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float32])
    def test_a_four_dimensional_mask_passes_untouched(self, family, dtype, probe):
        """`generate` builds our channel beforehand, and users bring their own masks (OPT then needs position_ids)."""
        model, _ = probed(family)
        mask = torch.ones(2, 1, 12, 12, dtype=dtype)
        model(ids(), attention_mask=mask, position_ids=torch.arange(12)[None])
        assert not probe.mask_calls
        assert all(call[4] is mask for call in probe.attention_calls)

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


class TestMaskFunctions:
    """Compact positions recognise upstream's mask functions by their code and read their closures: positions.py."""

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


class TestLimits:
    """Patching writes the new length into the config: patching.py."""

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

    def test_which_rope_parameters_the_code_of_a_model_reads(self):
        """Beside transformers' functions. An edit of a rotation has to keep such a key, so its family has to name it."""
        read = re.compile(r"rope_(?:parameters|params|scaling)\w*(?:\[\w+\])?(?:\.get\(|\[)\s*[\"'](\w+)[\"']")
        asked = re.compile(r"[\"'](\w+)[\"'] (?:not )?in [\w.]*rope_(?:parameters|params|scaling)\b")
        of_rope = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
        models, found = Path(transformers.__file__).parent / "models", {}
        for model_type in supported_model_types():
            if model_type in transformers.CONFIG_MAPPING and missing_release(model_type) is None:
                code = (models / model_type_to_module_name(model_type)).glob("modeling_*.py")
                text = "".join(path.read_text(encoding="utf-8") for path in code)
                keys = {*read.findall(text), *asked.findall(text)} - of_rope
                if keys != family_for(model_type).rotation.parameters_read - of_rope:
                    found[model_type] = keys
        assert not found, "name these keys in the RotationFacts of these types"


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
