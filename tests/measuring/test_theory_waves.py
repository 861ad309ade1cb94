"""Sums of waves and their integrals: against quadrature of another kind, closed forms and loops over a model's pairs."""

import cmath
import math

import pytest
import torch
from families import tiny, tokens
from torch.testing import assert_close

from hf_posenc import patch_model
from hf_posenc.analysis import decay
from hf_posenc.core.dims import Dims
from hf_posenc.theory import expansion, rotary_weights, wave_decay, wave_integral
from hf_posenc.theory.waves import wave_sum

EXACT = {"rtol": 0, "atol": 1e-12}
WIDE = torch.arange(-128, 129)
"""The distances that Su 2021 plots."""


def simpson(function, panels):
    """Integral from 0 to 1."""
    y = function(torch.linspace(0, 1, 2 * panels + 1, dtype=torch.float64))
    return (y[..., 0] + y[..., -1] + 4 * y[..., 1::2].sum(-1) + 2 * y[..., 2:-1:2].sum(-1)) / (6 * panels)


@pytest.mark.parametrize("base", [0.5, 1, 1.0000001, 1.11, 1000.0, 10000.0])
def test_integrals_of_exponentials(base):
    """Simpson with 8000 panels over the logarithm, where the waves are smooth."""
    expected = simpson(lambda s: torch.polar(torch.ones(257, len(s)).double(), WIDE[:, None] * base**-s), 8000)
    assert_close(wave_integral(WIDE, base), expected, rtol=0, atol=1e-9)
    if base == 10000:
        assert wave_integral(torch.tensor([-10.0]), base).real.item() == pytest.approx(0.682, abs=5e-4)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 3.0])
def test_integrals_of_powers(alpha):
    d = torch.tensor([0, 1, 7, 60])
    # Simpson in s = r^4: alpha = 0.5 is smooth there.
    expected = simpson(lambda r: torch.cos(d[:, None] * r ** (4 * alpha)) * 4 * r**3, 50000)
    assert_close(wave_integral(d, lambda t: t**alpha).real, expected, rtol=0, atol=1e-10)
    if alpha > 1:
        far = torch.tensor([4000, 52000]).double()
        limit = math.gamma(1 + 1 / alpha) * math.cos(math.pi / (2 * alpha)) * far ** (-1 / alpha)
        assert ((wave_integral(far, lambda t: t**alpha).real - limit).abs() < 2 / (far * alpha)).all()


def test_closed_forms_of_linear_frequencies():
    d = WIDE.double()
    found = wave_integral(WIDE, lambda t: t)
    expected = [cmath.exp(0.5j * x) * math.sin(x / 2) / (x / 2) if x else 1.0 for x in d.tolist()]
    assert_close(found, torch.tensor(expected, dtype=torch.complex128), **EXACT)
    # integral t e^(idt) dt = (e^(id) (1 - id) - 1) / d^2
    found = wave_integral(WIDE, lambda t: t, lambda t: t)
    expected = [(cmath.exp(1j * x) * (1 - 1j * x) - 1) / x**2 if x else 0.5 for x in d.tolist()]
    assert_close(found, torch.tensor(expected, dtype=torch.complex128), **EXACT)
    # A constant weight is a factor; a complex one turns.
    assert_close(wave_integral(WIDE, 100.0, 2j), 2j * wave_integral(WIDE, 100.0), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("distance", "theta", "message"),
    [(3, lambda t: 1 / (t - t), "finite between 0 and 1"), (10**9, lambda t: t, "oscillate too fast")],
)
def test_what_is_not_integrated(distance, theta, message):
    with pytest.raises(ValueError, match=message):
        wave_integral(torch.tensor([distance]), theta)


def test_sum_beside_the_integral():
    found = wave_decay(128, 10000.0, pairs=32)
    scheme = decay("sinusoidal", range(-128, 129), dims=Dims(1, 1, 64, 64, 1))
    assert_close(found.sum.real, scheme.scores[0, 0], **EXACT)
    assert_close(found.integral, wave_integral(WIDE, 10000.0), **EXACT)
    assert found.to_dict()["integral"][128] == [pytest.approx(1), pytest.approx(0)]

    h, w = torch.tensor([complex(u, 3 - u) for u in range(5)]), torch.tensor([0.5**u for u in range(5)])
    by_hand = [
        sum(a * cmath.exp(1j * d * b) for a, b in zip(h.tolist(), w.tolist(), strict=True)) / 5 for d in (-3, 10)
    ]
    assert_close(wave_sum(torch.tensor([-3, 10]), w, h), torch.tensor(by_hand, dtype=torch.complex128))
    many = wave_decay(128, lambda t: t**2, lambda t: 1 - t, pairs=20000)
    assert_close(many.sum, many.integral, rtol=0, atol=2e-3)  # a left Riemann sum


