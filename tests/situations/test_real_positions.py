"""Positions between the integers: schemes that are functions of the distance compute them, all others refuse them."""

import pytest
import torch
from decoders import decoder
from families import tiny, tokens
from situations import SCHEMES, patched_model
from transformers import DynamicCache

from hf_posenc import parallel, patch_model
from hf_posenc.core.attention_call import Call
from hf_posenc.core.positions import Positions
from hf_posenc.schemes import Rope, Temperature

LENGTH = 12
IDS = tokens(2, LENGTH)
REAL = (torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 40).sort(-1).values
DISTANCE = REAL[:, None, :, None] - REAL[:, None, None, :]
SHOWN = {"attention_mask": torch.ones_like(IDS), "use_cache": False}
WHOLE = ("t5", "shaw", "transformer_xl", "cope", "learned", "far_rope", "inkling")
"""Schemes with whole distances."""
TOLERANCE = 1e-5
"""LLaMA norms in float32 in a float64 model too; logits are about 3 in size."""


def softplus(x):
    return torch.nn.functional.softplus(x)


def number(module, name):
    return getattr(module, name).double()[:, None, None]


def alibi(module):
    return -number(module, "slopes") * DISTANCE


def kerple(module):
    scale, rate = softplus(number(module, "raw_scale")), softplus(number(module, "raw_rate"))
    return -scale * torch.log(1 + rate * DISTANCE)


def fire(module):
    threshold = (module.reach * module.threshold).abs()
    far = torch.log((module.rate * torch.maximum(REAL, threshold)).abs() + 1)[:, :, None]
    ratio = torch.log((module.rate * DISTANCE[:, 0]).abs() + 1) / far
    hidden = torch.relu(ratio[..., None] * module.input_weight + module.input_bias)
    return torch.einsum("bqlw,hw->bhql", hidden, module.output_weight)


BIASES = {
    "alibi": ("alibi", {"trainable": True}, alibi),
    "kerple": ("kerple", {"share_layers": False}, kerple),
    "fire": ("fire", {"threshold": 8.0}, fire),
}


