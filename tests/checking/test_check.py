"""`check`: eight wrong models made on purpose are named, stock models are silent, and a model is left as it was."""

import copy

import pytest
import snapshots
import torch
from decoders import decoder
from families import FAMILIES, tiny
from matrix import matrix
from torch import nn
from transformers import CONFIG_MAPPING, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel, eager_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posenc
from hf_posenc import UnsupportedModelError, check, patch_model
from hf_posenc.checking.fingerprint import fingerprint, fit_turning
from hf_posenc.checking.runs import Runner
from hf_posenc.families.refused import missing_release
from hf_posenc.registry import supported_model_types

SERVED = tuple(t for t in supported_model_types() if t in CONFIG_MAPPING and missing_release(t) is None)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
TOKENS = 1e-6  # radians per token: float32 cosines and sines, over some tens of tokens


def findings(model, **options):
    """Return what is found, by question."""
    return {outcome.about: outcome for outcome in check(model, **options).findings}


# ------------------------------------------------------------------------------------------------------ wrong models


def with_rotary(model, **parameters):
    """Give a LLaMA, or a model like it, a rotary module of another config than its own."""
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0} | parameters
    owner = model.base_model
    owner.rotary_emb = type(owner.rotary_emb)(config)
    return model


def ignoring_scaling():
    return with_rotary(tiny("llama", rope_parameters=YARN, max_position_embeddings=256))


def turning_whole_heads():
    return with_rotary(tiny("gpt_neox"), partial_rotary_factor=1.0)


def with_wrong_base():
    return with_rotary(tiny("llama"), rope_theta=500000.0)


def interleaving():
    """A LLaMA whose cosines and sines and products are those of neighbouring dimensions."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Interleaving
    return model


class Interleaving(LlamaAttention):
    """LLaMA's attention with the rotation of GPT-J."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (each[:, None, :, : self.head_dim // 2] for each in position_embeddings)
        query, key = (self.turn(each, cos, sin) for each in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def turn(self, x, cos, sin):
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


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


WRONG = {
    ignoring_scaling: ("scaling", "yarn, has no effect"),
    turning_whole_heads: ("share", "4 pairs of each head turn, the config asks for 1"),
    interleaving: ("layout", "interleaved, the model type's are half"),
    leaking_packer: ("packing", "see each other"),
    with_stale_keys: ("stale keys", "other frequencies"),
    with_wrong_base: ("base", "base 500,000, the config says rope_theta 10,000"),
    turning_everywhere: ("unrotated layer", "the config says that this layer is not rotated, but 4 of 4 pairs"),
    without_mask: ("causal mask", "queries see later tokens"),
}
"""Function that makes a wrong model -> the question under which it is found, and words of the finding."""


@matrix(wrong=WRONG, attention=["sdpa", "eager"], strength=1)
def test_a_wrong_model_is_named(wrong, attention):
    model = wrong()
    model.set_attn_implementation(attention)
    about, words = WRONG[wrong]
    found = findings(model)
    assert list(found) == [about]
    assert words in found[about].found
    assert found[about].measured is not None
    assert found[about].advice
