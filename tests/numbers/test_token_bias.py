"""Biases of keys: a number that a scheme makes of each token is added to the score of its key, by every engine that can."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from families import tiny, tokens
from torch import nn

from hf_posenc import (
    TokenModule,
    TokenScheme,
    describe,
    from_pretrained,
    lora_config,
    patch_model,
    register_scheme,
    verify,
)
from hf_posenc.core import registry
from hf_posenc.core.attention_call import Call
from hf_posenc.core.forms import Content, Slopes
from hf_posenc.core.modules import WithoutPositions, position_parameters
from hf_posenc.core.positions import Positions
from hf_posenc.engines import dispatch

HEADS, KEY_HEADS, SIZE, LENGTH = 4, 2, 8, 40
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True)
def key_gate(monkeypatch):
    """A scheme whose numbers come from a plain module, as a stranger writes it."""
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))

    class Gates(nn.Module):
        def __init__(self, dims):
            super().__init__()
            self.linear = nn.Linear(dims.hidden_size, dims.num_heads)

        def forward(self, hidden_states):
            weight = self.linear.weight.to(hidden_states.dtype)
            return nn.functional.linear(hidden_states, weight, self.linear.bias.to(weight)).transpose(1, 2)

    class Gated(TokenModule):
        def __init__(self, dims):
            super().__init__()
            self.tokens = Gates(dims)

        def forward(self, call):
            return replace(call, key_bias=call.numbers)

    @register_scheme
    @dataclass(frozen=True, kw_only=True)
    class KeyGate(TokenScheme):
        name: ClassVar[str] = "key_gate"

        def build(self, dims):
            return Gated(dims)

    return KeyGate


def drawn(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


POSITIONS = {
    "plain": lambda: Positions.causal(LENGTH),
    "window": lambda: Positions.causal(LENGTH).within(9),
    "window and sinks": lambda: Positions.causal(LENGTH).within(9, 3),
    "cache": lambda: Positions.causal(5, LENGTH),
}


@pytest.mark.rows(default=9, slow=18)
@pytest.mark.parametrize("situation", POSITIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("engine", ["wide", "chunked", "reference"])
def test_engines_add_it_to_the_scores(engine, dtype, situation):
    positions = POSITIONS[situation]()
    queries = positions.query_index.shape[1]
    query = drawn(2, HEADS, queries, SIZE, dtype=dtype, seed=0).requires_grad_()
    key, value = (drawn(2, KEY_HEADS, LENGTH, SIZE, dtype=dtype, seed=n).requires_grad_() for n in (1, 2))
    bias = (3 * drawn(2, HEADS, LENGTH, dtype=torch.promote_types(dtype, torch.float32), seed=3)).requires_grad_()
    call = Call(query, key, value, positions, scaling=SIZE**-0.5, key_bias=bias)
    output, _ = WithoutPositions()(call, lambda made: dispatch.attend(made, engine))
    wide = [each.detach().double().requires_grad_() for each in (query, key, value, bias)]
    q, k, v, b = wide[0], *(each.repeat_interleave(2, 1) for each in wide[1:3]), wide[3]
    scores = q @ k.mT / math.sqrt(SIZE) + b[:, :, None]
    expected = (scores.masked_fill(~positions.visible(), -math.inf).softmax(-1) @ v).transpose(1, 2)
    assert (output.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    without, _ = WithoutPositions()(replace(call, key_bias=None), dispatch.attend)
    assert (without.double() - expected).norm() > 0.1 * expected.norm()
    weight = drawn(*expected.shape, dtype=torch.float64, seed=4)
    mine = torch.autograd.grad((output.double() * weight).sum(), [query, key, value, bias])
    theirs = torch.autograd.grad((expected * weight).sum(), wide)
    for a, e in zip(mine, theirs, strict=True):
        assert (a.double() - e).norm() <= 10 * TOLERANCE[dtype] * e.norm()


@pytest.mark.parametrize("what", ["gates", "gates of documents", "slopes"])
def test_gradients_of_sums_over_many_tokens_in_16_bits(what):
    """They are off by 2 % at a length where rounding adds up; those of the queries, in the same call, by 0.3 %.

    The gate of a document's first token changes nothing. Its gradient is the sum of what rounding adds up to.
    """
    length = 2048
    positions = Positions.causal(length)
    if what == "gates of documents":
        segment = (torch.arange(length)[None] > 1200).int()
        positions = replace(positions, query_segment=segment, key_segment=segment, plain=False)
    shapes = ((1, HEADS, length, SIZE), (1, KEY_HEADS, length, SIZE), (1, KEY_HEADS, length, SIZE))
    tensors = [drawn(*shape, dtype=torch.bfloat16, seed=n) for n, shape in enumerate(shapes)]
    weight = drawn(1, length, HEADS, SIZE, dtype=torch.float64, seed=8)

    def gradients(engine, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        query, *others = (each.to(dtype) for each in tensors)
        call = Call(query.requires_grad_(), *others, positions, scaling=SIZE**-0.5, form=Content())
        if what == "slopes":
            learned = torch.tensor([0.5, 0.1, 0.02, 0.004], dtype=wide, requires_grad=True)
            call = replace(call, form=Slopes(learned))
        else:
            learned = (drawn(1, HEADS, length, dtype=torch.float64, seed=4).abs() / -20).to(wide).requires_grad_()
            call = replace(call, log_gates=learned)
        output, _ = dispatch.attend(call, engine)
        return [each.double() for each in torch.autograd.grad((output.double() * weight).sum(), [query, learned])]

    found = gradients("wide", torch.bfloat16)
    of_query, of_learned = (
        ((each - wanted).norm() / wanted.norm()).item()
        for each, wanted in zip(found, gradients("chunked", torch.float64), strict=True)
    )
    assert of_learned <= 8 * of_query <= 0.1
    if what == "gates of documents":
        assert (found[1][..., 1201].abs() <= 1e-4 * found[1].abs().amax(-1)).all()


@pytest.mark.parametrize("engine", ["toeplitz", "clipped"])
def test_other_engines_refuse_it(engine):
    model = patch_model(tiny("llama"), ["t5" if engine != "clipped" else "shaw", "key_gate"], attention=engine)
    with pytest.raises(ValueError, match="the layer adds forget gates"):
        model(tokens(1, 12))


def test_parameters_of_a_plain_module_inside_are_the_schemes_own(tmp_path):
    """They are described, trained by an adapter, saved, and missed where they are missing."""
    model = patch_model(tiny("llama"), ["rope", "key_gate"])
    assert verify(model).ok
    names = {f"model.layers.{n}.self_attn.posenc_additions.key_gate.tokens.linear" for n in (0, 1)}
    assert {name.rpartition(".")[0] for name in position_parameters(model)} == names
    assert "parameters  264 in 4 tensors" in str(describe(model))
    assert names <= set(lora_config(model).modules_to_save)
    model.save_pretrained(tmp_path)
    again, ids = from_pretrained(tmp_path), tokens(1, 9)
    with torch.no_grad():
        assert again(ids).logits.equal(model.eval()(ids).logits)