def test_waves_weighted_by_a_hessian():
    """The relative part of Su's sixth term, which `expansion` computes from products of the vectors themselves."""
    model, ids = patch_model(tiny("gpt2").double(), "sinusoidal", scale=1.0), tokens(1, 8)[0]
    found = expansion(model, ids, 2, 5, rows=32).diagonal
    weights = (found.diagonal[0::2] + found.diagonal[1::2]) / 2
    weighted = wave_sum(torch.tensor([-3, 3]), 10000 ** (-torch.arange(16).double() / 16), weights)
    assert weighted.real.tolist() == pytest.approx([found.relative / 16] * 2, rel=1e-9)


def by_loops(query, key, frequencies, layout, scaling):
    """Mean of q conj(k) over pairs that are not ahead, before rotation, of (T, H, D) each."""
    size, pairs = query.shape[-1], len(frequencies)
    total = torch.zeros(query.shape[1], pairs, dtype=torch.complex128)
    still = torch.zeros(query.shape[1], dtype=torch.float64)
    places = [(u, u + pairs) if layout == "half" else (2 * u, 2 * u + 1) for u in range(pairs)]
    count = 0
    for i in range(len(query)):
        for j in range(i + 1):
            count += 1
            for u, (a, b) in enumerate(places):
                q, k = torch.complex(query[i, :, a], query[i, :, b]), torch.complex(key[j, :, a], key[j, :, b])
                total[:, u] += q * k.conj()
            for n in range(2 * pairs, size):
                still += query[i, :, n] * key[j, :, n]
    return total / count * scaling, still / count * scaling


@pytest.mark.parametrize(("family", "layout"), [("llama", "half"), ("phi", "half"), ("gpt2", "interleaved")])
def test_what_rope_turns_in_a_model(family, layout):
    model, ids = tiny(family).double(), tokens(1, 12)
    if family == "gpt2":
        patch_model(model, "rope", layout=layout)
    found = rotary_weights(model, ids)
    decoder = model.get_decoder()
    with torch.no_grad():
        if family == "gpt2":
            entering = decoder.h[0].ln_1(decoder.wte(ids))
            query, key, _ = decoder.h[0].attn.c_attn(entering)[0].split(model.config.n_embd, -1)
        else:
            layer = decoder.layers[0]
            entering = layer.input_layernorm(decoder.embed_tokens(ids))
            query, key = (getattr(layer.self_attn, name)(entering)[0] for name in ("q_proj", "k_proj"))
    heads = model.config.num_attention_heads
    size = query.shape[-1] // heads
    query, key = query.view(12, heads, size), key.view(12, -1, size)
    key = key.repeat_interleave(heads // key.shape[1], 1)
    pairs = int(size * (model.config.rope_parameters.get("partial_rotary_factor", 1) if family == "phi" else 1)) // 2
    frequencies = torch.tensor([10000.0 ** (-u / pairs) for u in range(pairs)], dtype=torch.float64)
    assert_close(found.frequencies[0], frequencies, rtol=1e-5, atol=0)
    weights, still = by_loops(query, key, frequencies, layout, size**-0.5)
    scale = weights.abs().max().item()
    assert_close(found.weights[0], weights, rtol=0, atol=1e-5 * scale)  # models make cosines in float32
    assert_close(found.still[0], still, rtol=0, atol=1e-5 * scale)
    curve = [
        [(weights[h] * torch.polar(torch.ones(pairs).double(), d * frequencies)).real.sum() for d in (-9, 0, 30)]
        for h in range(heads)
    ]
    expected = torch.tensor(curve).double() + still[:, None]
    assert_close(found.decay([-9, 0, 30])[0], expected, rtol=0, atol=2e-5 * scale * pairs)
    assert found.to_dict()["layers"] == [0, 1]


def test_models_whose_pairs_are_not_looked_at():
    ids = tokens(1, 12)
    with pytest.raises(ValueError, match="rotates nothing"):
        rotary_weights(tiny("gpt2"), ids)
    with pytest.raises(ValueError, match="have different rotations"):
        rotary_weights(patch_model(tiny("llama"), "nope", layers=[1]), ids)
