"""What `hf_posenc.testing` checks: sound schemes of strangers pass, and each fault is named."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from decoders import decoder
from families import tiny
from torch import nn
from transformers import initialization as init

import hf_posenc
from hf_posenc import TokenScheme, WeightScheme, patch_model
from hf_posenc.core import registry
from hf_posenc.testing import check_scheme


class TwoNumbers(hf_posenc.TokenModule):
    width = 2

    def __init__(self, dims):
        super().__init__()
        self.tokens = hf_posenc.HiddenNumbers(dims, 2, bias=1.0)

    def forward(self, call):
        return replace(call, key_bias=call.numbers[..., 0] * call.numbers[..., 1].sigmoid())


def weights(make):  # a module class that changes the fields of a call which `make` returns, from a parameter (H, 1, 1)
    class Weights(hf_posenc.QueryModule):
        def __init__(self, dims):
            super().__init__()
            self.factor = nn.Parameter(torch.empty(dims.num_heads, 1, 1))

        def reset_parameters(self):  # by slices, which must leave alone what was loaded
            init.zeros_(self.factor[:1])
            init.ones_(self.factor[1:])

        def forward(self, call):
            return replace(call, **make(self.factor))

    return Weights


def scheme(base, module):
    body = {"name": "made", "__annotations__": {"name": ClassVar[str]}, "build": lambda self, dims: module(dims)}
    return hf_posenc.register_scheme(dataclass(frozen=True, kw_only=True)(type("Made", (base,), body)))()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))


SIGMOID = weights(lambda factor: {"normaliser": lambda scores: scores.sigmoid() * factor.exp()})
SOUND = {
    "numbers": ("llama", lambda: ["forgetting", scheme(TokenScheme, TwoNumbers)]),  # two, beside the one of another
    "softmax": ("gpt2", lambda: ["alibi", scheme(WeightScheme, SIGMOID)]),
}


@pytest.mark.parametrize("row", SOUND)
def test_what_is_sound_passes(row):
    family, schemes = SOUND[row]
    check_scheme(tiny(family), schemes())


FAULTS = {
    "changes nothing": lambda factor: {},
    "if queries come 3 at a time": lambda f: {
        "score_changes": (lambda call, s: s - f * s.clamp(min=-9).mean(2, True),)
    },
    "no gradient of .*factor": lambda factor: {"normaliser": lambda scores: scores.relu() / 9},
}


@pytest.mark.rows(default=2, slow=1)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_named(fault):
    with pytest.raises(AssertionError, match=fault):
        check_scheme(tiny("llama"), scheme(WeightScheme, weights(FAULTS[fault])))


def test_a_fault_when_compiled_is_found_behind_any_number_of_models():
    """torch.compile leaves the models that come after its limit as they are."""

    def twice(factor):
        return {"normaliser": lambda scores: scores.sigmoid() * factor.exp() * (1 + torch.compiler.is_compiling())}

    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            torch.compile(tiny("llama"), backend="eager")(torch.ones(1, 4, dtype=torch.int64))
        with pytest.raises(AssertionError, match="compiled"):
            check_scheme(tiny("llama"), scheme(WeightScheme, weights(twice)))


def test_what_one_layer_cannot_hold_is_refused():
    model = patch_model(tiny("llama"), ["softpick", scheme(WeightScheme, SIGMOID)])
    with pytest.raises(ValueError, match="replaces the softmax, and so does another scheme"):
        model(torch.ones(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="alibi and inkling both name layer 0"):
        patch_model(tiny("llama"), ["alibi", "inkling"])
    with pytest.raises(hf_posenc.UnsupportedModelError, match="which it cannot join: take them off"):
        patch_model(decoder("bloom"), "inkling")