@pytest.mark.parametrize("case", BIASES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_biases_are_those_of_the_formula(family, case):
    """A stock model without positions gets them as its mask; outputs and gradients."""
    scheme, options, formula = BIASES[case]
    model = patch_model(tiny(family), scheme, seed=0, **options).double().eval()
    expected = patch_model(tiny(family), "nope").double().eval()
    expected.set_attn_implementation("eager")
    modules = [module.posenc for name, module in model.named_modules() if "posenc" in module._modules]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    found = model(IDS, position_ids=REAL, **SHOWN).logits
    wanted = stepwise(expected, [formula(module).masked_fill(~causal, -1e30) for module in modules])
    assert (found - wanted).abs().max() <= TOLERANCE
    counted = model(IDS, position_ids=torch.arange(LENGTH)[None].expand(2, -1), **SHOWN).logits
    assert (counted - wanted).abs().max() > 1e-3
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for output in (found, wanted):
        (output * weight).sum().backward()
    mine, theirs = (m.get_input_embeddings().weight.grad for m in (model, expected))
    assert (mine - theirs).norm() <= TOLERANCE * theirs.norm()


def stepwise(model, biases):
    """Return logits of a model whose layers each get a mask of their own."""
    layers = model.model.layers if hasattr(model, "model") else model.transformer.h
    handles = []
    for layer, bias in zip(layers, biases, strict=True):
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attn

        def give(module, args, kwargs, bias=bias):
            return args, {**kwargs, "attention_mask": bias}

        handles.append(attention.register_forward_pre_hook(give, with_kwargs=True))
    logits = model(IDS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rotations_and_sinusoids_at_half_positions_have_half_the_frequencies(family):
    whole = torch.arange(0, 2 * LENGTH, 2)[None] + torch.tensor([[1], [4]])
    waves = (1.0, 0.4, 0.1, 0.02)
    halves = tuple(w / 2 for w in waves)
    for made in (
        lambda w: patch_model(tiny(family), "rope", frequencies=w),
        lambda w: patch_model(tiny(family), "sinusoidal", frequencies=w * 4, scale=1.0),
    ):
        model, slower = made(waves), made(halves)
        found, wanted = model(IDS, position_ids=whole / 2, **SHOWN), slower(IDS, position_ids=whole, **SHOWN)
        assert (found.logits - wanted.logits).abs().max() < 1e-4
        assert (found.logits - model(IDS, position_ids=whole, **SHOWN).logits).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_float64_ids_under_a_float32_model_are_those_of_float32(scheme):
    model = patched_model(scheme, "llama")
    halves = torch.arange(LENGTH)[None] / 2
    if scheme in WHOLE:
        with pytest.raises(ValueError, match="takes whole position_ids only"):
            model(IDS, position_ids=halves.double(), **SHOWN)
        return
    found, wanted = (model(IDS, position_ids=ids, **SHOWN).logits for ids in (halves.double(), halves))
    assert (found - wanted).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "rope", "sinusoidal", "temperature", "nope"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ids_that_never_fall_are_one_document(family, scheme):
    """Of a stock model only a mask of ones makes them one. A base's own table of positions is kept beside temperature."""
    model = patched_model(scheme, family)
    real = REAL.float() if (family, scheme) != ("gpt2", "temperature") else 2 * torch.arange(LENGTH)[None]
    for ids in (real, 3 * torch.arange(LENGTH)[None], torch.arange(LENGTH)[None] // 2):
        found = model(IDS, position_ids=ids, use_cache=False).logits
        assert found.equal(model(IDS, position_ids=ids, **SHOWN).logits)
    for ids in (real % 10, 3 * torch.arange(LENGTH)[None] % 10):
        with pytest.raises(ValueError, match="position_ids skip positions and also fall"):
            model(IDS, position_ids=ids, use_cache=False)


def test_a_temperature_is_that_of_the_position():
    model = patch_model(tiny("llama"), [Rope(), Temperature("log_n", length=4)])
    positions = Positions.causal(LENGTH).follow(REAL[:1])
    query, key, value = torch.randn(3, 1, 4, LENGTH, 8, generator=torch.Generator().manual_seed(0))
    addition = model.model.layers[0].self_attn.posenc_additions.temperature
    found = addition(Call(query, key, value, positions, scaling=1.0)).query / query
    expected = (torch.log(REAL[0] + 1) / torch.log(torch.tensor(4.0))).clamp(min=1)
    assert (found[0, 0, :, 0] - expected).abs().max() < 1e-5


@torch.no_grad()
def test_a_window_counts_tokens():
    """A stock model without positions gets the biases of the formula, and sees four tokens, wherever they stand."""
    model = patch_model(tiny("llama"), "alibi", window=4, trainable=True).double()
    expected = patch_model(tiny("llama"), "nope").double()
    expected.set_attn_implementation("eager")
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    biases = [alibi(layer.self_attn.posenc).masked_fill(~seen, -1e30) for layer in model.model.layers]
    found = model(IDS, position_ids=REAL, **SHOWN).logits
    assert (found - stepwise(expected, biases)).abs().max() <= TOLERANCE
    wide = patch_model(tiny("llama"), "alibi").double()
    assert (found - wide(IDS, position_ids=REAL, **SHOWN).logits).abs().max() > 1e-3


@torch.no_grad()
def test_where_positions_travel_as_integers_they_are_refused():
    with pytest.raises(ValueError, match=r"the mask, which carries the positions .* takes whole"):
        patch_model(decoder("bloom"), "sinusoidal")(IDS, position_ids=REAL.float(), **SHOWN)
    with pytest.raises(ValueError, match="cannot compute this call: the positions are real numbers"):
        patch_model(tiny("llama"), "alibi", attention="toeplitz")(IDS, position_ids=REAL.float(), **SHOWN)
    with pytest.raises(ValueError, match="context parallelism takes whole position_ids only"):
        parallel._checked_batch({"input_ids": IDS, "position_ids": REAL.float()})
    model, cache = patch_model(tiny("llama"), "alibi"), DynamicCache()
    model(IDS[:, :6], past_key_values=cache)
    with pytest.raises(ValueError, match="position_ids do not continue the positions"):
        model(IDS[:, 6:], position_ids=REAL.float()[:, 6:], past_key_values=cache)
